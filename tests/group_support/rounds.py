"""Workers that claim samples and merge in rounds, in one thread under a virtual clock, while some
of them die, are suspended or join.

The claims, the rounds and the exchange are the real ones. The membership is scripted: some time
after a death or a suspension there is a generation without that worker, and each peer learns of it
at a time of its own. A worker that wakes learns that it was left out, and joins again as a
newcomer.
"""

from __future__ import annotations

import json
import math
import random
import struct
from collections import defaultdict, deque
from collections.abc import Generator
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import numpy as np
from torch.distributed import HashStore

from offbeat.codec.model_wire import Values
from offbeat.collectives.gather import all_gather
from offbeat.collectives.weighted_mean import weighted_mean
from offbeat.errors import PeerError, PeerTimeoutError
from offbeat.megabatch.claims import Claim, ClaimLog, ClaimRound, SampleRange, SampleRanges
from offbeat.membership.atomic_group import all_or_none
from offbeat.simulation.virtual import VirtualCluster, VirtualLink
from offbeat.transport.operations import Collective, Operation, Recv, Send, Sleep

T = TypeVar("T")

CHANNEL = 7
NUM_ELEMENTS = 5
POLL_S = 0.05
_HEAD = struct.Struct("<I")


class Over(Exception):  # noqa: N818 - no error
    """All that were to be merged has been."""


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A generation and when each worker hears of it."""

    number: int
    ranks: tuple[int, ...]
    newcomers: frozenset[int]
    heard_at_s: dict[int, float]


@dataclass(kw_only=True)
class Script:
    """What happens, drawn from a seed."""

    seed: int
    founders: int
    joiners: int
    num_samples: int
    mega_batches: int
    epochs: int
    kills: list[tuple[int, float]] = field(default_factory=list)
    stops: list[tuple[int, float, float]] = field(default_factory=list)
    joins: dict[int, float] = field(default_factory=dict)

    def with_deaths_of_joiners(self, draw: random.Random) -> Script:
        """Some of them die on their way in, or soon after."""
        for rank, at_s in self.joins.items():
            if draw.random() < 0.3:
                self.kills.append((rank, at_s + draw.random()))
        return self


def draw_script(seed: int) -> Script:
    draw = random.Random(seed)
    founders, joiners = draw.randint(1, 5), draw.choice([0, 0, 1, 2])
    others = range(1, founders)  # the first lives through everything
    doomed = draw.sample(others, draw.randint(0, len(others)))
    return Script(
        seed=seed,
        founders=founders,
        joiners=joiners,
        num_samples=draw.randint(1, 60),
        mega_batches=draw.randint(1, 3),
        epochs=draw.randint(1, 2),
        kills=[(rank, draw.random() * 4) for rank in doomed if draw.random() < 0.7],
        stops=[
            (rank, draw.random() * 4, draw.choice([0.3, 2.0, 5.0]))
            for rank in doomed
            if draw.random() < 0.5
        ],
        joins={founders + number: draw.random() * 4 for number in range(joiners)},
    ).with_deaths_of_joiners(draw)


class Worker:
    """One worker's way through the rounds, and what it made of them."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.is_new = rank >= world.script.founders
        self.model: Values = np.zeros(NUM_ELEMENTS, np.float64)
        self.history: list[tuple[ClaimRound, SampleRanges, bytes]] = []
        self.was_left_out = self.came_to_the_end = False
        self.model_at_s = 0.0 if not self.is_new else math.inf
        self._served = -1  # the newest generation whose newcomers have the model
        self._log = ClaimLog(world.store)
        self._stashed: dict[int, deque[bytes]] = defaultdict(deque)
        self._left_at = -1

    def live(self) -> Collective[None]:
        world, draw = self.world, self.world.draw
        try:
            place = None if self.is_new else world.first_place()
            while place is None or place.epoch < world.script.epochs:
                held: list[Claim] = []
                is_cut = False
                if place is not None:
                    self._log.open(place.round, place.spans)
                    while (
                        not self._looks_left_out()
                        and not (is_cut := self._has_newcomers())
                        and (claim := self._log.claim(draw.randint(1, 12))) is not None
                    ):
                        yield Sleep(draw.random() * draw.choice([0.02, 0.4]))
                        held.append(claim)
                        self.model = self.model + (self.rank + 1) * claim.num_samples
                place = yield from self._meet(place, held, is_cut=is_cut)
            world.over = self.came_to_the_end = True
            world.over_at_s = min(world.over_at_s, world.cluster.now_s)
        except Over:
            pass

    def _meet(
        self, place: ClaimRound | None, held: list[Claim], *, is_cut: bool
    ) -> Collective[ClaimRound]:
        tried = -1
        while True:
            listed = yield from self._next_generation(tried)
            tried = listed.number
            try:
                stated, model = yield from self._within(
                    listed, self._work(listed, place, held, is_cut=is_cut)
                )
            except PeerError:
                continue
            theirs = next(statement for statement in stated if not statement["is_new"])["place"]
            place = ClaimRound(
                **theirs | {"spans": tuple(SampleRange(*span) for span in theirs["spans"])}
            )
            merged = [
                Claim(tuple(SampleRange(*span) for span in spans))
                for s in stated
                if not s["is_new"]
                for spans in s["held"]
            ]
            following = place.after(
                merged,
                self.world.whole,
                self.world.script.mega_batches,
                is_cut_short=any(s["is_cut"] for s in stated if not s["is_new"]),
            )
            if self.is_new:
                self.model_at_s = self.world.cluster.now_s
            self.model, self.is_new = model, self._looks_left_out()
            self._served = listed.number
            self.history.append(
                (place, tuple(span for claim in merged for span in claim.spans), model.tobytes())
            )
            return following

    def _work(
        self, listed: Listed, place: ClaimRound | None, held: list[Claim], *, is_cut: bool
    ) -> Collective[tuple[list[dict[str, Any]], Values]]:
        position, size = listed.ranks.index(self.rank), len(listed.ranks)
        mine = {
            "is_new": self.is_new,
            "place": None if place is None else asdict(place),
            "held": [list(claim.spans) for claim in held],
            "is_cut": is_cut,
        }
        number = self.world.next_attempt(self.rank, listed.number)

        def work() -> Collective[tuple[list[dict[str, Any]], Values]]:
            stated = yield from all_gather(
                position, size, json.dumps(mine).encode(), lambda raw: json.loads(bytes(raw))
            )
            weights = [0.0 if statement["is_new"] else 1.0 for statement in stated]
            values = None if self.is_new else self.model
            kind = np.dtype(np.float64)
            mean = yield from weighted_mean(
                position, weights, values, num_elements=NUM_ELEMENTS, dtype=kind
            )
            return stated, mean

        def is_done(word: str) -> bool:
            stands = self.world.store.compare_set(f"{listed.number}/{number}", "", word)
            return bool(stands == b"done")

        return all_or_none(position, size, work(), is_done)

    def _next_generation(self, after: int) -> Collective[Listed]:
        while True:
            if self.world.over:
                raise Over
            listed = self.world.newest_for(self.rank)
            if listed is not None and self.rank not in listed.ranks:
                self.is_new = self.was_left_out = True
            elif listed is not None and listed.number > after:
                if self.rank in listed.newcomers and listed.number > self._left_at:
                    self.is_new, self._left_at = True, listed.number
                return listed
            yield Sleep(POLL_S)

    def _has_newcomers(self) -> bool:
        listed = self.world.newest_for(self.rank)
        return listed is not None and any(
            new in listed.ranks
            for number in range(self._served + 1, listed.number + 1)
            for new in self.world.newcomers_of(number)
        )

    def _looks_left_out(self) -> bool:
        listed = self.world.newest_for(self.rank)
        is_out = listed is not None and self.rank not in listed.ranks
        is_back = (
            listed is not None and self.rank in listed.newcomers and listed.number > self._left_at
        )
        if is_out or is_back:
            self.is_new = True
            self.was_left_out = (
                self.was_left_out or is_out or self.rank < self.world.script.founders
            )
        return is_out or is_back

    def _within(self, listed: Listed, collective: Collective[T]) -> Collective[T]:
        """Carry `collective` out between the positions of a generation, until it is over or a
        member has moved to another generation.
        """
        try:
            operation = next(collective)
            while True:
                try:
                    result = yield from self._carry_out(listed, operation)
                except PeerError as error:
                    operation = collective.throw(error)
                else:
                    operation = collective.send(result)
        except StopIteration as stop:
            value: T = stop.value
            return value

    def _carry_out(self, listed: Listed, operation: Operation) -> Generator[Operation, Any, Any]:
        if isinstance(operation, Send):
            yield Send(
                listed.ranks[operation.peer], _HEAD.pack(listed.number) + bytes(operation.payload)
            )
            return None
        assert isinstance(operation, Recv)
        peer = listed.ranks[operation.peer]
        while True:
            stashed = self._stashed[peer]
            while stashed and _HEAD.unpack_from(stashed[0])[0] < listed.number:
                stashed.popleft()
            if stashed:
                if _HEAD.unpack_from(stashed[0])[0] > listed.number:
                    raise PeerError(f"rank {peer} has moved to another generation", rank=peer)
                return stashed.popleft()[_HEAD.size :]
            try:
                stashed.append(bytes((yield Recv(peer, POLL_S))))
            except PeerTimeoutError:
                if (
                    self.world.cluster.now_s > self.world.over_at_s + 5
                ):  # all other workers have finished
                    raise Over from None
                newest = self.world.newest_for(self.rank)
                if newest is not None and newest.number > listed.number:
                    raise PeerError("this generation is over here") from None


class World:
    """All workers, the script that is carried out, and what has to be true at the end."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.draw = random.Random(f"{script.seed} ways")
        self.store = HashStore()
        self.over = False
        self.over_at_s = math.inf
        size = script.founders + script.joiners
        self.cluster = VirtualCluster(
            size,
            seed=script.seed,
            link=VirtualLink(latency_s=0.01, jitter_s=self.draw.choice([0.0, 0.2])),
            watch_all=False,
            death_notice_s=0.3,
        )
        self.workers = [Worker(self, rank) for rank in range(size)]
        founders = tuple(range(script.founders))
        self._listed = [
            Listed(
                number=0,
                ranks=founders,
                newcomers=frozenset(),
                heard_at_s=dict.fromkeys(range(size), 0.0),
            )
        ]
        self._dead: set[int] = set()
        self._attempts: dict[tuple[int, int], int] = defaultdict(int)

    def run(self) -> None:
        for rank, at_s in self.script.kills:
            self.cluster.at(at_s, lambda rank=rank: self._kill(rank))  # type: ignore[misc]
        for rank, at_s, duration_s in self.script.stops:
            self.cluster.at(at_s, lambda rank=rank, s=duration_s: self._stop(rank, s))  # type: ignore[misc]
        for rank, at_s in self.script.joins.items():
            self.cluster.at(at_s, lambda rank=rank: self._list(joined=rank))  # type: ignore[misc]
        self.cluster.outcomes([worker.live() for worker in self.workers], channel=CHANNEL)
        self._check()

    def first_place(self) -> ClaimRound:
        return ClaimRound(epoch=0, mega_batch=0, round=0, retry=0, spans=self.whole(0, 0))

    def whole(self, epoch: int, number: int) -> SampleRanges:
        count = self.script.num_samples, self.script.mega_batches
        return (SampleRange(count[0] * number // count[1], count[0] * (number + 1) // count[1]),)

    def newest_for(self, rank: int) -> Listed | None:
        heard = (
            listed
            for listed in reversed(self._listed)
            if listed.heard_at_s[rank] <= self.cluster.now_s
        )
        first = next(heard, None)
        return (
            None
            if first is None or (rank >= self.script.founders and not self._has_joined(rank))
            else first
        )

    def newcomers_of(self, number: int) -> frozenset[int]:
        return self._listed[number].newcomers

    def next_attempt(self, rank: int, generation: int) -> int:
        self._attempts[rank, generation] += 1
        return self._attempts[rank, generation]

    def _has_joined(self, rank: int) -> bool:
        return any(rank in listed.ranks for listed in self._listed)

    def _kill(self, rank: int) -> None:
        self._dead.add(rank)
        self.cluster.kill(rank)
        self.cluster.at(self.cluster.now_s + 0.5, lambda: self._list(departed=rank))

    def _stop(self, rank: int, duration_s: float) -> None:
        self.cluster.freeze(rank, duration_s)
        if duration_s > 1:  # longer than its peers tolerate
            self.cluster.at(self.cluster.now_s + 1, lambda: self._list(departed=rank))
            self.cluster.at(self.cluster.now_s + duration_s + 0.4, lambda: self._list(joined=rank))

    def _list(self, *, departed: int | None = None, joined: int | None = None) -> None:
        before = self._listed[-1].ranks
        ranks = tuple(rank for rank in before if rank not in (departed, joined))
        if joined is not None and joined not in self._dead:
            ranks = (*ranks, joined)
        now_s = self.cluster.now_s
        heard_at_s = {worker.rank: now_s + self.draw.random() * 0.3 for worker in self.workers}
        newcomers = frozenset(() if joined is None else (joined,))
        self._listed.append(
            Listed(
                number=len(self._listed), ranks=ranks, newcomers=newcomers, heard_at_s=heard_at_s
            )
        )

    def _check(self) -> None:
        first = self.workers[0].history
        epochs: dict[int, list[int]] = defaultdict(list)
        for place, spans, _ in first:
            epochs[place.epoch] += [position for span in spans for position in range(*span)]
        assert set(epochs) == set(range(self.script.epochs))
        for merged in epochs.values():
            assert sorted(merged) == list(range(self.script.num_samples))
        by_round = {place.round: entry for entry in first for place in entry[:1]}
        for worker in self.workers:
            rounds = [place.round for place, _, _ in worker.history]
            assert rounds == sorted(set(rounds))
            assert all(by_round[entry[0].round] == entry for entry in worker.history)
            if (
                worker.rank < self.script.founders
                and worker.came_to_the_end
                and not worker.was_left_out
            ):
                assert worker.history == first
