"""What every rank must know of a step besides the entries that were selected: weights, faults,
and which parameters took part.

A `Tally` rides inside the messages of an exchange. Any tree, ring or all-gather that reaches
everyone gives every rank the same one, if all ranks merge in the same order: sums of weights are
rounded.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.codec.device_copies import put
from offbeat.errors import WireError

_HEAD = struct.Struct("<dIII")
NUM_COUNTERS = 3


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tally:
    """Sums over the ranks merged so far.

    Attributes:
        weight: sum of the ranks' averaging weights; one rank alone counts 1.0 unless told
            otherwise.
        num_nonfinite: ranks whose gradient held an infinity or a NaN. Of one rank alone it may be a
            bool tensor of one element, which the host has not waited for.
        num_failed: ranks that raised inside backward and joined only so that nobody hangs.
        used: bool array, shape (number of parameters,): which ones got a gradient on some rank.
    """

    weight: float
    num_nonfinite: int | torch.Tensor
    num_failed: int
    used: NDArray[np.bool_]

    @classmethod
    def of_nobody(cls, num_parameters: int) -> Tally:
        """What merges with any other tally without changing it."""
        used = np.zeros(num_parameters, dtype=np.bool_)
        return cls(weight=0.0, num_nonfinite=0, num_failed=0, used=used)

    @property
    def good(self) -> bool:
        """Whether the step may be applied."""
        return int(self.num_nonfinite) == 0 and self.num_failed == 0

    def merge(self, other: Tally) -> Tally:
        """The tally of both sets of ranks, which must be disjoint."""
        return Tally(
            weight=self.weight + other.weight,
            num_nonfinite=self.num_nonfinite + other.num_nonfinite,
            num_failed=self.num_failed + other.num_failed,
            used=self.used | other.used,
        )

    def to_bytes(self) -> bytes:
        head = _HEAD.pack(self.weight, int(self.num_nonfinite), self.num_failed, self.used.size)
        return head + np.packbits(self.used).tobytes()

    @staticmethod
    def num_bytes(num_parameters: int) -> int:
        return _HEAD.size + (num_parameters + 7) // 8

    @classmethod
    def from_bytes(cls, data: bytes | memoryview, *, num_parameters: int) -> Tally:
        """Inverse of `to_bytes`.

        Args:
            data: what was received.
            num_parameters: whose gradients the exchange brings.

        Raises:
            WireError: `data` is no such tally.
        """
        expected = cls.num_bytes(num_parameters)
        if len(data) != expected:
            raise WireError(
                f"a tally of {num_parameters} parameters takes {expected} bytes, got {len(data)};"
                " do all ranks train the same model?"
            )
        weight, num_nonfinite, num_failed, size = _HEAD.unpack_from(data)
        if size != num_parameters:
            raise WireError(f"a tally of {size} parameters reached a model of {num_parameters}")
        if not 0 <= weight < np.inf:
            raise WireError(
                f"a message has weight {weight}, allowed are finite ones from 0 on; it is damaged"
            )
        bits = np.frombuffer(data, dtype=np.uint8, offset=_HEAD.size)
        used = np.unpackbits(bits, count=num_parameters).astype(np.bool_)
        return cls(weight=weight, num_nonfinite=num_nonfinite, num_failed=num_failed, used=used)

    def write_to(self, tail: torch.Tensor) -> None:
        """Lay the tally out as the numbers of `tail`, shape (NUM_COUNTERS + number of parameters,),
        to be summed. The host does not wait for the device.
        """
        is_late = isinstance(self.num_nonfinite, torch.Tensor)
        counters = (self.weight, 0 if is_late else self.num_nonfinite, self.num_failed)
        if tail.is_cuda and self.used.all() and counters == (1.0, 0, 0):
            # The usual case takes two kernels, and no copy from pinned memory.
            tail.fill_(1)
            tail[1:NUM_COUNTERS] = 0
        else:
            put(torch.from_numpy(np.concatenate([counters, self.used])), tail)
        if is_late:
            tail[1] = self.num_nonfinite

    @classmethod
    def read_from(cls, tails: Sequence[torch.Tensor]) -> list[Tally]:
        """Inverse of `write_to` of each, after the numbers have been summed over ranks. The host
        waits for the device once.
        """
        if not tails:
            return []
        joined = torch.cat([tail.to(tails[0].device) for tail in tails])
        every = joined.to(device="cpu", dtype=torch.float64)
        return [
            cls(
                weight=float(numbers[0]),
                num_nonfinite=int(numbers[1]),
                num_failed=int(numbers[2]),
                used=numbers[NUM_COUNTERS:] > 0,
            )
            for numbers in map(torch.Tensor.numpy, every.split([tail.numel() for tail in tails]))
        ]


def is_finite(flat: torch.Tensor) -> torch.Tensor:
    """Whether every element is finite, of one element on the device of `flat`, which the host does
    not wait for.
    """
    if not flat.numel() or flat.is_meta:
        # A simulation's vector has no content: whatever is read of it is 1, its negation too.
        device = "cpu" if flat.is_meta else flat.device
        return torch.ones((), dtype=torch.bool, device=device)
    numbers = torch.view_as_real(flat) if flat.is_complex() else flat
    if numbers.is_cuda:  # by as few kernels as possible
        greatest: torch.Tensor = torch.linalg.vector_norm(numbers, float("inf"))
        return greatest * 0 == 0  # a NaN otherwise
    # A NaN is both the least and the greatest. `aminmax` takes twice as long as both of these.
    return numbers.amin() * 0 + numbers.amax() * 0 == 0


def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether every element of all `tensors`, dense ones, is finite. The host waits once."""
    if not tensors or tensors[0].is_meta:
        return True
    # A norm is not finite if an element is not; one that overflows needs a second, slower look.
    if bool(torch.isfinite(torch.nn.utils.get_total_norm(tensors))):
        return True
    return all(bool(is_finite(tensor)) for tensor in tensors)
