"""The members of the newest generation, seen from a trainer: what they do together is done for all
of them or for none.

    the trainer calls                `AtomicGroup.run(work)`
    `membership.generations` calls   `begin`, `expelled`, `lost_store` and others, on its own thread

`run` carries `work` out with all members and commits the outcome (`all_or_none`). If a member
is lost before, the work is done again in the next generation, without it. A worker that joins the
run, or was left out of it while it was stopped, is *new*: it knows nothing of what its peers have
done until a merge has told it (`caught_up`). Its peers know that it waits for one. So one that was
left out asks to join again when its trainer calls `run`: while it still computes, its peers neither
stop claiming for it nor wait for it at a merge.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from offbeat.collectives.gather import all_gather
from offbeat.errors import OffbeatError, PeerError
from offbeat.membership.agreement import Generation, changes
from offbeat.membership.generations import GenerationHost, Generations
from offbeat.membership.quorum import Among, Arrivals, Quorum, first_to_arrive
from offbeat.transport.driver import Driver, Stream
from offbeat.transport.network import StoreLostError
from offbeat.transport.operations import Collective

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

GroupWork: TypeAlias = Callable[[Generation, int], Collective[T]]
"""One member's part in what all members do together, given the generation and the member's position
in it. It is called anew in each generation in which the work is tried.
"""

PATIENCE_S = 60.0
"""How long a trainer waits for a generation in which it can go on. A death is noticed, and the next
generation begun, long before.
"""

_DONE, _VOID = "done", "void"


class AtomicGroup:
    """One rank's view of the members. It is the host of `membership.generations`.

    Args:
        store: over a connection of the trainer's own.
        count: puts a wrapper that counts traffic around a generation's driver.
        notify: for remarks.
        name_of: what a member's rank is called in them.
        patience_s: how long to wait for a generation, in seconds, > 0.

    Attributes:
        is_new: whether this rank knows nothing of what its peers have done.
        has_newcomers: whether a member is new, and waits for a merge.
        has_finished: whether all members have come to the end of their training, so that it is
            worth no remark when one leaves.
    """

    def __init__(
        self,
        store: Store,
        *,
        count: Callable[[Driver], Driver],
        notify: Callable[[str], None],
        name_of: Callable[[int], int] = int,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.is_new = self.has_newcomers = self.has_finished = False
        self._generations: Generations | None = None  # None in a world of one
        self._store = store
        self._count = count
        self._notify, self._name_of = notify, name_of
        self._patience_s = patience_s
        # Guards everything below, since the thread of `membership.generations` changes it.
        self._changed = threading.Condition()
        self._active: _ActiveGeneration | None = None
        self._left_out = self._runs = False
        # The ranks that wait for a merge, and the generation with which each has come.
        self._waiting: dict[int, int] = {}
        self._error: PeerError | None = None
        self._lost_store: str | None = None
        self._closed = False

    # The trainer's side

    def run(self, work: GroupWork[T], *, quorum: Quorum = Quorum(), counts: bool = True) -> T:
        """The outcome of `work`, carried out by all members of one generation, the same one for
        all of them.

        All members that are not new call this equally often. It waits for all members that live.
        With a `quorum` below all of them it waits for those who arrive in time, and `work` is told
        of them as if they were the generation: a late member's call is part of a later one.

        Args:
            work: of this member.
            quorum: the same on all members, in all calls.
            counts: as of `first_to_arrive`.

        Raises:
            PeerError: this rank can take part no more.
            StoreLostError: the store cannot be reached any more.
        """
        tried, self._runs = -1, True
        try:
            while True:
                active = self._generation_after(tried)
                tried = active.generation.number
                try:
                    return active.attempt(work, self._store, quorum, counts=counts)
                except StoreLostError:
                    raise
                except PeerError:
                    # A member was lost before the commit, and no member has the outcome: try again
                    # in the next generation, unless this rank cannot go on.
                    self._check()
        finally:
            self._runs = False

    def caught_up(self, generation: Generation) -> None:
        """By what was done in `generation`, this rank knows all that its peers do, and so do the
        members that were new; unless they were left out since.
        """
        with self._changed:
            self._waiting = {
                rank: number for rank, number in self._waiting.items() if number > generation.number
            }
            self.has_newcomers = bool(self._waiting)
            active = self._active
            self.is_new = self._left_out or (
                active is not None
                and active.is_new
                and active.generation.number > generation.number
            )

    def enter(
        self,
        enter: Callable[[GenerationHost], Generations | None],
        catch_up: Callable[[], object],
    ) -> None:
        """Become a member by `enter`, as of `Context`, and do `catch_up` if this rank is new: the
        user's loop needs the model of the run from the start. Collective. Whoever does closes.
        """
        try:
            self._generations = enter(self)
            if self.is_new:
                catch_up()
        except BaseException:
            self.close()
            raise

    def abort(self, reason: str) -> None:
        """Tell the peers that this rank has failed, and why; and close."""
        with self._changed:
            if self._active is not None:
                self._active.driver.abort(reason)
        self.close()

    def leave(self) -> None:
        """Close. The run is over once all members have; until then those that are left go on."""
        over = False
        with self._changed:
            active = self._active
        if active is not None:
            with suppress(OffbeatError):
                num_closing = self._store.add(f"closing/{active.generation.number}", 1)
                over = num_closing >= active.generation.size
        self.close(over=over)

    def close(self, *, over: bool = False) -> None:
        """End the membership and the connections. Idempotent. `over`: the run has ended for all."""
        # The membership first: otherwise it could begin a generation that is never closed.
        if self._generations is not None:
            self._generations.close(over=over)
        with self._changed:
            self._closed = True
            active, self._active = self._active, None
            self._changed.notify_all()
        if active is not None:
            active.driver.close()

    # What `membership.generations` calls

    def begin(self, generation: Generation, position: int, driver: Driver) -> None:
        counted = self._count(driver)
        with self._changed:
            if self._closed:
                counted.close()
                return
            old = self._active
            is_new = position in generation.newcomers
            self._active = _ActiveGeneration(generation, position, counted, is_new=is_new)
            self.is_new = self.is_new or is_new
            self._left_out = False
            ranks = [member.rank for member in generation.members]
            self._waiting = {
                rank: number for rank, number in self._waiting.items() if rank in ranks
            } | dict.fromkeys((ranks[new] for new in generation.newcomers), generation.number)
            self.has_newcomers = bool(self._waiting)
            self._changed.notify_all()
        if old is None and generation.number and not is_new:
            self._notify(
                f"generation {generation.number}: {generation.size} workers; whoever else was to"
                " begin has ended"
            )
        if old is not None:
            # After the new generation was set: a trainer that waits on the old driver hears of its
            # end by this, and must find the new one.
            old.driver.close()
            if not self.has_finished:
                self._notify(changes(old.generation, generation, self._name_of))

    def unreachable(self) -> frozenset[int]:
        with self._changed:
            return frozenset() if self._active is None else self._active.driver.departed()

    def expelled(self) -> None:
        with self._changed:
            self._left_out = self.is_new = True
        self._notify(
            "this worker was away for so long that its peers went on without it; it joins them"
            " again"
        )

    def may_return(self) -> bool:
        return self._runs

    def lost_store(self, reason: str) -> None:
        with self._changed:
            self._lost_store = reason
            self._changed.notify_all()

    def found_store(self) -> None:
        with self._changed:
            self._lost_store = None

    def run_over(self) -> None:
        """Nothing to do: a member that was left out cannot complete its next merge."""

    def retired(self, reason: str) -> None:
        with self._changed:
            self._error = PeerError(reason)
            if self._active is not None:
                self._active.driver.close()
            self._changed.notify_all()

    def _generation_after(self, number: int) -> _ActiveGeneration:
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._is_after(number)
                    or self._error is not None
                    or self._closed
                    or self._lost_store is not None
                ),
                self._patience_s,
            )
            self._check()
            active = self._active
            if active is None or not self._is_after(number):
                if self._lost_store is not None:
                    raise StoreLostError(
                        "a worker was lost, and its peers cannot be found without the run's store:"
                        f" {self._lost_store}"
                    )
                raise PeerError(
                    f"a worker was lost, and no next generation was met within {self._patience_s:g}"
                    " s; do others run, and can they and the run's store be reached?"
                )
            return active

    def _is_after(self, number: int) -> bool:
        return (
            self._active is not None
            and self._active.generation.number > number
            and not self._left_out
        )

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise PeerError("this session is closed; nothing can be exchanged any more")


@dataclass(eq=False)
class _ActiveGeneration:
    """A generation that has begun here, and its connections."""

    generation: Generation
    position: int
    driver: Driver
    is_new: bool

    def __post_init__(self) -> None:
        self._channels, self._arriving = Stream(1), Stream(2).next()
        self._num_attempts = 0
        # Of the store, that this member has to delete: the number of the attempt, and who may ask.
        self._entries: dict[str, tuple[int, Sequence[int]]] = {}
        self._arrivals: Arrivals | None = None

    def attempt(self, work: GroupWork[T], store: Store, quorum: Quorum, *, counts: bool) -> T:
        """Carry `work` out once, and commit its outcome. Raises `PeerError` where it is void."""
        if self._num_attempts and quorum.fraction < 1:
            return self._settle(work, store, *self._arrive(store, quorum, counts=counts))
        # All members begin the first work of a generation, and all works that wait for all. They
        # count attempts alike, so that the same number names the same work. All of them have begun
        # the attempt before this one, so that none asks for older verdicts.
        self._num_attempts += 1
        self._delete(store, list(self._entries)[:-1])
        return self._settle(work, store, range(self.generation.size), self._channels.next())

    def _arrive(self, store: Store, quorum: Quorum, *, counts: bool) -> tuple[Sequence[int], int]:
        """The positions of those who arrive in time at the first work that waits for this member,
        and its channel.
        """
        size = self.generation.size
        self._arrivals = arrivals = self._arrivals or Arrivals(store, self.generation.number)
        here: Sequence[int] = ()
        while self.position not in here:
            number = arrivals.next_number()
            while self._num_attempts <= number:  # the work done without it has a channel, too
                channel = self._channels.next()
                self._num_attempts += 1
            arrived = first_to_arrive(
                self.position,
                size,
                quorum,
                number=number,
                counts=counts,
                heard=arrivals.heard,
                propose=arrivals.propose,
            )
            begun, here = self.driver.run(arrived, self._arriving)
            if begun > number:
                here = ()
        # Whoever has come to a later work asks for no verdict of an earlier one.
        at = {peer: heard for peer, (heard, _) in arrivals.heard.items()} | {self.position: number}
        over = [
            entry
            for entry, (attempt, asking) in self._entries.items()
            if all(at.get(peer, 0) > attempt for peer in asking)
        ]
        self._delete(store, over)
        return here, channel

    def _settle(self, work: GroupWork[T], store: Store, here: Sequence[int], channel: int) -> T:
        """Let those at the positions `here` carry `work` out and commit it."""
        generation = self.generation
        place, key = here.index(self.position), f"settled/{generation.number}/{self._num_attempts}"
        are_all = len(here) == len(generation.members)
        if not are_all:
            generation = replace(
                generation,
                members=tuple(generation.members[position] for position in here),
                newcomers=frozenset(map(here.index, generation.newcomers.intersection(here))),
            )
        if not place:
            self._entries[key] = self._num_attempts - 1, here

        def is_done(word: str) -> bool:
            # The first word stands: the entry is written once, and whoever comes later reads it.
            return bool(store.compare_set(key, "", word) == _DONE.encode())

        committed = all_or_none(place, len(here), work(generation, place), is_done)
        driver = self.driver if are_all else Among(self.driver, here)
        return driver.run(committed, channel)

    def _delete(self, store: Store, entries: Sequence[str]) -> None:
        """This keeps the store from growing."""
        for entry in entries:
            store.delete_key(entry)
            del self._entries[entry]


def all_or_none(
    position: int, size: int, work: Collective[T], commit_entry: Callable[[str], bool]
) -> Collective[T]:
    """The outcome of `work`, which is then final for all members or for none, even if a member
    dies during it.

    1. Each member carries out the work and keeps its outcome to itself.
    2. The members all-gather an empty message. A member that completes this knows that every member
       has an outcome.
    3. A member that completed it proposes "done". A member that has an outcome but lost a peer
       during the all-gather proposes "void". The first proposal is final for all members, because
       it is an entry of the store that can be written only once.

    A member that lost a peer before it had an outcome need not read the entry: without its message
    no member completes the all-gather, so the entry cannot be "done". Therefore all members that
    live and were not left out reach the same result: either all of them have the outcome, or all of
    them repeat the work in the next generation.

    Cost: ceil(log2 P) short messages in sequence, and one round trip to the store.

    Args:
        position: the position of this member, 0 <= position < size.
        size: the number of members.
        work: this member's share of the work. It must not change anything that a peer could see.
        commit_entry: proposes "done" or "void", and returns whether the entry, written by this
            member or by an earlier one, is "done". Does not wait for another member. The same entry
            at every member, used for this work in this generation only.

    Raises:
        PeerError: a member was lost, and no member may use its outcome: repeat the work without the
            lost member.
    """
    outcome = yield from work
    try:
        yield from all_gather(position, size, b"", bytes)
    except PeerError:
        # This member cannot know whether its peers completed the all-gather; the entry does.
        if commit_entry(_VOID):
            return outcome
        raise
    if not commit_entry(_DONE):
        raise PeerError(
            "another member met with a death in the middle of this exchange, which is done again"
            " without the dead"
        )
    return outcome
