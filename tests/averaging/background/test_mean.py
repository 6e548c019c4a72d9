"""The mean of all models is of more than half of the members, or it is an error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pytest

from offbeat.arithmetic.groups import VersionGroup
from offbeat.averaging.background import progress_thread
from offbeat.averaging.background.interface import (
    Contribution,
    ProtocolCounts,
    ProtocolSettings,
)
from offbeat.averaging.background.merge_rules import DeltaMerge
from offbeat.averaging.background.progress_thread import ProgressThread
from offbeat.averaging.background.shared_model import SharedModel
from offbeat.codec.model_wire import MessageKind, ModelMessage, no_counters
from offbeat.errors import PeerError
from offbeat.membership.agreement import Generation, Member
from offbeat.transport.operations import Collective, RecvAny
from offbeat.transport.single_rank import SingleRank


def model(value: float) -> Contribution:
    return Contribution(values=np.array([value], np.float32), step=1, fresh=False)


class Rank:
    """Rank 0 of `num_members`, whose peers answer the first request for their models with the first
    entry of `answers`, and so on; the last entry answers all later ones.
    """

    def __init__(self, num_members: int, answers: Sequence[dict[int, float | None]]) -> None:
        self.notices: list[str] = []
        self.published = SharedModel(DeltaMerge)
        self.published.begin(np.array([6.0], np.float32), no_counters(), step=0)
        self._answers = list(answers)
        self.progress = ProgressThread(
            self.published,
            member=partial(Answering, self._answers),
            settings=lambda generation, position: ProtocolSettings(
                members=tuple(range(num_members)),
                generation=0,
                num_elements=1,
                group_of=lambda version: VersionGroup(ranks=(0,)),
            ),
            count=lambda driver: driver,
            notify=self.notices.append,
        )
        members = tuple(Member(rank, 0) for rank in range(num_members))
        first = Generation(number=0, members=members, newcomers=frozenset(), tickets=0)
        self.progress.begin(first, 0, SingleRank())

    def mean(self) -> tuple[list[float], frozenset[int]]:
        """The values, and who is missing."""
        into = np.empty(1, np.float32)
        _, missing = self.progress.mean(into)
        return into.tolist(), missing


class Answering:
    """Takes part in nothing, and gives the next of `answers` to a request for models."""

    def __init__(
        self,
        answers: list[dict[int, float | None]],
        rank: int,
        settings: ProtocolSettings,
        model: SharedModel,
    ) -> None:
        self._answers, self._model = answers, model

    def serve(self) -> Collective[ProtocolCounts]:
        while True:
            _, payload = yield RecvAny(frozenset({0}))
            message = ModelMessage.from_bytes(payload)
            if message.kind != MessageKind.FETCH_MODEL:
                return ProtocolCounts()
            answers = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
            for peer, value in answers.items():
                self._model.receive_model(peer, None if value is None else model(value))


@pytest.fixture
def rank_of() -> Iterator[type[Rank]]:
    made: list[Rank] = []

    class Kept(Rank):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            made.append(self)

    yield Kept
    for rank in made:
        rank.progress.close()


def test_peers_that_have_not_begun_to_train_are_waited_for(rank_of: type[Rank]) -> None:
    nobody: dict[int, float | None] = {1: None, 2: None}
    rank = rank_of(3, [nobody, nobody, {1: 3.0, 2: 0.0}])
    assert rank.mean() == ([3.0], frozenset())
    assert not rank.notices


def test_a_mean_of_more_than_half_says_whose_models_it_lacks(rank_of: type[Rank]) -> None:
    rank = rank_of(3, [{1: None, 2: 2.0}])
    assert rank.mean() == ([4.0], {1})
    assert any("without worker 1" in notice for notice in rank.notices)


@pytest.mark.parametrize(
    ("num_members", "answers"),
    [(2, {1: None}), (4, {1: 2.0, 2: None, 3: None}), (8, dict.fromkeys(range(1, 8)))],
)
def test_a_mean_of_half_of_the_models_is_an_error(
    rank_of: type[Rank],
    monkeypatch: pytest.MonkeyPatch,
    num_members: int,
    answers: dict[int, float | None],
) -> None:
    monkeypatch.setattr(progress_thread, "MEAN_TIMEOUT_S", 0.0)
    begun = 1 + sum(value is not None for value in answers.values())
    with pytest.raises(PeerError, match=f"only {begun} of {num_members} workers"):
        rank_of(num_members, [answers]).mean()


def test_the_dead_are_no_part_of_the_mean_once_they_are_known_for_long(
    rank_of: type[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_thread, "MEAN_TIMEOUT_S", 0.0)
    rank = rank_of(2, [{}])
    rank.published.mark_dead(1)
    assert rank.mean() == ([6.0], {1})


def test_a_worker_that_is_no_member_has_no_mean(
    rank_of: type[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_thread, "MEAN_TIMEOUT_S", 0.0)
    rank = rank_of(3, [{1: 1.0, 2: 2.0}])
    rank.published.expel()
    with pytest.raises(PeerError, match="no member of the run"):
        rank.mean()


def test_a_model_that_comes_too_late_for_one_mean_is_in_no_later_one(rank_of: type[Rank]) -> None:
    rank = rank_of(3, [{1: 3.0, 2: 0.0}])
    rank.published.receive_model(1, model(600.0))
    assert rank.mean() == ([3.0], frozenset())
