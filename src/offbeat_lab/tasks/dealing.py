"""Which worker trains on which samples, where labels are dealt unequally."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_BALANCING_ROUNDS = 200
"""Of Sinkhorn's iteration, which converges by a factor in each round."""


def skewed_samples(
    labels: NDArray[np.int64], skew: float, *, shape: tuple[int, int, int], seed: int, epoch: int
) -> NDArray[np.int64]:
    """Samples of one epoch. Each rank has as many as its peers and keeps its own from epoch to
    epoch, in another order.

    Args:
        labels: of all training samples, >= 0, shape (N,).
        skew: concentration of the Dirichlet distribution, > 0: 0.1 leaves a rank few classes, 100
            deals nearly equally.
        shape: (steps, world_size, batch_size) of what is returned; N is at least its product.
        seed: of the run, >= 0.
        epoch: passes over the data completed before this one.

    Returns:
        Sample numbers, none of them twice.
    """
    steps, world_size, batch_size = shape
    shares = label_shares(labels, skew, world_size=world_size, seed=seed)
    draw = np.random.default_rng((seed, epoch))
    dealt = [draw.permutation(share)[: steps * batch_size] for share in shares]
    return np.stack([share.reshape(steps, batch_size) for share in dealt], axis=1)


def label_shares(
    labels: NDArray[np.int64], skew: float, *, world_size: int, seed: int
) -> list[NDArray[np.int64]]:
    """Each rank's samples: equally many, with proportions of labels drawn for each rank from a
    Dirichlet distribution and then balanced, so that together they use up the data.

    Args:
        labels: of all training samples, >= 0, shape (N,).
        skew: concentration of the Dirichlet distribution, > 0.
        world_size: number of ranks.
        seed: of the run, >= 0.

    Returns:
        Sample numbers of each rank, N // world_size of them; no sample is dealt twice.
    """
    draw = np.random.default_rng((seed, world_size))
    sizes = np.bincount(labels)
    quota = len(labels) // world_size
    proportions = draw.dirichlet(np.full(sizes.size, skew), size=world_size)
    wanted = _balanced(np.maximum(proportions, 1e-9), quota, sizes)
    counts = np.floor(wanted).astype(np.int64)
    pools = [draw.permutation(np.flatnonzero(labels == label)) for label in range(sizes.size)]
    starts = np.cumsum(counts, axis=0) - counts
    shares = [
        [
            pool[start : start + count]
            for pool, start, count in zip(pools, starts[rank], counts[rank], strict=True)
        ]
        for rank in range(world_size)
    ]
    # Rounding down has left some samples of each label, which fill the ranks up.
    totals = counts.sum(axis=0)
    unused = [pool[total:] for pool, total in zip(pools, totals, strict=True)]
    left = draw.permutation(np.concatenate(unused))
    dealt = []
    for share in shares:
        own = np.concatenate(share)[:quota]
        missing = quota - own.size
        dealt.append(np.concatenate([own, left[:missing]]))
        left = left[missing:]
    return dealt


def _balanced(
    proportions: NDArray[np.float64], quota: int, sizes: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Sinkhorn's iteration: scale rows and columns until each rank has its quota and no label more
    samples than there are.
    """
    counts = proportions * quota
    for _ in range(_BALANCING_ROUNDS):
        counts *= sizes / np.maximum(counts.sum(axis=0), 1e-300)
        counts *= quota / counts.sum(axis=1, keepdims=True)
    # The last round has left columns nearly, not quite, within their bounds.
    within: NDArray[np.float64] = counts * np.minimum(
        1.0, sizes / np.maximum(counts.sum(axis=0), 1e-300)
    )
    return within
