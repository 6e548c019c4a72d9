"""Gradients in averages that wait for no rank: each is owed until it is in some average, and every
average is applied once.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from offbeat.averaging.background.interface import Contribution, Piece, VersionResult
from offbeat.averaging.background.merge_rules import DeltaMerge
from offbeat.codec.model_wire import ABSENT, Note, Values
from offbeat.strategies.eagersgd import GradientLedger

NUM = 4
NOTHING = np.zeros(0, np.bool_)


class Rank(GradientLedger):
    """A rank that averages gradients, and models in version 99."""

    def __init__(self) -> None:
        super().__init__(
            NUM, 0, make_rule=DeltaMerge, averages_models=lambda version: version == 99
        )
        self.begin(np.zeros(NUM, np.float64), np.empty(0, np.int64), step=0)


def piece(
    begin: int,
    end: int,
    contributions: list[Contribution | None],
    own: int,
    *,
    left_out: bool = False,
) -> Piece:
    """The average of a range; `left_out`: the own contribution came too late."""
    others = [
        c
        for place, c in enumerate(contributions)
        if c is not None and not (left_out and place == own)
    ]
    mine = contributions[own]
    return Piece(
        begin=begin,
        average=np.mean([c.values[begin:end] for c in others], axis=0),
        notes=tuple(
            ABSENT
            if c is None or (left_out and place == own)
            else Note(weight=1.0, step=0, fresh=True)
            for place, c in enumerate(contributions)
        ),
        contributed=None if mine is None or left_out else mine.values[begin:end],
        fresh=False,
    )


def over(version: int, *pieces: Piece) -> VersionResult:
    return VersionResult(version=version, group=(0, 1), pieces=pieces)


def gradient(value: float) -> Values:
    return np.full(NUM, float(value))


def test_the_sum_is_divided_by_the_number_of_members_whichever_of_them_contributed() -> None:
    rank = Rank()
    rank.owe(gradient(6), NOTHING)
    mine = rank.contribute(0)
    rank.close_version(over(0, piece(0, NUM, [mine, None], 0)))
    assert_array_equal(rank.take_update()[0], gradient(3))
    assert rank.take_update()[0] is None
    assert rank.owed() is None


def test_a_rank_that_owes_nothing_stays_out_and_still_gets_the_average() -> None:
    rank = Rank()
    assert rank.contribute(0) is None
    theirs = Contribution(values=gradient(4), step=0, fresh=True)
    rank.close_version(over(0, piece(0, NUM, [None, theirs], 0)))
    assert_array_equal(rank.take_update()[0], gradient(2))


def test_a_gradient_that_came_too_late_is_owed_again_where_it_was_left_out() -> None:
    rank = Rank()
    rank.owe(gradient(5), NOTHING)
    mine = rank.contribute(0)
    theirs = Contribution(values=gradient(1), step=0, fresh=True)
    rank.owe(gradient(2), NOTHING)
    rank.close_version(
        over(0, piece(0, 2, [mine, theirs], 0), piece(2, NUM, [mine, theirs], 0, left_out=True))
    )
    assert_array_equal(rank.owed(), [2, 2, 7, 7])
    assert_array_equal(rank.take_update()[0], [3, 3, 0.5, 0.5])


def test_what_is_under_way_is_owed_until_its_average_comes() -> None:
    rank = Rank()
    rank.owe(gradient(5), NOTHING)
    mine = rank.contribute(0)
    rank.close_version(over(0, piece(0, 2, [mine, None], 0)))
    assert_array_equal(rank.owed(), [0, 0, 5, 5])
    rank.merge_late(0, piece(2, NUM, [mine, None], 0))
    assert rank.owed() is None
    assert_array_equal(rank.take_update()[0], gradient(2.5))


def test_a_new_membership_owes_what_the_old_one_had_under_way() -> None:
    rank = Rank()
    rank.owe(gradient(5), NOTHING)
    rank.contribute(0)
    rank.begin_generation()
    again = rank.contribute(0)
    assert again is not None
    assert_array_equal(again.values, gradient(5))


def test_what_an_owner_that_dies_while_it_sends_leaves_undecided_is_its_region_and_no_more() -> (
    None
):
    """Nobody asks who else has an average: where only rank 0 has it, it keeps it, and rank 1 owes
    its gradient again.
    """
    ranks = [Rank(), Rank()]
    ranks[0].owe(gradient(2), NOTHING)
    ranks[1].owe(gradient(4), NOTHING)
    offers = [rank.contribute(0) for rank in ranks]
    ranks[0].close_version(over(0, piece(0, 2, offers, 0), piece(2, NUM, offers, 0)))
    ranks[1].close_version(over(0, piece(0, 2, offers, 1)))
    ranks[1].finalize_version(0)
    assert ranks[0].owed() is None
    again = [rank.contribute(1) for rank in ranks]
    for place, rank in enumerate(ranks):
        rank.close_version(over(1, piece(0, NUM, again, place)))
        assert rank.owed() is None
    assert_array_equal(ranks[0].take_update()[0], [3, 3, 3 + 2, 3 + 2])  # rank 1's gradient twice
    assert_array_equal(ranks[1].take_update()[0], [3, 3, 2, 2])  # rank 0's gradient never


def test_some_versions_average_models() -> None:
    rank = Rank()
    rank.owe(gradient(5), NOTHING)
    mine = rank.contribute(99)
    assert mine is not None
    assert_array_equal(mine.values, gradient(0))
    rank.close_version(
        over(99, piece(0, NUM, [mine, Contribution(values=gradient(8), step=0, fresh=True)], 0))
    )
    assert_array_equal(rank.take()[0], gradient(4))
    assert_array_equal(rank.owed(), gradient(5))


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(-9, 9), st.booleans(), st.booleans()), max_size=25
    )
)
def test_nothing_is_lost(events: list[tuple[int, int, bool, bool]]) -> None:
    """applied + owed == the sum of gradients, over two ranks, in units of the mean."""
    ranks = [Rank(), Rank()]
    total = gradient(0)
    applied = gradient(0)
    for version, (rank, number, both, left_out) in enumerate(events):
        ranks[rank].owe(gradient(number), NOTHING)
        total += number
        if both:
            offers = [each.contribute(version) for each in ranks]
            late = left_out and all(offer is not None for offer in offers)
            if any(offer is not None for offer in offers):
                for place, each in enumerate(ranks):
                    each.close_version(over(version, made_of(offers, place, late=late)))
            else:
                for each in ranks:
                    each.close_version(over(version))
        updates = [each.take_update()[0] for each in ranks]
        assert (updates[0] is None) == (updates[1] is None)
        if updates[0] is not None and updates[1] is not None:
            assert_array_equal(updates[0], updates[1])
            applied += 2 * updates[0]
        owed = [each.owed() for each in ranks]
        assert_allclose(
            applied + sum(values for values in owed if values is not None), total, atol=1e-9
        )


def made_of(offers: list[Contribution | None], own: int, *, late: bool) -> Piece:
    """Rank 1's contribution is left out when it came late."""
    if not late:
        return piece(0, NUM, offers, own)
    seen: list[Contribution | None] = [offers[0], None]
    mine = offers[0] if own == 0 else None
    made = piece(0, NUM, seen, 0)
    return Piece(
        begin=0,
        average=made.average,
        notes=made.notes,
        contributed=None if mine is None else mine.values,
        fresh=False,
    )


@pytest.mark.parametrize("num", [1, 3])
def test_several_averages_that_came_between_two_steps_are_applied_together(num: int) -> None:
    rank = Rank()
    for version in range(num):
        rank.owe(gradient(2), NOTHING)
        mine = rank.contribute(version)
        rank.close_version(over(version, piece(0, NUM, [mine, None], 0)))
    assert_array_equal(rank.take_update()[0], gradient(num))
