"""SGD's momentum, taken over from the user's optimizer for as long as a session lasts.

Where only the largest entries travel, momentum has to be applied before they are selected
(momentum correction, DGC, arXiv 1712.01887, section 3.1). So each rank keeps a velocity of its own,
and the optimizer has no momentum during its step. With it goes weight decay, which SGD adds to the
gradient before momentum: left where it is it would be as good as `1 / (1 - momentum)` times weaker.
Where momentum is applied at once (see `codec.momentum`) the learning rate is `1 / (1 - momentum)`
times as high during the step.

Outside `optimizer.step()` everything reads as PyTorch would show it: `param_groups` have the values
that the user has set, and may be changed, and `optimizer.state_dict()` has `momentum_buffer`, which
is this rank's velocity. Where momentum is applied at once there is none, and a notice says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from offbeat.codec.momentum import Momentum, MomentumRange
from offbeat.gradients.buckets import Bucket
from offbeat.gradients.exchange import GradientTransform
from offbeat.gradients.group_ranges import GroupRanges, rates_of

_NO_BUFFER: Final = (
    "optimizer.state_dict() has no momentum_buffer, since at this density SGD's momentum is applied"
    " at once (momentum_correction='auto'); what of it has not been sent yet is owed, and"
    " session.state_dict() has that"
)
_BUFFER: Final = "momentum_buffer"
_HIDDEN: Final = ("lr", "momentum", "weight_decay")


class HasVelocity(Protocol):
    """What applies a momentum to the gradients of a bucket."""

    @property
    def velocity(self) -> torch.Tensor | None:
        """Shape (n,). Live: writes change the state. None: there is no momentum."""
        ...


@dataclass(slots=True)
class _Place:
    """A bucket, what is applied to it, and by what."""

    bucket: Bucket
    groups: GroupRanges
    momentum: Momentum
    applied_by: HasVelocity | None = None


class OptimizerMomentum(GradientTransform):
    """Momentum and weight decay of an SGD optimizer, while they are not the optimizer's.

    Nothing is taken before `take` is called.

    Args:
        optimizer: a `torch.optim.SGD` with momentum, which it does not dampen.
        inform: is told what was taken.
    Velocities are saved with the residuals.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, inform: Callable[[str], None]) -> None:
        super().__init__(optimizer)
        self._optimizer = optimizer
        self._inform = inform
        self._places: dict[int, _Place] = {}
        self._handles: list[Any] = []
        self._options: list[tuple[float, bool]] = []  # by group: momentum, and whether Nesterov's
        self._decays: list[bool] = []  # by group: whether decay is in the gradient of the next step
        self._shown: list[dict[str, Any]] = []  # by group, during a step: what the user set
        self._sends_few: Callable[[], bool] = lambda: False
        self._velocity_is_loaded = self._has_said_no_buffer = False

    @override
    def momentum_of(self, bucket: Bucket) -> Momentum:
        """As the optimizer has it now, and kept as the user has it from now on."""
        groups = GroupRanges(bucket, self._optimizer)
        momentum = Momentum(self._ranges(groups, self._read()))
        self._places[id(bucket)] = _Place(bucket, groups, momentum)
        return momentum

    @override
    def apply_to(self, bucket: Bucket, feedback: HasVelocity) -> None:
        self._places[id(bucket)].applied_by = feedback

    @override
    def follow(
        self,
        *,
        sends_few: Callable[[], bool],
        sends_entries: Callable[[], bool],
        when_taken: Callable[[], None],
    ) -> None:
        self._sends_few = sends_few

    # What the exchange calls

    @override
    def take(self) -> None:
        """A scheduler may have set it anew."""
        if not self._handles:
            self._handles = [
                self._optimizer.register_state_dict_post_hook(self._show_buffers),
                self._optimizer.register_load_state_dict_post_hook(self._loaded),
            ]
            self._inform(
                f"momentum_correction='auto': {self._description()} of SGD works before entries"
                " are selected, and not in the optimizer's step, until the session ends;"
                " momentum_correction=None leaves it there"
            )
            self._take_buffers()
        options = self._read()
        if options != self._options:
            self._options = options
            for place in self._places.values():
                place.momentum.ranges = self._ranges(place.groups, options)

    @override
    def update_(
        self, bucket: Bucket, used: NDArray[np.bool_], *, grad_scale: float, continues: bool
    ) -> None:
        """Add weight decay, where it is this rank's."""
        self._velocity_is_loaded = False
        if continues:  # what belongs to one step is added up, so all of it has the same unit
            return
        self.at_once = self._sends_few()
        # Without momentum weight decay can stay where it is.
        param_groups = self._optimizer.param_groups
        self._decays = [bool(group["momentum"]) for group in param_groups]
        decays = [
            group["weight_decay"] if here else 0.0
            for group, here in zip(param_groups, self._decays, strict=True)
        ]
        if not any(decays):
            return
        groups, views = self._places[id(bucket)].groups.groups, bucket.views
        for position in np.flatnonzero(used).tolist():
            number = groups[position]
            if number is None or not (decay := decays[number]):
                continue
            if param_groups[number]["maximize"]:  # which negates what it is given
                decay = -decay
            views[position].add_(bucket.parameters[position].detach(), alpha=decay * grad_scale)

    @override
    def velocity_is_loaded(self) -> None:
        """The velocities are those of a saved session: this rank's own. What a script loads into
        its optimizer besides may be another rank's.
        """
        self._velocity_is_loaded = True

    @override
    def leaves_plain_steps(self) -> bool:
        return True

    @override
    def rates(self) -> list[float]:
        """Learning rates as the optimizer has them during its step."""
        rates = rates_of(self._optimizer)
        if not self.at_once:
            return rates
        return [rate / (1 - factor) for rate, (factor, _) in zip(rates, self._options, strict=True)]

    @override
    def give_back(self) -> None:
        """Momentum begins anew in the optimizer, since velocities differ from rank to rank."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._show_options()

    # Events

    @override
    def on_before_update(self) -> None:
        """Hide from the optimizer what has been applied."""
        self._show_options()  # a step that raised was not followed by `on_after_step`
        groups = self._optimizer.param_groups
        self._shown = [{name: group[name] for name in _HIDDEN} for group in groups]
        for group, has_decayed in zip(groups, self._decays, strict=False):
            if self.at_once and group["momentum"]:
                group["lr"] = group["lr"] / (1 - group["momentum"])
            group["momentum"] = 0.0
            if has_decayed:
                group["weight_decay"] = 0.0

    @override
    def on_after_step(self) -> None:
        self._show_options()

    def _show_options(self) -> None:
        for group, shown in zip(self._optimizer.param_groups, self._shown, strict=False):
            group.update(shown)
        self._shown = []

    # The optimizer's state

    def _show_buffers(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        if self.at_once and not self._has_said_no_buffer:
            self._has_said_no_buffer = True
            self._inform(_NO_BUFFER)
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters())}
        for parameter, velocity, sign in self._velocities():
            if sign and velocity.any():  # a buffer of zeros is as good as none
                entry = state["state"].setdefault(numbers[id(parameter)], {})
                entry[_BUFFER] = (sign * velocity).to(parameter.dtype)

    def _loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """What was loaded is what the user has set."""
        self.take()
        self._take_buffers()

    def _take_buffers(self) -> None:
        """A momentum that the optimizer has gathered is the same on all ranks, so each begins with
        it.
        """
        state = self._optimizer.state
        for parameter, velocity, sign in self._velocities():
            gathered = state[parameter].pop(_BUFFER, None) if parameter in state else None
            if gathered is not None and not self._velocity_is_loaded:
                velocity.copy_(sign * gathered)

    def _velocities(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, float]]:
        """Each parameter, its part of the velocity, and the sign of the optimizer's buffer, which
        is negative where it maximizes; 0 for parameters that it does not have.
        """
        param_groups = self._optimizer.param_groups
        for place in self._places.values():
            velocity = None if place.applied_by is None else place.applied_by.velocity
            assert velocity is not None, "nothing applies this momentum"
            for parameter, view, number in zip(
                place.bucket.parameters,
                place.bucket.views_of(velocity),
                place.groups.groups,
                strict=True,
            ):
                if number is None:
                    yield parameter, view, 0.0
                else:
                    yield parameter, view, -1.0 if param_groups[number]["maximize"] else 1.0

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        """In the order in which a state dictionary numbers them."""
        for group in self._optimizer.param_groups:
            yield from group["params"]

    def _read(self) -> list[tuple[float, bool]]:
        groups = self._optimizer.param_groups
        return [(float(group["momentum"]), bool(group["nesterov"])) for group in groups]

    @staticmethod
    def _ranges(groups: GroupRanges, options: Sequence[tuple[float, bool]]) -> list[MomentumRange]:
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
