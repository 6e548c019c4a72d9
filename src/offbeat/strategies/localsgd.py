"""Local SGD: every rank trains alone for H = `period` steps, then all weights are averaged (arXiv
1805.09767, algorithm 1).

    repeat:
        H times: optimizer step on this rank's own gradient
        x = mean of all ranks' x

H begins with 1 and grows by one in every `warmup` steps until it is `period`, because models that
part in the first steps end worse (post-local SGD says so too; arXiv 2310.14423 lets H grow as the
learning rate falls).

With `start_step` it is post-local SGD (arXiv 1808.07217): in the first steps gradients are
all-reduced, as in `AllReduce`, and with `start` K-FAC makes second-order steps of them. With
`outer` the mean goes through an optimizer of its own, any of `torch.optim`, which makes it SlowMo
or DiLoCo; see `averaging.outer`. With `codec` only the largest changes travel, in few bits, and the
others are owed; "sparseloco" with an outer SGD is SparseLoCo (arXiv 2508.15706). With `exchange`
fragments of the model are averaged in turn while training goes on (`averaging.streaming`), or
random pairs of ranks average in the place of all (`averaging.gossip`), or workers meet in files
without a connection (`averaging.object_store`), or the members of the run do, which go on when one
dies or comes back, and need not wait for the last: the quorum and the grace period of Decoupled
DiLoCo (arXiv 2604.21428; `averaging.members`). With an interval for each of the optimizer's states
it is DES-LOC (arXiv 2505.22549).

Cost per period: one all-reduce of the weights, 2(P-1)/P n elements sent by each rank, and as much
again for each state of the optimizer that is averaged (one of SGD with momentum, two of Adam),
after the step and overlapped with nothing. So a step costs 1/H of S-SGD's bytes, 2/H with momentum,
and ranks wait for each other once in H steps. With a codec P - 1 times its message of k entries is
sent in place of the weights, and two vectors more are kept besides the anchor.

Differences from the papers: H grows and the optimizer's state is averaged, with Adam's second
moments made those of the mean gradient (`averaging.periodic.MeanSquares`), unless gradients are
all-reduced first or an outer optimizer is used; `warmup=0` with `optimizer_state="local"` is the
algorithm as published. In DES-LOC an element that no gradient of a rank has reached takes no
momentum of its peers while its second moment stays local. The optimizer is the user's; buffers are
averaged; a rank whose gradient is not finite skips its own step; SlowMo's outer momentum is not
rescaled when the learning rate changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal, Self

import torch
from typing_extensions import override

from offbeat.averaging.gossip import PairMean, Pairs
from offbeat.averaging.members import AverageOfMembers, MeanOfMembers
from offbeat.averaging.object_store import ObjectStore, StoreMean
from offbeat.averaging.outer import OuterFactory, OuterOptimizer
from offbeat.averaging.periodic import (
    AveragingSchedule,
    Everyone,
    GrowingPeriod,
    MeanOfAll,
    PeriodicAverage,
    StartPhase,
    WeightExchange,
    coded_changes,
)
from offbeat.averaging.streaming import Streaming, StreamingMean
from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.codec.described_options import (
    BelowOne,
    NotNegative,
    OneOrMore,
    Positive,
    check_options,
)
from offbeat.codec.option_value import require_at_least, require_one_of
from offbeat.errors import ConfigError
from offbeat.membership.atomic_group import AtomicGroup
from offbeat.membership.quorum import Quorum
from offbeat.strategies.averaging import AveragingStrategy, ChangesCodec, inform_of_short_steps
from offbeat.strategies.base import Strategy
from offbeat.strategies.options import refuse_idle, require_real
from offbeat.strategies.registry import REGISTRY, SCHEDULES
from offbeat.weights.model_weights import ModelWeights


@dataclass(frozen=True, kw_only=True)
class Outer:
    """Makes the optimizer of averaged weights, whose gradient is their change since the last
    average: `torch.optim.SGD` with these options. The defaults are DiLoCo's.

    Args:
        lr: of the outer optimizer, > 0; 1 without momentum takes the mean as it is.
        momentum: from average to average, in [0, 1).
        nesterov: Nesterov's momentum in place of plain one.
        offload: whether the host's memory holds what it keeps between averages, which is then as
            large as the model or, with momentum, twice as large, instead of the model's device.
    """

    lr: Positive = 0.7
    momentum: BelowOne = 0.9
    nesterov: bool = True
    offload: bool = False

    def __post_init__(self) -> None:
        check_options(self)
        if self.nesterov and not self.momentum:
            raise ConfigError(
                "nesterov=True needs an outer momentum greater than 0, got 0; pass nesterov=False"
            )

    def __call__(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of `parameters`."""
        return torch.optim.SGD(
            parameters, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov
        )


OUTERS = {
    "slowmo": Outer(lr=1.0, momentum=0.5, nesterov=False),
    "diloco": Outer(lr=0.7, momentum=0.9, nesterov=True),
}
"""Outer optimizers by name, with the values of their papers."""

_WITHOUT_STATES: Mapping[type, str] = {
    Streaming: "a fragment is averaged at equal intervals, without the optimizer's state",
    Pairs: "pairs average whole weights at once, without the optimizer's state",
    ObjectStore: "an object store averages whole weights at once, without the optimizer's state",
    Quorum: "members average weights without the optimizer's state",
}

STARTS = ("allreduce", "dkfac", "mpdkfac", "spdkfac", "dpkfac")
"""What the first steps may be, by name."""


@dataclass(frozen=True, kw_only=True)
class LocalSGD(AveragingStrategy):
    """Weights averaged once in a while.

    Args:
        period: local steps between averages, >= 1; or a schedule by its name, or an
            `AveragingSchedule` of your own.
        warmup: the steps in which the period grows by one, from 1 on, >= 0; 0: it is `period` from
            the beginning; None: 40, and 0 with `start_step`, `outer`, `exchange`, a `codec` that
            leaves entries out, or a `period` that is no number.
        start_step: steps with all-reduced gradients before the first local one, >= 0.
        start: what these steps are; one of these strategies with options of its own, too. Hooks of
            K-FAC are taken out after them.
        outer: the optimizer that is applied to the mean, such as `offbeat.Outer(lr=0.5)`, or any
            callable that makes one of the parameters it is given, such as
            `functools.partial(torch.optim.Adam, lr=1e-3)`; None takes the mean as it is.
        optimizer_state: "averaged": momentum, second moments and numbers of steps are averaged with
            the weights, which multiplies the bytes; "local": they stay the rank's own; or each by
            its name, with the number of averages of the weights to one of the state, such as
            `{"exp_avg": 3, "exp_avg_sq": 6}` or "exp_avg=3+exp_avg_sq=6"; None: "averaged", and
            "local" with `start_step`, `outer`, `codec` or `exchange`.
        codec: how changes of weights since the last average travel: the name of a codec, or a
            `WeightCodec`, such as `offbeat.WeightCodec(density=0.01, entries="bfloat16")`. What
            does not travel is owed. None: weights travel whole.
        exchange: how ranks meet. None: all wait for the average of all weights. "4x2" (fragments x
            delay in steps), "4x2x0.5" (x the weight of a rank's own parameters), or an
            `averaging.streaming.Streaming`: averages of one fragment travel beside training.
            "pairs", or an `averaging.gossip.Pairs` with a seed: random pairs average. An
            `averaging.object_store.ObjectStore`: by files, without connections. "members": as None,
            but deaths end nothing. "75%+2s", or a `membership.quorum.Quorum`: the same, once 75% of
            the members have come and the others were waited for 2 s longer.
    """

    period: OneOrMore | AveragingSchedule | Annotated[str, SCHEDULES] = 10
    warmup: NotNegative | None = None
    start_step: NotNegative = 0
    start: Strategy | Literal["allreduce", "dkfac", "mpdkfac", "spdkfac", "dpkfac"] = "allreduce"
    outer: Outer | OuterFactory | Literal["slowmo", "diloco"] | None = None
    optimizer_state: Mapping[str, int] | str | Literal["local", "averaged"] | None = None
    codec: ChangesCodec = None
    exchange: Streaming | Pairs | ObjectStore | Quorum | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        chosen = self.chosen_exchange
        if chosen is not None:
            self._check_exchange(chosen)
        if self.period == 1 and self.warmup:
            refuse_idle(self, "warmup", because="a period that is to be 1 has nothing to grow from")
        if not isinstance(self.period, int):
            refuse_idle(self, "warmup", because=f"period={self.period!r} says it itself")
        averages = self.averages_state
        for state, interval in averages.items() if isinstance(averages, Mapping) else ():
            require_at_least(f"the interval of {state!r} in optimizer_state", interval, 1)
        self._check_start()

    def _check_exchange(self, chosen: Streaming | Pairs | ObjectStore | Quorum) -> None:
        if isinstance(chosen, Streaming):
            self._check_fragments(chosen)
        because = next(why for kind, why in _WITHOUT_STATES.items() if isinstance(chosen, kind))
        if self.averages_state:
            refuse_idle(self, "optimizer_state", because=because)
        if self.schedule.measures_drift:
            refuse_idle(
                self, "period", because=f"{because}, and cannot say how far all ranks are apart"
            )
        if isinstance(chosen, Streaming) and self.warmup:
            refuse_idle(self, "warmup", because=because)
        if isinstance(chosen, Pairs | ObjectStore):
            refuse_idle(self, "codec", because=because)
        if isinstance(chosen, ObjectStore):
            refuse_idle(self, "start_step", because="a worker that is alone reduces no gradients")
        if isinstance(chosen, Quorum) and self.start_step:
            raise ConfigError(
                f"start_step={self.start_step} lets all ranks reduce gradients, which ends with the"
                f" first death, and exchange={self.exchange!r} is to survive it; leave one out"
            )

    def _check_fragments(self, streaming: Streaming) -> None:
        if not isinstance(self.period, int):
            raise ConfigError("streaming needs a period that is a number of steps")
        interval, rest = divmod(self.period, streaming.fragments)
        if rest or streaming.delay >= interval:
            raise ConfigError(
                f"streaming in {streaming.fragments} fragments, {streaming.delay} steps late, needs"
                " a period that is a multiple of the fragments, and a delay below period /"
                f" fragments; got period={self.period}"
            )

    @override
    def check_world(self, world_size: int) -> None:
        if world_size > 1 and isinstance(self.exchange, ObjectStore):
            raise ConfigError(
                f"an ObjectStore is for workers that are each alone, and this session has"
                f" {world_size} ranks; start each worker by itself, without torchrun"
            )

    @property
    @override
    def survives_death(self) -> bool:
        return isinstance(self.chosen_exchange, Quorum)

    @property
    @override
    def trains_islands(self) -> bool:
        unconnected = isinstance(self.chosen_exchange, ObjectStore)
        return not unconnected and (not self.start_step or self.first_steps.trains_islands)

    @property
    @override
    def keeps_anchor(self) -> bool:
        chosen = self.chosen_exchange
        # A mix draws the model to an average that has left before it was loaded.
        mixes = isinstance(chosen, Streaming) and chosen.mix is not None and chosen.delay > 0
        return mixes or self.outer is not None or self.codec is not None

    @property
    def chosen_exchange(self) -> Streaming | Pairs | ObjectStore | Quorum | None:
        """What `exchange` is or describes. Raises `ConfigError`."""
        if not isinstance(self.exchange, str):
            return self.exchange
        if self.exchange == "pairs":
            return Pairs()
        return Quorum.of(self.exchange) or Streaming.of(self.exchange)

    @property
    def steps_of_growth(self) -> int:
        """`warmup`, and what it is by default."""
        if self.warmup is None:
            codec = self.weight_codec
            sends_all = codec is None or codec.density == 1
            is_plain = not self.start_step and self.outer is None and self.exchange is None
            return 40 if isinstance(self.period, int) and is_plain and sends_all else 0
        return self.warmup

    @property
    def schedule(self) -> AveragingSchedule:
        """After which steps weights are averaged."""
        if isinstance(self.period, int):
            chosen = self.chosen_exchange
            fragments = chosen.fragments if isinstance(chosen, Streaming) else 1
            return GrowingPeriod(self.period // fragments, warmup=self.steps_of_growth)
        return SCHEDULES[self.period] if isinstance(self.period, str) else self.period

    @property
    def averages_state(self) -> bool | Mapping[str, int]:
        """Whether the optimizer's state is averaged, by `optimizer_state` or by default; or at
        every how many averages, by name of a state.
        """
        chosen = self.optimizer_state
        if chosen is None:
            changed = (self.outer, self.codec, self.exchange)
            return not self.start_step and all(each is None for each in changed)
        if not isinstance(chosen, str):
            return chosen
        if "=" not in chosen:
            require_one_of("optimizer_state", chosen, ("local", "averaged"))
            return chosen == "averaged"
        pairs = (part.partition("=") for part in chosen.split("+"))
        return {state: int(interval) if interval.isdecimal() else 0 for state, _, interval in pairs}

    @override
    def for_plain_script(self) -> Self:
        plain = self.first_steps.for_plain_script()
        return self if plain == self.first_steps else replace(self, start=plain)

    def _check_start(self) -> None:
        start = self.start
        if isinstance(start, Strategy) and start.name not in STARTS:
            raise ConfigError(
                f"start must be one of {', '.join(map(repr, STARTS))}, or such a strategy, as"
                f" offbeat.SPDKFAC(damping=0.003), got {start!r}"
            )
        given = repr(start) if isinstance(start, str) else f"{type(start).__name__}(...)"
        if start != "allreduce" and not self.start_step:
            raise ConfigError(
                f"start={given} is for the first start_step steps, and start_step is 0; set it,"
                " as in start_step=100"
            )
        if isinstance(start, Strategy) and not start.can_start:
            raise ConfigError(
                f"start={given} sends parts of gradients only, and what it owes when local steps"
                ' begin would be lost; use exchange="allreduce"'
            )

    @property
    @override
    def hooks_layers(self) -> bool:
        return self.start_step > 0 and self.first_steps.hooks_layers

    @property
    def first_steps(self) -> Strategy:
        """What the first steps are."""
        return REGISTRY[self.start]() if isinstance(self.start, str) else self.start

    def check(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if self.start_step:
            self.first_steps.check(model, optimizer)
        if self.codec is not None:
            require_real(model)

    def callbacks(self, context: Context, weights: ModelWeights) -> list[Callback]:
        period, is_alone = self.period, context.driver.world_size == 1
        if isinstance(period, int) and period > 1 and self.steps_of_growth and not is_alone:
            # A short run, such as one that times steps, never comes to the period it asked for.
            context.notices.inform(
                "averages are more frequent at first: after every step, and only from step"
                f" {self.start_step + period * self.steps_of_growth:,} on after every"
                f" {period}; warmup=0 begins with that"
            )
        if self.averages_state is not True and self.outer is None:
            inform_of_short_steps(context)
        codec = self.weight_codec
        outer = OUTERS[self.outer] if isinstance(self.outer, str) else self.outer
        chosen = self.chosen_exchange
        has_rule, parameters = outer is not None or codec is not None, context.parameters
        make = outer or Outer(lr=1.0, momentum=0.0, nesterov=False)  # which takes the mean as it is
        rule = partial(OuterOptimizer, parameters, make=make)
        peers = Everyone(context.driver, context.new_stream())
        exchange: WeightExchange
        match chosen:
            case Quorum():
                group = AtomicGroup(
                    context.own_store(),
                    count=context.count,
                    notify=context.notices.notify,
                    name_of=context.driver.name_of,
                )
                members = MeanOfMembers(
                    weights, rule(), group=group, quorum=chosen, codec=codec, context=context
                )
                return [AverageOfMembers(members, self.schedule, context=context)]
            case Streaming():
                exchange = StreamingMean(
                    weights, parameters, peers, streaming=chosen, outer=make, codec=codec
                )
            case ObjectStore():
                exchange = StoreMean(
                    weights, peers, store=chosen, rule=rule(), shared=context.shared
                )
            case Pairs():
                own = rule() if has_rule else None
                exchange = PairMean(weights, peers, pairs=chosen, rule=own)
            case _:
                exchange = MeanOfAll(
                    weights,
                    peers,
                    changes=coded_changes(parameters, codec, peers),
                    rule=rule() if has_rule else None,
                    optimizer=context.optimizer,
                    averages_state=self.averages_state,
                    notify=context.notices.notify,
                )
        average = PeriodicAverage(
            exchange, self.schedule, start_step=self.start_step, island=context.island
        )
        return [*self._gradient_phase(context), average]

    def _gradient_phase(self, context: Context) -> list[Callback]:
        if not self.start_step:
            return []
        # Nothing compares replicas, which part afterwards.
        callbacks = self.first_steps.build(replace(context, replica_check_interval=0))
        return [StartPhase(each, num_steps=self.start_step) for each in callbacks]
