"""What the strategies that send only the largest entries of gradients have in common:
sparsification with error feedback. Each mechanism is in a file of its own: residual, momentum and
selection in `codec/`, buckets, densities and clipping in `gradients/`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import numpy as np
import torch

from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.codec.index_codecs import INDEX_CODECS, IndexCodec
from offbeat.codec.residual import ErrorFeedback
from offbeat.codec.selectors import SELECTORS, Selector
from offbeat.codec.value_codecs import VALUE_CODECS, ValueCodec
from offbeat.codec.warmup import Warmup
from offbeat.codec.wire import Wire
from offbeat.collectives.base import SparseCollective
from offbeat.errors import ConfigError, UnsupportedError
from offbeat.gradients.buckets import Bucket, make_buckets
from offbeat.gradients.changed_gradients import ChangedGradients
from offbeat.gradients.clipping import LocalClipping
from offbeat.gradients.collective_choice import BucketKind
from offbeat.gradients.density_choice import FEW, AutoDensity
from offbeat.gradients.exchange import ExchangeCounts, GradientExchange, Reduction
from offbeat.gradients.group_ranges import GroupRanges, rates_of
from offbeat.gradients.launch_order import LaunchOrder
from offbeat.gradients.optimizer_momentum import (
    OptimizerMomentum,
    makes_plain_steps,
    momentum_to_take,
)
from offbeat.gradients.optimizer_scaling import (
    LeftScaling,
    OptimizerScaling,
    reason_against,
)
from offbeat.gradients.owed_rate import OwedRate
from offbeat.gradients.reductions import ExchangePlan, SparseReduction
from offbeat.gradients.rising_rate import DENSITY, in_words
from offbeat.strategies.gradient import MIB, GradientStrategy
from offbeat.strategies.options import (
    object_of,
    refuse_idle,
    require_at_least,
    require_density,
    require_one_of,
    require_positive,
)

AT_ONCE_BELOW: Final = 0.15
"""The density below which momentum is applied at once: an entry waits for 1 / density exchanges,
and momentum is usually spread over ten.
"""

SCALED_BELOW: Final = 0.15
"""The density below which the scaling of Adam is taken over."""

Choose = Callable[[BucketKind, int], SparseCollective | None]
"""(the bucket, k) -> the collective to use; None sends everything densely."""


@dataclass(frozen=True, kw_only=True)
class SparseGradientStrategy(GradientStrategy):
    """Only the largest entries of residual + gradient travel; the rest is owed.

    Args:
        density: fraction of entries that travel, in (0, 1]; 1 gives the result of `AllReduce`.
        selection: "exact" takes exactly the k largest; "reuse" adapts the last step's threshold and
            takes 0.8 k to 1.2 k, in fewer passes; or a `Selector` of your own.
        momentum_correction: DGC's momentum (arXiv 1712.01887, section 3.1): momentum is applied
            before selection. "auto" takes over that of `torch.optim.SGD`, Nesterov's too, and with
            it weight decay, until the session ends, and the scaling of Adam and AdamW at densities
            below 0.15 (with density="auto", which is at most 0.02 then), where the loop leaves
            gradients alone; None leaves all to the optimizer.
        warmup: densities of the first exchanges, if larger than the later one: pairs of a density
            and a number of exchanges, such as ((1.0, 80), (0.25, 40)) or "1.0x80+0.25x40", where a
            density of 1 sends everything as `AllReduce` does; or "paper" (0.25, 0.0725, 0.015,
            0.004 in epochs 0 to 3), "exponential" (DGC), or None. "auto": at least 0.1 while the
            learning rate rises and for 50 exchanges after that, if it begins to rise within the
            first 1,000, unless Adam's scaling is taken over; for longer at densities below 0.01;
            all ranks must have the same learning rate.
        steps_per_epoch: exchanges in an epoch, >= 1, such as `len(loader)`; needed where `warmup`
            counts epochs. The lab fills it in.
        values: "float32", "bfloat16" or "float8" on the wire (4, 2 or 1 byte), or a `ValueCodec` of
            your own; what rounding loses is owed. "auto": float8 with density="auto", since it
            buys more entries, which are worth more than their precision; else float32.
        indices: "gaps" between indices in 1 or 2 bytes, or a bit for each element, or plain
            indices, whichever is shortest; or an `IndexCodec` of your own.
        bucket_mib: exchange in buckets of this size, each with its own top-k, whose first messages
            leave during backward; None: all in one, after it.
        clip_norm: clip gradients before selection, to this norm of the mean over P ranks, > 0: each
            rank's gradient / P to clip_norm / sqrt(P). All buckets leave after backward then.
            Clipping after backward would leave outliers in the residual. None: no clipping.
    """

    density: float | Literal["auto"] = 0.001
    selection: Literal["exact", "reuse"] | Selector = "exact"
    momentum_correction: Literal["auto"] | None = "auto"
    warmup: Literal["auto", "paper", "exponential"] | tuple[tuple[float, int], ...] | str | None = (
        "auto"
    )
    steps_per_epoch: int | None = None
    values: Literal["auto", "float32", "bfloat16", "float8"] | ValueCodec = "auto"
    indices: Literal["gaps"] | IndexCodec = "gaps"
    bucket_mib: float | None = None
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip_norm is not None:
            require_positive("clip_norm", self.clip_norm)
        if self.density == "auto":
            self._require_measuring()
        else:
            require_density("density", self.density)
        object_of("selection", self.selection, SELECTORS, Selector)
        self.codecs()
        if self.momentum_correction is not None:
            require_one_of("momentum_correction", self.momentum_correction, ("auto",))
        if self.bucket_mib is not None:
            require_positive("bucket_mib", self.bucket_mib)
        if self.warmup in ("paper", "exponential") and self.steps_per_epoch is None:
            raise ConfigError(
                f"warmup={self.warmup!r} counts epochs: pass steps_per_epoch too, such as"
                " len(loader)"
            )
        self._warmup(target=1.0)
        if self.steps_per_epoch is not None:
            require_at_least("steps_per_epoch", self.steps_per_epoch, 1)
        if self.warmup not in ("paper", "exponential"):
            refuse_idle(
                self,
                "steps_per_epoch",
                because=f"warmup={self.warmup!r} does not count epochs, as 'paper' does",
            )

    def check(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().check(model, optimizer)
        require_real(model)

    def codecs(self) -> tuple[ValueCodec, IndexCodec]:
        """How values and indices travel. Raises `ConfigError` for options that name none."""
        usual = VALUE_CODECS["float8" if self.density == "auto" else "float32"]
        return (
            object_of("values", self.values, {"auto": usual, **VALUE_CODECS}, ValueCodec),
            object_of("indices", self.indices, INDEX_CODECS, IndexCodec),
        )

    @abstractmethod
    def chooser(self, context: Context) -> tuple[Choose, list[Callback]]:
        """How the collective is chosen, and the part, if any, that remembers the choice."""

    def _require_measuring(self) -> None:
        """Raise `ConfigError` unless density="auto" is known to this strategy."""
        raise ConfigError(
            f"{self.name} has no density='auto'; pass a number in (0, 1], or use"
            " offbeat.GTopK(apply='union')"
        )

    def density_at(self, exchange: int, target: float) -> float:
        """Density of exchange number `exchange`, counted from 0, on the way to `target`."""
        schedule = self._warmup(target)
        return target if schedule is None else schedule.density_at(exchange, target)

    def _warmup(self, target: float) -> Warmup | None:
        """The schedule on the way to `target`. Raises `ConfigError` if `warmup` describes none."""
        if self.warmup is None or self.warmup == "auto":
            return None
        try:
            if self.warmup == "paper":
                return Warmup.paper(self.steps_per_epoch or 1)
            if self.warmup == "exponential":
                return Warmup.exponential(self.steps_per_epoch or 1, target)
            if isinstance(self.warmup, str):
                return Warmup.read(self.warmup)
            return Warmup.of(self.warmup)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                "warmup must be 'auto', 'paper', 'exponential', None, or pairs of a density in"
                " (0, 1] and a number of exchanges of at least 1, such as ((1.0, 80), (0.25, 40))"
                f" or '1.0x80+0.25x40', got {self.warmup!r}"
            ) from error

    @property
    def takes_momentum(self) -> bool:
        """Whether the optimizer's momentum is taken over, if it can be."""
        return self.momentum_correction == "auto"

    def build(self, context: Context) -> Sequence[Callback]:
        counts = ExchangeCounts()
        taken = self._taken_over(context, counts)
        pairs, others = self._parts(context, counts, taken, is_followed=False)
        exchange, others = self.exchange_of(pairs, others, context, counts, taken=taken)
        self._listen(exchange, others)
        others += self._beside(taken, exchange, context, counts)
        if taken is not None:  # last, when nothing can fail any more
            taken.take()
        return [exchange, *others]

    def _beside(
        self,
        taken: OptimizerMomentum | OptimizerScaling | None,
        exchange: GradientExchange,
        context: Context,
        counts: ExchangeCounts,
    ) -> list[Callback]:
        """The parts that go with what was taken over, or with what was left."""
        if isinstance(taken, OptimizerScaling):
            exchange.add_listener(taken.listener)
            return [
                ChangedGradients(
                    exchange.buckets, counts=counts, when_changed=taken.gradients_are_changed
                ),
                taken,
            ]
        if taken is None:
            return [LeftScaling()]
        if context.has_scaler:  # which changes gradients itself
            return [taken, LeftScaling()]
        when_changed = partial(taken.gradients_are_changed, context.warn)
        return [
            ChangedGradients(exchange.buckets, counts=counts, when_changed=when_changed),
            taken,
            LeftScaling(),
        ]

    def _taken_over(
        self, context: Context, counts: ExchangeCounts
    ) -> OptimizerMomentum | OptimizerScaling | None:
        """What works before the exchange in the optimizer's place; None: nothing."""
        optimizer, inform = context.optimizer, context.inform
        if not self.takes_momentum or optimizer is None:
            return None
        if type(optimizer) is torch.optim.SGD:
            return momentum_to_take(optimizer, inform=inform)
        groups = optimizer.param_groups
        if not any(group.get("momentum") or group.get("betas") for group in groups):
            return None
        parameters = context.parameters.values()
        reason = reason_against(optimizer, parameters, has_scaler=context.has_scaler)
        if reason is None and self.density != "auto" and self.density >= SCALED_BELOW:
            reason = f"at a density of {self.density:g} that would be less accurate"
        if reason is None:
            return OptimizerScaling(
                optimizer,
                driver=context.driver,
                stream=context.new_stream(),
                counts=counts,
                inform=inform,
                warn=context.warn,
            )
        inform(
            "momentum_correction='auto': the optimizer sees the mean of what was sent, and nothing"
            f" of it works before entries are selected, since {reason}"
        )
        return None

    def build_exchange(
        self, context: Context, *, launch_order: LaunchOrder | None = None
    ) -> tuple[GradientExchange, list[Callback]]:
        """As of every strategy. Where gradients are changed further before the step, momentum stays
        in the optimizer, which applies it afterwards.
        """
        exchange, others = super().build_exchange(context, launch_order=launch_order)
        self._listen(exchange, others)
        return exchange, others

    def _listen(self, exchange: GradientExchange, parts: Sequence[Callback]) -> None:
        for part in parts:
            if isinstance(part, AutoDensity):
                exchange.add_listener(part.intervals)

    def clipping(self, world_size: int) -> LocalClipping | None:
        return LocalClipping(self.clip_norm, world_size=world_size)

    def parts(
        self, context: Context, counts: ExchangeCounts
    ) -> tuple[list[tuple[Bucket, Reduction]], list[Callback]]:
        return self._parts(context, counts, None, is_followed=True)

    def _parts(
        self,
        context: Context,
        counts: ExchangeCounts,
        taken: OptimizerMomentum | OptimizerScaling | None,
        *,
        is_followed: bool,
    ) -> tuple[list[tuple[Bucket, Reduction]], list[Callback]]:
        choose, others = self.chooser(context)
        auto = next((part for part in others if isinstance(part, AutoDensity)), None)
        cap_bytes = None if self.bucket_mib is None else int(self.bucket_mib * MIB)
        buckets = make_buckets(context.parameters, cap_bytes=cap_bytes)
        largest = self._kind(max(buckets, key=lambda bucket: bucket.num_elements))

        def is_sparse(density: float) -> bool:
            """Whether entries travel, or all of the gradient."""
            return choose(largest, max(1, round(density * largest.num_elements))) is not None

        optimizer = context.optimizer

        def density_now() -> float:
            target = 1.0 if self.density == "auto" else self.density
            target = target if auto is None else auto.density
            density = self.density_at(counts.exchanges, target)
            # Scaled gradients are of one size from the first step on, and need no warm-up.
            scales = isinstance(taken, OptimizerScaling) and taken.is_taken is not False
            if self.warmup == "auto" and optimizer is not None and not scales:
                density = _while_rising(counts, optimizer, density, context.inform)
            return density

        if isinstance(taken, OptimizerMomentum):
            taken.may_apply_at_once = lambda: (
                (density := density_now()) < AT_ONCE_BELOW and is_sparse(density)
            )
        if isinstance(taken, OptimizerScaling):
            taken.is_wanted = lambda: is_sparse(FEW if self.density == "auto" else self.density)
            if auto is not None:
                taken.when_taken = auto.send_few
        return [
            (
                bucket,
                self._reduction(
                    bucket,
                    context,
                    choose,
                    density_now,
                    taken,
                    is_followed=is_followed,
                ),
            )
            for bucket in buckets
        ], others

    def _kind(self, bucket: Bucket) -> BucketKind:
        wire = wire_of(bucket, *self.codecs())
        return BucketKind(
            num_elements=bucket.num_elements,
            element_bytes=bucket.flat.element_size(),
            values=wire.values,
            indices=wire.indices,
        )

    def _reduction(
        self,
        bucket: Bucket,
        context: Context,
        choose: Choose,
        density_now: Callable[[], float],
        taken: OptimizerMomentum | OptimizerScaling | None,
        *,
        is_followed: bool,
    ) -> SparseReduction:
        kind, optimizer = self._kind(bucket), context.optimizer

        def plan() -> ExchangePlan:
            at_once = isinstance(taken, OptimizerMomentum) and taken.at_once
            density = density_now()
            k = max(1, round(density * bucket.num_elements))
            # A density of 1 that the user named for the whole run goes through the collective that
            # the user named; one that was chosen, or begins a warm-up, need not.
            everything = density == 1.0 and self.density != 1.0
            return ExchangePlan(
                k=k, collective=None if everything else choose(kind, k), at_once=at_once
            )

        def leads_to_plain_steps() -> bool:
            if taken is not None:
                return taken.leaves_plain_steps()
            # What follows, a preconditioner for example, changes gradients before the step.
            return not is_followed and optimizer is not None and makes_plain_steps(optimizer)

        momentum = taken.of(bucket) if isinstance(taken, OptimizerMomentum) else None
        feedback = ErrorFeedback(
            bucket.num_elements,
            dtype=bucket.flat.dtype,
            device=bucket.flat.device,
            selector=object_of("selection", self.selection, SELECTORS, Selector),
            momentum=momentum,
        )
        if isinstance(taken, OptimizerScaling):
            taken.apply_to(bucket, feedback)
        elif taken is not None and momentum is not None:
            taken.apply_to(bucket, momentum, feedback)
        return SparseReduction(
            bucket,
            feedback,
            driver=context.driver,
            stream=context.new_stream(),
            wire=wire_of(bucket, *self.codecs()),
            plan=plan,
            owed_rate=None
            if optimizer is None
            else OwedRate(
                GroupRanges(bucket, optimizer),
                rates=partial(rates_of, optimizer) if taken is None else taken.rates,
                leads_to_plain_steps=leads_to_plain_steps,
            ),
        )


def require_real(model: torch.nn.Module) -> None:
    """Raise `UnsupportedError` where parameters that train are complex."""
    odd = next(
        (
            name
            for name, p in model.named_parameters()
            if p.requires_grad and not p.is_floating_point()
        ),
        None,
    )
    if odd is not None:
        raise UnsupportedError(
            f"parameter {odd!r} is not real-valued, and the largest entries are selected among"
            " real numbers only; train its real and imaginary parts as two parameters, or use"
            " offbeat.AllReduce()"
        )


def wire_of(bucket: Bucket, values: ValueCodec, indices: IndexCodec) -> Wire:
    """Layout of the messages of a bucket.

    Args:
        bucket: with real gradients.
        values: how values travel.
        indices: how indices travel.
    """
    # Half-precision gradients are selected, owed and merged in float32.
    double = bucket.flat.dtype == torch.float64
    dtype: np.dtype[np.floating] = np.dtype(np.float64 if double else np.float32)
    return Wire(
        num_elements=bucket.num_elements,
        num_parameters=len(bucket.indices),
        dtype=dtype,
        values=values.suited_to(dtype),
        indices=indices,
    )


def _while_rising(
    counts: ExchangeCounts,
    optimizer: torch.optim.Optimizer,
    density: float,
    inform: Callable[[str], None],
) -> float:
    """The density of the coming exchange, larger than `density` while the learning rate rises."""
    rising = counts.rising_rate
    rate = max(float(group.get("lr", 0.0)) for group in optimizer.param_groups)
    if rising.look(counts.exchanges, rate) and density < DENSITY:
        inform(f"warmup='auto': {in_words(density)}; warmup=None keeps it as it is")
    return rising.density_at(counts.exchanges, density)
