"""What the strategies that send only the largest entries of gradients have in common:
sparsification with error feedback.

    transform  what works before the exchange in the optimizer's place (`gradients.exchange`)
    density    how many entries travel (`gradients.density`)
    codec      which, and how they are written (`codec.topk_codec`)
    collective with whom they are merged
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
import torch

from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.codec.residual import ErrorFeedback
from offbeat.codec.topk_codec import TopKCodec
from offbeat.codec.wire import Wire
from offbeat.collectives.base import SparseCollective
from offbeat.errors import ConfigError, UnsupportedError
from offbeat.gradients.buckets import Bucket, make_buckets
from offbeat.gradients.changed_gradients import ChangedGradients
from offbeat.gradients.clipping import LocalClipping
from offbeat.gradients.collective_choice import BucketKind
from offbeat.gradients.density import DensitySchedule, Warmup
from offbeat.gradients.exchange import (
    ExchangeCounts,
    GradientExchange,
    GradientTransform,
    Reduction,
)
from offbeat.gradients.launch_order import LaunchOrder
from offbeat.gradients.optimizer_momentum import momentum_to_take
from offbeat.gradients.optimizer_scaling import OptimizerScaling, reason_against
from offbeat.gradients.parameter_groups import GroupRanges, OwedRate
from offbeat.gradients.reductions import ExchangePlan, SparseReduction
from offbeat.strategies.gradient import MIB, GradientStrategy
from offbeat.strategies.options import require_density, require_one_of, require_positive

FEW: Final = 0.15
"""Below this density SGD's momentum is applied at once: an entry waits for 1 / density exchanges,
and momentum is usually spread over ten. And Adam's scaling is taken over. Without the one
images are 4 points worse (`benchmarks/sparse_accuracy.py`, momentum spread), without the other text
is 11% of bits worse (`benchmarks/parity.py`, text, GTopK at 0.01).
"""

Choose: TypeAlias = Callable[[BucketKind, int], SparseCollective | None]
"""(the bucket, k) -> the collective to use; None sends everything densely."""


@dataclass(frozen=True, kw_only=True)
class SparseGradientStrategy(GradientStrategy):
    """Only the largest entries of residual + gradient travel; the rest is owed.

    Args:
        density: fraction of entries that travel, in (0, 1]; 1 gives the result of `AllReduce`.
        momentum_correction: "auto" takes over the momentum of `torch.optim.SGD`, Nesterov's too,
            and with it weight decay, until the session ends, and applies it before entries are
            selected (DGC, arXiv 1712.01887, section 3.1); and the scaling of Adam and AdamW at
            densities below 0.15, where the loop leaves gradients alone. None leaves all to the
            optimizer.
        warmup: densities of the first exchanges, if larger than the later one: pairs of a density
            and a number of exchanges, such as ((1.0, 80), (0.25, 40)) or "1.0x80+0.25x40", where a
            density of 1 sends everything as `AllReduce` does; or None. "auto": at least 0.1 while
            the learning rate rises and for 50 exchanges after that, if it begins to rise within the
            first 1,000, unless Adam's scaling is taken over; for longer at densities below 0.01;
            all ranks must have the same learning rate.
        codec: what picks entries and how they are written: a `TopKCodec`, or names of its parts
            such as "bfloat16" or "reuse+float8". None: "float32", all exact.
        bucket_mib: exchange in buckets of this size, each with its own top-k, whose first messages
            leave during backward; None: all in one, after it.
        clip_norm: clip gradients before selection, to this norm of the mean over P ranks, > 0: each
            rank's gradient / P to clip_norm / sqrt(P). All buckets leave after backward then.
            Clipping after backward would leave outliers in the residual. None: no clipping.
    """

    density: float | Literal["auto"] = 0.001
    momentum_correction: Literal["auto"] | None = "auto"
    warmup: Literal["auto"] | tuple[tuple[float, int], ...] | str | None = "auto"
    codec: TopKCodec | str | None = None
    bucket_mib: float | None = None
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.density != "auto" or not self.measures:
            require_density("density", self.density)  # type: ignore[arg-type]  # looked at there
        if self.momentum_correction is not None:
            require_one_of("momentum_correction", self.momentum_correction, ("auto",))
        self.stages()
        self.entries()
        if self.bucket_mib is not None:
            require_positive("bucket_mib", self.bucket_mib)
        if self.clip_norm is not None:
            require_positive("clip_norm", self.clip_norm)

    def check(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().check(model, optimizer)
        require_real(model)

    @property
    def measures(self) -> bool:
        """Whether density="auto" is known."""
        return False

    @property
    def takes_over(self) -> bool:
        """Whether something works before the exchange in the optimizer's place, if it can."""
        return self.momentum_correction == "auto"

    def entries(self) -> TopKCodec:
        """How entries travel. Raises `ConfigError` for a codec that is none."""
        return TopKCodec() if self.codec is None else TopKCodec.of(self.codec)

    def stages(self) -> Warmup | Literal["auto"] | None:
        """The warm-up. Raises `ConfigError` if `warmup` describes none."""
        if self.warmup is None or self.warmup == "auto":
            return self.warmup  # type: ignore[return-value]  # no narrower for mypy
        try:
            return (
                Warmup.read(self.warmup) if isinstance(self.warmup, str) else Warmup.of(self.warmup)
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(
                "warmup must be 'auto', None, or pairs of a density in (0, 1] and a number of"
                " exchanges of at least 1, such as ((1.0, 80), (0.25, 40)) or '1.0x80+0.25x40', got"
                f" {self.warmup!r}"
            ) from error

    @abstractmethod
    def chooser(
        self, context: Context, counts: ExchangeCounts
    ) -> tuple[Choose, DensitySchedule, list[Callback]]:
        """How the collective is chosen, the density, and the part, if any, that remembers the
        choice.
        """

    def schedule(self, density: float, context: Context, counts: ExchangeCounts) -> DensitySchedule:
        """A density that does not depend on measurements."""
        return DensitySchedule(
            density,
            warmup=self.stages(),
            optimizer=context.optimizer,
            counts=counts,
            inform=context.notices.inform,
        )

    def clipping(self, world_size: int) -> LocalClipping | None:
        return LocalClipping(self.clip_norm, world_size=world_size)

    def build(self, context: Context) -> Sequence[Callback]:
        counts = ExchangeCounts()
        transform = self._transform(context, counts)
        pairs, others, density = self._reductions(context, counts, transform)
        exchange, others = self.exchange_of(pairs, others, context, counts, transform=transform)
        exchange.add_listener(density.listener)
        if transform.minds_changes:
            others.append(
                ChangedGradients(
                    exchange.buckets, counts=counts, when_changed=transform.gradients_are_changed
                )
            )
        others.append(transform)
        transform.take()  # last, when nothing can fail any more
        return [exchange, *others]

    def _transform(self, context: Context, counts: ExchangeCounts) -> GradientTransform:
        """What works before the exchange in the optimizer's place."""
        optimizer, inform = context.optimizer, context.notices.inform
        left = GradientTransform(optimizer)
        if not self.takes_over or optimizer is None:
            return left
        if type(optimizer) is torch.optim.SGD:
            world_size = context.driver.world_size
            return momentum_to_take(optimizer, world_size=world_size, inform=inform) or left
        groups = optimizer.param_groups
        if not any(group.get("momentum") or group.get("betas") for group in groups):
            return left
        parameters = context.parameters.values()
        reason = reason_against(optimizer, parameters, has_scaler=context.has_scaler)
        if reason is None and self.density != "auto" and self.density >= FEW:
            reason = f"at a density of {self.density:g} that would be less accurate"
        if reason is None:
            return OptimizerScaling(
                optimizer,
                driver=context.driver,
                stream=context.new_stream(),
                counts=counts,
                inform=inform,
                warn=context.notices.warn,
            )
        inform(
            "momentum_correction='auto': the optimizer sees the mean of what was sent, and nothing"
            f" of it works before entries are selected, since {reason}"
        )
        return left

    def build_exchange(
        self, context: Context, *, launch_order: LaunchOrder | None = None
    ) -> tuple[GradientExchange, list[Callback]]:
        """As of every strategy. Where gradients are changed further before the step, momentum stays
        in the optimizer, which applies it afterwards.
        """
        counts = ExchangeCounts()
        transform = GradientTransform(context.optimizer, is_followed=True)
        pairs, others, density = self._reductions(context, counts, transform)
        exchange, others = self.exchange_of(
            pairs, others, context, counts, launch_order=launch_order
        )
        exchange.add_listener(density.listener)
        return exchange, others

    def reductions(
        self, context: Context, counts: ExchangeCounts
    ) -> tuple[list[tuple[Bucket, Reduction]], list[Callback]]:
        raise NotImplementedError  # `build_exchange` needs more

    def _reductions(
        self, context: Context, counts: ExchangeCounts, transform: GradientTransform
    ) -> tuple[list[tuple[Bucket, Reduction]], list[Callback], DensitySchedule]:
        choose, density, others = self.chooser(context, counts)
        cap_bytes = None if self.bucket_mib is None else int(self.bucket_mib * MIB)
        buckets = make_buckets(context.parameters, cap_bytes=cap_bytes)
        largest = self._kind(max(buckets, key=lambda bucket: bucket.num_elements))

        def is_sparse(density: float) -> bool:
            """Whether entries travel, or all of the gradient."""
            return choose(largest, max(1, round(density * largest.num_elements))) is not None

        density.needs_warm_up = lambda: transform.needs_warm_up
        transform.follow(
            sends_few=lambda: (now := density.now()) < FEW and is_sparse(now),
            sends_entries=lambda: is_sparse(density.few),
            when_taken=density.send_few,
        )
        reductions = [
            self._reduction(each, context, choose, density, transform) for each in buckets
        ]
        return list(zip(buckets, reductions, strict=True)), [*others, density], density

    def _kind(self, bucket: Bucket) -> BucketKind:
        return BucketKind(
            num_elements=bucket.num_elements,
            element_bytes=bucket.flat.element_size(),
            codec=self.entries(),
        )

    def _reduction(
        self,
        bucket: Bucket,
        context: Context,
        choose: Choose,
        density: DensitySchedule,
        transform: GradientTransform,
    ) -> SparseReduction:
        kind, codec = self._kind(bucket), self.entries()

        def plan() -> ExchangePlan:
            now = density.now()
            k = max(1, round(now * bucket.num_elements))
            # A density of 1 that the user named for the whole run goes through the collective that
            # the user named; one that was chosen, or begins a warm-up, need not.
            everything = now == 1.0 and self.density != 1.0
            return ExchangePlan(k=k, collective=None if everything else choose(kind, k))

        feedback = ErrorFeedback(
            bucket.num_elements,
            dtype=bucket.flat.dtype,
            device=bucket.flat.device,
            selector=codec.selector,
        )
        transform.init(bucket, feedback)
        return SparseReduction(
            bucket,
            feedback,
            driver=context.driver,
            stream=context.new_stream(),
            wire=wire_of(bucket, codec),
            plan=plan,
            owed_rate=None
            if context.optimizer is None
            else OwedRate(
                GroupRanges(bucket, context.optimizer),
                rates=transform.rates,
                leads_to_plain_steps=transform.leaves_plain_steps,
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


def wire_of(bucket: Bucket, codec: TopKCodec) -> Wire:
    """Layout of the messages of a bucket with real gradients."""
    # Half-precision gradients are selected, owed and merged in float32.
    double = bucket.flat.dtype == torch.float64
    dtype: np.dtype[np.floating] = np.dtype(np.float64 if double else np.float32)
    return codec.wire(bucket.num_elements, num_parameters=len(bucket.indices), dtype=dtype)
