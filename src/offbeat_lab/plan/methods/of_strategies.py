"""The method of each strategy, by its name and its options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from offbeat.errors import ConfigError
from offbeat.strategies.allreduce import AllReduce
from offbeat.strategies.base import Strategy
from offbeat.strategies.kfac import KFACStrategy
from offbeat.strategies.localsgd import LocalSGD, Outer
from offbeat_lab.plan.methods.background import BackgroundSteps
from offbeat_lab.plan.methods.ddp_steps import HalfPrecisionSteps, LowRankSteps, SoloSteps
from offbeat_lab.plan.methods.strategy_steps import StrategySteps
from offbeat_lab.plan.simulation import Method


def method_of(name: str, recipe: Any) -> Method:
    """What a strategy does in a step.

    Args:
        name: of the strategy.
        recipe: with its options, one of `offbeat_lab.options.Recipe`.

    Raises:
        ConfigError: it cannot be predicted.
    """
    match name:
        case "alone":
            method: Method = _by_itself(SoloSteps())
        case "ddp":
            method = _by_itself(AllReduce())
        case "ddp-fp16" | "ddp-bf16":
            method = _by_itself(HalfPrecisionSteps())
        case "ddp-powersgd":
            steps = LowRankSteps(rank=recipe.rank, start_step=recipe.start_step)
            method = _by_itself(steps, by_tensor=True)
        case "post-localsgd":
            local = {"start_step": recipe.start_step, "optimizer_state": "local"}
            method = _by_itself(LocalSGD(period=recipe.period, warmup=0, **local))
        case "wagma" | "adpsgd" | "eagersgd":
            method = BackgroundSteps(recipe)
        case _ if isinstance(recipe, Strategy):
            method = _by_itself(recipe)
        case _:
            raise ConfigError(f"{name} cannot be predicted; leave it out")
    return method


_EXTRA_BYTES: Final = {
    "localsgd": 1.0,
    "ddp-powersgd": 2.0,
    "dpsgd": 3.0,
    "sgp": 3.0,
    "adaptive": 3.0,
    "elasticsgd": 3.0,
}
"""Of those that have vectors and messages in memory which a simulation does not make."""


def _by_itself(strategy: Any, *, by_tensor: bool = False) -> Method:
    """Of a strategy that takes its steps itself.

    Args:
        strategy: the strategy.
        by_tensor: as of `StrategySteps`.
    """
    extra_bytes = _EXTRA_BYTES.get(strategy.name, 0.0)
    return StrategySteps(_simplified(strategy), extra_bytes=extra_bytes, by_tensor=by_tensor)


def _simplified(strategy: Any) -> Any:
    """Without comparisons of replicas, which are too rare to count, without names of layers, which
    a profile does not have, and without deaths.
    """
    changed: dict[str, Any] = {}
    if hasattr(strategy, "replica_check_interval"):
        changed["replica_check_interval"] = 0
    if isinstance(strategy, KFACStrategy):
        changed["exchange"] = _simplified(strategy.gradients)
        changed["curvature"] = replace(strategy.curvature, plain=(), cross_attention=())
    if isinstance(strategy, LocalSGD) and isinstance(strategy.start, Strategy):
        changed["start"] = _simplified(strategy.start)
    if isinstance(strategy, LocalSGD) and strategy.survives_death:
        # The mean of all is of as many bytes, and its anchor that of an optimizer.
        plain = Outer(lr=1.0, momentum=0.0, nesterov=False)
        changed |= {"exchange": None, "outer": strategy.outer or plain}
    return replace(strategy, **changed) if changed else strategy
