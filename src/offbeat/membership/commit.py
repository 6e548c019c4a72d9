"""Work that is done for all members of a generation or for none, whoever dies in the middle of it.

1. Each member carries the work out, and keeps its outcome to itself.
2. An all-gather of nothing: who comes through it knows that every member has had an outcome.
3. Who came through says "done", and who had an outcome but lost a member on the way says "void".
   The first word stands, for all: it is one entry of the store, which is written once.

Who lost a member before it had an outcome need not ask, since without it nobody comes through. So
all that live, and have not been left out, come to the same end: they have the outcome, or do the
work again in the next generation.

Cost: ceil(log2 P) short messages in sequence, and one round trip to the store.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from offbeat.collectives.gather import all_gather
from offbeat.errors import PeerError
from offbeat.transport.operations import Collective

T = TypeVar("T")


class Verdict(Protocol):
    """The entry of the store that says what became of one piece of work."""

    def __call__(self, *, done: bool) -> bool:
        """Offer a word; whether the one that stands is "done". Waits for no other member."""
        ...


def all_or_none(position: int, size: int, work: Collective[T], verdict: Verdict) -> Collective[T]:
    """The outcome of `work`, which is then final for all members.

    Args:
        position: of this member.
        size: number of members.
        work: this member's part in it; changes nothing that others could see.
        verdict: the same entry at every member, of this work in this generation alone.

    Raises:
        PeerError: a member was lost, and nobody has the outcome: to be done again without it.
    """
    outcome = yield from work
    try:
        yield from all_gather(position, size, b"", bytes)
    except PeerError:
        if verdict(done=False):
            return outcome
        raise
    if not verdict(done=True):
        raise PeerError(
            "another member met with a death in the middle of this exchange, which is done again"
            " without the dead"
        )
    return outcome
