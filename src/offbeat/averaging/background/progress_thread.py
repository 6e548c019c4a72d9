"""The progress thread: it runs the averaging protocol of this rank, in one generation after
another, while the trainer computes.

The thread waits inside the transport, without the interpreter's lock. It wakes when a message of a
peer arrives, or when this rank's trainer posts one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
from typing_extensions import override

from offbeat.averaging.background.interface import Contribution, ProtocolCounts, ProtocolSettings
from offbeat.averaging.background.merge_rules import fragments
from offbeat.averaging.background.protocol_member import ProtocolMember
from offbeat.averaging.background.shared_model import SharedModel
from offbeat.codec.model_wire import Counters, MessageKind, ModelMessage
from offbeat.collectives.weighted_mean import Elements
from offbeat.errors import PeerError
from offbeat.membership.agreement import Generation, changes
from offbeat.transport.driver import Driver, Pending, Ticket, Wrapper
from offbeat.transport.operations import Operation, Post

CHANNEL = 1 << 32
"""The channel of the protocol. A generation's mesh carries nothing else."""

QUIESCE_S = 0.5
"""How long open averages of one generation may delay the next one, in seconds."""

MODEL_TIMEOUT_S = 60.0
"""How long a newcomer waits for the model of a member, in seconds."""


MEAN_TIMEOUT_S = 20.0
"""How long a mean waits for more than half of the models, in seconds."""

YIELDED_LEVELS = 5
"""By how many levels of priority averages come after training. Linux gives a thread a quarter more
of a busy processor for each level, so three times as much for five.
"""

_ASK_AGAIN_S = 0.05


MakeMember: TypeAlias = Callable[[int, ProtocolSettings, SharedModel], ProtocolMember]
"""Makes what takes part in a protocol on behalf of a rank, as `group_average.RoundManager` does."""


class ProgressThread:
    """Runs the protocol of one rank. It is the host of `membership.generations`.

    Args:
        model: this rank's.
        member: makes that of a generation.
        settings: what a generation's members agree on, as the member at a position of it sees it.
        count: puts a wrapper that counts traffic around a generation's driver.
        notify: writes a remark for the user.
        name_of: what a member's rank is called outside of the generations.
        yields: whether the trainer, which waits for no average, comes first where there are too few
            processors for it and for averages.
    """

    def __init__(
        self,
        model: SharedModel,
        *,
        member: MakeMember,
        settings: Callable[[Generation, int], ProtocolSettings],
        count: Callable[[Driver], Driver],
        notify: Callable[[str], None],
        name_of: Callable[[int], int] = int,
        yields: bool = False,
    ) -> None:
        self._model = model
        self._member = member
        self._settings = settings
        self._count = count
        self._notify, self._name_of = notify, name_of
        self._yields = yields
        self._current: ServedGeneration | None = None
        # Held while one generation takes the place of another, and while the trainer posts: a
        # version number means nothing in the next generation.
        self._switching = threading.Lock()
        self._closed = False
        self._stopped_stepping = self._is_leaving = False
        self._needs_model = False

    # Calls of the trainer

    def arrive(self, version: int) -> None:
        """Tell the protocol that the trainer has arrived at `version`, unless the generation has
        changed since.
        """
        with self._switching:
            if self._model.is_arrived_at(version):
                self._served.post(MessageKind.ARRIVE, version)

    def end_step(self) -> None:
        """Tell the protocol that the trainer has ended a step, if peers await that."""
        with self._switching:
            if (version := self._model.take_awaited()) is not None:
                self._served.post(MessageKind.ARRIVE, version)

    def names(self, positions: Collection[int]) -> str:
        """The ranks of members, for the user."""
        with self._switching:
            served = self._served
            return self._names(served, [p for p in positions if p < len(served.settings.members)])

    def must_wait(self, version: int) -> bool:
        """Whether several ranks have to arrive at `version` before it proceeds."""
        return self._served.settings.group_of(version).min_arrivals > 1

    def stop_stepping(self) -> None:
        """This rank takes no more steps. Returns when no living member does and every average that
        this rank contributed to has arrived.
        """
        self._stopped_stepping = True
        while True:
            with self._switching:
                served, epoch = self._served, self._model.epoch
                served.post(MessageKind.STOP_STEPPING)
            if self._model.wait_until_final(epoch):
                return

    def mean(self, into: Elements) -> tuple[Counters, frozenset[int]]:
        """Write the weighted mean of the current models of all living members, this rank's
        included, into a vector of the type of their values: added up in float64, a part after the
        other. The trainers of the peers are not involved.

        Members that do not answer in time are left out, and so are those that have not begun to
        train. But the mean is of more than half of the members: until that many have answered,
        this waits, for `MEAN_TIMEOUT_S` at most.

        Returns:
            The largest value of each counter, and the ranks of members whose models are not in it.

        Raises:
            PeerError: half of the living members or more have no model or did not answer.
        """
        give_up_s = time.monotonic() + MEAN_TIMEOUT_S
        self._model.forget_received()
        while True:
            models: dict[int, Contribution] | None = None
            with self._switching:
                served, epoch = self._served, self._model.epoch
                is_member = self._model.is_available
                if is_member:
                    served.post(MessageKind.FETCH_MODEL)
            if is_member:
                models = self._model.collect_models(
                    served.peers, epoch, timeout_s=served.collect_timeout_s
                )
            is_over = time.monotonic() > give_up_s
            if models is not None:
                living = served.peers - self._model.dead()
                # The dead count until there is a generation without them: this rank may be the one
                # that is cut off.
                counted = living if is_over else served.peers
                if 2 * (len(models) + 1) > len(counted) + 1:
                    missing = served.peers - models.keys()
                    return self._mean_of(served, models, into, missing=missing)
            if is_over:
                raise PeerError(self._no_mean(served, models or {}))
            self._model.wait_for_news(_ASK_AGAIN_S)

    def _mean_of(
        self,
        served: ServedGeneration,
        models: dict[int, Contribution],
        into: Elements,
        *,
        missing: frozenset[int],
    ) -> tuple[Counters, frozenset[int]]:
        # Also of members that are dead: at the end of a run no next generation tells of them.
        if missing:
            self._notify(
                f"a mean of all models was taken without worker {self._names(served, missing)},"
                " which did not answer in time or had not begun to train"
            )
        # In the order of positions, so that all members compute the same bits.
        every = {served.position: self._model.own_model(), **models}
        included = [every[position] for position in sorted(every)]
        sum_of_weights = sum(model.weight for model in included)
        dtype = served.settings.dtype
        for part in fragments(served.settings.num_elements):
            total = np.zeros(part.stop - part.start, np.float64)
            for model in included:
                total += model.values[part] * np.float64(model.weight)
            into[part] = (total / sum_of_weights).astype(dtype)
        counters = np.maximum.reduce([model.counters for model in included])
        return counters, self._ranks(served, missing)

    def _no_mean(self, served: ServedGeneration, models: Collection[int]) -> str:
        if not self._model.is_available:
            return (
                "this worker is no member of the run at present, so there is no mean of all models"
                " to be had; the others went on without it"
            )
        missing = served.peers - frozenset(models) - self._model.dead()
        return (
            f"within {MEAN_TIMEOUT_S:g} s only {len(models) + 1} of {len(served.peers) + 1} workers"
            f" had a model to average: worker {self._names(served, missing)} did not answer, or"
            " has not begun to train. A mean of half of the workers or fewer is no mean of the run;"
            " call averaged_model() when more of them train"
        )

    def wait_for_model(self) -> None:
        """Return when a newcomer has the model of a member; at once for all other ranks.

        Raises:
            PeerError: no member has sent one.
        """
        if self._needs_model and not self._model.wait_until_begun(MODEL_TIMEOUT_S):
            raise PeerError(
                f"no member of the run sent its model within {MODEL_TIMEOUT_S:g} s; do they train,"
                " and can they be reached?"
            )

    def leave(self) -> bool:
        """Finish, and return when all living members have finished.

        Returns:
            Whether that is so; False when the protocol has failed.
        """
        self._is_leaving = True
        while True:
            with self._switching:
                if (served := self._current) is None:
                    return False
                served.post(MessageKind.FINISH)
            served.join()
            # If another generation has begun meanwhile, this rank must finish in that one too.
            with self._switching:
                if served is self._current:
                    return served.ended_well

    def close(self) -> None:
        """Close the mesh. `leave` comes before, unless something has failed. Idempotent."""
        with self._switching:
            self._closed = True
            served, self._current = self._current, None
        if served is not None:
            served.stop()
            served.driver.close()

    def abort(self, reason: str) -> None:
        """Tell the peers that this rank has failed, and why."""
        with self._switching:
            if self._current is not None:
                self._current.driver.abort(reason)

    # Calls of `membership.generations`

    def begin(self, generation: Generation, position: int, driver: Driver) -> None:
        """Go over to `generation`. A newcomer requests the model of a member that is not new.

        Args:
            generation: the new generation.
            position: this rank's position in it.
            driver: a connected mesh of its members.
        """
        settings, counted = self._settings(generation, position), self._count(driver)
        if self._current is not None:
            self._model.quiesce(QUIESCE_S)
        with self._switching:
            if self._closed:
                counted.close()
                return
            old = self._current
            if old is not None:
                old.stop()
            # After the old protocol has stopped, so that it cannot change the new state, and before
            # the new one starts.
            self._model.begin_generation()
            served = self._current = ServedGeneration(
                generation, position, counted, settings, self._member, self._model, self._yields
            )
            if self._stopped_stepping:
                served.post(MessageKind.STOP_STEPPING)
        if old is not None:
            # This takes as long as its last messages do, and the trainer need not wait for that.
            old.driver.close()
            self._notify(changes(old.generation, generation, self._name_of))
        self._needs_model = not self._model.is_available and (
            self._needs_model or position in generation.newcomers
        )
        if self._needs_model:
            served.request_model(without=position)

    def unreachable(self) -> frozenset[int]:
        return self._model.dead()

    def expelled(self) -> None:
        self._model.expel()
        self._needs_model = True
        self._notify(
            "this worker was away for so long that the others went on without it; it joins them"
            " again"
        )

    def may_return(self) -> bool:
        return True  # Nobody waits for a trainer that computes.

    def lost_store(self, reason: str) -> None:
        self._notify(
            f"the run's store cannot be reached ({reason}): training goes on, but nobody can join"
            " until it is back"
        )

    def found_store(self) -> None:
        self._notify("the run's store can be reached again")

    def run_over(self) -> None:
        if not self._is_leaving:
            self._model.fail(
                PeerError(
                    "the run ended without this worker: its peers took it for dead, because it was"
                    " suspended or cut off for long, and have all finished. Its model is not the"
                    " run's; take that of a worker that finished"
                )
            )

    def retired(self, reason: str) -> None:
        self._model.fail(PeerError(reason))

    def _ranks(self, served: ServedGeneration, positions: Collection[int]) -> frozenset[int]:
        members = served.generation.members
        return frozenset(self._name_of(members[position].rank) for position in positions)

    def _names(self, served: ServedGeneration, positions: Collection[int]) -> str:
        """The ranks at `positions`, for the user."""
        return ", ".join(map(str, sorted(self._ranks(served, positions))))

    @property
    def _served(self) -> ServedGeneration:
        assert self._current is not None, "begin must be called first"
        return self._current


@dataclass(eq=False)
class ServedGeneration:
    """Runs the protocol of one generation from when it is made until `stop`. `join` waits for its
    end.
    """

    generation: Generation
    position: int
    driver: Driver
    settings: ProtocolSettings
    member: MakeMember
    model: SharedModel
    yields: bool

    def __post_init__(self) -> None:
        self.ended_well = False
        self._stoppable = _Stoppable(self.driver)
        self._have_no_model: set[int] = set()
        self._model_source: int | None = None
        self.model.on_missing_model = self._on_missing_model
        work = self.member(self.position, self.settings, self.model).serve()
        pending = Pending(self._stoppable, work, CHANNEL)
        self.join = self._stoppable.beside(
            partial(self._run, pending),
            name=f"offbeat-progress-{self.position}",
            levels=YIELDED_LEVELS if self.yields else 0,
        )

    @property
    def peers(self) -> frozenset[int]:
        """The positions of the other members."""
        return frozenset(self.settings.members) - {self.position}

    @property
    def collect_timeout_s(self) -> float:
        """How long to wait for the models of all members: their time at 10 Mbit/s and a second."""
        settings = self.settings
        model_bytes = settings.num_elements * settings.dtype.itemsize
        return 1.0 + len(settings.members) * model_bytes / 1.25e6

    def request_model(self, *, without: int) -> None:
        """Request the model of a member, but not of `without` or of members that had none."""
        self._have_no_model.add(without)
        candidates = (
            self.peers - self.generation.newcomers - self._have_no_model - self.model.dead()
        )
        self._model_source = min(candidates, default=None)
        if self._model_source is not None:
            self.post(MessageKind.FETCH_MODEL, self._model_source)
        else:
            self.model.continue_without_model(
                PeerError("no member of the run has a model to give to this worker")
            )

    def _on_missing_model(self, member: int) -> None:
        if member == self._model_source and not self.model.is_available:
            self.request_model(without=member)

    def post(self, kind: MessageKind, version: int = -1) -> None:
        """Hand a message to the protocol, as one of this rank's own."""
        message = ModelMessage(kind=kind, generation=self.generation.number, version=version)
        self.driver.start(Post(message.to_bytes()), CHANNEL).wait()

    def stop(self) -> None:
        """End the protocol wherever it is. The driver stays open."""
        self._stoppable.stopped = True
        self.post(MessageKind.STOP_STEPPING)  # any message wakes the thread
        self.join()

    def _run(self, pending: Pending[ProtocolCounts]) -> None:
        try:
            pending.wait()
            self.ended_well = True
        except Exception as error:  # noqa: BLE001 - the trainer must hear of any failure of this thread
            if not self._stoppable.stopped:
                self.driver.abort(f"{type(error).__name__}: {error}")
                self.model.fail(error)


class _Stoppable(Wrapper):
    """Refuses to start operations once it is `stopped`."""

    stopped = False

    @override
    def start(self, operation: Operation, channel: int) -> Ticket:
        if self.stopped:
            raise PeerError("this generation is over for this rank")
        return super().start(operation, channel)
