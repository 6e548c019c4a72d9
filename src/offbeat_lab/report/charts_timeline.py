"""The timeline: what every worker does in a window of steps, so that one sees who waits for whom.

The beginning and the end of a step and the moment a worker came to wait are as recorded, and so is
how long each phase took. Their order between these moments is drawn as it is in nearly all steps:
computing, sleeping and encoding before the worker is ready; then waiting for late ones, transfer,
and what is left of encoding and computing.

Pauses between steps, in which other contestants had their turn, are left out.

Where workers keep step, a window is some steps; where they do not, it is the time that some steps
of one worker take, and what its peers did in it. A window that a worker's death falls into is the
one to look at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from offbeat_lab.breakdown import Steps
from offbeat_lab.report.data import PageContent, RunResults

PHASES = ("compute", "padded", "encode", "waiting", "transfer")
_DRAWN = (*PHASES, "encode", "compute")
"""Order of the phases of a step; the last two are what is left of them after the exchange."""

MAX_BARS = 2000
_MOST_STEPS = 40
_FEWEST_STEPS = 3
_BEFORE_DEATH = 4
_PAUSE_STEPS = 5.0
"""All workers standing between two steps for longer than so many usual steps is a pause."""


Numbers = NDArray[np.int64]
Cell = list[int] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineChart:
    """One run's window.

    Attributes:
        contestant, run: numbers, by which the page's filters find it.
        steps: for each worker the numbers of its steps; 0 where it has none.
        reference: the worker by whose steps the window goes.
        apart: whether workers do not keep step, so that a column is not one step.
        phases: the phase of each length in `cells`.
        cells: for each worker and step: the beginning, then the length of each phase, in
            microseconds from the window's start; null where the worker has no such step.
        last: for each step the worker that was ready last, or -1.
        ready: for each step when it was, in microseconds from the window's start.
        gone: (worker, when) for those that died, likewise.
    """

    contestant: int
    run: int
    steps: list[list[int]]
    reference: int
    apart: bool
    phases: Sequence[str]
    cells: list[list[Cell]]
    last: list[int]
    ready: list[int]
    gone: list[tuple[int, int]]


def timelines(report: PageContent) -> Iterator[TimelineChart]:
    """The window of every run that has steps."""
    for number, contestant in enumerate(report.contestants):
        for position, run in enumerate(contestant.runs):
            window = middle(run)
            if window.num_steps:
                yield _timeline(number, position, run, window)


def middle(run: RunResults) -> Steps:
    """A window of steps from the middle of the last attempt, or around the first death in it, few
    enough to be drawn.
    """
    steps = run.steps
    first = int(np.searchsorted(steps.step, run.last_start, side="right"))
    wanted = int(
        np.clip(MAX_BARS // (len(_DRAWN) * max(1, steps.num_ranks)), _FEWEST_STEPS, _MOST_STEPS)
    )
    available = steps.num_steps - first
    start = first + max(0, available - wanted) // 2
    if run.losses:
        death = int(np.searchsorted(steps.step, run.losses[0].step))
        start = int(np.clip(death - _BEFORE_DEATH, first, first + max(0, available - wanted)))
    return steps.window(start, start + min(wanted, available))


def side_by_side(steps: Steps, window: Steps) -> tuple[Steps, Numbers, int]:
    """`window` by time: what every worker did while one worker did the window's steps.

    Args:
        steps: of the whole run.
        window: some of its columns.

    Returns:
        Steps whose columns no longer are of one number, the numbers of steps, shape (ranks,
        columns), and that one worker: the one that did most of the window, of several the first.
        Where workers keep step, that is the window as it is.
    """
    reference = int(window.done.sum(axis=1).argmax())
    if window.in_step().all():
        return window, np.where(window.done, window.step, 0), reference
    from_s = np.nanmin(window.began_s[reference])
    until_s = np.nanmax(window.began_s[reference] + window.duration_s[reference])
    inside = steps.done & (steps.began_s + steps.duration_s > from_s) & (steps.began_s < until_s)
    chosen = [np.flatnonzero(row)[: 2 * window.num_steps] for row in inside]
    columns = max(row.size for row in chosen)
    places = np.array([np.pad(row, (0, columns - row.size), constant_values=-1) for row in chosen])
    none = places < 0
    matrices = {
        field.name: np.where(
            none,
            np.nan,
            np.take_along_axis(getattr(steps, field.name), np.maximum(places, 0), axis=1),
        )
        for field in fields(Steps)
        if field.name not in ("step", "merged")
    }
    return (
        Steps(step=np.arange(columns), merged=steps.merged, **matrices),
        np.where(none, 0, steps.step[places]),
        reference,
    )


def without_pauses(steps: Steps) -> Steps:
    """`steps` with times as if the pauses between them had not been."""
    began_s = steps.began_s[steps.done]
    ended_s = (steps.began_s + steps.duration_s)[steps.done]
    if not began_s.size:
        return steps
    order = np.argsort(began_s, kind="stable")
    began_s, so_far_s = began_s[order], np.maximum.accumulate(ended_s[order])
    gaps_s = np.concatenate([[0.0], np.maximum(0.0, began_s[1:] - so_far_s[:-1])])
    usual_s = float(np.median(steps.duration_s[steps.done]))
    left_out_s = np.cumsum(np.where(gaps_s > _PAUSE_STEPS * usual_s, gaps_s, 0.0))

    def shifted(times_s: NDArray[np.float64]) -> NDArray[np.float64]:
        place = np.searchsorted(began_s, np.nan_to_num(times_s), side="right") - 1
        shifted_s: NDArray[np.float64] = times_s - left_out_s[np.maximum(place, 0)]
        return shifted_s

    return replace(steps, began_s=shifted(steps.began_s), ready_s=shifted(steps.ready_s))


def phase_lengths_s(steps: Steps) -> NDArray[np.float64]:
    """How long each phase of `_DRAWN` lasts, in seconds, shape (phases, workers, steps). They add
    up to at most the step.

    Waiting that happened while this worker was still computing has no place of its own and is left
    out.
    """
    ready_s = np.where(np.isnan(steps.ready_s), steps.began_s + steps.duration_s, steps.ready_s)
    before = np.clip(ready_s - steps.began_s, 0.0, steps.duration_s)
    after = steps.duration_s - before
    padded = np.minimum(steps.padded_s, before)
    encode = np.minimum(steps.encode_s, before - padded)
    compute = before - padded - encode
    for_others = np.maximum(steps.waiting_for_others_s(), 0.0)
    waiting = np.minimum(for_others, after)
    transfer = np.minimum(steps.wait_s - for_others, after - waiting)
    left = after - waiting - transfer
    encode_after = np.minimum(steps.encode_s - encode, left)
    return np.stack([compute, padded, encode, waiting, transfer, encode_after, left - encode_after])


def _timeline(contestant: int, run: int, of: RunResults, window: Steps) -> TimelineChart:
    drawn, numbers, reference = side_by_side(of.steps, window)
    apart = drawn is not window
    steps = without_pauses(drawn)
    origin_s = float(np.nanmin(steps.began_s))
    cells = np.concatenate([(steps.began_s - origin_s)[None], phase_lengths_s(steps)]).transpose(
        1, 2, 0
    )
    exchanged = ~np.isnan(steps.ready_s).any(axis=0) & (steps.num_ranks > 1) & (not apart)
    ready_s = np.where(exchanged, np.fmax.reduce(steps.ready_s) - origin_s, 0.0)
    return TimelineChart(
        contestant=contestant,
        run=run,
        steps=numbers.tolist(),
        reference=reference,
        apart=apart,
        phases=_DRAWN,
        cells=[
            [_microseconds(cell) if there else None for cell, there in zip(*row, strict=True)]
            for row in zip(cells, steps.done, strict=True)
        ],
        last=np.where(exchanged, np.nan_to_num(steps.ready_s).argmax(axis=0), -1).tolist(),
        ready=_microseconds(ready_s),
        gone=[
            (loss.rank, _microseconds(ended_s - origin_s)[0])
            for loss in of.losses
            for ended_s in _ends(steps, numbers, loss.rank, loss.step)
        ],
    )


def _ends(steps: Steps, numbers: Numbers, worker: int, step: int) -> NDArray[np.float64]:
    """When `worker` ended `step`, shape (1,); shape (0,) where it did not, or somewhere else."""
    here = np.flatnonzero((numbers[worker] == step) & (step > 0))
    ended_s: NDArray[np.float64] = steps.began_s[worker, here] + steps.duration_s[worker, here]
    return ended_s


def _microseconds(seconds: NDArray[np.float64] | np.float64) -> list[int]:
    return [int(value) for value in np.rint(np.atleast_1d(seconds) * 1e6)]
