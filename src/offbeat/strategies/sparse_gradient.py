"""What the strategies that send only the largest entries of gradients have in common:
sparsification with error feedback.

    transform  what works before the exchange in the optimizer's place (`gradients.exchange`)
    density    how many entries travel (`gradients.density`)
    codec      which, and how they are written (`codec.topk_codec`)
    collective with whom they are merged
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, TypeAlias

import torch
from typing_extensions import override

from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.codec.described_options import Positive
from offbeat.codec.topk_codec import TopKCodec
from offbeat.errors import ConfigError
from offbeat.gradients.clipping import LocalClipping
from offbeat.gradients.collective_choice import BucketKind
from offbeat.gradients.density import AT_ONCE, START, DensitySchedule, Warmup
from offbeat.gradients.exchange import GradientTransform
from offbeat.gradients.optimizer_momentum import OptimizerMomentum, reason_against_momentum
from offbeat.gradients.optimizer_scaling import OptimizerScaling, reason_against_scaling
from offbeat.gradients.parameter_groups import GroupRanges, OwedRate
from offbeat.gradients.reductions import SparseReduction
from offbeat.strategies.gradient import GradientStrategy, Reductions
from offbeat.strategies.options import require_density

Scheduled: TypeAlias = tuple[DensitySchedule, list[Callback]]
"""How many entries travel and by which collective; and what else remembers that, if anything."""


@dataclass(frozen=True, kw_only=True)
class EntriesStrategy(GradientStrategy):
    """Only some entries travel.

    Args:
        momentum_correction: "auto" takes over the momentum and weight decay of `torch.optim.SGD`
            until the session ends, and applies it before entries are selected; and the scaling of
            Adam and AdamW after the warm-up. None leaves all to the optimizer.
        codec: what picks entries and how they are written: a `TopKCodec`, or names of its parts
            such as "bfloat16" or "reuse+float8". None: "float32", all exact.
        clip_norm: clip gradients before selection, to this norm of the mean over P ranks, > 0. All
            buckets leave after backward then. None: no clipping.
    """

    runs_compiled: ClassVar[bool] = True
    bucket_mib: ClassVar[float | None] = None

    density: float | Literal["auto"] = 0.001
    momentum_correction: Literal["auto"] | None = "auto"
    codec: TopKCodec | str | None = None
    clip_norm: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.density != "auto":
            require_density(self.density)
        self.entries()

    @property
    def takes_over(self) -> bool:
        """Whether something works before the exchange in the optimizer's place, if it can."""
        return self.momentum_correction == "auto"

    def entries(self) -> TopKCodec:
        """How entries travel. Raises `ConfigError` for a codec that is none."""
        return TopKCodec() if self.codec is None else TopKCodec.of(self.codec)

    @override
    def transform(self, context: Context) -> GradientTransform:
        """Of SGD its momentum."""
        optimizer = context.optimizer
        is_sgd = self.takes_over and type(optimizer) is torch.optim.SGD
        if not isinstance(optimizer, torch.optim.SGD) or not (is_sgd and _remembers(optimizer)):
            return GradientTransform(optimizer)
        reason = reason_against_momentum(optimizer)
        return OptimizerMomentum(context) if reason is None else self.left(context, reason)

    def left(self, context: Context, reason: str) -> GradientTransform:
        """What works before the exchange where all is left to the optimizer for a `reason`."""
        context.notices.inform(
            "momentum_correction='auto': the optimizer sees the mean of what was sent, and nothing"
            f" of it works before entries are selected, since {reason}"
        )
        return GradientTransform(context.optimizer)


@dataclass(frozen=True, kw_only=True)
class SparseGradientStrategy(EntriesStrategy):
    """Only the largest entries of residual + gradient travel; the rest is owed.

    Args:
        density: fraction of entries that travel, in (0, 1]; 1 gives the result of `AllReduce`.
        warmup: densities of the first exchanges, if larger than the later one: pairs of a density
            and a number of exchanges, such as ((1.0, 80), (0.25, 40)) or "1.0x80+0.25x40"; or None.
            "auto": at least 0.1 while the learning rate, the same on all ranks, rises and for 50
            exchanges after that, if it begins to rise within the first 1,000; for longer at
            densities below 0.01. Where Adam's scaling is taken over, 1 in the first 20 exchanges.
    """

    warmup: Literal["auto"] | tuple[tuple[float, int], ...] | str | None = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stages()

    def stages(self) -> Warmup | Literal["auto"] | None:
        """The warm-up. Raises `ConfigError` if `warmup` describes none."""
        if self.warmup is None or self.warmup == "auto":
            return self.warmup  # type: ignore[return-value]  # no narrower for mypy
        try:
            return Warmup.of(self.warmup)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                "warmup must be 'auto', None, or pairs of a density in (0, 1] and a number of"
                " exchanges of at least 1, such as ((1.0, 80), (0.25, 40)) or '1.0x80+0.25x40', got"
                f" {self.warmup!r}"
            ) from error

    @abstractmethod
    def schedule(self, context: Context) -> Scheduled:
        """How many entries travel, and by which collective."""

    @override
    def clipping(self, world_size: int) -> LocalClipping | None:
        return LocalClipping(self.clip_norm, world_size=world_size)

    @override
    def transform(self, context: Context) -> GradientTransform:
        """Of SGD its momentum, of Adam its scaling."""
        optimizer, parameters = context.optimizer, context.parameters.values()
        is_sgd = type(optimizer) is torch.optim.SGD
        if not self.takes_over or optimizer is None or is_sgd or not _remembers(optimizer):
            return super().transform(context)
        reason = reason_against_scaling(optimizer, parameters, has_scaler=context.has_scaler)
        if reason is None and self.density != "auto" and self.density >= AT_ONCE:
            reason = f"at a density of {self.density:g} that would be less accurate"
        if reason is not None:
            return self.left(context, reason)
        if self.warmup == "auto":
            # A short run, such as one that times steps, never comes to its density.
            context.notices.inform(
                f"the first {START} exchanges send everything, and Adam steps as ever, before its"
                " scaling is taken over; warmup=None begins with entries"
            )
        return OptimizerScaling(context)

    @override
    def reductions(self, context: Context, transform: GradientTransform) -> Reductions:
        density, others = self.schedule(context)
        buckets, codec, optimizer = self.buckets(context), self.entries(), context.optimizer
        kinds = [BucketKind(each.num_elements, each.flat.element_size()) for each in buckets]
        density.follow(transform, largest=max(kinds, key=lambda kind: kind.num_elements))
        pairs = []
        for bucket, kind in zip(buckets, kinds, strict=True):
            reduction = SparseReduction(
                bucket,
                context.driver,
                context.new_stream(),
                codec=codec,
                plan=partial(density.plan, kind),
                owed_rate=None
                if optimizer is None
                else OwedRate(GroupRanges(bucket, optimizer), transform),
            )
            pairs.append((bucket, reduction))
        return Reductions(pairs, [*others, density], [density.listener])


def _remembers(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has momentum of some kind."""
    groups = optimizer.param_groups
    return any(group.get("momentum") or group.get("betas") for group in groups)
