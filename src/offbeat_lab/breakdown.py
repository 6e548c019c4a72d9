"""Where a run's time went, from its events: who was late, who waited for whom, and what was
transfer. Whether one worker is the slow one is decided here, for findings and the page alike.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offbeat.run.records import StepEvent
from offbeat_lab.records import Record
from offbeat_lab.statistics import block_slices, num_warm_up

Matrix = NDArray[np.float64]
"""Shape (ranks, steps)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Steps:
    """The events of a run as matrices, shape (ranks, steps), over the steps that some rank has
    finished.

    NaN stands where a rank has no such step: it was dead, or did not come so far; where samples are
    claimed, it had fewer and larger batches than others. Several events of one step are added up,
    their loss the last one's.

    Attributes:
        step: number of each step, shape (steps,).
        merged: numbers of the steps after which models were merged, where samples are claimed;
            empty elsewhere.
        loss: NaN where it was not finite.
        began_s, ready_s: on rank 0's monotonic clock; `ready_s` is NaN where a rank waited for
            no peer.
        duration_s, compute_s, encode_s, wait_s, padded_s: as in `StepEvent`.
        batch_size, bytes_sent, messages_sent, skipped: as in `StepEvent`.
    """

    step: NDArray[np.int64]
    merged: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    loss: Matrix
    batch_size: Matrix
    began_s: Matrix
    ready_s: Matrix
    duration_s: Matrix
    compute_s: Matrix
    encode_s: Matrix
    wait_s: Matrix
    padded_s: Matrix
    bytes_sent: Matrix
    messages_sent: Matrix
    skipped: Matrix

    @property
    def num_ranks(self) -> int:
        return int(self.loss.shape[0])

    @property
    def num_steps(self) -> int:
        return int(self.loss.shape[1])

    @property
    def done(self) -> NDArray[np.bool_]:
        """Whether a rank has finished a step, shape (ranks, steps)."""
        return ~np.isnan(self.duration_s)

    def step_s(self) -> NDArray[np.float64]:
        """How long each step took, mean over the ranks that did it, shape (steps,); where samples
        are claimed, over those that took part in its mega-batch.
        """
        return self._mean(self.duration_s)

    def _mean(self, values: Matrix) -> NDArray[np.float64]:
        num_ranks = self._took_part().sum(axis=0)
        mean: NDArray[np.float64] = np.nansum(values, axis=0) / np.maximum(1, num_ranks)
        return mean

    def _took_part(self) -> NDArray[np.bool_]:
        """Shape (ranks, steps). Where samples are claimed a rank with larger batches has no event
        of some steps, and one that has none in a whole mega-batch was dead.
        """
        if not self.merged.size:
            return self.done
        ends = np.searchsorted(self.step, self.merged, side="right")
        parts = np.split(self.done, ends, axis=1)
        there = [np.broadcast_to(part.any(axis=1, keepdims=True), part.shape) for part in parts]
        took_part: NDArray[np.bool_] = np.concatenate(there, axis=1)
        return took_part

    def block_step_s(self) -> list[float]:
        """Mean of `step_s` in blocks of consecutive steps, without the first ones."""
        step_s = self.step_s()
        return [float(step_s[each].mean()) for each in self._blocks()]

    def per_step(self, counted: Matrix) -> float:
        """Mean of `bytes_sent` or `messages_sent` over ranks and over the steps of `block_step_s`.
        The first steps may be dense where later ones are not, and what is sent at the end of a run
        belongs to no step.
        """
        blocks = self._blocks()
        return float(self._mean(counted)[blocks[0].start : blocks[-1].stop].mean())

    def samples_per_s(self) -> float:
        """Of all ranks together: the sum over ranks of samples over the time these took, and
        nothing for steps not done.

        Where samples are claimed, a rank has done what it has claimed.
        """
        if not self.num_steps:
            return 0.0
        seconds, samples = np.nansum(self.duration_s, axis=1), np.nansum(self.batch_size, axis=1)
        rates = np.divide(samples, seconds, out=np.zeros_like(seconds), where=seconds > 0)
        there = np.ones(self.num_ranks) if self.merged.size else self.done.mean(axis=1)
        return float((rates * there).sum())

    def block_samples_per_s(self) -> list[float]:
        """`samples_per_s` in blocks of consecutive steps, without the first ones.

        A rank that is there has its rate of the whole run, and a block that took longer than its
        ranks take on average lowers all rates alike. Ranks that share cores are fast by turns, and
        rates of each block and rank alone would be higher in sum than what was ever done.
        """
        if self.merged.size:  # a merge, for which all wait, ends each block
            return [self.window(each.start, each.stop).samples_per_s() for each in self._blocks()]
        counts = np.maximum(1, self.done.sum(axis=1))
        typical_s = np.nansum(self.duration_s, axis=1) / counts
        per_step = np.nansum(self.batch_size, axis=1) / counts
        rates = np.divide(per_step, typical_s, out=np.zeros_like(typical_s), where=typical_s > 0)
        found = []
        for each in self._blocks():
            done, took_s = self.done[:, each], np.nansum(self.duration_s[:, each])
            expected_s = float((done.sum(axis=1) * typical_s).sum())
            slowdown = took_s / expected_s if expected_s else 1.0
            found.append(float((done.mean(axis=1) * rates).sum() / slowdown))
        return found

    def _blocks(self) -> list[slice]:
        """A mega-batch is a block, whole or not at all, since what it waits is in its last step.
        Where most steps exchange nothing, as with averages of weights, blocks end with an exchange:
        in those that hold none a step would seem to cost nothing but computing.
        """
        ends = [int(end) for end in np.searchsorted(self.step, self.merged, side="right")]
        first = 1 if len(ends) > 2 else 0  # batch sizes have not found themselves in the first
        return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)][
            first:
        ] or block_slices(self.num_steps, self._rare_exchanges())

    def _rare_exchanges(self) -> list[int]:
        """Behind how many steps each of the exchanges is over, where most steps have none."""
        ends = np.flatnonzero(np.nansum(self.bytes_sent, axis=0) > 0) + 1
        return ends.tolist() if 2 * ends.size < self.num_steps else []

    def in_step(self) -> NDArray[np.bool_]:
        """Whether all ranks that did a step were in it at the same time, shape (steps,). Not so
        where no rank waits.
        """
        began_s, ended_s = self.began_s, self.began_s + self.duration_s
        together: NDArray[np.bool_] = np.fmax.reduce(began_s, axis=0) <= np.fmin.reduce(
            ended_s, axis=0
        )
        return together

    def lateness_s(self) -> Matrix:
        """How long after the first rank each rank came to wait for its peers; NaN in steps without
        an exchange.

        Straggling is seen here and nowhere else: all ranks leave a synchronous step at the same
        time. NaN too where ranks were not in the step together, since then they are not late for
        each other.
        """
        return np.where(self.in_step(), self.ready_s - _over_ranks(np.fmin, self.ready_s), np.nan)

    def waiting_for_others_s(self) -> Matrix:
        """The part of `wait_s` in which a rank was still to come. The rest is transfer. NaN where
        a rank has no such step.
        """
        longest_s = _over_ranks(np.fmax, self.ready_s) - self.ready_s
        return np.where(self.done, np.minimum(self.wait_s, np.nan_to_num(longest_s)), np.nan)

    def without_pauses(self) -> Steps:
        """As if no rank had done anything between its steps that others did not, such as evaluate:
        nobody is late by that, and what others waited for it belongs to no step.

        Not where samples are claimed: ranks there are at different batches at any time.
        """
        if self.merged.size:
            return self
        between_s = np.diff(self.began_s, axis=1, prepend=np.nan)
        between_s[:, 1:] -= self.duration_s[:, :-1]
        paused_s = np.nan_to_num(between_s - _over_ranks(np.fmin, between_s))
        # Where no rank waits, steps of one number have nothing to do with each other.
        paused_s = np.where(self.in_step(), paused_s, 0.0)
        moved = replace(self, began_s=self.began_s - paused_s, ready_s=self.ready_s - paused_s)
        waited_s = np.maximum(0.0, self.waiting_for_others_s() - moved.waiting_for_others_s())
        return replace(moved, wait_s=self.wait_s - waited_s, duration_s=self.duration_s - waited_s)

    def window(self, start: int, stop: int | None = None) -> Steps:
        """Columns `start` to `stop`."""
        return replace(
            self, **{name: getattr(self, name)[..., start:stop] for name in ("step", *_COLUMNS)}
        )

    def settled(self) -> Steps:
        """Without the first steps, which are not typical."""
        return self.window(num_warm_up(self.num_steps))

    def shares(self) -> dict[str, float]:
        """Fractions of the time of all steps by phase: "compute", "encode", "wait" (for others),
        "transfer".
        """
        waiting_s = self.waiting_for_others_s()
        parts = {
            "compute": self.compute_s,
            "encode": self.encode_s,
            "wait": waiting_s,
            "transfer": self.wait_s - waiting_s,
        }
        whole_s = float(np.nansum(self.duration_s)) or 1.0
        return {name: float(np.nansum(part)) / whole_s for name, part in parts.items()}


_COLUMNS: Final = tuple(
    field.name for field in fields(Steps) if field.name not in ("step", "merged")
)
_TIMES: Final = ("began_s", "ready_s")
_ADD_UP: Final = (
    "batch_size",
    "duration_s",
    "compute_s",
    "encode_s",
    "wait_s",
    "padded_s",
    "bytes_sent",
    "messages_sent",
)


def read_steps(record: Record, *, last_bytes: float = math.inf) -> Steps:
    """The events of all ranks of `record`, as far as they are in the last `last_bytes` of their
    files. Raises `RecordError` for a damaged one.
    """
    ranks = range(record.config.workers)
    by_rank = [_by_step(record.events(rank, last_bytes=last_bytes)) for rank in ranks]
    merged = np.array([mega_batch.step for mega_batch in record.mega_batches()], dtype=np.int64)
    numbers = sorted(set().union(*by_rank))
    hosts = [heads[-1] if (heads := record.heads(rank)) else None for rank in range(len(by_rank))]
    columns = {name: _matrix(name, by_rank, numbers) for name in _COLUMNS}
    for rank, host in enumerate(hosts):
        if host is not None and hosts[0] is not None and host.host != hosts[0].host:
            for name in _TIMES:
                columns[name][rank] += host.monotonic_to_unix_s - hosts[0].monotonic_to_unix_s
    steps = Steps(step=np.array(numbers, dtype=np.int64), merged=merged, **columns)
    return steps.without_pauses()


def _by_step(events: Iterable[StepEvent]) -> dict[int, StepEvent]:
    """Events by step; where samples are claimed, a rank may have several in one."""
    found: dict[int, StepEvent] = {}
    for event in events:
        before = found.get(event.step)
        found[event.step] = event if before is None else combine_events(before, event)
    return found


def combine_events(first: StepEvent, second: StepEvent) -> StepEvent:
    """Two events of one step as one; its loss is the second one's."""
    sums = {name: getattr(first, name) + getattr(second, name) for name in _ADD_UP}
    sums["arrivals"] = [*first.arrivals, *second.arrivals]
    ready_s = second.ready_s if first.ready_s is None else first.ready_s
    return replace(
        second,
        began_s=first.began_s,
        ready_s=ready_s,
        skipped=first.skipped or second.skipped,
        **sums,
    )


def _matrix(name: str, by_rank: list[dict[int, StepEvent]], steps: list[int]) -> Matrix:
    rows = [[getattr(events.get(step), name, None) for step in steps] for events in by_rank]
    return np.array(rows, dtype=np.float64).reshape(len(by_rank), len(steps))  # None becomes NaN


def _over_ranks(function: np.ufunc, values: Matrix) -> Matrix:
    """`function` reduced over ranks, ignoring NaN, shape (1, steps)."""
    reduced: Matrix = function.reduce(values, axis=0, keepdims=True)
    return reduced


_TOGETHER = 0.02
"""Arrivals nearer to each other than this part of a step are called together."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lateness:
    """How late workers were, over all runs of a strategy, the first steps left out.

    Attributes:
        mean_s: shape (workers,), mean time after the first one.
        last_share: shape (workers,), share of the steps in which this worker was the last one.
        spread_s: mean time from the first worker to the last.
        step_s: mean duration of a step.
    """

    mean_s: NDArray[np.float64]
    last_share: NDArray[np.float64]
    spread_s: float
    step_s: float

    @property
    def slow_worker(self) -> int | None:
        """The worker that is last in most steps, if there is one and its peers notice it."""
        slowest = int(np.argmax(self.last_share))
        mostly = self.last_share[slowest] >= max(0.5, 1.5 / len(self.mean_s))
        return slowest if mostly and not self.together else None

    @property
    def together(self) -> bool:
        """Whether all workers come at the same time, as far as a step's length goes."""
        return self.spread_s < _TOGETHER * self.step_s


def slow_worker_of(named: Iterable[int | None]) -> int | None:
    """The slow worker of several strategies on one cluster: the one that is slow under at least
    half of them, of several such the lowest.

    Args:
        named: the slow worker, or None, under each strategy whose workers wait for each other.
    """
    of_each = list(named)
    votes = Counter(worker for worker in of_each if worker is not None)
    often = [worker for worker, count in votes.items() if 2 * count >= len(of_each)]
    return min(often, default=None)


def lateness(runs: Sequence[Steps]) -> Lateness | None:
    """What the steps of `runs` say about lateness; None where no step had two workers that
    exchanged something.
    """
    late = [steps.settled().lateness_s() for steps in runs if steps.num_ranks > 1]
    late = [values[:, ~np.isnan(values).any(axis=0)] for values in late]
    late = [values for values in late if values.size]
    if not late or len({len(values) for values in late}) > 1:
        return None
    together = np.concatenate(late, axis=1)
    last = np.bincount(together.argmax(axis=0), minlength=len(together))
    return Lateness(
        mean_s=together.mean(axis=1),
        last_share=last / together.shape[1],
        spread_s=float(together.max(axis=0).mean()),
        step_s=float(
            np.mean([steps.settled().step_s().mean() for steps in runs if steps.num_steps])
        ),
    )
