"""Gradients in averages that wait for nobody: what is owed, what is under way, what has come and is still to be applied.

Nothing is lost: a gradient is owed until a version has taken it in, and every average is applied by every rank once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from offbeat.codec.model_wire import Values
from offbeat.collectives.group_base import Contribution, Piece
from offbeat.engine.iterates import Iterate
from offbeat.engine.replica import Replica


class GradientReplica(Replica):
    """A rank in versions that average gradients, and in some that average models.

    Args:
        num_elements: of the model.
        make_iterate: makes the iterate of a model, for the versions that average models, and for who asks for it.
        averages_models: whether a version does.
    """

    def __init__(
        self, num_elements: int, *, make_iterate: Callable[[Values], Iterate], averages_models: Callable[[int], bool]
    ) -> None:
        self._num_elements = num_elements
        self._owed: Values | None = None
        self._update: Values | None = None
        self._under_way: dict[int, Values] = {}
        super().__init__(weight=1.0, make_iterate=make_iterate)
        self._averages_models = averages_models

    def owe(self, gradient: Values) -> None:
        """This rank has a new gradient, shape (num_elements,), which belongs to the replica from now on."""
        with self._changed:
            self._owed = gradient if self._owed is None else self._owed + gradient

    def take_update(self) -> Values | None:
        """The sum, over versions since the last call, of their contributions by the number of members; None: there was none."""
        with self._changed:
            taken, self._update = self._update, None
            return taken

    def to_apply(self) -> Values | None:
        """What `take_update` would return."""
        with self._changed:
            return self._update

    def resume(self, *, owed: Values, to_apply: Values) -> None:
        """Go on with what was owed and what was to be applied when the state was saved."""
        with self._changed:
            self._owed = owed if owed.any() else None
            self._update = to_apply if to_apply.any() else None

    def owed(self) -> Values | None:
        """What no version has taken in so far, what is under way included."""
        with self._changed:
            parts = [*self._under_way.values(), *([] if self._owed is None else [self._owed])]
            return np.sum(parts, axis=0) if parts else None

    def _restart(self) -> None:
        """What was under way in the membership that is over will not come back."""
        super()._restart()
        for values in self._under_way.values():
            self._owe_again(values, 0, values.size)
        self._under_way = {}

    def _offer(self, version: int, iterate: Iterate, *, fresh: bool) -> Contribution | None:
        if self._averages_models(version):
            return super()._offer(version, iterate, fresh=fresh)
        self._answered = self._answered or not fresh
        if self._owed is None:
            return None  # as good as zeros, and nothing to send
        mine, self._owed = self._owed, None
        self._under_way[version] = mine.copy()
        return self._contribution(mine, fresh=fresh)

    def _merge(self, version: int, pieces: tuple[Piece, ...]) -> None:
        if self._averages_models(version):
            super()._merge(version, pieces)
            return
        mine = self._under_way.get(version)
        for piece in pieces:
            if self._update is None:
                self._update = np.zeros(self._num_elements, piece.average.dtype)
            self._update[piece.begin : piece.end] += piece.average * (piece.sum_of_weights / len(piece.notes))
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
