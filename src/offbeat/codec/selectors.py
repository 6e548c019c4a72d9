"""What picks the entries that travel: a `Selector`, chosen by value in a strategy's options.

`codec.topk_codec` has the names of all. Those that stand here look for the largest entries of
residual + gradient. On the CPU they do so in one pass over both (`codec.cuda` does it for tensors
on an accelerator):

    guess a threshold                                   (from a sample, or the last step's)
    one pass: add, write back, test for finiteness, collect the candidates that reach the threshold
    finish among the candidates, or, if there are too few or too many, among all elements

The guess steers only which way is taken. Exact selection does not depend on it: k largest
magnitudes, among equal ones those at lower indices; zeros are never selected, so there may be fewer
than k.

Reuse selects all that reaches the last step's threshold, if they are 0.8 k to 1.2 k, and otherwise
exactly. Its threshold follows the count, in the spirit of Ok-Topk (Li and Hoefler, PPoPP 2022), in
proportion instead of by a fixed factor.

Cost: 12 bytes of memory traffic a float32 element, as an in-place addition. In the rare fallback,
a partition of a copy of all magnitudes. Temporary memory: 12 bytes a candidate, of which there are
about 1.5 k at density 0.001.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from offbeat.codec.jit import kernel
from offbeat.codec.option_value import OptionValue
from offbeat.codec.sparse import Sparse, bits_of, keep_largest, magnitude_mask

SMALL = 4096
"""With so few elements every nonzero is a candidate."""

WITHIN = (0.8, 1.2)
"""Times k: so many entries may reach the last step's threshold for it to be used again."""

THRESHOLD = "threshold"
"""The name of the last step's threshold in the state of reuse: a magnitude; 0 when there was none.
"""

_AGE: Final = "age"
_KEPT_WITHIN: Final = (0.25, 4.0)

GAIN = 0.1
"""Exponent that turns the ratio of counts into that of thresholds; around density 0.001 of a
bell-shaped distribution the count falls with the 7th to 12th power of the threshold.
"""

BLOCK = 32
"""Elements that are tested for candidates together; candidates are rare, so most blocks are passed
over vectorised.
"""


Memory: TypeAlias = Mapping[str, float]
"""What a selector remembers of a bucket from step to step, by name."""


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
    state: Memory = field(default_factory=dict)


class Selector(OptionValue):
    """Picks about `k` entries of residual + weight * gradient.

    One object serves all buckets, so what it remembers from step to step is not kept in it but
    handed in and out as its state, a few numbers by name. `SparseReduction` keeps the state of a
    bucket, forgets it together with a step that is discarded, and checkpoints it.
    """

    def initial_state(self) -> Memory:
        """The state before the first step. Its keys are all keys there are."""
        return {}

    @abstractmethod
    def select(
        self, flat: torch.Tensor, residual: torch.Tensor, *, k: int, weight: float, state: Memory
    ) -> Selection:
        """Pick entries, and leave the others.

        Args:
            flat: the gradient: float32 or float64, shape (n,), on any device. Afterwards it holds
                residual + weight * flat, with zeros where entries were picked.
            residual: same shape, dtype and device, of another memory. It is not changed.
            k: how many entries are wanted, in [0, n]; 0 only where n is 0.
            weight: of `flat`.
            state: as `initial_state` or the last step's selection gave it.

        Returns:
            The picked entries, with indices ascending and no zeros among the values; no entries and
            `finite=False` where residual + weight * flat holds an infinity or a NaN.
        """


class Exact(Selector):
    """Exactly the `k` largest magnitudes, among equal ones those at lower indices."""

    @override
    def select(
        self, flat: torch.Tensor, residual: torch.Tensor, *, k: int, weight: float, state: Memory
    ) -> Selection:
        return exact(flat, residual, k=k, weight=weight)


class ThresholdReuse(Selector):
    """What reaches the last step's threshold, if that is 0.8 k to 1.2 k entries; else the `k`
    largest. It takes fewer passes than `Exact`.
    """

    @override
    def initial_state(self) -> Memory:
        return {THRESHOLD: 0.0}

    @override
    def select(
        self, flat: torch.Tensor, residual: torch.Tensor, *, k: int, weight: float, state: Memory
    ) -> Selection:
        return reuse(flat, residual, k=k, weight=weight, threshold=state[THRESHOLD])


class KeptThreshold(Selector):
    """What reaches a threshold that is sought anew every 1,000 steps, if that is k / 4 to 4 k
    entries; else the `k` largest.
    """

    # "Threshold kept for a period" of DCT (arXiv 2010.08899, section 3). What is not sent is owed
    # and adds up until it reaches the threshold, so that the number of entries settles by itself;
    # it follows the size of gradients, where other selectors follow their order alone. Differences
    # from the paper: where too few or too many entries reach it, the k largest are taken, and a
    # period begins; a period is one of a bucket's own, which is checkpointed.

    def __init__(self, period: int = 1000) -> None:
        self.period = period

    @override
    def initial_state(self) -> Memory:
        return {THRESHOLD: 0.0, _AGE: 0.0}

    @override
    def select(
        self, flat: torch.Tensor, residual: torch.Tensor, *, k: int, weight: float, state: Memory
    ) -> Selection:
        kept = state[THRESHOLD] if state[_AGE] < self.period else 0.0
        found = reuse(flat, residual, k=k, weight=weight, threshold=kept, within=_KEPT_WITHIN)
        if not found.finite:
            return found
        # Reaching adapts a threshold that has fitted, but not where exactly k entries reach it; one
        # that is sought is the least of k.
        sought = kept == 0 or (len(found.sparse) == k and found.state[THRESHOLD] != kept)
        threshold, age = (found.state[THRESHOLD], 0.0) if sought else (kept, state[_AGE])
        return replace(found, state={THRESHOLD: threshold, _AGE: age + 1})


def exact(flat: torch.Tensor, residual: torch.Tensor, *, k: int, weight: float) -> Selection:
    """Pick exactly the `k` largest of residual + weight * flat.

    Args:
        flat: the gradient, which `Selector.select` describes; it is overwritten.
        residual: what is owed, of the same shape.
        k: how many entries are wanted.
        weight: of `flat`.
    """
    if flat.device.type != "cpu":
        from offbeat.codec import cuda  # late, since it stands on this file

        return cuda.exact(flat, residual, k=k, weight=weight)
    return _k_largest(flat.numpy(), residual.numpy(), weight, k)


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
        flat: the gradient, which `Selector.select` describes; it is overwritten.
        residual: what is owed, of the same shape.
        k: how many entries are wanted.
        weight: of `flat`.
        threshold: a magnitude, as the last selection returned it; 0 when there was none.
        within: so many times k entries may reach it, at least and at most; the latter at most 4.
    """
    if flat.device.type != "cpu":
        from offbeat.codec import cuda

        return cuda.reuse(flat, residual, k=k, weight=weight, threshold=threshold, within=within)
    values = flat.numpy()
    last = values.dtype.type(threshold)
    if not 0 < last < np.inf:
        return with_least(_k_largest(values, residual.numpy(), weight, k))
    capacity = min(values.size, 4 * k)
    indices, found = _room(capacity, values.dtype)
    count, finite = accumulate_and_collect(
        values, residual.numpy(), values.dtype.type(weight), last, indices, found
    )
    if not finite:
        return _not_finite(values)
    if within[0] * k <= count <= within[1] * k:
        near_k = Sparse(
            indices=indices[:count].copy(), values=found[:count].copy(), num_elements=values.size
        )
        threshold = float(last) * (count / k) ** GAIN
        return replace(_taken_out(values, near_k), state={THRESHOLD: threshold})
    if k <= count <= capacity:
        largest = _largest(indices[:count], found[:count], values.size, k)
        return with_least(_taken_out(values, largest))
    return with_least(_k_largest(values, values, 0.0, k))  # of the sum, which is there already


def _k_largest(
    values: NDArray[np.floating], owed: NDArray[np.floating], weight: float, k: int
) -> Selection:
    """The `k` largest of owed + weight * values, taken out of `values`."""
    scale, least = values.dtype.type(weight), np.finfo(values.dtype).smallest_subnormal
    threshold, capacity = _guess(values, owed, scale, k)
    threshold = max(threshold, least)
    indices, found = _room(capacity, values.dtype)
    count, finite = accumulate_and_collect(values, owed, scale, threshold, indices, found)
    if not finite:
        return _not_finite(values)
    # The largest are all among the candidates: there are enough of these, or no other nonzeros.
    if count <= capacity and (count >= k or threshold == least):
        return _taken_out(values, _largest(indices[:count], found[:count], values.size, k))
    return _taken_out(values, largest_of_all(values, k))


def _taken_out(values: NDArray[np.floating], picked: Sparse) -> Selection:
    """`picked`, after what it holds was set to zero in `values`."""
    values[picked.indices] = 0
    return Selection(sparse=picked, finite=True)


def with_least(selection: Selection) -> Selection:
    """The selection, with the least magnitude picked as the next step's threshold."""
    magnitudes = np.abs(selection.sparse.values)
    threshold = float(magnitudes.min()) if magnitudes.size else 0.0
    return replace(selection, state={THRESHOLD: threshold})


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
) -> tuple[np.floating, int]:
    """A threshold, 0 where every nonzero is a candidate; and how many candidates to expect."""
    plan = sample_plan(values.size, k)
    if plan is None:
        return values.dtype.type(0), values.size
    sample = np.empty(plan.num_samples, dtype=values.dtype)
    sample_magnitudes(values, owed, weight, sample)
    return np.partition(sample, sample.size - plan.rank)[sample.size - plan.rank], plan.capacity


def _room(
    capacity: int, dtype: np.dtype[np.floating]
) -> tuple[NDArray[np.int64], NDArray[np.floating]]:
    size = capacity + BLOCK
    return np.empty(size, dtype=np.int64), np.empty(size, dtype=dtype)


def _largest(
    indices: NDArray[np.int64], values: NDArray[np.floating], num_elements: int, k: int
) -> Sparse:
    return keep_largest(Sparse(indices=indices, values=values, num_elements=num_elements), k)[0]


def largest_of_all(values: NDArray[np.floating], k: int) -> Sparse:
    """The `k` largest, whatever the distribution."""
    bits, mask = bits_of(values), magnitude_mask(values.dtype)
    magnitudes = bits & mask
    magnitudes.partition(values.size - k)
    # At least 1: zeros are not selected.
    kth = max(magnitudes[values.size - k], mask.dtype.type(1))
    indices = np.flatnonzero(bits & mask >= kth)
    return _largest(indices, values[indices], values.size, k)


@kernel
def _append(
    flat: NDArray[np.floating],
    begin: int,
    end: int,
    threshold: np.floating,
    indices: NDArray[np.int64],
    values: NDArray[np.floating],
    count: int,
) -> int:
    """Append what reaches `threshold` among at most `BLOCK` elements, without a branch for each;
    without room, only count.
    """
    if count > indices.size - BLOCK:
        for i in range(begin, end):
            count += not abs(flat[i]) < threshold
        return count
    for i in range(begin, end):
        indices[count] = i
        values[count] = flat[i]
        count += not abs(flat[i]) < threshold
    return count


@kernel
def accumulate_and_collect(
    flat: NDArray[np.floating],
    residual: NDArray[np.floating],
    weight: np.floating,
    threshold: np.floating,
    indices: NDArray[np.int64],
    values: NDArray[np.floating],
) -> tuple[int, bool]:
    """flat = residual + weight * flat, and list what reaches `threshold`, or is NaN.

    Args:
        flat: shape (n,), overwritten.
        residual: shape (n,); may be `flat` itself.
        weight: of the same dtype.
        threshold: of the same dtype, > 0, and finite: so whatever is not finite reaches it.
        indices: takes indices; `BLOCK` places more than are wanted.
        values: takes values; as large.

    Returns:
        How many there are, which beyond indices.size - BLOCK are only counted; and whether all of
        `flat` is finite.
    """
    count = 0
    finite = True
    whole = flat.size - flat.size % BLOCK
    for begin in range(0, whole, BLOCK):
        hit = False
        # Of a fixed length, so that the compiler unrolls and vectorises it.
        for i in range(begin, begin + BLOCK):
            x = residual[i] + weight * flat[i]
            flat[i] = x
            hit |= not abs(x) < threshold
        if hit:
            count = _append(flat, begin, begin + BLOCK, threshold, indices, values, count)
            for i in range(begin, begin + BLOCK):
                finite &= np.isfinite(flat[i])
    for i in range(whole, flat.size):
        flat[i] = residual[i] + weight * flat[i]
        finite &= np.isfinite(flat[i])
    return _append(flat, whole, flat.size, threshold, indices, values, count), finite


@kernel
def sample_magnitudes(
    flat: NDArray[np.floating],
    residual: NDArray[np.floating],
    weight: np.floating,
    out: NDArray[np.floating],
) -> None:
    """Write |residual + weight * flat| at `out.size` places, one at a scrambled place in each of as
    many equal strides.
    """
    stride = flat.size // out.size
    for i in range(out.size):
        j = i * stride + (i * 40503 & 0xFFFF) % stride
        out[i] = abs(residual[j] + weight * flat[j])
