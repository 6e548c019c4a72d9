"""Work that is done for all members of a generation or for none, even if a member dies during it.

1. Each member carries out the work and keeps its outcome to itself.
2. The members all-gather an empty message. A member that completes this knows that every member has
   an outcome.
3. A member that completed it proposes "done". A member that has an outcome but lost a peer during
   the all-gather proposes "void". The first proposal is final for all members, because it is an
   entry of the store that can be written only once.

A member that lost a peer before it had an outcome need not read the entry: without its message no
member completes the all-gather, so the entry cannot be "done". Therefore all members that live and
were not left out reach the same result: either all of them have the outcome, or all of them repeat
the work in the next generation.

Cost: ceil(log2 P) short messages in sequence, and one round trip to the store.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from offbeat.collectives.gather import all_gather
from offbeat.errors import PeerError
from offbeat.transport.operations import Collective

T = TypeVar("T")


class CommitEntry(Protocol):
    """The entry of the store that decides whether one piece of work is final."""

    def __call__(self, *, done: bool) -> bool:
        """Propose "done" or "void", and return whether the entry, written by this member or by an
        earlier one, is "done". Must not wait for another member.
        """
        ...


def all_or_none(
    position: int, size: int, work: Collective[T], commit_entry: CommitEntry
) -> Collective[T]:
    """The outcome of `work`, which is then final for all members.

    Args:
        position: the position of this member, 0 <= position < size.
        size: the number of members.
        work: this member's share of the work. It must not change anything that a peer could see.
        commit_entry: the same entry at every member, used for this work in this generation only.

    Raises:
        PeerError: a member was lost, and no member may use its outcome: repeat the work without the
            lost member.
    """
    outcome = yield from work
    try:
        yield from all_gather(position, size, b"", bytes)
    except PeerError:
        # This member cannot know whether its peers completed the all-gather; the entry does.
        if commit_entry(done=False):
            return outcome
        raise
    if not commit_entry(done=True):
        raise PeerError(
            "another member met with a death in the middle of this exchange, which is done again"
            " without the dead"
        )
    return outcome
