"""Waits until all ranks have come to `attach`, and while they connect. The ranks tell each other
through the store, since there are no connections yet:

    here/<position>       this rank has come, and what the others must know of it (JSON)
    halted                why no session can begin, and whose fault it is (JSON)
    <phase>/<position>    what this rank says in a phase of connecting

A rank that has come tells where its `Presence` is. Together the ranks look after all that have
come, each after a few at a time, so one that ends meanwhile is soon noticed and named to all. One
that never came looks like a slow start.

All ranks ask one store, so whoever waits asks for one entry again and again, and not for those of
all.

No rank can be left out here: ranks are compared and models copied from the first one, so a death
ends the start of the session on all ranks.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import Store

from offbeat.errors import MALFORMED, MismatchError, OffbeatError, PeerError, WireError
from offbeat.transport.interface import bound_socket, reachable_address
from offbeat.transport.sockets import Address, SocketAddresses, closed_in_children

Key = TypeVar("Key")
T = TypeVar("T")

_ANSWER_S: Final = 0.5
"""How long a host may take to refuse; one that says nothing is not known to be without it."""


GRACE_S: Final = 2.0
"""How long a rank that an earlier session has lost may take to show that it lives all the same."""

_LOOK_S: Final = 0.02

_PROBE_S: Final = 0.5

_PROBED: Final = 8
"""How many ranks each looks after at a time. If it were all of them, there would be a connection
between any two of many ranks twice a second.
"""

_MOST_PROBES: Final = 4096
"""How many connections to a `Presence` are answered, as far as the system allows so many: nobody
accepts them. One that is not answered holds up who asks for half a second.
"""

_HERE: Final = "here"

_HALTED: Final = "halted"

_PRESENCE: Final = "presence"

_SERVES: Final = "serves_store"

_lost: WeakKeyDictionary[dist.ProcessGroup, set[int]] = WeakKeyDictionary()


class Presence:
    """A socket that listens for as long as this process lives, or until `close`, so that peers can
    find out without its help whether it has ended.

    Once a process is gone, the kernel of its host refuses connections to it. The kernel answers for
    a process that computes, waits or is stopped, so a refusal means that it has ended. That holds
    while ranks connect, when no connection between them could tell yet.

    Attributes:
        address: where peers find it.
    """

    def __init__(self, host: str) -> None:
        reached_at = reachable_address(host)
        self._socket = bound_socket(host)
        self._socket.listen(_MOST_PROBES)
        port = self._socket.getsockname()[1]
        self.address: Address = (reached_at, port)
        # A forked child would go on listening.
        self._forget = closed_in_children(SocketAddresses(local=frozenset([(host, port)])))

    def close(self) -> None:
        """Listen no longer. Idempotent."""
        self._forget()
        self._socket.close()


def refused(addresses: Mapping[Key, Address]) -> set[Key]:
    """Which of these nobody listens at any more. Asks all of them at once, within half a second."""
    gone: set[Key] = set()
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for key, address in addresses.items():
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            end = stack.enter_context(socket.socket(family))
            end.setblocking(False)
            match end.connect_ex(address):
                case errno.ECONNREFUSED:
                    gone.add(key)
                case errno.EINPROGRESS:
                    selector.register(end, selectors.EVENT_WRITE, (key, end))
        deadline_s = time.monotonic() + _ANSWER_S
        while selector.get_map():
            events = selector.select(max(0.0, deadline_s - time.monotonic()))
            if not events:
                break
            for asked, _ in events:
                key, end = asked.data
                if end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED:
                    gone.add(key)
                selector.unregister(end)
    return gone


def lost_ranks() -> set[int]:
    """Ranks of the default process group with which a session of this process has lost its
    connection; to be added to.
    """
    world = dist.group.WORLD
    assert world is not None, "asked for before there is a process group"
    return _lost.setdefault(world, set())


def first_missing(store: Store, keys: Sequence[str], begin: int = 0) -> int:
    """The place of the first of `keys` from `begin` on that is not in the store; their number where
    all are.

    While one is missing that costs one short question, however many keys come after it. Of those
    that are there it asks for twice as many each time.
    """
    count = 1
    while begin < len(keys):
        if store.check(list(keys[begin : begin + count])):
            begin, count = begin + count, 2 * count
        elif count > 1:
            count //= 2
        else:
            return begin
    return len(keys)


class Rendezvous:
    """One rank's side of the meeting.

    Args:
        store: under a prefix of this session alone.
        position: of this rank in `ranks`.
        ranks: who takes part, by their number in the default process group.
        lost: those that are known to be dead.
    """

    def __init__(
        self, store: Store, position: int, ranks: Sequence[int], *, lost: AbstractSet[int]
    ) -> None:
        self._store = store
        self._position = position
        self._ranks = ranks
        self._lost = lost
        self._addresses: dict[int, Address] = {}
        self._gone: set[int] = set()
        self._num_looked = 0
        self._serving: int | None = None
        self._next_probe_s = 0.0
        self._store_is_lost = False

    def register(
        self, entry: Mapping[str, Any], *, presence: Address, serves_store: bool = False
    ) -> list[dict[str, Any]]:
        """Return every rank's entry once all have come. Each may take as long as the store's time
        limit.

        Args:
            entry: what the others must know of this rank, of JSON's kinds.
            presence: where this rank's `Presence` listens.
            serves_store: whether the store goes with this process.

        Raises:
            MismatchError: another rank refuses.
            PeerError: a rank is dead, on every rank; or one has not come within the time limit.
            WireError: an entry is none, on every rank.
        """
        with self.naming_who_took_the_store():
            mine = json.dumps({**entry, _PRESENCE: list(presence), _SERVES: serves_store})
            self._store.set(_here(self._position), mine)
            self._addresses[self._position] = presence
            if serves_store:
                self._serving = self._position
            return self._await(_HERE, self._read_entry, self._check_missing, rest_s=0.25)

    def refuse(self, refusal: OffbeatError) -> None:
        """Tell all that this rank cannot take part, and why."""
        self._halt(f"rank {self._position} refused: {refusal}", None)

    def exchange(self, phase: str, mine: str, *, limit_s: float) -> list[str]:
        """What every rank says in this phase, by position.

        Args:
            phase: its name; used once.
            mine: what this rank says.
            limit_s: a rank that has said nothing for so long after this one is silent, > 0.

        Raises:
            PeerError: a rank has ended or is silent; every rank raises.
            WireError: what a rank says is no text; every rank raises.
        """

        def check_silence(silent: int, waited_s: float) -> None:
            if waited_s > limit_s:
                raise self._halted_by(
                    f"rank {self._ranks[silent]} has been silent for {limit_s:g} s"
                    " while the ranks connected; was it stopped, or its host cut off?",
                    self._ranks[silent],
                )

        def read(_: int, text: bytes) -> str:
            try:
                return text.decode()
            except UnicodeDecodeError as error:
                raise unreadable(f"what the ranks say of {phase!r}", text) from error

        with self.naming_who_took_the_store():
            self._store.set(f"{phase}/{self._position}", mine)
            self._next_probe_s = time.monotonic() + _PROBE_S
            return self._await(phase, read, check_silence, rest_s=0.1)

    def ended(self) -> dict[int, str]:
        """The ranks, by position, whose process has ended since they came; and why. Asked again and
        again, since it looks after a few at a time.
        """
        self._gone |= refused(self._looked_after())
        return dict.fromkeys(sorted(self._gone), "ended while the ranks connected")

    def cause_of(self, error: OffbeatError, *, within_s: float = GRACE_S) -> OffbeatError:
        """The error of all ranks for a connection that broke here: whose end broke it, if that can
        be learnt. Tells the others.
        """
        reason = str(error).partition("\n")[0]
        deadline_s = time.monotonic() + within_s
        try:
            with self.naming_who_took_the_store():
                while time.monotonic() < deadline_s:
                    self._raise_if_halted()
                    self._raise_if_ended(self._others, reason=reason)
                    time.sleep(_LOOK_S)
        except OffbeatError as named:
            return named
        return self._halted_by(
            f"the ranks could not be connected ({reason}); can all hosts reach each other?", None
        )

    def fail(self, error: BaseException) -> None:
        """Tell all that the session cannot begin because of this rank's `error`, unless they have
        been told.
        """
        if self._store_is_lost:  # the question would only cost time
            return
        with suppress(RuntimeError):
            why = f"rank {self._ranks[self._position]} failed while the ranks connected: "
            self._halt(f"{why}{type(error).__name__}: {error}", self._ranks[self._position])

    def _await(
        self,
        phase: str,
        read: Callable[[int, bytes], T],
        check: Callable[[int, float], None],
        *,
        rest_s: float,
    ) -> list[T]:
        """What every rank says in a phase, by position, once all have said it. Raises if a rank has
        ended.

        Args:
            phase: its name.
            read: what to make of what the rank of a position says.
            check: raises if the rank of a position, the first that has said nothing, never will. It
                is told for how many seconds this rank has waited.
            rest_s: the longest time from one question to the next, > 0.
        """
        keys = [f"{phase}/{position}" for position in range(len(self._ranks))]
        begin_s, found = time.monotonic(), list[T]()
        while True:
            # Before the question: what was said while this rank was stopped must be heard.
            waited_s = time.monotonic() - begin_s
            begin, end = len(found), first_missing(self._store, keys, len(found))
            if end > begin:
                texts = self._store.multi_get(keys[begin:end])
                found += [read(at, text) for at, text in enumerate(texts, begin)]
            if end == len(keys):
                break
            self._raise_if_halted()
            self._raise_if_ended(self._looked_after, over=lambda: self._store.check(keys))
            check(end, waited_s)
            time.sleep(min(_LOOK_S + waited_s / 50, rest_s))
        self._raise_if_halted()  # who was held dead, or silent for too long, must not go on alone
        return found

    def _read_entry(self, position: int, text: bytes) -> dict[str, Any]:
        try:
            entry: dict[str, Any] = json.loads(text)
            host, port = entry.pop(_PRESENCE)
            self._addresses[position] = (str(ipaddress.ip_address(host)), int(port))
            if entry.pop(_SERVES) is True:
                self._serving = position
        except MALFORMED as error:
            raise unreadable(f"what rank {self._ranks[position]} says of itself", text) from error
        return entry

    def _check_missing(self, first: int, waited_s: float) -> None:
        """Raises if one of those that have not come never will. `first` has not come."""
        if waited_s > GRACE_S:
            for position, rank in enumerate(self._ranks):
                if rank in self._lost and not self._store.check([_here(position)]):
                    living = [other for other in self._ranks if other not in self._lost]
                    raise self._halted_by(_was_lost(rank, living), rank)
        # missing in torch's stubs
        limit_s = self._store.timeout.total_seconds()  # type: ignore[attr-defined]
        if waited_s > limit_s:
            rank = self._ranks[first]
            raise PeerError(
                f"rank {rank} has not come to attach() within {limit_s:g} s, the time limit of"
                " the process group; has it ended, or does it never get there? Start all"
                " workers anew, with a longer timeout if they need it",
                rank=rank,
            )

    def _looked_after(self) -> dict[int, Address]:
        """Where some of the ranks are that have come: those after this one, and after them others,
        in turn. All ranks look after all that way.
        """
        found: dict[int, Address] = {}
        num_others = len(self._ranks) - 1
        for _ in range(min(_PROBED, num_others)):
            position = (self._position + 1 + self._num_looked % num_others) % len(self._ranks)
            self._num_looked += 1
            if position not in self._addresses and self._store.check([_here(position)]):
                self._read_entry(position, self._store.get(_here(position)))
            if position in self._addresses:
                found[position] = self._addresses[position]
        return found

    def _others(self) -> dict[int, Address]:
        """Where all other ranks are."""
        return {at: where for at, where in self._addresses.items() if at != self._position}

    def _raise_if_ended(
        self,
        asked: Callable[[], Mapping[int, Address]],
        *,
        reason: str = "",
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Looks at most every `_PROBE_S`, for those of `asked`. Once a phase is `over`, a rank may
        have come to an end that all come to, such as an error of the user's.
        """
        if time.monotonic() < self._next_probe_s:
            return
        self._next_probe_s = time.monotonic() + _PROBE_S
        gone = sorted(refused(asked()))
        # A rank that failed for another's sake has said so before it closed.
        self._raise_if_halted()
        if gone and not over():
            rank, host = self._ranks[gone[0]], self._addresses[gone[0]][0]
            why = (
                f"rank {rank} ended while the ranks connected{f' ({reason})' if reason else ''};"
                " start all workers anew"
            )
            if _is_loopback(host) and not _is_loopback(self._addresses[self._position][0]):
                why = (
                    f"rank {rank} listens at {host}, where no other host finds it: MASTER_ADDR"
                    " leads there on its host. Name its network interface in OFFBEAT_INTERFACE"
                )
            raise self._halted_by(why, rank)

    @contextmanager
    def naming_who_took_the_store(self) -> Iterator[None]:
        """Turn a failure of the store into an error that names the rank that served it, if one did.

        Nobody else is to blame: another rank may have ended because it saw the failure before.
        """
        try:
            yield
        except RuntimeError as error:
            self._store_is_lost = True
            reason = str(error).partition("\n")[0]
            if self._serving is None:
                raise PeerError(
                    f"the run's store does not answer while the ranks connect ({reason}); has the"
                    " process that serves it ended, or was it stopped?"
                ) from error
            rank = self._ranks[self._serving]
            served_at = {self._serving: self._addresses[self._serving]}
            what = "has ended" if refused(served_at) else "does not answer"
            raise PeerError(
                f"rank {rank}, which served the run's store, {what} ({reason}); start all workers"
                " anew",
                rank=rank,
            ) from error

    def _halted_by(self, why: str, lost: int | None) -> OffbeatError:
        """The error to raise, which all others hear too: the first that any rank has found."""
        with suppress(RuntimeError):
            self._halt(why, -1 if lost is None else lost)
            return self._halt_error()
        return PeerError(why, rank=lost)

    def _halt(self, why: str, lost: int | None) -> None:
        """`lost` is None for a refusal, and -1 where no rank can be blamed. What another rank has
        written stays, since what comes later may be its consequence.
        """
        self._store.compare_set(_HALTED, "", json.dumps([why, lost]))

    def _raise_if_halted(self) -> None:
        if self._store.check([_HALTED]):
            raise self._halt_error()

    def _halt_error(self) -> OffbeatError:
        text = self._store.get(_HALTED)
        try:
            why, lost = json.loads(text)
            rank = None if lost is None or lost < 0 else int(lost)
        except MALFORMED as error:
            raise unreadable("why no session can begin", text) from error
        return MismatchError(str(why)) if lost is None else PeerError(str(why), rank=rank)


def unreadable(what: str, text: object) -> WireError:
    """The error of who reads something from the store that nobody has to write there."""
    return WireError(
        f"{what} cannot be read in the run's store ({repr(text)[:80]}); do all ranks have the same"
        " version of offbeat, and does nobody else write to this store?"
    )


def _here(position: int) -> str:
    return f"{_HERE}/{position}"


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback


def _was_lost(rank: int, others: Sequence[int]) -> str:
    return (
        f"rank {rank} was lost in an earlier session of these processes, and no session can begin"
        " with it: start all workers anew, from a checkpoint, or go on without it by attach(...,"
        f" group=torch.distributed.new_group({list(others)}, use_local_synchronization=True))"
    )
