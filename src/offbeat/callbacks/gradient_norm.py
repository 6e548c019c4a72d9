"""Clipping of the gradients that the optimizer will see."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


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
    torch.nn.utils.clip_grads_with_norm_(
        with_gradient, max_norm, norm, foreach=False if has_sparse else None
    )
    return float(norm)
