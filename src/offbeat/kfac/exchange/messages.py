"""A few factors in one flat buffer, all-reduced together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from offbeat.gradients.reductions import launch_sums
from offbeat.kfac.blocks import FactorSlot
from offbeat.kfac.capture import Increment
from offbeat.transport.driver import Driver, Pending, Stream


class SummedFactor(NamedTuple):
    """What all ranks together have seen of a factor in a step.

    Attributes:
        slot: which factor.
        mean: weighted by ranks' weights, packed; zeros, or not a number, if the weight is 0.
        weight: of all ranks, a scalar tensor.
        num_retired: ranks that cannot watch the layer any more, a scalar tensor.
    """

    slot: int
    mean: torch.Tensor
    weight: torch.Tensor
    num_retired: torch.Tensor


class FactorMessage:
    """The factors of one group: each times its weight, then the weights, then who was retired.

    Args:
        slots: which factors, all of one dtype and device.
    """

    def __init__(self, slots: Sequence[FactorSlot]) -> None:
        self.slots = slots
        sizes = [slot.shape.num_elements for slot in slots]
        first = slots[0]
        self._flat = torch.zeros(
            sum(sizes) + 2 * len(slots), dtype=first.dtype, device=first.device
        )
        *parts, self._tail = self._flat.split([*sizes, 2 * len(slots)])
        self._views = [
            part.view(slot.shape.packed) for part, slot in zip(parts, slots, strict=True)
        ]
        self._sums: list[Pending[torch.Tensor]] = []

    @property
    def num_bytes(self) -> int:
        return sum(slot.size_bytes for slot in self.slots)

    def room(self, slot: int) -> torch.Tensor:
        """Where the factor of `slot` leaves from: this rank's part may be made there."""
        places = [each.index for each in self.slots]
        view: torch.Tensor = self._views[places.index(slot)]
        return view

    def launch(
        self,
        driver: Driver,
        stream: Stream,
        take: Callable[[int], Increment],
        is_retired: Callable[[int], bool],
    ) -> Sequence[Pending[torch.Tensor]]:
        """Begin to sum over all ranks.

        Args:
            driver: carries the sum out.
            stream: its channels.
            take: this rank's part of a slot.
            is_retired: whether this rank has given up the layer of a slot.

        Returns:
            What is under way.
        """
        # A mean weighted by each rank's examples needs the sum of the weights too, which travels in
        # the same message, as do the numbers of ranks that retired a layer.
        numbers = []
        for slot, view in zip(self.slots, self._views, strict=True):
            packed, weight = take(slot.index)
            torch.mul(packed, weight, out=view)
            numbers += [weight, float(is_retired(slot.index))]
        self._tail.copy_(torch.tensor(numbers, dtype=self._tail.dtype))
        self._sums = launch_sums(driver, stream, self._flat)
        return self._sums

    def has_arrived(self) -> bool:
        """Whether `wait` would return at once. Never blocks."""
        return all(pending.poll() for pending in self._sums)

    def wait(self) -> None:
        """Until the sums are there."""
        for pending in self._sums:
            pending.wait()
        self._sums = []

    def read(self) -> Iterator[SummedFactor]:
        """The sums of each slot, which must have been waited for. May be called once: means are
        made in place of the sums.
        """
        numbers = self._tail.view(-1, 2)
        for slot, view, (weight, num_retired) in zip(self.slots, self._views, numbers, strict=True):
            yield SummedFactor(
                slot.index, view.div_(torch.where(weight > 0, weight, 1.0)), weight, num_retired
            )
