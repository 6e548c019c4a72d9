"""How averages get into a model that is being trained."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from offbeat.averaging.background.interface import Piece
from offbeat.averaging.background.merge_rules import (
    DeltaMerge,
    MergeRule,
    PaperMerge,
    merge_delta,
    merge_paper,
)
from offbeat.codec.model_wire import ABSENT, Note, Values


def vector(*values: float) -> Values:
    return np.array(values, np.float64)


def average_of(
    *contributions: Values, own: int | None = 0, fresh: bool = True, begin: int = 0
) -> Piece:
    """The average of whole models, or of a range that begins at `begin`."""
    mean = np.mean(contributions, axis=0)
    notes = tuple(Note(weight=1.0, step=1, fresh=fresh) for _ in contributions)
    mine = None if own is None else contributions[own]
    return Piece(
        begin=begin, average=mean, notes=notes, contributed=mine, fresh=fresh and own is not None
    )


def test_delta_keeps_what_the_trainer_does_between_taking_and_advancing() -> None:
    rule = DeltaMerge(vector(0, 0))
    model = rule.take()
    rule.merge([average_of(rule.snapshot, vector(4, 8))])
    rule.advance([model + vector(1, 1)])
    assert_array_equal(rule.take(), vector(3, 5))


def test_delta_shows_what_it_has_merged_even_while_the_trainer_computes() -> None:
    """Else a rank that contributes twice within a step would be moved twice as far as the average
    is.
    """
    rule = DeltaMerge(vector(0))
    rule.take()
    for _ in range(3):
        rule.merge([average_of(rule.snapshot, vector(8))])
    assert_array_equal(rule.snapshot, vector(7))


def test_delta_leaves_a_model_alone_that_is_not_in_the_average() -> None:
    rule = DeltaMerge(vector(1))
    rule.merge([average_of(vector(5), vector(7), own=None)])
    assert_array_equal(rule.take(), vector(1))


@given(st.lists(st.tuples(st.sampled_from(["step", "merge"]), st.integers(-9, 9)), max_size=30))
def test_delta_keeps_the_mean_over_two_ranks_in_any_order_of_events(
    events: list[tuple[str, int]],
) -> None:
    ranks = [DeltaMerge(vector(0)), DeltaMerge(vector(10))]
    models = [rank.take() for rank in ranks]
    total = 10.0
    for kind, number in events:
        if kind == "step":
            mover = number % 2
            ranks[mover].advance([models[mover] + number])
            models[mover] = ranks[mover].take()
            total += number
        else:
            snapshot = [rank.snapshot for rank in ranks]
            for place, rank in enumerate(ranks):
                rank.merge([average_of(*snapshot, own=place)])
    assert_allclose(sum(rank.snapshot[0] for rank in ranks), total)


def test_an_average_of_ones_own_contribution_alone_changes_no_bit() -> None:
    rule = DeltaMerge(vector(0.1))
    model = rule.take()
    rule.merge([average_of(rule.snapshot)])
    rule.advance([model + vector(0.2)])
    assert rule.take()[0] == 0.1 + 0.2


def test_a_step_counts_from_what_the_model_really_held() -> None:
    """Half precision rounds what is taken; the rounding is no progress."""
    rule = DeltaMerge(vector(1.001))
    rule.take()
    rule.rebase(vector(1.0))
    rule.advance([vector(1.5)])
    assert_allclose(rule.take(), vector(1.501))


def test_the_papers_rule_takes_the_average_when_on_time_and_counts_itself_once_more_when_late() -> (
    None
):
    rule = PaperMerge(vector(0))
    rule.advance([vector(2)])
    rule.merge([average_of(vector(2), vector(6))])
    assert_array_equal(rule.take(), vector(4))
    rule.merge([average_of(vector(2), vector(6), fresh=False)])
    rule.advance([vector(10)])
    assert_array_equal(rule.take(), vector((2 + 6 + 10) / 3))


def test_the_papers_rule_shows_the_model_before_its_average() -> None:
    rule = PaperMerge(vector(0))
    rule.advance([vector(2)])
    rule.merge([average_of(vector(2), vector(6))])
    rule.take()
    assert_array_equal(rule.snapshot, vector(2))


@pytest.mark.parametrize("kind", [DeltaMerge, PaperMerge])
def test_what_was_handed_out_never_changes(kind: Callable[[Values], MergeRule]) -> None:
    rule = kind(vector(1, 2))
    seen = [rule.snapshot, rule.take()]
    rule.merge([average_of(vector(1), vector(9), begin=1)])
    rule.advance([vector(5, 6)])
    seen.append(rule.snapshot)
    before = [values.copy() for values in seen]
    rule.merge([average_of(vector(5, 6), vector(7, 8))])
    rule.advance([vector(3, 3)])
    rule.take()
    for values, copy in zip(seen, before, strict=True):
        assert_array_equal(values, copy)


@given(st.lists(st.sampled_from(["step", "merge", "look"]), max_size=20))
def test_the_deltas_rule_writes_into_no_vector_that_was_handed_out(events: list[str]) -> None:
    rule, seen = DeltaMerge(vector(1, 2)), list[Values]()
    model, expected = rule.take().copy(), vector(1, 2)
    for event in events:
        if event == "step":
            model += 1
            rule.advance([model])
            model, expected = rule.take().copy(), expected + 1
        elif event == "merge":
            contributed = rule.current.copy()
            rule.merge([average_of(contributed, contributed + 4)])
            expected = expected + 2
        else:
            seen += [rule.snapshot, rule.snapshot.copy()]
        assert_array_equal(rule.current, expected)
    for values, copy in zip(seen[::2], seen[1::2], strict=True):
        assert_array_equal(values, copy)


def test_a_model_that_is_not_finite_changes_nothing_even_where_vectors_are_used_again() -> None:
    rule = DeltaMerge(vector(0, 0))
    for _ in range(2):
        model = rule.take()
        rule.merge([average_of(rule.current.copy(), vector(4, 8))])
        assert not rule.advance([vector(1, np.nan)])
        before = rule.current.copy()
        assert rule.advance([model + vector(1, 1)])
        assert_array_equal(rule.take(), before + 1)


@pytest.mark.parametrize("kind", [DeltaMerge, PaperMerge])
def test_a_model_that_is_given_is_kept_without_a_copy(kind: Callable[[Values], MergeRule]) -> None:
    rule, given = kind(vector(0, 0)), vector(1, 2)
    assert rule.advance([given], is_given=True)
    assert rule.take() is given
    assert rule.advance([given + 1])
    assert_array_equal(rule.take(), vector(2, 3))
    assert_array_equal(given, vector(1, 2))


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
def test_both_rules_give_a_rank_that_was_on_time_the_bits_of_the_average(
    contributions: list[Values],
) -> None:
    for own, mine in enumerate(contributions):
        piece = piece_of(contributions, [1.0] * len(contributions), own, fresh=True)
        assert (
            merge_delta(mine, piece).tobytes()
            == merge_paper(mine, piece).tobytes()
            == piece.average[:].tobytes()
        )


def test_the_papers_rule_for_a_late_rank() -> None:
    stale, other, now = np.array([2.0]), np.array([6.0]), np.array([10.0])
    piece = piece_of([stale, other], [1.0, 1.0], 0, fresh=False)
    assert merge_paper(now, piece).tolist() == [(2.0 + 6.0 + 10.0) / 3]
    assert merge_delta(now, piece).tolist() == [4.0 + (10.0 - 2.0)]


def test_a_rank_that_is_not_in_the_average_keeps_its_model_or_counts_once_more() -> None:
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
        average=piece.average[:].astype(np.float32),
        notes=piece.notes,
        contributed=values,
        fresh=False,
    )
    assert merge_delta(values, piece).dtype == merge_paper(values, piece).dtype == np.float32
