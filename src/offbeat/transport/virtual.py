"""All ranks in one thread, under a virtual clock: deterministic, replayable from a seed, and never
really waiting.

`VirtualCluster` runs one collective per rank. Whenever several ranks could go on, the seed decides
who does; when none can, the clock jumps to the next arrival. A link passes `bytes_per_s` in each
direction, one message at a time, and adds `latency_s`; `jitter_s` adds a random part drawn from the
seed (messages between two ranks still arrive in order).

When nothing can ever happen again the run ends with `DeadlockError`, which says who waits for whom.
A rank that raises or is killed is dead to its peers: their receives raise `PeerError`, as they
would over sockets. A rank may have several collectives under way, as a process has threads
(`run_in_background`), and may be stopped for a while (`freeze`).
"""

from __future__ import annotations

import heapq
import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeVar

from offbeat.errors import MismatchError, OffbeatError, PeerError
from offbeat.transport.driver import Driver, Pending
from offbeat.transport.operations import Collective, DenseOperation, Payload
from offbeat.transport.virtual_driver import VirtualDriver

T = TypeVar("T")


class DeadlockError(OffbeatError):
    """Every rank waits for another one and no message is under way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VirtualLink:
    """What each rank's network connection can do.

    Attributes:
        latency_s: time from the last byte's departure to its arrival, >= 0.
        bytes_per_s: rate in each direction, > 0; infinite by default.
        jitter_s: upper bound of a random addition to each message's latency, >= 0.
    """

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")
    jitter_s: float = 0.0


class VirtualCluster:
    """`world_size` ranks that exchange messages under a virtual clock.

    Args:
        world_size: number of ranks, >= 1.
        seed: decides the order in which ranks go on and every jitter.
        link: the network.
        watch_all: whether any rank's death fails every receive, or only those from it.
        death_notice_s: how long after a death the peers learn of it, in seconds.
    """

    def __init__(
        self,
        world_size: int,
        *,
        seed: int = 0,
        link: VirtualLink | None = None,
        watch_all: bool = True,
        death_notice_s: float = 0.0,
    ) -> None:
        self.world_size = world_size
        self.now_s = 0.0
        self.drivers = [VirtualDriver(self, rank) for rank in range(world_size)]
        self._link = link or VirtualLink()
        self._random = random.Random(seed)  # noqa: S311 - a replayable schedule, not a secret
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._out_free_s = [0.0] * world_size
        self._in_free_s = [0.0] * world_size
        self._reached_s: dict[tuple[int, int], float] = defaultdict(float)
        self._num_in_flight = [0] * world_size
        self._pending_notices: dict[int, Callable[[], None]] = {}
        self._watch_all = watch_all
        self._death_notice_s = death_notice_s
        self._inbox: dict[tuple[int, int, int], deque[bytes]] = defaultdict(deque)
        self._senders: dict[tuple[int, int], set[int]] = defaultdict(set)
        self._dense_begun: dict[int, dict[int, DenseOperation]] = {}
        self._dense_results: dict[int, dict[int, Any]] = {}
        self._failed: dict[int, OffbeatError] = {}
        self._failed_at_s: dict[int, float] = {}
        self._dead: dict[int, str] = {}
        self._left: set[int] = set()
        self._frozen: dict[int, int] = {}
        self._touched: set[int] = set()
        self._background: list[tuple[int, tuple[Collective[Any], int]]] = []

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
        tasks = [
            *enumerate(own),
            *((rank, Pending(drivers[rank], *work)) for rank, work in self._background),
        ]
        self._background.clear()
        numbers = [
            [number for number, (its_rank, _) in enumerate(tasks) if its_rank == rank]
            for rank in range(len(own))
        ]
        ready: set[int] = set()
        unfinished = set(range(self.world_size))
        self.touch(*unfinished)
        while unfinished:
            # Only ranks to which something happened are looked at again: with 1,024 ranks, asking
            # all of them after each event would take most of the time.
            for rank in self._touched:
                is_stopped = rank in self._failed or rank in self._frozen
                for number in numbers[rank]:
                    task = tasks[number][1]
                    can_go_on = not (is_stopped or task.over) and task.ready()
                    (ready.add if can_go_on else ready.discard)(number)
                if rank in self._failed or own[rank].over:
                    unfinished.discard(rank)
            self._touched.clear()
            if ready:
                self._go_on(*tasks[self._random.choice(sorted(ready))])
            elif unfinished:
                self._next_event(unfinished)
        for _, task in tasks:
            task.cancel()
        return [
            self._failed[rank] if rank in self._failed else own[rank].wait()
            for rank in range(self.world_size)
        ]

    def run_in_background(self, rank: int, collective: Collective[object], *, channel: int) -> None:
        """Carry out `collective` at `rank` during the next run, while the rank's own collective
        goes on, as another thread would.

        It is dropped when every rank's own is over. If it raises, the rank is dead.
        """
        self._background.append((rank, (collective, channel)))

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
            payload: is copied.
        """
        duration_s = len(payload) / self._link.bytes_per_s
        departs_s = max(self.now_s, self._out_free_s[source])
        self._out_free_s[source] = departs_s + duration_s
        latency_s = self._link.latency_s + self._random.random() * self._link.jitter_s
        reaches_s = max(departs_s + latency_s, self._reached_s[source, target])
        self._reached_s[source, target] = reaches_s
        message = bytes(payload)

        self._num_in_flight[source] += 1

        # A message occupies the sender's link, travels, and then occupies the receiver's link,
        # which it may find busy with another sender's message.
        def reach() -> None:
            self._in_free_s[target] = max(self.now_s, self._in_free_s[target]) + duration_s
            self.at(self._in_free_s[target], arrive)

        def arrive() -> None:
            if departs_s + duration_s <= self._failed_at_s.get(source, math.inf):
                self._arrive(source, target, channel, message)
            self._num_in_flight[source] -= 1
            self._notify_if_all_sent(source)

        self.at(reaches_s, reach)

    def post(self, rank: int, channel: int, payload: Payload) -> None:
        """What `rank` leaves for itself is there at once."""
        self._arrive(rank, rank, channel, bytes(payload))

    def take(self, source: int, target: int, channel: int) -> bytes:
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

    def dead_among(self, peers: Set[int]) -> tuple[int, str] | None:
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

            self.at(self.now_s + self._dense_s(operations), conclude)

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

    def _arrive(self, source: int, target: int, channel: int, message: bytes) -> None:
        self._inbox[source, target, channel].append(message)
        self._senders[target, channel].add(source)
        self.touch(target)

    def _dense_s(self, operations: Sequence[DenseOperation]) -> float:
        """How long a dense operation takes on a ring of such links."""
        num_bytes = max(operation.num_bytes for operation in operations)
        hop_s = self._link.latency_s + num_bytes / self.world_size / self._link.bytes_per_s
        return operations[0].num_hops(self.world_size) * hop_s
