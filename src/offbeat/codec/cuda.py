"""Picks the largest entries of residual + gradient on an accelerator. What is promised is the same
as in `codec.selectors`.

    guess a threshold from a sample, or take the last step's
    one pass: add, write back, collect the candidates        (a Triton kernel; without Triton some
                                                              passes of torch)
    finish among the candidates with torch

A candidate's place depends on which block of the GPU comes first, so candidates are sorted by index
before anything else.

Tested on CPU tensors: the torch passes as they are, the kernel under Triton's interpreter. No
figures from a GPU exist yet; the bound is 12 bytes of memory traffic a float32 element.

Difference from the CPU: the kernel may fuse residual + weight * gradient into one rounding.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace

import numpy as np
import torch

from offbeat.codec.selectors import GAIN, THRESHOLD, WITHIN, Selection, sample_plan
from offbeat.codec.sparse import Sparse

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def exact(flat: torch.Tensor, residual: torch.Tensor, *, k: int, weight: float) -> Selection:
    """Pick exactly the `k` largest of residual + weight * flat.

    Args:
        flat: as of `selectors.exact`, on any device.
        residual: likewise.
        k: likewise.
        weight: likewise.
    """
    plan = sample_plan(flat.numel(), k)
    if plan is None:
        torch.add(residual, flat, alpha=weight, out=flat)
        return _finish(flat, flat.nonzero().squeeze(1), k)
    places = slice(None, None, flat.numel() // plan.num_samples)
    sample = torch.add(residual[places], flat[places], alpha=weight).abs_()
    threshold = sample.topk(plan.rank, sorted=False).values.min()
    candidates = accumulate(flat, residual, weight, threshold, plan.capacity)
    return _finish(flat, candidates if candidates.numel() >= k else flat.nonzero().squeeze(1), k)


def reuse(
    flat: torch.Tensor,
    residual: torch.Tensor,
    *,
    k: int,
    weight: float,
    threshold: float,
    within: tuple[float, float] = WITHIN,
) -> Selection:
    """Pick what reaches `threshold`, if that is about `k` entries, else the `k` largest.

    Args:
        flat: as of `selectors.exact`, on any device.
        residual: likewise.
        k: likewise.
        weight: likewise.
        threshold: as of `selectors.reuse`.
        within: as of `selectors.reaching`.
    """
    if not 0 < threshold < math.inf:
        return _with_threshold(exact(flat, residual, k=k, weight=weight))
    candidates = accumulate(flat, residual, weight, flat.new_full((), threshold), 4 * k)
    count = candidates.numel()
    if within[0] * k <= count <= within[1] * k:
        state = {THRESHOLD: threshold * (count / k) ** GAIN}
        return replace(_finish(flat, candidates, count), state=state)
    return _with_threshold(
        _finish(flat, candidates if count >= k else flat.nonzero().squeeze(1), k)
    )


def accumulate(
    flat: torch.Tensor,
    residual: torch.Tensor,
    weight: float,
    threshold: torch.Tensor,
    capacity: int,
) -> torch.Tensor:
    """flat = residual + weight * flat, and the ascending indices of what is nonzero and reaches
    `threshold`, or is NaN.

    Args:
        flat: float32 or float64, shape (n,), on any device; overwritten.
        residual: same shape, dtype and device.
        weight: of `flat`.
        threshold: a magnitude, one element of the same dtype and device.
        capacity: how many indices the kernel makes room for, >= 1. When there are more, torch
            collects them again.
    """
    threshold = threshold.clamp(min=torch.finfo(flat.dtype).tiny)
    if _HAS_TRITON and flat.is_cuda and flat.dtype == torch.float32 and flat.numel() < 1 << 31:
        from offbeat.codec import triton_kernels

        count, indices = triton_kernels.accumulate(flat, residual, weight, threshold, capacity)
        if count <= capacity:
            return indices
    else:
        torch.add(residual, flat, alpha=weight, out=flat)
    return (flat.abs() < threshold).logical_not_().nonzero().squeeze(1)


def _finish(flat: torch.Tensor, indices: torch.Tensor, k: int) -> Selection:
    """Take the `k` largest of the entries at the ascending `indices`, the first ones among equals,
    out of `flat`.

    Whatever is not finite must be among the entries.
    """
    values = flat[indices]
    if not bool(values.isfinite().all()):
        return Selection(sparse=_to_host(indices[:0], values[:0], flat.numel()), finite=False)
    if k < indices.numel():
        magnitudes = values.abs()
        kth = magnitudes.topk(k, sorted=False).values.min()
        above, equal = magnitudes > kth, magnitudes == kth
        taken = above | equal & (equal.cumsum(0) <= k - above.sum())
        indices, values = indices[taken], values[taken]
    flat[indices] = 0
    return Selection(sparse=_to_host(indices, values, flat.numel()), finite=True)


def _with_threshold(selection: Selection) -> Selection:
    """The selection, with the least magnitude picked as the next step's threshold."""
    magnitudes = np.abs(selection.sparse.values)
    threshold = float(magnitudes.min()) if magnitudes.size else 0.0
    return replace(selection, state={THRESHOLD: threshold})


def _to_host(indices: torch.Tensor, values: torch.Tensor, num_elements: int) -> Sparse:
    return Sparse(
        indices=indices.cpu().numpy(), values=values.cpu().numpy(), num_elements=num_elements
    )
