"""SGD, Adagrad and Adam that look at the rows of a sparse gradient and at no others.

    for parameter, gradient in model:
        rows = those that the gradient has; all, if it is dense
        update parameter[rows] and state[rows] from gradient[rows]
        touched[rows] = True

Plain SGD and Adagrad leave a row without a gradient as it is anyway, so here they equal torch's.
Momentum and Adam do not: in torch's dense optimizers a row goes on moving after its last gradient,
here its momentum stays frozen until the next one, as in `torch.optim.SparseAdam`. Where every step
touches every row, all of them equal torch's.

Time per step follows the rows of the gradient, not those of the parameter; momentum takes as much
memory as the parameter, Adam twice as much. Weight decay is left out: it would touch all rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from offbeat.errors import ConfigError
from offbeat.xmc.row_gradients import read_sparse

Group: TypeAlias = dict[str, Any]
_STEP = "step"
_BLOCK_NUMBERS = 1 << 16
"""Of rows that are updated together, so that copies of them stay in a core's cache."""


class RowOptimizer(torch.optim.Optimizer, ABC):
    """What the optimizers of this file share. Gradients are dense, or sparse in the first dimension
    only.
    """

    @abstractmethod
    def _slot_names(self, group: Group) -> tuple[str, ...]:
        """Names of state of the parameter's shape, zeros at first."""

    @abstractmethod
    def _update_(self, weight: Tensor, gradient: Tensor, slots: list[Tensor], group: Group) -> None:
        """A step, in place on tensors of one shape. `group["step"]` is its number, from 1 on."""

    @torch.no_grad()
    # torch overloads it
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient. A parameter without rows in its gradient
        counts the step all the same.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_parameter(parameter, parameter.grad, group)
        return loss

    def _step_parameter(self, parameter: Tensor, gradient: Tensor, group: Group) -> None:
        state, slot_names = self.state[parameter], self._slot_names(group)
        if not state:
            state[_STEP] = torch.tensor(0.0)
        for name in slot_names:
            if name not in state:  # momentum may be set once steps were made without it
                state[name] = torch.zeros_like(parameter)
        state[_STEP] += 1
        group = {**group, _STEP: int(state[_STEP])}
        slots = [state[name] for name in slot_names]
        if not gradient.is_sparse:
            self._update_(parameter, gradient, slots, group)
            return
        all_rows, all_values = read_sparse(gradient)
        tensors = [parameter, *slots]
        size = (
            max(_BLOCK_NUMBERS // max(parameter[:1].numel(), 1), 1)
            if parameter.device.type == "cpu"
            else all_rows.numel()
        )
        for rows, values in zip(all_rows.split(size), all_values.split(size), strict=True):
            weight_rows, *slot_rows = (tensor.index_select(0, rows) for tensor in tensors)
            self._update_(weight_rows, values, slot_rows, group)
            for tensor, changed in zip(tensors, [weight_rows, *slot_rows], strict=True):
                tensor.index_copy_(0, rows, changed)


class RowSGD(RowOptimizer):
    """Stochastic gradient descent: m <- momentum m + g; w <- w - lr m.

    Args:
        params: parameters or groups of them.
        lr: learning rate, >= 0.
        momentum: in [0, 1).
    """

    def __init__(self, params: Iterable[Any], lr: float, *, momentum: float = 0.0) -> None:
        _require("lr", lr, least=0.0)
        _require("momentum", momentum, least=0.0, below=1.0)
        super().__init__(params, {"lr": lr, "momentum": momentum})

    def _slot_names(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def _update_(self, weight: Tensor, gradient: Tensor, slots: list[Tensor], group: Group) -> None:
        for momentum in slots:
            gradient = momentum.mul_(group["momentum"]).add_(gradient)
        weight.sub_(gradient, alpha=group["lr"])


class RowAdagrad(RowOptimizer):
    """Adagrad: s <- s + g^2; w <- w - lr g / (sqrt(s) + eps).

    Args:
        params: parameters or groups of them.
        lr: learning rate, >= 0.
        eps: > 0.
    """

    def __init__(self, params: Iterable[Any], lr: float, *, eps: float = 1e-10) -> None:
        _require("lr", lr, least=0.0)
        _require("eps", eps, least=0.0)
        super().__init__(params, {"lr": lr, "eps": eps})

    def _slot_names(self, group: Group) -> tuple[str, ...]:
        return ("sum",)

    def _update_(self, weight: Tensor, gradient: Tensor, slots: list[Tensor], group: Group) -> None:
        (squares,) = slots
        squares.addcmul_(gradient, gradient)
        weight.addcdiv_(gradient, squares.sqrt().add_(group["eps"]), value=-group["lr"])


class RowAdam(RowOptimizer):
    """Adam. Bias is corrected by the number of the step, the same for all rows.

    Args:
        params: parameters or groups of them.
        lr: learning rate, >= 0.
        betas: each in [0, 1).
        eps: > 0.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        _require("lr", lr, least=0.0)
        _require("eps", eps, least=0.0)
        for beta in betas:
            _require("each of betas", beta, least=0.0, below=1.0)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    def _slot_names(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def _update_(self, weight: Tensor, gradient: Tensor, slots: list[Tensor], group: Group) -> None:
        mean, square = slots
        beta1, beta2 = group["betas"]
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        spread = square.sqrt().div_((1 - beta2 ** group[_STEP]) ** 0.5).add_(group["eps"])
        weight.addcdiv_(mean, spread, value=-group["lr"] / (1 - beta1 ** group[_STEP]))


def _require(name: str, number: float, *, least: float, below: float = float("inf")) -> None:
    if not least <= number < below:
        raise ConfigError(
            f"{name} is {number}; it must be at least {least}"
            + (f" and below {below}" if below < 1e9 else "")
        )
