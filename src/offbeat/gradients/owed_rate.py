"""What is owed keeps the learning rate at which it was computed, where the step behind the exchange
is plain: parameter -= rate * what was sent.

Derivation. Error feedback as Karimireddy et al. prove it (arXiv 1901.09847, algorithm 1) keeps the
error e in units of the parameters: p = rate * gradient + e; the parameter moves by what is sent of
p, and e is the rest. So parameter - e moves as with SGD whose gradients are late, each with its own
rate. Here the optimizer multiplies by the rate after the exchange, and the residual is e / rate: so
whenever the rate changes, the residual is multiplied by old / new, which leaves e as it is. Nothing
is lost or gained however often that happens.

This holds only while nothing that remembers stands behind the exchange. After a fall of the rate
the entries that are sent are old / new times as large; a momentum or a mean square that sees them
applies them later at another rate, and a warm restart then destroys the model. There the residual
stays in units of gradients, as in DGC and gTop-k S-SGD.

Without it (`benchmarks/parity.py`, GTopK at 0.01): text 9% of bits worse (three seeds), images 0.5
points (twelve seeds).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count, takewhile

import torch

from offbeat.gradients.group_ranges import GroupRanges


class OwedRate:
    """Follows the learning rates of one bucket's parameters.

    Args:
        groups: to which groups of the optimizer the bucket's elements belong.
        rates: by group, what the optimizer's next step is multiplied by; 0 where it has none.
        leads_to_plain_steps: whether nothing behind the exchange remembers what was sent; asked at
            each exchange.
    """

    def __init__(
        self,
        groups: GroupRanges,
        *,
        rates: Callable[[], Sequence[float]],
        leads_to_plain_steps: Callable[[], bool],
    ) -> None:
        self._places = groups
        self._rates_now = rates
        self._leads_to_plain_steps = leads_to_plain_steps
        self._rates: Sequence[float] = ()

    def follow(self, residual: torch.Tensor) -> None:
        """Bring what is owed from the last exchange's rates to those of now. A rate of 0 changes
        nothing: when it is above 0 again, what counts is the last one before.

        Args:
            residual: of the bucket, shape (num_elements,).
        """
        now = self._rates_now()
        # A group that is new, or was not there when the state was saved, owes nothing yet.
        before = [*self._rates[: len(now)], *now[len(self._rates) :]]
        factors = [
            old / new if old > 0 and new > 0 else 1.0 for old, new in zip(before, now, strict=True)
        ]
        self._rates = [new or old for old, new in zip(before, now, strict=True)]
        if not any(factor != 1.0 for factor in factors) or not self._leads_to_plain_steps():
            return
        places = self._places.ranges
        here = [1.0 if each.group is None else factors[each.group] for each in places]
        if min(here) == max(here):
            residual.mul_(here[0])
        else:  # there may be thousands of ranges, and each operation on one of them costs more
            sizes = torch.tensor([each.end - each.begin for each in places])
            vector = torch.tensor(here, dtype=residual.dtype).repeat_interleave(sizes)
            residual.mul_(vector.to(residual.device))

    def state(self) -> dict[str, float]:
        """The last exchange's rates, by group; none before the first one."""
        return {f"group_rate_{number}": rate for number, rate in enumerate(self._rates)}

    def load(self, state: Mapping[str, float]) -> None:
        """Inverse of `state`."""
        names = takewhile(state.__contains__, (f"group_rate_{number}" for number in count()))
        self._rates = [float(state[name]) for name in names]
