"""The state that the trainer, the protocol and the membership of a rank share."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from offbeat.averaging.background.interface import Contribution, Piece, VersionResult
from offbeat.averaging.background.merge_rules import DeltaMerge
from offbeat.averaging.background.shared_model import SharedModel
from offbeat.codec.model_wire import Note, Values
from offbeat.errors import PeerError

NONE = np.empty(0, np.int64)


def model(*values: float) -> Values:
    return np.array(values, np.float32)


@pytest.fixture
def shared() -> SharedModel:
    shared = SharedModel(DeltaMerge)
    shared.begin(model(0), NONE, step=0)
    shared.take()
    return shared


def outcome(
    version: int,
    mine: Contribution | None,
    other: float,
    counters: tuple[int, ...] = (),
    *,
    step: int = 0,
) -> VersionResult:
    """Of a group of two that have made `step` steps, with a model of one element."""
    own = 0.0 if mine is None else float(mine.values[0])
    piece = Piece(
        begin=0,
        average=model((own + other) / 2),
        notes=tuple(Note(weight=1.0, step=step, fresh=fresh) for fresh in (True, False)),
        contributed=None if mine is None else mine.values,
        fresh=mine is not None and mine.fresh,
        counters=np.array(counters, np.int64),
    )
    return VersionResult(version=version, group=(0, 1), pieces=(piece,))


def never(version: int) -> bool:
    return False


def always(version: int) -> bool:
    return True


def test_there_is_nothing_to_contribute_before_there_is_a_model() -> None:
    shared = SharedModel(DeltaMerge)
    assert shared.contribute(0) is None
    assert shared.snapshot() is None
    assert not shared.has_begun


def test_a_rank_that_arrives_is_fresh_and_one_that_computes_is_not(
    shared: SharedModel,
) -> None:
    stale = shared.contribute(0)
    assert stale is not None
    assert not stale.fresh
    shared.close_version(outcome(0, stale, 0.0))
    assert shared.arrive(never) is None  # it has had its average
    assert shared.arrive(never) == 1
    fresh = shared.contribute(1)
    assert fresh is not None
    assert fresh.fresh


def test_an_invitation_is_followed_even_after_a_contribution_on_the_ranks_behalf(
    shared: SharedModel,
) -> None:
    answered = shared.contribute(0)
    shared.close_version(outcome(0, answered, 0.0))
    shared.invite(4)
    assert shared.arrive(never) == 4


def test_an_invitation_is_void_once_its_version_went_on_without_waiting_any_longer(
    shared: SharedModel,
) -> None:
    shared.invite(0)
    late = shared.contribute(0)
    shared.close_version(outcome(0, late, 0.0))
    assert shared.arrive(always) is None


def test_one_average_at_a_time(shared: SharedModel) -> None:
    first = shared.contribute(0)
    assert shared.contribute(1) is None
    shared.close_version(outcome(0, first, 4.0))
    later = shared.contribute(2)
    assert later is not None
    assert_array_equal(later.values, model(2))


def test_without_one_at_a_time_a_rank_contributes_whenever_it_is_asked() -> None:
    shared = SharedModel(DeltaMerge, one_at_a_time=False)
    shared.begin(model(0), NONE, step=0)
    assert shared.contribute(7) is not None
    assert shared.contribute(8) is not None
    assert shared.arrive(never) == 9  # a contribution on its behalf does not count


def test_a_trainer_that_need_not_wait_does_without_a_version_while_another_is_under_way(
    shared: SharedModel,
) -> None:
    assert shared.arrive(never) == 0
    mine = shared.contribute(0)
    shared.advance([model(1)], NONE)
    assert shared.arrive(never) is None
    shared.close_version(outcome(0, mine, 0.0))
    assert shared.arrive(never) == 1


def test_one_that_must_wait_does_until_it_is_over(
    shared: SharedModel, in_thread: Callable[..., threading.Thread]
) -> None:
    assert shared.arrive(always) == 0
    mine = shared.contribute(0)
    waiting = in_thread(shared.wait)
    shared.close_version(outcome(0, mine, 6.0))
    waiting.join(60)
    assert not waiting.is_alive()
    assert_array_equal(shared.take()[0], model(3))


def test_one_that_can_do_without_the_average_waits_for_arrivals_alone(
    shared: SharedModel, in_thread: Callable[..., threading.Thread]
) -> None:
    assert shared.arrive(always) == 0
    mine = shared.contribute(0)
    for_average = in_thread(shared.wait)
    shared.quorum_arrived(0)
    shared.wait(for_average=False)
    assert for_average.is_alive()
    shared.advance([model(1)], NONE)
    assert_array_equal(shared.take()[0], model(1))
    shared.close_version(outcome(0, mine, 6.0))
    shared.advance([model(3)], NONE)
    assert_array_equal(
        shared.take()[0], model(3 + 3)
    )  # the average, and what the trainer did since it contributed
    for_average.join(60)
    assert not for_average.is_alive()


def test_a_rank_does_not_arrive_while_the_average_before_travels(
    shared: SharedModel, in_thread: Callable[..., threading.Thread]
) -> None:
    assert shared.arrive(always) == 0
    mine = shared.contribute(0)
    shared.quorum_arrived(0)
    shared.wait(for_average=False)
    arriving = in_thread(shared.arrive, always)
    assert shared.is_arrived_at(0)
    shared.close_version(outcome(0, mine, 6.0))
    arriving.join(60)
    assert shared.is_arrived_at(1)
    waiting = in_thread(lambda: shared.wait(for_average=False))
    assert waiting.is_alive()  # the quorum of one version does not count for the next
    shared.begin_generation()
    waiting.join(60)
    assert not waiting.is_alive()


def test_a_new_generation_ends_all_waits(
    shared: SharedModel, in_thread: Callable[..., threading.Thread]
) -> None:
    assert shared.arrive(always) == 0
    waiting = in_thread(shared.wait)
    shared.begin_generation()
    waiting.join(60)
    assert not waiting.is_alive()
    assert shared.arrive(never) == 0  # versions are numbered anew


def test_an_error_of_the_protocol_comes_out_at_the_trainer(shared: SharedModel) -> None:
    assert shared.arrive(always) == 0
    shared.fail(PeerError("they are dead"))
    with pytest.raises(PeerError, match="they are dead"):
        shared.wait()
    with pytest.raises(PeerError, match="they are dead"):
        shared.arrive(never)


def test_counters_stay_the_ranks_own(shared: SharedModel) -> None:
    """Each rank counts its own batches; one that went on from the largest count of its peers would
    count more than any rank has seen.
    """
    shared.begin(model(0), np.array([3, 5]), step=0)
    mine = shared.contribute(0)
    shared.close_version(outcome(0, mine, 0.0, counters=(4, 9)))
    assert_array_equal(shared.take()[1], [3, 5])
    shared.advance([model(0)], np.array([4, 6]))
    assert_array_equal(shared.take()[1], [4, 6])


def test_models_that_were_asked_for_are_waited_for_only_from_the_living(
    shared: SharedModel,
) -> None:
    theirs = Contribution(values=model(9), step=3, fresh=False)
    shared.receive_model(1, theirs)
    shared.receive_model(3, None)
    shared.mark_dead(2)
    assert shared.collect_models(frozenset({1, 2, 3}), shared.epoch, timeout_s=60) == {1: theirs}


def test_a_model_that_does_not_arrive_is_left_out(shared: SharedModel) -> None:
    assert shared.collect_models(frozenset({1}), shared.epoch, timeout_s=0.0) == {}


def test_waiting_for_the_last_average_ends_when_the_protocol_says_so(
    shared: SharedModel, in_thread: Callable[..., threading.Thread]
) -> None:
    waiting = in_thread(shared.wait_until_final, shared.epoch)
    shared.mark_final()
    waiting.join(60)
    assert not waiting.is_alive()


def test_an_expelled_rank_continues_alone_and_then_adopts_a_members_model(
    shared: SharedModel,
) -> None:
    shared.expel()
    assert shared.contribute(5) is None
    shared.advance([model(7)], NONE)
    assert shared.arrive(always) is None
    assert_array_equal(shared.take()[0], model(7))
    shared.adopt(Contribution(values=model(100), step=50, fresh=False))
    shared.advance([model(8)], NONE)  # of a step that began before
    assert_array_equal(shared.take()[0], model(100))
    assert shared.step == 2
    assert shared.snapshot() is not None


def test_a_newcomer_counts_on_from_the_step_of_the_model_it_took() -> None:
    shared = SharedModel(DeltaMerge)
    shared.adopt(Contribution(values=model(100), step=50, fresh=False))
    assert shared.has_begun
    assert shared.step == 50
    model_taken, *_ = shared.take()
    shared.advance([model_taken + 1], NONE)
    assert_array_equal(shared.take()[0], model(101))


def test_a_run_that_is_set_back_to_an_earlier_state_is_not_behind_itself(
    shared: SharedModel,
) -> None:
    shared.close_version(outcome(0, shared.contribute(0), 0.0, step=100))
    assert shared.steps_behind == 100
    shared.forget()
    shared.begin(model(0), NONE, step=50)
    shared.close_version(outcome(1, shared.contribute(1), 0.0, step=50))
    assert shared.steps_behind == 0


def test_members_that_are_late_for_long_are_given_up_until_they_have_caught_up(
    shared: SharedModel,
) -> None:
    shared.hold(frozenset({1, 2}))
    assert shared.wait_for_late(0.0) == {1, 2}
    assert not shared.wait_for_late(60.0)  # it waits for them no more
    shared.hold(frozenset({2}))
    shared.hold(frozenset({1, 2}))  # rank 1 is late anew
    assert shared.wait_for_late(0.0) == {1}


def expect_rest_until_resumed(shared: SharedModel) -> None:
    assert not shared.await_step(4)
    mine = shared.contribute(4)
    assert mine is not None
    assert mine.fresh
    shared.resume()
    assert shared.await_step(5)


def test_a_rank_that_rests_has_ended_its_step(shared: SharedModel) -> None:
    assert shared.await_step(3)
    assert shared.take_awaited() == 3
    shared.rest()
    expect_rest_until_resumed(shared)


def test_a_rank_that_rests_does_so_in_the_next_generation_too(shared: SharedModel) -> None:
    shared.rest()
    shared.begin_generation()
    expect_rest_until_resumed(shared)
