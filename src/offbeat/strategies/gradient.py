"""What the strategies that exchange gradients have in common: when to skip a step, and how ranks
find that they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.errors import UnsupportedError
from offbeat.gradients.buckets import Bucket, make_buckets
from offbeat.gradients.clipping import LocalClipping
from offbeat.gradients.exchange import (
    ExchangeListener,
    GradientExchange,
    GradientTransform,
    LaunchOrder,
)
from offbeat.gradients.reductions import Reduction
from offbeat.gradients.replica_check import ReplicaCheck
from offbeat.strategies.base import Strategy
from offbeat.strategies.options import require_dense_optimizer, require_real

MIB = 1 << 20


class Reductions(NamedTuple):
    """What a strategy exchanges.

    Attributes:
        pairs: each bucket with its reduction, in the order in which they are launched.
        callbacks: what the strategy needs besides.
        listeners: have to listen to the exchange.
        norm_over_ranks: makes the norm of the mean of the norm of what this rank has of it.
            Collective. None: all of it.
        arrive: waits until parameters are what the last step has made of them.
    """

    pairs: Sequence[tuple[Bucket, Reduction]]
    callbacks: Sequence[Callback] = ()
    listeners: Sequence[ExchangeListener] = ()
    norm_over_ranks: Callable[[float], float] | None = None
    arrive: Callable[[], None] = lambda: None


@dataclass(frozen=True, kw_only=True)
class GradientStrategy(Strategy):
    """Synchronous: every rank applies the same gradient in every step."""

    weighs_samples: ClassVar[bool] = True
    bucket_mib: ClassVar[float | None] = 25.0
    """The size of a bucket where the session names none: that of DistributedDataParallel. None: all
    gradients are in one.
    """
    against_scaler: ClassVar[str] = ""
    """Why the strategy cannot train with a GradScaler; "": it can."""
    against_kfac: ClassVar[str] = ""
    """Why K-FAC cannot make its steps of what the strategy exchanges; "": it can."""

    @property
    def takes_complex(self) -> bool:
        """Whether parameters that train may be complex."""
        return False

    def check(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        require_dense_optimizer(optimizer)
        if not self.takes_complex:
            require_real(model)

    def transform(self, context: Context) -> GradientTransform | None:
        """What works before the exchange in the optimizer's place; None: nothing ever does."""
        return None

    def buckets(self, context: Context) -> list[Bucket]:
        """Of the model's gradients."""
        return make_buckets(context.parameters, cap_bytes=self.bucket_bytes(context))

    def bucket_bytes(self, context: Context) -> int | None:
        """The size that a bucket may have; None: all gradients are in one."""
        mib = self.bucket_mib if context.bucket_mib is None else context.bucket_mib
        return None if mib is None else int(mib * MIB)

    def reduction(self, bucket: Bucket, context: Context) -> Reduction:
        """How `bucket`, one of `buckets`, is exchanged. Every strategy has this, or `reductions` of
        its own.
        """
        raise NotImplementedError

    def reductions(self, context: Context, transform: GradientTransform) -> Reductions:
        """What is exchanged. `transform` works before it, and is made ready for each bucket
        afterwards.
        """
        buckets = self.buckets(context)
        return Reductions([(bucket, self.reduction(bucket, context)) for bucket in buckets])

    def clipping(self, world_size: int) -> LocalClipping | None:
        """How gradients are clipped before they are sent; None where the user may clip the mean."""
        return None

    def build(self, context: Context) -> Sequence[Callback]:
        if self.against_scaler and context.has_scaler:
            raise UnsupportedError(
                f"{self.against_scaler}; use bfloat16 autocast, which needs no scaler, or"
                " offbeat.AllReduce()"
            )
        transform = self.transform(context)
        exchange, others = self._exchange(context, transform or GradientTransform(None))
        if transform is None:
            return [exchange, *others]
        transform.take()  # last, when nothing can fail any more
        return [exchange, *others, transform]

    def build_exchange(
        self, context: Context, *, launch_order: LaunchOrder | None = None
    ) -> tuple[GradientExchange, list[Callback]]:
        """The exchange of gradients that are changed further before the step, and the other
        callbacks. Nothing works in the optimizer's place there: it steps with what is made of them.

        Strategies that send more than gradients share `launch_order` with the exchange, and listen
        to it (`GradientExchange.add_listener`).
        """
        if self.against_kfac:
            raise UnsupportedError(f"{self.against_kfac}; use exchange=offbeat.AllReduce()")
        transform = GradientTransform(context.optimizer, is_followed=True)
        return self._exchange(context, transform, launch_order)

    def _exchange(
        self,
        context: Context,
        transform: GradientTransform,
        launch_order: LaunchOrder | None = None,
    ) -> tuple[GradientExchange, list[Callback]]:
        found = self.reductions(context, transform)
        for bucket, reduction in found.pairs:
            transform.init(bucket, reduction)
        exchange = GradientExchange(
            context,
            found.pairs,
            launch_order=launch_order,
            clipping=self.clipping(context.driver.world_size),
            norm_over_ranks=found.norm_over_ranks,
            transform=transform,
        )
        others = list(found.callbacks)
        for listener in found.listeners:
            exchange.add_listener(listener)
        if context.replica_check_interval:
            others.append(ReplicaCheck(context, arrive=found.arrive))
        return exchange, others
