"""The table of strategies. It feeds the facade, the command line, `help()` and the documentation.
Tables of objects that options of strategies name are below it.

A strategy is one file, one entry here, and one line for type checkers in `offbeat/__init__.py`; an
object for an option is one file and one line. The tables name modules and import none, so that
`import offbeat` is cheap.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from typing_extensions import override

from offbeat.codec.described_options import first_sentence
from offbeat.codec.option_value import NamedObjects

if TYPE_CHECKING:
    from offbeat.averaging.periodic import AveragingSchedule
    from offbeat.codec.topk_codec import WeightCodec
    from offbeat.strategies.base import Strategy


ALONE: Final = "alone"
"""What `offbeat run` calls no exchange at all. It is no strategy of the facade."""


class StrategyEntry(NamedTuple):
    """One strategy.

    Attributes:
        name: what the command line, records and checkpoints call it.
        class_name: its class, which is an attribute of `offbeat`.
        arxiv: where it was published, or compared as a baseline.
        file: where the class is defined, in this folder; None: in the one called `name`.
    """

    name: str
    class_name: str
    arxiv: str
    file: str | None = None

    @property
    def paper(self) -> str:
        """As "arXiv NUMBER"."""
        return f"arXiv {self.arxiv}"

    @property
    def module(self) -> str:
        """Where the class is defined."""
        return f"offbeat.strategies.{self.file or self.name}"

    @property
    def summary(self) -> str:
        """What it does: the first sentence of its class's docstring, without its full stop. It is
        read from the source, since whoever lists strategies need not import them.
        """
        source = Path(__file__).with_name(f"{self.file or self.name}.py").read_text("utf-8")
        return next(
            first_sentence(ast.get_docstring(node))
            for node in ast.parse(source).body
            if isinstance(node, ast.ClassDef) and node.name == self.class_name
        )


class StrategyRegistry(NamedObjects["type[Strategy]"]):
    """Strategies by name. A class is imported when it is asked for.

    Args:
        families: the entries of each, under what they have in common.

    Attributes:
        families: as given.
        entries: all of them, by name.
    """

    def __init__(self, families: Mapping[str, Sequence[StrategyEntry]]) -> None:
        self.families: Final = families
        self.entries: Final = {
            entry.name: entry for family in families.values() for entry in family
        }

        super().__init__(**{name: entry.module for name, entry in self.entries.items()})

    @override
    def __getitem__(self, name: str) -> type[Strategy]:
        entry = self.entries[name]
        kind: type[Strategy] = getattr(import_module(entry.module), entry.class_name)
        return kind


REGISTRY: Final = StrategyRegistry(
    {
        "Chosen by measuring": [StrategyEntry("auto", "Auto", "2006.15704")],
        "Gradients, all of them": [
            StrategyEntry("allreduce", "AllReduce", "2006.15704"),
            StrategyEntry("dear", "DeAR", "2302.12445"),
            StrategyEntry("powersgd", "PowerSGD", "1905.13727"),
            StrategyEntry("onebitadam", "OneBitAdam", "2102.02888"),
            StrategyEntry("qgenx", "QGenX", "2308.09187"),
        ],
        "Gradients, of which a part travels": [
            StrategyEntry("topk", "TopK", "1809.07599"),
            StrategyEntry("gtopk", "GTopK", "1901.04359"),
            StrategyEntry("ef21", "EF21", "2106.05203"),
            StrategyEntry("demo", "DeMo", "2411.19870"),
        ],
        "Weights, averaged by all ranks": [
            StrategyEntry("localsgd", "LocalSGD", "1805.09767"),
            StrategyEntry("a2sgd", "A2SGD", "2006.07405"),
            StrategyEntry("defsgd", "DEFSGD", "2004.05298"),
            StrategyEntry("zerooneadam", "ZeroOneAdam", "2202.06009"),
            StrategyEntry("crossbow", "Crossbow", "1901.02244"),
        ],
        "Weights, averaged by a few ranks": [
            StrategyEntry("dpsgd", "DPSGD", "1705.09056"),
            StrategyEntry("sgp", "SGP", "1811.10792"),
        ],
        "Averages that wait for no straggler": [
            StrategyEntry("wagma", "WAGMA", "2005.00124"),
            StrategyEntry("adpsgd", "ADPSGD", "1710.06952"),
            StrategyEntry("eagersgd", "EagerSGD", "1908.04207"),
        ],
        "Samples, shared out among ranks": [
            StrategyEntry("adaptive", "AdaptiveSGD", "2110.07029"),
            StrategyEntry("elasticsgd", "ElasticSGD", "2110.07029"),
        ],
        "Kronecker factors, beside gradients": [
            StrategyEntry("dkfac", "DKFAC", "2007.00784", file="kfac"),
            StrategyEntry("mpdkfac", "MPDKFAC", "1811.12019", file="kfac"),
            StrategyEntry("spdkfac", "SPDKFAC", "2107.06533", file="kfac"),
            StrategyEntry("dpkfac", "DPKFAC", "2206.15143", file="kfac"),
        ],
    }
)
"""All strategies, those that exchange gradients first, then weights, then Kronecker factors."""

NAMES: Final = {(entry.module, entry.class_name): entry.name for entry in REGISTRY.entries.values()}
"""What their classes are called there, by module and name."""

WEIGHT_CODECS: Final[NamedObjects[WeightCodec]] = NamedObjects(
    linear8="offbeat.codec.topk_codec:AllChanges:linear8",
    linear4="offbeat.codec.topk_codec:AllChanges:linear4",
    e3m0="offbeat.codec.topk_codec:AllChanges:e3m0",
    sign="offbeat.codec.topk_codec:AllChanges:sign",
    sparseloco="offbeat.codec.sparseloco:SparseLoCo",
)
"""How changes of weights travel, by name."""

SCHEDULES: Final[NamedObjects[AveragingSchedule]] = NamedObjects(
    adaptive="offbeat.averaging.adaptive_period:AdaptivePeriod",
)
"""When weights are averaged, by name."""
