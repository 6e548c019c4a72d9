"""Random schedules of a group average: arrivals, delays, stops, cuts and deaths, each replayable
from its seed.

Every rank trains (sleeps, then changes its model at random) beside its `serve`, as a process would
with two threads. Models are float64, so that means can be compared; every second element is 1
throughout, so that it stays 1 just as long as the weights in every average and every merge sum to
1. With `pairs`, the ranks average in pairs drawn at random.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from group_support.own_messages import arrive, fetch_model, finish, stop_stepping
from offbeat.arithmetic.groups import VersionGroup, group_of_version
from offbeat.averaging.background import group_average
from offbeat.averaging.background.deadlines import DeadlineRule
from offbeat.averaging.background.interface import (
    Contribution,
    Piece,
    ProtocolCounts,
    ProtocolSettings,
    VersionResult,
)
from offbeat.averaging.background.merge_rules import merge_delta, merge_paper
from offbeat.codec.few_bits import E3M0Values
from offbeat.codec.model_wire import COUNTER_BYTES, HEAD_BYTES, NOTE_BYTES, Note
from offbeat.codec.rounding import CodedChanges, Rounding
from offbeat.errors import OffbeatError, PeerError
from offbeat.simulation.virtual import VirtualCluster, VirtualLink
from offbeat.strategies import adpsgd
from offbeat.transport.driver import Counting, Driver, Finished, Ticket, Wrapper
from offbeat.transport.operations import Collective, Now, Operation, Post, RecvAny, Send, Sleep

SERVE, TRAIN = 1 << 32, 2 << 32
GENERATION = 3
NUM_COUNTERS = 2
CONSTANT = tuple(slice(place, place + 1) for place in range(1, 24, 2))
"""The elements that are 1; those that are beyond a model are in no message."""


def note_of(given: Contribution) -> Note:
    return Note(weight=given.weight, step=given.step, fresh=given.fresh)


@dataclass(kw_only=True)
class Schedule:
    """What happens. Times in seconds of the virtual clock."""

    seed: int
    world_size: int
    group_size: int = 2
    num_elements: int = 6
    num_steps: int = 4
    period: int | None = None
    quorum: float = 1.0
    direct_bytes: int = 0
    merge: str = "delta"
    link: VirtualLink = field(default_factory=lambda: VirtualLink(latency_s=0.001))
    reply_deadline: DeadlineRule = field(
        default_factory=lambda: DeadlineRule(floor_s=0.25, cap_s=1.0, min_samples=4)
    )
    arrival_deadline: DeadlineRule | None = None
    death_notice_s: float = 0.0
    compute_s: Callable[[int, int], float] = lambda rank, step: 1.0
    weights: list[float] | None = None
    abstain: float = 0.0
    waits_when_late: bool = False
    leaves: bool = False
    pairs: bool = False
    rounds: bool = False
    codes: bool = False
    asks: bool = False
    overlap: bool = False
    rests: dict[int, int] = field(default_factory=dict)
    kills: list[tuple[int, float]] = field(default_factory=list)
    freezes: list[tuple[int, float, float]] = field(default_factory=list)
    cuts: list[tuple[int, int, float]] = field(default_factory=list)

    @property
    def nobody_is_lost(self) -> bool:
        return not self.kills and not self.cuts


class Cut(Wrapper):
    """Drops what is sent over a link that was cut, and says that the rank at its other
    end is dead.
    """

    def __init__(self, inner: Driver, cut: set[frozenset[int]]) -> None:
        super().__init__(inner)
        self._cut = cut

    def start(self, operation: Operation, channel: int) -> Ticket:
        match operation:
            case Send(peer, _) if self._is_cut(peer):
                return Finished()
            case RecvAny(peers, _) if gone := sorted(filter(self._is_cut, peers)):
                return Finished(error=PeerError("cut off", rank=gone[0]))
        return self.inner.start(operation, channel)

    def _is_cut(self, peer: int) -> bool:
        return frozenset((self.rank, peer)) in self._cut


class Model:
    """One rank's model and where its training stands."""

    def __init__(self, rank: int, world: World) -> None:
        self.rank = rank
        self.world = world
        self.draw = np.random.default_rng([world.schedule.seed, rank])
        self.values = np.ones(world.schedule.num_elements)
        self.values[::2] = self.draw.integers(-50, 50, self.values[::2].size)
        self.step = 0
        self.newest = -1
        self.arrived_at: int | None = None
        self.invited_to: int | None = None
        self.answered: set[int] = set()
        self.open: dict[int, NDArray[np.float64]] = {}
        self.finalized: set[int] = set()
        self.quorum_at_s: dict[int, float] = {}
        self.opened_at_s: dict[int, float] = {}
        self.closed_at_s: dict[int, float] = {}
        self.closed: list[VersionResult] = []
        self.received: list[tuple[int, Contribution | None]] = []
        self.marked_dead: list[int] = []
        self.is_final = False
        self.waits_s: list[tuple[int, float]] = []

    def contribute(self, version: int) -> Contribution | None:
        self._check_not_final()
        assert version not in self.open
        assert all(outcome.version != version for outcome in self.closed)
        self.newest = max(self.newest, version)
        self.opened_at_s.setdefault(version, self.world.cluster.now_s)
        if self.invited_to is not None and self.invited_to <= version:
            self.invited_to = None  # it goes on without this rank's arrival
        self.open[version] = self.values.copy()
        is_fresh = self.arrived_at is not None
        if not is_fresh:
            if not self.world.schedule.pairs:
                self.answered.add(version)
            if self.draw.random() < self.world.schedule.abstain:
                return None
        mine = self._contribution(self.open[version])
        self.world.given[self.rank, version] = replace(mine, values=mine.values.copy())
        return mine

    def _contribution(self, values: NDArray[np.float64]) -> Contribution:
        return Contribution(
            values=values,
            step=self.step,
            fresh=self.arrived_at is not None,
            weight=self.world.weights[self.rank],
            counters=np.array([self.step, -self.rank]),
        )

    def invite(self, version: int) -> None:
        assert self.rank not in self.world.counts[self.rank].stopped
        self.opened_at_s.setdefault(version, self.world.cluster.now_s)
        self.invited_to = version

    def quorum_arrived(self, version: int) -> None:
        assert version in self.open
        assert version not in self.quorum_at_s
        self.quorum_at_s[version] = self.world.cluster.now_s
        self._wake()

    def await_step(self, version: int) -> bool:
        raise AssertionError("these schedules do not bound how far a rank gets ahead")

    def hold(self, late: frozenset[int]) -> None:
        self.held_by = late

    def close_version(self, outcome: VersionResult) -> None:
        self._check_not_final()
        buffer = self.open.pop(outcome.version)
        self.closed.append(outcome)
        self.closed_at_s[outcome.version] = self.world.cluster.now_s
        covered = [(piece.begin, piece.end) for piece in outcome.pieces]
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(covered))
        for piece in outcome.pieces:
            self._merge(outcome, piece)
        buffer.fill(np.nan)  # another snapshot takes its place
        self._wake()

    def merge_late(self, version: int, piece: Piece) -> None:
        self._check_not_final()
        assert version not in self.finalized
        outcome = next(outcome for outcome in self.closed if outcome.version == version)
        assert all(piece.begin != other.begin for other in outcome.pieces)
        self._merge(outcome, piece)

    def snapshot(self) -> Contribution | None:
        if self.draw.random() < self.world.schedule.abstain:
            return None
        return self._contribution(self.values)

    def receive_model(self, sender: int, state: Contribution | None) -> None:
        self.received.append((sender, state))
        self._wake()

    def finalize_version(self, version: int) -> None:
        assert version not in self.finalized
        assert version not in self.open
        self.finalized.add(version)

    def mark_dead(self, rank: int) -> None:
        assert rank not in self.marked_dead
        self.marked_dead.append(rank)
        self._wake()

    def mark_final(self) -> None:
        assert not self.is_final
        assert not self.open
        self.is_final = True

    def _check_not_final(self) -> None:
        # A rank may hear of a version that a member opened whom it takes for dead.
        assert not (self.is_final and self.world.schedule.nobody_is_lost)

    def _wake(self) -> None:
        self.world.cluster.drivers[self.rank].start(Post(b""), TRAIN)

    def _gone_past(self) -> set[int]:
        """The versions that a trainer which has arrived there need not wait for any longer."""
        closed = {outcome.version for outcome in self.closed}
        return closed | self.quorum_at_s.keys() if self.world.schedule.overlap else closed

    def _merge(self, outcome: VersionResult, piece: Piece) -> None:
        self.world.saw(self.rank, outcome, piece)
        mine = self.values[piece.begin : piece.end]
        if self.world.schedule.merge == "delta":
            merged = merge_delta(mine, piece)
        else:
            merged = merge_paper(mine, piece, weight=self.world.weights[self.rank])
        self.values[piece.begin : piece.end] = merged

    def train(self) -> Collective[None]:
        schedule, everyone = self.world.schedule, frozenset({self.rank})
        channel_to_serve = self.world.drivers[self.rank]
        for step in range(schedule.num_steps):
            if schedule.rests.get(self.rank) == step:
                channel_to_serve.start(Post(stop_stepping(generation=GENERATION)), SERVE)
            yield Sleep(schedule.compute_s(self.rank, step))
            update = self.draw.integers(-9, 9, self.values[::2].size)
            self.values[::2] += update
            self.world.total += self.world.weights[self.rank] * update
            self.step = step + 1
            if schedule.rests.get(self.rank, step + 1) <= step:
                continue
            arrived_s = yield Now()
            if self.answered and self.invited_to is None:
                waits_for = set(self.open) if schedule.waits_when_late else set()
                self.answered.clear()
            else:
                upcoming = self.newest + 1
                version = max(upcoming, upcoming if self.invited_to is None else self.invited_to)
                self.answered.clear()
                self.arrived_at = version
                channel_to_serve.start(Post(arrive(version, generation=GENERATION)), SERVE)
                waits_for = {version}
            while not waits_for <= self._gone_past():
                yield RecvAny(everyone)
            self.arrived_at = None
            if waits_for:
                self.waits_s.append((max(waits_for), (yield Now()) - arrived_s))
            if self.invited_to is not None and self.invited_to <= self.newest:
                self.invited_to = None
        if schedule.asks:
            channel_to_serve.start(Post(fetch_model(None, generation=GENERATION)), SERVE)
            while {rank for rank, _ in self.received} | set(self.marked_dead) | {self.rank} != set(
                range(schedule.world_size)
            ):
                yield RecvAny(everyone)
        channel_to_serve.start(Post(finish(generation=GENERATION)), SERVE)


class World:
    """Carries a schedule out."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.cluster = VirtualCluster(
            schedule.world_size,
            seed=schedule.seed,
            link=schedule.link,
            watch_all=False,
            death_notice_s=schedule.death_notice_s,
        )
        self.weights = schedule.weights or [1.0] * schedule.world_size
        self._cut: set[frozenset[int]] = set()
        self.drivers = [Counting(Cut(driver, self._cut)) for driver in self.cluster.drivers]
        self.total: NDArray[np.float64] = np.zeros(-(-schedule.num_elements // 2))
        self.models = [Model(rank, self) for rank in range(schedule.world_size)]
        self.counts = [ProtocolCounts() for _ in self.models]
        for model, weight in zip(self.models, self.weights, strict=True):
            self.total += weight * model.values[::2]
        self.given: dict[tuple[int, int], Contribution] = {}
        self._seen: dict[
            tuple[int, tuple[int, ...], int], tuple[bytes, bytes, tuple[Note, ...]]
        ] = {}

    def group_of(self, rank: int, version: int) -> VersionGroup:
        schedule = self.schedule
        if schedule.pairs:
            others = [other for other in range(schedule.world_size) if other != rank]
            return VersionGroup(
                ranks=(rank, random.Random(f"{schedule.seed} {rank} {version}").choice(others))
            )
        return group_of_version(
            version,
            rank,
            range(schedule.world_size),
            group_size=schedule.group_size,
            period=schedule.period,
            quorum=schedule.quorum,
        )

    def saw(self, rank: int, outcome: VersionResult, piece: Piece) -> None:
        """`rank` got `piece`: who else does must get the same bits, the mean of what its members
        gave, with weights.
        """
        if piece.of_changes:
            return  # of which only the mean in the end says something
        if piece.codes is not None:
            whole = Rounding().decode((piece.codes[0], piece.average[:]), piece.begin)
            piece = replace(piece, average=whole, codes=None)
        elif self.schedule.rounds:
            return  # who has made it has other bits, and the mean is checked in the end
        average = piece.average[:]
        ones = average[(piece.begin + 1) % 2 :: 2]
        np.testing.assert_allclose(ones, 1.0, rtol=1e-12)
        assert piece.sum_of_weights > 0
        if self.schedule.pairs:
            self._check_pair(rank, outcome, piece)
            return
        key = (outcome.version, outcome.group, piece.begin)
        what = (average.tobytes(), piece.counters.tobytes(), piece.notes)
        if key not in self._seen:
            in_it = [
                member
                for member, note in zip(outcome.group, piece.notes, strict=True)
                if note.weight
            ]
            assert [note for note in piece.notes if note.weight] == [
                note_of(self.given[member, outcome.version]) for member in in_it
            ]
            given = [self.given[member, outcome.version] for member in in_it]
            # By rounding a value below 256 changes by 0.5 at most, and the average once more.
            assert _is_made_of(piece, given, precision=1.0 if self.schedule.rounds else 1e-9)
        assert self._seen.setdefault(key, what) == what

    def _check_pair(self, rank: int, outcome: VersionResult, piece: Piece) -> None:
        """Both are in, this rank with what it gave for the outcome's version, the other with
        anything it ever gave.
        """
        (other,) = set(outcome.group) - {rank}
        mine = self.given[rank, outcome.version]
        theirs = [given for (giver, _), given in self.given.items() if giver == other]
        own_note, other_note = (
            piece.notes[outcome.group.index(member)] for member in (rank, other)
        )
        assert own_note == note_of(mine)
        precision = 1.0 if self.schedule.rounds else 1e-9
        assert any(
            note_of(given) == other_note and _is_made_of(piece, [mine, given], precision=precision)
            for given in theirs
        )

    def run(self) -> list[ProtocolCounts | OffbeatError]:
        """Each rank's outcome. Raises what any invariant that holds in every schedule
        objects to.
        """
        schedule, cluster = self.schedule, self.cluster
        for rank, model in enumerate(self.models):
            cluster.begin(rank, model.train(), channel=TRAIN)
        for rank, when_s in schedule.kills:
            cluster.at(when_s, partial(cluster.kill, rank))
        for rank, when_s, duration_s in schedule.freezes:
            cluster.at(when_s, partial(cluster.freeze, rank, duration_s))
        for first, second, when_s in schedule.cuts:
            cluster.at(when_s, partial(self._cut.add, frozenset((first, second))))
        work = [self._main(rank) for rank in range(schedule.world_size)]
        outcomes = cluster.outcomes(
            work, channel=SERVE, wrap=lambda driver: self.drivers[driver.rank]
        )
        self._check(outcomes)
        return outcomes

    def _main(self, rank: int) -> Collective[ProtocolCounts]:
        schedule = self.schedule
        settings = ProtocolSettings(
            members=tuple(range(schedule.world_size)),
            generation=GENERATION,
            num_elements=schedule.num_elements,
            group_of=partial(self.group_of, rank),
            direct_bytes=schedule.direct_bytes,
            num_counters=NUM_COUNTERS,
            dtype=np.dtype(np.float64),
            reply_deadline=schedule.reply_deadline,
            arrival_deadline=schedule.arrival_deadline or schedule.reply_deadline,
            rounding=Rounding() if schedule.rounds else None,
            changes=CodedChanges(E3M0Values(), CONSTANT) if schedule.codes else None,
        )
        kind = adpsgd.PairMember if schedule.pairs else group_average.RoundManager
        member = kind(rank, settings, self.models[rank])
        self.counts[rank] = member.counts
        yield from member.serve()
        if schedule.leaves:
            self.drivers[rank].close()
        return self.counts[rank]

    def _check(self, outcomes: list[ProtocolCounts | OffbeatError]) -> None:
        schedule = self.schedule
        killed = {rank for rank, _ in schedule.kills}
        alive = [rank for rank in range(schedule.world_size) if rank not in killed]
        for rank in alive:
            outcome, model = outcomes[rank], self.models[rank]
            assert isinstance(outcome, ProtocolCounts), outcome
            assert model.step == schedule.num_steps
            assert not model.open
            np.testing.assert_allclose(model.values[1::2], 1.0, rtol=1e-9)
            counts = self.counts[rank]
            assert counts.stopped | counts.dead >= set(range(schedule.world_size))
            assert model.is_final
            assert counts.dead == set(model.marked_dead)
            self._check_bytes(rank)
            self._check_waits(rank)
        if schedule.nobody_is_lost and schedule.merge == "delta":
            mean = sum(
                weight * model.values[::2]
                for weight, model in zip(self.weights, self.models, strict=True)
            )
            np.testing.assert_allclose(mean, self.total, rtol=1e-9, atol=1e-7)

    def _check_waits(self, rank: int) -> None:
        """Nobody waits for who computes: three messages in sequence, from the first to arrive to
        the averages; two in pairs.
        """
        link, model = self.schedule.link, self.models[rank]
        if self.schedule.freezes or not self.schedule.nobody_is_lost or link.bytes_per_s < math.inf:
            return
        for version, wait_s in model.waits_s:
            if self.group_of(rank, version).min_arrivals == 1:
                assert (
                    wait_s
                    <= (2 if self.schedule.pairs else 3) * (link.latency_s + link.jitter_s) + 1e-9
                )

    def _check_bytes(self, rank: int) -> None:
        """At most 2 N (S-1) / S a version, or (S-1) N directly, and a rounding of regions to whole
        elements.
        """
        schedule, allowed = self.schedule, 0.0
        if (schedule.rounds and schedule.abstain) or schedule.codes:
            return  # an average whose owner abstains is not rounded; scales take bytes, too
        bytes_each, counter_bytes = 2 if schedule.rounds else 8, NUM_COUNTERS * COUNTER_BYTES
        num_bytes = bytes_each * schedule.num_elements
        head_bytes = HEAD_BYTES + (8 if schedule.rounds else 0)
        for outcome in self.models[rank].closed:
            size = len(outcome.group)
            if schedule.pairs:
                allowed += num_bytes + head_bytes + counter_bytes
            elif size <= 2 or (size - 1) * num_bytes <= schedule.direct_bytes:
                allowed += (size - 1) * (num_bytes + head_bytes + counter_bytes)
            else:
                allowed += 2 * num_bytes * (size - 1) / size + (size - 2) * bytes_each
                allowed += (size - 1) * (2 * head_bytes + 2 * counter_bytes + size * NOTE_BYTES)
            if not schedule.pairs and self.group_of(rank, outcome.version).min_arrivals > 1:
                allowed += (size - 1) * HEAD_BYTES  # the announcement that it has arrived
        if schedule.pairs:
            partners = [
                self.group_of(giver, version).ranks[1]
                for giver, version in self.given
                if version >= 0
            ]
            allowed += partners.count(rank) * (HEAD_BYTES + 2 * NOTE_BYTES)
        per_peer = HEAD_BYTES * (1 + (rank in schedule.rests))
        if schedule.asks:
            per_peer += 2 * HEAD_BYTES + 8 * schedule.num_elements + counter_bytes
        allowed += (schedule.world_size - 1) * per_peer
        assert self.drivers[rank].traffic.bytes_sent <= allowed


def _is_made_of(piece: Piece, given: list[Contribution], *, precision: float = 1e-9) -> bool:
    weights = [mine.weight for mine in given]
    mean = np.average(
        [mine.values[piece.begin : piece.end] for mine in given], axis=0, weights=weights
    )
    counters = np.max([mine.counters for mine in given], axis=0)
    return (
        np.allclose(piece.average[:], mean, rtol=1e-9, atol=precision)
        and piece.counters.tolist() == counters.tolist()
    )


def draw_schedule(seed: int) -> Schedule:
    """A random schedule of 2 to 17 ranks."""
    draw = random.Random(seed)
    world_size = draw.randint(2, 17)
    latency_s = draw.choice([0.0, 1e-4, 1e-2])
    slow = {rank: draw.choice([1.0, 1.0, 1.0, 2.0, 5.0]) for rank in range(world_size)}
    num_steps = draw.randint(1, 6)
    end_s = num_steps * 1.5
    compute_s: dict[tuple[int, int], float] = {
        (rank, step): slow[rank] * draw.choice([0.0, 0.5, draw.random(), draw.random()])
        for rank in range(world_size)
        for step in range(num_steps)
    }
    trouble = draw.choice(["none", "none", "freezes", "freezes", "kills", "cuts", "all"])
    ranks = list(range(world_size))
    return Schedule(
        seed=seed,
        world_size=world_size,
        group_size=draw.randint(2, world_size),
        num_elements=draw.choice([1, 2, 7, 24]),
        num_steps=num_steps,
        period=draw.choice([None, 2, 3]),
        quorum=draw.choice([0.01, 0.5, 0.75, 1.0]),
        direct_bytes=draw.choice([0, 10_000]),
        merge=draw.choice(["delta", "delta", "paper"]),
        link=VirtualLink(
            latency_s=latency_s,
            jitter_s=draw.choice([0.0, latency_s, 0.3]),
            bytes_per_s=draw.choice([math.inf, 1e5]),
        ),
        reply_deadline=DeadlineRule(
            floor_s=draw.choice([0.05, 0.25]),
            cap_s=draw.choice([0.3, 1.0]),
            min_samples=draw.choice([1, 8]),
            num_mads=4.0,
        ),
        death_notice_s=draw.choice([0.0, 0.5]),
        compute_s=lambda rank, step: compute_s[rank, step],
        weights=draw.choice([None, [float(draw.randint(1, 4)) for _ in ranks]]),
        abstain=draw.choice([0.0, 0.0, 0.2]),
        waits_when_late=draw.random() < 0.5,
        leaves=trouble not in ("none", "freezes") or draw.random() < 0.5,
        kills=[
            (rank, draw.random() * end_s)
            for rank in draw.sample(ranks, draw.randint(1, world_size - 1))
        ]
        if trouble in ("kills", "all")
        else [],
        freezes=[
            (draw.choice(ranks), draw.random() * end_s, draw.choice([0.1, 1.0, 4.0]))
            for _ in range(draw.randint(1, 4))
        ]
        if trouble in ("freezes", "all")
        else [],
        cuts=[
            # a pair of ranks
            (*sorted(draw.sample(ranks, 2)), draw.random() * end_s)  # type: ignore[misc]
            for _ in range(draw.randint(1, 4))
        ]
        if trouble in ("cuts", "all")
        else [],
        asks=draw.random() < 0.5,
        rests={rank: draw.randrange(num_steps) for rank in ranks if draw.random() < 0.2}
        if draw.random() < 0.4
        else {},
        overlap=draw.random() < 0.5,
    )


def draw_rounded(seed: int) -> Schedule:
    """A random schedule of ranks whose values travel in bfloat16."""
    return replace(draw_schedule(seed), rounds=True, merge="delta")


def draw_coded(seed: int) -> Schedule:
    """A random schedule of ranks whose differences travel in 4 bits in averages of groups."""
    return replace(draw_rounded(seed), codes=True)


def draw_pairs(seed: int, *, rounds: bool = False) -> Schedule:
    """A random schedule of ranks that average in pairs."""
    return replace(draw_schedule(seed), pairs=True, merge="delta", overlap=False, rounds=rounds)
