"""The one-pass kernel for GPUs. Imported only where Triton is installed and tensors are
on a GPU.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

BLOCK = 2048


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _accumulate(  # type: ignore[no-untyped-def]
    flat, residual, weight, threshold, indices, count, n, capacity, BLOCK: tl.constexpr
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    x = tl.load(residual + offsets, mask=inside, other=0.0) + weight * tl.load(
        flat + offsets, mask=inside, other=0.0
    )
    tl.store(flat + offsets, x, mask=inside)
    below = tl.abs(x) < tl.load(threshold)
    hit = (inside & (below == 0)).to(tl.int32)  # so that NaN is a hit
    hits = tl.sum(hit, 0)
    if hits > 0:
        place = tl.atomic_add(count, hits) + tl.cumsum(hit, 0) - 1
        tl.store(indices + place, offsets, mask=(hit > 0) & (place < capacity))


def accumulate(
    flat: torch.Tensor,
    residual: torch.Tensor,
    weight: float,
    threshold: torch.Tensor,
    capacity: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """flat = residual + weight * flat, and the indices of what reaches `threshold` or is NaN. The
    host does not wait.

    Args:
        flat: float32, shape (n,), n < 2**31, overwritten.
        residual: same shape and dtype.
        weight: of `flat`.
        threshold: float32, one element.
        capacity: how many indices to make room for.

    Returns:
        The int32 indices, ascending, shape (capacity,): n where there is none, and any of them
        where there was no room for all. How many there are, int32, shape (1,).
    """
    n = flat.numel()
    indices = torch.full((capacity,), n, dtype=torch.int32, device=flat.device)
    count = torch.zeros(1, dtype=torch.int32, device=flat.device)
    grid = (triton.cdiv(n, BLOCK),)
    _accumulate[grid](flat, residual, weight, threshold, indices, count, n, capacity, BLOCK=BLOCK)
    return indices.sort().values, count
