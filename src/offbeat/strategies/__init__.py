"""One file a system. A strategy is a recipe of four choices; base.py names the events its parts can act on."""

from __future__ import annotations

from offbeat.strategies.adaptive import AdaptiveSGD
from offbeat.strategies.adpsgd import ADPSGD
from offbeat.strategies.allreduce import AllReduce
from offbeat.strategies.base import Strategy
from offbeat.strategies.crossbow import Crossbow
from offbeat.strategies.dpsgd import DPSGD
from offbeat.strategies.eagersgd import EagerSGD
from offbeat.strategies.elasticsgd import ElasticSGD
from offbeat.strategies.gtopk import GTopK
from offbeat.strategies.localsgd import LocalSGD
from offbeat.strategies.sgp import SGP
from offbeat.strategies.topk import TopK
from offbeat.strategies.wagma import WAGMA

REGISTRY: dict[str, type[Strategy]] = {
    strategy.name: strategy
    for strategy in (
        AllReduce,
        TopK,
        GTopK,
        LocalSGD,
        WAGMA,
        EagerSGD,
        DPSGD,
        ADPSGD,
        SGP,
        AdaptiveSGD,
        ElasticSGD,
        Crossbow,
    )
}
"""Strategies by the name that the command line knows them by."""
