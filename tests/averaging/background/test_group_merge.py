"""How averages are taken in."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from offbeat.averaging.background.interface import Piece
from offbeat.averaging.background.merge_rules import merge_delta, merge_paper
from offbeat.codec.model_wire import ABSENT, Note, Values


def piece_of(contributions: list[Values], weights: list[float], own: int, *, fresh: bool) -> Piece:
    total = sum(weight * values for weight, values in zip(weights, contributions, strict=True))
    return Piece(
        begin=0,
        average=np.asarray(total / sum(weights)),
        notes=tuple(Note(weight=weight, step=1, fresh=fresh) for weight in weights),
        contributed=contributions[own],
        fresh=fresh,
    )


models = st.integers(0, 2**32 - 1).map(lambda seed: np.random.default_rng(seed).normal(size=4))


@given(st.lists(st.tuples(models, models, st.floats(0.1, 10.0)), min_size=1, max_size=6))
def test_delta_keeps_the_weighted_mean_whatever_was_contributed(
    members: list[tuple[Values, Values, float]],
) -> None:
    contributed = [stale for stale, _, _ in members]
    weights = [weight for _, _, weight in members]
    after = [
        merge_delta(now, piece_of(contributed, weights, own, fresh=False))
        for own, (_, now, _) in enumerate(members)
    ]
    sums = [
        sum(weight * values for weight, values in zip(weights, side, strict=True))
        for side in ([m[1] for m in members], after)
    ]
    np.testing.assert_allclose(sums[0], sums[1], rtol=1e-9, atol=1e-9)


@given(st.lists(models, min_size=1, max_size=5))
def test_both_give_the_averages_own_bits_to_who_was_on_time(contributions: list[Values]) -> None:
    for own, mine in enumerate(contributions):
        piece = piece_of(contributions, [1.0] * len(contributions), own, fresh=True)
        assert (
            merge_delta(mine, piece).tobytes()
            == merge_paper(mine, piece).tobytes()
            == piece.average.tobytes()
        )


def test_the_papers_rule_for_who_was_late() -> None:
    stale, other, now = np.array([2.0]), np.array([6.0]), np.array([10.0])
    piece = piece_of([stale, other], [1.0, 1.0], 0, fresh=False)
    assert merge_paper(now, piece).tolist() == [(2.0 + 6.0 + 10.0) / 3]
    assert merge_delta(now, piece).tolist() == [4.0 + (10.0 - 2.0)]


def test_who_is_not_in_keeps_its_own_or_counts_once_more() -> None:
    mine = np.array([10.0])
    piece = Piece(
        begin=0,
        average=np.array([4.0]),
        notes=(Note(weight=2.0, step=0, fresh=True), ABSENT),
        contributed=None,
        fresh=False,
    )
    assert merge_delta(mine, piece).tolist() == [10.0]
    assert merge_paper(mine, piece, weight=1.0).tolist() == [(2 * 4.0 + 10.0) / 3]


def test_single_precision_stays_single_precision() -> None:
    values = np.ones(3, np.float32)
    piece = piece_of([values, values], [1.0, 3.0], 0, fresh=False)
    piece = Piece(
        begin=0,
        average=piece.average.astype(np.float32),
        notes=piece.notes,
        contributed=values,
        fresh=False,
    )
    assert merge_delta(values, piece).dtype == merge_paper(values, piece).dtype == np.float32
