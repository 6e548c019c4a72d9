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
from typing import TYPE_CHECKING

from offbeat.strategies.registry import REGISTRY as _REGISTRY

if TYPE_CHECKING:  # type checkers read no table; a test compares these lines with it
    from offbeat.codec.topk_codec import TopKCodec as TopKCodec
    from offbeat.codec.topk_codec import WeightCodec as WeightCodec
    from offbeat.errors import OffbeatError as OffbeatError
    from offbeat.run.recording import Recorder as Recorder
    from offbeat.session.attach import attach as attach
    from offbeat.session.attach import island_mesh as island_mesh
    from offbeat.session.metrics import log as log
    from offbeat.session.metrics import step as step
    from offbeat.session.session import Session as Session
    from offbeat.session.state import reshard as reshard
    from offbeat.strategies.a2sgd import A2SGD as A2SGD
    from offbeat.strategies.adaptive import AdaptiveSGD as AdaptiveSGD
    from offbeat.strategies.adpsgd import ADPSGD as ADPSGD
    from offbeat.strategies.allreduce import AllReduce as AllReduce
    from offbeat.strategies.auto import Auto as Auto
    from offbeat.strategies.crossbow import Crossbow as Crossbow
    from offbeat.strategies.dear import DeAR as DeAR
    from offbeat.strategies.defsgd import DEFSGD as DEFSGD
    from offbeat.strategies.demo import DeMo as DeMo
    from offbeat.strategies.dpsgd import DPSGD as DPSGD
    from offbeat.strategies.eagersgd import EagerSGD as EagerSGD
    from offbeat.strategies.ef21 import EF21 as EF21
    from offbeat.strategies.elasticsgd import ElasticSGD as ElasticSGD
    from offbeat.strategies.gtopk import GTopK as GTopK
    from offbeat.strategies.kfac import DKFAC as DKFAC
    from offbeat.strategies.kfac import DPKFAC as DPKFAC
    from offbeat.strategies.kfac import MPDKFAC as MPDKFAC
    from offbeat.strategies.kfac import SPDKFAC as SPDKFAC
    from offbeat.strategies.kfac import Curvature as Curvature
    from offbeat.strategies.localsgd import LocalSGD as LocalSGD
    from offbeat.strategies.localsgd import Outer as Outer
    from offbeat.strategies.onebitadam import OneBitAdam as OneBitAdam
    from offbeat.strategies.powersgd import PowerSGD as PowerSGD
    from offbeat.strategies.qgenx import QGenX as QGenX
    from offbeat.strategies.sgp import SGP as SGP
    from offbeat.strategies.topk import TopK as TopK
    from offbeat.strategies.wagma import WAGMA as WAGMA
    from offbeat.strategies.zerooneadam import ZeroOneAdam as ZeroOneAdam

__version__ = "0.1.0"

_HOMES = {
    "Curvature": "offbeat.strategies.kfac",
    "OffbeatError": "offbeat.errors",
    "Outer": "offbeat.strategies.localsgd",
    "Recorder": "offbeat.run.recording",
    "Session": "offbeat.session.session",
    "TopKCodec": "offbeat.codec.topk_codec",
    "WeightCodec": "offbeat.codec.topk_codec",
    "attach": "offbeat.session.attach",
    "island_mesh": "offbeat.session.attach",
    "log": "offbeat.session.metrics",
    "reshard": "offbeat.session.state",
    "step": "offbeat.session.metrics",
    **{entry.class_name: entry.module for entry in _REGISTRY.entries.values()},
}
"""Where each public name is defined; strategies come from their registry."""

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(
            f"module 'offbeat' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
