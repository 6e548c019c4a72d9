"""The members of a run: numbered lists that are kept in the run's store.

A *generation* is one such list. It never changes. When a member has departed or a new one wants to
join, any member that notices it proposes the next generation. The first proposal that reaches the
store is the valid one, and all members adopt it. Within a generation a member is known by its
*position* in the list, so the protocols that run on a generation never see the ranks of departed
members.

The keys in the store:

    founded                 what the run trains, written by the first founder
    generation/<n>          the members of generation n; generation 0 holds the founders
    request/<n>             the n-th request to join, n >= 1
    beat/<rank>/<ticket>    the heartbeat: a counter that a living member increments, or -1 after
                            the member has deregistered
    endpoint/<n>/<position> the address at which that member of generation n listens
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from offbeat.errors import MALFORMED, MismatchError, WireError
from offbeat.transport.rendezvous import first_missing

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

_VERSION = 1
_DEREGISTERED = -1
_OVER_KEY = "over"

MAX_GAP_S = 1.0
"""The most that counts as silence between two readings of the heartbeats. A process that was itself
suspended did not observe the heartbeats, so that time must not count as silence of its peers.
"""


@dataclass(frozen=True, slots=True)
class Member:
    """One process that has, or had, a rank of the run.

    A process that is started again as the same rank is another member: it has a higher ticket.

    Attributes:
        rank: the rank, >= 0.
        ticket: the number of the request with which it joined; 0 for a founder.
    """

    rank: int
    ticket: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One list of members.

    Attributes:
        number: 0 for the list of the founders; each next generation has the next number.
        members: the members by position; those that have been in the run longest come first.
        newcomers: the positions of members that joined with this generation and do not have the
            model yet.
        tickets: how many requests to join have been answered, by this generation or an earlier one.
    """

    number: int
    members: tuple[Member, ...]
    newcomers: frozenset[int]
    tickets: int

    @classmethod
    def of_founders(cls, world_size: int) -> Generation:
        """The first one of a run."""
        founders = tuple(Member(rank, 0) for rank in range(world_size))
        return cls(number=0, members=founders, newcomers=frozenset(), tickets=0)

    @property
    def size(self) -> int:
        return len(self.members)

    def position_of(self, member: Member) -> int | None:
        """The position of `member`; None when it is not in this generation."""
        return self.members.index(member) if member in self.members else None


def successor(
    generation: Generation,
    *,
    me: int,
    unreachable: frozenset[int],
    silent: frozenset[int],
    requests: Sequence[Member],
    begun: bool = True,
) -> Generation | None:
    """The generation after `generation` that the member at position `me` may propose.

    A member that cannot be reached and whose heartbeat has stopped is dead. A member that cannot be
    reached but has a heartbeat is on the other side of a network partition, and both sides see the
    same thing. Therefore only the side with more than half of the living members may continue
    without the other; at a tie it is the side of the member that has been in the run longest. A
    member that is silent in the store but can be reached stays.

    Args:
        generation: the current generation.
        me: the position of the member that proposes.
        unreachable: the positions that this member cannot reach.
        silent: the positions whose heartbeat has not changed for long.
        requests: the requests to join, by ticket, all above `generation.tickets`. A request of a
            rank that is a member replaces that member.
        begun: whether `generation` is at work, so that its newcomers have the model.

    Returns:
        The proposal; None when this member may not propose, or when nothing changes.
    """
    positions = frozenset(range(generation.size))
    reached = (positions - unreachable) | {me}
    alive = reached | (positions - silent)
    majority = 2 * len(reached) - len(alive)
    # Two sides of a partition must never both continue, since the run would split in two.
    if majority < 0 or (majority == 0 and min(alive) not in reached):
        return None
    joining = {request.rank: request for request in requests}
    staying = [
        position for position in sorted(reached) if generation.members[position].rank not in joining
    ]
    if len(staying) == generation.size and not requests:
        return None
    members = [generation.members[position] for position in staying] + sorted(
        joining.values(), key=lambda new: new.ticket
    )
    still_new = {
        staying.index(position)
        for position in generation.newcomers
        if position in staying and not begun
    }
    return Generation(
        number=generation.number + 1,
        members=tuple(members),
        newcomers=frozenset(still_new.union(range(len(staying), len(members)))),
        tickets=max([generation.tickets, *(request.ticket for request in requests)]),
    )


def changes(old: Generation, new: Generation, name_of: Callable[[int], int] = int) -> str:
    """One sentence on how two generations differ, for the user, who knows a rank by `name_of`."""
    before, now = (
        {name_of(member.rank): member for member in generation.members} for generation in (old, new)
    )
    departed = sorted(rank for rank, member in before.items() if now.get(rank) != member)
    joined = sorted(rank for rank, member in now.items() if before.get(rank) != member)
    parts = [
        *([f"without worker {', '.join(map(str, departed))}"] if departed else []),
        *([f"with worker {', '.join(map(str, joined))} come in"] if joined else []),
    ]
    return (
        f"generation {new.number}: {len(new.members)} worker{'s' if len(new.members) > 1 else ''},"
        f" {' and '.join(parts)}"
    )


class Membership:
    """One process's access to the lists in the store.

    An object must not be used by several threads at once. No call waits for another member. All
    calls raise `StoreLostError` when the store does not answer, and `WireError` for an entry that
    is damaged or was written by another version of this library.
    """

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._latest: Generation | None = None
        self._beats: dict[Member, tuple[int, float]] = {}
        self._read_beats_at_s: float | None = None

    def create_run(self, world_size: int, description: str) -> Generation:
        """Begin the run, unless another founder has begun it. Returns the first generation.

        Raises:
            MismatchError: another founder has another description or number of ranks.
        """
        mine = _dump(description=description, world_size=world_size)
        # The store writes the entry only if there is none, so all founders compare themselves
        # with the same one.
        stored = self._store.compare_set("founded", "", mine).decode()
        if stored != mine:
            raise MismatchError(
                "another rank founded this run with another model, strategy or number of ranks"
            )
        return self.propose(Generation.of_founders(world_size))

    def description(self) -> str | None:
        """What the run trains; None when no founder has begun it."""
        raw = self._peek("founded")
        return (
            None
            if raw is None
            else _parsed("founded", raw, lambda entry: str(entry["description"]))
        )

    def latest(self) -> Generation:
        """The newest generation. Raises `WireError` when no founder has begun the run."""
        latest = self._latest or self._read(0)
        if latest is None:
            raise WireError("the store holds no generation 0; nobody founded this run")
        while (later := self._read(latest.number + 1)) is not None:
            latest = later
        self._latest = latest
        return latest

    def next_of(self, generation: Generation) -> Generation | None:
        """The generation after `generation`; None when there is none."""
        return self._read(generation.number + 1)

    def propose(self, generation: Generation) -> Generation:
        """Write `generation` into the store unless its number is taken.

        Returns:
            The generation that has this number, which may be the proposal of another member.
        """
        key = f"generation/{generation.number}"
        entry = _dump(
            members=[[member.rank, member.ticket] for member in generation.members],
            newcomers=sorted(generation.newcomers),
            tickets=generation.tickets,
        )
        # The first proposal wins: the store keeps the entry that is there and returns it.
        stored = self._store.compare_set(key, "", entry)
        return _generation(generation.number, stored)

    def request(self, rank: int) -> int:
        """Ask to join as `rank`. Returns the number of the request."""
        ticket = self._latest.tickets + 1 if self._latest else 1
        # The nonce makes the requests of two processes for the same rank differ, so that each knows
        # which of the numbered entries is its own.
        mine = _dump(rank=rank, nonce=secrets.token_hex(8))
        while self._store.compare_set(f"request/{ticket}", "", mine).decode() != mine:
            ticket += 1
        return ticket

    def waiting(self, generation: Generation) -> tuple[Member, ...]:
        """The requests to join that no generation up to `generation` has answered, by number."""
        found: list[Member] = []
        while (
            raw := self._peek(key := f"request/{generation.tickets + 1 + len(found)}")
        ) is not None:
            rank = _parsed(key, raw, lambda entry: int(entry["rank"]))
            found.append(Member(rank, generation.tickets + 1 + len(found)))
        return tuple(found)

    def beat(self, member: Member) -> None:
        """Increment the heartbeat of `member`, which shows that it lives."""
        self._store.add(_beat_key(member), 1)

    def deregister(self, member: Member) -> None:
        """Record that `member` leaves. It counts as silent from now on."""
        self._store.set(_beat_key(member), str(_DEREGISTERED))

    def silent_s(self, generation: Generation) -> tuple[float, ...]:
        """For how many seconds this process has seen no change of each member's heartbeat.

        The result is by position, and infinite for a member that has deregistered. The time between
        two calls counts as no more than `MAX_GAP_S`.
        """
        now_s = self._clock()
        gap_s = (
            0.0 if self._read_beats_at_s is None else min(now_s - self._read_beats_at_s, MAX_GAP_S)
        )
        self._read_beats_at_s = now_s
        counts = self._values([_beat_key(member) for member in generation.members])
        before, self._beats = self._beats, {}
        for member, raw in zip(generation.members, counts, strict=True):
            count = 0 if raw is None else _count(_beat_key(member), raw)
            last, silent_s = before.get(member, (None, 0.0))
            silent_s = silent_s + gap_s if count == last else 0.0
            self._beats[member] = (count, math.inf if count == _DEREGISTERED else silent_s)
        return tuple(self._beats[member][1] for member in generation.members)

    def publish_endpoint(self, generation: Generation, position: int, endpoint: str) -> None:
        """Write down the address at which the member at `position` listens."""
        self._store.set(_endpoint_key(generation, position), _dump(endpoint=endpoint))

    def num_published(self, generation: Generation, known: int = 0) -> int:
        """How many members there are before the first that has not published its address. `known`
        of them are not asked for, since they have.
        """
        return first_missing(self._store, _endpoint_keys(generation), known)

    def unpublished(self, generation: Generation, positions: frozenset[int]) -> frozenset[int]:
        """Those of `positions` whose address is not published yet."""
        return frozenset(
            position
            for position in positions
            if not self._store.check([_endpoint_key(generation, position)])
        )

    def endpoints(self, generation: Generation) -> tuple[str | None, ...]:
        """The address of each member, by position; None where it is not published yet."""
        keys = _endpoint_keys(generation)
        return tuple(
            None if raw is None else _parsed(key, raw, lambda entry: str(entry["endpoint"]))
            for key, raw in zip(keys, self._values(keys), strict=True)
        )

    def end_run(self) -> None:
        """Record that the run is over: no process may join any more, and no member is replaced."""
        self._store.set(_OVER_KEY, "1")

    def is_over(self) -> bool:
        """Whether a member has called `end_run`."""
        return self._store.check([_OVER_KEY])

    def _read(self, number: int) -> Generation | None:
        raw = self._peek(f"generation/{number}")
        return None if raw is None else _generation(number, raw)

    def _peek(self, key: str) -> bytes | None:
        """The value of `key`, or None. A plain `get` would block until there is a value."""
        return self._store.get(key) if self._store.check([key]) else None

    def _values(self, keys: list[str]) -> list[bytes | None]:
        """The value of each key, or None. Where few are missing that takes few questions."""
        if self._store.check(keys):
            return list(self._store.multi_get(keys))  # one round trip instead of one a key
        if len(keys) == 1:
            return [None]
        middle = len(keys) // 2
        return [*self._values(keys[:middle]), *self._values(keys[middle:])]


def _beat_key(member: Member) -> str:
    return f"beat/{member.rank}/{member.ticket}"


def _endpoint_key(generation: Generation, position: int) -> str:
    return f"endpoint/{generation.number}/{position}"


def _endpoint_keys(generation: Generation) -> list[str]:
    return [_endpoint_key(generation, position) for position in range(generation.size)]


def _dump(**entry: object) -> str:
    return json.dumps({"version": _VERSION, **entry})


def _parsed(key: str, raw: bytes, read: Callable[[dict[str, Any]], T]) -> T:
    """Apply `read` to the JSON entry `raw` of `key`. Raises `WireError` for a damaged entry."""
    try:
        entry = json.loads(raw)
        if (version := entry["version"]) != _VERSION:
            raise WireError(
                f"the store's {key!r} has version {version}, this program reads {_VERSION}; use one"
                " release"
            )
        return read(entry)
    except MALFORMED as error:
        raise WireError(
            f"the store's {key!r} is damaged: {raw[:80]!r}; does another program use the store too?"
        ) from error


def _generation(number: int, raw: bytes) -> Generation:
    def read(entry: dict[str, Any]) -> Generation:
        generation = Generation(
            number=number,
            members=tuple(Member(int(rank), int(ticket)) for rank, ticket in entry["members"]),
            newcomers=frozenset(int(position) for position in entry["newcomers"]),
            tickets=int(entry["tickets"]),
        )
        distinct = {member.rank for member in generation.members}
        if (
            not generation.members
            or len(distinct) < generation.size
            or not generation.newcomers <= set(range(generation.size))
        ):
            raise ValueError("the members or newcomers are inconsistent")
        return generation

    return _parsed(f"generation/{number}", raw, read)


def _count(key: str, raw: bytes) -> int:
    try:
        return int(raw)
    except ValueError as error:
        raise WireError(
            f"the store's {key!r} is damaged: {raw[:80]!r}, needed is a number"
        ) from error
