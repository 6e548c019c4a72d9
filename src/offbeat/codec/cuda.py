"""Picks the largest entries of residual + gradient on an accelerator. What is promised is the same
as in `codec.selectors`.

    guess a threshold from a sample, or take the last step's
    one pass: add, write back, collect the candidates        (a Triton kernel; without Triton some
                                                              passes of torch)
    finish among the candidates with torch, in vectors whose sizes do not depend on their number
    one copy to the host, for which alone it waits

A candidate's place depends on which block of the GPU comes first, so candidates are sorted by index
before anything else.

Tested on CPU tensors: the torch passes as they are, the kernel under Triton's interpreter; and on a
GPU, bit for bit, by `make test-gpu`. The bound is 12 bytes of memory traffic a float32 element.

Difference from the CPU: the kernel may fuse residual + weight * gradient into one rounding.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from typing import TypeAlias

import torch

from offbeat.codec.device_copies import fetch
from offbeat.codec.selectors import (
    GAIN,
    THRESHOLD,
    WITHIN,
    SamplePlan,
    Selection,
    sample_plan,
    with_least,
)
from offbeat.codec.sparse import Sparse

_Candidates: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Where entries reach a threshold: what `accumulate` returns."""

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
        return _largest(flat, k)
    places = slice(None, None, flat.numel() // plan.num_samples)
    sample = torch.add(residual[places], flat[places], alpha=weight).abs_()
    candidates = accumulate(flat, residual, weight, _threshold(sample, plan), plan.capacity)
    taken = _take(flat, candidates, least=k, most=plan.capacity, k=k)
    return _largest(flat, k) if taken is None else taken


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
        within: so many times k entries may reach it, at least and at most.
    """
    if not 0 < threshold < math.inf:
        return with_least(exact(flat, residual, k=k, weight=weight))
    least, most = math.ceil(within[0] * k), math.floor(within[1] * k)
    reaching = flat.new_full((), threshold)
    candidates = accumulate(flat, residual, weight, reaching, max(1, most))
    taken = _take(flat, candidates, least=least, most=most, k=most)
    if taken is None:
        return with_least(_largest(flat, k))
    ratio = len(taken.sparse) / k if taken.finite else 1.0
    return replace(taken, state={THRESHOLD: threshold * ratio**GAIN})


def accumulate(
    flat: torch.Tensor,
    residual: torch.Tensor,
    weight: float,
    threshold: torch.Tensor,
    capacity: int,
) -> _Candidates:
    """flat = residual + weight * flat, and where it is nonzero and reaches `threshold`, or is NaN.

    Args:
        flat: float32 or float64, shape (n,), on any device; overwritten.
        residual: same shape, dtype and device.
        weight: of `flat`.
        threshold: a magnitude, one element of the same dtype and device.
        capacity: how many indices the kernel makes room for, >= 1.

    Returns:
        The indices, ascending, int32 or int64; the number of all entries stands where there is
        none. How many there are, one element; where there was no room for all, the indices are any
        of them.
    """
    threshold = threshold.clamp(min=torch.finfo(flat.dtype).tiny)
    if _HAS_TRITON and flat.is_cuda and flat.dtype == torch.float32 and flat.numel() < 1 << 31:
        from offbeat.codec import triton_kernels

        return triton_kernels.accumulate(flat, residual, weight, threshold, capacity)
    torch.add(residual, flat, alpha=weight, out=flat)
    return _reaching((flat.abs() < threshold).logical_not_())


def _reaching(mask: torch.Tensor) -> _Candidates:
    indices = mask.nonzero().squeeze(1)
    return indices, indices.new_full((1,), indices.numel())


def _largest(flat: torch.Tensor, k: int) -> Selection:
    """Take the `k` largest of all entries that are not zero, or as many as there are."""
    plan, taken = sample_plan(flat.numel(), k), None
    if plan is not None:
        sample = flat[:: flat.numel() // plan.num_samples].abs()
        candidates = _reaching((flat.abs() < _threshold(sample, plan)).logical_not_())
        taken = _take(flat, candidates, least=k, most=flat.numel(), k=k)
    if taken is None:
        taken = _take(flat, _reaching(flat != 0), least=0, most=flat.numel(), k=k)
    assert taken is not None, "any number of entries is enough"
    return taken


def _threshold(sample: torch.Tensor, plan: SamplePlan) -> torch.Tensor:
    """What enough entries are likely to reach, and no zero does."""
    threshold = sample.topk(plan.rank, sorted=False).values.min()
    return threshold.clamp(min=torch.finfo(sample.dtype).tiny)


def _take(
    flat: torch.Tensor, candidates: _Candidates, *, least: int, most: int, k: int
) -> Selection | None:
    """Take the `k` largest candidates, the first ones among equals, out of `flat`. None, and `flat`
    as it was, unless there are `least` to `most` candidates.

    Whatever is not finite must be among them. The host waits for the device once.
    """
    num_elements, (indices, num_candidates) = flat.numel(), candidates
    is_there = indices < num_elements
    values = torch.where(is_there, flat[indices.clamp(max=num_elements - 1)], 0)
    is_finite = values.isfinite().all()
    if k < indices.numel():
        magnitudes = torch.where(is_there, values.abs(), -1)
        kept = magnitudes.sort(descending=True, stable=True).indices[:k].sort().values
        indices, values, is_there = indices[kept], values[kept], is_there[kept]
    is_accepted = is_finite & (num_candidates >= least) & (num_candidates <= most)
    # Zeros are written once or more often: to write them once, the host would have to know how many
    # there are. Where there is no candidate, nothing is changed.
    written = torch.where(is_there, indices, indices[:1]).clamp(max=num_elements - 1)
    flat[written] = torch.where(is_accepted & is_there[:1], 0, flat[written])
    count, finite, places, numbers = fetch(
        num_candidates.long(), is_finite.long().view(1), indices.long(), values
    )
    if not finite:
        return Selection(sparse=Sparse.empty(num_elements, numbers.dtype), finite=False)
    if not least <= count <= most:
        return None
    found = slice(min(int(count[0]), places.size))
    sparse = Sparse(indices=places[found], values=numbers[found], num_elements=num_elements)
    return Selection(sparse=sparse, finite=True)
