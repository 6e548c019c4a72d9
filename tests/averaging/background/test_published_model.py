"""The state that the trainer, the protocol and the membership of a rank share."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from offbeat.averaging.background.interface import Contribution, Piece, VersionResult
from offbeat.averaging.background.merge_rules import DeltaMerge
from offbeat.averaging.background.model_state import ModelState
from offbeat.averaging.background.published_model import PublishedModel
from offbeat.codec.model_wire import Note, Values
from offbeat.errors import PeerError

NONE = np.empty(0, np.int64)


def model(*values: float) -> Values:
    return np.array(values, np.float32)


@pytest.fixture
def published() -> PublishedModel:
    published = PublishedModel(ModelState(DeltaMerge))
    published.trainer.begin(model(0), NONE, step=0)
    published.trainer.take()
    return published


def outcome(
    version: int, mine: Contribution | None, other: float, counters: tuple[int, ...] = ()
) -> VersionResult:
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
    return VersionResult(version=version, group=(0, 1), pieces=(piece,), opened_s=0.0, closed_s=0.0)


def never(version: int) -> bool:
    return False


def always(version: int) -> bool:
    return True


def test_there_is_nothing_to_contribute_before_there_is_a_model() -> None:
    published = PublishedModel(ModelState(DeltaMerge))
    assert published.protocol.contribute(0) is None
    assert published.protocol.snapshot() is None
    assert not published.trainer.has_begun


def test_a_rank_that_arrives_is_fresh_and_one_that_computes_is_not(
    published: PublishedModel,
) -> None:
    stale = published.protocol.contribute(0)
    assert stale is not None
    assert not stale.fresh
    published.protocol.close(outcome(0, stale, 0.0))
    assert published.trainer.arrive(never) is None  # it has had its average
    assert published.trainer.arrive(never) == 1
    fresh = published.protocol.contribute(1)
    assert fresh is not None
    assert fresh.fresh


def test_an_invitation_is_followed_even_after_a_contribution_on_the_ranks_behalf(
    published: PublishedModel,
) -> None:
    answered = published.protocol.contribute(0)
    published.protocol.close(outcome(0, answered, 0.0))
    published.protocol.invite(4)
    assert published.trainer.arrive(never) == 4


def test_an_invitation_is_void_once_its_version_went_on_without_waiting_any_longer(
    published: PublishedModel,
) -> None:
    published.protocol.invite(0)
    late = published.protocol.contribute(0)
    published.protocol.close(outcome(0, late, 0.0))
    assert published.trainer.arrive(always) is None


def test_one_average_at_a_time(published: PublishedModel) -> None:
    first = published.protocol.contribute(0)
    assert published.protocol.contribute(1) is None
    published.protocol.close(outcome(0, first, 4.0))
    later = published.protocol.contribute(2)
    assert later is not None
    assert_array_equal(later.values, model(2))


def test_without_one_at_a_time_a_rank_contributes_whenever_it_is_asked() -> None:
    published = PublishedModel(ModelState(DeltaMerge), one_at_a_time=False)
    published.trainer.begin(model(0), NONE, step=0)
    assert published.protocol.contribute(7) is not None
    assert published.protocol.contribute(8) is not None
    assert published.trainer.arrive(never) == 9  # a contribution on its behalf does not count


def test_a_trainer_that_need_not_wait_does_without_a_version_while_another_is_under_way(
    published: PublishedModel,
) -> None:
    assert published.trainer.arrive(never) == 0
    mine = published.protocol.contribute(0)
    published.trainer.advance([model(1)], NONE)
    assert published.trainer.arrive(never) is None
    published.protocol.close(outcome(0, mine, 0.0))
    assert published.trainer.arrive(never) == 1


def test_one_that_must_wait_does_until_it_is_over(
    published: PublishedModel, in_thread: Callable[..., threading.Thread]
) -> None:
    assert published.trainer.arrive(always) == 0
    mine = published.protocol.contribute(0)
    waiting = in_thread(published.trainer.wait)
    published.protocol.close(outcome(0, mine, 6.0))
    waiting.join(60)
    assert not waiting.is_alive()
    assert_array_equal(published.trainer.take()[0], model(3))


def test_one_that_can_do_without_the_average_waits_for_arrivals_alone(
    published: PublishedModel, in_thread: Callable[..., threading.Thread]
) -> None:
    assert published.trainer.arrive(always) == 0
    mine = published.protocol.contribute(0)
    for_average = in_thread(published.trainer.wait)
    published.protocol.quorum_arrived(0)
    published.trainer.wait(for_average=False)
    assert for_average.is_alive()
    published.trainer.advance([model(1)], NONE)
    assert_array_equal(published.trainer.take()[0], model(1))
    published.protocol.close(outcome(0, mine, 6.0))
    published.trainer.advance([model(3)], NONE)
    assert_array_equal(
        published.trainer.take()[0], model(3 + 3)
    )  # the average, and what the trainer did since it contributed
    for_average.join(60)
    assert not for_average.is_alive()


def test_a_rank_does_not_arrive_while_the_average_before_travels(
    published: PublishedModel, in_thread: Callable[..., threading.Thread]
) -> None:
    assert published.trainer.arrive(always) == 0
    mine = published.protocol.contribute(0)
    published.protocol.quorum_arrived(0)
    published.trainer.wait(for_average=False)
    arriving = in_thread(published.trainer.arrive, always)
    assert published.membership.is_arrived_at(0)
    published.protocol.close(outcome(0, mine, 6.0))
    arriving.join(60)
    assert published.membership.is_arrived_at(1)
    waiting = in_thread(lambda: published.trainer.wait(for_average=False))
    assert waiting.is_alive()  # the quorum of one version does not count for the next
    published.membership.begin_generation()
    waiting.join(60)
    assert not waiting.is_alive()


def test_a_new_generation_ends_all_waits(
    published: PublishedModel, in_thread: Callable[..., threading.Thread]
) -> None:
    assert published.trainer.arrive(always) == 0
    waiting = in_thread(published.trainer.wait)
    published.membership.begin_generation()
    waiting.join(60)
    assert not waiting.is_alive()
    assert published.trainer.arrive(never) == 0  # versions are numbered anew


def test_an_error_of_the_protocol_comes_out_at_the_trainer(published: PublishedModel) -> None:
    assert published.trainer.arrive(always) == 0
    published.membership.fail(PeerError("they are dead"))
    with pytest.raises(PeerError, match="they are dead"):
        published.trainer.wait()
    with pytest.raises(PeerError, match="they are dead"):
        published.trainer.arrive(never)


def test_counters_stay_the_ranks_own(published: PublishedModel) -> None:
    """Each rank counts its own batches; one that went on from the largest count of its peers would
    count more than any rank has seen.
    """
    published.trainer.begin(model(0), np.array([3, 5]), step=0)
    mine = published.protocol.contribute(0)
    published.protocol.close(outcome(0, mine, 0.0, counters=(4, 9)))
    assert_array_equal(published.trainer.take()[1], [3, 5])
    published.trainer.advance([model(0)], np.array([4, 6]))
    assert_array_equal(published.trainer.take()[1], [4, 6])


def test_models_that_were_asked_for_are_waited_for_only_from_the_living(
    published: PublishedModel,
) -> None:
    theirs = Contribution(values=model(9), step=3, fresh=False)
    published.protocol.receive_model(1, theirs)
    published.protocol.receive_model(3, None)
    published.protocol.mark_dead(2)
    assert published.membership.collect_models(
        frozenset({1, 2, 3}), published.membership.epoch, timeout_s=60
    ) == {1: theirs}


def test_a_model_that_does_not_arrive_is_left_out(published: PublishedModel) -> None:
    assert (
        published.membership.collect_models(
            frozenset({1}), published.membership.epoch, timeout_s=0.0
        )
        == {}
    )


def test_waiting_for_the_last_average_ends_when_the_protocol_says_so(
    published: PublishedModel, in_thread: Callable[..., threading.Thread]
) -> None:
    waiting = in_thread(published.membership.wait_until_final, published.membership.epoch)
    published.protocol.mark_final()
    waiting.join(60)
    assert not waiting.is_alive()


def test_an_expelled_rank_continues_alone_and_then_adopts_a_members_model(
    published: PublishedModel,
) -> None:
    published.membership.expel()
    assert published.protocol.contribute(5) is None
    published.trainer.advance([model(7)], NONE)
    assert published.trainer.arrive(always) is None
    assert_array_equal(published.trainer.take()[0], model(7))
    published.membership.adopt(Contribution(values=model(100), step=50, fresh=False))
    published.trainer.advance([model(8)], NONE)  # of a step that began before
    assert_array_equal(published.trainer.take()[0], model(100))
    assert published.trainer.step == 2
    assert published.protocol.snapshot() is not None


def test_a_newcomer_counts_on_from_the_step_of_the_model_it_took() -> None:
    published = PublishedModel(ModelState(DeltaMerge))
    published.membership.adopt(Contribution(values=model(100), step=50, fresh=False))
    assert published.trainer.has_begun
    assert published.trainer.step == 50
    model_taken, *_ = published.trainer.take()
    published.trainer.advance([model_taken + 1], NONE)
    assert_array_equal(published.trainer.take()[0], model(101))


def test_members_that_are_late_for_long_are_given_up_until_they_have_caught_up(
    published: PublishedModel,
) -> None:
    published.protocol.hold(frozenset({1, 2}))
    assert published.trainer.wait_for_late(0.0) == {1, 2}
    assert not published.trainer.wait_for_late(60.0)  # it waits for them no more
    published.protocol.hold(frozenset({2}))
    published.protocol.hold(frozenset({1, 2}))  # rank 1 is late anew
    assert published.trainer.wait_for_late(0.0) == {1}


def test_a_rank_that_rests_has_ended_its_step(published: PublishedModel) -> None:
    assert published.protocol.await_step(3)
    assert published.membership.take_awaited() == 3
    published.trainer.rest()
    assert not published.protocol.await_step(4)
    mine = published.protocol.contribute(4)
    assert mine is not None
    assert mine.fresh
    published.trainer.resume()
    assert published.protocol.await_step(5)
