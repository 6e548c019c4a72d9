"""The table of strategies. It feeds the facade, the command line, `help()` and the documentation.
Tables of objects that options of strategies name are below it.

A strategy is one file, one entry here, and one line for type checkers in `offbeat/__init__.py`; an
object for an option is one file and one line. The tables name modules and import none, so that
`import offbeat` is cheap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from offbeat.codec.option_value import NamedObjects

if TYPE_CHECKING:
    from offbeat.averaging.periodic import AveragingSchedule
    from offbeat.codec.topk_codec import WeightCodec
    from offbeat.strategies.base import Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyEntry:
    """One strategy.

    Attributes:
        name: what the command line, records and checkpoints call it.
        class_name: its class, which is an attribute of `offbeat`.
        module: where the class is defined.
        paper: where it was published, or compared as a baseline, as "arXiv NUMBER".
        summary: what it does; the first sentence of the class's docstring, without its full stop.
    """

    name: str
    class_name: str
    module: str
    paper: str
    summary: str

    def load(self) -> type[Strategy]:
        """The class. Imports its module."""
        loaded: type[Strategy] = getattr(import_module(self.module), self.class_name)
        return loaded


class StrategyRegistry(Mapping[str, "type[Strategy]"]):
    """Strategies by name. A class is imported when it is asked for."""

    def __init__(self, *entries: StrategyEntry) -> None:
        self.entries: Final = {entry.name: entry for entry in entries}

    @override
    def __getitem__(self, name: str) -> type[Strategy]:
        return self.entries[name].load()

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    @override
    def __len__(self) -> int:
        return len(self.entries)

    @override
    def __contains__(self, name: object) -> bool:
        return name in self.entries


REGISTRY: Final = StrategyRegistry(
    StrategyEntry(
        name="allreduce",
        class_name="AllReduce",
        module="offbeat.strategies.allreduce",
        paper="arXiv 2006.15704",
        summary="Dense all-reduce of gradients",
    ),
    StrategyEntry(
        name="topk",
        class_name="TopK",
        module="offbeat.strategies.topk",
        paper="arXiv 1809.07599",
        summary="Local top-k, summed over all ranks without a further selection",
    ),
    StrategyEntry(
        name="gtopk",
        class_name="GTopK",
        module="offbeat.strategies.gtopk",
        paper="arXiv 1901.04359",
        summary="Global top-k: only the k largest entries of the whole cluster's gradient",
    ),
    StrategyEntry(
        name="ef21",
        class_name="EF21",
        module="offbeat.strategies.ef21",
        paper="arXiv 2106.05203",
        summary="Gradients estimated from their largest changes, which are all that travels",
    ),
    StrategyEntry(
        name="powersgd",
        class_name="PowerSGD",
        module="offbeat.strategies.powersgd",
        paper="arXiv 1905.13727",
        summary="Gradients as products of two thin matrices",
    ),
    StrategyEntry(
        name="demo",
        class_name="DeMo",
        module="offbeat.strategies.demo",
        paper="arXiv 2411.19870",
        summary="Momentum of which the largest cosine coefficients travel",
    ),
    StrategyEntry(
        name="localsgd",
        class_name="LocalSGD",
        module="offbeat.strategies.localsgd",
        paper="arXiv 1805.09767",
        summary="Weights averaged once in a while",
    ),
    StrategyEntry(
        name="wagma",
        class_name="WAGMA",
        module="offbeat.strategies.wagma",
        paper="arXiv 2005.00124",
        summary="Weights averaged in rotating groups, without waiting for stragglers",
    ),
    StrategyEntry(
        name="eagersgd",
        class_name="EagerSGD",
        module="offbeat.strategies.eagersgd",
        paper="arXiv 1908.04207",
        summary="Gradients averaged without waiting for stragglers",
    ),
    StrategyEntry(
        name="dpsgd",
        class_name="DPSGD",
        module="offbeat.strategies.dpsgd",
        paper="arXiv 1705.09056",
        summary="Weights averaged with two neighbours in every step",
    ),
    StrategyEntry(
        name="adpsgd",
        class_name="ADPSGD",
        module="offbeat.strategies.adpsgd",
        paper="arXiv 1710.06952",
        summary="Weights averaged with one random worker after every step, asynchronously",
    ),
    StrategyEntry(
        name="sgp",
        class_name="SGP",
        module="offbeat.strategies.sgp",
        paper="arXiv 1811.10792",
        summary="Weights pushed to a few other ranks in every step",
    ),
    StrategyEntry(
        name="adaptive",
        class_name="AdaptiveSGD",
        module="offbeat.strategies.adaptive",
        paper="arXiv 2110.07029",
        summary="Each rank claims its next batch as soon as it is free, batch sizes follow speeds,"
        " and models are merged after every mega-batch",
    ),
    StrategyEntry(
        name="elasticsgd",
        class_name="ElasticSGD",
        module="offbeat.strategies.elasticsgd",
        paper="arXiv 2110.07029",
        summary="Models averaged after every mega-batch, of which each rank computes an equal share"
        " in equal batches",
    ),
    StrategyEntry(
        name="crossbow",
        class_name="Crossbow",
        module="offbeat.strategies.crossbow",
        paper="arXiv 1901.02244",
        summary="Synchronous model averaging: every model is drawn towards a central one",
    ),
    StrategyEntry(
        name="dkfac",
        class_name="DKFAC",
        module="offbeat.strategies.kfac",
        paper="arXiv 2007.00784",
        summary="K-FAC, all factors inverted by every rank",
    ),
    StrategyEntry(
        name="mpdkfac",
        class_name="MPDKFAC",
        module="offbeat.strategies.kfac",
        paper="arXiv 1811.12019",
        summary="K-FAC, each factor inverted by one rank",
    ),
    StrategyEntry(
        name="spdkfac",
        class_name="SPDKFAC",
        module="offbeat.strategies.kfac",
        paper="arXiv 2107.06533",
        summary="K-FAC whose communication hides behind its computation",
    ),
    StrategyEntry(
        name="dpkfac",
        class_name="DPKFAC",
        module="offbeat.strategies.kfac",
        paper="arXiv 2206.15143",
        summary="K-FAC, only preconditioned gradients travel",
    ),
)
"""All strategies, those that exchange gradients first, then weights, then Kronecker factors."""

WEIGHT_CODECS: Final[NamedObjects[WeightCodec]] = NamedObjects(
    sparseloco="offbeat.codec.sparseloco:SparseLoCo",
)
"""How changes of weights travel, by name."""

SCHEDULES: Final[NamedObjects[AveragingSchedule]] = NamedObjects(
    adaptive="offbeat.averaging.adaptive_period:AdaptivePeriod",
)
"""When weights are averaged, by name."""
