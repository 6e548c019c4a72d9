"""All ranks' weights, averaged after some of the local steps.

`PeriodicAverage` is put together from four objects, each of which may be another:

    schedule    after which steps                 `GrowingPeriod`
    peers       with whom                         `Everyone`
    codec       how tensors travel                `Dense`
    rule        what becomes of their mean        `TakeMean`, `averaging.outer.OuterOptimizer`
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from typing_extensions import override

from offbeat.callbacks.callback import Callback
from offbeat.errors import CheckpointError, ConfigError
from offbeat.transport.driver import Driver, Pending, Stream
from offbeat.transport.operations import Collective
from offbeat.weights.model_weights import ModelWeights, average_
from offbeat.weights.optimizer_state import average_optimizer_state_

T = TypeVar("T")


class AveragingSchedule(Protocol):
    """After which optimizer steps there is an average: the same on every rank."""

    @property
    def start_step(self) -> int:
        """Steps before the first local one; until then all ranks hold the same weights."""
        ...

    def is_due(self, num_steps: int, last: int) -> bool:
        """Whether there is an average after `num_steps`, where the last one was after `last`."""
        ...

    def last(self, num_steps: int) -> int:
        """After how many of `num_steps` steps the last average was; `start_step`: none was."""
        ...


@dataclass(frozen=True, kw_only=True)
class GrowingPeriod:
    """After every `period` steps from `start_step` on, and at first more often.

    Attributes:
        period: local steps between averages, >= 1.
        warmup: the local steps in which the period grows by one, from 1 on, >= 0; 0: it is `period`
            from the beginning.
        start_step: steps before the first local one, >= 0.

    >>> growing = GrowingPeriod(period=4, warmup=2)
    >>> [growing.last(n) for n in range(11)]
    [0, 1, 2, 3, 3, 5, 5, 5, 5, 9, 9]
    """

    period: int
    warmup: int = 0
    start_step: int = 0

    def is_due(self, num_steps: int, last: int) -> bool:
        period, num_local = self.period, num_steps - self.start_step
        if self.warmup:
            period = min(period, max(1, num_local // self.warmup))
        return num_steps - last >= period

    def last(self, num_steps: int) -> int:
        found = self.start_step
        for step in range(self.start_step + 1, num_steps + 1):
            if self.is_due(step, found):
                found = step
        return found


@dataclass(frozen=True)
class Everyone:
    """All ranks take part; with whom each of them averages, a collective may narrow down.

    Attributes:
        driver: carries collectives out.
        stream: their channels.
    """

    driver: Driver
    stream: Stream

    def launch(self, work: Collective[T]) -> Pending[T]:
        """Begin `work`. All of them do so in the same order."""
        return self.driver.launch(work, self.stream.next())


class WeightCodec(Protocol):
    """How tensors travel, and come back as their mean.

    Attributes:
        of_changes: whether it is for changes alone, because it drops some of what it is given and
            adds that to what it is given next; else it is given the weights.
    """

    of_changes: ClassVar[bool]

    def mean_(self, tensors: Sequence[torch.Tensor], peers: Everyone, *, weight: float) -> float:
        """Replace `tensors` by their weighted mean over `peers`, with the same bits on each.
        Collective.

        Args:
            tensors: of the same shapes and types on all ranks.
            peers: with whom.
            weight: this rank's, >= 0; over all ranks the sum is positive.

        Returns:
            Seconds spent on laying vectors out and writing results, without the waiting.

        Raises:
            NonFiniteError: this rank's tensors hold an infinity or a NaN; nothing has been sent.
        """
        ...

    def state(self) -> Mapping[str, Any]:
        """What this rank still owes, as entries of `CallbackState` whose sum over ranks matters."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state`."""
        ...


class Dense:
    """Tensors travel whole, in float32 or float64."""

    of_changes: ClassVar[bool] = False

    def mean_(self, tensors: Sequence[torch.Tensor], peers: Everyone, *, weight: float) -> float:
        driver, stream = peers.driver, peers.stream
        return average_(tensors, tensors, driver=driver, stream=stream, weight=weight)

    def state(self) -> Mapping[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """It owes nothing."""


class TakeMean:
    """What becomes of the mean: it takes the place of the parameters.

    Attributes:
        anchor: where the last average left the parameters, by name; empty where nobody needs it.
    """

    anchor: Mapping[str, torch.Tensor]

    def __init__(self) -> None:
        self.anchor = {}

    def begin(self) -> None:
        """Ranks are about to move apart for the first time."""

    def changes(self) -> list[torch.Tensor]:
        """How far each parameter has moved from the anchor, for codecs that write changes."""
        raise ConfigError(
            "a codec that drops something of what it sends needs a rule that keeps an anchor;"
            " pass outer, such as functools.partial(torch.optim.SGD, lr=1.0)"
        )

    def merge_(self, changes: Sequence[torch.Tensor] | None) -> None:
        """The parameters hold the mean; or it is the anchor plus the mean of `changes`."""

    def state(self) -> dict[str, Any]:
        """What is the same on every rank."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state`; other keys are ignored."""


class PeriodicAverage(Callback):
    """After the optimizer steps that `schedule` says, replaces the weights by what `rule` makes of
    their mean.

    Args:
        weights: what is averaged.
        schedule: after which steps.
        peers: with whom.
        codec: how tensors travel.
        rule: what is done with the mean.
        optimizer: whose state is averaged with the weights; None: it stays local.
        weight: this rank's in the mean.
        notify: tells the user what of the optimizer's state is not averaged.

    Attributes:
        rule: as given; its `anchor` is where the last average left the weights.

    Raises:
        ConfigError: `codec` writes changes, and `rule` keeps no anchor.
    """

    state_key: ClassVar[str] = "periodic_average"

    def __init__(
        self,
        weights: ModelWeights,
        *,
        schedule: AveragingSchedule,
        peers: Everyone,
        codec: WeightCodec | None = None,
        rule: TakeMean | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        weight: float = 1.0,
        notify: Callable[[str], None] = lambda remark: None,
    ) -> None:
        self.rule = rule or TakeMean()
        self._weights, self._schedule, self._peers = weights, schedule, peers
        self._codec: WeightCodec = codec or Dense()
        if self._codec.of_changes:
            self.rule.changes()
        self._optimizer = optimizer
        self._weight = weight
        self._notify, self._was_told = notify, False
        self._num_steps = self._num_averages = 0
        self._averaged_at_step = schedule.start_step
        self._encode_s = 0.0

    @override
    def averaging_weight(self) -> float:
        return self._weight

    @override
    def replicas_agree(self) -> bool:
        return self._num_steps <= self._averaged_at_step

    @override
    def on_backward_begins(self, *, synchronised: bool) -> None:
        """The anchor is taken as late as can be: the user may load weights after attaching."""
        self._begin()

    @override
    def on_before_step(self) -> None:
        self._begin()

    @override
    def on_after_step(self) -> None:
        self._num_steps += 1
        if self._schedule.is_due(self._num_steps, self._averaged_at_step):
            self.average()
            self._averaged_at_step = self._num_steps

    def average(self) -> None:
        """Average now. Collective."""
        peers, weight = self._peers, self._weight
        tensors, changes = self._weights.tensors(), None
        if self._codec.of_changes:
            # Statistics travel as they are: a difference could take them out of their range.
            begin_s = time.perf_counter()
            changes = self.rule.changes()
            statistics = [tensors[place] for place in self._weights.positions_of_statistics()]
            self._encode_s += time.perf_counter() - begin_s
            self._encode_s += self._codec.mean_(changes, peers, weight=weight)
            tensors = statistics
        if tensors:
            codec = Dense() if changes is not None else self._codec
            self._encode_s += codec.mean_(tensors, peers, weight=weight)
        self._weights.average_counters_(peers.driver, peers.stream)
        begin_s = time.perf_counter()
        self.rule.merge_(changes)
        self._encode_s += time.perf_counter() - begin_s
        if self._optimizer is not None:
            self._encode_s += average_optimizer_state_(
                self._optimizer,
                self._weights.parameters,
                driver=peers.driver,
                stream=peers.stream,
                weight=weight,
                notify=self._notify_once,
            )
        self._num_averages += 1

    def _notify_once(self, remark: str) -> None:
        if not self._was_told:
            self._was_told = True
            self._notify(remark)

    def _begin(self) -> None:
        if self._num_steps >= self._schedule.start_step:
            self.rule.begin()

    @override
    def counters(self) -> dict[str, float]:
        return {"exchanges": self._num_averages, "encode_s": self._encode_s}

    @override
    def state_dict(self) -> dict[str, dict[str, Any]]:
        counts = {"num_steps": self._num_steps, "num_averages": self._num_averages}
        owed = dict(self._codec.state())
        return {
            "replicated": {**counts, **self.rule.state()},
            **({"additive": owed} if owed else {}),
        }

    @override
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        saved = state["replicated"]
        if "num_steps" not in saved:
            raise CheckpointError("the state lacks 'num_steps'; it was saved by another strategy")
        self.rule.load(saved)
        self._codec.load(state.get("additive", {}))
        self._num_steps = int(saved["num_steps"])
        self._num_averages = int(saved["num_averages"])
        self._averaged_at_step = self._schedule.last(self._num_steps)

    @override
    def close(self) -> None:
        """The weights stay as they are: the user's."""
