"""The timeline: what every worker does in a window of steps, so that one sees who waits for whom.

The beginning and the end of a step and the moment a worker came to wait are as recorded, and so is how long each phase
took. Their order between these moments is drawn as it is in nearly all steps: computing, sleeping and encoding before the
worker is ready; then waiting for late ones, transfer, and what is left of encoding and computing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offbeat.lab.breakdown import Steps
from offbeat.report.data import Report, Run

PHASES = ("compute", "padded", "encode", "waiting", "transfer")
_DRAWN = (*PHASES, "encode", "compute")
"""Order of the phases of a step; the last two are what is left of them after the exchange."""

MAX_BARS = 2000
_MOST_STEPS = 40
_FEWEST_STEPS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """One run's window.

    Attributes:
        contestant, run: numbers, by which the page's filters find it.
        steps: numbers of the steps.
        phases: the phase of each length in `cells`.
        cells: for each worker and step: the beginning, then the length of each phase, in microseconds from the window's start.
        last: for each step the worker that was ready last, or -1.
        ready: for each step when it was, in microseconds from the window's start.
    """

    contestant: int
    run: int
    steps: list[int]
    phases: Sequence[str]
    cells: list[list[list[int]]]
    last: list[int]
    ready: list[int]


def timelines(report: Report) -> Iterator[Timeline]:
    """The middle of every run that has steps."""
    for number, contestant in enumerate(report.contestants):
        for position, run in enumerate(contestant.runs):
            steps = middle(run)
            if steps.num_steps:
                yield _timeline(number, position, steps)


def middle(run: Run) -> Steps:
    """A window of steps from the middle of the last attempt, few enough to be drawn."""
    steps = run.steps
    first = int(np.searchsorted(steps.step, run.last_start, side="right"))
    wanted = int(np.clip(MAX_BARS // (len(_DRAWN) * max(1, steps.num_ranks)), _FEWEST_STEPS, _MOST_STEPS))
    available = steps.num_steps - first
    start = first + max(0, available - wanted) // 2
    return steps.window(start, start + min(wanted, available))


def phase_lengths_s(steps: Steps) -> NDArray[np.float64]:
    """How long each phase of `_DRAWN` lasts, in seconds, shape (phases, workers, steps). They add up to at most the step.

    Waiting that happened while this worker was still computing has no place of its own and is left out.
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


def _timeline(contestant: int, run: int, steps: Steps) -> Timeline:
    origin_s = float(steps.began_s.min())
    cells = np.concatenate([(steps.began_s - origin_s)[None], phase_lengths_s(steps)])
    exchanged = ~np.isnan(steps.ready_s).any(axis=0) & (steps.num_ranks > 1)
    last = np.where(exchanged, np.nan_to_num(steps.ready_s).argmax(axis=0), -1)
    ready_s = np.where(exchanged, np.fmax.reduce(steps.ready_s) - origin_s, 0.0)
    return Timeline(
        contestant=contestant,
        run=run,
        steps=steps.step.tolist(),
        phases=_DRAWN,
        cells=_microseconds(cells.transpose(1, 2, 0)),
        last=last.tolist(),
        ready=_microseconds(ready_s),
    )


def _microseconds(seconds: NDArray[np.float64]) -> list:  # type: ignore[type-arg]  # nested as the array is
    return list(np.rint(seconds * 1e6).astype(np.int64).tolist())
