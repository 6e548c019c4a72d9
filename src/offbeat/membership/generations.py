"""The membership thread: it keeps a rank in the newest generation.

The thread sends heartbeats, looks for departed members and for requests to join, and moves its rank
from one generation to the next:

1. The first member that sees an unreachable peer, or a request to join, proposes the next
   generation.
2. Every member of the new generation opens a mesh for it, publishes its address in the store, and
   waits until all members have done so. The work of the old generation continues meanwhile.
3. The thread then connects the mesh and hands it to its host. If a member of the new generation
   departs before that, another generation is proposed and takes its place.
4. A rank that finds itself left out (it was suspended or disconnected for long) asks to join again,
   as a newcomer, once its host has time for what its peers do together then.

The time from a death to the next generation is `PeerLimits.grace_s` and a few `interval_s`, or
`silence_s` where the members that are left are not more than half, or had no connection to the dead
one yet. Training does not wait for it, because the protocols of the old generation already leave
the dead out. When the store does not answer, the generation stays as it is. A member that dies
while a generation assembles delays it by `silence_s`, one that is stopped by as long as its
connections live.
"""

from __future__ import annotations

import json
import math
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from torch.distributed import PrefixStore

from offbeat.errors import ConfigError, MismatchError, OffbeatError, PeerError, WireError
from offbeat.membership.agreement import Generation, Member, Membership, successor
from offbeat.transport.driver import Driver
from offbeat.transport.link import PeerLimits
from offbeat.transport.link import silence_s as tolerated_silence_s
from offbeat.transport.network import Network, StoreLostError, mesh_limits
from offbeat.transport.peers import Peers

READ_S = 0.01
"""For how many seconds for each member heartbeats are not read again, as long as all members can be
reached. A reading asks for as many entries as there are members, and all of them ask one store.
"""

_ASSEMBLE_INTERVAL_S = 0.02
_RETRY_STORE_S = 5.0
_SILENT_BEAT_S = 3.0
_CLOSE_WITHIN_S = 10.0
_MAX_BACKOFF_S = 30.0
_RESET_BACKOFF_AFTER_S = 60.0


class GenerationHost(Protocol):
    """The part of a program that works within generations."""

    def begin(self, generation: Generation, position: int, driver: Driver) -> None:
        """End the work of the old generation, if there is one, and start that of `generation`.

        The host closes every driver that it was given: the old one when the next takes its place,
        and the last one when the host itself is closed. The first call comes from the thread that
        called `start` or `join`, all later ones from the membership thread.

        Args:
            generation: the new generation.
            position: this rank's position in it.
            driver: a connected mesh of its members.
        """

    def unreachable(self) -> frozenset[int]:
        """The positions of the current generation that are dead or have left. Must not block."""

    def expelled(self) -> None:
        """This rank is not a member any more. It asks to join again as soon as `may_return`, and
        `begin` follows when it was let in as a newcomer.
        """

    def may_return(self) -> bool:
        """Whether this rank, which was expelled, asks to join again now. As long as it does not,
        its peers go on without it. Asked again and again; must not block.
        """

    def lost_store(self, reason: str) -> None:
        """The store does not answer; the generation stays as it is until it does. Called once each
        time that this happens.
        """

    def found_store(self) -> None:
        """The store, which was lost, answers again."""

    def run_over(self) -> None:
        """The run has ended for all members: all that live have finished. A host that has not
        finished was taken for dead. Called once.
        """

    def retired(self, reason: str) -> None:
        """This rank takes part no longer, and no `begin` will follow."""


def of_run(network: Network, number: int) -> Network:
    """`network` with entries of its own in the store for the time that ranks become members after
    `number` others, whose entries say that they are over.
    """
    if not number:
        return network
    return replace(network, store=PrefixStore(str(number), network.store))


def newest_run(network: Network) -> int:
    """How often the ranks of the run under way had become members before they did last."""
    number = 0
    while Membership(of_run(network, number + 1).own_store()).description() is not None:
        number += 1
    return number


class Generations:
    """Keeps this rank in the newest generation, after `start` or `join` brought it into one, until
    `close`.
    """

    def __init__(
        self,
        network: Network,
        host: GenerationHost,
        *,
        interval_s: float = 0.1,
        silence_s: float | None = None,
        limits: PeerLimits | None = None,
    ) -> None:
        """Connect to the store; nothing else happens before `start` or `join`.

        Args:
            network: opens meshes and connections to the store.
            host: receives the meshes and is told what happens.
            interval_s: the time between two readings of the store, in seconds, > 0.
            silence_s: a member whose heartbeat in the store does not change for so many seconds is
                silent, > 0; the same on every rank. By itself that makes nobody dead. By default 3,
                or what `OFFBEAT_SILENCE_S` says if that is less.
            limits: the limits of the meshes, the same on every rank; `mesh_limits` if None.

        Raises:
            PeerError: the store does not answer.
        """
        if silence_s is None:
            silence_s = min(_SILENT_BEAT_S, tolerated_silence_s())
        self._network = network
        self._host = host
        self._interval_s = interval_s
        self._silence_s = silence_s
        self._beat_interval_s = min(0.5, silence_s / 6)
        self._limits = limits if limits is not None else mesh_limits()
        self._membership = Membership(network.own_store())
        self._member = Member(network.rank, 0)
        self._is_new = False
        self._current: Generation | None = None
        self._mesh: Peers | None = None
        self._silent: set[Member] = set()
        self._last_reading_s, self._next_beat_s = -math.inf, 0.0
        self._deadline_s = math.inf
        self._expelled_at_s = -math.inf
        self._backoff_s = 0.0
        self._store_is_lost = self._run_is_over = self._was_away = False
        self._last_turn_s = math.inf
        # How many times this rank has begun to ask the store where it stands, and how many times it
        # has had an answer, or learned that there is none.
        self._num_asked = self._num_answered = 0
        self._answered = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"offbeat-generations-{network.rank}", daemon=True
        )

    def start(self, description: str) -> None:
        """Begin the run as one of its founders. Returns after the host's first `begin`.

        Args:
            description: what the run trains; workers that join later compare it with their own.

        Raises:
            MismatchError: another founder has another description.
            StoreLostError, WireError: the store does not answer, or an entry is damaged.
        """
        self._move_to(self._membership.create_run(self._network.world_size, description))
        self._thread.start()

    def join(self, description: str, *, timeout_s: float = 60.0) -> None:
        """Join a run that is under way, in place of the member of the same rank if there is one.
        Returns after the host's first `begin`.

        Args:
            description: what this worker would train; must equal the founders' description.
            timeout_s: how long to wait for the members to let this worker in, in seconds.

        Raises:
            ConfigError: no founder has begun the run, or it has ended.
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
        self._move_to(self._request_to_join())
        self._deadline_s = math.inf
        self._thread.start()

    def confirm(self, *, timeout_s: float = 15.0) -> None:
        """Wait until the store has been asked once more where this rank stands, and the host has
        been told of what has changed.

        For a rank that is about to finish. One that was suspended for long may otherwise finish
        before it learns that its peers went on, or ended, without it.

        Args:
            timeout_s: how long to wait where the store does not answer, in seconds, >= 0.
        """
        with self._answered:
            wanted = self._num_asked + 1
            self._answered.wait_for(
                lambda: self._num_answered >= wanted or not self._thread.is_alive(), timeout_s
            )

    def close(self, *, over: bool = False) -> None:
        """End the thread; no `begin` comes afterwards. Idempotent.

        Args:
            over: whether the run has ended for all members; else only this rank leaves, and its
                peers continue.
        """
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_WITHIN_S)
        if self._thread.is_alive():
            # The thread hangs in a call to the store, and a connection serves one caller at a time.
            return
        with suppress(OffbeatError):
            # The end of the run must be known before this heartbeat ends, or a peer would propose
            # a generation without this rank.
            if over:
                self._membership.end_run()
            self._membership.deregister(self._member)

    def _run(self) -> None:
        try:
            while True:
                try:
                    self._pause(self._interval_s)
                    self._num_asked += 1
                    self._check_once()
                    if self._store_is_lost:
                        self._host.found_store()
                    self._store_is_lost = self._was_away = False
                    self._note_answer()
                except (StoreLostError, WireError) as error:
                    self._handle_lost_store(str(error))
        except _Stopped:
            pass
        except _Retired as reason:
            self._host.retired(str(reason))
        except Exception as error:  # noqa: BLE001 - any failure ends this thread, and the trainer must be told
            self._host.retired(f"{type(error).__name__}: {error}")
        finally:
            with self._answered:
                self._num_answered = self._num_asked + 1  # nobody will ask again
                self._answered.notify_all()

    def _note_answer(self) -> None:
        with self._answered:
            self._num_answered = self._num_asked
            self._answered.notify_all()

    def _check_once(self) -> None:
        """Move to a newer generation if there is one, or should be one."""
        if self._current is None:
            self._wait_to_return()
            self._move_to(self._request_to_join())
            return
        self._beat()
        if not self._run_is_over and self._membership.is_over():
            self._run_is_over = True
            self._host.run_over()
        following = self._membership.next_of(self._current) or self._propose_after(self._current)
        if following is not None:
            self._move_to(following)

    def _move_to(self, generation: Generation) -> None:
        """Begin `generation`, or one after it."""
        following: Generation | None = generation
        while following is not None:
            position = following.position_of(self._member)
            following = self._rejoin() if position is None else self._assemble(following, position)

    def _assemble(self, generation: Generation, position: int) -> Generation | None:
        """Wait for the members of `generation`, connect with them, and begin the generation.

        Returns:
            None after `begin`. If another generation was proposed before that, that generation.
        """
        driver = self._network.open(
            generation=generation.number,
            position=position,
            size=generation.size,
            limits=self._limits,
        )
        try:
            self._membership.publish_endpoint(generation, position, driver.endpoint)
            num_published = self._membership.num_published(generation)
            while num_published < generation.size:
                self._beat()
                following = self._membership.next_of(generation) or self._propose_without(
                    generation, position
                )
                if following is not None:
                    driver.close()
                    return following
                self._check_run_not_over()
                self._pause(min(self._interval_s, _ASSEMBLE_INTERVAL_S))
                num_published = self._membership.num_published(generation, num_published)
            # Not before, since a member that lost the store meanwhile publishes another one.
            endpoints = self._membership.endpoints(generation)
            driver.connect([endpoint for endpoint in endpoints if endpoint is not None])
        except BaseException:
            driver.close()
            raise
        if self._is_new:
            # The generation that let this rank in may never have begun. Then this one does not
            # list the rank as a newcomer, although it still has no model.
            generation = replace(generation, newcomers=generation.newcomers | {position})
        self._current, self._is_new, self._mesh = generation, False, driver
        self._host.begin(generation, position, driver)
        return None

    def _propose_after(self, current: Generation) -> Generation | None:
        """The generation after `current`, if what this rank observes calls for one."""
        me = current.position_of(self._member)
        assert me is not None, "a rank that is not a member asks to join instead"
        unreachable = self._host.unreachable()
        silent = self._silent_positions(current, all_reached=not unreachable)
        if silent:
            assert self._mesh is not None, "it came with the generation"
            # One that dies before the first connection loses none by which its death is noticed.
            unreachable |= silent & self._mesh.unreached()
        requests = self._membership.waiting(current)
        if not unreachable and not requests:
            return None
        proposal = successor(
            current, me=me, unreachable=unreachable, silent=silent, requests=requests
        )
        return self._propose(proposal)

    def _propose_without(self, generation: Generation, me: int) -> Generation | None:
        """The generation after `generation`, some of whose members have not come yet; None while
        they may still come.
        """
        silent = self._silent_positions(generation)
        # Neither counts alone: a member that has already left an older mesh for a newer one looks
        # dead on the older mesh, and one that is stopped for a while, or whose interpreter is busy,
        # has no heartbeat.
        departed = self._membership.unpublished(generation, silent - self._reached(generation))
        if not departed:
            return None
        return self._propose(
            successor(
                generation, me=me, unreachable=departed, silent=silent, requests=(), begun=False
            )
        )

    def _reached(self, generation: Generation) -> frozenset[int]:
        """The positions in `generation` of members that the mesh at work reaches."""
        current, mesh = self._current, self._mesh
        if current is None or mesh is None:
            return frozenset()
        gone = self._host.unreachable() | mesh.unreached()
        reached = {each for place, each in enumerate(current.members) if place not in gone}
        return frozenset(place for place, each in enumerate(generation.members) if each in reached)

    def _propose(self, proposal: Generation | None) -> Generation | None:
        # At the end of a run its members leave one by one, and none of them has to be replaced.
        if proposal is None or self._membership.is_over():
            return None
        return self._membership.propose(proposal)

    def _silent_positions(
        self, generation: Generation, *, all_reached: bool = False
    ) -> frozenset[int]:
        """The positions of `generation` that are silent. `all_reached`: whether all members can be
        reached, so that it hardly matters.
        """
        now_s = time.monotonic()
        pause_s = self._beat_interval_s
        if all_reached:
            pause_s = max(pause_s, READ_S * generation.size)
        if now_s >= self._last_reading_s + pause_s:
            self._last_reading_s = now_s
            # Before the first generation the founders start at different times, and one that joins
            # has no connection that tells who lives, so that a missing heartbeat is tolerated for
            # as long as a connection may take.
            limit_s = self._silence_s if self._current else self._limits.connect_timeout_s
            silences_s = self._membership.silent_s(generation)
            self._silent = {
                member
                for member, silence_s in zip(generation.members, silences_s, strict=True)
                if silence_s > limit_s
            }
        return frozenset(
            position for position, member in enumerate(generation.members) if member in self._silent
        )

    def _rejoin(self) -> Generation:
        """The generation that lets this rank in as a newcomer, after one that left it out."""
        self._check_not_replaced()
        was_member, self._current = self._current is not None, None
        if was_member:
            self._host.expelled()
        now_s = time.monotonic()
        if now_s - self._expelled_at_s > _RESET_BACKOFF_AFTER_S:
            self._backoff_s = 0.0
        self._pause(self._backoff_s)
        # A rank that can reach the store but not its peers would be let in and left out again and
        # again, and each time all members would have to build another mesh.
        self._backoff_s = min(max(1.0, 2 * self._backoff_s), _MAX_BACKOFF_S)
        self._expelled_at_s = now_s
        if was_member:
            self._wait_to_return()
        return self._request_to_join()

    def _wait_to_return(self) -> None:
        """Return when the host, which was told that this rank is expelled, may return."""
        while not self._host.may_return():
            self._check_run_not_over()
            self._check_not_replaced()
            self._pause(self._interval_s)

    def _request_to_join(self) -> Generation:
        """Request to join, and wait for the generation that has this rank as a member."""
        rank, self._is_new = self._network.rank, True
        self._member = Member(rank, self._membership.request(rank))
        while (latest := self._membership.latest()).position_of(self._member) is None:
            self._check_run_not_over()
            # The request was answered, but a later generation has already left this rank out.
            if latest.tickets >= self._member.ticket:
                self._check_not_replaced()
                self._member = Member(rank, self._membership.request(rank))
            if time.monotonic() > self._deadline_s:
                raise PeerError(
                    "no member of the run let this worker in in time; does any still run, and reach"
                    " its store?"
                )
            self._beat()
            self._pause(self._interval_s)
        return latest

    def _is_alone(self) -> bool:
        """Whether there are other members, and none of them can be reached."""
        generation = self._current
        return generation is not None and 1 < generation.size == 1 + len(self._host.unreachable())

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

    def _check_run_not_over(self) -> None:
        """Only a rank that is joining needs this: it must not wait for members that have left."""
        if self._current is None and self._membership.is_over():
            raise _Retired(
                "the run ended while this worker was on its way in: its peers have finished without"
                " it, and its model is not the run's"
            )

    def _beat(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + self._beat_interval_s
            self._membership.beat(self._member)

    def _pause(self, seconds: float) -> None:
        stopped = self._stop.wait(seconds)
        now_s = time.monotonic()
        # Peers take a rank for dead that is silent for so long.
        self._was_away |= now_s - self._last_turn_s > self._limits.heartbeat_timeout_s
        self._last_turn_s = now_s
        if stopped:
            raise _Stopped

    def _handle_lost_store(self, reason: str) -> None:
        """Tell the host once, then try every `_RETRY_STORE_S` to connect again."""
        if not self._store_is_lost:
            self._store_is_lost = True
            self._host.lost_store(reason)
        if not self._was_away:
            self._note_answer()
        retry_s = time.monotonic() + _RETRY_STORE_S
        while time.monotonic() < retry_s:
            if self._was_away and self._is_alone():
                raise _Retired(
                    "this worker was suspended for longer than its peers wait for a silent one."
                    " They have gone on or ended without it, and neither they nor the run's store"
                    " can be reached any more: its model is not the run's. Start it anew with"
                    " OFFBEAT_RETURN=1 if the run still goes on"
                )
            self._pause(self._interval_s)
        self._note_answer()
        with suppress(OffbeatError):
            store = self._network.renewed_store()
            if store is not None and (renewed := Membership(store)).description() is not None:
                self._membership = renewed


class _Stopped(Exception):  # noqa: N818 - it ends the thread and is not an error
    """`close` was called."""


class _Retired(ConfigError):  # noqa: N818 - it is an error only for a rank that joins
    """This rank takes part no longer."""


def _difference(founded: str, mine: str) -> str:
    """The first entry in which two descriptions differ, for the user."""
    try:
        left, right = json.loads(founded), json.loads(mine)
    except (ValueError, RecursionError):
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
