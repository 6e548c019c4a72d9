"""The state of the local optimizers (momenta, second moments), averaged as the weights are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.codec.device_copies import on_device, read_numbers
from offbeat.collectives.dense import gather_values
from offbeat.errors import ConfigError
from offbeat.transport.driver import Driver, Stream
from offbeat.weights.model_weights import average_

Presence = dict[str, list[bool]]
"""By name of a state such as "momentum_buffer": which parameters have it, in the model's order, by
name ascending.
"""


def average_optimizer_state_(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    *,
    driver: Driver,
    stream: Stream,
    notify: Callable[[str], None],
    due: Mapping[str, bool] | None = None,
) -> float:
    """Replace the states of every parameter, as far as `OptimizerStates` has them, by their means
    over the ranks that have them. Collective.

    A rank on which a parameter never had a gradient has no state for it, and is given the mean.

    Args:
        optimizer: this rank's.
        parameters: by name, the same set on all ranks.
        driver: carries collectives out.
        stream: of channels.
        notify: is told each time which states of this rank are not averaged, if there are any.
        due: which states are averaged now, by name such as "exp_avg", at least one of them; others
            stay local, but for numbers of steps, which go with what they correct. None: all are.

    Returns:
        Seconds as `average_` counts them.

    Raises:
        NonFiniteError: as `average_`.
        ConfigError: a name of `due` is none of a state that is merged; every rank raises.
    """
    tensors = list(parameters.values())
    states = OptimizerStates(optimizer, tensors)
    mine = states.presence()
    present = driver.run(gather_values(packed(mine)), stream.next())
    shares = shares_of_states(present, [1.0] * len(present), num_parameters=len(tensors))
    names = names_of_merged(shares)
    if due is not None and names:
        if unknown := sorted(due.keys() - {name.partition(":")[0] for name in names}):
            raise ConfigError(
                f"optimizer_state names {', '.join(map(repr, unknown))}, and the states of"
                f" {type(optimizer).__name__} that can be averaged are"
                f" {', '.join(repr(name) for name in names if ':' not in name)}"
            )
        # Of a parameter of shape () all states are single numbers.
        names = [name for name in names if due.get(name.partition(":")[0], ":" in name)]
    merged = {name: states.tensors(name) for name in names}
    apart = [name for name in names_of_merged(shares) if name not in merged and ":" not in name]
    kept = [states.tensors(name) for name in apart] if "exp_avg" in merged else []
    places = [(name, i) for name in merged for i in np.flatnonzero(shares[name]).tolist()]
    here = [merged[name][i] for name, i in places]
    encode_s = average_(
        here,
        # A state may have another type than its parameter, which a rank without it cannot know.
        [
            _like(name, tensors[i]) if state.dim() else state
            for (name, i), state in zip(places, here, strict=True)
        ],
        driver=driver,
        stream=stream,
        weight=1.0,
        absent={
            place for place, (name, i) in enumerate(places) if name not in mine or not mine[name][i]
        },
    )
    if kept:
        # What no gradient of this rank has reached yet, such as an embedding's row of which it had
        # no batch, has squares of 0, and would move without a bound by its peers' momentum.
        for momentum, *others in zip(merged["exp_avg"], *kept, strict=True):
            momentum.masked_fill_(reduce(torch.logical_and, [each == 0 for each in others]), 0)
    states.take(merged, shares)
    if _OTHER in mine and (remark := notice_of_local_states(optimizer, parameters)) is not None:
        notify(remark)
    return encode_s


_OTHER = ":other"
"""In the place of a name: the parameter has a state that is not merged. The name of a single number
ends in ":tensor", ":int" or ":float", which is what it is kept as.
"""


def notice_of_local_states(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]
) -> str | None:
    """For the user, where states stay each rank's own although states are to be averaged; None:
    there are none.
    """
    local = OptimizerStates(optimizer, list(parameters.values())).local_names()
    if not local:
        return None
    return (
        f"of {type(optimizer).__name__}'s state {', '.join(map(repr, local))} stay each rank's own"
        " where the rest is averaged: only real tensors of their parameter's shape, Adafactor's"
        " means of rows and columns, and single numbers beside them have means that are known to be"
        " right; optimizer_state='local' averages none"
    )


_MEANS: Mapping[str, Callable[[Sequence[int]], tuple[int, ...]]] = {
    "row_var": lambda shape: (*shape[:-1], 1),
    "col_var": lambda shape: (*shape[:-2], 1, shape[-1]),
}
"""The states of Adafactor that are means of squared gradients over rows and over columns, and their
shapes by that of the parameter. The mean over ranks of such a mean is that of the ranks' squares.
"""


def _shape(key: str, parameter: torch.Tensor) -> tuple[int, ...]:
    """That of a merged state of `parameter`."""
    if key in _MEANS and parameter.dim() > 1:
        return _MEANS[key](parameter.shape)
    return tuple(parameter.shape)


def _like(key: str, parameter: torch.Tensor) -> torch.Tensor:
    """A tensor of the shape of a merged state, for nobody to look into or to write to."""
    shape = _shape(key, parameter)
    return parameter if shape == parameter.shape else parameter.detach().new_empty(shape)


class OptimizerStates:
    """The states of an optimizer as tensors that are merged beside the model: those that have their
    parameter's shape, Adafactor's means of rows and columns, and single numbers, such as the number
    of steps by which Adam corrects its moments. Each is merged over the ranks that have it, and a
    rank without it is given the mean.

    A number of steps is merged because the moments are: a rank that counted on with its own would
    correct its peers' moments by it, and take steps of a wrong length. It is not rounded, unless it
    is an integer: where few ranks use a parameter, averages add less than half a step each.

    States of other shapes stay local. Of a parameter that has one, or of whose states only some are
    merged, a rank without states is given none, since its optimizer could not go on with some.

    Args:
        optimizer: the user's.
        parameters: in the model's order.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]
    ) -> None:
        self._optimizer = optimizer
        self._parameters = parameters

    def presence(self) -> Presence:
        """Which parameters have which states."""
        found = [_names(states) for states in self._found()]
        names = sorted({name for each in found for name in each})
        return {name: [name in each for each in found] for name in names}

    def local_names(self) -> list[str]:
        """The states that this rank has and that are not merged, ascending."""
        local = set()
        for states in self._found():
            merged = _names(states) - {_OTHER}
            local |= {key for key, state in states.items() if state.name not in merged}
        return sorted(local)

    def tensors(self, name: str) -> list[torch.Tensor]:
        """One tensor a parameter: its state of this name, or a copy of a single number, of shape
        (). Zeros where it has none.
        """
        key, _, kind = name.partition(":")
        states = [each.get(key) for each in self._found()]
        found = [None if state is None or state.name != name else state.value for state in states]
        if kind:
            return _numbers([float(value or 0) for value in found], self._parameters)
        return [
            torch.zeros_like(_like(key, parameter.detach())) if value is None else value
            for value, parameter in zip(found, self._parameters, strict=True)
        ]

    def _found(self) -> list[dict[str, _State]]:
        """Of each parameter, its states by key. The host waits for a device once."""
        states = [
            {k: v for k, v in dense_state(self._optimizer, each).items() if v is not None}
            for each in self._parameters
        ]
        singles = [v for each in states for v in each.values() if _is_single(v)]
        numbers = iter(read_numbers(singles) if singles else ())
        return [
            {
                key: _state(parameter, key, value, next(numbers) if _is_single(value) else value)
                for key, value in each.items()
            }
            for parameter, each in zip(self._parameters, states, strict=True)
        ]

    def zeros(self, name: str) -> list[torch.Tensor]:
        """As `tensors` where no parameter has the state. Looks at no state."""
        if ":" in name:
            return _numbers([0.0] * len(self._parameters), self._parameters)
        return [torch.zeros_like(_like(name, each.detach())) for each in self._parameters]

    def kept(self, name: str, num_steps: int) -> list[float | None]:
        """Which part of a running average is left after so many steps of the optimizer, for each
        parameter; None: the state is none, or the optimizer does not say.
        """
        options = self._options()
        factors = [_decay(name, options.get(parameter, {})) for parameter in self._parameters]
        return [None if factor is None else factor**num_steps for factor in factors]

    def _options(self) -> dict[torch.Tensor, Mapping[str, Any]]:
        """Of the optimizer, by parameter."""
        groups = self._optimizer.param_groups
        return {parameter: group for group in groups for parameter in group["params"]}

    def take(
        self, merged: Mapping[str, Sequence[torch.Tensor]], shares: Mapping[str, Sequence[float]]
    ) -> None:
        """Take merged states over. Where a parameter had one of its shape, it was merged in place.

        Args:
            merged: the means, as `tensors`, by name. They become this optimizer's.
            shares: by name, for each parameter: above 0 where a rank had the state.
        """
        options = self._options()
        singles = [name for name in merged if ":" in name]
        read = iter(read_numbers([tensor for name in singles for tensor in merged[name]]))
        numbers = {name: [next(read) for _ in self._parameters] for name in singles}
        for number, parameter in enumerate(self._parameters):
            given = {
                name: tensors[number] for name, tensors in merged.items() if shares[name][number]
            }
            state = self._optimizer.state.get(parameter, {})
            has_none = all(value is None for value in state.values())
            is_part = any(shares[name][number] for name in shares if name not in merged)
            # One that this rank's optimizer does not step has a state that it could not save.
            if not given or (has_none and is_part) or parameter not in options:
                continue
            if has_none:
                state = self._optimizer.state[parameter]
            for name, mean in given.items():
                key, _, kind = name.partition(":")
                if kind and (has_none or key in state):
                    before = state.get(key)
                    value = numbers[name][number]
                    if kind == "int" or _is_integer(before):
                        value = round(value)
                    if isinstance(before, torch.Tensor):
                        before.fill_(value)
                    elif kind == "tensor":
                        state[key] = new_number(key, value, parameter, options.get(parameter, {}))
                    else:
                        state[key] = value
                elif has_none:
                    state[key] = mean


class _State(NamedTuple):
    """A state of a parameter.

    Attributes:
        name: as in `Presence`.
        value: itself; of a single number that is a tensor, the number.
    """

    name: str
    value: Any


def _names(states: Mapping[str, _State]) -> set[str]:
    """Of a parameter's states. Where one is not merged, no single number is either, since it may
    count what the other one holds.
    """
    found = {state.name for state in states.values()}
    return {name for name in found if ":" not in name} | {_OTHER} if _OTHER in found else found


def _is_single(value: object) -> bool:
    """Whether it is a tensor of shape ()."""
    return isinstance(value, torch.Tensor) and not value.dim()


def _state(parameter: torch.Tensor, key: str, value: object, number: Any) -> _State:
    """`value` of `parameter`; `number`: what it holds, if it is a tensor of shape ()."""
    if isinstance(value, torch.Tensor) and value.dim():
        fits = value.shape == _shape(key, parameter) and value.is_floating_point()
        return _State(key if fits else _OTHER, value)
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or not math.isfinite(number):
        return _State(_OTHER, value)
    is_tensor = isinstance(value, torch.Tensor)
    kind = "tensor" if is_tensor else "int" if isinstance(number, int) else "float"
    return _State(f"{key}:{kind}", number)


def _is_integer(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_floating_point()


def _numbers(values: Sequence[float], parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """One tensor a parameter, of shape (): as wide as the parameter is when it travels, and on its
    device, so that they travel alike.
    """
    kinds = [
        (parameter.device, parameter.dtype in (torch.float64, torch.complex128))
        for parameter in parameters
    ]
    # Made together, since a copy to another device takes long, however small it is.
    made = {
        (device, is_wide): on_device(
            torch.tensor(values, dtype=torch.float64 if is_wide else torch.float32), device
        ).unbind()
        for device, is_wide in set(kinds)
    }
    return [made[kind][number] for number, kind in enumerate(kinds)]


def new_number(
    key: str, value: float, parameter: torch.Tensor, options: Mapping[str, Any]
) -> torch.Tensor:
    """A single number of an optimizer's state as the optimizers of torch make theirs.

    Args:
        key: its name, such as "step".
        value: what it holds.
        parameter: whose state it is.
        options: of the parameter's group.
    """
    if key != "step" and not parameter.dim():
        return torch.full_like(parameter.detach(), value)  # It has its parameter's shape too.
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
    is_on_device = options.get("capturable") or options.get("fused")
    return torch.full(
        (),
        value,
        dtype=torch.float32 if options.get("fused") else dtype,
        device=parameter.device if is_on_device else None,
    )


def names_of_merged(shares: Mapping[str, Sequence[float]]) -> list[str]:
    """Of the states that are merged, ascending."""
    return sorted(shares.keys() - {_OTHER})


def shares_of_states(
    present: Sequence[Sequence[tuple[str, str]]], weights: Sequence[float], *, num_parameters: int
) -> dict[str, list[float]]:
    """By name of a state, for each parameter: which part of all weights the ranks have that have
    the state, in [0, 1]; exactly 1 where all ranks with a weight have it.

    Args:
        present: of each rank, `packed(OptimizerStates.presence())`.
        weights: of each rank, >= 0, not all zero.
        num_parameters: of the model.
    """
    everywhere = np.zeros(num_parameters)
    found: dict[str, NDArray[np.float64]] = {}
    # Added in the same order, so that what is equal is so to the bit.
    for states, weight in zip(present, weights, strict=True):
        everywhere += weight
        found |= {name: np.zeros(num_parameters) for name, _ in states if name not in found}
        for name, total in found.items():
            if digits := dict(states).get(name):
                total += weight * np.array([digit == "1" for digit in digits])
    return {name: (total / everywhere).tolist() for name, total in sorted(found.items())}


def packed(presence: Presence) -> tuple[tuple[str, str], ...]:
    """For a message: by name, ascending, 1 for each parameter that has the state, and 0."""
    return tuple((name, "".join("01"[one] for one in have)) for name, have in presence.items())


def dense_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Mapping[str, Any]:
    """The state of `parameter`. What is sparse in it becomes dense for good: torch's SGD keeps the
    momentum of a sparse gradient sparse.

    Such a momentum has every row that ever had a gradient, so that a dense one takes no more memory
    in the end.
    """
    state: dict[str, Any] = optimizer.state.get(parameter, {})
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.is_sparse:
            state[key] = value.to_dense()
    return state


_SUMS = {"momentum_buffer", "exp_avg", "sum", "step"}


def is_sum(name: str) -> bool:
    """Whether states of this name may be moved by differences, as parameters are: momenta, numbers
    of steps, and Adagrad's sum, which only grows. Of others, such as Adam's running average of
    squares, a difference could make a negative number.
    """
    return name.partition(":")[0] in _SUMS


def _decay(name: str, options: Mapping[str, Any]) -> float | None:
    """What a step multiplies a state of this name by, before it adds to it; None: unknown."""
    betas = options.get("betas") or (None, None)
    found = {
        "momentum_buffer": options.get("momentum"),
        "exp_avg": betas[0],
        "exp_avg_sq": betas[-1],
    }.get(name)
    return None if found is None else float(found)


_DIVIDING = ("adam", "adagrad", "adadelta", "adafactor", "rmsprop")


def divides_by_squares(optimizer: torch.optim.Optimizer) -> bool:
    """Whether steps are divided by the root of squared gradients, as the optimizer's name, or that
    of a class it derives from, says: those named here, and their variants.
    """
    return _is_one_of(_DIVIDING, optimizer)


_DECAYING_APART = ("adamw", "adafactor", "muon")


def decays_apart(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether the weight decay of a group of the optimizer is decoupled: multiplied by the learning
    rate, and no part of the gradient. The group says so, or the optimizer's name, as in
    `divides_by_squares`.
    """
    is_decoupled = group.get("decoupled_weight_decay") or _is_one_of(_DECAYING_APART, optimizer)
    return "weight_decay" in group and bool(is_decoupled)


def _is_one_of(words: Sequence[str], optimizer: torch.optim.Optimizer) -> bool:
    names = [kind.__name__.lower() for kind in type(optimizer).__mro__]
    return any(word in name for name in names for word in words)
