"""The method of each strategy, by its name and its options."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from offbeat.errors import ConfigError
from offbeat.strategies.allreduce import AllReduce
from offbeat.strategies.base import Strategy
from offbeat.strategies.localsgd import LocalSGD
from offbeat_lab.options import Recipe
from offbeat_lab.plan.methods.averages import PartialMean
from offbeat_lab.plan.methods.background import Background
from offbeat_lab.plan.methods.ddp_steps import HalfPrecisionSteps, LowRankSteps, SoloSteps
from offbeat_lab.plan.methods.phases import FirstSteps
from offbeat_lab.plan.methods.strategy_steps import StrategySteps
from offbeat_lab.plan.second_order import PLANS, OwnerFactors, SecondOrder
from offbeat_lab.plan.simulation import Method

KFAC: Final = frozenset({*PLANS, "dpkfac"})


def method_of(name: str, recipe: Recipe) -> Method:
    """What a strategy does in a step.

    Args:
        name: of the strategy.
        recipe: with its options.

    Raises:
        ConfigError: it cannot be predicted.
    """
    return _method_of(name, recipe)


def _method_of(name: str, recipe: Any) -> Method:
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
        case "localsgd":
            method = _local_sgd(recipe)
        case "post-localsgd":
            local = {"start_step": recipe.start_step, "optimizer_state": "local"}
            method = _by_itself(LocalSGD(period=recipe.period, warmup=0, **local))
        case "wagma":
            method = Background(
                recipe.group_of,
                pairs=False,
                period=recipe.period,
                interval=recipe.interval,
                rounds=partial(recipe.rounds, dtype=np.dtype(np.float32)),
                overlaps=recipe.overlaps,
            )
        case "adpsgd":
            method = Background(recipe.group_of, pairs=True)
        case "eagersgd":
            solo = recipe.mode == "solo"
            method = PartialMean(lambda workers: 1 if solo else -(-workers // 2))
        case "dpkfac":
            method = OwnerFactors(recipe.settings(), _exchange_of(recipe))
        case _ if name in PLANS:
            method = SecondOrder(PLANS[name], recipe.settings(), _exchange_of(recipe))
        case _ if isinstance(recipe, Strategy):
            method = _by_itself(recipe)
        case _:
            raise ConfigError(f"{name} cannot be predicted; leave it out")
    return method


def _local_sgd(recipe: LocalSGD) -> Method:
    if not recipe.start_step or recipe.first_steps.name not in KFAC:
        return _by_itself(recipe)
    then = replace(
        recipe,
        start="allreduce",
        start_step=0,
        warmup=recipe.steps_of_growth,
        optimizer_state=recipe.optimizer_state
        or ("averaged" if recipe.averages_state else "local"),
    )
    return FirstSteps(
        recipe.start_step,
        first=method_of(recipe.first_steps.name, recipe.first_steps),
        then=_by_itself(then),
    )


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
    """Of a strategy that takes its steps itself. Its comparisons of replicas are too rare to count.

    Args:
        strategy: the strategy.
        by_tensor: as of `StrategySteps`.
    """
    if hasattr(strategy, "replica_check_interval"):
        strategy = replace(strategy, replica_check_interval=0)
    extra_bytes = _EXTRA_BYTES.get(strategy.name, 0.0)
    return StrategySteps(strategy, extra_bytes=extra_bytes, by_tensor=by_tensor)


def _exchange_of(recipe: Any) -> Method:
    """The exchange of gradients of a K-FAC strategy."""
    return method_of(recipe.gradients.name, recipe.gradients)
