"""A strategy at work on a model as the lab's worker sees it: offbeat's own through a session,
torch's as torch ships them.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from offbeat.parts.profile import StepProfile
from offbeat.session.session import Session, Stats
from offbeat.transport.wrappers import Arrival
from offbeat.transport.wrappers.delaying import Delivery


class Attached(ABC):
    """What a training loop needs, and what a record wants to know. Closes itself as a context
    manager.

    Attributes:
        module: to be called in the forward pass.
        optimizer: to be stepped.
        model: the task's own, which `module` may wrap.
        notices: remarks for the record.
    """

    model: nn.Module
    module: nn.Module
    optimizer: torch.optim.Optimizer
    notices: Sequence[str]

    def backward(self, loss: torch.Tensor) -> None:
        """The backward pass, with whatever exchange belongs to it."""
        loss.backward()

    @property
    @abstractmethod
    def stats(self) -> Stats:
        """This rank's totals so far."""

    @abstractmethod
    def take_arrivals(self) -> list[Arrival]:
        """When this rank came to each collective since the last call."""

    @abstractmethod
    def take_ready_at_s(self) -> float | None:
        """When this rank first stood still for others since the last call, on the
        monotonic clock.
        """

    def take_profile(self) -> StepProfile | None:
        """What the strategy did within the step that has just ended, if it is one that was looked
        at closely.
        """
        return None

    @property
    def averages_alone(self) -> bool:
        """Whether `averaged_model` is no collective, so that a rank calls it when it likes."""
        return False

    @property
    def averaging_weight(self) -> float:
        """This rank's weight in the mean of all ranks' models."""
        return 1.0

    @property
    def start_step(self) -> int:
        """The step at which this rank came in: 0 but for one that has come back."""
        return 0

    def finish(self) -> None:  # noqa: B027 - ranks that keep step finish together
        """This rank takes no more steps. Returns when no living rank does."""

    def averaged_model(self) -> nn.Module:
        """The model to evaluate: where replicas differ on purpose, their mean. Collective unless
        `averages_alone`.
        """
        return self.model

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps besides model and optimizer."""

    def close(self) -> None:  # noqa: B027 - nothing to give back in most
        """Give back what was taken."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class InSession(Attached):
    """A strategy of offbeat's. `session` is open until this is closed."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, session: Session
    ) -> None:
        self.model = self.module = model
        self.optimizer = optimizer
        self.session = session
        self.notices = session.notices

    @property
    def stats(self) -> Stats:
        return self.session.stats

    def take_arrivals(self) -> list[Arrival]:
        return self.session.take_arrivals()

    def take_ready_at_s(self) -> float | None:
        return self.session.take_ready_at_s()

    def take_profile(self) -> StepProfile | None:
        return self.session.take_profile()

    @property
    def averages_alone(self) -> bool:
        return self.session.averages_alone

    @property
    def averaging_weight(self) -> float:
        return self.session.averaging_weight

    @property
    def start_step(self) -> int:
        return self.session.start_step

    def finish(self) -> None:
        self.session.finish()

    def averaged_model(self) -> nn.Module:
        return (
            self.session.averaged_model() if self.session.strategy.replicas_differ else self.model
        )

    def state_dict(self) -> dict[str, Any]:
        return self.session.state_dict()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.session.__exit__(kind, error, trace)


class Meter:
    """Counts what one of torch's strategies does, from inside its hooks.

    Bytes are those of a ring, which is what offbeat's transport counts for dense collectives too.

    Args:
        world_size: number of ranks.
        delay: how long a delivery occupies this rank's link, in seconds, where a slow network is
            imitated in user space; None elsewhere.
    """

    def __init__(
        self, world_size: int, *, rank: int = 0, delay: Callable[[Delivery], float] | None = None
    ) -> None:
        self.world_size = world_size
        self._rank = rank
        self._delay = delay
        self._link_free_s = 0.0
        self.steps = self.messages_sent = self.bytes_sent = 0
        self.encode_s = self.wait_s = 0.0
        self._arrivals: list[Arrival] = []
        self._ready_at_s: float | None = None
        self._launched_at_s: float | None = None
        self._reducing = False

    def reduced(self, num_bytes: int, num_collectives: int = 1) -> None:
        """All-reduces of `num_bytes` altogether were begun."""
        hops = self.world_size - 1
        share, num_messages = (
            -(-2 * hops * num_bytes // self.world_size),
            2 * hops * num_collectives,
        )
        self.bytes_sent += share
        self.messages_sent += num_messages
        self._reducing = True
        if self._delay is not None:
            delivery = Delivery(
                sender=self._rank, receiver=None, num_bytes=share, num_messages=num_messages
            )
            self._link_free_s = max(time.monotonic(), self._link_free_s) + self._delay(delivery)

    def hold_back(self) -> None:
        """Return when the imitated link has carried everything counted so far."""
        time.sleep(max(0.0, self._link_free_s - time.monotonic()))

    def launched(self, begun_s: float, channel: int) -> None:
        """A hook was called at `begun_s` and returns now; what it began, if anything, is awaited
        with the backward pass.
        """
        now_s = time.monotonic()
        self.encode_s += now_s - begun_s
        if self._reducing:
            self._launched_at_s = now_s
            self._arrivals.append(Arrival(self.steps, channel, "AllReduce", begun_s, 0.0))
        self._reducing = False

    def backward_done(self) -> None:
        """The backward pass is over; since the last hook returned, this rank had only waited."""
        if self._launched_at_s is not None:
            self.hold_back()
            self.waited(self._launched_at_s)
        self._launched_at_s = None

    def waited(self, since_s: float) -> None:
        """This rank stood still from `since_s` until now."""
        now_s = time.monotonic()
        self.wait_s += now_s - since_s
        self._reducing = False
        if self._ready_at_s is None:
            self._ready_at_s = since_s
        self._arrivals = [
            arrival if arrival.waited_s else arrival._replace(waited_s=now_s - arrival.arrived_at_s)
            for arrival in self._arrivals
        ]

    def take_arrivals(self) -> list[Arrival]:
        taken, self._arrivals = self._arrivals, []
        return taken

    def take_ready_at_s(self) -> float | None:
        taken, self._ready_at_s = self._ready_at_s, None
        return taken


class Metered(Attached):
    """One of torch's strategies, with a meter in its hooks."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        meter: Meter,
        notices: Sequence[str] = (),
    ) -> None:
        self.module = module
        self.model = getattr(module, "module", module)  # DDP holds the model that it wraps
        self.optimizer = optimizer
        self.meter = meter
        self.notices = list(notices)
        inner = getattr(
            optimizer, "optim", optimizer
        )  # an optimizer that wraps another one has no hooks of its own
        self._counter = inner.register_step_post_hook(self._count_step)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.meter.backward_done()

    @property
    def stats(self) -> Stats:
        meter = self.meter
        return Stats(
            steps=meter.steps,
            exchanges=meter.steps,
            skipped_steps=0,
            bytes_sent=meter.bytes_sent,
            bytes_received=meter.bytes_sent,
            messages_sent=meter.messages_sent,
            wait_s=meter.wait_s,
            encode_s=meter.encode_s,
        )

    def take_arrivals(self) -> list[Arrival]:
        return self.meter.take_arrivals()

    def take_ready_at_s(self) -> float | None:
        return self.meter.take_ready_at_s()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._counter.remove()

    def _count_step(self, *_: object) -> None:
        self.meter.steps += 1
