"""The strategies and faults of the matrix, what is promised of each pair, and the cells that are
drawn from them.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, Literal

import offbeat
from conformance_support.lent import lent
from offbeat.strategies.base import Strategy

STEP_S: Final = 0.02
"""What a rank computes in a step, emulated by sleeping: a cell keeps no core busy."""
SHORT, LONG = 0.3, 1.5
"""How long what is undone lasts, as multiples of the limit of silence: 6 s and 30 s where it is
20 s.
"""
DEATH_S: Final = 5.0
"""Within what time a death is an error by name. Its kernel says so to the peers at once."""
MARGIN_S: Final = 3.0
"""And a silence: within its limit and so much more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """What is promised to those whom a fault did not hit.

    Attributes:
        kind: "error": each of them raises an `OffbeatError` that names who was hit; "goes on": each
            of them takes all its steps; "ends": one or the other.
        within_s: in what time after the fault the errors come.
        stall_s: by how much the longest step after the fault may exceed the usual one.
    """

    kind: Literal["error", "goes on", "ends"]
    within_s: float = 0.0
    stall_s: float = 0.0

    def __str__(self) -> str:
        error, stall = f"error within {self.within_s:g} s", f"goes on, stall {self.stall_s:g} s"
        return {"error": error, "goes on": stall, "ends": f"{stall}, or {error}"}[self.kind]


def fails(within_s: float) -> Promise:
    return Promise(kind="error", within_s=within_s)


def goes_on(stall_s: float) -> Promise:
    return Promise(kind="goes on", stall_s=stall_s)


def ends(within_s: float) -> Promise:
    return Promise(kind="ends", within_s=within_s, stall_s=within_s)


Moment = Literal["attach", "step", "exchange", "saving", "end", "before attach"]
Action = Literal[
    "kill",
    "stop",
    "cut",
    "raise",
    "nan",
    "fill disk",
    "kill store",
    "model",
    "dtype",
    "option",
    "fewer steps",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What befalls some ranks of a run.

    Attributes:
        title: the row of the table.
        action, moment: what happens, and when.
        num_hit: to how many ranks.
        lasts: after what multiple of the limit of silence a stop or a cut is undone; None: never.
        returns: whether a killed rank is started again.
        after_s: how long the run goes on after the fault, beside multiples of the limit.
        after_limits: these multiples.
    """

    title: str
    action: Action
    moment: Moment = "step"
    num_hit: int = 1
    lasts: float | None = None
    returns: bool = False
    after_s: float = 2.5
    after_limits: float = 0.0

    @property
    def needs_links(self) -> bool:
        return self.action == "cut"


FAULTS: Final = {
    "killed-in-attach": Fault(title="killed in `attach`", action="kill", moment="attach"),
    "killed": Fault(title="killed in a step", action="kill"),
    "killed-in-exchange": Fault(
        title="killed in an exchange or a merge", action="kill", moment="exchange"
    ),
    "killed-while-saving": Fault(title="killed while saving", action="kill", moment="saving"),
    "killed-at-end": Fault(title="killed just before the end", action="kill", moment="end"),
    "two-killed": Fault(title="two killed at once", action="kill", num_hit=2, after_limits=1.5),
    "stopped-short": Fault(
        title="stopped, 0.3 x the limit", action="stop", lasts=SHORT, after_limits=SHORT, after_s=1
    ),
    "stopped-long": Fault(
        title="stopped, 1.5 x the limit", action="stop", lasts=LONG, after_limits=LONG, after_s=3
    ),
    "stopped": Fault(title="stopped for good", action="stop", after_limits=1.0),
    "cut-short": Fault(
        title="link cut, 0.3 x the limit", action="cut", lasts=SHORT, after_limits=SHORT, after_s=2
    ),
    "cut-long": Fault(
        title="link cut, 1.5 x the limit", action="cut", lasts=LONG, after_limits=LONG, after_s=3
    ),
    "cut": Fault(title="link cut for good", action="cut", after_limits=1.0),
    "disk-full": Fault(
        title="disk full while saving", action="fill disk", moment="saving", after_s=1.5
    ),
    "exception": Fault(title="exception in the loop", action="raise", after_s=1.5),
    "nan": Fault(title="gradient is NaN", action="nan", after_s=0.5),
    "other-model": Fault(title="another model", action="model", moment="before attach"),
    "other-dtype": Fault(title="another dtype", action="dtype", moment="before attach"),
    "other-option": Fault(
        title="another density, or other option", action="option", moment="before attach"
    ),
    "fewer-steps": Fault(title="fewer steps", action="fewer steps", moment="end", after_s=1.5),
    "returns": Fault(title="killed, and started again", action="kill", returns=True, after_s=6.0),
    "store-killed": Fault(title="the store's process killed", action="kill store"),
}


def promise(fault: Fault, strategy: Strategy, limit_s: float) -> Promise:
    """What is promised to those who were not hit.

    Args:
        fault: what happens.
        strategy: of all ranks.
        limit_s: the limit of silence.
    """
    silence_s = limit_s + MARGIN_S
    if fault.moment in ("attach", "before attach"):
        return fails(DEATH_S)
    if fault.action == "nan":
        return goes_on(1.0)
    if fault.action == "kill store":
        return ends(silence_s)
    if fault.moment == "end" and fault.action == "kill":
        return ends(DEATH_S)
    if fault.lasts == SHORT:
        # TCP sends again after pauses that double, so a link may be used late after it was mended.
        return goes_on((2 if fault.action == "cut" else 1) * SHORT * limit_s + 1.0)
    is_silent = fault.action in ("stop", "cut")
    if strategy.survives_death:
        return goes_on(silence_s if is_silent or fault.num_hit > 1 else 3.0)
    return fails(silence_s if is_silent else DEATH_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultyStrategy:
    """A strategy of the matrix, and an option in which one rank may differ; without one it has
    another strategy.
    """

    strategy: Strategy
    other: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def differing(self) -> Strategy:
        return replace(self.strategy, **self.other) if self.other else offbeat.PowerSGD()


_KFAC: dict[str, Any] = {"factor_interval": 2, "inverse_interval": 4}
_DAMPING = {"damping": 0.02}

STRATEGIES: Final = {
    "AllReduce": FaultyStrategy(
        strategy=lent(offbeat.AllReduce(), bucket_mib=1e-3), other={"codec": "sign"}
    ),
    "DeAR": FaultyStrategy(strategy=lent(offbeat.DeAR(), bucket_mib=1e-3)),
    "TopK": FaultyStrategy(strategy=offbeat.TopK(density=0.1), other={"density": 0.2}),
    "GTopK": FaultyStrategy(
        strategy=offbeat.GTopK(density=0.1, collective="reduce_scatter"), other={"density": 0.2}
    ),
    "GTopK, dense": FaultyStrategy(
        strategy=offbeat.GTopK(density=0.1, collective="dense"), other={"density": 0.2}
    ),
    "LocalSGD": FaultyStrategy(strategy=offbeat.LocalSGD(period=2), other={"period": 3}),
    "LocalSGD among members": FaultyStrategy(
        strategy=offbeat.LocalSGD(period=2, exchange="members"), other={"period": 3}
    ),
    "LocalSGD with a quorum": FaultyStrategy(
        strategy=offbeat.LocalSGD(period=2, exchange="60%+0.1s"), other={"period": 3}
    ),
    "DPSGD": FaultyStrategy(strategy=offbeat.DPSGD(), other={"codec": "sign"}),
    "SGP": FaultyStrategy(strategy=offbeat.SGP(), other={"codec": "sign"}),
    "Crossbow": FaultyStrategy(strategy=offbeat.Crossbow(), other={"period": 2}),
    "Crossbow in 4 bits": FaultyStrategy(
        strategy=offbeat.Crossbow(codec="linear4"), other={"period": 2}
    ),
    "SPDKFAC": FaultyStrategy(strategy=offbeat.SPDKFAC(**_KFAC), other=_DAMPING),
    "DKFAC": FaultyStrategy(strategy=offbeat.DKFAC(**_KFAC), other=_DAMPING),
    "MPDKFAC": FaultyStrategy(strategy=offbeat.MPDKFAC(**_KFAC), other=_DAMPING),
    "DPKFAC": FaultyStrategy(strategy=offbeat.DPKFAC(**_KFAC), other=_DAMPING),
    "WAGMA": FaultyStrategy(strategy=offbeat.WAGMA(), other={"period": 7}),
    "ADPSGD": FaultyStrategy(strategy=offbeat.ADPSGD(), other={"values": "bfloat16"}),
    "EagerSGD": FaultyStrategy(strategy=offbeat.EagerSGD(), other={"mode": "solo"}),
    "AdaptiveSGD": FaultyStrategy(
        strategy=offbeat.AdaptiveSGD(mega_batch=10), other={"mega_batch": 11}
    ),
    "ElasticSGD": FaultyStrategy(
        strategy=offbeat.ElasticSGD(mega_batch=10), other={"mega_batch": 11}
    ),
}


OF_ISLANDS: Final = ("AllReduce", "GTopK", "LocalSGD", "LocalSGD among members", "WAGMA")
"""Strategies with which models that are sharded inside islands are trained."""

ON_ISLANDS: Final = ("killed", "stopped-short", "stopped", "cut-short", "returns")
"""What befalls one rank of an island, where it is killed, and else all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One run of the matrix.

    Attributes:
        strategy, fault: keys of `STRATEGIES` and `FAULTS`.
        ranks: how many.
        shards: how many of them hold a replica together.
        links: whether each rank is in a network namespace behind an emulated link.
        limit_s: the limit of silence.
        seed: of who is hit, and when.
        slack: by what the times that are promised are multiplied, on a machine that is busy with
            other things.
    """

    strategy: str
    fault: str
    ranks: int = 3
    shards: int = 1
    links: bool = False
    limit_s: float = 3.0
    seed: int = 0
    slack: float = 1.0

    @property
    def name(self) -> str:
        where = "links" if self.links else "processes"
        shape = f"{self.ranks // self.shards} x " if self.shards > 1 else ""
        return f"{self.fault}/{self.strategy}/{shape}{self.shards if shape else self.ranks} {where}"

    @property
    def promise(self) -> Promise:
        made = promise(FAULTS[self.fault], STRATEGIES[self.strategy].strategy, self.limit_s)
        return replace(made, within_s=self.slack * made.within_s, stall_s=self.slack * made.stall_s)

    def islands_of(self, ranks: Collection[int]) -> frozenset[int]:
        """All ranks of the islands of `ranks`."""
        islands = {rank // self.shards for rank in ranks}
        return frozenset(rank for rank in range(self.ranks) if rank // self.shards in islands)

    @property
    def after_s(self) -> float:
        """How long the run goes on after the fault."""
        fault = FAULTS[self.fault]
        return fault.after_s + fault.after_limits * self.limit_s

    def drawn(self) -> Drawn:
        draws = random.Random(f"{self.seed}/{self.name}")
        hit = tuple(draws.sample(range(self.ranks), FAULTS[self.fault].num_hit))
        if self.shards > 1 and self.fault != "killed":
            hit = tuple(sorted(self.islands_of(hit)))
        return Drawn(
            hit=hit,
            at_step=draws.randint(4, 9),
            at_operation=draws.randint(1, 12),
            at_start=draws.choice(["gloo", "mesh", "agreement"]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """Who is hit, and when.

    Attributes:
        hit: the ranks.
        at_step: the step, counted from 0.
        at_operation: which operation of its driver from then on.
        at_start: where in `attach`.
    """

    hit: tuple[int, ...]
    at_step: int
    at_operation: int
    at_start: str
