"""One of torch's strategies at work: it is counted from inside its hooks, and looks to the lab like
a session of offbeat's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from offbeat.arithmetic.costs import LinkCost
from offbeat.callbacks.callback import Decision
from offbeat.session.events import inside_own_step
from offbeat.session.metrics import SessionObserver
from offbeat.session.session import Stats
from offbeat.transport.driver import Arrival


class CommunicationMeter:
    """Counts what one of torch's strategies does, from inside its hooks.

    Bytes are those of a ring, which is what offbeat's transport counts for dense collectives too.

    Args:
        world_size: number of ranks.
        link: what a message of this rank costs where a slow network is imitated in user space; None
            elsewhere.
    """

    def __init__(self, world_size: int, link: LinkCost | None = None) -> None:
        self.world_size = world_size
        self._link = link
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
        share = -(-2 * hops * num_bytes // self.world_size)
        num_messages = 2 * hops * num_collectives
        self.bytes_sent += share
        self.messages_sent += num_messages
        self._reducing = True
        if self._link is not None:
            took_s = self._link.time_s(num_messages=num_messages, num_bytes=share)
            self._link_free_s = max(time.monotonic(), self._link_free_s) + took_s

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


class NativeSession(AbstractContextManager["NativeSession"]):
    """What the lab asks of `offbeat.Session`, for one of torch's strategies. Closes itself as a
    context manager.

    Args:
        module: to be called in the forward pass; it may wrap the model.
        optimizer: to be stepped; it may wrap the user's.
        meter: is called from the strategy's hooks.

    Attributes:
        observers: hear of each step.
        replicas_differ: whether ranks' models differ between steps.
        averages_alone, averaged_without, averaging_weight, start_step, steps_behind: as of a
            session whose ranks keep step and begin together.
    """

    averages_alone = False
    replicas_differ: bool = False
    averaged_without: frozenset[int] = frozenset()
    steps_behind = 0
    averaging_weight = 1.0
    start_step = 0

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        meter: CommunicationMeter,
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.meter = meter
        self.notices: list[str] = []
        self.decisions: Sequence[Decision] = ()
        self.observers: list[SessionObserver] = []
        # An optimizer that wraps another one has no hooks of its own.
        inner = getattr(optimizer, "optim", optimizer)
        self._step_hook = inner.register_step_post_hook(self._count_step)

    @property
    def stats(self) -> Stats:
        """This rank's totals so far."""
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
        """When this rank came to each collective since the last call."""
        return self.meter.take_arrivals()

    def take_ready_at_s(self) -> float | None:
        """When this rank first waited for peers since the last call, on the monotonic clock."""
        return self.meter.take_ready_at_s()

    def resting(self) -> AbstractContextManager[None]:
        """Inside, no peer waits for the end of a step of this rank: none ever does."""
        return nullcontext()

    def clip_grad_norm_(self, max_norm: float) -> None:
        """Scale gradients down to at most `max_norm`, after the backward pass."""
        nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def finish(self) -> None:
        """This rank takes no more steps. Ranks that keep step finish together."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps besides model and optimizer: nothing."""
        return {}

    def close(self) -> None:
        """Give back what was taken."""
        self._step_hook.remove()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()

    def _count_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if inside_own_step(optimizer):
            return
        self.meter.steps += 1
        for observer in self.observers:
            observer.step_ended(self.meter.steps)
