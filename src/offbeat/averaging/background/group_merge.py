"""How a rank takes an average into its own model."""

from __future__ import annotations

from offbeat.averaging.background.group_base import Piece
from offbeat.codec.model_wire import Values


def merge_delta(mine: Values, piece: Piece) -> Values:
    """average + (mine - contributed): what this rank did since it contributed is kept.

    Where all that are in do so, the weighted mean over ranks stays as it was. A rank that is not in
    keeps its own.

    Args:
        mine: this rank's elements `piece.begin` to `piece.end`; unchanged.
        piece: their average.
    """
    if piece.contributed is None:
        return mine
    return piece.average + (mine - piece.contributed)


def merge_paper(mine: Values, piece: Piece, *, weight: float = 1.0) -> Values:
    """The average if this rank is in and was on time, else its model counts once more: (W_sum + W')
    / (S + 1).

    As in WAGMA-SGD (arXiv 2005.00124, algorithm 2), with sums of weights in the place of S.

    Args:
        mine: this rank's elements `piece.begin` to `piece.end`; unchanged.
        piece: their average.
        weight: with which `mine` counts if the rank was late.
    """
    if piece.fresh:
        return piece.average
    total = piece.sum_of_weights
    return (piece.average * total + mine * weight) / (total + weight)
