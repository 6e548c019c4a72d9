"""Q-GenX: extra-gradient steps for games and other saddle points, with gradients in few bits (arXiv
2308.09187, algorithm 1).

    in turn:
        x' = x - lr * gradient at x            a look ahead
        x  = x - lr * gradient at x'           the step, from where the look began
    each gradient the mean of all ranks', rounded at random to one of a few levels

Players of a game who step along their own gradients circle around each other; who steps along what
the gradient will be moves inwards. Two steps of the user's loop, with a batch each, are one of the
method's, and each of them is the optimizer's: with Adam it is extra-Adam.

Cost per step of the loop: as of `AllReduce` with the same codec. Between a look and its step two
copies of the parameters.

Differences from the paper: what rounding loses is owed, so that coarse levels do no harm; the
learning rate is the optimizer's, where the paper's follows the gradients seen so far; levels are
equally far apart, where it adapts them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from typing_extensions import override

from offbeat.callbacks.callback import Callback, CallbackState
from offbeat.callbacks.context import Context
from offbeat.codec.value_codecs import ValueCodec
from offbeat.gradients.buckets import Bucket
from offbeat.gradients.reductions import Reduction
from offbeat.strategies.allreduce import AllReduce
from offbeat.strategies.gradient import GradientStrategy


@dataclass(frozen=True, kw_only=True)
class QGenX(GradientStrategy):
    """Extra-gradient steps for games, with gradients in few bits.

    Args:
        codec: how values travel: a name of `codec.topk_codec.VALUE_CODECS`, or a `ValueCodec`.
    """

    acts_at_steps: ClassVar[bool] = True
    against_scaler: ClassVar[str] = "QGenX counts optimizer steps, of which a GradScaler skips some"
    against_kfac: ClassVar[str] = (
        "K-FAC takes one plain step after each exchange, so no step of QGenX would look ahead"
    )

    codec: ValueCodec | str = "stochastic4"

    def __post_init__(self) -> None:
        super().__post_init__()
        AllReduce(codec=self.codec)  # which refuses what is no codec of values

    @override
    def reduction(self, bucket: Bucket, context: Context) -> Reduction:
        return AllReduce(codec=self.codec).reduction(bucket, context)

    @override
    def build(self, context: Context) -> Sequence[Callback]:
        return [*super().build(context), ExtraGradient(context.parameters)]


class ExtraGradient(Callback):
    """Lets every other step begin where the one before it began.

    Args:
        parameters: what is stepped, by name.
    """

    state_key: ClassVar[str] = "extra_gradient"

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._begun: dict[str, torch.Tensor] = {}  # where the look ahead began; empty before it
        self._ahead: dict[str, torch.Tensor] = {}  # where it has come to
        # What one step leaves for its end:
        self._looks_ahead = self._returned = False

    @override
    def on_before_update(self) -> None:
        if all(parameter.grad is None for parameter in self._parameters.values()):
            return  # the step is skipped, and the next one takes its turn
        if not self._begun:
            self._looks_ahead = True
            self._begun = {name: p.detach().clone() for name, p in self._parameters.items()}
        elif not self._looks_ahead:  # else a closure has run again in the same step
            self._return()
            self._returned = True

    @override
    def on_after_step(self) -> None:
        if self._looks_ahead:
            self._ahead = {name: p.detach().clone() for name, p in self._parameters.items()}
        if self._returned:
            self._begun, self._ahead = {}, {}
        self._looks_ahead = self._returned = False

    @override
    def on_finish(self) -> None:
        self._return()

    @override
    def close(self) -> None:
        self._return()  # what was only a look is no result

    @torch.no_grad()
    def _return(self) -> None:
        """Undo the look, but not what has been written into parameters since."""
        for name, begun in self._begun.items():
            parameter = self._parameters[name]
            is_ahead = parameter == self._ahead.get(name, parameter)
            parameter.copy_(torch.where(is_ahead, begun, parameter))

    @override
    def state_dict(self) -> CallbackState:
        begun = {f"begun/{name}": value for name, value in self._begun.items()}
        ahead = {f"ahead/{name}": value for name, value in self._ahead.items()}
        return {"replicated": begun | ahead}

    @override
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        saved = state["replicated"]
        self._begun, self._ahead = (
            {
                # What was read of a file is on the host.
                name: saved[f"{kind}/{name}"].to(parameter.device, copy=True)
                for name, parameter in self._parameters.items()
                if f"{kind}/{name}" in saved
            }
            for kind in ("begun", "ahead")
        )
