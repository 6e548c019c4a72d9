"""How averages are merged into a rank's model while the rank trains.

Two rules: `DeltaMerge` keeps what the rank did since it contributed, `PaperMerge` is the rule of
WAGMA-SGD (arXiv 2005.00124, algorithm 2). Each rule holds a rank's model. Three events concern it:
the trainer ends a step (`advance`), an average arrives (`merge`), and the trainer takes the model
with which it continues (`take`).

Vectors are never changed, only replaced. A snapshot that was handed out therefore stays as it was,
no peer ever sees a model of two moments, and no copies are needed to ensure that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from offbeat.averaging.background.interface import Piece
from offbeat.codec.model_wire import Values


def merge_delta(mine: Values, piece: Piece) -> Values:
    """average + (mine - contributed), which keeps what this rank did since it contributed.

    Where all members whose contributions are in the average do so, the weighted mean over ranks
    does not change. A rank whose contribution is not in the average keeps its model.

    Args:
        mine: this rank's elements `piece.begin` to `piece.end`; they are not changed.
        piece: their average.
    """
    if piece.contributed is None:
        return mine
    return piece.average + (mine - piece.contributed)


def merge_paper(mine: Values, piece: Piece, *, weight: float = 1.0) -> Values:
    """The average for a rank that was on time; (W_sum + W') / (S + 1) for one that was late.

    As in WAGMA-SGD (arXiv 2005.00124, algorithm 2), with sums of weights in place of S.

    Args:
        mine: this rank's elements `piece.begin` to `piece.end`; they are not changed.
        piece: their average.
        weight: the weight of `mine` if the rank was late.
    """
    if piece.fresh:
        return piece.average
    total = piece.sum_of_weights
    return (piece.average * total + mine * weight) / (total + weight)


class MergeRule(ABC):
    """A rank's model, shape (num_elements,), and how averages get into it. Not thread-safe.

    Attributes:
        snapshot: the values that peers receive.
    """

    snapshot: Values

    @abstractmethod
    def advance(self, model: Values) -> None:
        """The trainer has ended a step with `model`, which belongs to this object from now on."""

    @abstractmethod
    def merge(self, pieces: Sequence[Piece]) -> None:
        """Merge averages that have arrived."""

    @abstractmethod
    def take(self) -> Values:
        """The values with which the trainer continues."""

    def rebase(self, held: Values) -> None:  # noqa: B027 - matters where progress is a difference
        """The trainer's model holds `held` instead of the values that it took, for instance because
        half precision rounded them. Its next step counts from `held`.
        """


class DeltaMerge(MergeRule):
    """Averages are merged when they arrive; a step adds what the trainer changed since `take`.

    Every change is a difference, so the weighted mean over ranks stays exact however late a rank
    is. A rank whose snapshot is requested several times within a step contributes what it has
    merged meanwhile.
    """

    def __init__(self, model: Values) -> None:
        self.snapshot = self._base = model

    def advance(self, model: Values) -> None:
        # Without a merge since `take`, the sum below would be `model` except for rounding.
        nothing_merged = self.snapshot is self._base
        self.snapshot = model if nothing_merged else self.snapshot + (model - self._base)

    def merge(self, pieces: Sequence[Piece]) -> None:
        # An average of this rank's contribution alone would change only the rounding of the next
        # step.
        mine = [
            piece
            for piece in pieces
            if piece.contributed is not None and sum(note.weight > 0 for note in piece.notes) > 1
        ]
        if not mine:
            return
        merged = self.snapshot.copy()
        for piece in mine:
            merged[piece.begin : piece.end] = merge_delta(
                self.snapshot[piece.begin : piece.end], piece
            )
        self.snapshot = merged

    def take(self) -> Values:
        self._base = self.snapshot
        return self.snapshot

    def rebase(self, held: Values) -> None:
        self._base = held


class PaperMerge(MergeRule):
    """The rule of the paper: the snapshot is the model after the last step, before its average.

    An average that arrives while the trainer computes waits for the end of the step and counts as
    one for which the rank was late. Of several for the same elements the last one counts.
    """

    def __init__(self, model: Values, *, weight: float = 1.0) -> None:
        self.snapshot = self._model = model
        self._weight = weight
        self._computing = True
        self._late: dict[int, Piece] = {}

    def advance(self, model: Values) -> None:
        self.snapshot = self._model = model
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
