"""To which groups of an optimizer the elements of a bucket belong, and what is owed where their
learning rates change.

What is owed keeps the learning rate at which it was computed, where the step behind the exchange
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

So where a group's rate is 0 its gradients add nothing to e. If they were owed all the same, they
would take the places of others' entries, and all of those that wait would be applied, from long
ago, when the rate rises.

Without it (`benchmarks/parity.py`, GTopK at 0.01): text 9% of bits worse (three seeds), images 0.5
points (twelve seeds).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count, groupby, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.gradients.buckets import Bucket

if TYPE_CHECKING:
    from offbeat.gradients.exchange import GradientTransform

T = TypeVar("T")


class GroupRange(NamedTuple):
    """Neighbouring elements whose parameters are in one group.

    Attributes:
        place: of the elements in the bucket.
        group: the number of the group; None: the optimizer has none of the parameters.
    """

    place: slice
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
        self._decayed = np.zeros(len(bucket.parameters), dtype=np.bool_)

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

    @property
    def signs(self) -> list[float]:
        """Of what the optimizer keeps of each of the bucket's parameters' gradients, which is
        negative where it maximizes; 0 for parameters that it does not have.
        """
        groups = self._optimizer.param_groups
        return [0.0 if n is None else -1.0 if groups[n]["maximize"] else 1.0 for n in self.groups]

    def merged(self, options: Sequence[T], *, default: T) -> Iterator[tuple[slice, T]]:
        """Neighbouring elements with equal options, and these.

        Args:
            options: of each group.
            default: of parameters that the optimizer does not have.
        """
        for option, run in groupby(
            self.ranges, key=lambda each: default if each.group is None else options[each.group]
        ):
            places = [each.place for each in run]
            yield slice(places[0].start, places[-1].stop), option

    def add_decay_(
        self,
        used: NDArray[np.bool_],
        decays: Sequence[float],
        grad_scale: float = 1.0,
        *,
        continues: bool,
    ) -> None:
        """Add weight decay to the gradients in the bucket, which are multiplied by `grad_scale`: to
        those that are a parameter's first ones in the optimizer's step. Of a parameter that only
        some ranks use in a step, the mean has as much less of it as the others weigh, unless these
        make it up (`undecayed`).

        Args:
            used: which of the bucket's parameters have a gradient.
            decays: of each group.
            grad_scale: the AMP scale in force.
            continues: whether earlier gradients belong to the same step.
        """
        if not continues:
            self._decayed = np.zeros_like(used)
        first, self._decayed = used & ~self._decayed, self._decayed | used
        if not any(decays):
            return
        bucket, groups, views = self._bucket, self.groups, self._bucket.views
        for position in np.flatnonzero(first).tolist():
            number = groups[position]
            if number is not None and decays[number]:
                alpha = decays[number] * grad_scale
                views[position].add_(bucket.parameters[position].detach(), alpha=alpha)

    def undecayed(self, used: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
        """Of parameters that some rank has `used` in the step, and this one has not: the position,
        and the number of the group. Each is asked for once a step.
        """
        for position in np.flatnonzero(used & ~self._decayed).tolist():
            number = self.groups[position]
            if number is not None and self._bucket.parameters[position].requires_grad:
                yield position, number
        self._decayed |= used

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
                begin = self._ranges.pop().place.start
            self._ranges.append(GroupRange(slice(begin, end), group))
            begin = end


def coupled_decay(group: Mapping[str, Any]) -> float:
    """The weight decay of an optimizer's group that is added to gradients."""
    if group.get("decoupled_weight_decay"):
        return 0.0
    decay = float(group["weight_decay"])
    return -decay if group["maximize"] else decay  # where it negates what it is given


def numbers_in_state(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Under which number a state dictionary has each parameter, by the parameter's identity."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return {id(parameter): number for number, parameter in enumerate(parameters)}


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    """The learning rate of each group; 0 for one that has none, or None, as where the optimizer
    works it out itself.
    """
    rates = (group.get("lr") for group in optimizer.param_groups)
    return [0.0 if rate is None else float(rate) for rate in rates]


class OwedRate:
    """Follows the learning rates of one bucket's parameters.

    Args:
        groups: to which groups of the optimizer the bucket's elements belong.
        transform: knows the rates, and whether nothing behind the exchange remembers what was sent.
    """

    def __init__(self, groups: GroupRanges, transform: GradientTransform) -> None:
        self._places, self._transform = groups, transform
        self._rates: Sequence[float] = ()

    def follow(self, residual: torch.Tensor, gradient: torch.Tensor) -> Sequence[slice]:
        """Bring what is owed from the last exchange's rates to those of now. A rate of 0 changes
        nothing: when it is above 0 again, what counts is the last one before. Meanwhile there is no
        gradient, unless all rates are 0, where somebody looks at gradients without stepping.

        Args:
            residual: of the bucket, shape (num_elements,).
            gradient: what is about to be added to it, of the same shape.

        Returns:
            Of which elements what is owed has to wait: sent at a rate of 0 it would be lost.
        """
        now = self._transform.rates()
        # A group that is new, or was not there when the state was saved, owes nothing yet.
        before = [*self._rates[: len(now)], *now[len(self._rates) :]]
        factors = [
            old / new if old > 0 and new > 0 else 1.0 for old, new in zip(before, now, strict=True)
        ]
        self._rates = [new or old for old, new in zip(before, now, strict=True)]
        rests = any(now) and not all(now)
        if not (rests or any(factor != 1.0 for factor in factors)):
            return []
        if not self._transform.leaves_plain_steps():
            return []
        ranges = self._places.ranges
        resting = [
            place for place, group in ranges if rests and group is not None and not now[group]
        ]
        for place in resting:
            gradient[place] = 0
        here = [1.0 if each.group is None else factors[each.group] for each in ranges]
        if min(here) == max(here):
            residual.mul_(here[0])
        else:  # there may be thousands of ranges, and each operation on one of them costs more
            sizes = torch.tensor([place.stop - place.start for place, _ in ranges])
            vector = torch.tensor(here, dtype=residual.dtype).repeat_interleave(sizes)
            residual.mul_(vector.to(residual.device))
        return resting

    def state(self) -> dict[str, float]:
        """The last exchange's rates, by group; none before the first one."""
        return {f"group_rate_{number}": rate for number, rate in enumerate(self._rates)}

    def load(self, state: Mapping[str, float]) -> None:
        """Inverse of `state`."""
        names = takewhile(state.__contains__, (f"group_rate_{number}" for number in count()))
        self._rates = [float(state[name]) for name in names]
