"""One file a system. A strategy is a recipe of four choices; base.py names the events its parts can
act on.
"""

from __future__ import annotations

from offbeat.strategies.adaptive import AdaptiveSGD
from offbeat.strategies.adpsgd import ADPSGD
from offbeat.strategies.allreduce import AllReduce
from offbeat.strategies.base import Strategy
from offbeat.strategies.crossbow import Crossbow
from offbeat.strategies.dkfac import DKFAC
from offbeat.strategies.dpkfac import DPKFAC
from offbeat.strategies.dpsgd import DPSGD
from offbeat.strategies.eagersgd import EagerSGD
from offbeat.strategies.elasticsgd import ElasticSGD
from offbeat.strategies.gtopk import GTopK
from offbeat.strategies.localsgd import LocalSGD
from offbeat.strategies.mpdkfac import MPDKFAC
from offbeat.strategies.sgp import SGP
from offbeat.strategies.spdkfac import SPDKFAC
from offbeat.strategies.topk import TopK
from offbeat.strategies.wagma import WAGMA

_GRADIENTS: tuple[type[Strategy], ...] = (AllReduce, TopK, GTopK)
_WEIGHTS: tuple[type[Strategy], ...] = (
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
_FACTORS: tuple[type[Strategy], ...] = (DKFAC, MPDKFAC, SPDKFAC, DPKFAC)

REGISTRY: dict[str, type[Strategy]] = {
    strategy.name: strategy for strategy in (*_GRADIENTS, *_WEIGHTS, *_FACTORS)
}
"""Strategies by the name that the command line knows them by."""
