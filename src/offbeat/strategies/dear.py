"""DeAR: all-reduce in two halves (Zhang et al., arXiv 2302.12445), each hidden behind another pass.

    backward:  for each bucket that is complete: reduce-scatter, so each rank has the mean of a part
    step:      the optimizer steps with this rank's part of parameters, gradients and state
    forward:   before a module computes: its parameters, gathered from all ranks since the step

Cost per step: 2(P-1)/P n elements sent by each rank, half of them during backward and half during
forward; the optimizer's state takes 1/P of its memory. While parameters are gathered a copy of them
is in memory.

Differences from the paper: it gathers gradients, and every rank steps with all of them while the
next forward pass runs, by an SGD of its own. Here parts are stepped with and weights gathered, so
the user's optimizer steps when it is told to and gradients can be clipped before. All gathers begin
at once. Buckets have a size that is given, and is not searched for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NoReturn

import torch
from typing_extensions import override

from offbeat.callbacks.context import Context
from offbeat.errors import UnsupportedError
from offbeat.gradients.buckets import is_dense
from offbeat.gradients.exchange import GradientTransform
from offbeat.gradients.scattered import ScatterReduction, ShardedSteps
from offbeat.strategies.gradient import GradientStrategy, Reductions

ELEMENTWISE: Final = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
"""Optimizers that step with each element by itself, so with a part of a parameter as with all."""


@dataclass(frozen=True, kw_only=True)
class DeAR(GradientStrategy):
    """Gradients reduced during backward, weights gathered during forward, and steps shared out.

    Each rank steps with an equal part of each bucket.
    """

    @override
    def check(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().check(model, optimizer)
        if type(optimizer) not in ELEMENTWISE:
            raise UnsupportedError(
                f"DeAR steps with a part of each parameter, and {type(optimizer).__name__} is not"
                " known to step with each element by itself; use SGD or Adam of torch.optim, or"
                " offbeat.AllReduce() with any optimizer"
            )
        for name, parameter in model.named_parameters():
            if not is_dense(parameter):
                raise UnsupportedError(
                    f"the memory of parameter {name!r} has gaps or overlaps, so it cannot be"
                    " divided; make it contiguous, or use offbeat.AllReduce()"
                )

    @override
    def build_exchange(self, context: Context, **options: Any) -> NoReturn:
        raise UnsupportedError(
            "K-FAC changes the mean of gradients on every rank, and DeAR gives each rank a part of"
            " it; use exchange=offbeat.AllReduce()"
        )

    @override
    def reductions(self, context: Context, transform: GradientTransform) -> Reductions:
        if context.has_scaler:
            raise UnsupportedError(
                "DeAR gives each rank a part of the mean, so a GradScaler would find other"
                " gradients on each; use bfloat16 autocast, which needs no scaler, or"
                " offbeat.AllReduce()"
            )
        buckets = self.buckets(context)
        pairs = [
            (bucket, ScatterReduction(bucket, context.driver, context.new_stream()))
            for bucket in buckets
        ]
        steps = ShardedSteps(buckets, transform.counts, context)
        return Reductions(
            pairs, [steps], norm_over_ranks=steps.norm_over_ranks, arrive=steps.arrive
        )
