"""1-bit Adam: momentum travels as signs once Adam's second moments are frozen (arXiv 2102.02888,
algorithm 1).

    until `freeze_step`: the user's Adam, with the mean of gradients
    then v stays, and in each step
        u = (beta1 m + (1 - beta1) gradient) / (sqrt(v) + eps)   on each rank, from the mean m
        u = mean of all ranks' u, as signs with a scale          by owners (`collectives.coded_sum`)
        parameter -= lr u;  m = (sqrt(v) + eps) u

What signs lose is owed. The step is written here, and the optimizer then finds no gradient; m and v
are those of `optimizer.state`, which is the same on all ranks, so it is shown, saved and loaded as
ever.

Cost per step: as of AllReduce at first, then 2(P-1)/P n bits sent by each rank and a float32 for
1,024 of them; a buffer of the gradient's size is owed.

Differences from the paper: signs are those of the step, and not of momentum, whose elements may
differ by orders: where v is small next to that of its neighbours, as of a bias before a BatchNorm,
their scale would make steps many thousand times too large. A scale is the mean magnitude of 1,024
values, and not the mean square of a tensor; both roundings of a rank are owed in one vector; Adam's
bias corrections, which the paper leaves out, go on for m and are frozen with v; an element whose v
is 0, because it had no gradient so far, stays as it is: its sign cannot be 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from offbeat.callbacks.callback import CallbackState
from offbeat.callbacks.context import Context
from offbeat.codec.described_options import OneOrMore
from offbeat.codec.few_bits import SignValues
from offbeat.codec.tally import Tally
from offbeat.codec.value_codecs import ValueCodec
from offbeat.errors import UnsupportedError
from offbeat.gradients.buckets import Bucket
from offbeat.gradients.coded_reduction import CodedReduction
from offbeat.gradients.exchange import GradientTransform, HiddenGradients
from offbeat.gradients.parameter_groups import GroupRanges, coupled_decay
from offbeat.gradients.reductions import DenseReduction, Reduction, WeightedGradient
from offbeat.strategies.gradient import GradientStrategy, Reductions


@dataclass(frozen=True, kw_only=True)
class OneBitAdam(GradientStrategy):
    """Adam whose momentum travels as signs once its second moments are frozen.

    Args:
        freeze_step: second moments are frozen once the optimizer has taken so many steps, >= 1: a
            sixth to a quarter of all steps is usual.
    """

    against_scaler: ClassVar[str] = (
        "OneBitAdam takes the optimizer's steps, and a GradScaler scales what they are given"
    )
    against_kfac: ClassVar[str] = (
        "K-FAC changes the mean of gradients, and OneBitAdam sends momenta and takes the steps"
        " itself"
    )

    values: ClassVar[ValueCodec] = SignValues()
    """How momentum travels."""

    freeze_step: OneOrMore = 1000

    @override
    def check(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().check(model, optimizer)
        require_adam(optimizer, type(self).__name__)

    @override
    def transform(self, context: Context) -> GradientTransform:
        return FrozenAdam(context, freeze_step=self.freeze_step)

    @override
    def reductions(self, context: Context, transform: GradientTransform) -> Reductions:
        assert isinstance(transform, FrozenAdam)
        pairs = [
            (bucket, _MomentumReduction(bucket, self.values, context, transform))
            for bucket in self.buckets(context)
        ]
        return Reductions(pairs)


def require_adam(optimizer: torch.optim.Optimizer, strategy: str) -> None:
    """Raise `UnsupportedError` unless `strategy` can take the optimizer's steps."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or any(
        group["amsgrad"] for group in optimizer.param_groups
    ):
        raise UnsupportedError(
            f"{strategy} freezes the second moments of torch.optim.Adam or AdamW without amsgrad,"
            f" got {type(optimizer).__name__}; use such an optimizer, or"
            ' offbeat.AllReduce(codec="sign") with any'
        )


def divisor_of(square: torch.Tensor, num_updates: float, group: Mapping[str, Any]) -> torch.Tensor:
    """What Adam's momentum is divided by: infinity where there is no second moment yet.

    Args:
        square: second moments.
        num_updates: how often they were updated, >= 1.
        group: of the optimizer.
    """
    divisor = square.div(_grown(num_updates, group)).sqrt_().add_(group["eps"])
    return divisor.masked_fill_(square == 0, torch.inf)


def regrow_(state: Mapping[str, Any], group: Mapping[str, Any], then: float, now: float) -> None:
    """Let second moments of so many updates `then` be what they would be after so many `now`: for
    as grown as its steps say Adam takes them.
    """
    state["exp_avg_sq"].mul_(_grown(now, group) / _grown(then, group))


def _grown(num_updates: float, group: Mapping[str, Any]) -> float:
    """The share of the mean square that second moments have after so many updates."""
    beta2 = float(group["betas"][1])
    return float(1 - beta2 ** float(num_updates))


def remark_of_freeze(optimizer: torch.optim.Optimizer, num_steps: float) -> str:
    """That second moments are frozen after so many steps, and what becomes of elements that have
    none.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    squares = [optimizer.state.get(p, {}).get("exp_avg_sq") for p in parameters]
    num_elements = sum(p.numel() for p in parameters)
    num_moving = sum(int(v.count_nonzero()) for v in squares if v is not None and not v.is_meta)
    return (
        f"Adam's second moments are frozen after {num_steps:,.0f} steps, and momentum travels as"
        f" signs; {num_elements - num_moving:,} of {num_elements:,} elements have had no gradient"
        " in the steps that update them, and stay as they are"
    )


_LATE: Final = (
    "a parameter has its first gradient after Adam's second moments were frozen, so that it has"
    " none and stays as it is; give the optimizer all groups, and unfreeze what is to train, before"
    " that, by a larger freeze_step"
)


class FrozenAdam(GradientTransform):
    """Adam's momentum and step, from the step on in which second moments are frozen.

    Args:
        context: lent by the session; its optimizer is an Adam.
        freeze_step: after how many steps of the optimizer that is.
    """

    what: ClassVar[str] = "Adam's momentum"

    def __init__(self, context: Context, *, freeze_step: int) -> None:
        assert context.optimizer is not None
        super().__init__(context.optimizer)
        self._optimizer, self._notices = context.optimizer, context.notices
        self._freeze_step = freeze_step
        self._groups: dict[int, GroupRanges] = {}
        self._has_looked = False  # at the optimizer's steps, since the last one
        self._frozen_at = 0.0  # by then v had been changed so many times
        self._has_told_of_late = False
        self._hidden = HiddenGradients()

    @property
    @override
    def is_taken(self) -> bool:  # type: ignore[override]  # nobody sets it
        return self._frozen_at > 0

    @override
    def take(self) -> None:
        if not self._handles:
            hook = self._optimizer.register_load_state_dict_post_hook
            self._handles = [hook(lambda _: self._state_loaded())]

    def _state_loaded(self) -> None:
        """Moments of fewer steps than there were at the freeze are of before it."""
        self._has_looked = False
        steps = (float(state.get("step", 0)) for _, state in self._states())
        if max(steps, default=0.0) < self._frozen_at:
            self._frozen_at = 0.0

    @override
    def init(self, bucket: Bucket, reduction: Reduction) -> None:
        self._groups[id(bucket)] = GroupRanges(bucket, self._optimizer)

    @override
    def update(
        self, bucket: Bucket, given: WeightedGradient, continues: NDArray[np.bool_]
    ) -> WeightedGradient:
        """Turn the gradient into momentum, which a later exchange of the same step adds to. Weight
        decay is in it on all ranks, whoever has used the parameter; if nobody has, nothing is
        applied.
        """
        self._look()
        if not self.is_taken:
            return given
        param_groups, groups = self._optimizer.param_groups, self._groups[id(bucket)]
        momentum = bucket.flat.to(bucket.state_dtype)
        for parameter, view, number, goes_on in zip(
            bucket.parameters, bucket.views_of(momentum), groups.groups, continues, strict=True
        ):
            if number is None:
                continue
            group = param_groups[number]
            beta1 = float(group["betas"][0])
            if not goes_on:
                view.add_(parameter.detach(), alpha=coupled_decay(group))
            view.mul_(beta1 - 1 if group["maximize"] else 1 - beta1)
            if not goes_on and (state := self._optimizer.state.get(parameter)):
                view.add_(state["exp_avg"], alpha=beta1)
        return given._replace(gradient=momentum)

    def divisors(self, bucket: Bucket) -> Iterator[torch.Tensor]:
        """What the momentum of each of a bucket's parameters is divided by: 1 where the optimizer
        does not have it.
        """
        param_groups, groups = self._optimizer.param_groups, self._groups[id(bucket)].groups
        for parameter, number in zip(bucket.parameters, groups, strict=True):
            if number is None:
                yield parameter.new_ones(())
            elif state := self._optimizer.state.get(parameter):
                yield divisor_of(state["exp_avg_sq"], self._frozen_at, param_groups[number])
            else:
                yield parameter.new_full((), torch.inf)

    def _look(self) -> None:
        """Freeze, if it is time. Steps are the same on all ranks. Second moments of parameters that
        were not in all of them become what they would be after all, since their steps go on.
        """
        if self._has_looked or self.is_taken:
            return
        self._has_looked = True
        states = [*self._states()]
        num_steps = max((float(state.get("step", 0)) for _, state in states), default=0.0)
        if num_steps < self._freeze_step:
            return
        self._frozen_at = num_steps
        for group, state in states:
            regrow_(state, group, state["step"], num_steps)
        self._notices.inform(remark_of_freeze(self._optimizer, num_steps))

    def _states(self) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        """Adam's of each parameter that has one, behind the parameter's group."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if state := self._optimizer.state.get(parameter):
                    yield group, state

    @override
    def give_back(self) -> None:
        """Adam goes on from where its state is."""
        self._hidden.show()
        if self.is_taken:
            for group, state in self._states():
                regrow_(state, group, self._frozen_at, state["step"])
        self._frozen_at = 0.0
        super().give_back()

    # Events

    @override
    @torch.no_grad()
    def on_before_update(self) -> None:
        """Take the step; the optimizer then finds no gradient."""
        if not self.is_taken:
            return
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if (momentum := parameter.grad) is None:
                    continue
                if state := self._optimizer.state.get(parameter):
                    self._step(parameter, momentum, state, group)
                elif not self._has_told_of_late:
                    self._has_told_of_late = True
                    self._notices.notify(_LATE)
                self._hidden.hide(parameter)

    def _step(
        self,
        parameter: torch.nn.Parameter,
        momentum: torch.Tensor,
        state: Mapping[str, Any],
        group: Mapping[str, Any],
    ) -> None:
        rate, beta1 = float(group["lr"]), float(group["betas"][0])
        state["step"].add_(1)
        state["exp_avg"].copy_(momentum)
        num_steps = float(state["step"])
        divisor = divisor_of(state["exp_avg_sq"], self._frozen_at, group)
        if group["decoupled_weight_decay"]:
            parameter.mul_(1 - rate * group["weight_decay"])
        parameter.addcdiv_(momentum, divisor, value=-rate / (1 - beta1**num_steps))

    @override
    def on_after_step(self) -> None:
        self._has_looked = False
        self._hidden.show()

    # State

    @override
    def state_dict(self) -> CallbackState:
        replicated = super().state_dict()["replicated"]
        return {"replicated": {**replicated, "frozen_at": self._frozen_at}}

    @override
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        super().load_state_dict(state)
        self._frozen_at = float(state["replicated"].get("frozen_at", 0))
        self._has_looked = False


class _MomentumReduction(CodedReduction):
    """The mean of gradients, and from the freeze on that of momenta in few bits."""

    def __init__(
        self, bucket: Bucket, values: ValueCodec, context: Context, frozen: FrozenAdam
    ) -> None:
        super().__init__(bucket, values, context.driver, context.new_stream())
        self._dense = DenseReduction(bucket, context.driver, context.new_stream())
        self._frozen = frozen
        # What one exchange leaves for the methods that end it, from `launch` on:
        self._is_dense = True

    @override
    def _launch(self, given: WeightedGradient) -> None:
        self._is_dense = not self._frozen.is_taken
        if self._is_dense:
            self._dense.launch(given)
            return
        momenta = self._bucket.views_of(given.gradient)
        for momentum, divisor in zip(momenta, self._frozen.divisors(self._bucket), strict=True):
            momentum.div_(divisor)
        super()._launch(given)

    @override
    def wait(self) -> Tally | torch.Tensor:
        return self._dense.wait() if self._is_dense else super().wait()

    @override
    def _commit(self) -> torch.Tensor:
        self._dense.tally = self.tally
        if self._is_dense:
            return self._dense.commit()
        flat, divisors = super()._commit(), self._frozen.divisors(self._bucket)
        for step, divisor in zip(self._bucket.views_of(flat), divisors, strict=True):
            step.mul_(divisor.masked_fill(divisor.isinf(), 0))
        return flat
