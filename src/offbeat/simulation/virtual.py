"""All ranks in one thread, under a virtual clock: deterministic, replayable from a seed, and never
really waiting.

`VirtualCluster` runs one collective per rank. Whenever several ranks could go on, the seed decides
who does; when none can, the clock jumps to the next event of a heap. `VirtualNetwork` says what
messages and dense operations wait for; messages between two ranks arrive in order, jitter included.

Messages of a simulation may be weightless: they have a length, and are passed on as they are. A
protocol that computes with its messages may run on a model of few elements, each of which stands
for many: `num_bytes` then says what a message weighs.

When nothing can ever happen again the run ends with `DeadlockError`, which says who waits for whom.
A rank that raises or is killed is dead to its peers: their receives raise `PeerError`, as they
would over sockets. A rank may have several collectives under way, as a process has threads
(`begin`), and may be stopped for a while (`freeze`).
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Container, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

from offbeat.arithmetic.trees import num_rounds
from offbeat.errors import ConfigError, MismatchError, OffbeatError, PeerError
from offbeat.simulation.virtual_driver import VirtualDriver
from offbeat.transport.driver import Driver, Pending
from offbeat.transport.operations import Collective, DenseOperation, Payload

_MOST_GLOO_BYTES: Final = 1 << 20
"""Of a part that gloo's ring passes on (`AllreduceOptions::kMaxSegmentSize`)."""

Port: TypeAlias = int
"""Its number: ranks' outgoing ports first, then ranks' incoming, then racks' up and down."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VirtualLink:
    """What a rank's network connection can do.

    Attributes:
        latency_s: time from the last byte's departure to its arrival, >= 0. Between two ranks the
            receiver's counts.
        bytes_per_s: rate in each direction, > 0; infinite by default.
        jitter_s: upper bound of a random addition to each message's latency, >= 0.
        message_s: time for which a message occupies a port besides that of its bytes, >= 0.
    """

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")
    jitter_s: float = 0.0
    message_s: float = 0.0

    def occupied_s(self, num_bytes: float) -> float:
        """How long a message of `num_bytes` occupies a port."""
        return self.message_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class VirtualRacks:
    """Ranks behind switches that share one connection to all others.

    Attributes:
        rack_of: each rank's rack, numbered from 0.
        bytes_per_s: rate of each rack's connection in each direction, > 0.
        latency_s: between racks, besides that of the receiver's link, >= 0.
    """

    rack_of: tuple[int, ...]
    bytes_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    """An all-reduce up a tree of nodes and down again, two of them at once with half of the bytes
    each, as NCCL has them: every node sends and receives everything twice.

    Attributes:
        hop_s: what a hop between nodes takes besides latency and bytes, >= 0.
        in_rack_s: likewise within a rack, whose ranks form a chain.
        share: of a port's rate that bytes get, in (0, 1].
    """

    hop_s: float
    in_rack_s: float
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseLinks:
    """How a backend carries out dense operations.

    Attributes:
        round_s: what a round takes besides latency and bytes, >= 0.
        announced: whether a message leaves only when its receiver has said that it is ready, which
            it does when its message before the last one has come. gloo's do.
        ranks: how many take part, where those that have no links are like those that have; None:
            there are no others.
        hop_s: what a message of a ring occupies ports for besides its bytes; None: as others do.
        in_rack_s: likewise within a rack; None: as `hop_s`.
        s_per_byte: what processors add to each byte that a rank sends, >= 0.
        trees: that an all-reduce may take in place of a ring, where it is over sooner.
    """

    round_s: float = 0.0
    announced: bool = False
    ranks: int | None = None
    hop_s: float | None = None
    in_rack_s: float | None = None
    s_per_byte: float = 0.0
    trees: tuple[Tree, ...] = ()


class VirtualNetwork:
    """The ports of all ranks, and when each of them is free.

    A message passes the sender's outgoing port, the ports of both racks where the ranks are in
    different ones, and the receiver's incoming port. It is sent on while it arrives, so it takes
    the latency once and the time of the slowest port.

    A dense operation begins when the last rank has begun it and the ports are free. It occupies the
    ports for as long as its bytes take, so that it contends with messages and with other dense
    operations. On a ring (all-reduce; its halves reduce-scatter and all-gather) all ranks wait for
    the slowest hop in each round, as gloo's do; an all-reduce may go up and down trees in its
    place; on a tree (broadcast) a rank passes everything on.
    Where receivers announce themselves, a message leaves when its receiver's word has come that it
    may.

    Args:
        links: of each rank.
        racks: None: all ranks are behind one switch that carries everything.
        dense: how dense operations are carried out.
    """

    def __init__(
        self,
        links: Sequence[VirtualLink],
        racks: VirtualRacks | None = None,
        dense: DenseLinks = DenseLinks(),
    ) -> None:
        if racks is not None and len(racks.rack_of) != len(links):
            raise ConfigError(f"{len(racks.rack_of)} ranks have a rack, and {len(links)} a link")
        # Those that have no links here have ports of their own.
        links = [links[rank % len(links)] for rank in range(dense.ranks or len(links))]
        self.links = links
        self._racks = racks
        self._dense = dense
        self._ways: dict[tuple[int, float, float], tuple[float, dict[Port, float]]] = {}
        num_racks = 0 if racks is None else max(racks.rack_of) + 1
        self.free_s = [0.0] * (2 * len(links) + 2 * num_racks)
        self._first_up = 2 * len(links)
        self._first_down = 2 * len(links) + num_racks

    def path(self, source: int, target: int) -> tuple[Port, ...]:
        """The ports that a message passes behind the sender's own."""
        into = len(self.links) + target
        if self._racks is None:
            return (into,)
        begin, end = self._racks.rack_of[source], self._racks.rack_of[target]
        return (into,) if begin == end else (self._first_up + begin, self._first_down + end, into)

    def latency_s(self, source: int, target: int) -> float:
        """How long a message is on its way, without jitter."""
        latency_s = self.links[target].latency_s
        racks = self._racks
        if racks is not None and racks.rack_of[source] != racks.rack_of[target]:
            latency_s += racks.latency_s
        return latency_s

    def occupied_s(self, port: Port, num_bytes: float) -> float:
        """How long a message of `num_bytes` occupies `port`."""
        if port < self._first_up:
            return self.links[port % len(self.links)].occupied_s(num_bytes)
        assert self._racks is not None
        return num_bytes / self._racks.bytes_per_s

    def occupy(self, port: Port, from_s: float, num_bytes: float) -> tuple[float, float]:
        """Take `port` from `from_s` on, as soon as it is free. Returns when the message begins and
        ends to pass it.
        """
        begin_s = max(from_s, self.free_s[port])
        self.free_s[port] = end_s = begin_s + self.occupied_s(port, num_bytes)
        return begin_s, end_s

    def dense_end_s(self, operation: DenseOperation, num_bytes: float, from_s: float) -> float:
        """Occupy all ports for a dense operation that every rank has begun by `from_s`. Returns
        when it is over.

        Args:
            operation: any rank's.
            num_bytes: the most that any rank brings.
            from_s: when the last rank has begun it.
        """
        world_size = len(self.links)
        if world_size == 1:
            return from_s
        if operation.root_rank is not None:
            return self._tree_end_s(operation.root_rank, num_bytes, from_s)
        hops = operation.num_hops(world_size)
        begin_s = max(from_s, *self.free_s)
        key = hops, operation.hop_bytes(num_bytes, world_size), num_bytes
        if key not in self._ways:
            ways = [self._ring(*key[:2])]
            if hops == 2 * (world_size - 1):
                ways += [self._up_and_down(tree, num_bytes) for tree in self._dense.trees]
            self._ways[key] = min(ways, key=lambda way: way[0])
        seconds, busy_s = self._ways[key]
        for port, port_s in busy_s.items():
            self.free_s[port] = begin_s + port_s
        return begin_s + seconds

    def _ring(self, hops: int, hop_bytes: float) -> tuple[float, dict[Port, float]]:
        """Seconds, and for how many of them each port is taken.

        Each rank sends on what it was sent in the round before, in two parts, the second of
        which is under way while the first arrives. So both take what the slowest port needs for
        them, or the mean time in which one comes to the next rank if that is more.

        gloo, whose receivers announce themselves, cuts what is passed on into more parts where
        these would be long, with two of them under way as well. A rank is ready for a part when it
        has the one before the last: at the same moment as its sender, so the announcement is on its
        way meanwhile. And gloo ends a reduce-scatter before it begins the all-gather behind it.
        """
        world_size = len(self.links)
        num_phases, num_pairs = 1, 1.0
        # What has fewer hops than a ring takes a given time.
        announced = self._dense.announced and hops >= world_size - 1
        if announced:
            num_phases = hops // (world_size - 1)
            num_pairs = max(2, math.ceil(hop_bytes / _MOST_GLOO_BYTES)) / 2
        pair_bytes = hop_bytes / num_pairs
        slowest_s = longest_s = sum_s = 0.0
        busy_s: dict[Port, float] = {}
        for rank in range(world_size):
            behind = (rank + 1) % world_size
            path = (rank, *self.path(rank, behind))
            hop_s = self._hop_s(rank, behind)
            times_s = [self._occupied_s(port, pair_bytes, hop_s) for port in path]
            halves_s = [self._occupied_s(port, pair_bytes / 2, hop_s) for port in path]
            latency_s = self.latency_s(rank, behind) + self._dense.round_s
            latency_s += self._announcement_s(behind, rank) if announced else 0.0
            slowest_s = max(slowest_s, *times_s)
            longest_s = max(longest_s, latency_s + max(times_s))
            sum_s += latency_s + max(halves_s)
            for port, port_s in zip(path, times_s, strict=True):
                busy_s[port] = hops * num_pairs * port_s
        pair_s = max(slowest_s, sum_s / world_size)
        return num_phases * longest_s + (hops * num_pairs - num_phases) * pair_s, busy_s

    def _up_and_down(self, tree: Tree, num_bytes: float) -> tuple[float, dict[Port, float]]:
        """Seconds of an all-reduce over `tree`, and for how many of them each port is taken."""
        world_size = len(self.links)
        per_node = 1 if self._racks is None else Counter(self._racks.rack_of).most_common(1)[0][1]
        ways_s = [self.latency_s(rank, (rank + 1) % world_size) for rank in range(world_size)]
        inside_s = (per_node - 1) * (tree.in_rack_s + min(ways_s))
        between_s = num_rounds(-(-world_size // per_node)) * (tree.hop_s + max(ways_s))
        bytes_s = [
            self._occupied_s(port, 2 * num_bytes / tree.share, 0.0)
            for port in range(len(self.free_s))
        ]
        return 2 * (inside_s + between_s) + max(bytes_s), dict(enumerate(bytes_s))

    def _hop_s(self, source: int, target: int) -> float | None:
        """What a message of a ring occupies ports for besides its bytes; None: as others do."""
        dense, racks = self._dense, self._racks
        inside = racks is not None and racks.rack_of[source] == racks.rack_of[target]
        return dense.in_rack_s if inside and dense.in_rack_s is not None else dense.hop_s

    def _occupied_s(self, port: Port, num_bytes: float, hop_s: float | None) -> float:
        """As `occupied_s`, of a message of a dense operation."""
        if port >= self._first_up:
            return self.occupied_s(port, num_bytes)
        link = self.links[port % len(self.links)]
        fixed_s = link.message_s if hop_s is None else hop_s
        return fixed_s + num_bytes * (1 / link.bytes_per_s + self._dense.s_per_byte)

    def _tree_end_s(self, root: int, num_bytes: float, from_s: float) -> float:
        """A binomial tree: every rank that has everything sends it on to others, the one that has
        most to send on first. gloo's ranks send to all of them at once, in equal shares of the
        port.
        """
        world_size = len(self.links)
        here_s = {0: from_s}
        for place in range(world_size):
            source, sent = (root + place) % world_size, []
            distance = (place & -place or 1 << (world_size - 1).bit_length()) // 2
            while distance:
                if place + distance < world_size:
                    target = (root + place + distance) % world_size
                    # All ranks but the root are ready from the beginning on.
                    ready_s = max(here_s[place], from_s + self._announcement_s(target, source))
                    sent.append((place + distance, *self.occupy(source, ready_s, num_bytes)))
                distance //= 2
            for successor, head_s, tail_s in sent:
                target = (root + successor) % world_size
                latency_s = self.latency_s(source, target) + self._dense.round_s
                here_s[successor] = latency_s + (sent[-1][2] if self._dense.announced else tail_s)
                head_s += latency_s
                for port in self.path(source, target):
                    head_s, end_s = self.occupy(port, head_s, num_bytes)
                    here_s[successor] = max(here_s[successor], end_s)
        return max(here_s.values())

    def _announcement_s(self, receiver: int, sender: int) -> float:
        """How long the word of `receiver` is on its way to `sender`."""
        return self.latency_s(receiver, sender) if self._dense.announced else 0.0


def same_links(
    link: VirtualLink | Sequence[VirtualLink] | None, world_size: int
) -> list[VirtualLink]:
    """One link a rank."""
    if link is None or isinstance(link, VirtualLink):
        return [link or VirtualLink()] * world_size
    if len(link) != world_size:
        raise ConfigError(
            f"{len(link)} links were given for {world_size} ranks; give each rank one"
        )
    return list(link)


T = TypeVar("T")


class DeadlockError(OffbeatError):
    """Every rank waits for another one and no message is under way."""


class VirtualCluster:
    """`world_size` ranks that exchange messages under a virtual clock.

    Args:
        world_size: number of ranks, >= 1.
        seed: decides the order in which ranks go on and every jitter.
        link: of every rank, or of each.
        racks: which ranks share a connection to all others; None: none do.
        watch_all: whether any rank's death fails every receive, or only those from it.
        death_notice_s: how long after a death the peers learn of it, in seconds.
        weightless: messages are passed on as they are: they have a length, and no bytes.
        num_bytes: what a message weighs; default: its length.
        dense: how dense operations are carried out.

    Attributes:
        bytes_sent: by each rank, in messages.
        messages_sent: by each rank.
    """

    def __init__(
        self,
        world_size: int,
        *,
        seed: int = 0,
        link: VirtualLink | Sequence[VirtualLink] | None = None,
        racks: VirtualRacks | None = None,
        watch_all: bool = True,
        death_notice_s: float = 0.0,
        weightless: bool = False,
        num_bytes: Callable[[Payload], float] = len,
        dense: DenseLinks = DenseLinks(),
    ) -> None:
        self.world_size = world_size
        self.now_s = 0.0
        self.drivers = [VirtualDriver(self, rank) for rank in range(world_size)]
        self.bytes_sent = [0.0] * world_size
        self.messages_sent = [0] * world_size
        self._network = VirtualNetwork(same_links(link, world_size), racks, dense)
        self._weightless = weightless
        self._num_bytes = num_bytes
        self._random = random.Random(seed)  # noqa: S311 - a replayable schedule, not a secret
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._reached_s: dict[tuple[int, int], float] = defaultdict(float)
        self._arrived_s: dict[tuple[int, int], float] = defaultdict(float)
        self._num_in_flight = [0] * world_size
        self._pending_notices: dict[int, Callable[[], None]] = {}
        self._watch_all = watch_all
        self._death_notice_s = death_notice_s
        self._inbox: dict[tuple[int, int, int], deque[Payload]] = defaultdict(deque)
        self._senders: dict[tuple[int, int], set[int]] = defaultdict(set)
        self._dense_begun: dict[int, dict[int, DenseOperation]] = {}
        self._dense_results: dict[int, dict[int, Any]] = {}
        self._failed: dict[int, OffbeatError] = {}
        self._failed_at_s: dict[int, float] = {}
        self._dead: dict[int, str] = {}
        self._left: set[int] = set()
        self._frozen: dict[int, int] = {}
        self._touched: set[int] = set()
        self._tasks: list[tuple[int, Pending[Any]]] = []
        self._tasks_of: list[list[int]] = [[] for _ in self.drivers]

    def run(
        self,
        collectives: Sequence[Collective[T]],
        *,
        channel: int = 0,
        wrap: Callable[[Driver], Driver] | None = None,
    ) -> list[T]:
        """Carry out `collectives[rank]` on every rank and return their results. Raises the first
        error of the lowest rank.

        Args:
            collectives: one generator a rank.
            channel: the channel all of them use.
            wrap: puts a wrapper around each rank's driver.
        """
        outcomes = self.outcomes(collectives, channel=channel, wrap=wrap)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes  # type: ignore[return-value]  # no exception is left

    def outcomes(
        self,
        collectives: Sequence[Collective[T]],
        *,
        channel: int = 0,
        wrap: Callable[[Driver], Driver] | None = None,
    ) -> list[T | OffbeatError]:
        """Like `run`, with a rank's `OffbeatError` in the place of its result."""
        drivers = [wrap(driver) if wrap else driver for driver in self.drivers]
        own = [
            Pending(driver, work, channel)
            for driver, work in zip(drivers, collectives, strict=True)
        ]
        begun, self._tasks, self._tasks_of = self._tasks, [], [[] for _ in own]
        for rank, task in [*enumerate(own), *begun]:
            self._add(rank, task)
        ready: list[int] = []  # ascending
        unfinished = set(range(self.world_size))
        self.touch(*unfinished)
        while unfinished:
            # Only ranks to which something happened are looked at again: with 1,024 ranks, asking
            # all of them after each event would take most of the time.
            for rank in self._touched:
                is_stopped = rank in self._failed or rank in self._frozen
                for number in self._tasks_of[rank]:
                    task = self._tasks[number][1]
                    can_go_on = not (is_stopped or task.over) and task.ready()
                    place = bisect_left(ready, number)
                    if (place < len(ready) and ready[place] == number) != can_go_on:
                        ready.insert(place, number) if can_go_on else ready.pop(place)
                if rank in self._failed or own[rank].over:
                    unfinished.discard(rank)
                self._tasks_of[rank] = [
                    number for number in self._tasks_of[rank] if not self._tasks[number][1].over
                ]
            self._touched.clear()
            if ready:
                self._go_on(*self._tasks[self._random.choice(ready)])
            elif unfinished:
                self._next_event(unfinished)
        for _, task in self._tasks:
            task.cancel()
        self._tasks = []
        return [
            self._failed[rank] if rank in self._failed else own[rank].wait()
            for rank in range(self.world_size)
        ]

    def begin(self, rank: int, collective: Collective[T], *, channel: int) -> Pending[T]:
        """Carry out `collective` at `rank` beside the rank's own, as another thread would, in the
        run that goes on, or else in the next one.

        It is dropped when every rank's own is over. If it raises, the rank is dead. `SleepUntil`
        waits for it.
        """
        pending = Pending(self.drivers[rank], collective, channel)
        self._add(rank, pending)
        self.touch(rank)
        return pending

    def _add(self, rank: int, task: Pending[Any]) -> None:
        self._tasks_of[rank].append(len(self._tasks))
        self._tasks.append((rank, task))

    def kill(self, rank: int, reason: str = "was killed") -> None:
        """End `rank` now. What it has not sent to the last byte is lost."""
        self._fail(rank, PeerError(f"rank {rank} {reason}", rank=rank))

    def leave(self, rank: int) -> None:
        """Rank `rank` has closed its connections: a `RecvAny` that waits for it fails once its last
        message was taken.
        """
        self._after_pending_sends(rank, lambda: self._mark_departed(rank))

    def freeze(self, rank: int, duration_s: float) -> None:
        """Stop `rank` for a while. What it has sent still arrives, and what is sent to it waits."""
        self._frozen[rank] = self._frozen.get(rank, 0) + 1
        self.touch(rank)
        self.at(self.now_s + duration_s, lambda: self._thaw(rank))

    def _go_on(self, rank: int, task: Pending[Any]) -> None:
        self.touch(rank)
        try:
            task.advance()
        except OffbeatError as error:
            self._fail(rank, error)

    def _fail(self, rank: int, error: OffbeatError) -> None:
        if rank not in self._failed:
            self._failed[rank] = error
            self.touch(rank)
            self._failed_at_s[rank] = self.now_s
            self.at(
                self.now_s + self._death_notice_s,
                lambda: self._after_pending_sends(rank, lambda: self._mark_dead(rank)),
            )

    def _after_pending_sends(self, rank: int, notify: Callable[[], None]) -> None:
        """Call `notify` once everything that the rank has sent has arrived. Over sockets too, peers
        read what a rank has sent before they see that its connection is closed.
        """
        self._pending_notices[rank] = notify
        self._notify_if_all_sent(rank)

    def _notify_if_all_sent(self, rank: int) -> None:
        if rank in self._pending_notices and not self._num_in_flight[rank]:
            self._pending_notices.pop(rank)()

    def _mark_dead(self, rank: int) -> None:
        self._dead[rank] = str(self._failed[rank])
        self.touch(*range(self.world_size))

    def _mark_departed(self, rank: int) -> None:
        self._left.add(rank)
        self.touch(*range(self.world_size))

    def _thaw(self, rank: int) -> None:
        self._frozen[rank] -= 1
        if not self._frozen[rank]:
            del self._frozen[rank]
            self.touch(rank)

    def touch(self, *ranks: int) -> None:
        """Something happened to these ranks, so that some of their collectives may be able to go
        on, or no longer.
        """
        self._touched.update(ranks)

    def _next_event(self, unfinished: Set[int]) -> None:
        if not self._events:
            waits = ", ".join(
                f"rank {rank}: {self.drivers[rank].waiting_for}" for rank in sorted(unfinished)
            )
            raise DeadlockError(f"nothing can happen any more at {self.now_s:.6f} s; {waits}")
        while self._events and not self._touched:
            self.now_s, _, happen = heapq.heappop(self._events)
            happen()
        if not self._touched:
            self.touch(*unfinished)

    def at(self, when_s: float, happen: Callable[[], None]) -> None:
        """Let `happen` be called when the clock reaches `when_s`."""
        self._num_events += 1
        heapq.heappush(self._events, (max(when_s, self.now_s), self._num_events, happen))

    def deliver(self, source: int, target: int, channel: int, payload: Payload) -> None:
        """Send a message.

        Args:
            source: the rank that sends it.
            target: the rank that receives it.
            channel: the collective's channel.
            payload: is copied unless it is weightless.
        """
        network, num_bytes = self._network, self._num_bytes(payload)
        link = network.links[target]
        departs_s, departed_s = network.occupy(source, self.now_s, num_bytes)
        latency_s = network.latency_s(source, target) + self._random.random() * link.jitter_s
        reaches_s = max(departs_s + latency_s, self._reached_s[source, target])
        self._reached_s[source, target] = reaches_s
        message = payload if self._weightless else bytes(payload)
        self.bytes_sent[source] += num_bytes
        self.messages_sent[source] += 1
        self._num_in_flight[source] += 1

        def arrive() -> None:
            if departed_s <= self._failed_at_s.get(source, math.inf):
                self._arrive(source, target, channel, message)
            self._num_in_flight[source] -= 1
            self._notify_if_all_sent(source)

        # A message occupies the sender's port, travels, and then occupies one port after the other,
        # each of which it may find busy with another message.
        def reach(path: tuple[Port, ...], tail_s: float) -> None:
            head_s, end_s = network.occupy(path[0], self.now_s, num_bytes)
            tail_s = max(tail_s, end_s)
            if len(path) == 1:
                # Rounding must not let a message overtake the one before.
                tail_s = max(tail_s, self._arrived_s[source, target])
                self._arrived_s[source, target] = tail_s
                self.at(tail_s, arrive)
            else:
                self.at(head_s, lambda: reach(path[1:], tail_s))

        path = network.path(source, target)
        self.at(reaches_s, lambda: reach(path, reaches_s + departed_s - departs_s))

    def post(self, rank: int, channel: int, payload: Payload) -> None:
        """What `rank` leaves for itself is there at once."""
        self._arrive(rank, rank, channel, bytes(payload))

    def take(self, source: int, target: int, channel: int) -> Payload:
        """The next message, which must have arrived."""
        inbox = self._inbox[source, target, channel]
        message = inbox.popleft()
        if not inbox:
            self._senders[target, channel].discard(source)
        return message

    def senders(self, target: int, channel: int) -> Set[int]:
        """The ranks whose messages have arrived and wait for their receiver."""
        return self._senders[target, channel]

    def choose(self, ranks: Set[int]) -> int:
        """One of `ranks`, drawn from the seed."""
        return self._random.choice(sorted(ranks))

    def dead_among(self, peers: Container[int]) -> tuple[int, str] | None:
        """The first of `peers` known to be dead, and why; any rank's death counts where all are
        watched.
        """
        return next(
            ((rank, why) for rank, why in self._dead.items() if self._watch_all or rank in peers),
            None,
        )

    def departed_among(self, peers: Set[int]) -> tuple[int, str] | None:
        """The first of `peers` that will send nothing more, and why."""
        departed = peers & (self._dead.keys() | self._left)
        if not departed:
            return None
        first = min(departed)
        return first, self._dead.get(first, "it finished and closed its connections")

    def begin_dense(self, rank: int, number: int, operation: DenseOperation) -> None:
        """Rank `rank` begins its dense operation `number`. The last rank to begin it computes the
        results of all.
        """
        begun = self._dense_begun.setdefault(number, {})
        begun[rank] = operation
        if len(begun) == self.world_size:
            del self._dense_begun[number]
            operations = [begun[r] for r in range(self.world_size)]
            if len(kinds := {type(one) for one in operations}) > 1:
                raise MismatchError(
                    f"the ranks' dense operation {number} is not the same one on all of them:"
                    f" {', '.join(sorted(kind.kind for kind in kinds))}"
                )

            def conclude() -> None:
                self._dense_results[number] = dict(enumerate(operation.combine(operations)))
                self.touch(*range(self.world_size))

            num_bytes = max(operation.num_bytes for operation in operations)
            self.at(self._network.dense_end_s(operation, num_bytes, self.now_s), conclude)

    def has_dense_result(self, number: int) -> bool:
        """Whether the dense operation is over."""
        return number in self._dense_results

    def take_dense_result(self, rank: int, number: int) -> Any:
        """Rank `rank`'s result of a dense operation that is over, once."""
        results = self._dense_results[number]
        result = results.pop(rank)
        if not results:
            del self._dense_results[number]
        return result

    def _arrive(self, source: int, target: int, channel: int, message: Payload) -> None:
        self._inbox[source, target, channel].append(message)
        self._senders[target, channel].add(source)
        self.touch(target)
