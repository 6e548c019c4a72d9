"""Gradients in averages that wait for nobody: what is owed, what is under way, what has come and is
still to be applied.

Nothing is lost: a gradient is owed until a version has taken it in, and every average is applied by
every rank once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from offbeat.averaging.background.group_base import Contribution, Piece
from offbeat.averaging.background.merge_rules import Iterate
from offbeat.averaging.background.published_model import Counters, Replica
from offbeat.codec.model_wire import Values

Used = NDArray[np.bool_]
"""Which parameters had a gradient, shape (num_parameters,)."""


class GradientReplica(Replica):
    """A rank in versions that average gradients, and in some that average models.

    Which parameters anyone used travels with the model's counters, of which the largest is taken.

    Args:
        num_elements: of the model.
        num_parameters: of the model.
        make_iterate: makes the iterate of a model, for the versions that average models, and for
            who asks for it.
        averages_models: whether a version does.
    """

    def __init__(
        self,
        num_elements: int,
        num_parameters: int,
        *,
        make_iterate: Callable[[Values], Iterate],
        averages_models: Callable[[int], bool],
    ) -> None:
        self._num_elements = num_elements
        self._num_parameters = num_parameters
        self._owed: Values | None = None
        self._used = self._nothing_used()
        self._update: Values | None = None
        self._used_in_update = self._nothing_used()
        self._under_way: dict[int, Values] = {}
        super().__init__(weight=1.0, make_iterate=make_iterate, max_credit=1)
        self._averages_models = averages_models

    def begin(self, model: Values, counters: Counters, *, step: int) -> None:
        super().begin(model, self._with_used(counters, self._nothing_used()), step=step)

    def advance(self, model: Values, counters: Counters) -> None:
        super().advance(model, self._with_used(counters, self._nothing_used()))

    def take(self) -> tuple[Values, Counters]:
        values, counters = super().take()
        return values, counters[: counters.size - self._num_parameters]

    def owe(self, gradient: Values, used: Used) -> None:
        """This rank has a new gradient, shape (num_elements,), which belongs to the replica from
        now on.
        """
        with self._changed:
            self._owed = gradient if self._owed is None else self._owed + gradient
            self._used = self._used | used

    def take_update(self) -> tuple[Values | None, Used]:
        """The sum, over versions since the last call, of their contributions by the number of
        members; None: there was none.
        """
        with self._changed:
            taken, used = self._update, self._used_in_update
            self._update, self._used_in_update = None, self._nothing_used()
            return taken, used

    def adopt(self, state: Contribution) -> None:
        """Gradients of the model that is given up are of no use to another one."""
        with self._changed:
            super().adopt(state)
            self._owed = self._update = None
            self._used, self._used_in_update = self._nothing_used(), self._nothing_used()
            self._under_way = {}

    def ledger(self) -> tuple[Values | None, Values | None]:
        """What is owed, and what has come and was not applied; copies."""
        with self._changed:
            return self.owed(), None if self._update is None else self._update.copy()

    def resume(self, *, owed: Values, to_apply: Values, used: Used) -> None:
        """Go on with what was owed and what was to be applied when the state was saved."""
        with self._changed:
            self._owed = owed if owed.any() else None
            self._update = to_apply if to_apply.any() else None
            self._used = used if self._owed is not None else self._nothing_used()
            self._used_in_update = used if self._update is not None else self._nothing_used()

    def owed(self) -> Values | None:
        """What no version has taken in so far, what is under way included."""
        with self._changed:
            parts = [*self._under_way.values(), *([] if self._owed is None else [self._owed])]
            return np.sum(parts, axis=0) if parts else None

    def _is_under_way(self) -> bool:
        return super()._is_under_way() or bool(self._under_way)

    def settle(self, version: int) -> None:
        with self._changed:
            if (lost := self._under_way.pop(version, None)) is not None:
                self._owe_again(lost, 0, lost.size)
                self._changed.notify_all()

    def _restart(self) -> None:
        """What was under way in the membership that is over will not come back."""
        super()._restart()
        for values in self._under_way.values():
            self._owe_again(values, 0, values.size)
        self._under_way = {}

    def _offer(self, version: int, iterate: Iterate, *, fresh: bool) -> Contribution | None:
        if self._averages_models(version):
            return super()._offer(version, iterate, fresh=fresh)
        if self._owed is None:
            self._was_answered_for(not fresh)
            return None  # as good as zeros, and nothing to send
        mine, used = self._owed, self._used
        self._owed, self._used = None, self._nothing_used()
        self._under_way[version] = mine.copy()
        counters = self._with_used(
            self._counters[: self._counters.size - self._num_parameters], used
        )
        return replace(self._contribution(mine, fresh=fresh), counters=counters)

    def _merge(self, version: int, pieces: tuple[Piece, ...]) -> None:
        if self._averages_models(version):
            super()._merge(version, pieces)
            return
        mine = self._under_way.get(version)
        for piece in pieces:
            if self._update is None:
                self._update = np.zeros(self._num_elements, piece.average.dtype)
            self._used_in_update |= piece.counters[piece.counters.size - self._num_parameters :] > 0
            self._update[piece.begin : piece.end] += piece.average * (
                piece.sum_of_weights / len(piece.notes)
            )
            if mine is not None:
                if piece.contributed is None:
                    self._owe_again(mine, piece.begin, piece.end)
                mine[piece.begin : piece.end] = 0
        if mine is not None and not mine.any():
            del self._under_way[version]

    def _owe_again(self, values: Values, begin: int, end: int) -> None:
        if self._owed is None:
            self._owed = np.zeros_like(values)
        self._owed[begin:end] += values[begin:end]
        self._used[:] = (
            True  # whose it was is forgotten; its gradient is zero where it was nobody's
        )

    def _nothing_used(self) -> Used:
        return np.zeros(self._num_parameters, np.bool_)

    def _with_used(self, counters: Counters, used: Used) -> Counters:
        return np.concatenate([counters, used.astype(np.int64)])
