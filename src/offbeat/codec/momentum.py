"""Momentum that a rank applies to its own gradient, before anything of it is selected.

    velocity = factor * velocity + weight * gradient
    step     = velocity, or weight * gradient + factor * velocity with Nesterov's momentum

which is SGD's momentum as PyTorch has it, and momentum correction as DGC has it (arXiv 1712.01887,
section 3.1). DGC writes Nesterov's with m = factor * velocity, which comes to the same.

A gradient moves the parameter by 1 / (1 - factor) of itself in the end, spread over as many steps
or so. Where it waits for longer than that before it is sent, spreading it first only makes it
later, and late momentum overshoots. So it may be applied at once:

    step     = (weight * gradient + factor * velocity) / (1 - factor)
    velocity = 0

which comes to the same sum of steps, Nesterov's momentum or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    ) -> None:
        """Turn the gradient in `flat` into the step.

        Args:
            flat: the gradient, float32 or float64, shape (n,); overwritten.
            velocity: same shape, dtype and device.
            weight: of the gradient.
            new_velocity: same shape, dtype and device; overwritten.
            continues: whether the gradient belongs to the same optimizer step as the last one: then
                the velocity has lost its share already, and only what is new is passed on.
        """
        add = add_by_kernel if flat.device.type == "cpu" else add_by_torch
        begin = 0
        for each in self.ranges:
            here = slice(begin, each.end)
            begin = each.end
            if continues:
                flat[here].mul_(weight)
                torch.add(velocity[here], flat[here], out=new_velocity[here])
                if each.nesterov:
                    flat[here].mul_(1 + each.factor)
            else:
                add(flat[here], velocity[here], each, weight, new_velocity[here])

    def apply_at_once(
        self,
        flat: torch.Tensor,
        velocity: torch.Tensor,
        weight: float,
        new_velocity: torch.Tensor,
    ) -> None:
        """Turn the gradient in `flat` into all that it and `velocity` will move the parameters by.
        Nothing of the velocity is left.

        Args:
            flat, velocity, weight, new_velocity: as of `apply`.
        """
        add = add_at_once_by_kernel if flat.device.type == "cpu" else add_at_once_by_torch
        begin = 0
        for each in self.ranges:
            here = slice(begin, each.end)
            begin = each.end
            add(flat[here], velocity[here], each, weight, new_velocity[here])


def add_by_kernel(
    flat: torch.Tensor,
    velocity: torch.Tensor,
    momentum: MomentumRange,
    weight: float,
    new_velocity: torch.Tensor,
) -> None:
    """`Momentum.apply` for the slices of one range, in one pass on the CPU."""
    values = flat.numpy()
    kernels.add_momentum(
        values,
        velocity.numpy(),
        values.dtype.type(momentum.factor),
        values.dtype.type(weight),
        momentum.nesterov,
        new_velocity.numpy(),
    )


def add_by_torch(
    flat: torch.Tensor,
    velocity: torch.Tensor,
    momentum: MomentumRange,
    weight: float,
    new_velocity: torch.Tensor,
) -> None:
    """The same on any device."""
    torch.mul(velocity, momentum.factor, out=new_velocity).add_(flat, alpha=weight)
    if momentum.nesterov:
        flat.mul_(weight).add_(new_velocity, alpha=momentum.factor)
    else:
        flat.copy_(new_velocity)


def add_at_once_by_kernel(
    flat: torch.Tensor,
    velocity: torch.Tensor,
    momentum: MomentumRange,
    weight: float,
    new_velocity: torch.Tensor,
) -> None:
    """`Momentum.apply_at_once` for the slices of one range, in one pass on the CPU."""
    values = flat.numpy()
    kernels.add_momentum_at_once(
        values,
        velocity.numpy(),
        values.dtype.type(momentum.factor),
        values.dtype.type(weight),
        new_velocity.numpy(),
    )


def add_at_once_by_torch(
    flat: torch.Tensor,
    velocity: torch.Tensor,
    momentum: MomentumRange,
    weight: float,
    new_velocity: torch.Tensor,
) -> None:
    """The same on any device."""
    share = 1 - momentum.factor
    flat.mul_(weight / share).add_(velocity, alpha=momentum.factor / share)
    new_velocity.zero_()
