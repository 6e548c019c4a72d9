"""What is owed keeps the learning rate at which it was computed.

An entry waits for about 1 / density exchanges, and the learning rate may change meanwhile. While it
rises, what was owed from before would be applied at a higher rate than its gradient was meant for,
which harms a new model; while it falls, at a lower one. So the residual is multiplied by old / new
whenever the optimizer's rate changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from offbeat.gradients.buckets import Bucket


class OwedRate:
    """Follows the learning rates of one bucket's parameters.

    Args:
        bucket: whose residual it is.
        optimizer: the user's; parameters without an `lr` are left alone.
    """

    def __init__(self, bucket: Bucket, optimizer: torch.optim.Optimizer) -> None:
        self._bucket = bucket
        self._optimizer = optimizer
        self._rates: Sequence[float] = ()

    def follow(self, residual: torch.Tensor) -> float:
        """Bring what is owed from the last exchange's rates to those of now.

        Args:
            residual: of the bucket, shape (num_elements,).

        Returns:
            The largest factor, 1.0 where no rate has changed. A rate of 0 changes nothing: when it
            is above 0 again, what counts is the last one before.
        """
        ranges = self._ranges()
        before = self._rates if len(self._rates) == len(ranges) else [rate for _, rate in ranges]
        begin, largest = 0, 1.0
        for (end, new), old in zip(ranges, before, strict=True):
            if old != new and old > 0 and new > 0:
                residual[begin:end].mul_(old / new)
                largest = max(largest, old / new)
            begin = end
        self._rates = [new or old for old, (_, new) in zip(before, ranges, strict=True)]
        return largest

    def state(self) -> dict[str, float]:
        """The last exchange's rates; none before the first one."""
        return {f"rate_{number}": rate for number, rate in enumerate(self._rates)}

    def load(self, state: Mapping[str, float]) -> None:
        """Inverse of `state`."""
        self._rates = [state[f"rate_{number}"] for number in range(len(state))]

    def _ranges(self) -> list[tuple[int, float]]:
        """Ends of neighbouring elements with one rate, and that rate."""
        rates = {
            id(parameter): float(group.get("lr", 0.0))
            for group in self._optimizer.param_groups
            for parameter in group["params"]
        }
        ranges = list[tuple[int, float]]()
        ends = self._bucket.offsets[1:]
        groups = [rates.get(id(parameter), 0.0) for parameter in self._bucket.parameters]
        for end, rate in zip(ends, groups, strict=True):
            if ranges and ranges[-1][1] == rate:
                ranges.pop()
            ranges.append((end, rate))
        return ranges
