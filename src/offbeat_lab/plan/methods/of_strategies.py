"""The method of each strategy, by its name and its options: of those that torch ships, those that
average beside training (WAGMA, AD-PSGD, eager SGD), and the others, which take their steps
themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import torch
from typing_extensions import override

from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.collectives.dense import dense_all_reduce
from offbeat.errors import ConfigError
from offbeat.gradients.buckets import Bucket
from offbeat.gradients.reductions import DenseReduction, Reduction, WeightedGradient
from offbeat.run.recipes import NoExchange
from offbeat.strategies.allreduce import AllReduce
from offbeat.strategies.base import Strategy
from offbeat.strategies.kfac import KFACStrategy
from offbeat.strategies.localsgd import LocalSGD, Outer
from offbeat.strategies.onebitadam import OneBitAdam
from offbeat.transport.operations import Collective
from offbeat_lab.cluster import Cluster
from offbeat_lab.plan.methods.strategy_steps import LEAST_TENSORS, StrategySteps, fewer_of
from offbeat_lab.plan.simulation import FEW_WORKERS, Setting, Simulated


class SoloSteps(NoExchange):
    """What every other strategy is held against: no rank waits for another one."""

    replicas_differ: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class HalfPrecisionSteps(AllReduce):
    """Buckets are summed in half precision."""

    @override
    def reduction(self, bucket: Bucket, context: Context) -> Reduction:
        return _HalfReduction(bucket, context)


class _HalfReduction(DenseReduction):
    def __init__(self, bucket: Bucket, context: Context) -> None:
        super().__init__(bucket, context.driver, context.new_stream())
        self._message = self._message.half()
        self._tail = self._message[bucket.num_elements :]


@dataclass(frozen=True, kw_only=True)
class LowRankSteps(AllReduce):
    """PowerSGD: two factors of each matrix, the second of which waits for the first.

    All gradients are in one bucket, as in `offbeat_lab.native`.

    Args:
        rank: of the approximation.
        start_step: steps with plain all-reduce before the first approximation.
    """

    name: ClassVar[str] = "ddp-powersgd"

    bucket_mib = 1 << 20

    rank: int = 1
    start_step: int = 0

    @override
    def reduction(self, bucket: Bucket, context: Context) -> Reduction:
        return _LowRankReduction(bucket, context, self)


class _LowRankReduction(DenseReduction):
    def __init__(self, bucket: Bucket, context: Context, steps: LowRankSteps) -> None:
        super().__init__(bucket, context.driver, context.new_stream())
        self._simulated: Any = context.driver
        self._steps = steps
        self._sizes = message_sizes((each.shape for each in bucket.parameters), steps.rank)

    @override
    def launch(self, given: WeightedGradient) -> None:
        rank = self._simulated
        if rank.step < self._steps.start_step:
            super().launch(given)
            return
        rank.encode(rank.machine.profile.hook_s(given.gradient.numel(), self._steps.rank))
        # What is copied into a bucket and out of it is more than what is sent of it.
        rank.encode(2 * rank.machine.copying_s(given.gradient.nbytes - 4 * sum(self._sizes)))
        self._sums = [self._driver.launch(self._in_turn(), self._stream.next())]

    def _in_turn(self) -> Collective[Any]:
        for size in self._sizes:
            if size:
                yield from dense_all_reduce(self._message[:size])


def message_sizes(shapes: Iterable[tuple[int, ...]], rank: int) -> tuple[int, int, int]:
    """Elements: of what is not compressed, of the first factors, of the second ones.

    >>> message_sizes([(100,), (10, 20)], rank=2)
    (100, 20, 40)
    """
    whole = first = second = 0
    for shape in shapes:
        rows, columns = shape if len(shape) > 1 else (1, shape[0])
        lower = min(rank, rows, columns)
        if (rows + columns) * lower * 2 < rows * columns:
            first, second = first + rows * lower, second + columns * lower
        else:
            whole += rows * columns
    return whole, first, second


@dataclass(frozen=True, kw_only=True)
class FreezingSteps(OneBitAdam):
    """With an Adam that has taken all steps of the run, whatever the profile's optimizer is."""

    @override
    def build(self, context: Context) -> Sequence[Callback]:
        assert context.optimizer is not None
        num_steps = torch.zeros(())
        for parameter in context.parameters.values():
            moments = dict.fromkeys(("exp_avg", "exp_avg_sq"), parameter.detach())
            context.optimizer.state[parameter] = {"step": num_steps, **moments}
        return [_StepCount(num_steps, context.driver), *super().build(context)]


class _StepCount(Callback):
    """Lets `num_steps` be that of the steps before the one that begins."""

    def __init__(self, num_steps: torch.Tensor, simulated: Any) -> None:
        self._num_steps, self._simulated = num_steps, simulated

    @override
    def on_forward_begins(self, *, trains: bool) -> None:
        self._num_steps.fill_(self._simulated.step)


_LEAST_STEPS: Final = 20
"""Averages of slow links take several steps to come."""

_STEPS_OF_AN_AVERAGE: Final = 10
"""Averages that take more look faster than they are."""


class BackgroundSteps(StrategySteps):
    """Steps of `strategy`. Of many workers some are simulated, since each of their messages is."""

    least_steps = _LEAST_STEPS
    most_tensors = LEAST_TENSORS  # nothing is sent before the last gradient is there
    host_bytes = 3.0  # the device has a copy only while a model is read or written

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy, extra_bytes=4.0)
        interval = getattr(strategy, "interval", 1)
        if self.steps_in_a_period > _LEAST_STEPS * interval:
            self.steps_in_a_period = interval  # what is done so seldom hardly counts

    @override
    def simulate(self, setting: Setting) -> Simulated:
        notes, simulated_on = [], setting
        if setting.world_size > FEW_WORKERS:
            notes.append(f"what it adds to computing is that of {FEW_WORKERS} workers")
            simulated_on = replace(setting, cluster=_few_of(setting.cluster))
        by_events = not notes
        simulated = super().simulate(simulated_on)
        step_s = simulated.step_s + setting.ideal_s - simulated_on.ideal_s
        usual_s = 1 / simulated.pace + 1 / setting.ideal_pace - 1 / simulated_on.ideal_pace
        average_s = setting.network.messages.time_s(
            num_messages=2, num_bytes=setting.profile.num_bytes
        )
        num_steps = average_s / setting.ideal_s
        is_slow = (
            setting.world_size > 1
            and num_steps > max(self.steps_in_a_period, _STEPS_OF_AN_AVERAGE)
            and step_s < average_s  # or else each step waits for its average
        )
        if is_slow:
            notes.append(
                f"an average takes about {num_steps:.0f} steps on the slowest link here, so its"
                " step is a lower limit: later steps wait for averages. It is recommended only"
                " where nothing else is planned for"
            )
        return replace(
            simulated,
            step_s=step_s,
            pace=1 / usual_s,
            by_events=by_events,
            note="; ".join(notes),
            is_lower_limit=is_slow,
        )


def _few_of(cluster: Cluster) -> Cluster:
    """`FEW_WORKERS` of its workers: of more speeds, every so many-th."""
    if len(cluster.speed_pattern) > FEW_WORKERS:
        speeds = sorted(cluster.speeds)
        taken = [speeds[place * len(speeds) // FEW_WORKERS] for place in range(FEW_WORKERS)]
        cluster = cluster.changed(speeds=tuple(taken))
    return fewer_of(cluster, FEW_WORKERS)


def method_of(name: str, recipe: Any) -> StrategySteps:
    """What a strategy does in a step.

    Args:
        name: of the strategy.
        recipe: with its options, one of `offbeat_lab.options.Recipe`.

    Raises:
        ConfigError: it cannot be predicted.
    """
    strategy = recipe
    match name:
        case "alone":
            strategy = SoloSteps()
        case "ddp":
            strategy = AllReduce()
        case "ddp-fp16" | "ddp-bf16":
            strategy = HalfPrecisionSteps()
        case "ddp-powersgd":
            strategy = LowRankSteps(rank=recipe.rank, start_step=recipe.start_step)
        case "onebitadam":
            strategy = FreezingSteps(freeze_step=recipe.freeze_step)
        case "post-localsgd":
            local = {"start_step": recipe.start_step, "optimizer_state": "local"}
            strategy = LocalSGD(period=recipe.period, warmup=0, **local)
        case "auto":
            raise ConfigError(
                "auto chooses while it trains, so there is no step of its own to predict; plan for"
                " those that it chooses among: allreduce, gtopk, powersgd, localsgd, wagma"
            )
        case "wagma" | "adpsgd" | "eagersgd":
            return BackgroundSteps(recipe)
    if not isinstance(strategy, Strategy):
        raise ConfigError(f"{name} cannot be predicted; leave it out")
    return StrategySteps(
        _simplified(strategy),
        extra_bytes=_EXTRA_BYTES.get(name, 0.0),
        by_tensor=name == "ddp-powersgd",
    )


_EXTRA_BYTES: Final = {
    "ddp": 1.0,  # its buckets, to which gradients are copied
    "ddp-fp16": 1.0,
    "ddp-bf16": 1.0,
    "ddp-powersgd": 2.0,
    "post-localsgd": 2.0,
    "localsgd": 1.0,
    "dpsgd": 3.0,
    "sgp": 3.0,
    "adaptive": 3.0,
    "elasticsgd": 3.0,
}
"""Of those that have vectors and messages in memory which a simulation does not make."""


def _simplified(strategy: Any) -> Any:
    """Without names of layers, which a profile does not have, and without deaths."""
    changed: dict[str, Any] = {}
    if isinstance(strategy, KFACStrategy):
        changed["curvature"] = replace(strategy.curvature, plain=(), cross_attention=())
    if isinstance(strategy, LocalSGD) and isinstance(strategy.start, Strategy):
        changed["start"] = _simplified(strategy.start)
    if isinstance(strategy, LocalSGD) and strategy.survives_death:
        # The mean of all is of as many bytes, and its anchor that of an optimizer.
        plain = Outer(lr=1.0, momentum=0.0, nesterov=False)
        changed |= {"exchange": None, "outer": strategy.outer or plain}
    return replace(strategy, **changed) if changed else strategy
