"""Work that some of a generation's members do without the others: whoever has arrived once a quorum
has, and a grace period is over.

Each member tells all others that it arrives. Whoever has seen the quorum, and then waited for the
grace period or for everyone, proposes those it has heard of. The first proposal that reaches the
store is the valid one, so that all members know the same ones, a late member too: it finds that the
work was done without it, and arrives at the next.

What is done must be known to somebody who does what comes next. So a quorum is more than half of
the members, of which any two share one, and the first work of a generation waits for all of them:
whoever knew what was done last in the one before may be the only one left who does.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from typing_extensions import override

from offbeat.codec.option_value import OptionValue
from offbeat.errors import ConfigError, PeerTimeoutError
from offbeat.transport.driver import Driver, Ticket, Wrapper
from offbeat.transport.operations import Collective, Now, Operation, Recv, RecvAny, Send

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

_ARRIVAL = struct.Struct("<Q?")


class Quorum(OptionValue):
    """Who is waited for at an average of members.

    Args:
        fraction: of the members that live, in (0.5, 1]: so many must have arrived; 1: all are
            waited for.
        grace_s: for how long the others are waited for from then on, in seconds, >= 0.
    """

    def __init__(self, fraction: float = 1.0, *, grace_s: float = 0.0) -> None:
        if not 0.5 < fraction <= 1 or not 0 <= grace_s < math.inf:
            raise ConfigError(
                "Quorum needs a fraction of the members in (0.5, 1], so that any two quorums share"
                f" a member, and grace_s >= 0, got {fraction!r} and {grace_s!r}"
            )
        if fraction == 1 and grace_s:
            raise ConfigError(
                f"grace_s={grace_s!r} would do nothing, because a fraction of 1 waits for all"
                " members; leave it out, or lower the fraction"
            )
        self.fraction, self.grace_s = fraction, grace_s

    @classmethod
    def of(cls, text: str) -> Quorum | None:
        """The one that is called "members", or that text such as "75%+2s" describes; None for
        other text.
        """
        found = re.fullmatch(r"(\d+(?:\.\d+)?)%\+(\d+(?:\.\d+)?)s", text)
        if found is None:
            return cls() if text == "members" else None
        percent, grace_s = map(float, found.groups())
        return cls(percent / 100, grace_s=grace_s)


def first_to_arrive(
    position: int,
    size: int,
    quorum: Quorum,
    *,
    number: int,
    counts: bool,
    heard: dict[int, tuple[int, bool]],
    propose: Callable[[Sequence[int]], T],
) -> Collective[T]:
    """What comes of proposing those who have arrived.

    All works of a generation have one channel for this, so that every message is read some time,
    also those of members that came too late.

    Cost: a short message to each peer, and whatever `propose` takes.

    Args:
        position: of this member, which arrives.
        size: number of members.
        quorum: how many must arrive, and how long the others are waited for.
        number: of the work.
        counts: whether this member is one of the quorum. One that is not, such as one that only
            joins, is waited for like all others, and lets none be left out sooner.
        heard: by position, at which work that member was when it was heard of last, and its
            `counts`. The same one for all works of a generation.
        propose: proposes the positions of those who have arrived, ascending.
    """
    peers = frozenset(range(size)) - {position}
    for peer in sorted(peers):
        yield Send(peer, _ARRIVAL.pack(number, counts))
    here = {peer: word for peer, (at, word) in heard.items() if at == number}
    here[position] = counts
    is_begun = any(at > number for at, _ in heard.values())
    deadline_s: float | None = None
    while len(here) < size and not is_begun:
        if deadline_s is None and sum(here.values()) >= quorum.fraction * size:
            deadline_s = (yield Now()) + quorum.grace_s
        left_s = None if deadline_s is None else max(0.0, deadline_s - (yield Now()))
        try:
            peer, message = yield RecvAny(peers, left_s)
        except PeerTimeoutError:
            break
        at, word = heard[peer] = _ARRIVAL.unpack(message)
        here.pop(peer, None)
        if at == number:
            here[peer] = word
        is_begun = at > number  # the work of whoever is past it was begun
    return propose(sorted(here))


class Among(Wrapper):
    """A driver of some of the members that `inner` connects: their ranks are their places in
    `members`.
    """

    def __init__(self, inner: Driver, members: Sequence[int]) -> None:
        super().__init__(inner)
        self._members = members

    @override
    def start(self, operation: Operation, channel: int) -> Ticket:
        match operation:
            case Send(peer, payload):
                operation = Send(self._members[peer], payload)
            case Recv(peer, timeout_s):
                operation = Recv(self._members[peer], timeout_s)
        return super().start(operation, channel)


class Arrivals:
    """The entry of the store that says which work of a generation was begun last, after the first
    one, which is number 0, and by whom.

    Args:
        store: the run's.
        generation: its number.

    Attributes:
        heard: of `first_to_arrive`.
    """

    # One entry for all work, each proposal of which names the one before: so a late member cannot
    # write what was decided without it, and the store does not grow.

    def __init__(self, store: Store, generation: int) -> None:
        self._store, self._key = store, f"arrived/{generation}"
        self._latest = b""
        self.heard: dict[int, tuple[int, bool]] = {}

    def next_number(self) -> int:
        """Of the first work that nobody has begun, as far as the store knows."""
        if self._store.check([self._key]):
            self._latest = self._store.get(self._key)
        return _begun(self._latest)[0] + 1

    def propose(self, members: Sequence[int]) -> tuple[int, list[int]]:
        """Let `members` do the next work, unless others do it already. Returns the number of the
        latest work that was begun, and who does it.
        """
        number = _begun(self._latest)[0] + 1
        mine = json.dumps([number, [*members]])
        return _begun(self._store.compare_set(self._key, self._latest.decode(), mine))


def _begun(entry: bytes) -> tuple[int, list[int]]:
    number, members = json.loads(entry) if entry else (0, [])
    return number, members
