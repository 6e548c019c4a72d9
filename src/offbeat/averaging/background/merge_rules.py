"""How averages are merged into a rank's model while the rank trains.

Two rules: `DeltaMerge` keeps what the rank did since it contributed, `PaperMerge` is the rule of
WAGMA-SGD (arXiv 2005.00124, algorithm 2). Each rule holds a rank's model. Three events concern it:
the trainer ends a step (`advance`), an average arrives (`merge`), and the trainer takes the model
with which it continues (`take`).

`DeltaMerge` moves parameters, and momenta, by differences. Statistics, such as BatchNorm's running
variance, take plain means instead (`weights.statistics`): a difference could make them negative.
The paper's rule has no differences.

A vector that was handed out is never changed, only replaced. So no peer ever sees a model of two
moments, and no copies are needed to ensure that. One that nobody else has is written in place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from offbeat.averaging.background.interface import Piece
from offbeat.codec.model_wire import Values
from offbeat.codec.rounding import copy_to, move_by, move_by_rounded
from offbeat.codec.tally import all_finite
from offbeat.collectives.weighted_mean import FRAGMENT_BYTES
from offbeat.weights.statistics import merge_statistics


def merge_delta(mine: Values, piece: Piece, *, out: Values | None = None) -> Values:
    """average + (mine - contributed), which keeps what this rank did since it contributed.

    Where all members whose contributions are in the average do so, the weighted mean over ranks
    does not change. A rank whose contribution is not in the average keeps its model.

    Args:
        mine: this rank's elements `piece.begin` to `piece.end`; they are not changed.
        piece: their average. Where it was rounded, so was what was contributed, and `mine` keeps
            what rounding took from it.
        out: where to write the result; None: into a vector of its own.
    """
    if piece.contributed is None:
        return mine
    moved = np.empty_like(mine) if out is None else out
    if piece.codes is not None:
        move_by_rounded(mine, *piece.codes, moved)
        return moved
    for part in fragments(mine.size):
        average, contributed = piece.average[part], piece.contributed[part]
        if piece.of_changes:
            move_by(mine[part], average, contributed, moved[part])
        else:
            np.subtract(mine[part], contributed, out=moved[part])
            np.add(average, moved[part], out=moved[part])
    return moved


def merge_paper(mine: Values, piece: Piece, *, weight: float = 1.0) -> Values:
    """The average for a rank that was on time; (W_sum + W') / (S + 1) for one that was late.

    As in WAGMA-SGD (arXiv 2005.00124, algorithm 2), with sums of weights in place of S.

    Args:
        mine: this rank's elements `piece.begin` to `piece.end`; they are not changed.
        piece: their average.
        weight: the weight of `mine` if the rank was late.
    """
    average = piece.average[:]
    if piece.fresh:
        return average
    total = piece.sum_of_weights
    return (average * total + mine * weight) / (total + weight)


class MergeRule(ABC):
    """A rank's model, shape (num_elements,), and how averages get into it. Not thread-safe.

    Attributes:
        held: the values that the trainer's model is known to hold since `advance`; None where the
            trainer has to be told.
    """

    held: Values | None = None
    _snapshot: Values
    _is_lent = True
    anchor: Values | None = None
    """The last average of all members, where differences from it travel."""

    @property
    def snapshot(self) -> Values:
        """The values that peers receive. They stay as they are."""
        self._is_lent = True
        return self._snapshot

    @property
    def current(self) -> Values:
        """The same until something else happens here: for whoever has copied them by then."""
        return self._snapshot

    @abstractmethod
    def advance(self, model: Sequence[Values], *, is_given: bool = False) -> bool:
        """The trainer has ended a step.

        Args:
            model: what it holds, in vectors that have all elements side by side.
            is_given: whether `model` is known to be finite, and belongs to this object from now on;
                else it is read now and not kept, so that it may be the memory of tensors.

        Returns:
            Whether all of that is finite; if not, nothing has changed.
        """

    @abstractmethod
    def merge(self, pieces: Sequence[Piece]) -> None:
        """Merge averages that have arrived."""

    @abstractmethod
    def take(self) -> Values:
        """The values with which the trainer continues."""

    @property
    @abstractmethod
    def given(self) -> Values:
        """The values that the trainer's model holds since `take`, unless it was changed since."""

    def rebase(self, held: Values) -> None:  # noqa: B027 - matters where progress is a difference
        """The trainer's model holds `held` instead of the values that it took, for instance because
        half precision rounded them. Its next step counts from `held`.
        """


class DeltaMerge(MergeRule):
    """Averages are merged when they arrive; a step adds what the trainer changed since `take`.

    Every change of a parameter is a difference, so the weighted mean over ranks stays exact however
    late a rank is. A rank whose snapshot is requested several times within a step contributes what
    it has merged meanwhile.

    Args:
        model: all elements.
        statistics: the elements that are no parameters and take plain means, in order.
        has_anchor: whether it keeps an anchor, at first `model`, for which pieces bring another.
    """

    def __init__(
        self, model: Values, *, statistics: Sequence[slice] = (), has_anchor: bool = False
    ) -> None:
        self._snapshot = self._taken = self._base = model
        self._is_base_lent = True
        self.anchor = model if has_anchor else None
        self._statistics = statistics

    def advance(self, model: Sequence[Values], *, is_given: bool = False) -> bool:
        # Without a merge since `take`, the sum below would be `model` except for rounding.
        if self._snapshot is self._base:
            own, finite = _kept(model, is_given=is_given)
            if finite:
                self.held = own
                self._replace(own)
            return finite
        advanced = self._base
        if self._is_base_lent:
            advanced = np.empty_like(self._snapshot)
        elif not all_finite([*map(torch.from_numpy, model)]):
            return False  # before anything has changed
        statistics = []
        for span in self._statistics:
            taken = self._taken[span]
            # What the trainer did not change is what it took, before that was rounded.
            held = _elements(model, span)
            mine = np.where(held == self._base[span], taken, held)
            statistics.append(merge_statistics(mine, self._snapshot[span], taken))
        finite, begin = True, 0
        for new in model:
            part = slice(begin, begin + new.size)
            finite &= move_by(self._snapshot[part], new, self._base[part], advanced[part])
            begin = part.stop
        if not finite:
            return False
        for span, values in zip(self._statistics, statistics, strict=True):
            advanced[span] = values
        self._replace(advanced)
        return True

    def merge(self, pieces: Sequence[Piece]) -> None:
        self._move_anchor(pieces)
        # An average of this rank's contribution alone would change only the rounding of the next
        # step.
        mine = [
            piece
            for piece in pieces
            if piece.contributed is not None and sum(note.weight > 0 for note in piece.notes) > 1
        ]
        if not mine:
            return
        snapshot, self.held = self._snapshot, None
        is_shared = self._is_lent or snapshot is self._base or snapshot is self._taken
        merged = np.empty_like(snapshot) if is_shared else snapshot
        end = 0
        for piece in sorted(mine, key=lambda piece: piece.begin):
            merged[end : piece.begin] = snapshot[end : piece.begin]
            statistics = self._merged_statistics(piece)
            part = slice(piece.begin, piece.end)
            merge_delta(snapshot[part], piece, out=merged[part])
            for span, values in statistics:
                merged[span] = values
            end = piece.end
        merged[end:] = snapshot[end:]
        self._replace(merged)

    def _replace(self, snapshot: Values) -> None:
        if self._snapshot is self._base:
            self._is_base_lent |= self._is_lent
        self._snapshot, self._is_lent = snapshot, False

    def _move_anchor(self, pieces: Sequence[Piece]) -> None:
        if self.anchor is None or all(piece.anchor is None for piece in pieces):
            return
        self.anchor = self.anchor.copy()
        for piece in pieces:
            if piece.anchor is not None:
                anchor = self.anchor[piece.begin : piece.end]
                for part in fragments(anchor.size):
                    anchor[part] = piece.anchor[part]

    def _merged_statistics(self, piece: Piece) -> list[tuple[slice, Values]]:
        """What the statistics among the elements of `piece` become."""
        assert piece.contributed is not None, "an average without this rank is not merged"
        found, num_before = [], 0
        for span in self._statistics:
            begin, end = max(span.start, piece.begin), min(span.stop, piece.end)
            if begin < end:
                # Where values are rounded, statistics are what is not, so there is nothing else.
                at = begin - piece.begin if piece.codes is None else num_before
                num_before += end - begin
                in_piece = slice(at, at + end - begin)
                merged = merge_statistics(
                    self._snapshot[begin:end], piece.average[in_piece], piece.contributed[in_piece]
                )
                found.append((slice(begin, end), merged))
        return found

    def take(self) -> Values:
        self._taken = self._base = self._snapshot
        self._is_base_lent = self._is_lent
        return self._snapshot

    @property
    def given(self) -> Values:
        return self._base

    def rebase(self, held: Values) -> None:
        self._base, self._is_base_lent = held, False


class PaperMerge(MergeRule):
    """The rule of the paper: the snapshot is the model after the last step, before its average.

    An average that arrives while the trainer computes waits for the end of the step and counts as
    one for which the rank was late. Of several for the same elements the last one counts.
    """

    def __init__(self, model: Values) -> None:
        self._snapshot = self._model = model
        self._computing = True
        self._late: dict[int, Piece] = {}

    def advance(self, model: Sequence[Values], *, is_given: bool = False) -> bool:
        own, finite = _kept(model, is_given=is_given)
        if not finite:
            return False
        self._snapshot = self._model = self.held = own
        self._computing = False
        late, self._late = self._late, {}
        self.merge([*late.values()])
        return True

    def merge(self, pieces: Sequence[Piece]) -> None:
        if self._computing:
            self._late.update((piece.begin, replace(piece, fresh=False)) for piece in pieces)
        elif pieces:
            merged = self._model.copy()
            for piece in pieces:
                part = slice(piece.begin, piece.end)
                merged[part] = merge_paper(merged[part], piece)
            self._model = merged

    def take(self) -> Values:
        self._computing = True
        return self._model

    @property
    def given(self) -> Values:
        return self._model


def fragments(size: int) -> Iterator[slice]:
    """So many elements a few MiB at a time."""
    step = FRAGMENT_BYTES // 8
    for begin in range(0, size, step):
        yield slice(begin, min(begin + step, size))


def _kept(parts: Sequence[Values], *, is_given: bool) -> tuple[Values, bool]:
    """All elements of `parts` in one vector that may be kept, and whether they are finite."""
    if is_given and len(parts) == 1:
        return parts[0], True
    copy = np.empty(sum(part.size for part in parts), parts[0].dtype)
    finite, begin = True, 0
    for part in parts:
        finite &= copy_to(part, copy[begin : begin + part.size])
        begin += part.size
    return copy, finite


def _elements(parts: Sequence[Values], span: slice) -> Values:
    """The elements `span` of the vector that `parts` are side by side."""
    found, begin = [], 0
    for part in parts:
        found.append(part[max(span.start - begin, 0) : max(span.stop - begin, 0)])
        begin += part.size
    return np.concatenate(found)
