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

Where preconditioned gradients travel, a rank keeps the averages of the factors that it owns;
elsewhere every rank keeps all of them. What is averaged is a step's mean over all ranks, out of a
message, or, where no factors are sent, what this rank has seen itself.

A tied weight that is used both ways round, as by an Embedding and a Linear, has the factors of two
uses. Of the sum of their Fisher matrices, U_1 x W_1 + U_2 x W_2, one Kronecker product is made, of
the same trace, in which each use counts by the root s of its own trace:

    s_i^2 = tr U_i tr W_i
    U = c (s_1 U_1 / tr U_1 + s_2 U_2 / tr U_2)        W = c (s_1 W_1 / tr W_1 + s_2 W_2 / tr W_2)
    c^2 = (s_1^2 + s_2^2) / (s_1 + s_2)^2

Up to c these are U_1 + pi U_2 and W_1 + W_2 / pi with the pi that makes the traces of what is added
by that, pi U_2 x W_1 and U_1 x W_2 / pi, smallest together, as in arXiv 1503.05671, section 6.3. So
the factors of both uses are averaged over ranks and steps apart, and joined before they are
inverted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from offbeat.kfac.blocks import FactorSlot
from offbeat.kfac.capture import Increment
from offbeat.kfac.curvature import KFACSettings
from offbeat.kfac.factors import FactorShape, diagonal
from offbeat.kfac.inverses import InversionTask, is_asynchronous
from offbeat.kfac.plans import FactorPlan


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
        """Inverse of `state_dict`."""
        self.weighted_sum.copy_(state["sum"])
        self.mass.copy_(state["mass"])


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


class FactorAverages:
    """Averages factors over steps, and says what is to be inverted of them.

    Args:
        slots: all factors of the model.
        settings: the decay and the damping.
        plan: who keeps which factors.
        rank: this rank.

    Attributes:
        factors: the averages that this rank keeps, by slot.
    """

    def __init__(
        self,
        slots: Sequence[FactorSlot],
        *,
        settings: KFACSettings,
        plan: FactorPlan,
        rank: int,
    ) -> None:
        self._slots, self._settings, self._rank = slots, settings, rank
        self.factors: dict[int, RunningFactor] = {}
        self.adopt(plan)

    def adopt(self, plan: FactorPlan) -> None:
        """Keep what `plan` says. Averages that this rank has already stay as they are."""
        self.factors = {
            slot.index: self.factors.get(slot.index)
            or RunningFactor(slot.shape, dtype=slot.dtype, device=slot.device)
            for slot in self._slots
            if plan.is_kept_by(self._rank, slot.index)
        }

    def add(self, slot: int, mean: torch.Tensor, weight: float | torch.Tensor) -> None:
        """Take in what all ranks have seen of a factor, if this rank keeps it."""
        if slot in self.factors:
            decay = self._settings.curvature.decay
            self.factors[slot].update_(mean, weight=weight, decay=decay)

    def add_own(self, slot: int, increment: Increment, *, is_retired: bool) -> None:
        """Take in what this rank has seen itself of a factor that it keeps."""
        self.add(slot, *increment)
        if is_retired:
            # Without an average there is no inverse, which is what the owner's message then says.
            self.factors[slot].mass.zero_()

    def inversion_task(self, slot: int, damping: float) -> InversionTask:
        """What is to be inverted of a factor that this rank keeps, with `damping`, > 0."""
        own, shape = self.factors[slot], self._slots[slot].shape
        pair = slot & ~1, slot | 1
        if shape.uses > 1:
            averages = [self.factors[of].average() for of in pair]
            shapes = [self._slots[of].shape for of in pair]
            joined = joined_factors((averages[0], shapes[0]), (averages[1], shapes[1]))
            packed = joined[slot % 2]
            means = [
                mean_eigenvalue(each, of.joined) for each, of in zip(joined, shapes, strict=True)
            ]
        else:
            packed = own.average()
            # Without pi the partner may not have arrived yet, and does not matter.
            means = [self.factors[of].mean_eigenvalue() for of in pair]
        of_each = damping_of(*means, damping=damping, pi=self._settings.curvature.pi)
        return InversionTask(
            name=self._slots[slot].name,
            packed=packed,
            shape=shape.joined,
            damping=of_each[slot % 2],
            valid=own.mass > 0,
        )

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {
            f"{self._slots[slot].key}/{name}": tensor
            for slot, factor in self.factors.items()
            for name, tensor in factor.state_dict().items()
        }

    def lacking(self, saved: Mapping[str, Any]) -> list[str]:
        """Names of the factors that this rank keeps and `saved` has no average of."""
        return [
            self._slots[slot].name
            for slot in self.factors
            if f"{self._slots[slot].key}/sum" not in saved
        ]

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`. An average that is not in `saved` stays as it is."""
        for slot, factor in self.factors.items():
            key = self._slots[slot].key
            if f"{key}/sum" in saved:
                factor.load_state_dict({name: saved[f"{key}/{name}"] for name in ("sum", "mass")})


def joined_factors(
    inputs: tuple[torch.Tensor, FactorShape], outputs: tuple[torch.Tensor, FactorShape]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What stands for the sum of both uses' Fisher matrices.

    Args:
        inputs, outputs: averages of the factors of both uses, packed, with their shapes.

    Returns:
        The factors, packed as the shapes that are `joined` say.
    """
    num_uses = inputs[1].uses
    sides = [
        (packed.unflatten(0, (num_uses, shape.groups)), _traces(packed, shape))
        for packed, shape in (inputs, outputs)
    ]
    traces_of_products = sides[0][1] * sides[1][1]
    weights = traces_of_products.sqrt()
    # c, which is 0 / 0 where no use has been seen
    total = weights.sum()
    scale = torch.where(total > 0, traces_of_products.sum().sqrt() / total, 0.0)
    found = [
        torch.einsum("u,ugn->gn", scale * weights / torch.where(traces > 0, traces, 1.0), each)
        for each, traces in sides
    ]
    return found[0], found[1]


def _traces(packed: torch.Tensor, shape: FactorShape) -> torch.Tensor:
    """Of each use's factor, shape (uses,)."""
    diagonals = packed if shape.is_diagonal else diagonal(packed, shape.dim)
    return diagonals.view(shape.uses, -1).sum(dim=1)
