"""What every rank must know of a step besides the entries that were selected: weights, faults,
which parameters took part, and gradients so small that they are sent whole.

A `Tally` rides inside the messages of an exchange. Any tree, ring or all-gather that reaches
everyone gives every rank the same one, if all ranks merge in the same order: sums of weights and of
gradients are rounded.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.errors import WireError

_HEAD = struct.Struct("<dIII")
NUM_COUNTERS = 3
_FLOAT32: np.dtype[np.floating] = np.dtype(np.float32)


def _nothing() -> NDArray[np.floating]:
    return np.zeros(0, dtype=np.float32)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tally:
    """Sums over the ranks merged so far.

    Attributes:
        weight: sum of the ranks' averaging weights; one rank alone counts 1.0 unless told
            otherwise.
        num_nonfinite: ranks whose gradient held an infinity or a NaN.
        num_failed: ranks that raised inside backward and joined only so that nobody hangs.
        used: bool array, shape (number of parameters,): which ones got a gradient on some rank.
        whole: shape (number of elements,): gradients that travel whole beside the entries. Empty:
            there are none, or this tally goes where they are not wanted.
    """

    weight: float
    num_nonfinite: int
    num_failed: int
    used: NDArray[np.bool_]
    whole: NDArray[np.floating] = field(default_factory=_nothing)

    @classmethod
    def of_nobody(cls, num_parameters: int) -> Tally:
        """What merges with any other tally without changing it."""
        used = np.zeros(num_parameters, dtype=np.bool_)
        return cls(weight=0.0, num_nonfinite=0, num_failed=0, used=used)

    @property
    def good(self) -> bool:
        """Whether the step may be applied."""
        return self.num_nonfinite == 0 and self.num_failed == 0

    def merge(self, other: Tally) -> Tally:
        """The tally of both sets of ranks, which must be disjoint.

        Raises `WireError` if both have gradients, and not of one size.
        """
        return Tally(
            weight=self.weight + other.weight,
            num_nonfinite=self.num_nonfinite + other.num_nonfinite,
            num_failed=self.num_failed + other.num_failed,
            used=self.used | other.used,
            whole=_sum(self.whole, other.whole),
        )

    def without_whole(self) -> Tally:
        """The tally without the gradients."""
        return replace(self, whole=_nothing())

    def to_bytes(self) -> bytes:
        head = _HEAD.pack(self.weight, self.num_nonfinite, self.num_failed, self.used.size)
        whole = self.whole.astype(self.whole.dtype.newbyteorder("<"), copy=False)
        return head + np.packbits(self.used).tobytes() + whole.tobytes()

    @staticmethod
    def num_bytes(num_parameters: int, *, whole_bytes: int = 0) -> int:
        return _HEAD.size + (num_parameters + 7) // 8 + whole_bytes

    @classmethod
    def from_bytes(
        cls,
        data: bytes | memoryview,
        *,
        num_parameters: int,
        num_whole: int = 0,
        dtype: np.dtype[np.floating] = _FLOAT32,
    ) -> Tally:
        """Inverse of `to_bytes`.

        Args:
            data: what was received.
            num_parameters: whose gradients the exchange brings.
            num_whole: elements of `whole`, where the sender did not leave them out.
            dtype: of `whole`, in memory.

        Raises:
            WireError: `data` is no such tally.
        """
        at_whole = cls.num_bytes(num_parameters)
        if len(data) not in (at_whole, at_whole + num_whole * dtype.itemsize):
            raise WireError(
                f"a tally of {num_parameters} parameters, {num_whole} of whose elements travel"
                f" whole, takes {at_whole + num_whole * dtype.itemsize} bytes, got {len(data)}; do"
                " all ranks train the same model?"
            )
        weight, num_nonfinite, num_failed, size = _HEAD.unpack_from(data)
        if size != num_parameters:
            raise WireError(f"a tally of {size} parameters reached a model of {num_parameters}")
        bits = np.frombuffer(data, dtype=np.uint8, count=at_whole - _HEAD.size, offset=_HEAD.size)
        used = np.unpackbits(bits, count=num_parameters).astype(np.bool_)
        # Copied, because inside a message they are not aligned.
        whole = np.frombuffer(data, dtype=dtype.newbyteorder("<"), offset=at_whole).astype(dtype)
        return cls(
            weight=weight,
            num_nonfinite=num_nonfinite,
            num_failed=num_failed,
            used=used,
            whole=whole,
        )

    def write_to(self, tail: torch.Tensor) -> None:
        """Lay the tally out as the numbers of `tail`, shape (NUM_COUNTERS + number of parameters +
        elements that travel whole,), to be summed.
        """
        counters = (self.weight, self.num_nonfinite, self.num_failed)
        tail.copy_(torch.from_numpy(np.concatenate([counters, self.used, self.whole])))

    @classmethod
    def read_from(cls, tail: torch.Tensor, *, num_whole: int = 0) -> Tally:
        """Inverse of `write_to`, after the numbers have been summed over ranks."""
        numbers = tail.to(dtype=torch.float64, device="cpu").numpy()
        return cls(
            weight=float(numbers[0]),
            num_nonfinite=int(numbers[1]),
            num_failed=int(numbers[2]),
            used=numbers[NUM_COUNTERS : numbers.size - num_whole] > 0,
            whole=numbers[numbers.size - num_whole :],
        )


def _sum(a: NDArray[np.floating], b: NDArray[np.floating]) -> NDArray[np.floating]:
    """Their sum, where an empty one adds nothing."""
    if not (a.size and b.size):
        return a if a.size else b
    if a.size != b.size:
        raise WireError(
            f"gradients of {a.size} and of {b.size} elements travelled whole; do all ranks train"
            " the same model with the same options?"
        )
    # A gradient that is not finite was counted by its rank, and the step is skipped on all ranks.
    # Finite ones whose sum is too large become infinite, as in any other sum over ranks.
    with np.errstate(over="ignore", invalid="ignore"):
        return a + b
