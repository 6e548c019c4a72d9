"""One rank's connections to its peers, the messages that have arrived, and what it knows of the
peers. Never blocks, knows no threads; `peers` adds both.

Every rank binds one PULL socket and connects one PUSH socket to each other rank: O(P) sockets a
rank, O(P^2) connections in all. A connected peer takes about 5 file descriptors, those of a dense
backend beside them, and members hold up to three meshes while they change, so the limit of open
files (`ulimit -n`) is raised as far as it has to be and the system lets it. ZeroMQ's I/O threads
move the bytes and answer heartbeats while Python computes, so a busy rank is never taken for a dead
one.

A rank is dead when its connection was lost and did not come back within the grace period, when it
aborted, or when messages were lost on a connection that broke. Sending and receiving use a ZeroMQ
context each, because ending a context is the only way to learn that its last message has left, and
the listening socket has to outlive that moment: peers watch it.
"""

from __future__ import annotations

import resource
import struct
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress

import zmq

from offbeat.errors import ConfigError, MismatchError, OffbeatError, PeerError
from offbeat.transport.envelope import Envelope, EnvelopeKind, verify
from offbeat.transport.link import Link, Listener, PeerLimits
from offbeat.transport.operations import Payload
from offbeat.transport.protection import Protection
from offbeat.transport.sockets import Address, SocketAddresses, closed_in_children, parsed_address
from offbeat.transport.threads import new_context

_SEQUENCE_BITS = 32


WATCH_INTERVAL_S = 0.02
"""How often connections are looked at until there is one to every rank; a receive that is answered
sooner never pays for it.
"""

_MAX_WATCH_INTERVAL_S = 0.1
"""How often at least they are looked at from then on. Ranks that wait for nothing else would keep
cores busy, where many share a host.
"""

SESSION_ENDED = "has ended its session, and this rank trains on"

FINISHED = "finished and closed its connections, and all ranks have to do equally many steps"
"""What became of a rank that takes fewer steps than another."""

_MAX_REASON_BYTES = 4096

_BLAME = struct.Struct("<q")

_NOBODY = -1


def split_channel(channel: int) -> tuple[int, int]:
    """The (stream, exchange number within the stream) of `channel`."""
    return channel >> _SEQUENCE_BITS, channel & ((1 << _SEQUENCE_BITS) - 1)


class Inbox:
    """What one rank has received and not yet taken: in order per sender, sorted by channel."""

    def __init__(self) -> None:
        # By channel, and then by sender, in the order in which they are taken from.
        self._queues: dict[int, dict[int, deque[tuple[Envelope | None, Payload]]]] = {}
        self._next_sequence: defaultdict[int, int] = defaultdict(int)
        self._out_of_order: dict[int, dict[int, tuple[Envelope, Payload]]] = {}
        self._latest: dict[tuple[int, int], int] = {}

    def put(self, envelope: Envelope, payload: Payload) -> list[tuple[Envelope, Payload]]:
        """Take a message in. Returns the control messages (all but DATA) that are due with it, in
        the order of sending.

        A repeated message is ignored. After a reconnection messages of the new connection may be
        read before the last ones of the old; they are held back until their turn.
        """
        sender = envelope.sender
        if envelope.sequence < self._next_sequence[sender]:
            return []  # a repetition
        early = self._out_of_order.setdefault(sender, {})
        early[envelope.sequence] = (envelope, payload)
        control = []
        while (message := early.pop(self._next_sequence[sender], None)) is not None:
            self._next_sequence[sender] += 1
            if message[0].kind == EnvelopeKind.DATA:
                self._queue(message)
            else:
                control.append(message)
        if not early:
            del self._out_of_order[sender]
        return control

    def post(self, rank: int, channel: int, payload: Payload) -> None:
        """Take in what `rank`, whose inbox this is, leaves for itself."""
        self._queues.setdefault(channel, {}).setdefault(rank, deque()).append((None, payload))

    def take(self, peers: frozenset[int], channel: int) -> tuple[int, Payload] | None:
        """The message of `first_of`, after the rank that sent it; None when there is none. Raises
        `WireError` when it is corrupt.
        """
        peer = self.first_of(peers, channel)
        if peer is None:
            return None
        senders = self._queues[channel]
        queue = senders.pop(peer)
        envelope, payload = queue.popleft()
        if queue:
            # Behind those of all other senders, so that none of them starves.
            senders[peer] = queue
        elif not senders:
            del self._queues[channel]
        if envelope is not None:
            verify(envelope, payload)
        return peer, payload

    def first_of(self, peers: frozenset[int], channel: int) -> int | None:
        """Whose message on `channel` should be taken next; None when none of `peers`
        has sent one.
        """
        senders = self._queues.get(channel, {})
        if len(peers) == 1:
            (peer,) = peers
            return peer if peer in senders else None
        return next((sender for sender in senders if sender in peers), None)

    def senders_with_gaps(self) -> list[int]:
        """Ranks some of whose messages are missing while later ones are here.

        A proof of loss once everything that had arrived was put in.
        """
        return list(self._out_of_order)

    def exchange_ahead(self, peer: int, channel: int) -> int | None:
        """The exchange that `peer` has reached on the stream of `channel`, if it is past that of
        `channel`.
        """
        stream, exchange = split_channel(channel)
        latest = self._latest.get((peer, stream), exchange)
        return latest if latest > exchange else None

    def _queue(self, message: tuple[Envelope, Payload]) -> None:
        sender, channel = message[0].sender, message[0].channel
        self._queues.setdefault(channel, {}).setdefault(sender, deque()).append(message)
        stream, exchange = split_channel(channel)
        self._latest[sender, stream] = max(exchange, self._latest.get((sender, stream), 0))


_FILES_OF_PEER, _FILES_BESIDE = 20, 512
"""Three meshes take 15 files of a peer, and gloo's groups, offbeat's and the user's, one each."""


def allow_files(world_size: int) -> None:
    """Let this process open as many files as connections to so many ranks take, as far as the
    system lets it.
    """
    count = _FILES_BESIDE + _FILES_OF_PEER * world_size
    limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    if highest != resource.RLIM_INFINITY:
        count = min(count, highest)
    if limit != resource.RLIM_INFINITY and limit < count:
        with suppress(ValueError, OSError):  # a system may have a limit that it does not tell
            resource.setrlimit(resource.RLIMIT_NOFILE, (count, highest))


class Mesh:
    """The connections of one rank within one generation.

    Args:
        address: numeric address of this host that its peers can route to.
        protection: of this rank within the generation, by the run's cipher.
        limits: when a peer counts as dead.
        watch_all: whether any rank's death dooms every receive, or only those from it.

    Attributes:
        endpoint: what peers need to connect.
        listener: what arrives here.
        inbox: what has arrived and was not taken.
        failures: the ranks known to be dead and why, in the order in which that was learnt.
        left: the ranks that closed in good order.
        ended: the ranks that train no more, with the channel on which they still send.
        watch_interval_s: how often connections are looked at while somebody waits.
    """

    def __init__(
        self, address: str, *, protection: Protection, limits: PeerLimits, watch_all: bool
    ) -> None:
        self.rank, self.world_size = protection.rank, protection.world_size
        self._watch_all = watch_all
        self.inbox = Inbox()
        self.failures: dict[int, str] = {}
        self._limits = limits
        self._protection = protection
        allow_files(self.world_size)
        self.listener = Listener(address, protection=protection, limits=limits)
        self.endpoint = self.listener.endpoint
        self._sending = new_context()
        self._sending.set(zmq.MAX_SOCKETS, 4 * self.world_size + 64)
        self._links: dict[int, Link] = {}
        listening = frozenset([self.listener.listens_at])
        self._sockets = SocketAddresses(local=listening)
        self._forget = closed_in_children(self._sockets)
        self.left: set[int] = set()
        self.ended: dict[int, int] = {}
        self._aborted: set[int] = set()
        self._next_watch_s = 0.0
        self.watch_interval_s = WATCH_INTERVAL_S

    def connect(self, endpoints: Sequence[str]) -> None:
        """Connect to every rank's endpoint but one's own. Raises `ConfigError` for a malformed
        one.
        """
        peers = frozenset(map(_address_of, endpoints))
        for peer, endpoint in enumerate(endpoints):
            if peer != self.rank:
                self._links[peer] = Link(
                    self._sending,
                    peer=peer,
                    endpoint=endpoint,
                    protection=self._protection,
                    limits=self._limits,
                    now_s=time.monotonic(),
                )
        self._forget()
        self._forget = closed_in_children(self._sockets | SocketAddresses(remote=peers))

    def send(self, peer: int, channel: int, payload: Payload) -> None:
        """Queue a message; one to a rank that no longer reads is dropped."""
        if self._reads(peer):
            self._links[peer].send(EnvelopeKind.DATA, channel, payload)

    def abort(self, reason: str, blame: int | None) -> None:
        """Tell everyone that this rank failed."""
        note = (
            _BLAME.pack(_NOBODY if blame is None else blame) + reason.encode()[:_MAX_REASON_BYTES]
        )
        self._aborted.add(self.rank)
        self._tell(EnvelopeKind.ABORT, 0, note)

    def send_end(self, channel: int) -> None:
        """Tell all peers that this rank sends nothing more but on `channel`."""
        self._tell(EnvelopeKind.END, channel, b"")

    def _tell(self, kind: EnvelopeKind, channel: int, payload: Payload) -> None:
        for peer, link in self._links.items():
            if self._reads(peer):
                link.send(kind, channel, payload)

    def send_goodbye(self) -> None:
        """Tell all peers that this rank sends nothing more; those that failed too, because they may
        be about to close.
        """
        for peer in self._links.keys() - self.left:
            self._links[peer].send(EnvelopeKind.GOODBYE, 0, b"")

    def unreached(self) -> frozenset[int]:
        """The ranks that may live and to which there has been no connection."""
        return frozenset(
            peer
            for peer, link in self._links.items()
            if not link.ever_connected and self._reads(peer)
        )

    def any_peer_reads(self) -> bool:
        """Whether some rank may still read what is sent to it."""
        return any(map(self._reads, self._links))

    def is_delivering(self) -> bool:
        """Whether a rank may still need what it was sent before the goodbye, and that has not left
        yet. In a generation, and after a failure, nobody does.
        """
        return (
            self._watch_all
            and self.rank not in self._aborted
            and any(link.is_delivering for peer, link in self._links.items() if self._reads(peer))
        )

    def update(self) -> None:
        """Take in what has arrived, and now and then look who still lives."""
        now_s = time.monotonic()
        watch = now_s >= self._next_watch_s
        if watch:
            for link in self._links.values():
                link.watch(now_s)
            if self.watch_interval_s == WATCH_INTERVAL_S and not self.unreached():
                # Several looks must fit into the grace period.
                self.watch_interval_s = max(
                    WATCH_INTERVAL_S, min(_MAX_WATCH_INTERVAL_S, self._limits.grace_s / 8)
                )
            self._next_watch_s = now_s + self.watch_interval_s
        # What a rank sent before it died still counts, so it is read before the rank is judged.
        for message in self.listener.drain():
            for control, payload in self.inbox.put(*message):
                self._handle_control(control, payload)
        # What it said is lost, and nobody would ever send it again.
        for sender, why in self.listener.unreadable.items():
            self.failures.setdefault(sender, f"sent what is no message of this run: {why}")
        for sender in self.inbox.senders_with_gaps():
            self.failures.setdefault(
                sender, "lost messages: its connection broke and came back without them"
            )
        if watch:
            for peer, link in self._links.items():
                if self._reads(peer) and (reason := link.death_reason(now_s)):
                    self.failures[peer] = reason

    def failure_of(self, peer: int, channel: int) -> OffbeatError | None:
        """Why a message that is not here will never come; None when it may."""
        failed = next(iter(self.failures), peer) if self._watch_all else peer
        why = self.failures.get(failed)
        if why is None and peer in self.left:
            why = FINISHED
        elif why is None and self.ended.get(peer, channel) != channel:
            why = SESSION_ENDED
        if why is not None:
            return PeerError(f"rank {failed} {why} ({self.wait_of(peer, channel)})", rank=failed)
        if (ahead := self.inbox.exchange_ahead(peer, channel)) is not None:
            stream, exchange = split_channel(channel)
            return MismatchError(
                f"rank {peer} is already at exchange {ahead} while rank {self.rank} waits at"
                f" {exchange} (stream {stream}): the ranks ran a different number of backward"
                " passes or steps"
            )
        return None

    def departure_of(self, peers: frozenset[int]) -> PeerError | None:
        """That one of `peers` will send nothing more; None when all may."""
        for peer in sorted(peers & (self.failures.keys() | self.left)):
            why = self.failures.get(peer, "finished and closed its connections")
            return PeerError(
                f"rank {peer} {why} (rank {self.rank} waited for anybody's message)", rank=peer
            )
        return None

    def lost(self) -> frozenset[int]:
        """The ranks whose connection was lost without a message. Those that reported a failure, or
        left in good order, are still running.
        """
        disconnected = {peer for peer, link in self._links.items() if link.is_disconnected}
        return frozenset(disconnected - self.left - self._aborted)

    def wait_of(self, peer: int, channel: int) -> str:
        """What a receive of `peer`'s message on `channel` waits for, in words."""
        stream, exchange = split_channel(channel)
        return (
            f"rank {self.rank} waited for rank {peer}'s message of exchange {exchange}, stream"
            f" {stream}"
        )

    def close(self) -> None:
        """Deliver what was sent to those who still read (within the time to linger) and end every
        thread.
        """
        now_s = time.monotonic()
        closings = []
        for peer, link in self._links.items():
            link.watch(now_s)
            closings.append(link.close(now_s, linger=peer not in self.left))
        self._sending.term()
        for finish in closings:
            finish()
        self.listener.close()
        self._forget()

    def _reads(self, peer: int) -> bool:
        return peer not in self.failures and peer not in self.left

    def _handle_control(self, envelope: Envelope, payload: Payload) -> None:
        if envelope.kind == EnvelopeKind.GOODBYE:
            self.left.add(envelope.sender)
        elif envelope.kind == EnvelopeKind.END:
            self.ended[envelope.sender] = envelope.channel
        elif envelope.kind == EnvelopeKind.ABORT and len(payload) >= _BLAME.size:
            (blamed,) = _BLAME.unpack_from(payload)
            reason = bytes(payload[_BLAME.size :]).decode(errors="replace")
            if (
                self._watch_all
                and 0 <= blamed < self.world_size
                and blamed not in (self.rank, envelope.sender)
            ):
                self.failures.setdefault(blamed, f"failed, says rank {envelope.sender}: {reason}")
            self._aborted.add(envelope.sender)
            self.failures.setdefault(envelope.sender, f"aborted: {reason}")


def _address_of(endpoint: str) -> Address:
    """Raises `ConfigError` unless it is one of TCP."""
    try:
        if endpoint.startswith("tcp://"):
            return parsed_address(endpoint)
    except ValueError:
        pass
    raise ConfigError(
        f"cannot connect to {endpoint!r}: give what that rank's Peers.endpoint says, like"
        " 'tcp://10.0.0.7:41234'"
    )
