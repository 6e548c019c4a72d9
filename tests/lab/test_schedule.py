"""Stopping anywhere and going on gives the batches that never stopping would have given."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import CheckpointError
from offbeat.megabatch.loader import mega_batch_span, num_mega_batches
from offbeat.run.config import RunConfig
from offbeat.run.step_recorder import Position
from offbeat_lab.config import Request, batch_sizes, resolve
from offbeat_lab.schedule import BatchSchedule, ClaimedSchedule, position_from_json
from offbeat_lab.tasks import TASKS


class Numbers(TASKS["digits"]):  # type: ignore[misc, valid-type]
    """A batch is the numbers of its samples; seven steps an epoch with two workers."""

    num_samples = 60

    def batch(self, samples: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(samples), torch.zeros(len(samples))


TASK = Numbers(Numbers.options_type(batch_size=4))


@cache
def config(**length: int) -> RunConfig:
    run = resolve(Request(task="digits", strategy="allreduce", workers=2, **length))
    return replace(run, task_options={})


def run(schedule: BatchSchedule, stop_after: int | None = None) -> list[torch.Tensor]:
    taken = []
    for batch in schedule.batches(
        lambda steps_done: stop_after is not None and steps_done >= stop_after
    ):
        taken.append(batch[0])
        schedule.advance()
    return taken


def take(schedule: BatchSchedule, stop_after: int | None, seen: dict[int, list[int]]) -> int:
    """Like `run`, noting samples by epoch; returns the number of batches."""
    count = 0
    for batch in schedule.batches(
        lambda steps_done: stop_after is not None and steps_done >= stop_after
    ):
        seen[schedule.position.epoch].extend(batch[0].tolist())
        schedule.advance()
        count += 1
    return count


@given(stop_after=st.integers(0, 25), length=st.sampled_from([{"epochs": 3}, {"steps": 17}]))
def test_a_stop_changes_nothing(stop_after: int, length: dict[str, int]) -> None:
    settings = config(**length)
    straight = run(BatchSchedule(settings, TASK, Position(), rank=1, world_size=2))
    first = BatchSchedule(settings, TASK, Position(), rank=1, world_size=2)
    before = run(first, stop_after)
    second = BatchSchedule(
        settings, TASK, position_from_json(asdict(first.position)), rank=1, world_size=2
    )
    assert len(before) + second.target - second.position.step == first.target == len(straight)
    together = before + run(second)
    assert len(straight) == len(together) == (17 if "steps" in length else 21)
    assert all(torch.equal(left, right) for left, right in zip(straight, together, strict=True))


@given(shares=st.lists(st.floats(0.01, 10), min_size=1, max_size=4), stop_after=st.integers(0, 8))
def test_with_batches_in_proportion_each_step_has_the_samples_that_it_has_with_equal_ones(
    shares: list[float], stop_after: int
) -> None:
    """Also where a run was stopped."""
    size = len(shares)
    equal = replace(config(steps=8), workers=size)
    uneven = replace(equal, batch_shares=shares)
    sizes = batch_sizes(uneven, TASK)
    assert sizes is not None
    assert sum(sizes) == 4 * size
    assert all(
        least >= 1 and abs(least - 4 * size * share / sum(shares)) <= size
        for least, share in zip(sizes, shares, strict=True)
    )
    steps: dict[bool, list[torch.Tensor]] = {}
    for is_uneven, settings in ((False, equal), (True, uneven)):
        by_rank = []
        for rank in range(size):
            first = BatchSchedule(settings, TASK, Position(), rank=rank, world_size=size)
            taken = run(first, stop_after)
            position = position_from_json(asdict(first.position))
            rest = BatchSchedule(settings, TASK, position, rank=rank, world_size=size)
            by_rank.append(taken + run(rest))
        if is_uneven:
            assert [[len(batch) for batch in batches] for batches in by_rank] == [
                [samples] * 8 for samples in sizes
            ]
        steps[is_uneven] = [torch.cat(batches) for batches in zip(*by_rank, strict=True)]
    for before, after in zip(steps[False], steps[True], strict=True):
        assert torch.equal(before, after)


@given(stop_after=st.integers(0, 13), workers=st.integers(1, 9))
def test_with_other_workers_no_sample_is_seen_twice_in_an_epoch(
    stop_after: int, workers: int
) -> None:
    settings = config(epochs=2)
    seen: dict[int, list[int]] = {0: [], 1: []}
    first = [
        BatchSchedule(settings, TASK, Position(), rank=rank, world_size=2) for rank in range(2)
    ]
    for schedule in first:
        take(schedule, stop_after, seen)
    stopped = asdict(first[0].position)
    second = [
        BatchSchedule(settings, TASK, position_from_json(stopped), rank=rank, world_size=workers)
        for rank in range(workers)
    ]
    assert len({take(schedule, None, seen) for schedule in second}) == 1
    assert all(schedule.position.epoch == 2 for schedule in second)
    assert all(len(set(samples)) == len(samples) for samples in seen.values())


def claimed(
    settings: RunConfig, position: Position, *, mega_batch: int, workers: int = 2
) -> ClaimedSchedule:
    return ClaimedSchedule(
        settings, position, num_samples=60, mega_batch=mega_batch, samples_per_step=4 * workers
    )


def merge(schedule: ClaimedSchedule, number: int, mega_batch: int) -> None:
    """Mega-batch `number` of the run, from 0, is merged."""
    epoch, place = divmod(number + 1, num_mega_batches(60, mega_batch))
    schedule.merged(epoch, mega_batch_span(60, mega_batch, place).begin)


@given(steps=st.integers(1, 40), mega_batch=st.integers(16, 70), sample=st.integers(0, 399))
def test_a_sample_is_trained_on_at_the_progress_that_it_has_in_step(
    steps: int, mega_batch: int, sample: int
) -> None:
    schedule = claimed(config(steps=steps), Position(), mega_batch=mega_batch)
    in_step = sample // 8
    progress = schedule.progress_at(*divmod(sample, 60))
    assert 0 < progress < 1
    if in_step < schedule.target:
        assert progress == (in_step + 0.5) / schedule.target


@given(
    mega_batch=st.integers(16, 70),
    length=st.sampled_from([{"epochs": 3}, {"steps": 1}, {"steps": 17}, {"steps": 23}]),
    stop_after=st.integers(0, 6),
)
def test_steps_of_merges_follow_each_other_and_a_stop_changes_nothing(
    mega_batch: int, length: dict[str, int], stop_after: int
) -> None:
    settings = config(**length)
    schedule = claimed(settings, Position(), mega_batch=mega_batch)
    target, steps, number = schedule.target, [0], 0
    while not schedule.complete:
        foretold = schedule.step_of_next_merge
        merge(schedule, number, mega_batch)
        assert schedule.position.step == foretold
        number += 1
        steps.append(schedule.position.step)
        if number == stop_after:
            schedule = claimed(
                settings, position_from_json(asdict(schedule.position)), mega_batch=mega_batch
            )
            assert schedule.target == target
    assert all(before < after for before, after in pairwise(steps))
    assert steps[-1] == target
    if "steps" in length:
        assert steps[-2] < length["steps"] <= target
    else:
        assert (schedule.position.epoch, schedule.position.num_samples) == (3, 0)


@given(mega_batch=st.integers(48, 70), stop_after=st.integers(1, 3), workers=st.integers(1, 6))
def test_with_other_workers_claimed_steps_go_on_from_where_they_were(
    mega_batch: int, stop_after: int, workers: int
) -> None:
    first = claimed(config(epochs=5), Position(), mega_batch=mega_batch)
    for number in range(stop_after):
        merge(first, number, mega_batch)
    done = first.position.step
    second = claimed(
        config(epochs=5),
        position_from_json(asdict(first.position)),
        mega_batch=mega_batch,
        workers=workers,
    )
    assert second.position.step == done
    merge(second, stop_after, mega_batch)
    assert second.position.step > done
    assert second.target == done + (5 * 60 // (4 * workers) - stop_after * 60 // (4 * workers))


def test_a_foreign_position_is_refused() -> None:
    with pytest.raises(CheckpointError, match="position"):
        position_from_json({"steps": 3})
