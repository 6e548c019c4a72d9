"""`Context`: what a session lends to a strategy's callbacks."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Final, Protocol

import torch
from torch.distributed import HashStore, Store

from offbeat.callbacks.callback import Callback
from offbeat.errors import OffbeatWarning
from offbeat.membership.generations import GenerationHost, Generations
from offbeat.membership.island import Island
from offbeat.transport.driver import Driver, Stream
from offbeat.weights.model_weights import BufferNames

MAX_NOTICES: Final = 100

LOGGER: Final = logging.getLogger("offbeat")

UNSCALED: Final = partial(float, 1)
"""By what factor gradients are scaled where there is no GradScaler."""


class Notices:
    """What a user should know of one session: kept for the record, logged, and, where it changes
    what the run means, issued as a Python warning. Any thread may add a notice.

    Args:
        rank: this rank, which log records name.

    Attributes:
        kept: the first notices, at most 100, in order.
        due: Python warnings that are still to be issued.
    """

    def __init__(self, rank: int) -> None:
        self.kept: list[str] = []
        self._rank = rank
        self._warned: set[str] = set()
        self.due: list[str] = []

    def inform(self, remark: str) -> None:
        """Say what was chosen or counted, where all goes as it should."""
        self._add(remark, logging.INFO)

    def notify(self, remark: str) -> None:
        """Say what went another way than it was asked for."""
        self._add(remark, logging.WARNING)

    def warn(self, remark: str) -> None:
        """Say what changes the meaning of the run, the same words once a session."""
        if remark in self._warned:
            return
        self._warned.add(remark)
        self._add(remark, logging.WARNING)
        self.due.append(remark)

    def issue_warnings(self) -> None:
        """Issue the Python warnings that are due. For the trainer's thread, between two events.

        They wait for this because a filter may turn a warning into an exception: in a thread of the
        library, or in the middle of an exchange, that would leave the peers waiting.
        """
        while self.due:
            warnings.warn(self.due.pop(0), OffbeatWarning, stacklevel=2)

    def _add(self, remark: str, level: int) -> None:
        if len(self.kept) < MAX_NOTICES:
            self.kept.append(remark)
        LOGGER.log(level, "rank %d: %s", self._rank, remark)


class SharesOut(Protocol):
    """Gives each rank its batch of each step.

    Attributes:
        asked: how many samples the user wants in a batch, by rank.
        batch_sizes: how many are in one now, by rank; together as many as are asked for.
        place: how many epochs, and batches of the one under way, it has given out.
    """

    @property
    def asked(self) -> Sequence[int]: ...

    @property
    def batch_sizes(self) -> Sequence[int]: ...

    @property
    def place(self) -> tuple[int, int]: ...

    def share_out(self, batch_sizes: Sequence[int]) -> None:
        """Let batches have these sizes from the next one on. Collective: called at the same place,
        with the same sizes, which add up to what is asked for.
        """


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a strategy's callbacks work with.

    Attributes:
        parameters: the model's trainable parameters by name, in the model's order; the same on all
            ranks.
        driver: carries collectives out.
        grad_scale: by what factor gradients are scaled at the moment (AMP); 1.0 without a scaler.
        has_scaler: whether a GradScaler decides which steps are skipped.
        clips_by_value: whether the loop clips gradients by value, which is too late where entries
            were selected before.
        buffers: the model's persistent buffers by name, at the moment of the call: modules may
            replace them.
        chosen_buffers: which of them are averaged, as chosen while all ranks held the same; None:
            they hold the same now.
        shared: the parameters and buffers that are to be the same on all ranks at first, frozen
            ones among them.
        optimizer: the user's, for its state; None where nobody needs it.
        model: the root module, for callbacks that look into layers; None where nobody needs it.
        new_stream: a fresh stream of channels; callbacks take theirs while they are built, in the
            same order on all ranks.
        notices: tell the user what was chosen or went another way than it was asked for: in
            `Session.notices`, the record and the report, and as log records.
        enter: makes a host a member of the run's generations, for strategies that survive
            death. Collective.
        own_store: a connection to the run's store for the caller alone; in a world of one, a store
            that nobody shares.
        count: wraps a driver that a thread of its own uses, so that its traffic is counted with the
            session's.
        record_wait: counts a wait of the training thread, from when to when on the monotonic clock.
        on_merge: what the user's loop wants called for each further mega-batch that is in this
            rank's model.
        island: the ranks that hold this replica together; parameters are this rank's shards, and
            the driver connects those who have the same ones.
        waited_s: seconds for which this rank's trainer has waited for its peers so far.
        resting: inside, no peer waits for the end of this rank's step.
        switch: lets a strategy take the place of the one at work, for a callback that stays, after
            so many steps of the run. Collective: called after the same step on all ranks, and after
            each further one until it returns True. What is owed is sent in the step between, and
            models that differ become one first.
        training_loader: the loader that training takes its batches from, if the session has one
            such and ranks take their steps together; None otherwise. The same on all ranks whose
            loops are alike.
        returns: whether this worker joins a run under way.
        num_steps: how many the run has made when callbacks are built.
        bucket_mib: the size of a bucket of gradients, > 0; None: as the strategy likes.
        replica_check_interval: as of `offbeat.attach`.
    """

    parameters: Mapping[str, torch.nn.Parameter]
    driver: Driver
    new_stream: Callable[[], Stream]
    notices: Notices
    grad_scale: Callable[[], float] = UNSCALED
    has_scaler: bool = False
    clips_by_value: Callable[[], bool] = bool
    buffers: Callable[[], Mapping[str, torch.Tensor]] = dict
    chosen_buffers: BufferNames | None = None
    shared: Sequence[torch.Tensor] = ()
    optimizer: torch.optim.Optimizer | None = None
    model: torch.nn.Module | None = None
    enter: Callable[[GenerationHost], Generations | None] = lambda host: None
    own_store: Callable[[], Store] = HashStore
    count: Callable[[Driver], Driver] = lambda driver: driver
    record_wait: Callable[[float, float], None] = lambda begin_s, end_s: None
    on_merge: Sequence[Callable[[], object]] = ()
    island: Island = field(default_factory=Island)
    waited_s: Callable[[], float] = float
    resting: Callable[[], AbstractContextManager[None]] = nullcontext
    switch: Callable[[Any, Callback, int], bool] = lambda strategy, stays, num_steps: True
    training_loader: Callable[[], SharesOut | None] = lambda: None
    returns: bool = False
    num_steps: int = 0
    bucket_mib: float | None = None
    replica_check_interval: int = 0


def stream_counter() -> Callable[[], Stream]:
    """A source of streams, numbered from 0."""
    numbers = count()
    return lambda: Stream(next(numbers))
