"""Where a rank stands between its trainer and the protocol."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from offbeat.averaging.background.group_base import Contribution, Outcome, Piece
from offbeat.averaging.background.merge_rules import DeltaIterate
from offbeat.averaging.background.published_model import Replica
from offbeat.codec.model_wire import Note, Values
from offbeat.errors import PeerError

NONE = np.empty(0, np.int64)


def model(*values: float) -> Values:
    return np.array(values, np.float32)


@pytest.fixture
def replica() -> Replica:
    replica = Replica(weight=1.0, make_iterate=DeltaIterate)
    replica.begin(model(0), NONE, step=0)
    replica.take()
    return replica


def outcome(
    version: int, mine: Contribution | None, other: float, counters: tuple[int, ...] = ()
) -> Outcome:
    """Of a group of two, with a model of one element."""
    own = 0.0 if mine is None else float(mine.values[0])
    piece = Piece(
        begin=0,
        average=model((own + other) / 2),
        notes=(Note(weight=1.0, step=0, fresh=True), Note(weight=1.0, step=0, fresh=False)),
        contributed=None if mine is None else mine.values,
        fresh=mine is not None and mine.fresh,
        counters=np.array(counters, np.int64),
    )
    return Outcome(version=version, group=(0, 1), pieces=(piece,), opened_s=0.0, closed_s=0.0)


def never(version: int) -> bool:
    return False


def always(version: int) -> bool:
    return True


def test_there_is_nothing_to_contribute_before_there_is_a_model() -> None:
    replica = Replica(weight=1.0, make_iterate=DeltaIterate)
    assert replica.contribute(0) is None
    assert replica.snapshot() is None
    assert not replica.ready


def test_who_arrives_is_fresh_and_who_computes_is_not(replica: Replica) -> None:
    stale = replica.contribute(0)
    assert stale is not None
    assert not stale.fresh
    replica.close(outcome(0, stale, 0.0))
    assert replica.arrive(never) is None  # it has had its average
    assert replica.arrive(never) == 1
    fresh = replica.contribute(1)
    assert fresh is not None
    assert fresh.fresh


def test_an_invitation_is_followed_even_by_who_was_answered_for(replica: Replica) -> None:
    answered = replica.contribute(0)
    replica.close(outcome(0, answered, 0.0))
    replica.invite(4)
    assert replica.arrive(never) == 4


def test_an_invitation_is_void_once_its_version_went_on_without_waiting_any_longer(
    replica: Replica,
) -> None:
    replica.invite(0)
    late = replica.contribute(0)
    replica.close(outcome(0, late, 0.0))
    assert replica.arrive(always) is None


def test_one_average_at_a_time(replica: Replica) -> None:
    first = replica.contribute(0)
    assert replica.contribute(1) is None
    replica.close(outcome(0, first, 4.0))
    later = replica.contribute(2)
    assert later is not None
    assert_array_equal(later.values, model(2))


def test_where_ranks_do_not_take_turns_an_answer_is_given_at_any_time() -> None:
    replica = Replica(weight=1.0, make_iterate=DeltaIterate, by_turns=False)
    replica.begin(model(0), NONE, step=0)
    assert replica.contribute(7) is not None
    assert replica.contribute(8) is not None
    assert replica.arrive(never) == 9  # being answered for does not count as a turn


def test_a_trainer_that_need_not_wait_does_without_a_version_while_another_is_under_way(
    replica: Replica,
) -> None:
    assert replica.arrive(never) == 0
    mine = replica.contribute(0)
    replica.advance(model(1), NONE)
    assert replica.arrive(never) is None
    replica.close(outcome(0, mine, 0.0))
    assert replica.arrive(never) == 1


def test_one_that_must_wait_does_until_it_is_over(
    replica: Replica, in_thread: Callable[..., threading.Thread]
) -> None:
    assert replica.arrive(always) == 0
    mine = replica.contribute(0)
    waiting = in_thread(replica.wait)
    replica.close(outcome(0, mine, 6.0))
    waiting.join(10)
    assert not waiting.is_alive()
    assert_array_equal(replica.take()[0], model(3))


def test_one_that_can_do_without_the_average_waits_for_arrivals_alone(
    replica: Replica, in_thread: Callable[..., threading.Thread]
) -> None:
    assert replica.arrive(always) == 0
    mine = replica.contribute(0)
    for_average = in_thread(replica.wait)
    replica.gathered(0)
    replica.wait(for_average=False)
    assert for_average.is_alive()
    replica.advance(model(1), NONE)
    assert_array_equal(replica.take()[0], model(1))
    replica.close(outcome(0, mine, 6.0))
    replica.advance(model(3), NONE)
    assert_array_equal(
        replica.take()[0], model(3 + 3)
    )  # the average, and what the trainer did since it contributed
    for_average.join(10)
    assert not for_average.is_alive()


def test_a_meeting_is_not_arrived_at_while_the_one_before_travels(
    replica: Replica, in_thread: Callable[..., threading.Thread]
) -> None:
    assert replica.arrive(always) == 0
    mine = replica.contribute(0)
    replica.gathered(0)
    replica.wait(for_average=False)
    arriving = in_thread(replica.arrive, always)
    assert replica.is_arrived_at(0)
    replica.close(outcome(0, mine, 6.0))
    arriving.join(10)
    assert replica.is_arrived_at(1)
    waiting = in_thread(lambda: replica.wait(for_average=False))
    assert waiting.is_alive()  # the word of one meeting does not count for the next
    replica.restart()
    waiting.join(10)
    assert not waiting.is_alive()


def test_a_change_of_membership_frees_who_waits(
    replica: Replica, in_thread: Callable[..., threading.Thread]
) -> None:
    assert replica.arrive(always) == 0
    waiting = in_thread(replica.wait)
    replica.restart()
    waiting.join(10)
    assert not waiting.is_alive()
    assert replica.arrive(never) == 0  # versions are numbered anew


def test_an_error_of_the_protocol_comes_out_at_the_trainer(replica: Replica) -> None:
    assert replica.arrive(always) == 0
    replica.fail(PeerError("they are gone"))
    with pytest.raises(PeerError, match="they are gone"):
        replica.wait()
    with pytest.raises(PeerError, match="they are gone"):
        replica.arrive(never)


def test_the_largest_counters_are_kept(replica: Replica) -> None:
    replica.begin(model(0), np.array([3, 5]), step=0)
    mine = replica.contribute(0)
    replica.close(outcome(0, mine, 0.0, counters=(4, 4)))
    replica.advance(model(0), np.array([1, 6]))
    assert_array_equal(replica.take()[1], [4, 6])


def test_models_that_were_asked_for_are_waited_for_only_from_the_living(replica: Replica) -> None:
    theirs = Contribution(values=model(9), step=3, fresh=False)
    replica.receive(1, theirs)
    replica.receive(3, None)
    replica.bury(2)
    assert replica.states(frozenset({1, 2, 3}), replica.epoch, patience_s=60) == {1: theirs}


def test_a_model_that_does_not_come_is_done_without(replica: Replica) -> None:
    assert replica.states(frozenset({1}), replica.epoch, patience_s=0.0) == {}


def test_waiting_for_rest_ends_when_the_last_one_rests_or_dies(
    replica: Replica, in_thread: Callable[..., threading.Thread]
) -> None:
    replica.rested(1)
    waiting = in_thread(replica.wait_for_rest, frozenset({1, 2}), replica.epoch)
    replica.bury(2)
    waiting.join(10)
    assert not waiting.is_alive()


def test_who_was_expelled_goes_on_alone_and_then_takes_a_members_model(replica: Replica) -> None:
    replica.leave()
    assert replica.contribute(5) is None
    replica.advance(model(7), NONE)
    assert replica.arrive(always) is None
    assert_array_equal(replica.take()[0], model(7))
    replica.adopt(Contribution(values=model(100), step=50, fresh=False))
    replica.advance(model(8), NONE)  # of a step that began before
    assert_array_equal(replica.take()[0], model(100))
    assert replica.step == 2
    assert replica.snapshot() is not None


def test_a_newcomer_counts_on_from_the_step_of_the_model_it_took() -> None:
    replica = Replica(weight=1.0, make_iterate=DeltaIterate)
    replica.adopt(Contribution(values=model(100), step=50, fresh=False))
    assert replica.ready
    assert replica.step == 50
    model_taken, _ = replica.take()
    replica.advance(model_taken + 1, NONE)
    assert_array_equal(replica.take()[0], model(101))
