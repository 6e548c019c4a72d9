"""What a strategy is: a frozen description that builds parts, and the events its parts can act on.

A session dispatches events and does nothing else with parts. A part implements the events it needs,
one protocol each, and the session asks with `isinstance` once, when it is attached. The order
within a training step:

    batch claimed -> backward begins -> gradient ready (for each parameter) -> backward done ->
    before step -> before update -> after step

where batches are claimed only from a loader of the session's, or where the user weighs them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

import torch
from torch._C._distributed_c10d import HashStore, Store

from offbeat.kfac.exchange.spans import Profile
from offbeat.membership.generations import Generations, Host
from offbeat.transport.driver import Driver, Stream
from offbeat.weights.model_weights import ModelWeights

PartState: TypeAlias = dict[str, Any]
"""A part's state. At most three keys, which say what becomes of it when the number of workers
changes:

- "additive": tensors by name whose sum over ranks matters (residuals); shared out anew, the sum
  preserved;
- "replicated": the same on every rank; copied;
- "local": a rank's own; handed to the rank of the same number modulo the old world size.
"""


@runtime_checkable
class Part(Protocol):
    """What every part must do."""

    def state_dict(self) -> PartState:
        """Everything a resumed run needs to go on as if it had never stopped. Tensors may be live
        ones.
        """
        ...

    def load_state_dict(self, state: PartState) -> None:
        """Inverse of `state_dict`. Raises `CheckpointError` when the state does not fit."""
        ...

    def close(self) -> None:
        """Put back whatever the part changed in the user's objects."""
        ...


@runtime_checkable
class OnBatchClaimed(Protocol):
    def on_batch_claimed(self, num_samples: int) -> None:
        """The coming optimizer step is taken with so many further samples."""
        ...


@runtime_checkable
class OnBackwardBegins(Protocol):
    def on_backward_begins(self, *, synchronised: bool) -> None:
        """An outermost backward pass begins and has accumulated nothing; `synchronised` is False
        inside `no_sync`.
        """
        ...


@runtime_checkable
class OnGradientReady(Protocol):
    def on_gradient_ready(self, index: int, *, synchronised: bool) -> None:
        """Parameter `index` has its gradient of this backward pass."""
        ...


@runtime_checkable
class OnBackwardDone(Protocol):
    def on_backward_done(self, *, synchronised: bool) -> None:
        """The backward pass is over. What this raises comes out of the user's `backward()`."""
        ...


@runtime_checkable
class OnBackwardFailed(Protocol):
    def on_backward_failed(self) -> None:
        """An earlier backward pass ended in an exception on this rank, and its peers may be
        waiting.
        """
        ...


@runtime_checkable
class OnJoin(Protocol):
    def on_join(self) -> None:
        """This rank takes part in its peers' exchange although it ran no backward pass."""
        ...


@runtime_checkable
class OnBeforeStep(Protocol):
    def on_before_step(self) -> None:
        """`optimizer.step()` has been called."""
        ...


@runtime_checkable
class OnClosure(Protocol):
    def on_closure(self) -> None:
        """`optimizer.step(closure)` has been called, which runs the backward pass itself; there is
        no `on_before_step`.
        """
        ...


@runtime_checkable
class OnBeforeUpdate(Protocol):
    def on_before_update(self) -> None:
        """Gradients are final: all parts have acted on `on_before_step`, or the closure given to
        `step()` has returned.
        """
        ...


@runtime_checkable
class OnAfterStep(Protocol):
    def on_after_step(self) -> None:
        """`optimizer.step()` is about to return."""
        ...


@runtime_checkable
class OnFinish(Protocol):
    def on_finish(self) -> None:
        """This rank takes no more steps. Returns when no living rank does."""
        ...


@runtime_checkable
class OnAbandon(Protocol):
    def on_abandon(self, reason: str) -> None:
        """This rank has failed, and `close` follows: nobody is to wait for it."""
        ...


@runtime_checkable
class KnowsMean(Protocol):
    """A part that can take the mean of all living ranks' models, over connections of its own.

    Attributes:
        start_step: the step at which this rank came in, for one that joined a run which was under
            way; else 0.
        averages_alone: whether it does so without the other ranks' trainers.
    """

    start_step: int
    averages_alone: bool

    def average_into(self, weights: ModelWeights) -> None:
        """Write the mean into `weights`, a copied model's. Collective unless `averages_alone`."""
        ...


@runtime_checkable
class HasCounters(Protocol):
    def counters(self) -> Mapping[str, float]:
        """Totals so far, summed over parts: "exchanges", "skipped_steps", "encode_s" (seconds)."""
        ...


@runtime_checkable
class HasWeight(Protocol):
    def averaging_weight(self) -> float:
        """This rank's weight in the mean of all ranks' models; 1.0 where no part says otherwise."""
        ...


@runtime_checkable
class HasProfile(Protocol):
    def take_profile(self) -> Profile | None:
        """The step that has just ended, if it is one that was looked at closely."""
        ...


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """What a strategy's parts work with.

    Attributes:
        parameters: the model's trainable parameters by name, in the model's order; the same on all
            ranks.
        driver: carries collectives out.
        grad_scale: by what factor gradients are scaled at the moment (AMP); 1.0 without a scaler.
        has_scaler: whether a GradScaler decides which steps are skipped.
        buffers: the model's persistent buffers by name, at the moment of the call: modules may
            replace them.
        optimizer: the user's, for its state; None where nobody needs it.
        model: the root module, for parts that look into layers; None where nobody needs it.
        new_stream: a fresh stream of channels; parts take theirs while they are built, in the same
            order on all ranks.
        notify: puts a remark where the user will see it, in the record and the report.
        enter: makes a part's host a member of the run's generations, for strategies that survive
            death. Collective.
        own_store: a connection to the run's store for the caller alone; in a world of one, a store
            that nobody shares.
        count: wraps a driver that a thread of its own uses, so that its traffic is counted with the
            session's.
        stood_still: counts a wait of the training thread, from when to when on the monotonic clock.
    """

    parameters: Mapping[str, torch.nn.Parameter]
    driver: Driver
    grad_scale: Callable[[], float]
    has_scaler: bool
    new_stream: Callable[[], Stream]
    notify: Callable[[str], None]
    buffers: Callable[[], Mapping[str, torch.Tensor]] = dict
    optimizer: torch.optim.Optimizer | None = None
    model: torch.nn.Module | None = None
    enter: Callable[[Host], Generations | None] = lambda host: None
    own_store: Callable[[], Store] = HashStore
    count: Callable[[Driver], Driver] = lambda driver: driver
    stood_still: Callable[[float, float], None] = lambda begin_s, end_s: None


def stream_counter() -> Callable[[], Stream]:
    """A source of streams, numbered from 0."""
    numbers = count()
    return lambda: Stream(next(numbers))


@dataclass(frozen=True, kw_only=True)
class Strategy(ABC):
    """A recipe. Subclasses are frozen keyword-only dataclasses that check their options in
    `__post_init__`.
    """

    name: ClassVar[str]
    survives_death: ClassVar[bool] = False
    """Whether the other workers go on when one dies."""
    replicas_differ: ClassVar[bool] = False
    """Whether the ranks' models are apart between steps, on purpose; `Session.averaged_model` is
    what they stand for.
    """

    def check(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027 - most go with everything
        """Raise `ConfigError` if the strategy cannot work with these. Runs before any
        communication.
        """

    def check_world(self, world_size: int) -> None:  # noqa: B027 - most go with any number
        """Raise `ConfigError` if the strategy cannot work with so many ranks. Runs before any
        communication.
        """

    @abstractmethod
    def build(self, workspace: Workspace) -> Sequence[Part]:
        """The parts, in the order in which they get events. Collective: all ranks build
        together.
        """
