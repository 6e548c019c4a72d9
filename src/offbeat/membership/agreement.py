"""Who takes part: numbered lists of members, kept in the store that the run met through.

A *generation* is such a list. It never changes; when someone is gone or wants to join, whoever
notices proposes the next one, the first proposal stands, and all adopt it. Within a generation,
members are known by their *position* in the list, so whatever runs on a generation never hears of
ranks that are gone.

    founded                 what the run trains, from the first that founded it
    generation/<n>          its members; n = 0 are the founders
    request/<n>             the n-th request to join, n >= 1
    beat/<rank>/<ticket>    a counter that a living member raises; -1 once it has left in order
    endpoint/<n>/<position> where that member of generation n listens
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from offbeat.errors import MismatchError, PeerError, WireError
from offbeat.transport.network import OVER_KEY

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

_VERSION = 1
_LEFT = -1

MAX_GAP_S = 1.0
"""The most that counts as silence between two looks: who did not look, since it was stopped itself,
heard no silence.
"""


class StoreLostError(PeerError):
    """The store cannot be asked any more."""


@dataclass(frozen=True, slots=True)
class Member:
    """One incarnation of a rank.

    Attributes:
        rank: >= 0.
        ticket: the number of the request that let it in; 0 for a founder.
    """

    rank: int
    ticket: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """A list of members.

    Attributes:
        number: 0 for the founders', then one more each time.
        members: by position; those that have been there longest first.
        newcomers: positions that joined with this generation and know nothing of the model yet.
        tickets: requests to join that have been answered, by this generation or an earlier one.
    """

    number: int
    members: tuple[Member, ...]
    newcomers: frozenset[int]
    tickets: int

    @property
    def size(self) -> int:
        return len(self.members)

    def position_of(self, member: Member) -> int | None:
        """Where `member` stands; None when it is not in."""
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
    """The generation after `generation` that the member at position `me` may propose; None when it
    may not, or nothing changes.

    A member that cannot be reached and has stopped beating too is gone. One that still beats is on
    the other side of a cut, and who is on which side looks alike from both; so only the side with
    more than half of those that are not gone may go on without the other, at a tie the side of the
    longest-serving one. A member that is silent in the store but can be reached stays.

    Args:
        generation: the current one.
        me: position of who proposes.
        unreachable: positions that it cannot reach.
        silent: positions that have not beaten for long.
        requests: to join, by ticket, all above `generation.tickets`; of a rank that is a member, to
            take its place.
        begun: whether `generation` is at work, so that its newcomers have become members like the
            others.
    """
    positions = frozenset(range(generation.size))
    reached = (positions - unreachable) | {me}
    alive = reached | (positions - silent)
    majority = 2 * len(reached) - len(alive)
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


def changes(old: Generation, new: Generation) -> str:
    """How two generations differ, in words."""
    before, now = (
        {member.rank: member for member in old.members},
        {member.rank: member for member in new.members},
    )
    gone = sorted(rank for rank, member in before.items() if now.get(rank) != member)
    come = sorted(rank for rank, member in now.items() if before.get(rank) != member)
    parts = [
        *([f"without worker {', '.join(map(str, gone))}"] if gone else []),
        *([f"with worker {', '.join(map(str, come))} come in"] if come else []),
    ]
    return (
        f"generation {new.number}: {len(new.members)} worker{'s' if len(new.members) > 1 else ''},"
        f" {' and '.join(parts)}"
    )


class Membership:
    """One process's view of the lists in the store. Not for several threads at once.

    No call waits for another member. All raise `StoreLostError` when the store is gone, and
    `WireError` for an entry that is damaged or of another version.
    """

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._latest: Generation | None = None
        self._beats: dict[Member, tuple[int, float]] = {}
        self._looked_at_s: float | None = None

    def found(self, world_size: int, description: str) -> Generation:
        """Begin the run, unless another founder has; the first generation.

        Raises:
            MismatchError: another founder means something else.
        """
        card = _dump(description=description, world_size=world_size)
        with asking():
            stands = self._store.compare_set("founded", "", card).decode()
        if stands != card:
            raise MismatchError(
                "another rank founded this run with another model, strategy or number of ranks"
            )
        founders = tuple(Member(rank, 0) for rank in range(world_size))
        return self._put(Generation(number=0, members=founders, newcomers=frozenset(), tickets=0))

    def description(self) -> str | None:
        """What the run trains; None when nobody founded it."""
        raw = self._peek("founded")
        return (
            None
            if raw is None
            else _parsed("founded", raw, lambda entry: str(entry["description"]))
        )

    def latest(self) -> Generation:
        """The newest generation. Raises `WireError` when nobody founded the run."""
        latest = self._latest or self._read(0)
        if latest is None:
            raise WireError("the store holds no generation 0; nobody founded this run")
        while (later := self._read(latest.number + 1)) is not None:
            latest = later
        self._latest = latest
        return latest

    def next_of(self, generation: Generation) -> Generation | None:
        """The generation after `generation`, if there is one."""
        return self._read(generation.number + 1)

    def propose(self, generation: Generation) -> Generation:
        """Offer `generation` to all; what stands under its number, which may be
        another's proposal.
        """
        return self._put(generation)

    def request(self, rank: int) -> int:
        """Ask to be let in as `rank`; the number of the request."""
        ticket = self._latest.tickets + 1 if self._latest else 1
        mine = _dump(rank=rank, nonce=secrets.token_hex(8))
        with asking():
            while self._store.compare_set(f"request/{ticket}", "", mine).decode() != mine:
                ticket += 1
        return ticket

    def waiting(self, generation: Generation) -> tuple[Member, ...]:
        """The requests that were not answered up to `generation`, by number."""
        found: list[Member] = []
        while (
            raw := self._peek(key := f"request/{generation.tickets + 1 + len(found)}")
        ) is not None:
            rank = _parsed(key, raw, lambda entry: int(entry["rank"]))
            found.append(Member(rank, generation.tickets + 1 + len(found)))
        return tuple(found)

    def beat(self, member: Member) -> None:
        """Show that `member` lives."""
        with asking():
            self._store.add(_beat_key(member), 1)

    def farewell(self, member: Member) -> None:
        """Say that `member` leaves: it counts as silent from now on."""
        with asking():
            self._store.set(_beat_key(member), str(_LEFT))

    def silent_s(self, generation: Generation) -> tuple[float, ...]:
        """For how many seconds each member's beat has stood still before the eyes of this process,
        by position.

        Infinite for one that has left in order. To be asked every `MAX_GAP_S` or more often; what
        lies between two calls counts as no more than that.
        """
        now_s = self._clock()
        gap_s = 0.0 if self._looked_at_s is None else min(now_s - self._looked_at_s, MAX_GAP_S)
        self._looked_at_s = now_s
        counts = self._values([_beat_key(member) for member in generation.members])
        before, self._beats = self._beats, {}
        for member, raw in zip(generation.members, counts, strict=True):
            count = 0 if raw is None else _count(_beat_key(member), raw)
            last, silent_s = before.get(member, (None, 0.0))
            silent_s = silent_s + gap_s if count == last else 0.0
            self._beats[member] = (count, math.inf if count == _LEFT else silent_s)
        return tuple(self._beats[member][1] for member in generation.members)

    def publish_endpoint(self, generation: Generation, position: int, endpoint: str) -> None:
        """Say where the member at `position` listens."""
        with asking():
            self._store.set(f"endpoint/{generation.number}/{position}", _dump(endpoint=endpoint))

    def endpoints(self, generation: Generation) -> tuple[str | None, ...]:
        """Where each member listens, by position; None for one that has not said so yet."""
        keys = [f"endpoint/{generation.number}/{position}" for position in range(generation.size)]
        return tuple(
            None if raw is None else _parsed(key, raw, lambda entry: str(entry["endpoint"]))
            for key, raw in zip(keys, self._values(keys), strict=True)
        )

    def end_run(self) -> None:
        """Say that the run is over: nobody is let in any more, and nobody has to be replaced."""
        with asking():
            self._store.set(OVER_KEY, "1")

    def is_over(self) -> bool:
        with asking():
            return self._store.check([OVER_KEY])

    def _put(self, generation: Generation) -> Generation:
        key = f"generation/{generation.number}"
        entry = _dump(
            members=[[member.rank, member.ticket] for member in generation.members],
            newcomers=sorted(generation.newcomers),
            tickets=generation.tickets,
        )
        with asking():
            stands = self._store.compare_set(key, "", entry)
        return _generation(generation.number, stands)

    def _read(self, number: int) -> Generation | None:
        raw = self._peek(f"generation/{number}")
        return None if raw is None else _generation(number, raw)

    def _peek(self, key: str) -> bytes | None:
        """The value of `key`. A plain `get` would wait for one."""
        with asking():
            return self._store.get(key) if self._store.check([key]) else None

    def _values(self, keys: list[str]) -> list[bytes | None]:
        with asking():
            if self._store.check(keys):
                return list(self._store.multi_get(keys))
        return [self._peek(key) for key in keys]


@contextmanager
def asking() -> Iterator[None]:
    """Calls the store's failures by one name; torch has several classes for them, all of which are
    RuntimeErrors.
    """
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise StoreLostError(
            f"the run's store cannot be asked any more ({reason}); has the process that serves it"
            " ended?"
        ) from error


def _beat_key(member: Member) -> str:
    return f"beat/{member.rank}/{member.ticket}"


def _dump(**entry: object) -> str:
    return json.dumps({"version": _VERSION, **entry})


def _parsed(key: str, raw: bytes, read: Callable[[dict[str, Any]], T]) -> T:
    """What `read` makes of the entry `raw`."""
    try:
        entry = json.loads(raw)
        if (version := entry["version"]) != _VERSION:
            raise WireError(
                f"the store's {key!r} has version {version}, this program reads {_VERSION}; use one"
                " release"
            )
        return read(entry)
    except (ValueError, KeyError, TypeError) as error:
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
            raise ValueError("members or newcomers make no sense")
        return generation

    return _parsed(f"generation/{number}", raw, read)


def _count(key: str, raw: bytes) -> int:
    try:
        return int(raw)
    except ValueError as error:
        raise WireError(
            f"the store's {key!r} is damaged: {raw[:80]!r}, needed is a number"
        ) from error
