"""The method of each strategy, by its name and its options: of those that average beside training
(WAGMA, AD-PSGD, eager SGD), and of the others, which take their steps themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import torch
from typing_extensions import override

from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.errors import ConfigError
from offbeat.run.recipes import NoExchange
from offbeat.strategies.base import Strategy
from offbeat.strategies.kfac import KFACStrategy
from offbeat.strategies.localsgd import LocalSGD, Outer
from offbeat.strategies.onebitadam import OneBitAdam
from offbeat_lab.cluster import Cluster
from offbeat_lab.plan.methods.strategy_steps import LEAST_TENSORS, StrategySteps, fewer_of
from offbeat_lab.plan.simulation import FEW_WORKERS, Setting, Simulated


class SoloSteps(NoExchange):
    """What every other strategy is held against: no rank waits for another one."""

    replicas_differ: ClassVar[bool] = True


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
        recipe: with its options.

    Raises:
        ConfigError: it cannot be predicted.
    """
    strategy = recipe
    match name:
        case "alone":
            strategy = SoloSteps()
        case "onebitadam":
            strategy = FreezingSteps(freeze_step=recipe.freeze_step)
        case "auto":
            raise ConfigError(
                "auto chooses while it trains, so there is no step of its own to predict; plan for"
                " those that it chooses among: allreduce, gtopk, powersgd, localsgd, wagma"
            )
        case "wagma" | "adpsgd" | "eagersgd":
            return BackgroundSteps(recipe)
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
