"""One version among members who suspect each other at will, without a clock or a network.

Messages come in any order that keeps those of one sender in sequence, all come in the end, and
anybody may stop waiting for anybody at any time. What a member gets late it merges late.
"""

from __future__ import annotations

import random
import tracemalloc
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from group_support.world import note_of
from offbeat.arithmetic.groups import VersionGroup
from offbeat.averaging.background.interface import Contribution, Piece, ProtocolSettings
from offbeat.averaging.background.merge_rules import DeltaMerge, merge_delta
from offbeat.averaging.background.rounds import DirectRound, GroupRound, Outgoing, ScatteredRound
from offbeat.codec.few_bits import E3M0Values, LevelValues, LinearValues
from offbeat.codec.model_wire import ModelMessage
from offbeat.codec.rounding import CodedChanges, Rounding, warm
from offbeat.errors import WireError

BOTH_WAYS = pytest.mark.parametrize("kind", [ScatteredRound, DirectRound])


class Version:
    """Carries one version out, in an order drawn from a seed."""

    def __init__(
        self,
        kind: type[GroupRound],
        seed: int,
        rounding: Rounding | None = None,
        changes: CodedChanges | None = None,
    ) -> None:
        self.draw = random.Random(seed)
        self.group = tuple(self.draw.sample(range(9), self.draw.randint(2, 6)))
        self.num_elements = self.draw.choice([1, 4, 11])
        settings = ProtocolSettings(
            members=self.group,
            generation=0,
            num_elements=self.num_elements,
            num_counters=1,
            dtype=np.dtype(np.float64),
            group_of=lambda _: VersionGroup(ranks=self.group),
            rounding=rounding,
            changes=changes,
        )
        self.is_rounded, self.changes = rounding is not None, changes
        self.rounds = {
            rank: kind(0, self.group, rank=rank, settings=settings) for rank in self.group
        }
        self.weights = {rank: float(self.draw.randint(1, 3)) for rank in self.group}
        self.values = {rank: self._random_values() for rank in self.group}
        self.anchors = {rank: self._random_values() for rank in self.group}
        self.total = self.sum_of_values()
        self.given: dict[int, Contribution] = {}
        self.closed: set[int] = set()
        self.links: dict[tuple[int, int], deque[bytes]] = {}
        self.averages: dict[int, bytes] = {}

    def run(self) -> None:
        while moves := self._moves():
            rank, sender = self.draw.choice(moves)
            round_ = self.rounds[rank]
            if sender is not None:
                self._deliver(sender, rank)
            elif not round_.contributed:
                self._contribute(rank)
            else:
                self._send(rank, round_.proceed_without(round_.awaited() | self._some_others(rank)))
            self._settle(rank)

    def _moves(self) -> list[tuple[int, int | None]]:
        """Whose turn it may be, and whose message it then takes."""
        deliveries: list[tuple[int, int | None]] = [
            (rank, sender) for (sender, rank), link in self.links.items() if link
        ]
        not_over = [(rank, None) for rank, round_ in self.rounds.items() if not round_.over]
        return deliveries * 3 + not_over

    def _contribute(self, rank: int) -> None:
        mine = None
        if self.draw.random() < 0.9:
            self.given[rank] = Contribution(
                values=self.values[rank].copy(),
                step=self.draw.randint(0, 9),
                fresh=self.draw.random() < 0.5,
                weight=self.weights[rank],
                counters=np.array([self.draw.randint(-9, 9)]),
                anchor=None if self.changes is None else self.anchors[rank],
            )
            mine = replace(self.given[rank], values=self.values[rank].copy())
        absent = self._some_others(rank) if self.draw.random() < 0.5 else set()
        self._send(rank, self.rounds[rank].contribute(mine, absent, arrived=True))
        if mine is not None:
            mine.values.fill(np.nan)  # another snapshot takes its place
        update = self._random_values()
        self.values[rank] += update
        self.total += self.weights[rank] * update

    def _deliver(self, sender: int, rank: int) -> None:
        message = ModelMessage.from_bytes(self.links[sender, rank].popleft())
        if rank not in self.closed or self.rounds[rank].late_senders():
            self.rounds[rank].receive(sender, message)

    def _settle(self, rank: int) -> None:
        round_ = self.rounds[rank]
        if not round_.over:
            return
        assert round_.contributed
        if rank not in self.closed:
            self.closed.add(rank)
        for piece in round_.take_pieces():
            self._merge(rank, piece)

    def _merge(self, rank: int, piece: Piece) -> None:
        average = piece.average[:]
        if piece.codes is not None:
            average = Rounding().decode((piece.codes[0], piece.average[:]), piece.begin)
        # Whoever makes a coded average has other bits of it than those to whom it is sent.
        if piece.codes is not None or not (self.is_rounded or self.changes is not None):
            assert self.averages.setdefault(piece.begin, average.tobytes()) == average.tobytes()
        notes = {
            member: note
            for member, note in zip(self.group, piece.notes, strict=True)
            if note.weight
        }
        assert notes == {member: note_of(self.given[member]) for member in notes}
        in_it = [self.given[member] for member in notes]
        regions = [
            mine.values[piece.begin : piece.end]
            - (0 if mine.anchor is None else mine.anchor[piece.begin : piece.end])
            for mine in in_it
        ]
        mean = np.average(regions, axis=0, weights=[mine.weight for mine in in_it])
        # By rounding a value below 64 changes by 1/8 at most, an average once more, and its owner
        # takes what all members lose: at most 6 of them, of weights up to 3 times its own.
        precision = (1 + 18) / 8 if self.is_rounded else 1e-9
        if self.changes is not None:  # differences below 128, by a seventh of the largest at most
            precision = (1 + 18) * 128 / 7
        np.testing.assert_allclose(average, mean, rtol=1e-9, atol=precision)
        assert piece.counters.tolist() == [max(mine.counters[0] for mine in in_it)]
        assert (piece.contributed is not None) == (rank in notes)
        assert piece.fresh == (rank in notes and notes[rank].fresh)
        self.values[rank][piece.begin : piece.end] = merge_delta(
            self.values[rank][piece.begin : piece.end], piece
        )

    def _send(self, rank: int, outgoing: Outgoing) -> None:
        for peer, message in outgoing:
            self.links.setdefault((rank, peer), deque()).append(message)

    def _some_others(self, rank: int) -> set[int]:
        return {other for other in self.group if other != rank and self.draw.random() < 0.4}

    def _random_values(self) -> NDArray[np.float64]:
        return np.array([self.draw.randint(-350, 350) / 7 for _ in range(self.num_elements)])

    def sum_of_values(self) -> NDArray[np.float64]:
        return np.asarray(sum(self.weights[rank] * self.values[rank] for rank in self.group))


@pytest.mark.parametrize(
    ("rounding", "changes"),
    [
        (None, None),
        (Rounding(), None),
        (None, CodedChanges(E3M0Values())),
        (Rounding(), CodedChanges(LinearValues(4), (slice(1, 3),))),
        (None, CodedChanges(LevelValues(2))),
    ],
    ids=["whole", "rounded", "e3m0", "linear4", "levels"],
)
@BOTH_WAYS
@given(seed=st.integers(0, 2**32 - 1))
def test_the_mean_is_kept_whoever_is_suspected_when(
    rounding: Rounding | None, changes: CodedChanges | None, kind: type[GroupRound], seed: int
) -> None:
    version = Version(kind, seed, rounding, changes)
    version.run()
    np.testing.assert_allclose(version.sum_of_values(), version.total, rtol=1e-9, atol=1e-7)
    assert all(not round_.late_senders() for round_ in version.rounds.values())


def a_round(rank: int, kind: type[GroupRound] = ScatteredRound) -> GroupRound:
    settings = ProtocolSettings(
        members=(0, 1, 2),
        generation=0,
        num_elements=3,
        group_of=lambda _: VersionGroup(ranks=(0, 1, 2)),
    )
    return kind(0, (0, 1, 2), rank=rank, settings=settings)


def test_a_suspect_whose_contribution_is_in_is_sent_the_average() -> None:
    mine = Contribution(values=np.ones(3, np.float32), step=0, fresh=True)
    rounds = [a_round(rank) for rank in range(3)]
    parts = [dict(round_.contribute(mine, set(), arrived=True)) for round_ in rounds]
    rounds[0].receive(1, ModelMessage.from_bytes(parts[1][0]))
    sent = {
        rank: ModelMessage.from_bytes(message)
        for rank, message in rounds[0].proceed_without({1, 2})
    }
    assert [note.weight for note in sent[1].notes] == [1.0, 1.0, 0.0]
    assert sent[1].values.tolist() == [1.0]
    assert sent[2].values.size == 0
    assert not any(note.weight for note in sent[2].notes)


@BOTH_WAYS
def test_a_suspected_rank_is_sent_a_message_without_values(kind: type[GroupRound]) -> None:
    mine = Contribution(values=np.ones(3, np.float32), step=4, fresh=True)
    outgoing = a_round(0, kind).contribute(mine, {1}, arrived=True)
    sent = {rank: ModelMessage.from_bytes(message) for rank, message in outgoing}
    assert (sent[1].weight, sent[1].values.size, sent[1].step, sent[1].fresh, sent[1].arrived) == (
        0.0,
        0,
        4,
        True,
        True,
    )
    assert (sent[2].weight, sent[2].values.size) == (1.0, 1 if kind is ScatteredRound else 3)


def test_an_owner_that_is_not_in_its_average_does_not_round_it() -> None:
    """Nobody could make up for what rounding takes."""
    values = np.full(3, 1.001, np.float32)
    settings = ProtocolSettings(
        members=(0, 1, 2),
        generation=0,
        num_elements=3,
        group_of=lambda _: VersionGroup(ranks=(0, 1, 2)),
        rounding=Rounding(),
    )
    owner, other = (ScatteredRound(0, (0, 1, 2), rank=rank, settings=settings) for rank in (0, 1))
    owner.contribute(None, set(), arrived=True)
    mine = Contribution(values=values, step=0, fresh=True)
    chunk = ModelMessage.from_bytes(dict(other.contribute(mine, set(), arrived=True))[0])
    assert chunk.size == 1
    assert not chunk.values.size
    owner.receive(1, chunk)
    average = ModelMessage.from_bytes(dict(owner.proceed_without({2}))[1])
    assert average.values.tolist() == Rounding().decode((chunk.codes, chunk.values), 0).tolist()
    other.receive(0, average)
    other.receive(2, replace(average, begin=2))
    pieces = other.take_pieces()
    assert len(pieces) == 2
    assert all(merge_delta(values[:1], piece).tolist() == [values[0]] for piece in pieces)


@pytest.mark.parametrize("rounds", [True, False])
def test_a_rank_that_rounds_otherwise_is_refused(rounds: bool) -> None:
    mine = Contribution(values=np.ones(3, np.float32), step=0, fresh=True)
    theirs, other = a_round(0), a_round(1)
    rounded = ProtocolSettings(
        members=(0, 1, 2),
        generation=0,
        num_elements=3,
        group_of=lambda _: VersionGroup(ranks=(0, 1, 2)),
        rounding=Rounding(),
    )
    if rounds:
        other = ScatteredRound(0, (0, 1, 2), rank=1, settings=rounded)
    else:
        theirs = ScatteredRound(0, (0, 1, 2), rank=0, settings=rounded)
    chunk = ModelMessage.from_bytes(dict(other.contribute(mine, set(), arrived=True))[0])
    with pytest.raises(WireError, match="have the same options"):
        theirs.receive(1, chunk)


def test_a_chunk_that_comes_after_the_average_is_not_in_it() -> None:
    mine = Contribution(values=np.ones(3, np.float32), step=0, fresh=True)
    owner = a_round(0)
    owner.contribute(mine, set(), arrived=True)
    part = ModelMessage.from_bytes(dict(a_round(1).contribute(mine, set(), arrived=True))[0])
    owner.receive(2, part)
    owner.proceed_without({1})
    (piece,) = owner.take_pieces()
    owner.receive(1, part)
    assert [note.weight for note in piece.notes] == [1, 0, 1]
    assert not owner.take_pieces()


def test_a_rank_with_an_average_must_contribute_and_sends_nothing_to_its_owner() -> None:
    mine = Contribution(values=np.ones(3, np.float32), step=0, fresh=True)
    owner, late = a_round(1), a_round(0)
    owner.contribute(mine, {0}, arrived=True)
    average = dict(owner.proceed_without({0, 2}))[0]
    assert not late.must_contribute(3, set(), set())
    late.receive(1, ModelMessage.from_bytes(average))
    assert late.must_contribute(3, set(), set())
    assert [rank for rank, _ in late.contribute(mine, set(), arrived=False)] == [2]


def test_what_an_average_of_two_takes_beside_their_models() -> None:
    """Half a vector for each message, and one for each result, unless one is free that the trainer
    does not count from: neither the mean nor what was contributed is in memory as a whole.
    """
    num_elements = 4_000_000
    settings = ProtocolSettings(
        members=(0, 1),
        generation=0,
        num_elements=num_elements,
        group_of=lambda version: VersionGroup(ranks=(0, 1)),
        rounding=Rounding(),
    )
    rules = [DeltaMerge(np.full(num_elements, rank, np.float32)) for rank in range(2)]
    for rule in rules:
        rule.take()
    warm()
    peaks = []
    for version in range(2):
        rounds = [DirectRound(version, (0, 1), rank=rank, settings=settings) for rank in range(2)]
        tracemalloc.start()
        links = deque(
            (1 - rank, message)
            for rank, rule in enumerate(rules)
            for _, message in rounds[rank].contribute(
                Contribution(values=rule.current, step=0, fresh=True), set(), arrived=True
            )
        )
        while links:
            rank, message = links.popleft()
            rounds[rank].receive(1 - rank, ModelMessage.from_bytes(message))
            del message
        for rank, rule in enumerate(rules):
            rule.merge(rounds[rank].take_pieces())
        peaks.append(tracemalloc.get_traced_memory()[1] / (4 * num_elements))
        tracemalloc.stop()
    fragments = 0.7  # of a few MiB
    assert peaks[0] < 1 + 2 + fragments
    assert peaks[1] < 1 + fragments
    assert [rule.current[0] for rule in rules] == [0.5, 0.5]


@pytest.mark.parametrize(
    "options", [{"rounding": Rounding(())}, {"changes": CodedChanges(E3M0Values(), ())}]
)
def test_a_group_of_one_sends_and_copies_nothing_and_rounds_nothing(
    options: dict[str, Any],
) -> None:
    values = np.linspace(0, 1, 7, dtype=np.float32)
    settings = ProtocolSettings(
        members=(0,),
        generation=0,
        num_elements=7,
        group_of=lambda _: VersionGroup(ranks=(0,)),
        **options,
    )
    round_ = DirectRound(0, (0,), rank=0, settings=settings)
    mine = Contribution(values=values, step=1, fresh=True, anchor=np.zeros_like(values))
    assert round_.contribute(mine, set(), arrived=True) == []
    assert round_.over
    (piece,) = round_.take_pieces()
    np.testing.assert_array_equal(piece.average[:], values)
    assert piece.contributed is not None
    assert np.shares_memory(piece.contributed[:], values)
