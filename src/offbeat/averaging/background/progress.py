"""A thread that answers for this rank, generation after generation, while another one trains.

What it runs is a collective such as `group_average.serve`; it waits inside the transport, without
the interpreter's lock, and is woken by a message or by what the trainer posts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from offbeat.averaging.background.group_average import arrive, ask, finish, rest
from offbeat.averaging.background.group_base import Contribution, Happenings, Terms
from offbeat.averaging.background.group_base import Replica as Answering
from offbeat.averaging.background.published_model import Counters, Replica
from offbeat.codec.model_wire import Values
from offbeat.errors import PeerError
from offbeat.membership.agreement import Generation, changes
from offbeat.transport.driver import Driver, Ticket
from offbeat.transport.operations import Collective, Operation, Post
from offbeat.transport.wrappers.base import Wrapper

CHANNEL = 1 << 32
"""A generation's mesh carries nothing else."""

SETTLE_DOWN_S = 0.5
"""How long averages that are under way in one generation may hold up the next."""

TAKE_OVER_S = 60.0
"""How long a newcomer waits for a member's model."""


class Service(Protocol):
    """A protocol that answers for a rank, such as `group_average.serve`."""

    def __call__(
        self, rank: int, terms: Terms, replica: Answering, happenings: Happenings | None = None
    ) -> Collective[Happenings]: ...


class Progress:
    """Keeps `replica` answered for. The host of `membership.generations`.

    Args:
        replica: this rank's model.
        service: the protocol.
        terms: what a generation's members agree on, seen from a position in it.
        count: puts a wrapper that counts around a generation's driver.
        notify: for remarks.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        service: Service,
        terms: Callable[[Generation, int], Terms],
        count: Callable[[Driver], Driver],
        notify: Callable[[str], None],
    ) -> None:
        self.replica = replica
        self._service = service
        self._terms = terms
        self._count = count
        self._notify = notify
        self._current: _Running | None = None
        self._turnover = threading.Lock()
        self._closed = False
        self._rests = False
        self._wants_model = False

    # What the trainer asks for

    def arrive(self, version: int) -> None:
        """Tell the protocol that the trainer has arrived at `version`, unless the membership has
        changed since.
        """
        with self._turnover:
            if self.replica.is_arrived_at(version):
                self._running.post(arrive(version, generation=self._running.generation.number))

    def must_wait(self, version: int) -> bool:
        """Whether several have to arrive at `version` before it goes on."""
        return self._running.terms.meeting(version).min_fresh > 1

    def rest(self) -> None:
        """This rank takes no more steps; return when no living member does."""
        self._rests = True
        while True:
            with self._turnover:
                running, epoch = self._running, self.replica.epoch
                running.post(rest(generation=running.generation.number))
            if self.replica.wait_for_rest(running.others, epoch):
                return

    def mean(self) -> tuple[Values, Counters]:
        """The weighted mean of all living members' models as they are now, in float64, and the
        maximum of their counters.

        The other ranks need not know of it.
        """
        states: dict[int, Contribution] | None = None
        while states is None:
            with self._turnover:
                running, epoch = self._running, self.replica.epoch
                running.post(ask(None, generation=running.generation.number))
            states = self.replica.states(running.others, epoch, patience_s=running.patience_s)
        if silent := running.others - states.keys() - self.replica.dead():
            self._notify(
                f"a mean of all models was taken without worker {running.ranks(silent)}, which did"
                " not answer"
            )
        models = [self.replica.own(), *states.values()]
        total = np.zeros(running.terms.num_elements, np.float64)
        for model in models:
            total += model.values * np.float64(model.weight)
        total /= sum(model.weight for model in models)
        return total, np.maximum.reduce([model.counters for model in models])

    def wait_for_model(self) -> None:
        """Return when a newcomer has a member's model; at once for all others. Raises `PeerError`
        if none comes.
        """
        if self._wants_model and not self.replica.wait_until_ready(TAKE_OVER_S):
            raise PeerError(
                f"no member of the run sent its model within {TAKE_OVER_S:g} s; do they train, and"
                " can they be reached?"
            )

    def part(self) -> bool:
        """Come to the end, and return when all living members have. False: it was not like that,
        since something had failed.
        """
        while True:
            with self._turnover:
                if (running := self._current) is None:
                    return False
                running.post(finish(generation=running.generation.number))
            running.join()
            with self._turnover:
                if running is self._current:
                    return running.ended_well

    def close(self) -> None:
        """Give the mesh back. Idempotent; `part` comes first, unless something failed."""
        with self._turnover:
            self._closed = True
            running, self._current = self._current, None
        if running is not None:
            running.stop()
            running.driver.close()

    def abort(self, reason: str) -> None:
        """Tell the others that this rank has failed, and why."""
        with self._turnover:
            if self._current is not None:
                self._current.driver.abort(reason)

    # What `membership.generations` asks for

    def begin(self, generation: Generation, position: int, driver: Driver) -> None:
        """Go over to `generation`, which `driver` connects. A newcomer asks a member that was there
        before for its model.
        """
        terms, counted = self._terms(generation, position), self._count(driver)
        if self._current is not None:
            self.replica.settle_down(SETTLE_DOWN_S)
        with self._turnover:
            if self._closed:
                counted.close()
                return
            old = self._current
            if old is not None:
                old.stop()
            self.replica.restart()
            running = self._current = _Running(
                generation, position, counted, terms, self._service, self.replica
            )
            if self._rests:
                running.post(rest(generation=generation.number))
        if old is not None:
            # takes as long as its last messages do, and the trainer need not wait for that
            old.driver.close()
            self._notify(changes(old.generation, generation))
        self._wants_model = not self.replica.has_model and (
            self._wants_model or position in generation.newcomers
        )
        if self._wants_model:
            running.look_for_model(position)

    def unreachable(self) -> frozenset[int]:
        return self.replica.dead()

    def expelled(self) -> None:
        self.replica.leave()
        self._wants_model = True
        self._notify(
            "this worker was away for so long that the others went on without it; it joins them"
            " again"
        )

    def lost_store(self, reason: str) -> None:
        self._notify(
            f"the run's store cannot be reached ({reason}): training goes on, but nobody can join"
            " until it is back"
        )

    def retired(self, reason: str) -> None:
        self.replica.fail(PeerError(reason))

    @property
    def _running(self) -> _Running:
        assert self._current is not None, "begin comes first"
        return self._current


@dataclass(eq=False)
class _Running:
    """The service of one generation and its thread."""

    generation: Generation
    position: int
    driver: Driver
    terms: Terms
    service: Service
    replica: Replica

    def __post_init__(self) -> None:
        self.happenings = Happenings()
        self.ended_well = False
        self._carrier = _Stoppable(self.driver)
        self._refused: set[int] = set()
        self._donor: int | None = None
        self.replica.look_for_model = self._look_further
        self._thread = threading.Thread(
            target=self._serve, name=f"offbeat-progress-{self.position}", daemon=True
        )
        self._thread.start()

    @property
    def others(self) -> frozenset[int]:
        return frozenset(self.terms.members) - {self.position}

    @property
    def patience_s(self) -> float:
        """How long to wait for the models of all members: as long as they take at 10 Mbit/s, and a
        second.
        """
        terms = self.terms
        return 1.0 + len(terms.members) * terms.num_elements * terms.dtype.itemsize / 1.25e6

    def ranks(self, positions: Collection[int]) -> str:
        return ", ".join(
            str(self.generation.members[position].rank) for position in sorted(positions)
        )

    def look_for_model(self, without: int) -> None:
        """Ask another member than `without`, and than those that had none to give, for
        its model.
        """
        self._refused.add(without)
        candidates = self.others - self.generation.newcomers - self._refused - self.replica.dead()
        self._donor = min(candidates, default=None)
        if self._donor is not None:
            self.post(ask(self._donor, generation=self.generation.number))
        else:
            self.replica.do_without_theirs(
                PeerError("no member of the run has a model to give to this worker")
            )

    def _look_further(self, member: int) -> None:
        if member == self._donor and not self.replica.has_model:
            self.look_for_model(member)

    def post(self, message: bytes) -> None:
        self.driver.start(Post(message), CHANNEL).wait()

    def join(self) -> None:
        self._thread.join()

    def stop(self) -> None:
        """End the service wherever it is; the driver stays open."""
        self._carrier.stopped = True
        self.post(rest(generation=self.generation.number))  # whatever wakes it
        self._thread.join()

    def _serve(self) -> None:
        try:
            self._carrier.run(
                self.service(self.position, self.terms, self.replica, self.happenings), CHANNEL
            )
            self.ended_well = True
        except Exception as error:  # noqa: BLE001 - whatever it is, the trainer must hear of it
            if not self._carrier.stopped:
                self.driver.abort(f"{type(error).__name__}: {error}")
                self.replica.fail(error)


class _Stoppable(Wrapper):
    """Begins nothing any more once it is `stopped`."""

    stopped = False

    def start(self, operation: Operation, channel: int) -> Ticket:
        if self.stopped:
            raise PeerError("this generation is over for this rank")
        return super().start(operation, channel)
