"""Clipping of what a rank contributes, before anything of it is selected; `clip_gradients_`
clips what the optimizer will see.

Clipping after the exchange, as `torch.nn.utils.clip_grad_norm_` does, shortens the step and leaves
what was too large in the residual, from where it comes back for hundreds of steps: after one bad
batch a small classifier ended at a loss of 0.73 in place of 0.17 (`docs/methods/topk.md`,
clipping). So each rank
clips its own gradient first, as in "local gradient clipping" of DGC (arXiv 1712.01887, section
3.2), with a threshold that follows from the one for the mean over P ranks, c = `clip_norm`.

What is added up are the ranks' shares of the mean, G_r = g_r / P (DGC's algorithms divide by their
N in the same place). If the shares have the same variance and differ at random,

    E |G_1 + ... + G_P|^2  =  P E |G_r|^2,

so a mean of norm c is made of shares of norm c / sqrt(P): DGC's factor N^(-1/2). As a limit of the
gradient itself, before the division by P, that is

    |g_r|  <=  P c / sqrt(P)  =  c sqrt(P).

What this means for the mean of the clipped gradients:

- they differ at random: its norm is c at most, and nothing is clipped before the mean reaches c;
- one rank has an outlier: that rank adds c / sqrt(P) at most;
- all ranks agree: its norm is c sqrt(P) at most, so they are clipped later than a clipped mean
  would be. A limit of c for each gradient would be right then, and would shorten gradients that
  differ at random by sqrt(P) all the time.

Where a step is the sum of N exchanges, each rank has N shares in the mean, and the limit is
c sqrt(P / N): with one of c sqrt(P) for each of them a loop that accumulates gradients would hardly
be clipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.nn.utils import clip_grads_with_norm_

from offbeat.errors import ConfigError


class LocalClipping:
    """Clips the whole gradient of this rank, over all buckets.

    Args:
        clip_norm: the threshold for the mean over ranks, > 0; None: nothing is clipped.
        world_size: number of ranks.

    Attributes:
        norm: of this rank's last gradient, unscaled, before it was clipped; 0 before the first one
            and where nothing is clipped.
        clip_norm: the threshold at the moment.
        is_given: whether the strategy was given the threshold, and does not follow a loop's.
        num_shares: how many gradients of a rank make up a step, as they did in the last one.
    """

    def __init__(self, clip_norm: float | None, *, world_size: int) -> None:
        self.norm = 0.0
        self.is_given = clip_norm is not None
        self.clip_norm = clip_norm
        self.num_shares = 1
        self._world_size = world_size

    def clip_(
        self,
        flats: Sequence[torch.Tensor],
        *,
        grad_scale: float,
        combine: Callable[[float], float] = lambda norm: norm,
    ) -> None:
        """Clip the gradient that `flats` hold, times `grad_scale`, in place. One that is not finite
        stays as it is, so that its step is skipped. `combine` makes the gradient's norm of that of
        the part which is here.
        """
        if self.clip_norm is None:
            return
        self.norm = combine(_norm(flats)) / grad_scale
        limit = self.clip_norm * math.sqrt(self._world_size / self.num_shares)
        if math.isfinite(self.norm) and self.norm > limit:
            for flat in flats:
                flat.mul_(limit / self.norm)

    def follow(self, max_norm: float) -> None:
        """From the next gradient on the threshold is `max_norm`, to which the loop clips."""
        if not self.is_given:
            self.clip_norm = max_norm

    def check(self, max_norm: float) -> None:
        """Raise `ConfigError` unless gradients were clipped: with `max_norm` where the strategy was
        given one, else with what the loop clipped to before, and with `max_norm` from now on.
        """
        if self.clip_norm is None:
            raise ConfigError(
                "this strategy has selected entries within backward(), so clipping now would leave"
                " what is too large in the residual, from where it comes back step by step; pass"
                f" clip_norm={max_norm:g} to what selects, and it clips before that: such as"
                f" offbeat.GTopK(clip_norm={max_norm:g}), alone or as exchange of K-FAC"
            )
        self.follow(max_norm)
        if max_norm != self.clip_norm:
            raise ConfigError(
                f"the strategy has clipped with clip_norm={self.clip_norm:g} already, and"
                f" clip_grad_norm_() got max_norm={max_norm:g}; pass the same number to both"
            )


def _norm(flats: Sequence[torch.Tensor]) -> float:
    """The norm of all together. One that overflows needs a second, slower look."""
    for dtype in (torch.float32, torch.float64):
        if math.isfinite(norm := math.hypot(*norms_of(flats, dtype))):
            break
    return norm


def norms_of(flats: Iterable[torch.Tensor], least: torch.dtype = torch.float32) -> list[float]:
    """The norm of each, added up in a type that is at least so wide."""
    return [
        float(torch.linalg.vector_norm(flat, dtype=torch.promote_types(flat.dtype, least)))
        for flat in flats
    ]


def clip_gradients_(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    *,
    agree_on: Callable[[float], float] | None = None,
) -> float:
    """Clip the gradients of `parameters`, which may be sparse, to the norm `max_norm` together.

    Args:
        parameters: those without a gradient are passed over.
        max_norm: > 0.
        agree_on: makes one norm of all ranks' norms, where gradients must stay the same on all of
            them; None: this rank's own norm is used.

    Returns:
        The norm before clipping.
    """
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in with_gradient if parameter.grad is not None]
    has_sparse = any(gradient.is_sparse for gradient in gradients)
    norm = torch.nn.utils.get_total_norm(
        [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    )
    if agree_on is not None:
        norm = norm.new_tensor(agree_on(float(norm)))
    clip_grads_with_norm_(with_gradient, max_norm, norm, foreach=False if has_sparse else None)
    return float(norm)
