"""The protocol of one generation, and the thread that runs it."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import override

from offbeat.averaging.background.interface import ProtocolCounts, ProtocolSettings
from offbeat.averaging.background.protocol_member import fetch_model, stop_stepping
from offbeat.averaging.background.shared_model import SharedModel
from offbeat.errors import PeerError
from offbeat.membership.agreement import Generation
from offbeat.transport.driver import Driver, Ticket, Wrapper
from offbeat.transport.operations import Collective, Operation, Post

CHANNEL = 1 << 32
"""The channel of the protocol. A generation's mesh carries nothing else."""


class AveragingProtocol(Protocol):
    """A protocol that averages on behalf of a rank: `group_average.serve`, `pair_average.serve`."""

    def __call__(
        self,
        rank: int,
        settings: ProtocolSettings,
        model: SharedModel,
        counts: ProtocolCounts | None = None,
    ) -> Collective[ProtocolCounts]: ...


@dataclass(eq=False)
class ServedGeneration:
    """Runs the protocol of one generation from when it is made until `stop`."""

    generation: Generation
    position: int
    driver: Driver
    settings: ProtocolSettings
    serve: AveragingProtocol
    model: SharedModel

    def __post_init__(self) -> None:
        self.counts = ProtocolCounts()
        self.ended_well = False
        self._stoppable = _Stoppable(self.driver)
        self._have_no_model: set[int] = set()
        self._model_source: int | None = None
        self.model.on_missing_model = self._on_missing_model
        self._thread = threading.Thread(
            target=self._run, name=f"offbeat-progress-{self.position}", daemon=True
        )
        self._thread.start()

    @property
    def native_id(self) -> int | None:
        """The system's identifier of the thread."""
        return self._thread.native_id

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

    def ranks(self, positions: Collection[int]) -> frozenset[int]:
        return frozenset(self.generation.members[position].rank for position in positions)

    def names(self, positions: Collection[int]) -> str:
        """The ranks at `positions`, for the user."""
        return ", ".join(map(str, sorted(self.ranks(positions))))

    def request_model(self, *, without: int) -> None:
        """Request the model of a member, but not of `without` or of members that had none."""
        self._have_no_model.add(without)
        candidates = (
            self.peers - self.generation.newcomers - self._have_no_model - self.model.dead()
        )
        self._model_source = min(candidates, default=None)
        if self._model_source is not None:
            self.post(fetch_model(self._model_source, generation=self.generation.number))
        else:
            self.model.continue_without_model(
                PeerError("no member of the run has a model to give to this worker")
            )

    def _on_missing_model(self, member: int) -> None:
        if member == self._model_source and not self.model.is_available:
            self.request_model(without=member)

    def post(self, message: bytes) -> None:
        """Hand `message` to the protocol, as one of this rank's own."""
        self.driver.start(Post(message), CHANNEL).wait()

    def join(self) -> None:
        """Wait until the protocol has ended."""
        self._thread.join()

    def stop(self) -> None:
        """End the protocol wherever it is. The driver stays open."""
        self._stoppable.stopped = True
        self.post(stop_stepping(generation=self.generation.number))  # any message wakes the thread
        self._thread.join()

    def _run(self) -> None:
        try:
            self._stoppable.run(
                self.serve(self.position, self.settings, self.model, self.counts),
                CHANNEL,
            )
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
