"""All ranks' weights, averaged after some of the local steps.

`PeriodicAverage` is put together from four objects, each of which may be another:

    schedule    after which steps                 `GrowingPeriod`, or another `AveragingSchedule`
    peers       with whom                         `Everyone`
    codec       how changes travel                a `WeightCodec`; None: weights travel whole
    rule        what becomes of the mean          `TakeMean`, `averaging.outer.OuterOptimizer`
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from typing_extensions import override

from offbeat.callbacks.callback import Callback
from offbeat.codec.option_value import OptionValue
from offbeat.codec.residual import ErrorFeedback
from offbeat.codec.tally import Tally
from offbeat.codec.topk_codec import WeightCodec
from offbeat.collectives.dense import gather_values
from offbeat.collectives.topk_allgather import topk_sum
from offbeat.errors import CheckpointError, ConfigError
from offbeat.gradients.buckets import Bucket, make_buckets
from offbeat.gradients.reductions import ExchangePlan, SparseReduction
from offbeat.transport.driver import Driver, Pending, Stream
from offbeat.transport.operations import Collective
from offbeat.weights.model_weights import ModelWeights, average_, non_finite_weights
from offbeat.weights.optimizer_state import average_optimizer_state_

T = TypeVar("T")


class AveragingSchedule(OptionValue):
    """After how many local steps there is an average: the same on every rank.

    What a schedule remembers is not kept in it but handed in and out as its state, a few numbers by
    name that are the same on every rank. `PeriodicAverage` keeps and checkpoints them.
    """

    measures_drift: ClassVar[bool] = False
    """Whether `after_average` needs to know how far ranks had moved apart, which costs a copy of
    the parameters, two passes over them and a small message.
    """

    def initial_state(self) -> Mapping[str, float]:
        """The state before the first step. Its keys are all keys there are."""
        return {}

    @abstractmethod
    def period(self, num_steps: int, state: Mapping[str, float]) -> int:
        """How many steps lie between the last average and the next one, >= 1. Asked after each
        step.

        Args:
            num_steps: local ones so far.
            state: as `initial_state` or `after_average` gave it.
        """

    def after_average(
        self, state: Mapping[str, float], *, drift: float, lr: float
    ) -> Mapping[str, float]:
        """The state after an average.

        Args:
            state: before it.
            drift: mean over ranks of the squared distance of their parameters from the mean; 0
                unless `measures_drift`.
            lr: the learning rate of the optimizer's first group, mean over ranks; likewise.
        """
        return state


class GrowingPeriod(AveragingSchedule):
    """After every `length` local steps, and at first more often.

    Args:
        length: local steps between averages, >= 1.
        warmup: the local steps in which the period grows by one, from 1 on, >= 0; 0: it is `length`
            from the beginning.
    """

    def __init__(self, length: int, *, warmup: int = 0) -> None:
        self.length, self.warmup = length, warmup

    @override
    def period(self, num_steps: int, state: Mapping[str, float]) -> int:
        if not self.warmup:
            return self.length
        return min(self.length, max(1, num_steps // self.warmup))


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


class EncodedChanges:
    """The mean over ranks of how far their parameters have moved, written by a codec. What it drops
    is owed, as what is not sent of gradients is.

    Args:
        anchor: from where, by name: float32 or float64.
        codec: how changes travel.
        peers: who takes part.
    """

    def __init__(
        self, anchor: Mapping[str, torch.nn.Parameter], codec: WeightCodec, peers: Everyone
    ) -> None:
        self._rank = peers.driver.rank
        self._buckets = make_buckets(anchor, cap_bytes=None)
        self.reductions = [_reduction(bucket, codec, peers) for bucket in self._buckets]

    def mean(self, changes: Iterator[torch.Tensor], *, weight: float) -> list[torch.Tensor]:
        """The weighted mean, with the same bits on every rank, in the order of `changes`.
        Collective.

        Args:
            changes: of each parameter.
            weight: this rank's, >= 0; over all ranks the sum is positive.

        Raises:
            NonFiniteError: some rank's changes hold an infinity or a NaN; every rank raises.
        """
        places = {
            index: (bucket, position)
            for bucket in self._buckets
            for position, index in enumerate(bucket.indices)
        }
        for index, change in enumerate(changes):
            bucket, position = places[index]
            bucket.copy_in(position, change)
        for bucket, reduction in zip(self._buckets, self.reductions, strict=True):
            used = np.ones(len(bucket.indices), dtype=np.bool_)
            tally = Tally(weight=weight, num_nonfinite=0, num_failed=0, used=used)
            reduction.launch(bucket, tally, grad_scale=1.0)
        tallies = [reduction.wait() for reduction in self.reductions]
        if not all(tally.good for tally in tallies):
            for reduction in self.reductions:
                reduction.discard()
            raise non_finite_weights(self._rank)
        for bucket, reduction in zip(self._buckets, self.reductions, strict=True):
            bucket.flat = reduction.commit()
        return [bucket.views[position] for _, (bucket, position) in sorted(places.items())]


def _reduction(bucket: Bucket, codec: WeightCodec, peers: Everyone) -> SparseReduction:
    flat, n = bucket.flat, bucket.num_elements
    plan = ExchangePlan(k=max(1, round(codec.density * n)), collective=topk_sum)
    return SparseReduction(
        bucket,
        ErrorFeedback(
            n, dtype=flat.dtype, device=flat.device, selector=codec.selector, decay=codec.decay
        ),
        driver=peers.driver,
        stream=peers.stream,
        wire=codec.wire(n, num_parameters=len(bucket.indices), dtype=np.dtype(str(flat.dtype)[6:])),
        plan=lambda: plan,
    )


class TakeMean:
    """What becomes of the mean: it takes the place of the parameters.

    Attributes:
        anchor: where the last average left the parameters, by name; empty where nobody needs it.
    """

    anchor: Mapping[str, torch.nn.Parameter]

    def __init__(self) -> None:
        self.anchor = {}

    def begin(self) -> None:
        """Ranks are about to move apart for the first time."""

    def changes(self) -> Iterator[torch.Tensor]:
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
        codec: how changes of parameters travel; None: the parameters travel, whole.
        rule: what is done with the mean.
        start_step: steps before the first local one, >= 0; until then all ranks hold the same.
        optimizer: the user's.
        averages_state: whether the optimizer's state is averaged with the weights; else it stays
            local.
        weight: this rank's in the mean.
        notify: tells the user what of the optimizer's state is not averaged.

    Attributes:
        rule: as given; its `anchor` is where the last average left the weights.

    Raises:
        ConfigError: there is a codec, and `rule` keeps no anchor.
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
        start_step: int = 0,
        optimizer: torch.optim.Optimizer | None = None,
        averages_state: bool = False,
        weight: float = 1.0,
        notify: Callable[[str], None] = lambda remark: None,
    ) -> None:
        self.rule = rule or TakeMean()
        self._weights, self._schedule, self._peers = weights, schedule, peers
        self._codec = None
        if codec is not None:
            self.rule.changes()
            self._codec = EncodedChanges(self.rule.anchor, codec, peers)
        self._start_step = self._averaged_at_step = start_step
        self._optimizer, self._averages_state = optimizer, averages_state
        self._weight = weight
        self._notify, self._was_told = notify, False
        self._num_steps = self._num_averages = 0
        self._schedule_state = dict(schedule.initial_state())
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
        if self._num_steps <= self._start_step:
            return
        period = self._schedule.period(self._num_steps - self._start_step, self._schedule_state)
        if self._num_steps - self._averaged_at_step >= period:
            self.average()
            self._averaged_at_step = self._num_steps

    def average(self) -> None:
        """Average now. Collective."""
        peers, weight = self._peers, self._weight
        tensors, changes = self._weights.tensors(), None
        before = self._copies() if self._schedule.measures_drift else []
        if self._codec is not None:
            changes = self._codec.mean(self.rule.changes(), weight=weight)
            # Statistics travel as they are: a difference could take them out of their range.
            tensors = [tensors[place] for place in self._weights.positions_of_statistics()]
        if tensors:
            self._encode_s += average_(
                tensors, tensors, driver=peers.driver, stream=peers.stream, weight=weight
            )
        self._weights.average_counters_(peers.driver, peers.stream)
        if before:
            self._measure_drift(before, changes)
        begin_s = time.perf_counter()
        self.rule.merge_(changes)
        self._encode_s += time.perf_counter() - begin_s
        if self._averages_state and self._optimizer is not None:
            self._encode_s += average_optimizer_state_(
                self._optimizer,
                self._weights.parameters,
                driver=peers.driver,
                stream=peers.stream,
                weight=weight,
                notify=self._notify_once,
            )
        self._num_averages += 1

    def _copies(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self._weights.parameters.values()]

    def _measure_drift(
        self, before: Sequence[torch.Tensor], changes: Sequence[torch.Tensor] | None
    ) -> None:
        """Tell the schedule how far ranks were apart, in words that all of them hear alike."""
        means = (
            self._weights.parameters.values()
            if changes is None
            else map(torch.add, self.rule.anchor.values(), changes)
        )
        squared = sum(
            float((one.to(mean.dtype) - mean.detach()).abs().double().square().sum())
            for one, mean in zip(before, means, strict=True)
        )
        lr = 1.0 if self._optimizer is None else float(self._optimizer.param_groups[0]["lr"])
        measured = self._peers.launch(gather_values([squared, lr])).wait()
        drift, lr = np.mean(measured, axis=0).tolist()
        self._schedule_state = dict(
            self._schedule.after_average(self._schedule_state, drift=drift, lr=lr)
        )

    def _notify_once(self, remark: str) -> None:
        if not self._was_told:
            self._was_told = True
            self._notify(remark)

    def _begin(self) -> None:
        if self._num_steps >= self._start_step:
            self.rule.begin()

    @property
    def _reductions(self) -> list[SparseReduction]:
        return [] if self._codec is None else self._codec.reductions

    @override
    def counters(self) -> dict[str, float]:
        encode_s = self._encode_s + sum(reduction.encode_s for reduction in self._reductions)
        return {"exchanges": self._num_averages, "encode_s": encode_s}

    @override
    def state_dict(self) -> dict[str, dict[str, Any]]:
        state: dict[str, dict[str, Any]] = {
            "additive": {},
            "local": {},
            "replicated": {
                "num_steps": self._num_steps,
                "num_averages": self._num_averages,
                "averaged_at_step": self._averaged_at_step,
                **{f"schedule/{key}": value for key, value in self._schedule_state.items()},
                **self.rule.state(),
            },
        }
        for reduction in self._reductions:
            state["additive"] |= reduction.additive_state()
            state["local"] |= reduction.local_state()
        return state

    @override
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        saved = state["replicated"]
        if "averaged_at_step" not in saved:
            raise CheckpointError(
                "the state lacks 'averaged_at_step'; it was saved by another strategy"
            )
        owed = {k: v.shape for each in self._reductions for k, v in each.additive_state().items()}
        if owed != {key: value.shape for key, value in state["additive"].items()}:
            raise CheckpointError(
                "what is owed of changes was saved with another model or codec; resume with the"
                " same ones"
            )
        self.rule.load(saved)
        for reduction in self._reductions:
            reduction.load(state["additive"], state["local"])
        # A schedule that the run was not saved with begins anew.
        self._schedule_state = {
            key: float(saved.get(f"schedule/{key}", value))
            for key, value in self._schedule.initial_state().items()
        }
        self._num_steps, self._num_averages, self._averaged_at_step = (
            int(saved[key]) for key in ("num_steps", "num_averages", "averaged_at_step")
        )

    @override
    def close(self) -> None:
        """The weights stay as they are: the user's."""
