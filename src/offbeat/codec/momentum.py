"""Momentum that a rank applies to its own gradient, before anything of it is selected.

    velocity = factor * velocity + weight * gradient
    step     = velocity, or weight * gradient + factor * velocity with Nesterov's momentum

which is SGD's momentum as PyTorch has it, and momentum correction as DGC has it (arXiv 1712.01887,
section 3.1). DGC writes Nesterov's with m = factor * velocity, which comes to the same.

A gradient moves the parameter by 1 / (1 - factor) of itself in the end, spread over as many steps
or so. Where it waits for longer than that before it is sent, spreading it first only makes it
later, and late momentum overshoots. So it may be applied at once:

    step     = weight * gradient + share * velocity
    velocity = 0

where the optimizer's learning rate has to be 1 / (1 - factor) times as high. That comes to the same
sum of steps, and whoever clips the step clips the gradient. The share is (1 - factor) times what a
velocity without further gradients would have added: factor + factor^2 + ... = factor / (1 - factor)
times itself. Nesterov's momentum has looked ahead along it by one term already, so factor^2 +
factor^3 + ... is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from offbeat.codec import kernels


@dataclass(frozen=True, kw_only=True, slots=True)
class MomentumRange:
    """Elements with the same momentum.

    Attributes:
        end: the place after the last one; the range begins where the one before ends.
        factor: in [0, 1).
        nesterov: whether the step looks ahead along the velocity.
    """

    end: int
    factor: float
    nesterov: bool = False


class Momentum:
    """The momentum of one bucket.

    Args:
        ranges: that cover all of its elements, in order.

    Attributes:
        ranges: may be replaced between exchanges.
    """

    def __init__(self, ranges: Sequence[MomentumRange]) -> None:
        self.ranges = ranges

    def apply(
        self,
        flat: torch.Tensor,
        velocity: torch.Tensor,
        weight: float,
        new_velocity: torch.Tensor,
        *,
        continues: bool = False,
        at_once: bool = False,
    ) -> None:
        """Turn the gradient in `flat` into the step.

        Args:
            flat: the gradient, float32 or float64, shape (n,); overwritten.
            velocity: same shape, dtype and device.
            weight: of the gradient.
            new_velocity: same shape, dtype and device; overwritten.
            continues: whether the gradient belongs to the same optimizer step as the last one: then
                the velocity has lost its share already, and only what is new is passed on.
            at_once: whether the step, at a learning rate of 1 / (1 - factor) times the user's, is
                all that gradient and velocity will ever move the parameters by.
        """
        mix = mix_by_kernel if flat.device.type == "cpu" else mix_by_torch
        begin = 0
        for each in self.ranges:
            here = slice(begin, each.end)
            begin = each.end
            shares = _shares(each, weight, continues=continues, at_once=at_once)
            mix(flat[here], velocity[here], shares, new_velocity[here])


Shares: TypeAlias = tuple[float, float, float, float]
"""(a, b, c, d): step = a * gradient + b * velocity; new velocity = c * gradient + d * velocity."""


def _shares(momentum: MomentumRange, weight: float, *, continues: bool, at_once: bool) -> Shares:
    factor = momentum.factor
    if factor == 0:  # as in PyTorch, where a buffer rests while there is no momentum
        return weight, 0.0, 0.0, 1.0
    if at_once:
        return weight, factor * factor if momentum.nesterov else factor, 0.0, 0.0
    of_gradient = weight * (1 + factor) if momentum.nesterov else weight
    if continues:
        return of_gradient, 0.0, weight, 1.0
    return of_gradient, factor * factor if momentum.nesterov else factor, weight, factor


def mix_by_kernel(
    flat: torch.Tensor, velocity: torch.Tensor, shares: Shares, new_velocity: torch.Tensor
) -> None:
    """Write the step into `flat`, which holds the gradient, and the new velocity, in one pass on
    the CPU.
    """
    values = flat.numpy()
    kernels.mix(
        values,
        velocity.numpy(),
        np.array(shares, dtype=values.dtype),
        new_velocity.numpy(),
    )


def mix_by_torch(
    flat: torch.Tensor, velocity: torch.Tensor, shares: Shares, new_velocity: torch.Tensor
) -> None:
    """The same on any device."""
    a, b, c, d = shares
    torch.mul(velocity, d, out=new_velocity).add_(flat, alpha=c)
    if (a, b) == (c, d):
        flat.copy_(new_velocity)
    else:
        flat.mul_(a).add_(velocity, alpha=b)
