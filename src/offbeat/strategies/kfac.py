"""K-FAC: one strategy with four plans.

For the weight matrix W of each layer, with inputs a and output gradients g,

    A <- decay A + (1 - decay) mean of a a^T        G <- decay G + (1 - decay) mean of g g^T
    pi^2 = mean eigenvalue of A / mean eigenvalue of G
    P = (G + sqrt(damping) / pi)^-1 (dL/dW) (A + sqrt(damping) pi)^-1
    gradient = P min(1, sqrt(kl_clip / sum over layers of lr^2 <P, dL/dW>))

and the optimizer steps with that (arXiv 1503.05671, 1602.01407). Means are over the examples of all
ranks. `DKFAC`, `MPDKFAC`, `SPDKFAC` and `DPKFAC` differ in their planner alone: which factors
travel together and when, which rank inverts them, and whether inverses travel or preconditioned
gradients.

Differences from the papers: gradients may be exchanged by any gradient strategy; running averages
are kept free of damping, which the released code adds to them in each step, and start from nothing
in place of the identity; factors do not depend on the batch size; a layer whose factor has no
inverse gets plain gradients until it has; of the first steps, each of `factor_interval` has
factors, and steps 0, 1, 2, 4, 8, ... of `inverse_interval` invert; an owner's inverses of one size
travel in one message, and while it goes on inverting. SPD-KFAC's code adds the whole damping to
each factor (`pi=False`), and scales those of a convolution with S positions: its A is 1/S of ours
and its G is S times ours. Ranks on devices of different kinds round differently: there each layer
has one owner, which sends preconditioned gradients, whatever the strategy.

With `grafting`, which none of these papers has, a layer's P takes the length of its dL/dW (Agarwal
et al., "Disentangling Adaptive Gradient Methods from Learning Rates", arXiv 2002.11803): "layer" as
published there, with the lengths of plain gradients as the method to take them from; "floor" only
where P is shorter, and `kl_clip` goes on limiting steps by the estimate for P as it was. It keeps
nothing, sends nothing but a number for each layer where owners send gradients, and costs two norms
and a product for each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Literal, Self

import torch
from typing_extensions import override

from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.codec.described_options import OneOrMore, Positive
from offbeat.errors import ConfigError, UnsupportedError
from offbeat.gradients.exchange import LaunchOrder
from offbeat.kfac.blocks import KFACContext, slots_of
from offbeat.kfac.callback import KFACCallback
from offbeat.kfac.costs import gather_plan_inputs
from offbeat.kfac.curvature import Curvature as Curvature
from offbeat.kfac.curvature import KFACSettings
from offbeat.kfac.plans import (
    KFACPlanner,
    block_owners,
    every_rank,
    in_turn,
    no_messages,
    planned_messages,
    shortest_phase,
    two_messages,
)
from offbeat.kfac.survey import survey
from offbeat.strategies.base import Strategy
from offbeat.strategies.gradient import GradientStrategy
from offbeat.strategies.registry import REGISTRY
from offbeat.torch_private import unscales_gradients_itself

USUAL_CURVATURE: Final = Curvature()


@dataclass(frozen=True, kw_only=True)
class KFACStrategy(Strategy):
    """Second-order steps: gradients times the inverses of Kronecker factors A and G.

    Args:
        damping: what is added before inversion, > 0: to the eigenvalues of the product of A and G,
            or to those of each, as `pi` says.
        factor_interval: steps from one whose factors are averaged to the next, >= 1.
        inverse_interval: steps from one with inversions to the next, >= 1.
        kl_clip: limit of the change that a step may make by its own estimate, > 0; None: no limit.
        grafting: whose length a layer's preconditioned gradient has: "none" its own; "floor" no
            less than the plain gradient's, before `kl_clip` shortens it by the estimate for what it
            was; "layer" the plain gradient's, whatever `kl_clip` says. "auto": "floor" in a script
            under `offbeat run` that knows nothing of K-FAC, else "none".
        exchange: how gradients are exchanged, such as `offbeat.GTopK(density=0.01)`.
        curvature: what the factors of layers are taken over, how they are averaged and damped, and
            what inverses are kept in.
    """

    acts_at_steps: ClassVar[bool] = True
    hooks_layers = True
    planner: ClassVar[KFACPlanner]
    """What the strategy is."""

    damping: Positive = 0.01
    factor_interval: OneOrMore = 10
    inverse_interval: OneOrMore = 100
    kl_clip: Positive | None = 0.001
    grafting: Literal["auto", "none", "floor", "layer"] = "auto"
    exchange: GradientStrategy | Literal["allreduce", "topk", "gtopk", "powersgd"] = "allreduce"
    curvature: Curvature = USUAL_CURVATURE

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.planner.by_owner and self.curvature.factor_codec != "float32":
            raise ConfigError(
                f"factor_codec={self.curvature.factor_codec!r} is how factors travel, and with"
                f" {self.name} none do; leave it out"
            )

    def settings(self) -> KFACSettings:
        """What all K-FAC strategies do alike."""
        return KFACSettings(
            damping=self.damping,
            kl_clip=None if self.grafting == "layer" else self.kl_clip,
            grafting="none" if self.grafting == "auto" else self.grafting,
            factor_interval=self.factor_interval,
            inverse_interval=self.inverse_interval,
            curvature=self.curvature,
        )

    @override
    def step_kinds(self) -> Callable[[int], Hashable]:
        settings = self.settings()
        return lambda step: (settings.has_factors(step), settings.has_inversions(step))

    @property
    def gradients(self) -> GradientStrategy:
        """The strategy that exchanges gradients."""
        exchange: Strategy = (
            REGISTRY[self.exchange]() if isinstance(self.exchange, str) else self.exchange
        )
        assert isinstance(exchange, GradientStrategy)
        return exchange

    @override
    def for_plain_script(self) -> Self:
        return replace(self, grafting="floor") if self.grafting == "auto" else self

    @property
    @override
    def can_start(self) -> bool:
        return self.gradients.can_start

    def check(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        survey(model, self.curvature)
        self.gradients.check(model, optimizer)

    def check_world(self, world_size: int) -> None:
        self.gradients.check_world(world_size)

    def build(self, context: Context) -> Sequence[Callback]:
        model, optimizer = context.model, context.optimizer
        assert model is not None
        if context.has_scaler and optimizer is not None and unscales_gradients_itself(optimizer):
            raise UnsupportedError(
                f"{type(optimizer).__name__} unscales gradients itself, inside the step, where"
                " K-FAC needs them before; build it with fused=False, or use bfloat16 autocast"
                " without a GradScaler"
            )
        exchanged = set(map(id, context.parameters.values()))
        if any(p.requires_grad and id(p) not in exchanged for p in model.parameters()):
            raise UnsupportedError(
                "DistributedDataParallel was told to ignore parameters of the model, and K-FAC"
                " preconditions whole layers, the same on all ranks; let it ignore none, freeze"
                " them, or choose another strategy"
            )
        is_sparse = getattr(self.gradients, "density", 1.0) != 1.0
        if is_sparse and not isinstance(optimizer, torch.optim.SGD):
            context.notices.warn(
                f"{type(optimizer).__name__} scales anew what K-FAC makes of the few entries that"
                f" {self.gradients.name} delivers, and models have learned little or nothing so;"
                " use torch.optim.SGD, or exchange='allreduce'"
            )
        found, settings = survey(model, self.curvature), self.settings()
        groups = [] if optimizer is None else optimizer.param_groups
        if settings.kl_clip is not None and any(group.get("lr") is None for group in groups):
            context.notices.notify(
                f"{type(optimizer).__name__} does not say its learning rate, so kl_clip does not"
                " limit its steps"
            )
        slots = slots_of(found.blocks)
        (context.notices.notify if found.plain else context.notices.inform)(found.notice())
        inputs = gather_plan_inputs(
            slots,
            settings=settings,
            measures=self.planner.measures,
            driver=context.driver,
            stream=context.new_stream(),
        )
        if not inputs.same_devices:
            context.notices.notify(
                "ranks compute on devices of different kinds, which round differently: each layer"
                " is preconditioned by one rank, which sends the result"
            )
        # Factors travel beside the buckets of gradients, so both share one order of launching, and
        # K-FAC hears from the exchange of gradients whether a step is good.
        launch_order = LaunchOrder()
        exchange, others = self.gradients.build_exchange(context, launch_order=launch_order)
        kfac = KFACCallback(
            KFACContext(
                session=context,
                blocks=found.blocks,
                slots=slots,
                settings=settings,
                stream=context.new_stream(),
            ),
            planner=self.planner,
            inputs=inputs,
            buckets=exchange.buckets,
            launch_order=launch_order,
        )
        is_rounded = "; inverses are in bfloat16" if kfac.form == "bfloat16" else ""
        context.notices.inform(
            f"K-FAC's factors take {kfac.num_bytes / 1e6:,.0f} MB of memory on this rank: averages,"
            f" inverses and messages{is_rounded}"
        )
        exchange.add_listener(kfac.scheduler)
        return [exchange, *others, kfac]


@dataclass(frozen=True, kw_only=True)
class DKFAC(KFACStrategy):
    """K-FAC, all factors inverted by every rank.

    The baseline of SPD-KFAC (arXiv 2107.06533, section III): Pauloski et al., arXiv 2007.00784,
    without distributing inversions.

        forward and backward pass, gradients all-reduced, as in S-SGD
        all-reduce all A in one message and all G in another
        every rank: for each layer l:  invert A_l and G_l
                                       dL/dW_l <- G_l^-1 (dL/dW_l) A_l^-1
        the optimizer steps

    Cost per step, for P ranks and factors of d_i rows: 2(P-1)/P sum of d_i (d_i + 1) / 2 elements
    sent by each rank, behind the backward pass, and the inversion of everything on every rank.
    """

    planner: ClassVar[KFACPlanner] = KFACPlanner(groups=two_messages, owners=every_rank)


@dataclass(frozen=True, kw_only=True)
class MPDKFAC(KFACStrategy):
    """K-FAC, each factor inverted by one rank.

    The other baseline of SPD-KFAC (arXiv 2107.06533, section III): Osawa et al., arXiv 1811.12019,
    and 2007.00784.

        as D-KFAC, but rank i mod P inverts factor i and broadcasts the inverse

    Cost per step: as of D-KFAC, with 1/P of the inversions, and as many elements as the inverses
    have, once each, by broadcast.
    """

    planner: ClassVar[KFACPlanner] = KFACPlanner(groups=two_messages, owners=in_turn)


@dataclass(frozen=True, kw_only=True)
class SPDKFAC(KFACStrategy):
    """K-FAC whose communication hides behind its computation.

    Shi, Zhang and Li, "Accelerating Distributed K-FAC with Smart Parallelism of Computing and
    Communication Tasks", arXiv 2107.06533, sections IV (pipelining and fusion) and V (placement).

        forward pass:    for each layer in order:   A_l <- mean of a a^T
                         all-reduce each group of A as soon as it is complete
        backward pass:   for each layer in reverse: G_l <- mean of g g^T, and dL/dW_l
                         all-reduce each group of G, and each bucket of gradients, likewise
        inversion:       for each factor, largest first:
                             if inverting it takes less time than receiving it:
                                 every rank inverts it
                             else:
                                 the rank with the least to do inverts it and broadcasts the
                                 inverse, while it goes on with the next
        update:          dL/dW_l <- G_l^-1 (dL/dW_l) A_l^-1, and the optimizer steps with it

    Cost per step: as of MPD-KFAC, less what is hidden behind the forward and backward passes, less
    broadcasts of small inverses.

    Differences from the paper: the groups are the fewest with the earliest end, and the placement
    is one with about the shortest predicted phase, both of measured costs; kfac/overlap.py and
    placement.py say where the paper's rules fall short. An inversion takes what was measured and
    not alpha exp(beta d). Inverses of one owner share messages where that is shorter. Groups are
    planned in the fourth step with factors; until then, all A are one group and all G another.
    """

    planner: ClassVar[KFACPlanner] = KFACPlanner(
        groups=planned_messages, owners=shortest_phase, streamed=True, measures=True
    )


@dataclass(frozen=True, kw_only=True)
class DPKFAC(KFACStrategy):
    """K-FAC, only preconditioned gradients travel.

    Zhang, Shi and Li, "Scalable K-FAC Training for Deep Neural Networks with Distributed
    Preconditioning", arXiv 2206.15143.

        forward and backward pass, gradients all-reduced, as in S-SGD
        the owner of layer l: averages A_l and G_l of its own batch over steps, and inverts them
                              dL/dW_l <- G_l^-1 (dL/dW_l) A_l^-1, which it broadcasts
        the optimizer steps

    Cost per step: the gradients once more, by broadcast, in every step; no factors and no inverses.
    Each rank keeps only what it owns.

    Differences from the paper: layers are dealt out by d^3, largest first, and not in turn.
    """

    planner: ClassVar[KFACPlanner] = KFACPlanner(
        groups=no_messages, owners=block_owners, by_owner=True
    )
