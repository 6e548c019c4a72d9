"""Factors averaged over steps, and how strongly to damp them.

The exponential average is kept free of damping: damping is added to what is inverted, never to what
is averaged, so that it does not build up. It starts from nothing and not from the identity, and is
divided by the sum of its weights:

    sum  <- decay * sum  + (1 - decay) * F
    mass <- decay * mass + (1 - decay)
    average = sum / mass

so early averages are means of what was seen. An increment with an infinity or a NaN in it, or of
weight 0, leaves no trace. All of it happens on the factor's device, on a GPU without asking for a
value.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from offbeat.errors import CheckpointError
from offbeat.kfac.blocks import FactorShape
from offbeat.kfac.inverses import is_asynchronous
from offbeat.kfac.pieces import cut_packed, is_whole
from offbeat.kfac.symmetric import diagonal


class RunningFactor:
    """One factor's average over steps, packed.

    Args:
        shape: of the factor.
        dtype: float32 or float64.
        device: where it lives.

    Attributes:
        weighted_sum: sum of the steps' factors, each times its weight.
        mass: sum of the weights, a scalar tensor; 0 as long as nothing was averaged.
    """

    def __init__(self, shape: FactorShape, *, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.weighted_sum = torch.zeros(shape.packed, dtype=dtype, device=device)
        self.mass = torch.zeros((), dtype=dtype, device=device)

    def update_(
        self, increment: torch.Tensor, *, weight: float | torch.Tensor, decay: float
    ) -> None:
        """Take in one step's factor.

        Args:
            increment: the step's mean over all ranks, of the shape's packed shape.
            weight: the ranks' weights together; only whether it is 0 matters.
            decay: how much of the past to keep, in [0, 1).
        """
        counts = torch.isfinite(increment.sum()) & (
            torch.as_tensor(weight, device=increment.device) > 0
        )
        # On a GPU the host would wait for `counts`, so it is used as a mask there. The CPU's way is
        # the same arithmetic without the copies.
        if not is_asynchronous(increment.device):
            if counts:
                self.mass.lerp_(torch.ones_like(self.mass), 1 - decay)
                self.weighted_sum.lerp_(increment, 1 - decay)
            return
        self.mass.lerp_(torch.where(counts, 1.0, self.mass), 1 - decay)
        self.weighted_sum.lerp_(torch.where(counts, increment, self.weighted_sum), 1 - decay)

    def average(self) -> torch.Tensor:
        """The average, packed; zeros as long as there is none."""
        return self.weighted_sum / torch.where(self.mass > 0, self.mass, 1.0)

    def mean_eigenvalue(self) -> torch.Tensor:
        """Of the average, without making it: a scalar tensor."""
        mean = mean_eigenvalue(self.weighted_sum, self.shape)
        return mean / torch.where(self.mass > 0, self.mass, 1.0)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"sum": self.weighted_sum, "mass": self.mass}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Inverse of `state_dict`. A factor that was whole is cut as it is cut here. Raises
        `CheckpointError` for one of another shape.
        """
        total, mass = state["sum"], state["mass"]
        if total.shape != self.weighted_sum.shape and is_whole(total.shape, self.shape):
            total = cut_packed(total, self.shape)
        if total.shape != self.weighted_sum.shape:
            raise CheckpointError(
                f"a factor was saved as {tuple(total.shape)}, here it is"
                f" {tuple(self.weighted_sum.shape)}; is it the same model?"
            )
        self.weighted_sum.copy_(total)
        self.mass.copy_(mass)


def mean_eigenvalue(packed: torch.Tensor, shape: FactorShape) -> torch.Tensor:
    """The factor's trace by its dimension, a mean over groups: a scalar tensor."""
    values = packed if shape.is_diagonal else diagonal(packed, shape.dim)
    return values.sum() / (values.numel() - shape.padding)


def damping_of(
    inputs: torch.Tensor, outputs: torch.Tensor, *, damping: float, pi: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What to add to the diagonals of A and G.

    Without `pi`, the damping itself to each. With it, sqrt(damping) * pi to A and sqrt(damping) /
    pi to G, where pi^2 = (tr A / d_A) / (tr G / d_G): the damping of their Kronecker product is
    then shared by the factors in proportion to their sizes (arXiv 1503.05671, section 6.3). Where a
    trace is not positive, pi is 1.

    Args:
        inputs, outputs: the mean eigenvalues of the averages of A and G, scalar tensors.
        damping: > 0.
        pi: whether to correct.

    Returns:
        Two scalar tensors.
    """
    if not pi:
        return torch.full_like(inputs, damping), torch.full_like(outputs, damping)
    are_positive = (inputs > 0) & (outputs > 0)
    ratio = torch.where(are_positive, inputs / outputs, 1.0).sqrt()
    return ratio * damping**0.5, damping**0.5 / ratio
