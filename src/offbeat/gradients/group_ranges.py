"""To which groups of an optimizer the elements of a bucket belong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from offbeat.gradients.buckets import Bucket

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GroupRange:
    """Neighbouring elements whose parameters are in one group.

    Attributes:
        begin: the first one's place in the bucket.
        end: the place after the last one.
        group: the number of the group; None: the optimizer has none of the parameters.
    """

    begin: int
    end: int
    group: int | None


class GroupRanges:
    """The ranges of one bucket. Found anew only when the optimizer has got further groups or
    parameters, because each exchange asks, and a model may have thousands of parameters. So
    parameters that change places between groups of the same sizes are not noticed.

    Args:
        bucket: whose elements are meant.
        optimizer: the user's. Its groups may be replaced by others with the same parameters, as
            `load_state_dict` does.
    """

    def __init__(self, bucket: Bucket, optimizer: torch.optim.Optimizer) -> None:
        self._bucket = bucket
        self._optimizer = optimizer
        self._sizes: list[int] = []
        self._ranges: list[GroupRange] = []
        self._groups: list[int | None] = []

    @property
    def ranges(self) -> Sequence[GroupRange]:
        """They cover the bucket, in order."""
        self._look()
        return self._ranges

    @property
    def groups(self) -> Sequence[int | None]:
        """The number of the group of each of the bucket's parameters."""
        self._look()
        return self._groups

    def merged(self, options: Sequence[T], *, default: T) -> Iterator[tuple[slice, T]]:
        """Neighbouring elements with equal options, and these.

        Args:
            options: of each group.
            default: of parameters that the optimizer does not have.
        """
        if all(option == default for option in options):
            yield slice(0, self._bucket.num_elements), default
            return
        here, begin = default, 0
        for each in self.ranges:
            option = default if each.group is None else options[each.group]
            if option != here:
                if each.begin > begin:
                    yield slice(begin, each.begin), here
                here, begin = option, each.begin
        yield slice(begin, self._bucket.num_elements), here

    def _look(self) -> None:
        sizes = [len(group["params"]) for group in self._optimizer.param_groups]
        if sizes == self._sizes:
            return
        self._sizes = sizes
        numbers = {
            id(parameter): number
            for number, group in enumerate(self._optimizer.param_groups)
            for parameter in group["params"]
        }
        self._groups = [numbers.get(id(parameter)) for parameter in self._bucket.parameters]
        self._ranges.clear()
        begin = 0
        for group, end in zip(self._groups, self._bucket.offsets[1:], strict=True):
            if self._ranges and self._ranges[-1].group == group:
                begin = self._ranges.pop().begin
            self._ranges.append(GroupRange(begin, end, group))
            begin = end


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    """The learning rate of each group; 0 for one that has none."""
    return [float(group.get("lr", 0.0)) for group in optimizer.param_groups]
