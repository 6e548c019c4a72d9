"""Trains PyTorch models on the cluster people really have: slow links, uneven devices, stragglers,
workers that die.

    import offbeat

    with offbeat.attach(model, optimizer, offbeat.GTopK(density=0.001)) as session:
        for x, y in loader:
            loss_fn(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

Names are loaded when they are first used, so that importing the package is cheap.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat.errors import OffbeatError
    from offbeat.lab.cluster import Cluster
    from offbeat.session.attach import attach
    from offbeat.session.session import Session
    from offbeat.session.state import reshard
    from offbeat.strategies.adaptive import AdaptiveSGD
    from offbeat.strategies.adpsgd import ADPSGD
    from offbeat.strategies.allreduce import AllReduce
    from offbeat.strategies.crossbow import Crossbow
    from offbeat.strategies.dkfac import DKFAC
    from offbeat.strategies.dpkfac import DPKFAC
    from offbeat.strategies.dpsgd import DPSGD
    from offbeat.strategies.eagersgd import EagerSGD
    from offbeat.strategies.elasticsgd import ElasticSGD
    from offbeat.strategies.gtopk import GTopK
    from offbeat.strategies.localsgd import LocalSGD, Outer
    from offbeat.strategies.mpdkfac import MPDKFAC
    from offbeat.strategies.sgp import SGP
    from offbeat.strategies.spdkfac import SPDKFAC
    from offbeat.strategies.topk import TopK
    from offbeat.strategies.wagma import WAGMA

__version__ = "0.1.0"

__all__ = [
    "ADPSGD",
    "DKFAC",
    "DPKFAC",
    "DPSGD",
    "MPDKFAC",
    "SGP",
    "SPDKFAC",
    "WAGMA",
    "AdaptiveSGD",
    "AllReduce",
    "Cluster",
    "Crossbow",
    "EagerSGD",
    "ElasticSGD",
    "GTopK",
    "LocalSGD",
    "OffbeatError",
    "Outer",
    "Session",
    "TopK",
    "attach",
    "reshard",
]

# Without the extra `offbeat[lab]` the name can be asked for, and the answer says what to install.
# It is not listed then, so that `help(offbeat)` and `from offbeat import *` work.
if find_spec("pydantic") is None:
    __all__.remove("Cluster")

_HOMES = {
    "ADPSGD": "offbeat.strategies.adpsgd",
    "AdaptiveSGD": "offbeat.strategies.adaptive",
    "AllReduce": "offbeat.strategies.allreduce",
    "Cluster": "offbeat.lab.cluster",
    "DKFAC": "offbeat.strategies.dkfac",
    "DPKFAC": "offbeat.strategies.dpkfac",
    "Crossbow": "offbeat.strategies.crossbow",
    "DPSGD": "offbeat.strategies.dpsgd",
    "EagerSGD": "offbeat.strategies.eagersgd",
    "ElasticSGD": "offbeat.strategies.elasticsgd",
    "GTopK": "offbeat.strategies.gtopk",
    "LocalSGD": "offbeat.strategies.localsgd",
    "MPDKFAC": "offbeat.strategies.mpdkfac",
    "OffbeatError": "offbeat.errors",
    "Outer": "offbeat.strategies.localsgd",
    "SGP": "offbeat.strategies.sgp",
    "SPDKFAC": "offbeat.strategies.spdkfac",
    "Session": "offbeat.session.session",
    "TopK": "offbeat.strategies.topk",
    "WAGMA": "offbeat.strategies.wagma",
    "attach": "offbeat.session.attach",
    "reshard": "offbeat.session.state",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(
            f"module 'offbeat' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
