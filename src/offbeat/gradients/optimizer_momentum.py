"""SGD's momentum, taken over from the user's optimizer for as long as a session lasts.

Where only the largest entries travel, momentum has to be applied before they are selected
(momentum correction, DGC, arXiv 1712.01887, section 3.1). So each rank keeps a velocity of its own,
and the optimizer's momentum is 0 meanwhile. With it goes weight decay, which SGD adds to the
gradient before momentum: left where it is it would be as good as `1 / (1 - momentum)` times weaker.

The optimizer's options are as the user set them again when the session ends, and always in what
`optimizer.state_dict()` returns. A scheduler may change them meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.codec.momentum import Momentum, MomentumRange
from offbeat.gradients.buckets import Bucket
from offbeat.gradients.group_ranges import GroupRanges

_TAKEN: Final = ("momentum", "weight_decay")
CHANGED_MOMENTUM: Final = (
    "gradients are changed between backward() and step(), as clip_grad_norm_ does, but SGD's"
    " momentum is in them already (momentum_correction='auto'), so the step is limited and not the"
    " gradient; to clip, use the strategy's clip_norm, or leave momentum to the optimizer with"
    " momentum_correction=None"
)
"""A warning for whoever does so while momentum is taken over."""

_BUFFER: Final = "momentum_buffer"
_REST: Final = -0.0
"""What stands in the optimizer for an option that was taken: no option to PyTorch, and not what a
user writes who switches it off.
"""


class HasVelocity(Protocol):
    """What applies a momentum to the gradients of a bucket."""

    @property
    def velocity(self) -> torch.Tensor | None:
        """Shape (n,). Live: writes change the state. None: there is no momentum."""
        ...


@dataclass(frozen=True, slots=True)
class _Place:
    """A bucket, and what is applied to it."""

    bucket: Bucket
    groups: GroupRanges
    momentum: Momentum
    applied_by: HasVelocity


class OptimizerMomentum:
    """Momentum and weight decay of an SGD optimizer, while they are not the optimizer's.

    Nothing is taken before `take` is called.

    Args:
        optimizer: a `torch.optim.SGD` with momentum, which it does not dampen.
        inform: is told what was taken.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, inform: Callable[[str], None]) -> None:
        self._optimizer = optimizer
        self._inform = inform
        self._taken: dict[int, dict[str, float]] = {}  # by group: what its options were
        self._places: dict[int, _Place] = {}
        self._handles: list[Any] = []

    def of(self, bucket: Bucket) -> Momentum:
        """The momentum of a bucket's elements, as the optimizer has it now."""
        return Momentum(self._ranges(GroupRanges(bucket, self._optimizer)))

    def apply_to(self, bucket: Bucket, momentum: Momentum, applied_by: HasVelocity) -> None:
        """Keep `momentum`, which `applied_by` applies to `bucket`, as the user has it."""
        groups = GroupRanges(bucket, self._optimizer)
        self._places[id(bucket)] = _Place(bucket, groups, momentum, applied_by)

    def take(self) -> None:
        """Take over what the optimizer has. Idempotent: a scheduler may have set it anew."""
        if not self._handles:
            self._handles = [
                self._optimizer.register_state_dict_post_hook(self._show),
                self._optimizer.register_load_state_dict_post_hook(self._loaded),
            ]
            self._inform(
                f"momentum_correction='auto': {self._description()} of SGD works before entries"
                " are selected, so the optimizer's own is 0 until the session ends;"
                " momentum_correction=None leaves it there"
            )
            self._take_buffers()
        changed = False
        for number, group in enumerate(self._optimizer.param_groups):
            if group["momentum"] == 0 and number not in self._taken:
                continue
            options = self._taken.setdefault(number, dict.fromkeys(_TAKEN, 0.0))
            for name in _TAKEN:
                if not _rests(group[name]):
                    changed |= options[name] != float(group[name])
                    options[name], group[name] = float(group[name]), _REST
        if changed:
            self._set_ranges()

    def prepare_(
        self, bucket: Bucket, used: NDArray[np.bool_], *, grad_scale: float, continues: bool
    ) -> None:
        """Add weight decay to the gradient that `bucket` holds, times `grad_scale`, where it is
        this rank's.

        Args:
            bucket: one that `apply_to` was called with.
            used: which of its parameters have a gradient.
            grad_scale: the AMP scale in force.
            continues: whether an earlier exchange belongs to the same optimizer step, so that the
                decay has been added.
        """
        if continues or not any(options["weight_decay"] for options in self._taken.values()):
            return
        groups, views = self._places[id(bucket)].groups.groups, bucket.views
        for position in np.flatnonzero(used).tolist():
            number = groups[position]
            if number is None or not (decay := self._options(number)["weight_decay"]):
                continue
            if self._optimizer.param_groups[number]["maximize"]:  # which negates what it is given
                decay = -decay
            views[position].add_(bucket.parameters[position].detach(), alpha=decay * grad_scale)

    def give_back(self) -> None:
        """Put the options back. Momentum begins anew then: velocities differ from rank to rank."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._put_into(self._optimizer.param_groups)
        self._taken.clear()

    def _show(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Have a state dictionary say what the user has set."""
        self._put_into(state["param_groups"])

    def _put_into(self, groups: Sequence[dict[str, Any]]) -> None:
        for number, options in self._taken.items():
            # What a scheduler has set since the last step counts.
            groups[number].update(
                {name: v for name, v in options.items() if _rests(groups[number][name])}
            )

    def _loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """What was loaded is what the user has set."""
        self._taken = {number: dict.fromkeys(_TAKEN, 0.0) for number in self._taken}
        self.take()
        self._set_ranges()
        self._take_buffers()

    def _set_ranges(self) -> None:
        for place in self._places.values():
            place.momentum.ranges = self._ranges(place.groups)

    def _take_buffers(self) -> None:
        """A momentum that the optimizer has gathered is the same on all ranks, so each begins with
        it.
        """
        state = self._optimizer.state
        for place in self._places.values():
            velocity = place.applied_by.velocity
            assert velocity is not None
            views = place.bucket.views_of(velocity)
            for view, parameter in zip(views, place.bucket.parameters, strict=True):
                gathered = state[parameter].pop(_BUFFER, None) if parameter in state else None
                if gathered is not None:
                    view.copy_(gathered)

    def _options(self, number: int) -> Mapping[str, float]:
        if number in self._taken:
            return self._taken[number]
        group = self._optimizer.param_groups[number]
        # Without momentum weight decay can stay where it is.
        return {"momentum": group["momentum"], "weight_decay": 0.0}

    def _ranges(self, groups: GroupRanges) -> list[MomentumRange]:
        options = [
            (self._options(number)["momentum"], bool(group["nesterov"]))
            for number, group in enumerate(self._optimizer.param_groups)
        ]
        return [
            MomentumRange(end=here.stop, factor=factor, nesterov=nesterov)
            for here, (factor, nesterov) in groups.merged(options, default=(0.0, False))
        ]

    def _description(self) -> str:
        groups = self._optimizer.param_groups
        momenta = sorted({group["momentum"] for group in groups if group["momentum"]})
        with_decay = any(group["momentum"] and group["weight_decay"] for group in groups)
        text = f"momentum {', '.join(f'{momentum:g}' for momentum in momenta)}"
        return text + (" and weight decay" if with_decay else "")


def momentum_to_take(
    optimizer: torch.optim.SGD, *, inform: Callable[[str], None]
) -> OptimizerMomentum | None:
    """The momentum of `optimizer`; None if it has none, or one that has to stay there, which
    `inform` is told.
    """
    largest = max(float(group["momentum"]) for group in optimizer.param_groups)
    if largest == 0:
        return None
    if any(group["dampening"] for group in optimizer.param_groups):
        inform(
            "momentum_correction='auto': the optimizer's momentum sees the mean of what was sent,"
            " and is not taken over, since the optimizer dampens it"
        )
        return None
    if largest >= 1:
        inform(
            f"momentum_correction='auto': momentum {largest:g} never ends, so it is left to the"
            " optimizer, where it sees the mean of what was sent"
        )
        return None
    return OptimizerMomentum(optimizer, inform=inform)


def _rests(option: float) -> bool:
    """Whether an option is as `take` has left it."""
    return option == 0 and math.copysign(1.0, option) < 0
