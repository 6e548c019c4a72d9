"""The peers driver: messages from rank to rank over ZeroMQ, encrypted, each rank known by its key.

How ranks are connected and who counts as dead is in `mesh` and `link`, who is let in at all in
`protection` and `link`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from offbeat.errors import ConfigError, OffbeatError, PeerError, PeerTimeoutError, UnsupportedError
from offbeat.transport.driver import DONE, Driver, Finished, Ticket, Underway
from offbeat.transport.link import PeerLimits
from offbeat.transport.mesh import FINISHED, SESSION_ENDED, WATCH_INTERVAL_S, Mesh
from offbeat.transport.operations import Now, Operation, Payload, Post, Recv, RecvAny, Send, Sleep
from offbeat.transport.protection import PROTECTIONS, Cipher


class Peers(Driver):
    """Carries out `Send`, `Recv`, `RecvAny`, `Post`, `Sleep` and `Now` between the ranks of one
    run.

    Any thread may use it. Where several wait, one of them polls the sockets for all, without
    holding the lock. It does not survive a fork.

    Attributes:
        endpoint: where this rank listens, "tcp://address:port"; the peers' `connect` needs it.
        watch_all: as given.
        lost: once closed, the ranks whose connection had been lost by then although they had
            neither closed it nor reported a failure.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        address: str,
        secret: bytes,
        generation: int = 0,
        limits: PeerLimits = PeerLimits(),
        cipher: Cipher = "curve",
        watch_all: bool = True,
    ) -> None:
        """Bind a free port of `address` and start to listen.

        Args:
            rank: this rank, 0 <= rank < world_size.
            world_size: number of ranks.
            address: numeric address of this host that the other ranks can route to (see
                `interface.listen_address`).
            secret: the run's secret, 16 bytes or more, the same on every rank.
            generation: number of the membership, 0 <= generation < 2**32, the same on every rank.
            limits: the same on every rank.
            cipher: the same on every rank.
            watch_all: whether any rank's death fails every receive that is not already answered. A
                synchronous protocol cannot go on without anyone; where one can, only receives from
                the dead rank fail.

        Raises:
            ConfigError: a bad secret or address.
        """
        self.rank = rank
        self.world_size = world_size
        self.watch_all = watch_all
        protection = PROTECTIONS[cipher](
            run_secret=secret, generation=generation, world_size=world_size, rank=rank
        )
        self._mesh = Mesh(address, protection=protection, limits=limits, watch_all=watch_all)
        self.endpoint = self._mesh.endpoint
        self.lost: frozenset[int] = frozenset()
        # The lock guards the mesh; the condition says that something may have happened to it.
        self._changed = threading.Condition(threading.Lock())
        # While it is set, one thread polls the sockets without holding the lock, so that others can
        # send. That thread alone may touch the mesh's receiving side then.
        self._is_polled = False
        self._closed = False

    def connect(self, endpoints: Sequence[str]) -> None:
        """Connect to every other rank, in the background; messages sent meanwhile wait.

        Args:
            endpoints: every rank's `endpoint`, by rank. This rank's own is ignored.

        Raises:
            ConfigError: an endpoint is malformed.
        """
        with self._changed:
            self._check_open()
            self._mesh.connect(endpoints)

    def start(self, operation: Operation, channel: int) -> Ticket:
        match operation:
            case Send(peer, payload):
                self._check_peer(peer)
                with self._changed:
                    self._check_open()
                    self._mesh.send(peer, channel, payload)
                return DONE
            case Recv(peer):
                self._check_peer(peer)
                return _Receive(self, operation, channel)
            case RecvAny(peers):
                if others := peers - {self.rank}:
                    # These stand for all, of whom there may be many.
                    self._check_peer(min(others))
                    self._check_peer(max(others))
                return _Receive(self, operation, channel)
            case Post(payload):
                with self._changed:
                    self._check_open()
                    self._mesh.inbox.post(self.rank, channel, payload)
                    if self._is_polled:
                        self._mesh.listener.wake()  # else it would sleep until a message comes
                    self._changed.notify_all()
                return DONE
            case Sleep(seconds):
                end_s = time.monotonic() + seconds
                return Underway(
                    lambda: time.monotonic() >= end_s,
                    lambda: time.sleep(max(0.0, end_s - time.monotonic())),
                )
            case Now():
                return Finished(time.monotonic())
            case _:
                raise UnsupportedError(
                    f"the peers driver got {type(operation).__name__}, it performs messages, Sleep"
                    " and Now; give dense collectives to the c10d driver"
                )

    def dead(self) -> dict[int, str]:
        """The ranks known to be dead and why, in the order in which this rank learnt of it. Never
        blocks.
        """
        return self.wait_for_death(0)

    def wait_for_death(self, timeout_s: float) -> dict[int, str]:
        """Return what `dead` does, but wait for up to `timeout_s` until some rank is dead or has
        ended: for another driver that has to name the cause of its failure.
        """
        mesh = self._mesh
        with self._changed:
            self._wait_until(lambda: bool(mesh.failures or mesh.ended), timeout_s)
            return dict(mesh.failures)

    def await_connections(self, timeout_s: float) -> None:
        """Return once there has been a connection to every rank, or after `timeout_s`. A connection
        that is lost afterwards tells of a death.
        """
        with self._changed:
            self._wait_until(lambda: not self._mesh.unreached(), timeout_s)

    def unreached(self) -> frozenset[int]:
        """The ranks that may live and to which there has been no connection. Never blocks."""
        with self._changed:
            self._update()
            return self._mesh.unreached()

    def left(self) -> list[int]:
        """The ranks that closed in good order, by their numbers. Never blocks."""
        with self._changed:
            self._update()
            return sorted(self._mesh.left)

    def departures(self) -> dict[int, str]:
        """The ranks that are dead and why; if there are none, those that have ended their training
        or left, and what an error says of them. Never blocks.
        """
        with self._changed:
            self._update()
            mesh = self._mesh
            ended = dict.fromkeys(sorted(mesh.ended), SESSION_ENDED)
            return dict(mesh.failures) or ended | dict.fromkeys(sorted(mesh.left), FINISHED)

    def end_training(self, channel: int) -> None:
        with self._changed:
            self._check_open()
            self._mesh.send_end(channel)

    def departed(self) -> frozenset[int]:
        return frozenset([*self.dead(), *self.left()])

    def abort(self, reason: str, *, blame: int | None = None) -> None:
        """Tell every peer that this rank failed, so that their receives raise `PeerError` instead
        of waiting.

        Args:
            reason: what happened; the peers' errors repeat it.
            blame: the rank at the root of it, when it is not this one; the peers' errors name that
                rank.
        """
        with self._changed:
            if not self._closed:
                self._mesh.abort(reason, blame)

    def close(self) -> None:
        """Announce the departure, deliver what was sent to ranks that live, however long that takes
        on a slow link, and end every thread. Idempotent.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            # Sockets must not be closed while another thread polls them.
            while self._is_polled:
                self._changed.wait()
            self._mesh.update()
            self._mesh.send_goodbye()
            # Peers that close at the same moment read no more: wait shortly for their goodbyes, so
            # that closing does not linger for messages to them.
            deadline_s = time.monotonic() + WATCH_INTERVAL_S
            while self._mesh.any_peer_reads() and (
                time.monotonic() < deadline_s or self._mesh.is_delivering()
            ):
                self._mesh.listener.wait(WATCH_INTERVAL_S)
                self._mesh.update()
            self.lost = self._mesh.lost()
            self._mesh.close()

    def _is_answered(self, receive: _Receive) -> bool:
        """Whether `_taken` would return or raise at once. Never blocks."""
        inbox = self._mesh.inbox
        with self._changed:
            if self._closed or inbox.first_of(receive.peers, receive.channel) is not None:
                return True
            self._update()
            return (
                inbox.first_of(receive.peers, receive.channel) is not None
                or receive.failure(self._mesh) is not None
            )

    def _taken(self, receive: _Receive) -> tuple[int, Payload]:
        """The message that `receive` waits for as soon as there is one; else its failure is raised
        once it is known, or its time limit.
        """
        inbox = self._mesh.inbox
        with self._changed:
            self._check_open()
            # What is here already is taken first: looking for more costs as much for each message.
            message = inbox.take(receive.peers, receive.channel)
            while message is None:
                self._update()
                if (message := inbox.take(receive.peers, receive.channel)) is not None:
                    break
                if (error := receive.failure(self._mesh)) is not None:
                    raise error
                remaining_s = receive.deadline_s - time.monotonic()
                if remaining_s <= 0:
                    raise receive.timeout(self._mesh)
                self._wait_for_change(remaining_s)
            return message

    def _check_peer(self, peer: int) -> None:
        if not 0 <= peer < self.world_size or peer == self.rank:
            raise ConfigError(
                f"rank {self.rank} was to exchange a message with rank {peer}; allowed are the"
                f" other ranks of a world of {self.world_size}"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise PeerError(
                f"rank {self.rank} has closed its connections; nothing can be sent or received any"
                " more"
            )

    def _update(self) -> None:
        """With the lock: take in what is new, unless another thread is about to."""
        self._check_open()
        if not self._is_polled:
            self._mesh.update()

    def _wait_until(self, is_so: Callable[[], bool], timeout_s: float) -> None:
        """With the lock: return once `is_so`, or after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        self._update()
        while not is_so() and (remaining_s := deadline_s - time.monotonic()) > 0:
            self._wait_for_change(remaining_s)
            self._update()

    def _wait_for_change(self, timeout_s: float) -> None:
        """With the lock: let other threads use the driver until something may have happened."""
        timeout_s = min(timeout_s, self._mesh.watch_interval_s)
        if self._is_polled:
            self._changed.wait(timeout_s)
            return
        # The thread that waits first polls for all. It gives up the lock meanwhile, and wakes the
        # others.
        self._is_polled = True
        self._changed.release()
        try:
            self._mesh.listener.wait(timeout_s)
        finally:
            self._changed.acquire()
            self._is_polled = False
            self._changed.notify_all()


class _Receive:
    """A receive under way: of one peer's message, or of anybody's."""

    def __init__(self, driver: Peers, operation: Recv | RecvAny, channel: int) -> None:
        self._driver, self.channel = driver, channel
        self._takes_any = isinstance(operation, RecvAny)
        self.peers = operation.peers
        timeout_s = operation.timeout_s
        self.deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s

    def done(self) -> bool:
        return self._driver._is_answered(self) or time.monotonic() >= self.deadline_s

    def wait(self) -> Any:
        taken = self._driver._taken(self)
        return taken if self._takes_any else taken[1]

    def failure(self, mesh: Mesh) -> OffbeatError | None:
        """Why nothing will come; None: it still may."""
        if self._takes_any:
            return mesh.departure_of(self.peers)
        return mesh.failure_of(min(self.peers), self.channel)

    def timeout(self, mesh: Mesh) -> PeerTimeoutError:
        """The error once the time limit has passed."""
        passed = "the time limit passed while"
        if self._takes_any:
            return PeerTimeoutError(f"{passed} rank {mesh.rank} waited for anybody's message")
        peer = min(self.peers)
        return PeerTimeoutError(f"{passed} {mesh.wait_of(peer, self.channel)}", rank=peer)
