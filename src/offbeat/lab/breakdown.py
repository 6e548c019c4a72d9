"""Where a run's time went, from its events: who was late, who waited for whom, and what was transfer."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offbeat.lab.records import Record, StepEvent
from offbeat.lab.statistics import num_warm_up

Matrix = NDArray[np.float64]
"""Shape (ranks, steps)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Steps:
    """The events of a run as matrices, shape (ranks, steps), over the steps that every rank has finished.

    Attributes:
        step: number of each step, shape (steps,).
        loss: NaN where it was not finite.
        began_s, ready_s: on rank 0's monotonic clock; `ready_s` is NaN where a rank waited for nobody.
        duration_s, compute_s, encode_s, wait_s, padded_s: as in `StepEvent`.
        batch_size, bytes_sent, messages_sent, skipped: as in `StepEvent`.
    """

    step: NDArray[np.int64]
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

    def lateness_s(self) -> Matrix:
        """How long after the first rank each rank came to wait for the others; NaN in steps without an exchange.

        Straggling is seen here and nowhere else: all ranks leave a synchronous step at the same time.
        """
        return self.ready_s - _over_ranks(np.fmin, self.ready_s)

    def waiting_for_others_s(self) -> Matrix:
        """The part of `wait_s` in which somebody was still to come. The rest is transfer."""
        longest_s = _over_ranks(np.fmax, self.ready_s) - self.ready_s
        return np.minimum(self.wait_s, np.nan_to_num(longest_s))

    def window(self, start: int, stop: int | None = None) -> Steps:
        """Columns `start` to `stop`."""
        return Steps(**{field.name: getattr(self, field.name)[..., start:stop] for field in fields(self)})

    def settled(self) -> Steps:
        """Without the first steps, which are not typical."""
        return self.window(num_warm_up(self.num_steps))

    def shares(self) -> dict[str, float]:
        """Fractions of the time of all steps by phase: "compute", "encode", "wait" (for others), "transfer"."""
        waiting_s = self.waiting_for_others_s()
        parts = {"compute": self.compute_s, "encode": self.encode_s, "wait": waiting_s, "transfer": self.wait_s - waiting_s}
        whole_s = float(self.duration_s.sum()) or 1.0
        return {name: float(part.sum()) / whole_s for name, part in parts.items()}


_COLUMNS: Final = tuple(field.name for field in fields(Steps) if field.name != "step")
_TIMES: Final = ("began_s", "ready_s")


def read_steps(record: Record) -> Steps:
    """The events of all ranks of `record`. Raises `RecordError` for a damaged one."""
    by_rank = [{event.step: event for event in record.events(rank)} for rank in range(record.config.workers)]
    common = sorted(set.intersection(*(set(events) for events in by_rank)))
    hosts = [heads[-1] if (heads := record.heads(rank)) else None for rank in range(len(by_rank))]
    columns = {name: _matrix(name, by_rank, common) for name in _COLUMNS}
    for rank, host in enumerate(hosts):
        if host is not None and hosts[0] is not None and host.host != hosts[0].host:
            for name in _TIMES:
                columns[name][rank] += host.monotonic_to_unix_s - hosts[0].monotonic_to_unix_s
    return Steps(step=np.array(common, dtype=np.int64), **columns)


def _matrix(name: str, by_rank: list[dict[int, StepEvent]], steps: list[int]) -> Matrix:
    rows = [[getattr(events[step], name) for step in steps] for events in by_rank]
    return np.array(rows, dtype=np.float64).reshape(len(by_rank), len(steps))  # None becomes NaN


def _over_ranks(function: np.ufunc, values: Matrix) -> Matrix:
    """`function` reduced over ranks, ignoring NaN, shape (1, steps)."""
    reduced: Matrix = function.reduce(values, axis=0, keepdims=True)
    return reduced
