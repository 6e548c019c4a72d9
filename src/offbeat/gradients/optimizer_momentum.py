"""SGD's momentum, taken over from the user's optimizer for as long as a session lasts.

Where only the largest entries travel, momentum has to be applied before they are selected (momentum
correction, DGC, arXiv 1712.01887, section 3.1). So each rank keeps a velocity of its own, and the
optimizer has no momentum during its step. Left there, it costs 8 points
(`benchmarks/sparse_accuracy.py`, images, union, optimizer's momentum), and spread where it may be
applied at once, 4 (momentum spread). With it goes weight decay, which SGD adds to the gradient
before momentum: left where it is it would be as good as `1 / (1 - momentum)` times weaker.

    velocity = factor * velocity + gradient
    step     = velocity, or gradient + factor * velocity with Nesterov's momentum

which is SGD's momentum as PyTorch has it. DGC writes Nesterov's with m = factor * velocity, which
comes to the same. DGC's factor masking (section 3.2), which clears the velocity wherever an entry
was sent, takes momentum away and is left out.

A gradient moves the parameter by 1 / (1 - factor) of itself in the end, spread over as many steps
or so. Where it waits for longer than that before it is sent, spreading it first only makes it
later, and late momentum overshoots. So where few entries travel it is applied at once:

    step     = gradient + share * velocity
    velocity = 0

while the optimizer's learning rate is 1 / (1 - factor) times as high. That comes to the same sum of
steps, and whoever clips the step clips the gradient. The share is (1 - factor) times what a
velocity without further gradients would have added: factor + factor^2 + ... = factor / (1 - factor)
times itself. Nesterov's momentum has looked ahead along it by one term already, so factor^2 +
factor^3 + ... is left.

Difference from PyTorch: a parameter that no rank uses in a step is moved all the same by what its
velocity still holds, and not only once it is used again: a rank does not know in time whether its
peers use it. The sum of all moves is the same.

Outside `optimizer.step()` everything reads as PyTorch would show it: `param_groups` have the values
that the user has set, and may be changed, and `optimizer.state_dict()` has `momentum_buffer`, which
is this rank's velocity. Where momentum is applied at once there is none, and a notice says so.

Memory: two buffers of the gradient's size, one where momentum is always applied at once, in float32
for half precision, which takes a further one while a step lasts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from offbeat.callbacks.callback import CallbackState
from offbeat.callbacks.context import Context
from offbeat.codec.jit import kernel
from offbeat.gradients.buckets import Bucket
from offbeat.gradients.exchange import GradientTransform
from offbeat.gradients.parameter_groups import (
    GroupRanges,
    coupled_decay,
    numbers_in_state,
    rates_of,
)
from offbeat.gradients.reductions import Reduction, WeightedGradient

_NO_BUFFER: Final = (
    "optimizer.state_dict() has no momentum_buffer, since at this density SGD's momentum is applied"
    " at once (momentum_correction='auto'); what of it has not been sent yet is owed, and"
    " session.state_dict() has that"
)
_BUFFER: Final = "momentum_buffer"
_HIDDEN: Final = ("lr", "momentum", "weight_decay")


@dataclass(slots=True)
class _State:
    """The momentum of one bucket.

    Attributes:
        bucket: whose gradients have it.
        reduction: of the bucket.
        groups: the optimizer's groups of its elements.
        velocity: of the steps that were applied, shape (n,).
        staged: the velocity after the step under way, once `is_staged`; empty before the first one.
        is_staged: whether it moves in this step.
        is_zero: whether the velocity is zero, so that momentum at once costs no pass; None: not
            known.
        moved: positions of the parameters whose velocity the step under way has moved.
    """

    bucket: Bucket
    reduction: Reduction
    groups: GroupRanges
    velocity: torch.Tensor
    staged: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    is_staged: bool = False
    is_zero: bool | None = True
    moved: set[int] = field(default_factory=set)


class OptimizerMomentum(GradientTransform):
    """Momentum and weight decay of an SGD optimizer, while they are not the optimizer's.

    Nothing is taken before `take` is called.

    Args:
        context: lent by the session; its optimizer is a `torch.optim.SGD` with momentum, which it
            does not dampen.
    """

    what: ClassVar[str] = "momentum"
    is_taken = True

    def __init__(self, context: Context) -> None:
        assert context.optimizer is not None
        super().__init__(context.optimizer)
        self._world_size = context.driver.world_size
        self._optimizer, self._inform = context.optimizer, context.notices.inform
        self._states: dict[int, _State] = {}
        self._at_once = False  # in this step all of a gradient's momentum is applied
        self._options: list[tuple[float, bool]] = []  # by group: momentum, and whether Nesterov's
        self._decays: list[bool] = []  # by group: whether decay is in the gradient of the next step
        self._shown: list[dict[str, Any]] = []  # by group, during a step: what the user set
        self._velocity_is_loaded = self._has_said_no_buffer = False

    @override
    def init(self, bucket: Bucket, reduction: Reduction) -> None:
        velocity = torch.zeros_like(bucket.flat, dtype=bucket.state_dtype)
        groups = GroupRanges(bucket, self._optimizer)
        self._states[id(bucket)] = _State(bucket, reduction, groups, velocity)

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
        self._show_options()  # a step that raised was not followed by `on_after_step`
        groups = self._optimizer.param_groups
        self._options = [(float(group["momentum"]), bool(group["nesterov"])) for group in groups]

    @override
    def update(
        self, bucket: Bucket, given: WeightedGradient, continues: NDArray[np.bool_]
    ) -> WeightedGradient:
        """Add weight decay, and apply momentum."""
        self._velocity_is_loaded, goes_on = False, bool(continues.any())
        if not goes_on:  # what belongs to one step is added up, so all of it has the same unit
            self._at_once = self._density is not None and self._density.sends_few()
        param_groups, state = self._optimizer.param_groups, self._states[id(bucket)]
        if not goes_on:
            state.moved.clear()
        self._decays = [bool(group["momentum"]) for group in param_groups]
        decays = [self._decay_of(number) for number in range(len(param_groups))]
        state.groups.add_decay_(given.tally.used, decays, given.grad_scale, continues=goes_on)
        if self._at_once and state.is_zero is None:
            state.is_zero = not state.velocity.any()
        if self._at_once and state.is_zero:
            return given
        state.is_staged = True
        if not state.staged.numel():
            state.staged = torch.empty_like(state.velocity)
        step = bucket.flat.to(bucket.state_dtype)
        mix = mix_by_kernel if step.device.type == "cpu" else mix_by_torch
        for here, (factor, nesterov) in state.groups.merged(self._options, default=(0.0, False)):
            scale, at_once = 1 / given.grad_scale, self._at_once
            shares = shares_of(factor, nesterov, scale, continues=goes_on, at_once=at_once)
            mix(step[here], state.velocity[here], shares, state.staged[here])
        for position, (parameter, here) in enumerate(
            zip(bucket.parameters, bucket.places, strict=True)
        ):
            # What is frozen, and has no gradient from before that, rests, as in the optimizer.
            if not (parameter.requires_grad or given.tally.used[position]):
                step[here] = 0
                state.staged[here] = state.velocity[here]
                continue
            number, is_late = state.groups.groups[position], goes_on and not self._at_once
            if is_late and number is not None and position not in state.moved:
                # It was frozen in the step's passes so far, so that its velocity moves now.
                factor, nesterov = self._options[number]
                if factor:
                    looks = factor * factor if nesterov else factor
                    step[here].add_(state.velocity[here], alpha=looks)
                    state.staged[here].sub_(state.velocity[here], alpha=1 - factor)
            state.moved.add(position)
        return given._replace(gradient=step, weight=given.weight * given.grad_scale)

    @override
    def settle(self, *, good: bool) -> None:
        for state in self._states.values():
            if state.is_staged and good:
                state.velocity, state.staged = state.staged, state.velocity
                state.is_zero = None if self._at_once else False
            state.is_staged = False
            if good:
                self._make_up_decay(state)

    def _make_up_decay(self, state: _State) -> None:
        """A parameter that any rank has used has all of its weight decay, and which ranks have not
        used it is known only now. They pass theirs on by the velocity: the coming step and those
        after it have as much of it as of a gradient.
        """
        for position, number in state.groups.undecayed(state.reduction.tally.used):
            decay, (factor, nesterov) = self._decay_of(number), self._options[number]
            if decay:
                view = state.bucket.views_of(state.velocity)[position]
                passed_on = factor * factor if nesterov else factor
                view.add_(state.bucket.parameters[position].detach(), alpha=decay / passed_on)
                state.is_zero = False

    def _decay_of(self, number: int) -> float:
        """The weight decay of a group; without momentum it can stay where it is."""
        group = self._optimizer.param_groups[number]
        return coupled_decay(group) if group["momentum"] and group["weight_decay"] else 0.0

    @override
    def leaves_plain_steps(self) -> bool:
        return True

    @override
    def rates(self) -> list[float]:
        """Learning rates as the optimizer has them during its step."""
        rates = rates_of(self._optimizer)
        if not self._at_once:
            return rates
        return [rate / (1 - factor) for rate, (factor, _) in zip(rates, self._options, strict=True)]

    @override
    def give_back(self) -> None:
        """Momentum begins anew in the optimizer, since velocities differ from rank to rank."""
        super().give_back()
        self._show_options()

    # Events

    @override
    def on_before_update(self) -> None:
        """Hide from the optimizer what has been applied."""
        groups = self._optimizer.param_groups
        self._shown = [{name: group[name] for name in _HIDDEN} for group in groups]
        for group, has_decayed in zip(groups, self._decays, strict=False):
            if self._at_once and group["momentum"]:
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

    # State

    @override
    def state_dict(self) -> CallbackState:
        replicated = super().state_dict()["replicated"] | {"world_size": self._world_size}
        return {"additive": self._named(), "replicated": replicated}

    @override
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """A run that was saved while the optimizer had its momentum goes on with what that
        gathered. Else the velocities are this rank's own, and what a script loads into its
        optimizer besides may be another rank's. With another number of ranks than before the mean
        of the velocities is preserved, and not their sum: they are averages of gradients.
        """
        additive = state.get("additive", {})
        super().load_state_dict(state)
        self._velocity_is_loaded = bool(additive)
        for name, velocity in self._named().items():
            if name in additive:
                velocity.copy_(additive[name])
                velocity.mul_(self._world_size / state["replicated"]["world_size"])
        self._look_anew()

    def _named(self) -> dict[str, torch.Tensor]:
        named = dict[str, torch.Tensor]()
        for state in self._states.values():
            named |= state.bucket.named("velocity", state.velocity)
        return named

    def _look_anew(self) -> None:
        """Velocities have been written."""
        for state in self._states.values():
            state.is_zero = None

    # The optimizer's state

    def _show_buffers(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        # A step that was interrupted has left them as the optimizer was to find them.
        for group, shown in zip(state["param_groups"], self._shown, strict=False):
            group.update(shown)
        if self._at_once and not self._has_said_no_buffer:
            self._has_said_no_buffer = True
            self._inform(_NO_BUFFER)
        numbers = numbers_in_state(optimizer)
        for parameter, velocity, sign in self._velocities():
            if sign and velocity.any():  # a buffer of zeros is as good as none
                number = numbers[id(parameter)]
                buffer = (sign * velocity).to(parameter.dtype)
                # In a new entry: one that is there is the optimizer's own.
                state["state"][number] = {**state["state"].get(number, {}), _BUFFER: buffer}

    def _loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """What was loaded is what the user has set."""
        self._shown = []
        self.take()
        self._take_buffers()

    def _take_buffers(self) -> None:
        """A momentum that the optimizer has gathered is the same on all ranks, so each begins with
        it.
        """
        state = self._optimizer.state
        for parameter, velocity, sign in self._velocities():
            gathered = state[parameter].pop(_BUFFER, None) if parameter in state else None
            if self._velocity_is_loaded:
                continue
            if gathered is None:  # a state of before the first step has none
                velocity.zero_()
            else:
                velocity.copy_(sign * gathered)
        self._look_anew()

    def _velocities(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, float]]:
        """Each parameter, its part of the velocity, and the sign of the optimizer's buffer."""
        for state in self._states.values():
            views = state.bucket.views_of(state.velocity)
            yield from zip(state.bucket.parameters, views, state.groups.signs, strict=True)

    def _description(self) -> str:
        groups = self._optimizer.param_groups
        momenta = sorted({group["momentum"] for group in groups if group["momentum"]})
        with_decay = any(group["momentum"] and group["weight_decay"] for group in groups)
        text = f"momentum {', '.join(f'{momentum:g}' for momentum in momenta)}"
        return text + (" and weight decay" if with_decay else "")


Shares: TypeAlias = tuple[float, float, float, float]
"""(a, b, c, d): step = a * gradient + b * velocity; new velocity = c * gradient + d * velocity."""


def shares_of(
    factor: float, nesterov: bool, weight: float, *, continues: bool, at_once: bool
) -> Shares:
    """What a step and the velocity after it are made of.

    Args:
        factor: of momentum, in [0, 1).
        nesterov: whether the step looks ahead along the velocity.
        weight: what the gradient is to be multiplied by.
        continues: whether the gradient belongs to the same optimizer step as the last one: then the
            velocity has lost its share already, and only what is new is passed on.
        at_once: whether the step, at a learning rate of 1 / (1 - factor) times the user's, is all
            that gradient and velocity will ever move the parameters by.
    """
    if factor == 0:  # as in PyTorch, where a buffer rests while there is no momentum
        return weight, 0.0, 0.0, 1.0
    if at_once:
        return weight, factor * factor if nesterov else factor, 0.0, 0.0
    of_gradient = weight * (1 + factor) if nesterov else weight
    if continues:
        return of_gradient, 0.0, weight, 1.0
    return of_gradient, factor * factor if nesterov else factor, weight, factor


def mix_by_kernel(
    flat: torch.Tensor, velocity: torch.Tensor, shares: Shares, new_velocity: torch.Tensor
) -> None:
    """Write the step into `flat`, which holds the gradient, and the new velocity, in one pass on
    the CPU.
    """
    values = flat.numpy()
    _mix(values, velocity.numpy(), np.array(shares, dtype=values.dtype), new_velocity.numpy())


@kernel
def _mix(
    flat: NDArray[np.floating],
    velocity: NDArray[np.floating],
    shares: NDArray[np.floating],
    new_velocity: NDArray[np.floating],
) -> None:
    """flat, new_velocity = a * flat + b * velocity, c * flat + d * velocity.

    Args:
        flat: shape (n,), overwritten.
        velocity: shape (n,).
        shares: a, b, c, d, of the same dtype.
        new_velocity: shape (n,), overwritten.
    """
    a, b, c, d = shares[0], shares[1], shares[2], shares[3]
    for i in range(flat.size):
        gradient, before = flat[i], velocity[i]
        flat[i] = a * gradient + b * before
        new_velocity[i] = c * gradient + d * before


def mix_by_torch(
    flat: torch.Tensor, velocity: torch.Tensor, shares: Shares, new_velocity: torch.Tensor
) -> None:
    """The same on any device."""
    a, b, c, d = shares
    torch.mul(velocity, d, out=new_velocity).add_(flat, alpha=c)
    if (a, b) == (c, d):
        flat.copy_(new_velocity)
    else:
        flat.mul_(a).add_(velocity, alpha=b)


def reason_against_momentum(optimizer: torch.optim.SGD) -> str | None:
    """Why the momentum of `optimizer` cannot be taken over; None: it can."""
    if any(group["dampening"] for group in optimizer.param_groups):
        return "the optimizer dampens its momentum"
    largest = max(float(group["momentum"]) for group in optimizer.param_groups)
    return f"momentum {largest:g} never ends" if largest >= 1 else None
