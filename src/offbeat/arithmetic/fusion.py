"""How parameters are fused into buckets, and which rank owns which index."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

OWNER_BLOCK = 64
"""Consecutive indices that belong to the same owner."""


def fuse(
    sizes_bytes: Sequence[int],
    kinds: Sequence[Hashable],
    *,
    cap_bytes: int | None,
    first_cap_bytes: int | None = None,
) -> list[list[int]]:
    """Group parameters, last one first, into buckets of at most `cap_bytes`.

    Backward yields gradients roughly in the reverse order of the parameters, so the first bucket is
    complete first. It may be kept smaller than the others, to have something on the wire early.

    Args:
        sizes_bytes: size of each parameter, in the order of the model.
        kinds: what must not be mixed in one bucket, such as (dtype, device); one for each
            parameter.
        cap_bytes: a bucket is closed before it would exceed this; one larger parameter makes a
            bucket alone. None: no limit.
        first_cap_bytes: the same for the first bucket of each kind; default `cap_bytes`.

    Returns:
        Buckets in the order in which they should be sent, each with indices of parameters in the
        order of their gradients.

    >>> fuse([4, 4, 4], ["f32"] * 3, cap_bytes=8)
    [[2, 1], [0]]
    """
    limit = float("inf") if cap_bytes is None else cap_bytes
    first_limit = limit if first_cap_bytes is None else first_cap_bytes
    closed: list[list[int]] = []
    open_buckets: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    num_closed: dict[Hashable, int] = {}
    for index in reversed(range(len(sizes_bytes))):
        kind = kinds[index]
        bucket = open_buckets.setdefault(kind, [])
        cap = limit if num_closed.get(kind) else first_limit
        if bucket and filled[kind] + sizes_bytes[index] > cap:
            closed.append(bucket)
            num_closed[kind] = num_closed.get(kind, 0) + 1
            bucket = open_buckets[kind] = []
            filled[kind] = 0
        bucket.append(index)
        filled[kind] = filled.get(kind, 0) + sizes_bytes[index]
    return closed + [bucket for bucket in open_buckets.values() if bucket]


def owner_of(indices: NDArray[np.int64], world_size: int) -> NDArray[np.int64]:
    """Which rank sums the entries at `indices`: blocks of `OWNER_BLOCK` indices are dealt out in
    turn.

    Gradients are large in some layers and small in others; dealing out small blocks gives every
    rank its share of each layer, where equal ranges would give one rank nearly everything.
    """
    return (indices // OWNER_BLOCK) % world_size
