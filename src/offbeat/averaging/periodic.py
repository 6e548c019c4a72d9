"""Weights, averaged after some of the local steps.

`PeriodicAverage` is put together from a schedule and an exchange, each of which may be another:

    schedule    after which steps                 `GrowingPeriod`, or another `AveragingSchedule`
    exchange    with whom, and what becomes of it `MeanOfAll`; `averaging.gossip.NeighbourMean`,
                                                  `PushSum` and `PairMean`;
                                                  `strategies.crossbow.CentralModel`;
                                                  `averaging.streaming.StreamingMean`;
                                                  `averaging.object_store.StoreMean`;
                                                  `averaging.members.MeanOfMembers`

and `MeanOfAll` from changes and a rule:

    changes     what travels of them              `EncodedChanges`; None: weights travel whole
    rule        what becomes of the mean          `TakeMean`, `averaging.outer.OuterOptimizer`,
                                                  `strategies.defsgd.KeepOwed`
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from offbeat.callbacks.callback import Callback, CallbackState
from offbeat.codec.device_copies import read_numbers
from offbeat.codec.option_value import OptionValue
from offbeat.codec.tally import Tally
from offbeat.codec.topk_codec import WeightCodec, another_codec
from offbeat.collectives.dense import gather_values
from offbeat.collectives.topk_allgather import clipped_sum, topk_sum
from offbeat.errors import CheckpointError
from offbeat.gradients.buckets import Bucket, make_buckets
from offbeat.gradients.coded_reduction import CodedReduction
from offbeat.gradients.optimizer_scaling import with_noise
from offbeat.gradients.reductions import (
    DenseReduction,
    ExchangePlan,
    Reduction,
    SparseReduction,
    WeightedGradient,
    wait_for,
)
from offbeat.membership.island import Island
from offbeat.transport.driver import Driver, Pending, Stream
from offbeat.transport.operations import Collective
from offbeat.weights.model_weights import ModelWeights, average_, non_finite_weights, real
from offbeat.weights.optimizer_state import average_optimizer_state_

T = TypeVar("T")


class Drift(NamedTuple):
    """How far ranks were apart before an average, as all of them know it.

    Attributes:
        squared: mean over ranks of the squared distance of their parameters from the mean.
        lr: the highest learning rate of the optimizer's groups, mean over ranks.
    """

    squared: float = 0.0
    lr: float = 1.0


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

    def after_average(self, state: Mapping[str, float], drift: Drift) -> Mapping[str, float]:
        """The state after an average.

        Args:
            state: before it.
            drift: nothing, unless `measures_drift`.
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
    """The mean over ranks of how far their parameters have moved, in float32 or float64. What does
    not travel is owed, as what is not sent of gradients is; to one that is frozen, until it trains
    again.

    Args:
        parameters: by name.
        reduce_by: says how the changes in a bucket travel, as `coded_reduction` does.
        peers: who takes part.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        reduce_by: Callable[[Bucket, Everyone], Reduction],
        peers: Everyone,
    ) -> None:
        self._rank, self._driver = peers.driver.rank, peers.driver
        self._names = tuple(parameters)
        parts = {name: real(parameter) for name, parameter in parameters.items()}
        wide = {
            name: torch.nn.Parameter(
                torch.empty_like(part, dtype=torch.promote_types(part.dtype, torch.float32))
            )
            for name, part in parts.items()
        }
        self._are_complex = [parameter.is_complex() for parameter in parameters.values()]
        self._buckets = make_buckets(wide, cap_bytes=None)
        for bucket in self._buckets:
            bucket.parameters = [  # which say whether they are frozen
                wide[name] if parameters[name].is_complex() else parameters[name]
                for name in bucket.names
            ]
        # They are under way at once.
        self.reductions = [
            reduce_by(bucket, replace(peers, stream=peers.stream.beside(place)))
            for place, bucket in enumerate(self._buckets)
        ]
        self._places = {
            index: (bucket, position)
            for bucket in self._buckets
            for position, index in enumerate(bucket.indices)
        }

    def launch(self, changes: Iterable[torch.Tensor], *, weight: float = 1.0) -> None:
        """Let `changes` of each parameter, in the model's order, leave, with this rank's
        `weight`, whose mean over ranks is 1. Collective.
        """
        for index, change in enumerate(changes):
            bucket, position = self._places[index]
            bucket.copy_in({position: real(change)})
        for bucket, reduction in zip(self._buckets, self.reductions, strict=True):
            used, owed = np.ones(len(bucket.indices), np.bool_), reduction.residual
            if owed is not None and not owed.is_meta:
                # Codes of few bits have no zero, and would move what has not moved.
                used = _have_any(bucket.views)
                still = [
                    position
                    for position in np.flatnonzero(~used).tolist()
                    if bucket.parameters[position].requires_grad
                ]
                waiting = bucket.views_of(owed)
                used[still] = _have_any([waiting[position] for position in still])
            # What is owed has its weight already, so that ranks count alike.
            tally = Tally(weight=1.0, num_nonfinite=0, num_failed=0, used=used)
            reduction.launch(WeightedGradient(bucket.flat, tally, weight, grad_scale=1.0))

    def go_on(self) -> None:
        """Answer what has come of the peers, without waiting for more."""
        for reduction in self.reductions:
            reduction.go_on()

    def mean(self) -> list[torch.Tensor]:
        """The mean of what `launch` let leave, with the same bits on every rank, in the order of
        `changes`.

        Raises:
            NonFiniteError: some rank's changes hold an infinity or a NaN; every rank raises.
        """
        if not all(tally.good for tally in wait_for(self.reductions)):
            self.discard()
            raise non_finite_weights(self._rank)
        for bucket, reduction in zip(self._buckets, self.reductions, strict=True):
            bucket.flat = reduction.commit()
        means = [bucket.views[position] for _, (bucket, position) in sorted(self._places.items())]
        return [
            torch.view_as_complex(mean.clone()) if is_complex else mean
            for mean, is_complex in zip(means, self._are_complex, strict=True)
        ]

    def discard(self) -> None:
        """Give up what `launch` let leave: it is as if it had not been called."""
        for reduction in self.reductions:
            reduction.discard()

    def owed(self) -> list[torch.Tensor]:
        """What of changes has not travelled yet, in the order of `changes`. Tensors are live."""
        owed = self.state()["additive"]
        return [owed[f"residual/{name}"] for name in self._names]

    @property
    def encode_s(self) -> float:
        """Seconds spent on codes, so far."""
        return sum(reduction.encode_s for reduction in self.reductions)

    def state(self) -> CallbackState:
        """What is owed, and what selection remembers."""
        local = {"world_size": self._driver.world_size}  # among members, of the last average
        state: CallbackState = {"additive": {}, "local": local, "replicated": {}}
        for reduction in self.reductions:
            state["additive"] |= reduction.additive_state()
            state["local"] |= reduction.local_state()
        return state

    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Inverse of `state`; of what is additive or local there may be other keys too. With
        another number of ranks than before the mean of what is owed is preserved, and not the sum,
        since the mean is what the model that all share is to move by. Raises `CheckpointError`.
        """
        owed = {key: value.shape for key, value in self.state()["additive"].items()}
        saved, local = state["additive"], state["local"]
        world_size = self._driver.world_size
        ratio = world_size / local.get("world_size", world_size)
        if any(key not in saved or saved[key].shape != shape for key, shape in owed.items()):
            raise another_codec()
        for reduction in self.reductions:
            reduction.load(saved, local)
            if reduction.residual is not None:
                reduction.residual.mul_(ratio)


def _have_any(tensors: Sequence[torch.Tensor]) -> NDArray[np.bool_]:
    """Which have an element that is not 0. The first ones of each mostly say so."""
    found = np.array(
        read_numbers([(each[:1] if each.dim() else each).any() for each in tensors]), np.bool_
    )
    zeros = np.flatnonzero(~found).tolist()
    found[zeros] = read_numbers([tensors[place].any() for place in zeros])
    return found


def coded_changes(
    parameters: Mapping[str, torch.nn.Parameter], codec: WeightCodec | None, peers: Everyone
) -> EncodedChanges | None:
    """Changes that travel by `codec`; None: there is none, and weights travel whole."""
    reduce_by = partial(coded_reduction, codec)
    return None if codec is None else EncodedChanges(parameters, reduce_by, peers)


def coded_reduction(codec: WeightCodec | None, bucket: Bucket, peers: Everyone) -> Reduction:
    """How changes travel that `codec` writes; None: as they are."""
    if codec is None:
        return DenseReduction(bucket, peers.driver, peers.stream)
    if codec.density == 1:
        values = codec.entries.values
        return CodedReduction(bucket, values, peers.driver, peers.stream, decay=codec.decay)
    collective = clipped_sum if codec.clip_to_median else topk_sum
    plan = ExchangePlan(k=max(1, round(codec.density * bucket.num_elements)), collective=collective)
    return SparseReduction(
        bucket,
        peers.driver,
        peers.stream,
        codec=codec.entries,
        plan=lambda: plan,
        decay=codec.decay,
    )


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

    def changes(self) -> Iterator[torch.Tensor]:
        """How far each parameter has moved from the anchor."""
        raise NotImplementedError

    def whole(self) -> list[torch.Tensor]:
        """Parameters that are in no `changes`: they travel as they are, and become the mean."""
        return []

    def merge_(self, changes: Sequence[torch.Tensor] | None) -> None:
        """The parameters hold the mean; or it is the anchor plus the mean of `changes`."""

    def state(self) -> dict[str, Any]:
        """What is the same on every rank."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state`; other keys are ignored."""


class WeightExchange:
    """With whom weights are averaged, and what becomes of that.

    Args:
        rule: what is done with the mean; None: it takes the place of the parameters.
        changes: of parameters from the anchor of `rule`, which travel; None: the parameters do,
            whole.

    Attributes:
        rule: as given.
        weight: this rank's in the mean of all models.
        encode_s: seconds spent on laying vectors out and writing results, without the waiting.
        measures_drift: whether `drift` is wanted.
        drift: of the last average, where that can be known.
    """

    state_key: ClassVar[str]
    leaves_at: ClassVar[Literal["backward", "step", "end"]] = "end"
    """When weights leave: as a backward pass begins, before the optimizer's step, or after it."""
    brings_together: bool = False
    """Whether all ranks hold the same weights afterwards."""
    averages_models: ClassVar[bool] = False
    """Whether `average_into` brings the mean of models of workers who are each alone for torch."""
    delay: int = 0
    """Steps that lie between `launch` and `merge`."""

    weight: float = 1.0
    encode_s: float = 0.0
    measures_drift: bool = False
    drift: Drift = Drift()

    def __init__(
        self, *, rule: TakeMean | None = None, changes: EncodedChanges | None = None
    ) -> None:
        self.rule, self._changes = rule or TakeMean(), changes

    def begin(self) -> None:
        """Ranks are about to move apart. Called before each local step."""
        self.rule.begin()

    def launch(self, number: int) -> None:
        """Let weights leave as they are at `leaves_at`, and wait for nobody. They change until
        `merge`.

        Args:
            number: of averages before this one.
        """

    @property
    def is_under_way(self) -> bool:
        """Whether something is between `launch` and `merge`, and part of `state`."""
        return False

    def go_on(self) -> None:
        """Answer what has come of the peers between `launch` and `merge`, without waiting for more:
        they need the answers before they can merge.
        """

    @abstractmethod
    def merge(self) -> None:
        """Wait for what `launch` began, and change the weights. After the optimizer's step."""

    def send_all(self) -> None:
        """From the next average on nothing is owed."""

    def average_into(self, weights: ModelWeights) -> frozenset[int]:
        """As of `Callback`. Called only if `averages_models`."""
        raise NotImplementedError

    def state(self) -> CallbackState:
        """As of `Callback.state_dict`. Tensors may be live."""
        owed: CallbackState = {} if self._changes is None else self._changes.state()
        return {"additive": {}, "local": {}, **owed, "replicated": self.rule.state()}

    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Inverse of `state`; of what is replicated there are other keys too. Raises
        `CheckpointError`.
        """
        if self._changes is not None:
            self._changes.load(state)
        elif state.get("additive"):
            raise another_codec()
        self.rule.load(state["replicated"])

    def close(self) -> None:
        """Give up what `launch` began. The weights stay as they are: the user's."""


class ExchangeWithPeers(WeightExchange, Generic[T]):
    """One whose weights travel in one collective.

    Args:
        peers: carries it out.
        rule: as of `WeightExchange`.
    """

    def __init__(self, peers: Everyone, *, rule: TakeMean | None = None) -> None:
        super().__init__(rule=rule)
        self._peers = peers
        self._pending: Pending[T] | None = None

    @abstractmethod
    def _leave(self, number: int) -> Collective[T]:
        """What carries the weights, as they are now. As of `launch`."""

    @abstractmethod
    def _take(self, came: T) -> None:
        """Change the weights by what has come."""

    @override
    def launch(self, number: int) -> None:
        self._pending = self._peers.launch(self._leave(number))

    @override
    def merge(self) -> None:
        pending, self._pending = self._pending, None  # what has come is as large as the model
        assert pending is not None, "nothing was launched"
        came = pending.wait()
        begin_s = time.perf_counter()
        self._take(came)
        self.encode_s += time.perf_counter() - begin_s

    @override
    def close(self) -> None:
        if self._pending is not None:
            self._pending.cancel()


class MeanSquares:
    """Makes Adam's second moments, which were averaged over ranks, those of the mean gradient.

    A rank's own squares hold P times the noise of the mean's, so that its steps are shorter than
    those of `AllReduce` at the same learning rate: without this texts are up to 7% of bits worse at
    the rate that suits `AllReduce`, and up to 6% at the best rate of each, which is 3% with it
    (`benchmarks/studies/adam_rules.py`, LocalSGD). What squares have gained since the last average
    is corrected, once:

        gained = (v - beta2^H v_last) / (1 - beta2^H)           after H steps
        v      = beta2^H v_last + (1 - beta2^H) (signal + (gained - signal) / P)

    where the averaged momentum tells the signal (`optimizer_scaling.with_noise`).

    Args:
        optimizer: a `torch.optim.Adam` or `AdamW`.
        parameters: by name.
        world_size: P.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, torch.Tensor],
        *,
        world_size: int,
    ) -> None:
        self._optimizer, self._world_size = optimizer, world_size
        self._parameters = parameters
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._last: dict[str, tuple[float, torch.Tensor]] | None = None

    def begin(self) -> None:
        """What the optimizer has gathered before ranks move apart is the mean's."""
        if self._last is None:
            self._last = {
                name: (step, state["exp_avg_sq"].clone()) for name, step, state, _ in self._states()
            }

    def correct_(self) -> None:
        """After an average of all states, on all ranks."""
        assert self._last is not None, "nobody has begun"
        for name, step, state, (beta1, beta2) in self._states():
            square = state["exp_avg_sq"]
            last_step, last = self._last.get(name, (0.0, torch.zeros_like(square)))
            if step <= last_step:
                # A frozen parameter gains nothing. What a script has loaded, of an earlier step,
                # counts as it is.
                self._last[name] = step, square.clone()
                continue
            kept = beta2 ** (step - last_step)
            gained = square.sub(last, alpha=kept).div_(1 - kept).clamp_min_(0)
            mean = state["exp_avg"] / (1 - beta1**step)
            gained = with_noise(mean, gained, beta1, 1 / self._world_size)
            square.copy_(last).mul_(kept).add_(gained, alpha=1 - kept)
            self._last[name] = step, square.clone()

    def state(self) -> dict[str, Any]:
        """What is the same on every rank; empty before `begin`. Tensors are live."""
        if self._last is None:
            return {}
        steps = {f"step_of_square/{name}": step for name, (step, _) in self._last.items()}
        squares = {f"square/{name}": square for name, (_, square) in self._last.items()}
        return {"has_squares": True} | steps | squares

    def load(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state`; other keys are ignored."""
        self._last = None
        if state.get("has_squares"):
            self._last = {
                name: (
                    float(state[f"step_of_square/{name}"]),
                    # What was read of a file is on the host.
                    state[f"square/{name}"].to(parameter.device, copy=True),
                )
                for name, parameter in self._parameters.items()
                if f"square/{name}" in state
            }

    def _states(self) -> list[tuple[str, float, dict[str, Any], tuple[float, float]]]:
        """Of each parameter that has been stepped: its name, the number of steps, its state and the
        betas. The host waits for a device once. Complex states are not among those that are
        averaged.
        """
        found = [
            (self._names[id(parameter)], self._optimizer.state[parameter], group["betas"])
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if self._optimizer.state.get(parameter) and id(parameter) in self._names
            if not parameter.is_complex()
        ]
        steps = read_numbers([torch.as_tensor(state["step"]) for _, state, _ in found])
        return [
            (name, step, state, betas)
            for step, (name, state, betas) in zip(steps, found, strict=True)
        ]


class MeanOfAll(WeightExchange):
    """All ranks' weights become what `rule` makes of their mean.

    Args:
        weights: what is averaged.
        peers: all ranks.
        changes, rule: as of `WeightExchange`.
        optimizer: the user's.
        averages_state: whether the optimizer's state is averaged with the weights, and Adam's
            second moments are then made those of the mean gradient; else it stays local. Or by name
            of a state: at every how many averages of the weights it is averaged, plainly.
        notify: tells the user what of the optimizer's state is not averaged, the same words once.
    """

    state_key = "periodic_average"
    brings_together = True

    def __init__(
        self,
        weights: ModelWeights,
        peers: Everyone,
        *,
        changes: EncodedChanges | None = None,
        rule: TakeMean | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        averages_state: bool | Mapping[str, int] = False,
        notify: Callable[[str], None] = lambda remark: None,
    ) -> None:
        super().__init__(rule=rule, changes=changes)
        self._weights, self._peers = weights, peers
        self._optimizer, self._averages_state = optimizer, averages_state
        size = peers.driver.world_size
        self._squares: MeanSquares | None = None
        if (
            averages_state is True
            and optimizer is not None
            and type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
            and not any(group["amsgrad"] for group in optimizer.param_groups)
            and size > 1
        ):
            self._squares = MeanSquares(optimizer, weights.parameters, world_size=size)
        self._notify, self._number = cache(notify), 0

    @override
    def begin(self) -> None:
        super().begin()
        if self._squares is not None:
            self._squares.begin()

    @override
    def launch(self, number: int) -> None:
        self._number = number + 1

    @override
    def merge(self) -> None:
        driver, stream = self._peers.driver, self._peers.stream
        tensors, changes = self._weights.tensors(), None
        parameters = self._weights.parameters.values() if self.measures_drift else ()
        before = [parameter.detach().clone() for parameter in parameters]
        if self._changes is not None:
            spent_s = self._changes.encode_s
            self._changes.launch(self.rule.changes())
            changes = self._changes.mean()
            self.encode_s += self._changes.encode_s - spent_s
            # Statistics travel as they are: a difference could take them out of their range.
            tensors = [*self.rule.whole(), *self._weights.statistics()]
        if tensors:
            self.encode_s += average_(tensors, tensors, driver=driver, stream=stream, weight=1.0)
        self._weights.average_counters_(driver, stream)
        if self.measures_drift:
            self.drift = self._drift(before, changes)
        begin_s = time.perf_counter()
        self.rule.merge_(changes)
        self.encode_s += time.perf_counter() - begin_s
        self._average_state()

    @override
    def send_all(self) -> None:
        for reduction in () if self._changes is None else self._changes.reductions:
            reduction.send_all()

    def _average_state(self) -> None:
        averages, due = self._averages_state, None
        if isinstance(averages, Mapping):
            due = {name: not self._number % interval for name, interval in averages.items()}
            averages = any(due.values())
        if averages and self._optimizer is not None:
            self.encode_s += average_optimizer_state_(
                self._optimizer,
                self._weights.parameters,
                driver=self._peers.driver,
                stream=self._peers.stream,
                notify=self._notify,
                due=due,
            )
            if self._squares is not None:
                self._squares.correct_()

    def _drift(
        self, before: Sequence[torch.Tensor], changes: Sequence[torch.Tensor] | None
    ) -> Drift:
        means = (
            self._weights.parameters.values()
            if changes is None
            else map(torch.add, self.rule.anchor.values(), changes)
        )
        distances = [
            (one.to(mean.dtype) - mean.detach()).abs().double().square().sum()
            for one, mean in zip(before, means, strict=True)
        ]
        squared = sum(read_numbers(distances))
        groups = [{"lr": 1.0}] if self._optimizer is None else self._optimizer.param_groups
        lr = max(float(group["lr"]) for group in groups)
        measured = self._peers.launch(gather_values([squared, lr])).wait()
        return Drift(*np.mean(measured, axis=0).tolist())

    @override
    def state(self) -> CallbackState:
        state = super().state()
        if self._squares is not None:
            state["replicated"] |= self._squares.state()
        return state

    @override
    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        super().load(state)
        if self._squares is not None:
            self._squares.load(state["replicated"])


class PeriodicAverage(Callback):
    """An average after the optimizer steps that a schedule says.

    Args:
        exchange: with whom, and what becomes of it.
        schedule: after which steps.
        start_step: steps before the first local one, >= 0; until then all ranks hold the same.
        island: adds up how far each rank's shards have moved; None: this rank has all of a model.

    Attributes:
        exchange: as given.
    """

    def __init__(
        self,
        exchange: WeightExchange,
        schedule: AveragingSchedule,
        *,
        start_step: int = 0,
        island: Island | None = None,
    ) -> None:
        self._island = island or Island()
        self.state_key = exchange.state_key  # type: ignore[misc]  # each its own
        self.exchange = exchange
        self.averages_unconnected = exchange.averages_models
        self.averages_models = self.averages_models or exchange.averages_models
        self._schedule, self._schedule_state = schedule, dict(schedule.initial_state())
        exchange.measures_drift = schedule.measures_drift
        self._start_step = self._averaged_at_step = start_step
        self._num_steps = self._num_averages = 0
        self._launched_for: int | None = None  # the step after which the average is due

    @override
    def averaging_weight(self) -> float:
        return self.exchange.weight

    @override
    def average_into(self, weights: ModelWeights) -> frozenset[int]:
        return self.exchange.average_into(weights)

    @override
    def replicas_agree(self) -> bool:
        return self.exchange.brings_together and self._num_steps <= self._averaged_at_step

    # What is taken of weights as training begins is taken as late as can be: the user may load
    # others after attaching. Of several passes in a step the first one counts, since until the step
    # the weights stay what they are.

    @override
    def on_backward_begins(self, *, synchronised: bool) -> None:
        self._go_on()
        self._before("backward")

    @override
    def on_before_step(self) -> None:
        self._before("backward", "step")  # for a rank that ran no backward pass, too

    @override
    def on_closure(self) -> None:
        self._before("step")

    def _before(self, *moments: str) -> None:
        if self._num_steps >= self._start_step:
            self.exchange.begin()
            if self.exchange.leaves_at in moments and self._is_due(self._num_steps + 1):
                self._launch(self._num_steps + 1)

    def _go_on(self) -> None:
        if self._launched_for is not None:
            begin_s = time.perf_counter()
            self.exchange.go_on()
            self.exchange.encode_s += time.perf_counter() - begin_s

    @override
    def on_after_step(self) -> None:
        self._num_steps += 1
        self._go_on()
        if self._is_due(self._num_steps):
            self._merge()  # the last average, if the next one is due before it
            self._launch(self._num_steps)
        launched_for = self._launched_for
        if launched_for is not None and self._num_steps >= launched_for + self.exchange.delay:
            self._merge()

    @override
    def on_last_step(self) -> None:
        self.exchange.send_all()

    @override
    def on_finish(self) -> None:
        if self._launched_for is not None and self._launched_for > self._num_steps:
            # It left as a backward pass began that no step has followed. Peers may have had none.
            self._launched_for = None
            self.exchange.close()
        self._merge()

    def _merge(self) -> None:
        if self._launched_for is None:
            return
        launched_for, self._launched_for = self._launched_for, None  # what fails is given up
        self.exchange.merge()
        drift = self.exchange.drift
        if self._schedule.measures_drift:
            drift = drift._replace(squared=sum(self._island.gather(drift.squared)))
        self._averaged_at_step = launched_for
        self._schedule_state = dict(self._schedule.after_average(self._schedule_state, drift))
        self._num_averages += 1

    def _is_due(self, num_steps: int) -> bool:
        num_local = num_steps - self._start_step
        last = self._averaged_at_step if self._launched_for is None else self._launched_for
        return num_local > 0 and num_steps - last >= self._schedule.period(
            num_local, self._schedule_state
        )

    def _launch(self, due: int) -> None:
        begin_s = time.perf_counter()
        self.exchange.launch(self._num_averages)
        self.exchange.encode_s += time.perf_counter() - begin_s
        self._launched_for = due

    @override
    def counters(self) -> dict[str, float]:
        return {"exchanges": self._num_averages, "encode_s": self.exchange.encode_s}

    @override
    def state_dict(self) -> CallbackState:
        state = self.exchange.state()
        counts = {
            "start_step": self._start_step,
            "num_steps": self._num_steps,
            "num_averages": self._num_averages,
            "averaged_at_step": self._averaged_at_step,
            "launched_for": self._launched_for or 0 if self.exchange.is_under_way else 0,
        }
        remembered = {f"schedule/{key}": value for key, value in self._schedule_state.items()}
        return {**state, "replicated": state.get("replicated", {}) | counts | remembered}

    @override
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        saved = state["replicated"]
        if "num_steps" not in saved:
            raise CheckpointError("the state lacks 'num_steps'; it was saved by another strategy")
        self.exchange.load(state)
        # A schedule that the run was not saved with begins anew.
        self._schedule_state = {
            key: float(saved.get(f"schedule/{key}", value))
            for key, value in self._schedule.initial_state().items()
        }
        if self._start_step:  # `StartPhase` goes on for as long as it was to be
            self._start_step = int(saved.get("start_step", self._start_step))
        self._num_steps = int(saved["num_steps"])
        self._num_averages = int(saved["num_averages"])
        launched_for = int(saved.get("launched_for", 0))
        self._launched_for = launched_for if self.exchange.is_under_way else None
        last = saved.get("averaged_at_step")
        self._averaged_at_step = self._last() if last is None else int(last)

    def _last(self) -> int:
        """After which step the last average was, if the schedule always knew what it knows now: for
        simulations that begin at a later step than training does.
        """
        last = self._start_step
        for step in range(last + 1, self._num_steps + 1):
            num_local = step - self._start_step
            if step - last >= self._schedule.period(num_local, self._schedule_state):
                last = step
        return last

    @override
    def close(self) -> None:
        self.exchange.close()


class StartPhase(Callback):
    """Stands for `inner` in the first `num_steps` optimizer steps: hands every event on to it, and
    answers as it does. Then it closes `inner`, and gives back its memory.

    Args:
        inner: what exchanges gradients, or Kronecker factors beside them.
        num_steps: >= 1.
    """

    def __init__(self, inner: Callback, *, num_steps: int) -> None:
        self.inner = inner
        self.state_key = f"start_phase_of_{inner.state_key}"  # type: ignore[misc]  # each its own
        self._num_left = num_steps
        self._is_over = False
        self._counted: Mapping[str, float] = {}

    @override
    def on_after_step(self) -> None:
        self.inner.on_after_step()
        self._num_left = max(0, self._num_left - 1)
        if not self._num_left:
            self._end()

    def _end(self) -> None:
        # All ranks come to the end of the phase in the same step, and its last exchange is over by
        # then, so that closing waits for nobody. The exchange is closed before the part of the
        # factors hears of the end of the step, which needs it no more.
        if not self._is_over:
            self._is_over, self._counted = True, self.inner.counters()
            self.inner.close()
            self.inner = Callback()

    @override
    def counters(self) -> Mapping[str, float]:
        return self._counted if self._is_over else self.inner.counters()

    @override
    def state_dict(self) -> CallbackState:
        state = self.inner.state_dict()
        replicated = {**state.get("replicated", {}), "num_left": self._num_left}
        return {**state, "replicated": replicated}

    @override
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        num_left = int(state["replicated"]["num_left"])
        if num_left and self._is_over:
            raise CheckpointError(
                f"the state was saved {num_left} steps before the end of the start phase, which is"
                " over in this session; load it into a session that has taken no steps"
            )
        self._num_left = num_left
        if num_left:
            self.inner.load_state_dict(state)
        else:
            self._end()


def _handed_on(name: str) -> Callable[..., Any]:
    def call(self: StartPhase, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    return call


for _name, _member in vars(Callback).items():
    if callable(_member) and not _name.startswith("_") and _name not in vars(StartPhase):
        setattr(StartPhase, _name, _handed_on(_name))
