"""A thread a rank that keeps it in the newest generation: it beats, looks for who is gone and who
wants in, and moves over.

1. A member that cannot be reached, or a request to join, makes whoever sees it first propose the
   next generation.
2. Every member of it opens a mesh of its own for it, says in the store where it listens, and waits
   until all have, while the work of the old generation goes on.
3. Then it connects, and hands the mesh to its host. If a member is gone meanwhile, the generation
   after comes first.
4. One that finds itself left out (it was stopped or cut off for long) asks to be let in again, as a
   newcomer.

From a death to the next generation it takes `PeerLimits.grace_s` and a few `interval_s`, or
`silence_s` where those that are left are not more than half. Training does not wait for it: in the
old generation, the dead are left out already. When the store is gone, the generation stays as it
is. A member that dies while a generation gathers delays it by `silence_s`.
"""

from __future__ import annotations

import json
import math
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from offbeat.errors import ConfigError, MismatchError, OffbeatError, PeerError, WireError
from offbeat.membership.agreement import Generation, Member, Membership, StoreLostError, successor
from offbeat.transport.driver import Driver
from offbeat.transport.link import PeerLimits
from offbeat.transport.network import MESH_LIMITS, Network

_GATHER_INTERVAL_S = 0.02
_RETRY_STORE_S = 5.0
_CLOSE_WITHIN_S = 10.0
_MAX_BACKOFF_S = 30.0
_FORGIVEN_AFTER_S = 60.0


class Host(Protocol):
    """What works within generations."""

    def begin(self, generation: Generation, position: int, driver: Driver) -> None:
        """End the work of the old generation, if there is one, and start that of `generation` on
        `driver`.

        The host closes every driver it was given: this one when the next takes its place, or when
        it ends itself. Called by
        `found` and `join` in the caller's thread the first time, then by the thread.
        """
        ...

    def unreachable(self) -> frozenset[int]:
        """The positions of the current generation that are dead or have left. Must not block."""
        ...

    def expelled(self) -> None:
        """This rank is no member any more, and is about to ask to join again; then comes `begin`,
        as a newcomer.
        """
        ...

    def lost_store(self, reason: str) -> None:
        """The store cannot be used; until it can, the generation stays as it is. Called once for
        each such time.
        """
        ...

    def retired(self, reason: str) -> None:
        """This rank takes part no more, and no `begin` will follow."""
        ...


class Generations:
    """Keeps this rank in the newest generation, once `found` or `join` has brought it into one.
    `close` ends that.
    """

    def __init__(
        self,
        network: Network,
        host: Host,
        *,
        interval_s: float = 0.1,
        silence_s: float = 3.0,
        limits: PeerLimits = MESH_LIMITS,
    ) -> None:
        """Do nothing yet.

        Args:
            network: where the members meet.
            host: is given the meshes.
            interval_s: how often the store is looked at, > 0.
            silence_s: a member whose beat stands still for this long is silent, > 0; the same on
                every rank.
            limits: of the meshes, the same on every rank.

        Raises:
            PeerError: the store does not answer.
        """
        if not (interval_s > 0 and silence_s > 0):
            raise ConfigError(
                f"interval_s is {interval_s} and silence_s {silence_s}, allowed is any number of"
                " seconds above 0"
            )
        self._network = network
        self._host = host
        self._interval_s = interval_s
        self._silence_s = silence_s
        self._look_interval_s = min(0.5, silence_s / 6)
        self._limits = limits
        self._membership = Membership(network.own_store())
        self._member = Member(network.rank, 0)
        self._is_new = False
        self._current: Generation | None = None
        self._silent: set[Member] = set()
        self._next_look_s = self._next_beat_s = 0.0
        self._deadline_s = math.inf
        self._expelled_at_s = -math.inf
        self._backoff_s = 0.0
        self._store_is_lost = False
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"offbeat-generations-{network.rank}", daemon=True
        )

    def found(self, description: str) -> None:
        """Begin the run together with the other founders; returns after the host's first `begin`.

        Args:
            description: what the run trains, for those who join later.

        Raises:
            MismatchError: another founder means something else.
            StoreLostError, WireError: the store is gone or damaged.
        """
        self._follow(self._membership.found(self._network.world_size, description))
        self._thread.start()

    def join(self, description: str, *, timeout_s: float = 60.0) -> None:
        """Join the run under way, in the place of a member of the same rank if there is one;
        returns after the first `begin`.

        Args:
            description: what this worker would train: the founders' to the letter.
            timeout_s: how long to wait for the members to let it in.

        Raises:
            ConfigError: nobody founded the run, or it has ended.
            MismatchError: the run trains something else; with the first difference.
            PeerError: no member let this worker in.
        """
        founded = self._membership.description()
        if founded is None:
            raise ConfigError(
                "the run that this worker is to join has founded no generation: it has not begun,"
                " or its strategy cannot take in a worker under way"
            )
        if founded != description:
            raise MismatchError(
                "this worker differs from the run that it is to join in"
                f" {_difference(founded, description)}"
            )
        self._deadline_s = time.monotonic() + timeout_s
        self._follow(self._ask_in())
        self._deadline_s = math.inf
        self._thread.start()

    def close(self, *, over: bool = False) -> None:
        """End the thread; no `begin` comes afterwards. Idempotent.

        Args:
            over: the run has ended, for everyone. Else only this rank leaves, and the others go on.
        """
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_WITHIN_S)
        if self._thread.is_alive():
            return  # it hangs in a call to the store, which serves one caller at a time
        with suppress(OffbeatError):
            if over:
                self._membership.end_run()
            self._membership.farewell(self._member)

    def _run(self) -> None:
        try:
            while True:
                try:
                    self._pause(self._interval_s)
                    self._keep_up()
                    self._store_is_lost = False
                except (StoreLostError, WireError) as error:
                    self._do_without_store(str(error))
        except _Stopped:
            pass
        except _Retired as reason:
            self._host.retired(str(reason))
        except Exception as error:  # noqa: BLE001 - whatever it is, the trainer must hear that nobody keeps up for it
            self._host.retired(f"{type(error).__name__}: {error}")

    def _keep_up(self) -> None:
        """Look once whether there is, or should be, a newer generation."""
        if self._current is None:
            self._follow(self._ask_in())
            return
        self._beat()
        following = self._membership.next_of(self._current) or self._propose_after(self._current)
        if following is not None:
            self._follow(following)

    def _follow(self, generation: Generation) -> None:
        """Go over to `generation`, or to one after it."""
        following: Generation | None = generation
        while following is not None:
            position = following.position_of(self._member)
            following = (
                self._ask_in_again() if position is None else self._gather(following, position)
            )

    def _gather(self, generation: Generation, position: int) -> Generation | None:
        """Meet the members of `generation` and begin it; None then. If another generation follows
        before that, that one.
        """
        driver = self._network.open(
            generation=generation.number,
            position=position,
            size=generation.size,
            limits=self._limits,
        )
        try:
            self._membership.publish_endpoint(generation, position, driver.endpoint)
            while not all(endpoints := self._membership.endpoints(generation)):
                self._beat()
                missing = frozenset(
                    other for other, endpoint in enumerate(endpoints) if endpoint is None
                )
                following = self._membership.next_of(generation) or self._propose_without(
                    generation, position, missing
                )
                if following is not None:
                    driver.close()
                    return following
                self._check_goes_on()
                self._pause(min(self._interval_s, _GATHER_INTERVAL_S))
            driver.connect([endpoint for endpoint in endpoints if endpoint is not None])
        except BaseException:
            driver.close()
            raise
        if (
            self._is_new
        ):  # also where this is not the generation that let it in, since that one never began
            generation = replace(generation, newcomers=generation.newcomers | {position})
        self._current, self._is_new = generation, False
        self._host.begin(generation, position, driver)
        return None

    def _propose_after(self, current: Generation) -> Generation | None:
        """What follows `current` by what this rank sees; None while nothing has to."""
        me = current.position_of(self._member)
        assert me is not None, "this rank would be looking for a way in"
        silent = self._look_for_silence(current)
        unreachable = self._host.unreachable()
        requests = self._membership.waiting(current)
        if not unreachable and not requests:
            return None
        proposal = successor(
            current, me=me, unreachable=unreachable, silent=silent, requests=requests
        )
        return self._propose(proposal)

    def _propose_without(
        self, generation: Generation, me: int, missing: frozenset[int]
    ) -> Generation | None:
        """What follows `generation`, which waits for `missing`; None while these may still come."""
        silent = self._look_for_silence(generation)
        # Only the store tells: on older meshes, those who are further on than this rank look dead
        # too.
        gone = missing & silent
        if not gone:
            return None
        return self._propose(
            successor(generation, me=me, unreachable=gone, silent=silent, requests=(), begun=False)
        )

    def _propose(self, proposal: Generation | None) -> Generation | None:
        # when the run ends, its members leave one by one, and nobody needs to be replaced
        if proposal is None or self._membership.is_over():
            return None
        return self._membership.propose(proposal)

    def _look_for_silence(self, generation: Generation) -> frozenset[int]:
        """The positions of `generation` that are silent. Looks now and then only, since it asks for
        every member.
        """
        now_s = time.monotonic()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + self._look_interval_s
            # founders come to this at different times
            patience_s = (
                self._silence_s if self._current or self._is_new else self._limits.connect_timeout_s
            )
            silences_s = self._membership.silent_s(generation)
            self._silent = {
                member
                for member, s in zip(generation.members, silences_s, strict=True)
                if s > patience_s
            }
        return frozenset(
            position for position, member in enumerate(generation.members) if member in self._silent
        )

    def _ask_in_again(self) -> Generation:
        """Having been left out: the generation that lets this rank in as a newcomer."""
        self._check_not_replaced()
        was_member, self._current = self._current is not None, None
        if was_member:
            self._host.expelled()
        now_s = time.monotonic()
        if now_s - self._expelled_at_s > _FORGIVEN_AFTER_S:
            self._backoff_s = 0.0
        self._pause(self._backoff_s)
        # one that can be let in but not be reached would keep the others busy
        self._backoff_s = min(max(1.0, 2 * self._backoff_s), _MAX_BACKOFF_S)
        self._expelled_at_s = now_s
        return self._ask_in()

    def _ask_in(self) -> Generation:
        """Ask for a place and wait for it."""
        self._is_new = True
        self._member = Member(self._network.rank, self._membership.request(self._network.rank))
        while (latest := self._membership.latest()).position_of(self._member) is None:
            self._check_goes_on()
            if latest.tickets >= self._member.ticket:
                self._check_not_replaced()
                self._member = Member(
                    self._network.rank, self._membership.request(self._network.rank)
                )
            if time.monotonic() > self._deadline_s:
                raise PeerError(
                    "no member of the run let this worker in in time; does any still run, and reach"
                    " its store?"
                )
            self._beat()
            self._pause(self._interval_s)
        return latest

    def _check_not_replaced(self) -> None:
        mine = self._member
        if any(
            member.rank == mine.rank and member.ticket > mine.ticket
            for member in self._membership.latest().members
        ):
            raise _Retired(
                f"another process has joined the run as rank {mine.rank}, and takes this one's"
                " place"
            )

    def _check_goes_on(self) -> None:
        """Not every look needs this; who is on the way in must not wait for those who have gone
        home.
        """
        if self._current is None and self._membership.is_over():
            raise _Retired("the run ended while this worker was on its way in")

    def _beat(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + self._look_interval_s
            self._membership.beat(self._member)

    def _pause(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise _Stopped

    def _do_without_store(self, reason: str) -> None:
        """Tell the host once, and try for a new connection now and then."""
        if not self._store_is_lost:
            self._store_is_lost = True
            self._host.lost_store(reason)
        self._pause(_RETRY_STORE_S)
        with suppress(OffbeatError):
            store = self._network.renewed_store()
            if store is not None and (renewed := Membership(store)).description() is not None:
                self._membership = renewed


class _Stopped(Exception):  # noqa: N818 - no error
    """`close` was called."""


class _Retired(ConfigError):  # noqa: N818 - an error only to who joins
    """This rank takes part no more."""


def _difference(founded: str, mine: str) -> str:
    """The first thing in which two descriptions differ, in words."""
    try:
        left, right = json.loads(founded), json.loads(mine)
    except ValueError:
        return f"its description: {mine[:200]!r} here, {founded[:200]!r} there"
    path: list[str] = []
    while isinstance(left, dict) and isinstance(right, dict):
        name = next(
            name
            for name in [*left, *right]
            if left.get(name, "absent") != right.get(name, "absent")
        )
        path.append(str(name))
        left, right = left.get(name, "absent"), right.get(name, "absent")
    return f"its {', '.join(map(repr, path))}: {right} here, {left} there"
