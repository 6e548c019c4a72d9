"""What the K-FAC strategies have in common: everything but the plan.

For the weight matrix W of each layer, with inputs a and output gradients g,

    A <- decay A + (1 - decay) mean of a a^T        G <- decay G + (1 - decay) mean of g g^T
    pi^2 = mean eigenvalue of A / mean eigenvalue of G
    P = (G + sqrt(damping) / pi)^-1 (dL/dW) (A + sqrt(damping) pi)^-1
    gradient = P min(1, sqrt(kl_clip / sum over layers of lr^2 <P, dL/dW>))

and the optimizer steps with that (arXiv 1503.05671, 1602.01407). Means are over the examples of all
ranks. `DKFAC`, `MPDKFAC`, `SPDKFAC` and `DPKFAC` differ only in what their `plan` returns: which
factors travel together and when, which rank inverts them, and whether inverses travel or
preconditioned gradients.

Differences from the papers: gradients may be exchanged by any gradient strategy; running averages
are kept free of damping, which the released code adds to them in each step, and start from nothing
in place of the identity; factors do not depend on the batch size; a layer whose factor has no
inverse gets plain gradients until it has; the first steps are denser (`ramp`). SPD-KFAC's code adds
the whole damping to each factor (`pi=False`), and scales those of a convolution with S positions:
its A is 1/S of ours and its G is S times ours. Ranks on devices of different kinds round
differently: there each layer has one owner, which sends preconditioned gradients, whatever
the strategy.

With `grafting`, which none of these papers has, a layer's P takes the length of its dL/dW (Agarwal
et al., "Disentangling Adaptive Gradient Methods from Learning Rates", arXiv 2002.11803): "layer" as
published there, with the lengths of plain gradients as the method to take them from; "floor" only
where P is shorter, and `kl_clip` goes on limiting steps by the estimate for P as it was. It keeps
nothing, sends nothing but a number for each layer where owners send gradients, and costs two norms
and a product for each layer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal, Self

import torch
from typing_extensions import override

from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.errors import ConfigError, UnsupportedError, nearest
from offbeat.gradients.launch_order import LaunchOrder
from offbeat.kfac.blocks import slots_of
from offbeat.kfac.callback import KFACCallback, KFACPlanner
from offbeat.kfac.eigen import form_of
from offbeat.kfac.exchange.costs import gather_plan_inputs
from offbeat.kfac.options import FactorOptions, KFACSettings, StepsApart, positive_at
from offbeat.kfac.plans.factor_plan import FactorPlan, PlanInputs, block_owners
from offbeat.kfac.plans.inverse_order import inversion_order
from offbeat.kfac.survey import survey
from offbeat.strategies.allreduce import AllReduce
from offbeat.strategies.base import Strategy
from offbeat.strategies.gradient import GradientStrategy
from offbeat.strategies.gtopk import GTopK
from offbeat.strategies.options import (
    require_at_least,
    require_fraction_below_one,
    require_one_of,
    require_positive,
)
from offbeat.strategies.schedules import Schedule
from offbeat.strategies.topk import TopK
from offbeat.torch_private import unscales_gradients_itself

EXCHANGES: dict[str, type[GradientStrategy]] = {
    kind.name: kind for kind in (AllReduce, TopK, GTopK)
}
"""Strategies that can exchange the gradients, by name."""


@dataclass(frozen=True, kw_only=True)
class KFACStrategy(Strategy):
    """Second-order steps: gradients times the inverses of Kronecker factors A and G.

    Args:
        damping: what is added before inversion, > 0: to the eigenvalues of the product of A and G,
            or to those of each, as `pi` says. This, `kl_clip` and both intervals may be functions
            of the step, such as an `offbeat.Schedule`.
        factor_interval: steps from one whose factors are averaged to the next, >= 1.
        inverse_interval: steps from one with inversions to the next, >= 1.
        ramp: whether the first steps are denser: factors in each of the first `factor_interval`,
            inversions in steps 0, 1, 2, 4, 8, ... of the first `inverse_interval`.
        decay: how much of the running averages each step with factors keeps, in [0, 1).
        kl_clip: limit of the change that a step may make by its own estimate, > 0; None: no limit.
        grafting: whose length a layer's preconditioned gradient has: "none" its own; "floor" its
            own, but no less than the plain gradient's, before `kl_clip` shortens it by the estimate
            for what it was; "layer" the plain gradient's, whatever `kl_clip` says. "auto": "floor"
            in a script under `offbeat run` that knows nothing of K-FAC, where the learning rate was
            chosen for plain gradients, else "none".
        pi: whether the square root of the damping is divided between A and G by the ratio of their
            mean eigenvalues, which comes near to damping their product; False: all of the damping
            is added to each of them.
        inverse: how factors are inverted: "cholesky" damps and inverts each, "eigen" decomposes
            them, and with `pi` damps their product as it is.
        inverse_dtype: what inverses are kept, sent and multiplied by in: "float32" (float64 where
            the model is), or "bfloat16", which is fast on hardware for it and precise to two or
            three digits; not for "eigen". "auto": bfloat16 on such hardware where
            `inverse_interval` is above 25 or factors are on a GPU, and none is in float64.
        exchange: how gradients are exchanged: "allreduce", "topk", "gtopk", or a strategy such as
            `offbeat.GTopK(density=0.01)`.
        loss: whether the loss is the "mean" or the "sum" over examples.
        sharing: for layers that see several positions of an example: "expand" treats them as
            independent, "reduce" averages inputs and sums gradients first.
        loss_terms: whether each "example" has a loss, or each "position", as in language models;
            a position without a gradient, such as padding, has none.
        batch_dim: which dimension of inputs counts examples, 0 or 1.
        sample_stride: factors are of every n-th example of each batch, other ones each time, >= 1.
            "auto": of every fourth where a layer sees 16 positions of each or more, but of no fewer
            than eight.
        cross_attention: names of MultiheadAttention modules whose query, key and value differ,
            separated by commas.
        max_dim: a factor of more rows than this, >= 1, is cut into pieces of about so many along
            its diagonal, and one that would need more than eight is kept as its diagonal.
        plain: names of layers, or of classes such as BatchNorm2d, that get plain gradients,
            separated by commas.
    """

    acts_at_steps: ClassVar[bool] = True
    measures: ClassVar[bool] = False
    """Whether the plan depends on measured costs and times."""

    damping: float | Callable[[int], float] = 0.01
    factor_interval: int | Callable[[int], float] = 10
    inverse_interval: int | Callable[[int], float] = 100
    ramp: bool = True
    decay: float = 0.95
    kl_clip: float | Callable[[int], float] | None = 0.001
    grafting: Literal["auto", "none", "floor", "layer"] = "auto"
    pi: bool = True
    inverse: Literal["cholesky", "eigen"] = "cholesky"
    inverse_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    exchange: GradientStrategy | Literal["allreduce", "topk", "gtopk"] = "allreduce"
    loss: Literal["mean", "sum"] = "mean"
    sharing: Literal["expand", "reduce"] = "expand"
    loss_terms: Literal["example", "position"] = "example"
    batch_dim: int = 0
    sample_stride: int | Literal["auto"] = "auto"
    cross_attention: str = ""
    max_dim: int = 2048
    plain: str = ""

    def __post_init__(self) -> None:
        for name in ("factor_interval", "inverse_interval"):
            if not callable(interval := getattr(self, name)):
                require_at_least(name, interval, 1)
        for name in ("damping", "kl_clip"):
            value = getattr(self, name)
            if not callable(value) and value is not None:
                require_positive(name, value)
        self._check_schedules()
        if isinstance(self.sample_stride, str):
            if self.sample_stride != "auto":
                raise ConfigError(
                    'sample_stride must be an integer of at least 1, or "auto", got'
                    f" {self.sample_stride!r}"
                )
        else:
            require_at_least("sample_stride", self.sample_stride, 1)
        require_fraction_below_one("decay", self.decay)
        require_one_of("grafting", self.grafting, ("auto", "none", "floor", "layer"))
        require_one_of("inverse", self.inverse, ("cholesky", "eigen"))
        require_one_of("inverse_dtype", self.inverse_dtype, ("auto", "float32", "bfloat16"))
        if self.inverse == "eigen" and self.inverse_dtype == "bfloat16":
            raise ConfigError(
                'inverse_dtype="bfloat16" is for inverses, and inverse="eigen" keeps eigenvectors,'
                ' which need more precision; use inverse="cholesky", or inverse_dtype="float32"'
            )
        if not isinstance(self.exchange, GradientStrategy) and self.exchange not in EXCHANGES:
            raise ConfigError(
                f"exchange must be {', '.join(map(repr, EXCHANGES))} or a strategy that exchanges"
                " gradients, such as offbeat.GTopK(density=0.01), got"
                f" {self.exchange!r}{nearest(str(self.exchange), EXCHANGES)}"
            )
        self.options()

    def _check_schedules(self) -> None:
        """Raise `ConfigError` where the first step's values, or any of a Schedule's points, are not
        allowed.
        """
        for name, lowest in (
            ("damping", 0),
            ("kl_clip", 0),
            ("factor_interval", 1),
            ("inverse_interval", 1),
        ):
            schedule = getattr(self, name)
            steps = [step for step, _ in schedule.points] if isinstance(schedule, Schedule) else [0]
            if callable(schedule):
                for step in steps:
                    if lowest:
                        StepsApart(name, schedule).check(step)
                    else:
                        positive_at(name, schedule, step)

    @abstractmethod
    def plan(self, inputs: PlanInputs) -> FactorPlan:
        """What this strategy is. Pure: the same inputs yield the same plan on every rank."""

    def settings(self) -> KFACSettings:
        """What all K-FAC strategies do alike."""
        return KFACSettings(
            damping=self.damping,
            pi=self.pi,
            eigen=self.inverse == "eigen",
            bfloat16=None if self.inverse_dtype == "auto" else self.inverse_dtype == "bfloat16",
            decay=self.decay,
            kl_clip=self.kl_clip,
            grafting="none" if self.grafting == "auto" else self.grafting,
            factor_steps=StepsApart("factor_interval", self.factor_interval),
            inverse_steps=StepsApart("inverse_interval", self.inverse_interval),
            ramp=self.ramp,
            options=self.options(),
        )

    def options(self) -> FactorOptions:
        """How factors are counted."""
        return FactorOptions(
            loss=self.loss,
            sharing=self.sharing,
            loss_terms=self.loss_terms,
            batch_dim=self.batch_dim,
            sample_stride=self.sample_stride,
            cross_attention=tuple(filter(None, self.cross_attention.split(","))),
            max_dim=self.max_dim,
            plain=tuple(filter(None, self.plain.split(","))),
        )

    @property
    def gradients(self) -> GradientStrategy:
        """The strategy that exchanges gradients."""
        return (
            self.exchange
            if isinstance(self.exchange, GradientStrategy)
            else EXCHANGES[self.exchange]()
        )

    @override
    def for_plain_script(self) -> Self:
        return replace(self, grafting="floor") if self.grafting == "auto" else self

    def check(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        survey(model, self.options())
        self.gradients.check(model, optimizer)

    def check_world(self, world_size: int) -> None:
        self.gradients.check_world(world_size)

    def build(self, context: Context) -> Sequence[Callback]:
        model, optimizer, driver = context.model, context.optimizer, context.driver
        assert model is not None
        assert optimizer is not None
        if context.has_scaler and unscales_gradients_itself(optimizer):
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
            context.warn(
                f"{type(optimizer).__name__} scales anew what K-FAC makes of the few entries that"
                f" {self.gradients.name} delivers, and models have learned little or nothing so;"
                " use torch.optim.SGD, or exchange='allreduce'"
            )
        found = survey(model, self.options())
        (context.notify if found.plain else context.inform)(found.notice())
        slots = slots_of(found.blocks)
        inputs = gather_plan_inputs(
            slots,
            settings=self.settings(),
            measures=self.measures,
            driver=driver,
            stream=context.new_stream(),
        )
        if not inputs.same_devices:
            context.notify(
                "ranks compute on devices of different kinds, which round differently: each layer"
                " is preconditioned by one rank, which sends the result"
            )
        form = form_of(slots, self.settings(), same_devices=inputs.same_devices)
        # Factors travel beside the buckets of gradients, so both share one order of launching, and
        # K-FAC hears from the exchange of gradients whether a step is good.
        launch_order = LaunchOrder()
        exchange, others = self.gradients.build_exchange(context, launch_order=launch_order)
        positions = {
            id(parameter): position
            for position, parameter in enumerate(context.parameters.values())
        }
        part = KFACCallback(
            model,
            found.blocks,
            settings=self.settings(),
            form=form,
            planner=self._planner(inputs, joins=any(slot.shape.uses > 1 for slot in slots)),
            first_parameters=[positions[id(block.weight)] for block in found.blocks],
            bucket_firsts=[min(bucket.indices) for bucket in exchange.buckets],
            launch_order=launch_order,
            optimizer=optimizer,
            driver=driver,
            stream=context.new_stream(),
            grad_scale=context.grad_scale,
            notify=context.notify,
            warn=context.warn,
        )
        context.inform(
            f"K-FAC's factors take {part.num_bytes / 1e6:,.0f} MB of memory on this rank: averages,"
            " inverses and messages" + ("; inverses are in bfloat16" if form == "bfloat16" else "")
        )
        exchange.add_listener(part.scheduler)
        return [exchange, *others, part]

    def _planner(self, inputs: PlanInputs, *, joins: bool) -> KFACPlanner:
        """What this strategy plans, now and once it is known when factors are ready. `joins`: some
        weight is used both ways round.
        """

        def plan(inputs: PlanInputs) -> FactorPlan:
            plan = self.plan(inputs)
            if inputs.same_devices or plan.by_owner:
                return plan
            # What several ranks computed for themselves would drift apart where they round
            # differently, so one rank computes it for all.
            return replace(plan, owners=block_owners(inputs), by_owner=True)

        costs = inputs.costs
        # With the damping divided between A and G, inverting either of them needs the traces of
        # both; eigenvalues are damped afterwards. So does joining two uses of a weight.
        pairs = joins or (self.pi and self.inverse != "eigen")
        return KFACPlanner(
            plan=plan(inputs),
            replan=None
            if costs is None
            else lambda ready_s: plan(replace(inputs, ready_s=ready_s)),
            inversion_order=partial(inversion_order, inputs=inputs, pairs=pairs),
            predicted_s=(
                None
                if costs is None
                else [costs.inverse.inversion.time_s(dim) for dim in inputs.dims]
            ),
        )
