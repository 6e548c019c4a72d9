"""The model that a rank shows the others, and how averages get into it while the rank trains.

Three moments concern it: the trainer comes to the end of a step (`advance`), an average comes
(`merge`), the trainer takes what it goes on from (`take`). Vectors are never changed, only
replaced: what was handed out stays what it was, so no other rank ever sees a model of two moments,
and nothing is copied to make sure of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from offbeat.averaging.background.group_base import Piece
from offbeat.averaging.background.group_merge import merge_delta, merge_paper
from offbeat.codec.model_wire import Values


class Iterate(ABC):
    """A rank's model, shape (num_elements,). Not for two threads at once.

    Attributes:
        shown: what the others are given.
    """

    shown: Values

    @abstractmethod
    def advance(self, model: Values) -> None:
        """The trainer has come to the end of a step, with `model`, which belongs to the iterate
        from now on.
        """

    @abstractmethod
    def merge(self, pieces: Sequence[Piece]) -> None:
        """Averages have come."""

    @abstractmethod
    def take(self) -> Values:
        """What the trainer goes on from."""

    def hold(self, held: Values) -> None:  # noqa: B027 - matters where progress is a difference
        """The trainer's model holds `held` in the place of what it took, for instance because half
        precision rounds.
        """


class DeltaIterate(Iterate):
    """Averages are merged when they come; a step adds what the trainer changed since it took the
    model.

    Every change is a difference, so the weighted mean over ranks stays exact however late anyone
    is, and a rank that is asked several times within a step answers with what it has meanwhile
    merged.
    """

    def __init__(self, model: Values) -> None:
        self.shown = self._base = model

    def advance(self, model: Values) -> None:
        unmoved = self.shown is self._base
        self.shown = model if unmoved else self.shown + (model - self._base)

    def merge(self, pieces: Sequence[Piece]) -> None:
        # an average of nothing but one's own would change nothing but the rounding of the next step
        mine = [
            p
            for p in pieces
            if p.contributed is not None and sum(note.weight > 0 for note in p.notes) > 1
        ]
        if not mine:
            return
        merged = self.shown.copy()
        for piece in mine:
            merged[piece.begin : piece.end] = merge_delta(
                self.shown[piece.begin : piece.end], piece
            )
        self.shown = merged

    def take(self) -> Values:
        self._base = self.shown
        return self.shown

    def hold(self, held: Values) -> None:
        self._base = held


class PaperIterate(Iterate):
    """As in WAGMA-SGD (arXiv 2005.00124, algorithm 2): what is shown is the model after the last
    step, before its average.

    An average that comes while the trainer computes waits for the end of its step, and counts as
    one that it was late for; of several, the last one.
    """

    def __init__(self, model: Values, *, weight: float = 1.0) -> None:
        self.shown = self._model = model
        self._weight = weight
        self._computing = True
        self._late: dict[int, Piece] = {}

    def advance(self, model: Values) -> None:
        self.shown = self._model = model
        self._computing = False
        late, self._late = self._late, {}
        self.merge([*late.values()])

    def merge(self, pieces: Sequence[Piece]) -> None:
        if self._computing:
            self._late.update((piece.begin, replace(piece, fresh=False)) for piece in pieces)
        elif pieces:
            merged = self._model.copy()
            for piece in pieces:
                merged[piece.begin : piece.end] = merge_paper(
                    merged[piece.begin : piece.end], piece, weight=self._weight
                )
            self._model = merged

    def take(self) -> Values:
        self._computing = True
        return self._model
