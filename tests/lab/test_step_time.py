"""Emulated compute under a clock of its own: whatever is slept, forward and backward take what the
cluster says.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat_lab.cluster import Cluster, SpeedChange, Straggling
from offbeat_lab.emulation import delaying
from offbeat_lab.emulation.delaying import StepTimeEmulator


class Clock:
    """Stands in for the module `time`: work takes CPU time, sleep does not."""

    def __init__(self) -> None:
        self.now_s = 1_000.0
        self.cpu_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def thread_time(self) -> float:
        return self.cpu_s

    def sleep(self, duration_s: float) -> None:
        assert duration_s >= 0
        self.now_s += duration_s

    def work(self, duration_s: float) -> None:
        self.now_s += duration_s
        self.cpu_s += duration_s


def step(
    step_time: StepTimeEmulator,
    clock: Clock,
    number: int,
    *,
    forward_s: float,
    backward_s: float,
    encode_s: float = 0.0,
    wait_s: float = 0.0,
    size: float = 1.0,
) -> float:
    """One step as the worker does it; returns how long it took."""
    began_s = clock.now_s
    step_time.begin_step(number)
    clock.work(forward_s)
    step_time.before_backward(0.0, size=size)
    with step_time.backward():
        clock.work(backward_s + encode_s)
        clock.sleep(wait_s)
    step_time.exclude_overhead(encode_s, wait_s)
    return clock.now_s - began_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(delaying, "time", clock)
    return clock


seconds = st.floats(0.001, 0.05)


@given(
    speed=st.sampled_from([1.0, 0.5, 0.1]),
    forward_s=seconds,
    backward_s=seconds,
    encode_s=st.floats(0, 0.1),
    wait_s=seconds,
)
def test_a_step_is_padded_to_what_an_accelerator_of_this_speed_takes(
    speed: float, forward_s: float, backward_s: float, encode_s: float, wait_s: float
) -> None:
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delaying, "time", clock)
        step_time = StepTimeEmulator(
            Cluster(workers=1, speeds=(speed,), step_s=0.2), 0, by_sleeping=False
        )
        own_s = {
            "forward_s": forward_s,
            "backward_s": backward_s,
            "encode_s": encode_s,
            "wait_s": wait_s,
        }
        step(step_time, clock, 1, **own_s)  # from here on it knows how long a backward pass takes
        for number in (2, 3):
            duration_s = step(step_time, clock, number, **own_s)
            assert duration_s - encode_s - wait_s == pytest.approx(0.2 / speed)
            assert step_time.slept_s == pytest.approx(0.2 / speed - forward_s - backward_s)
    assert step_time.num_late == 0


@given(
    speed=st.sampled_from([1.0, 0.25]), sizes=st.lists(st.floats(0.25, 2), min_size=2, max_size=5)
)
def test_a_larger_batch_takes_as_much_longer(speed: float, sizes: list[float]) -> None:
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delaying, "time", clock)
        step_time = StepTimeEmulator(
            Cluster(workers=1, speeds=(speed,), step_s=0.2), 0, by_sleeping=False
        )
        step(step_time, clock, 1, forward_s=0.01, backward_s=0.02)
        for number, size in enumerate(sizes, start=2):
            duration_s = step(
                step_time, clock, number, forward_s=0.01 * size, backward_s=0.02 * size, size=size
            )
            assert duration_s == pytest.approx(0.2 * size / speed)


def test_steps_longer_than_they_were_to_be_are_counted_and_not_padded(clock: Clock) -> None:
    step_time = StepTimeEmulator(Cluster(workers=1, step_s=0.2), 0, by_sleeping=False)
    for number in (1, 2, 3):
        step(step_time, clock, number, forward_s=0.15, backward_s=0.1)
    assert step_time.num_late == 2  # the first could not know how long its backward pass would be
    assert step_time.slept_s == 0.0
    step(step_time, clock, 4, forward_s=0.25, backward_s=0.0)
    assert step_time.num_late == 3


@given(seed=st.integers(0, 2**32 - 1), rank=st.integers(0, 3), number=st.integers(1, 50))
def test_a_straggler_sleeps_its_delay_and_nobody_else_does(
    seed: int, rank: int, number: int
) -> None:
    late = (Straggling(workers=2, delay_s=0.32, probability=0.5),)
    clock, cluster = Clock(), Cluster(workers=4, straggling=late, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delaying, "time", clock)
        step_time = StepTimeEmulator(cluster, rank, by_sleeping=False)
        duration_s = step(step_time, clock, number, forward_s=0.01, backward_s=0.02)
    assert duration_s == pytest.approx(0.03 + cluster.delay_s(rank, number))
    assert step_time.slept_s == pytest.approx(cluster.delay_s(rank, number))


def test_a_delay_comes_on_top_of_the_padded_step(clock: Clock) -> None:
    cluster = Cluster(workers=1, step_s=0.2, straggling=(Straggling(workers=(0,), delay_s=0.3),))
    step_time = StepTimeEmulator(cluster, 0, by_sleeping=False)
    step(step_time, clock, 1, forward_s=0.05, backward_s=0.05)
    assert step(step_time, clock, 2, forward_s=0.05, backward_s=0.05) == pytest.approx(0.5)
    assert step_time.slept_s == pytest.approx(0.4)


@given(speed=st.floats(0.05, 1), forward_s=seconds, backward_s=seconds)
def test_without_a_quota_a_slow_worker_sleeps_as_if_it_computed_for_longer(
    speed: float, forward_s: float, backward_s: float
) -> None:
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delaying, "time", clock)
        by_sleeping, by_quota = (
            StepTimeEmulator(Cluster(workers=1, speeds=(speed,)), 0, by_sleeping=asleep)
            for asleep in (True, False)
        )
        for number in (1, 2):
            slowed_s = step(by_sleeping, clock, number, forward_s=forward_s, backward_s=backward_s)
            plain_s = step(by_quota, clock, number, forward_s=forward_s, backward_s=backward_s)
    assert plain_s == pytest.approx(forward_s + backward_s)
    assert slowed_s == pytest.approx((forward_s + backward_s) / speed)


def test_a_change_of_speed_counts_from_its_time_on(clock: Clock) -> None:
    cluster = Cluster(workers=1, step_s=0.2, changes=(SpeedChange(at_s=5.0, worker=0, speed=0.5),))
    step_time = StepTimeEmulator(cluster, 0, by_sleeping=False)
    for elapsed_s, expected_s in ((0.0, 0.2), (4.9, 0.2), (5.0, 0.4), (100.0, 0.4)):
        began_s = clock.now_s
        step_time.begin_step(1)
        step_time.before_backward(elapsed_s)
        assert clock.now_s - began_s == pytest.approx(expected_s)


def test_what_is_not_described_is_not_paced(clock: Clock) -> None:
    for cluster in (None, Cluster(workers=1)):
        step_time = StepTimeEmulator(cluster, 0, by_sleeping=True)
        assert step(step_time, clock, 1, forward_s=0.01, backward_s=0.02) == pytest.approx(0.03)
        assert step_time.slept_s == 0.0
