"""What a rank shows, and how averages get into it while it trains."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from offbeat.averaging.background.group_base import Piece
from offbeat.averaging.background.merge_rules import DeltaIterate, Iterate, PaperIterate
from offbeat.codec.model_wire import Note, Values


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
    iterate = DeltaIterate(vector(0, 0))
    model = iterate.take()
    iterate.merge([average_of(iterate.shown, vector(4, 8))])
    iterate.advance(model + vector(1, 1))
    assert_array_equal(iterate.take(), vector(3, 5))


def test_delta_shows_what_it_has_merged_even_while_the_trainer_computes() -> None:
    """Else a rank that answers twice within a step would be pulled twice as far as the
    average is.
    """
    iterate = DeltaIterate(vector(0))
    iterate.take()
    for _ in range(3):
        iterate.merge([average_of(iterate.shown, vector(8))])
    assert_array_equal(iterate.shown, vector(7))


def test_delta_leaves_a_model_alone_that_is_not_in_the_average() -> None:
    iterate = DeltaIterate(vector(1))
    iterate.merge([average_of(vector(5), vector(7), own=None)])
    assert_array_equal(iterate.take(), vector(1))


@given(st.lists(st.tuples(st.sampled_from(["step", "merge"]), st.integers(-9, 9)), max_size=30))
def test_delta_keeps_the_mean_over_two_ranks_in_any_order_of_events(
    events: list[tuple[str, int]],
) -> None:
    ranks = [DeltaIterate(vector(0)), DeltaIterate(vector(10))]
    models = [rank.take() for rank in ranks]
    total = 10.0
    for kind, number in events:
        if kind == "step":
            mover = number % 2
            ranks[mover].advance(models[mover] + number)
            models[mover] = ranks[mover].take()
            total += number
        else:
            shown = [rank.shown for rank in ranks]
            for place, rank in enumerate(ranks):
                rank.merge([average_of(*shown, own=place)])
    assert_allclose(sum(rank.shown[0] for rank in ranks), total)


def test_an_average_of_nothing_but_ones_own_leaves_every_bit_alone() -> None:
    iterate = DeltaIterate(vector(0.1))
    model = iterate.take()
    iterate.merge([average_of(iterate.shown)])
    iterate.advance(model + vector(0.2))
    assert iterate.take()[0] == 0.1 + 0.2


def test_a_step_counts_from_what_the_model_really_held() -> None:
    """Half precision rounds what is taken; the rounding is no progress."""
    iterate = DeltaIterate(vector(1.001))
    iterate.take()
    iterate.hold(vector(1.0))
    iterate.advance(vector(1.5))
    assert_allclose(iterate.take(), vector(1.501))


def test_the_papers_rule_takes_the_average_when_on_time_and_counts_itself_once_more_when_late() -> (
    None
):
    iterate = PaperIterate(vector(0))
    iterate.advance(vector(2))
    iterate.merge([average_of(vector(2), vector(6))])
    assert_array_equal(iterate.take(), vector(4))
    iterate.merge([average_of(vector(2), vector(6), fresh=False)])
    iterate.advance(vector(10))
    assert_array_equal(iterate.take(), vector((2 + 6 + 10) / 3))


def test_the_papers_rule_shows_the_model_before_its_average() -> None:
    iterate = PaperIterate(vector(0))
    iterate.advance(vector(2))
    iterate.merge([average_of(vector(2), vector(6))])
    iterate.take()
    assert_array_equal(iterate.shown, vector(2))


@pytest.mark.parametrize("kind", [DeltaIterate, PaperIterate])
def test_what_was_handed_out_never_changes(kind: type[Iterate]) -> None:
    iterate = kind(vector(1, 2))
    seen = [iterate.shown, iterate.take()]
    iterate.merge([average_of(vector(1), vector(9), begin=1)])
    iterate.advance(vector(5, 6))
    seen.append(iterate.shown)
    before = [values.copy() for values in seen]
    iterate.merge([average_of(vector(5, 6), vector(7, 8))])
    iterate.advance(vector(3, 3))
    iterate.take()
    for values, copy in zip(seen, before, strict=True):
        assert_array_equal(values, copy)
