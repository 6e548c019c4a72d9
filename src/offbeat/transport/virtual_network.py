"""What connects the ranks of a virtual cluster: ports that carry one message at a time, and how
long dense operations occupy them.

A message passes the sender's outgoing port, the ports of both racks where the ranks are in
different ones, and the receiver's incoming port. It is sent on while it arrives, so it takes the
latency once and the time of the slowest port.

A dense operation begins when the last rank has begun it and the ports are free. It occupies the
ports for as long as its bytes take, so that it contends with messages and with other dense
operations. On a ring (all-reduce; its halves reduce-scatter and all-gather) all ranks wait for the
slowest hop in each round, as gloo's do; on a tree (broadcast) a rank passes everything on. Where
receivers announce themselves, a message leaves when its receiver's word has come that it may.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from offbeat.errors import ConfigError
from offbeat.transport.operations import DenseOperation

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


class VirtualNetwork:
    """The ports of all ranks, and when each of them is free.

    Args:
        links: of each rank.
        racks: None: all ranks are behind one switch that carries everything.
        dense_round_s: what a round of a dense operation takes besides latency and bytes, >= 0.
        announced: whether a message of a dense operation leaves only when its receiver has said
            that it is ready, which it does when its message before the last one has come. gloo's
            do.
        dense_ranks: how many ranks take part in dense operations, where those that have no links
            here are like those that have; None: there are no others.
    """

    def __init__(
        self,
        links: Sequence[VirtualLink],
        racks: VirtualRacks | None = None,
        *,
        dense_round_s: float = 0.0,
        announced: bool = False,
        dense_ranks: int | None = None,
    ) -> None:
        if racks is not None and len(racks.rack_of) != len(links):
            raise ConfigError(f"{len(racks.rack_of)} ranks have a rack, and {len(links)} a link")
        # Those that have no links here have ports of their own.
        links = [links[rank % len(links)] for rank in range(dense_ranks or len(links))]
        self.links = links
        self._racks = racks
        self._round_s = dense_round_s
        self._announced = announced
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
        num_rounds = operation.num_hops(world_size)
        return self._ring_end_s(num_rounds, operation.hop_bytes(num_bytes, world_size), from_s)

    def _ring_end_s(self, num_rounds: int, hop_bytes: float, from_s: float) -> float:
        """Each rank sends on what it was sent in the round before, in two parts, the second of
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
        announced = self._announced and num_rounds >= world_size - 1
        if announced:
            num_phases = num_rounds // (world_size - 1)
            num_pairs = max(2, math.ceil(hop_bytes / _MOST_GLOO_BYTES)) / 2
        pair_bytes = hop_bytes / num_pairs
        paths = [(rank, *self.path(rank, (rank + 1) % world_size)) for rank in range(world_size)]
        begin_s = max(from_s, *(self.free_s[port] for path in paths for port in path))
        slowest_s = longest_s = sum_s = 0.0
        for rank, path in enumerate(paths):
            times_s = [self.occupied_s(port, pair_bytes) for port in path]
            halves_s = [self.occupied_s(port, pair_bytes / 2) for port in path]
            behind = (rank + 1) % world_size
            latency_s = self.latency_s(rank, behind) + self._round_s
            latency_s += self._announcement_s(behind, rank) if announced else 0.0
            slowest_s = max(slowest_s, *times_s)
            longest_s = max(longest_s, latency_s + max(times_s))
            sum_s += latency_s + max(halves_s)
            for port, port_s in zip(path, times_s, strict=True):
                self.free_s[port] = begin_s + num_rounds * num_pairs * port_s
        pair_s = max(slowest_s, sum_s / world_size)
        return begin_s + num_phases * longest_s + (num_rounds * num_pairs - num_phases) * pair_s

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
                latency_s = self.latency_s(source, target) + self._round_s
                here_s[successor] = latency_s + (sent[-1][2] if self._announced else tail_s)
                head_s += latency_s
                for port in self.path(source, target):
                    head_s, end_s = self.occupy(port, head_s, num_bytes)
                    here_s[successor] = max(here_s[successor], end_s)
        return max(here_s.values())

    def _announcement_s(self, receiver: int, sender: int) -> float:
        """How long the word of `receiver` is on its way to `sender`."""
        return self.latency_s(receiver, sender) if self._announced else 0.0


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
