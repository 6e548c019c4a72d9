"""Dense collectives of several parts, begun in one order on every rank.

They meet in the order in which ranks begin them, and what is ready first may differ from rank to
rank. What comes before its turn waits here for those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from offbeat.codec.tally import Tally
from offbeat.gradients.buckets import Bucket
from offbeat.gradients.exchange import Reduction
from offbeat.kfac.planning.factor_plan import Turn


class Turns:
    """An order, gone through once each time it is set. What is not in it begins at once."""

    def __init__(self) -> None:
        self._order: Sequence[Turn] = ()
        self._next = 0
        self._ready: dict[Turn, Callable[[], None]] = {}

    def set(self, order: Sequence[Turn]) -> None:
        """Go through `order` from now on."""
        assert not self._ready, "somebody still waits for a turn of the order before"
        self._order, self._next = order, 0

    def take(self, turn: Turn, begin: Callable[[], None]) -> None:
        """Call `begin` when it is its turn, which may be now."""
        if turn not in self._order[self._next :]:
            begin()
            return
        self._ready[turn] = begin
        while (
            self._next < len(self._order)
            and (ready := self._ready.pop(self._order[self._next], None)) is not None
        ):
            self._next += 1
            ready()


class Rounds(Protocol):
    """Who sends something with each exchange of gradients."""

    def flush(self, *, failed: bool) -> None:
        """This rank's part of the exchange is complete: hand over whatever is still to be sent.
        `failed`: nothing of worth.
        """
        ...

    def verdict(self, *, good: bool) -> None:
        """The exchange is over, on every rank, and every rank takes or leaves it alike."""
        ...


class InTurn:
    """A bucket's reduction that is launched in turn.

    Args:
        inner: the reduction.
        number: the bucket's, in the order of launching.
        turns: the order.
        rounds: for the last bucket, which is launched when everything else of the exchange is
            complete: who is told of it.
    """

    def __init__(self, inner: Reduction, number: int, turns: Turns, rounds: Rounds | None) -> None:
        self._inner = inner
        self._number = number
        self._turns = turns
        self._rounds = rounds

    @property
    def encode_s(self) -> float:
        return self._inner.encode_s

    def launch(self, bucket: Bucket, tally: Tally, *, grad_scale: float) -> None:
        if self._rounds is not None:
            self._rounds.flush(failed=bool(tally.num_failed))
        self._turns.take(
            ("gradients", self._number),
            lambda: self._inner.launch(bucket, tally, grad_scale=grad_scale),
        )

    def wait(self) -> Tally:
        return self._inner.wait()

    def commit(self) -> torch.Tensor:
        if self._rounds is not None:
            self._rounds.verdict(good=True)
        return self._inner.commit()

    def discard(self) -> None:
        if self._rounds is not None:
            self._rounds.verdict(good=False)
        self._inner.discard()

    def additive_state(self) -> dict[str, torch.Tensor]:
        return self._inner.additive_state()

    def local_state(self) -> dict[str, float]:
        return self._inner.local_state()

    def load(self, additive: Mapping[str, torch.Tensor], local: Mapping[str, float]) -> None:
        self._inner.load(additive, local)
