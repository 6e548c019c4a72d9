"""What is owed keeps the learning rate at which it was computed.

An entry waits for about 1 / density exchanges, and the learning rate may change meanwhile. While it
rises, what was owed from before would be applied at a higher rate than its gradient was meant for,
which harms a new model; while it falls, at a lower one. So the residual is multiplied by old / new
whenever the optimizer's rate changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count, takewhile

import torch

from offbeat.gradients.buckets import Bucket
from offbeat.gradients.group_ranges import GroupRanges


class OwedRate:
    """Follows the learning rates of one bucket's parameters.

    Args:
        bucket: whose residual it is.
        optimizer: the user's; parameters without an `lr` are left alone.
    """

    def __init__(self, bucket: Bucket, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._places = GroupRanges(bucket, optimizer)
        self._rates: Sequence[float] = ()

    def follow(self, residual: torch.Tensor) -> float:
        """Bring what is owed from the last exchange's rates to those of now.

        Args:
            residual: of the bucket, shape (num_elements,).

        Returns:
            The largest factor, 1.0 where no rate has changed. A rate of 0 changes nothing: when it
            is above 0 again, what counts is the last one before.
        """
        now = [float(group.get("lr", 0.0)) for group in self._optimizer.param_groups]
        # A group that is new, or was not there when the state was saved, owes nothing yet.
        before = [*self._rates[: len(now)], *now[len(self._rates) :]]
        factors = [
            old / new if old > 0 and new > 0 else 1.0 for old, new in zip(before, now, strict=True)
        ]
        self._rates = [new or old for old, new in zip(before, now, strict=True)]
        if not any(factor != 1.0 for factor in factors):
            return 1.0
        places = self._places.ranges
        here = [1.0 if each.group is None else factors[each.group] for each in places]
        if min(here) == max(here):
            residual.mul_(here[0])
        else:  # there may be thousands of ranges, and each operation on one of them costs more
            sizes = torch.tensor([each.end - each.begin for each in places])
            vector = torch.tensor(here, dtype=residual.dtype).repeat_interleave(sizes)
            residual.mul_(vector.to(residual.device))
        return max(1.0, *here)

    def state(self) -> dict[str, float]:
        """The last exchange's rates, by group; none before the first one."""
        return {f"group_rate_{number}": rate for number, rate in enumerate(self._rates)}

    def load(self, state: Mapping[str, float]) -> None:
        """Inverse of `state`. What an older version has written, which is not by group, says
        nothing: learning rates count from the next exchange on.
        """
        names = takewhile(state.__contains__, (f"group_rate_{number}" for number in count()))
        self._rates = [float(state[name]) for name in names]
