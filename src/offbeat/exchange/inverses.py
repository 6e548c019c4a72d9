"""Inverses: each made by its owner and broadcast while the next is being made, or made by every rank.

An owner's factors of one size are decomposed in one call and travel in one message, largest first. Messages are begun in one
order on every rank, the first of each owner before the second of any; a rank makes its own when their turn comes and what every
rank makes when all messages are under way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from offbeat.collectives.dense import dense_broadcast
from offbeat.curvature.blocks import FactorShape
from offbeat.curvature.eigen import Decomposer
from offbeat.curvature.inverses import Inverter, Job
from offbeat.exchange.spans import Spans
from offbeat.planning.factor_plan import FactorPlan
from offbeat.transport.driver import Driver, Stream


@dataclass(slots=True)
class InverseTimes:
    """Seconds so far.

    Attributes:
        invert_s: computing inverses.
        wait_s: waiting for the other ranks' inverses.
    """

    invert_s: float = 0.0
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Batch:
    """Factors of one size and one owner, and where their inverses lie."""

    slots: tuple[int, ...]
    owner: int
    flat: torch.Tensor


class InversePhase:
    """Where all inverses that this rank has are kept, and how they get there.

    Args:
        plan: who inverts what.
        shapes: of each slot.
        likes: for each slot a tensor of its device, and of the dtype in which its inverse is kept.
        driver: carries broadcasts out.
        stream: of the broadcasts.
        inverter: inverts, or decomposes.
        spans: notes what is done when.

    Attributes:
        packed: what stands for the inverse of each slot; zeros stand for none. None where this rank needs none.
    """

    def __init__(
        self,
        plan: FactorPlan,
        shapes: Sequence[FactorShape],
        likes: Sequence[torch.Tensor],
        *,
        driver: Driver,
        stream: Stream,
        inverter: Inverter | Decomposer,
        spans: Spans,
    ) -> None:
        self.times, self._spans = InverseTimes(), spans
        self._driver, self._stream, self._inverter = driver, stream, inverter
        self._travels = not plan.by_owner
        self.packed: list[torch.Tensor | None] = [None] * len(shapes)
        owned = [slot for slot, owner in enumerate(plan.owners) if owner is not None]
        if plan.by_owner:
            owned = [slot for slot in owned if plan.owners[slot] == driver.rank]
        self._batches = self._make_batches(owned, plan, shapes, likes)
        self._by_all = [slot for slot, owner in enumerate(plan.owners) if owner is None]
        for slot in self._by_all:
            self.packed[slot] = likes[slot].new_zeros(inverter.kept(shapes[slot]))

    def _make_batches(
        self, slots: Sequence[int], plan: FactorPlan, shapes: Sequence[FactorShape], likes: Sequence[torch.Tensor]
    ) -> list[_Batch]:
        """In the order in which they are sent, which every rank finds alike."""
        alike: dict[tuple[int, Hashable], list[int]] = {}
        for slot in sorted(slots, key=lambda slot: (-_work(shapes[slot]), slot)):
            owner, shape = plan.owners[slot], shapes[slot]
            assert owner is not None
            kind = shape.dim, shape.is_diagonal, likes[slot].dtype, likes[slot].device
            alike.setdefault((owner, kind), []).append(slot)
        batches: list[tuple[int, int, _Batch]] = []
        of_owner: dict[int, int] = {}
        for (owner, _), some in alike.items():
            kept = [self._inverter.kept(shapes[slot]) for slot in some]
            sizes = [rows * columns for rows, columns in kept]
            flat = likes[some[0]].new_zeros(sum(sizes))
            for slot, part, shape_kept in zip(some, flat.split(sizes), kept, strict=True):
                self.packed[slot] = part.view(shape_kept)
            place = of_owner[owner] = of_owner.get(owner, 0) + 1
            batches.append((place, owner, _Batch(tuple(some), owner, flat)))
        return [batch for *_, batch in sorted(batches, key=lambda entry: entry[:2])]

    def run(self, job: Callable[[int], Job]) -> None:
        """Bring every inverse up to date. `job` says what to invert for a slot that this rank inverts."""
        pending = []
        for batch in self._batches:
            if batch.owner == self._driver.rank:
                self._invert(batch.slots, job)
            if self._travels:
                launched_s = time.monotonic()
                pending.append(self._driver.launch(dense_broadcast(batch.flat, batch.owner), self._stream.next()))
                self._spans.launched("broadcast", f"from worker {batch.owner}", launched_s, pending[-1:])
        # Apart from what this rank owns: on a GPU the bits of an inverse depend on what it is batched with.
        self._invert(self._by_all, job)
        begin_s = time.perf_counter()
        for broadcast in pending:
            with self._spans.timed("wait for inverses"):
                broadcast.wait()
            self._spans.arrived()
        self.times.wait_s += time.perf_counter() - begin_s

    def _invert(self, slots: Sequence[int], job: Callable[[int], Job]) -> None:
        begin_s = time.monotonic()
        inverses = self._inverter.invert([job(slot) for slot in slots])
        for slot, inverse in zip(slots, inverses, strict=True):
            kept = self.packed[slot]
            assert kept is not None
            kept.copy_(inverse)
        self.times.invert_s += time.monotonic() - begin_s
        if slots:
            self._spans.add("invert", f"{len(slots)} factors", begin_s)


def _work(shape: FactorShape) -> int:
    return shape.dim if shape.is_diagonal else shape.groups * shape.dim**3
