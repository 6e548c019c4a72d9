"""The method of each strategy, by its name and its options."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from offbeat.averaging.periodic import GrowingPeriod
from offbeat.codec.topk_codec import TopKCodec
from offbeat.errors import ConfigError
from offbeat_lab.options import Recipe
from offbeat_lab.plan.methods.averages import Gossip, PartialMean, PeriodicMean
from offbeat_lab.plan.methods.background import Background
from offbeat_lab.plan.methods.gradients import DenseGradients, LowRankGradients, SoloSteps
from offbeat_lab.plan.methods.mega_batches import MegaBatches
from offbeat_lab.plan.methods.phases import FirstSteps
from offbeat_lab.plan.methods.sparse_gradients import SparseGradients
from offbeat_lab.plan.second_order import PLANS, OwnerFactors, SecondOrder
from offbeat_lab.plan.simulation import Method, StepMethod


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
            method: Method = SoloSteps()
        case "allreduce":
            method = DenseGradients(recipe.bucket_mib, recipe.first_bucket_mib)
        case "ddp":
            method = DenseGradients()
        case "ddp-fp16" | "ddp-bf16":
            method = DenseGradients(element_bytes=2)
        case "ddp-powersgd":
            method = LowRankGradients(recipe.rank, recipe.start_step)
        case "topk" | "gtopk" | "ef21":
            method = _sparse(name, recipe)
        case "localsgd" if recipe.codec is None:
            first = recipe.first_steps
            method = FirstSteps(
                recipe.start_step,
                first=method_of(first.name, first),
                then=PeriodicMean(
                    recipe.schedule,
                    start_step=recipe.start_step,
                    averages_state=recipe.averages_state,
                ),
            )
        case "post-localsgd":
            method = FirstSteps(
                recipe.start_step,
                first=DenseGradients(),
                then=PeriodicMean(GrowingPeriod(recipe.period), start_step=recipe.start_step),
            )
        case "crossbow":
            method = PeriodicMean(GrowingPeriod(recipe.period), extra_bytes=3.0)
        case "dpsgd":
            method = Gossip()
        case "sgp":
            method = Gossip(recipe.out_degree)
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
        case "adaptive" | "elasticsgd":
            method = MegaBatches(recipe.plan())
        case "dpkfac":
            method = OwnerFactors(recipe.settings(), _exchange_of(recipe))
        case _ if name in PLANS:
            method = SecondOrder(PLANS[name], recipe.settings(), _exchange_of(recipe))
        case _:
            raise ConfigError(f"{name} cannot be predicted; leave it out")
    return method


def _sparse(name: str, recipe: Any) -> SparseGradients:
    sparse = partial(SparseGradients, density=recipe.density, bucket_mib=recipe.bucket_mib)
    if name == "ef21":
        method = sparse(collective="all_gather", codec=TopKCodec.of(recipe.codec))
        method.extra_bytes = 3.0
        return method
    return sparse(
        collective=recipe.collective if name == "gtopk" else "all_gather",
        codec=recipe.entries(),
        warmup=recipe.stages(),
    )


def _exchange_of(recipe: Any) -> StepMethod:
    """The exchange of gradients of a K-FAC strategy."""
    method = method_of(recipe.gradients.name, recipe.gradients)
    assert isinstance(method, StepMethod)
    return method
