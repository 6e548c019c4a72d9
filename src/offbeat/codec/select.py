"""Picks the largest entries of residual + gradient on the CPU, in one pass over both.

    guess a threshold                                   (from a sample, or the last step's)
    one pass: add, write back, test for finiteness, collect the candidates that reach the threshold
    finish among the candidates, or, if there are too few or too many, find the k-th magnitude digit
    by digit

The guess steers only which way is taken. Exact selection does not depend on it: k largest
magnitudes, among equal ones those at lower indices; zeros are never selected, so there may be fewer
than k.

Reuse selects all that reaches the last step's threshold, if they are 0.8 k to 1.2 k, and otherwise
exactly. Its threshold follows the count, in the spirit of Ok-Topk (Li and Hoefler, PPoPP 2022), in
proportion instead of by a fixed factor.

Cost: 12 bytes of memory traffic a float32 element, as an in-place addition. In the rare fallback,
another pass (float32: four, in the worst case) that only reads. Temporary memory: 12 bytes a
candidate, of which there are about 1.5 k at density 0.001.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.codec import kernels
from offbeat.codec.jit import bits_of, magnitude_mask
from offbeat.codec.sparse import Sparse, keep_largest

SMALL = 4096
"""With so few elements every nonzero is a candidate."""

REUSE_SLACK = 0.2
THRESHOLD = "threshold"
"""The name of the last step's threshold in the state of reuse: a magnitude; 0 when there was none.
"""

GAIN = 0.1
"""Exponent that turns the ratio of counts into that of thresholds; around density 0.001 of a
bell-shaped distribution the count falls with the 7th to 12th power of the threshold.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """What was picked.

    Attributes:
        sparse: the pairs; empty unless `finite`.
        finite: whether residual + gradient held neither infinities nor NaNs.
        state: what the selector wants to be given in the next step.
    """

    sparse: Sparse
    finite: bool
    state: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Guess:
    """A threshold, and how many candidates to make room for."""

    threshold: np.floating
    capacity: int


def exact(flat: torch.Tensor, residual: torch.Tensor, *, k: int, weight: float) -> Selection:
    """Pick exactly the `k` largest of residual + weight * flat.

    Args:
        flat: CPU, float32 or float64, shape (n,). Afterwards residual + weight * flat, with zeros
            where entries were picked.
        residual: same shape and dtype, of another memory.
        k: in [1, n].
        weight: of `flat`.
    """
    picked = _k_largest(flat, residual, k=k, weight=weight)
    return _not_finite(flat.numpy()) if picked is None else Selection(sparse=picked, finite=True)


def reuse(
    flat: torch.Tensor, residual: torch.Tensor, *, k: int, weight: float, threshold: float
) -> Selection:
    """Pick what reaches `threshold`, if that is within 20% of `k` entries, else the `k` largest.

    Args:
        flat: as of `exact`.
        residual: as of `exact`.
        k: as of `exact`.
        weight: as of `exact`.
        threshold: as the last selection returned it; 0 when there was none.
    """
    values = flat.numpy()
    last = values.dtype.type(threshold)
    if not 0 < last < np.inf:
        picked = _k_largest(flat, residual, k=k, weight=weight)
        return _not_finite(values) if picked is None else _with_threshold(picked)
    guess = Guess(last, min(values.size, 4 * k))
    indices, found = _room(guess.capacity, values.dtype)
    count, finite = kernels.accumulate(
        values, residual.numpy(), values.dtype.type(weight), last, indices, found
    )
    if not finite:
        return _not_finite(values)
    if (1 - REUSE_SLACK) * k <= count <= (1 + REUSE_SLACK) * k:
        near_k = Sparse(
            indices=indices[:count].copy(), values=found[:count].copy(), num_elements=values.size
        )
        return _with_threshold(
            _taken_out(values, near_k), threshold=float(last) * (count / k) ** GAIN
        )
    if k <= count <= guess.capacity:
        largest = _largest(indices[:count], found[:count], values.size, k)
    else:
        largest = _k_largest_of_sum(values, k)
    return _with_threshold(_taken_out(values, largest))


def _k_largest(
    flat: torch.Tensor, residual: torch.Tensor, *, k: int, weight: float
) -> Sparse | None:
    """The `k` largest, taken out of `flat`; None where something is not finite. Arguments as of
    `exact`.
    """
    values, owed = flat.numpy(), residual.numpy()
    scale = values.dtype.type(weight)
    guess = _guess(values, owed, scale, k)
    indices, found = _room(guess.capacity, values.dtype)
    count, finite = kernels.accumulate(values, owed, scale, guess.threshold, indices, found)
    if not finite:
        return None
    if _suffices(guess, count, k):
        return _taken_out(values, _largest(indices[:count], found[:count], values.size, k))
    return _taken_out(values, by_digits(values, k))


def _k_largest_of_sum(values: NDArray[np.floating], k: int) -> Sparse:
    """The `k` largest of what has been added up already."""
    guess = _guess(values, values, values.dtype.type(0), k)
    indices, found = _room(guess.capacity, values.dtype)
    count = kernels.collect(values, guess.threshold, indices, found)
    return (
        _largest(indices[:count], found[:count], values.size, k)
        if _suffices(guess, count, k)
        else by_digits(values, k)
    )


def _taken_out(values: NDArray[np.floating], picked: Sparse) -> Sparse:
    """`picked`, after what it holds was set to zero in `values`."""
    values[picked.indices] = 0
    return picked


def _with_threshold(picked: Sparse, threshold: float | None = None) -> Selection:
    """What reuse returns. Unless it adapted the threshold, the next one is the least magnitude
    picked.
    """
    if threshold is None:
        threshold = float(np.abs(picked.values).min()) if len(picked) else 0.0
    return Selection(sparse=picked, finite=True, state={THRESHOLD: threshold})


def _not_finite(values: NDArray[np.floating]) -> Selection:
    return Selection(sparse=Sparse.empty(values.size, values.dtype), finite=False)


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """How to guess a threshold for `k` of n elements.

    Attributes:
        num_samples: size of the sample.
        rank: the threshold is the sample's element of this rank, counted from 1 at the largest.
        capacity: so many elements reach it at most, most likely; and at least `k`.
    """

    num_samples: int
    rank: int
    capacity: int


def sample_plan(num_elements: int, k: int) -> SamplePlan | None:
    """Room for four standard deviations of the sample to either side; None when sampling saves
    nothing.
    """
    if num_elements <= SMALL or 2 * k >= num_elements:
        return None
    num_samples = min(max(128 * num_elements // k, SMALL), 1 << 17, num_elements // 8)
    expected = k * num_samples / num_elements
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 2)
    capacity = math.ceil(k * (1 + 10 / math.sqrt(expected))) + 1024
    return (
        SamplePlan(num_samples, rank, min(num_elements, capacity)) if rank < num_samples else None
    )


def _guess(
    values: NDArray[np.floating], owed: NDArray[np.floating], weight: np.floating, k: int
) -> Guess:
    least = np.finfo(values.dtype).smallest_subnormal
    plan = sample_plan(values.size, k)
    if plan is None:
        return Guess(least, values.size)
    sample = np.empty(plan.num_samples, dtype=values.dtype)
    kernels.sample(values, owed, weight, sample)
    threshold = np.partition(sample, sample.size - plan.rank)[sample.size - plan.rank]
    return Guess(max(threshold, least), plan.capacity)


def _suffices(guess: Guess, count: int, k: int) -> bool:
    """Whether the largest entries are all among the candidates: enough of them, or all that there
    are.
    """
    everything = guess.threshold == np.finfo(guess.threshold.dtype).smallest_subnormal
    return count <= guess.capacity and (count >= k or bool(everything))


def _room(
    capacity: int, dtype: np.dtype[np.floating]
) -> tuple[NDArray[np.int64], NDArray[np.floating]]:
    size = capacity + kernels.BLOCK
    return np.empty(size, dtype=np.int64), np.empty(size, dtype=dtype)


def _largest(
    indices: NDArray[np.int64], values: NDArray[np.floating], num_elements: int, k: int
) -> Sparse:
    return keep_largest(Sparse(indices=indices, values=values, num_elements=num_elements), k)[0]


def by_digits(values: NDArray[np.floating], k: int) -> Sparse:
    """The `k` largest, whatever the distribution: the k-th magnitude is found 16 bits at a time."""
    bits, mask = bits_of(values), magnitude_mask(values.dtype)
    counts = np.empty(1 << kernels.DIGIT_BITS, dtype=np.int64)
    kth, left = 0, k
    for shift in reversed(range(0, 8 * values.itemsize, kernels.DIGIT_BITS)):
        above = (-1 << (shift + kernels.DIGIT_BITS)) % (1 << 64)
        kernels.digit_counts(bits, mask, np.uint64(kth), np.uint64(above), np.uint64(shift), counts)
        at_least = np.cumsum(counts[::-1])
        place = int(np.searchsorted(at_least, left))
        left -= int(at_least[place] - counts[-1 - place])
        kth |= counts.size - 1 - place << shift
    marks = np.empty(values.size, dtype=np.bool_)
    kernels.take_largest(
        bits, mask, mask.dtype.type(max(kth, 1)), k, marks
    )  # at least 1: zeros are not selected
    indices = np.flatnonzero(marks)
    return Sparse(indices=indices, values=values[indices], num_elements=values.size)
