"""Workers of the lab: how they pause, take turns, and last as long as the cluster says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import PeerError
from offbeat.run.coordination import Coordinator, record_death
from offbeat_lab.cluster import Cluster, SpeedChange, Straggling
from offbeat_lab.compare import turn_steps
from offbeat_lab.emulation import delaying
from offbeat_lab.emulation.delaying import StepTimeEmulator
from offbeat_lab.pauses import Pauses, StepLimit, barrier, stop_at
from offbeat_lab.worker import EvaluationPause

# No rank of a compared script trains on while the leader evaluates.


@pytest.fixture
def store() -> Any:
    return dist.HashStore()


def pauses(store: Any, world_size: int = 2, **options: Any) -> Iterator[EvaluationPause]:
    for rank in range(world_size):
        coordinator = Coordinator(store, rank, world_size, supervised=True)
        yield EvaluationPause(coordinator, **{"inform": pytest.fail, **options})


def test_a_rank_that_has_done_as_many_steps_begins_none_before_the_evaluation_is_over(
    store: Any,
) -> None:
    leader, other = pauses(store)
    other.step_done(5, 1.0)
    leader.begin(5, 1.0)
    happened = []

    def go_on() -> None:
        other.wait(5)
        happened.append("step 6")

    thread = threading.Thread(target=go_on)
    thread.start()
    happened.append("evaluated")
    leader.end()
    thread.join()
    assert happened == ["evaluated", "step 6"]


def test_the_leader_waits_for_a_rank_that_is_behind_and_the_time_is_that_rank_s(
    store: Any,
) -> None:
    leader, other = pauses(store, patience_s=60.0)
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(leader.begin(3, 1.5)))
    thread.start()
    for step in (1, 2, 3):
        other.wait(step - 1)  # would wait for ever if it were held for what it lacks
        other.step_done(step, 1.0 * step)
    thread.join()
    assert found == [3.0]
    leader.end()


def test_nobody_waits_for_the_dead(store: Any) -> None:
    leader, other, dead = pauses(store, world_size=3, patience_s=60.0)
    record_death(store, 2, deaths=1)
    other.step_done(4, 2.0)
    assert leader.begin(4, 1.0) == 2.0
    record_death(store, 0, deaths=1)
    other.wait(4)
    assert dead.is_evaluating is False


def test_a_leader_that_is_not_followed_evaluates_and_says_so_once(store: Any) -> None:
    told: list[str] = []
    leader, other = pauses(store, patience_s=0.0, inform=told.append)
    other.step_done(3, 0.5)
    assert [leader.begin(step, 1.0) for step in (7, 8)] == [1.0, 1.0]
    (notice,) = told
    assert notice.startswith("what was measured after 7 steps is of a model with fewer")
    assert "3 steps of worker 1" in notice


# The limit lets a worker train as far as it was told, wakes it at once when that changes, and
# lets it give up.


AT_MOST_S = 60.0


class Watched(threading.Condition):
    """A condition that says when somebody begins to wait on it, and counts how often somebody
    looked.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waiting = threading.Event()
        self.num_waits = 0
        self.patience_s: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.num_waits += 1
        self.patience_s.append(timeout)
        self.waiting.set()
        return super().wait(timeout)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def waiting_at_step_3(
    pool: ThreadPoolExecutor, give_up: threading.Event
) -> tuple[StepLimit, Future[None], Watched]:
    """A limit of three steps, and a worker that has done them and waits for more."""
    condition = Watched()
    limit = StepLimit(3, condition)
    future = pool.submit(limit.wait_beyond, 3, give_up)
    assert condition.waiting.wait(AT_MOST_S)
    return limit, future, condition


def test_a_limit_is_reached_at_the_step_it_names_and_beyond() -> None:
    limit = StepLimit(2)
    assert [limit.is_reached(steps_done) for steps_done in range(4)] == [False, False, True, True]
    limit.raise_to(3)
    assert [limit.is_reached(steps_done) for steps_done in range(4)] == [False, False, False, True]


def test_no_limit_is_never_reached() -> None:
    limit = StepLimit.unlimited()
    assert not limit.is_reached(10**12)
    limit.wait_beyond(10**12, threading.Event())


def test_waiting_where_there_is_nothing_to_wait_for_returns() -> None:
    StepLimit(1).wait_beyond(0, threading.Event())
    gave_up = threading.Event()
    gave_up.set()
    StepLimit(0).wait_beyond(0, gave_up)


def test_a_raised_limit_lets_the_worker_on(pool: ThreadPoolExecutor) -> None:
    limit, future, _ = waiting_at_step_3(pool, threading.Event())
    limit.raise_to(3)  # no step more than before
    assert not future.done()
    limit.raise_to(4)
    future.result(AT_MOST_S)


def test_a_worker_that_is_to_stop_gives_up_waiting(pool: ThreadPoolExecutor) -> None:
    give_up = threading.Event()
    limit, future, condition = waiting_at_step_3(pool, give_up)
    give_up.set()  # by a signal handler, which may not take a lock
    future.result(AT_MOST_S)
    assert limit.is_reached(3)
    # It looks again now and then, since nobody wakes it, but it does not spin.
    assert all(patience_s is not None and patience_s >= 0.05 for patience_s in condition.patience_s)


# Turns of a comparison: how long they are, what a rank waits at their end, and what is measured
# of strategies in which some ranks can run ahead of others.


class Ring:
    """Ranks that send to the next one after every step, over a link of their own, and step on when
    they have heard from the one before: as gossip does. Times are made up.
    """

    def __init__(self, compute_s: Sequence[float], transfer_s: Sequence[float]) -> None:
        self.compute_s = compute_s
        self.transfer_s = transfer_s
        self.link_free_s = [0.0] * len(compute_s)

    def train(self, begin_s: float, num_steps: int) -> list[float]:
        """When each rank has done so many steps, if all begin together."""
        size = len(self.compute_s)
        now_s = [begin_s] * size
        for _ in range(num_steps):
            sent_s = [now_s[rank] + self.compute_s[rank] for rank in range(size)]
            for rank in range(size):
                begins_s = max(sent_s[rank], self.link_free_s[rank])
                self.link_free_s[rank] = begins_s + self.transfer_s[rank]
            now_s = [max(sent_s[rank], self.link_free_s[rank - 1]) for rank in range(size)]
        return now_s

    def alone_s(self, num_steps: int) -> float:
        """Mean over ranks of a step's time where nothing interrupts the run."""
        self.link_free_s = [0.0] * len(self.compute_s)
        ends_s = self.train(0.0, num_steps)
        return sum(ends_s) / len(ends_s) / num_steps

    def by_turns_s(self, num_steps: int, turn_s: float, *, meets: bool) -> float:
        """The same in turns, of which each begins on a silent network. `meets`: whether ranks wait
        for the last one at the end of a turn.
        """
        size, done, now_s, step_s, met_s, total_s = len(self.compute_s), 0, 0.0, 0.0, 0.0, 0.0
        self.link_free_s = [0.0] * size
        while done < num_steps:
            now_s += 100.0  # the turns of others
            steps = min(turn_steps(turn_s, step_s, met_s), num_steps - done)
            ends_s = self.train(now_s, steps)
            last_s, done = max(ends_s), done + steps
            if meets and done < num_steps:
                met_s = last_s - min(ends_s)
                ends_s = [last_s] * size
            total_s += sum(ends_s) - size * now_s
            step_s, now_s = (last_s - now_s) / steps, last_s
        return total_s / size / num_steps


rings = st.integers(2, 6).flatmap(
    lambda size: st.builds(
        Ring,
        st.lists(st.floats(0.05, 0.5), min_size=size, max_size=size),
        st.lists(st.floats(0.01, 2.0), min_size=size, max_size=size),
    )
)


@given(rings, st.floats(0.1, 5.0))
def test_a_step_takes_as_long_by_turns_as_alone(ring: Ring, turn_s: float) -> None:
    alone_s = ring.alone_s(400)
    assert ring.by_turns_s(400, turn_s, meets=True) == pytest.approx(alone_s, rel=0.1)


def test_without_meeting_slow_links_catch_up_in_the_turns_of_others() -> None:
    """So that this model of a run shows what meeting is for."""
    links = [0.1] * 8 + [0.3] * 8 + [0.5] * 2
    ring = Ring([0.1] * 18, links)
    assert ring.by_turns_s(400, 1.0, meets=False) < 0.9 * ring.alone_s(400)


@given(st.floats(1e-3, 10), st.floats(1e-3, 10), st.floats(0, 10))
def test_a_turn_has_eight_steps_and_takes_as_long_as_asked_and_twenty_times_its_end(
    turn_s: float, step_s: float, met_s: float
) -> None:
    steps = turn_steps(turn_s, step_s, met_s)
    assert steps >= 8
    wanted_s = max(turn_s, 20 * met_s)
    assert (steps + 0.5) * step_s >= wanted_s * (1 - 1e-9)
    assert steps == 8 or (steps - 0.5) * step_s <= wanted_s * (1 + 1e-9)


# A turn's end


@contextmanager
def others(count: int) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(count) as pool:
        yield pool


def pauses_of(
    store: Any, rank: int, *, until: int = 4, meets: bool = True, target: int = 9
) -> tuple[Pauses, Coordinator]:
    coordinator = Coordinator(store, rank, 2, supervised=True)
    run: Any = SimpleNamespace(
        coordinator=coordinator,
        schedule=SimpleNamespace(target=target),
        attached=SimpleNamespace(session=SimpleNamespace(resting=nullcontext)),
    )
    stop: Any = SimpleNamespace(is_set=lambda: False)
    recorder: Any = None
    return Pauses(run, recorder, StepLimit(until), stop, meets=meets), coordinator


def test_a_turn_ends_when_the_last_rank_has_done_its_steps() -> None:
    store = dist.HashStore()
    (first, _), (second, coordinator) = (pauses_of(store, rank) for rank in (0, 1))
    with others(1) as pool:
        waiting = pool.submit(first.meet, 4)
        while coordinator.published("pause/4/0") is None:
            pass
        assert not waiting.done()
        second.meet(4)
        assert waiting.result(AT_MOST_S) > 0


@pytest.mark.parametrize(
    "leaves",
    [
        lambda store, peer: record_death(store, 1, deaths=1),
        lambda store, peer: peer.take_no_more_steps(),
        lambda store, peer: stop_at(peer, 3),
    ],
    ids=["dies", "is done", "stops"],
)
def test_nobody_waits_for_a_rank_that_does_not_come(
    leaves: Callable[[Any, Coordinator], None],
) -> None:
    store = dist.HashStore()
    (first, _), (_, peer) = (pauses_of(store, rank) for rank in (0, 1))
    with others(1) as pool:
        waiting: Future[float] = pool.submit(first.meet, 4)
        while peer.published("pause/4/0") is None:
            pass
        leaves(store, peer)
        waiting.result(AT_MOST_S)


def test_within_a_turn_at_the_end_of_a_run_and_without_exchange_nobody_waits() -> None:
    store = dist.HashStore()
    assert pauses_of(store, 0)[0].meet(3) == 0.0
    assert pauses_of(store, 0, target=4)[0].meet(4) == 0.0
    assert pauses_of(store, 0, meets=False)[0].meet(4) == 0.0
    assert pauses_of(store, 0, target=4)[0].meet(4, clocks_stop=True) == 0.0
    assert pauses_of(store, 0, meets=False)[0].meet(3, clocks_stop=True) == 0.0


def test_within_a_turn_ranks_wait_for_each_other_where_clocks_stop() -> None:
    store = dist.HashStore()
    (first, _), (second, coordinator) = (pauses_of(store, rank) for rank in (0, 1))
    with others(1) as pool:
        waiting = pool.submit(first.meet, 3, clocks_stop=True)
        while coordinator.published("pause/3/0") is None:
            pass
        assert not waiting.done()
        second.meet(3, clocks_stop=True)
        assert waiting.result(AT_MOST_S) > 0


def test_a_barrier_names_who_is_gone() -> None:
    store = dist.HashStore()
    first = Coordinator(store, 0, 2, supervised=True)
    record_death(store, 1, deaths=1)
    with pytest.raises(PeerError, match="worker 1 did not come to 'written'") as raised:
        barrier(first, "written", [0, 1])
    assert raised.value.rank == 1
    barrier(first, "written alone", [0])


# Emulated compute under a clock of its own: whatever is slept, forward and backward take what the
# cluster says.


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


@pytest.mark.parametrize("passes", [1, 4])
@pytest.mark.parametrize(
    ("cluster", "pass_s"),
    [(Cluster(workers=1, speeds=(0.5,)), 0.03 / 0.5), (Cluster(workers=1, step_s=0.2), 0.2)],
)
def test_a_worker_sleeps_once_for_each_of_a_steps_passes(
    clock: Clock, cluster: Cluster, pass_s: float, passes: int
) -> None:
    step_time = StepTimeEmulator(cluster, 0, by_sleeping=True)
    for number in (1, 2):
        began_s = clock.now_s
        step_time.begin_step(number)
        for _ in range(passes):
            clock.work(0.01)
            step_time.before_backward(0.0)
            with step_time.backward():
                clock.work(0.02)
    assert clock.now_s - began_s == pytest.approx(passes * pass_s)
    assert step_time.num_late == 0
