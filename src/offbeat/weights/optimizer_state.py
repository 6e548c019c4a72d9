"""The state of the local optimizers (momenta, second moments): averaged as the weights are, or, of
momenta alone, as tensors that a background average takes along.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from offbeat.collectives.dense import gather_values
from offbeat.errors import ConfigError
from offbeat.transport.driver import Driver, Stream
from offbeat.transport.operations import Collective
from offbeat.weights.model_weights import average_

Presence = dict[str, list[bool]]
"""By name of a state such as "momentum_buffer": which parameters have it, in the model's order."""

_MOMENTUM_BY_OPTION = {"momentum": "momentum_buffer", "betas": "exp_avg"}
"""By the option which says that an optimizer has a momentum: what it calls it in its state."""


def average_optimizer_state_(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    *,
    driver: Driver,
    stream: Stream,
    weight: float,
) -> float:
    """Replace every state of a parameter's own shape and a real type by its weighted mean over the
    ranks that have it.

    A rank on which a parameter never had a gradient has no state for it: it has no weight and gets
    no state. Step counters and states of other shapes stay local. Collective.

    Args:
        optimizer: this rank's.
        parameters: by name, the same set on all ranks.
        driver: carries collectives out.
        stream: of channels.
        weight: this rank's, >= 0.

    Returns:
        Seconds as `average_` counts them.

    Raises:
        NonFiniteError: as `average_`.
    """
    tensors = list(parameters.values())
    states = [shaped_state(optimizer, parameter) for parameter in tensors]
    mine: Presence = {
        key: [key in state for state in states]
        for key in sorted({key for state in states for key in state})
    }
    somewhere = driver.run(_union(mine, len(tensors)), stream.next())
    places = [(key, i) for key, have in somewhere.items() for i in np.flatnonzero(have).tolist()]
    return average_(
        [states[i].get(key) for key, i in places],
        [tensors[i] for _, i in places],
        driver=driver,
        stream=stream,
        weight=weight,
    )


def shaped_state(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The states of the parameter's own shape and a real type."""
    return {
        key: value
        for key, value in dense_state(optimizer, parameter).items()
        if isinstance(value, torch.Tensor)
        and value.shape == parameter.shape
        and value.is_floating_point()
        and value.dim()
    }


class OptimizerStates:
    """The states of an optimizer that have their parameter's shape, as tensors that are merged
    beside the model. One that a rank does not have yet counts as zeros, which is with what all
    optimizers of torch begin, but for Adagrad with an `initial_accumulator_value`.

    Args:
        optimizer: the user's.
        parameters: in the model's order.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]
    ) -> None:
        self._optimizer = optimizer
        self._parameters = parameters

    def names(self) -> tuple[str, ...]:
        """Of the states that any parameter has, ascending."""
        found = {name for each in self._parameters for name in shaped_state(self._optimizer, each)}
        return tuple(sorted(found))

    def tensors(self, name: str) -> list[torch.Tensor]:
        """One tensor a parameter: its state of this name. Zeros that nobody reads afterwards, where
        it has none.
        """
        states = [shaped_state(self._optimizer, each).get(name) for each in self._parameters]
        return [
            torch.zeros_like(parameter.detach()) if state is None else state
            for parameter, state in zip(self._parameters, states, strict=True)
        ]


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


def _union(mine: Presence, num_parameters: int) -> Collective[Presence]:
    """What any rank has, with names in the same order on all of them."""
    packed = {key: np.packbits(have).tobytes().hex() for key, have in mine.items()}
    answers = yield from gather_values(packed)
    union: Presence = {}
    for key in sorted({key for answer in answers for key in answer}):
        bits = np.zeros(num_parameters, dtype=np.bool_)
        for answer in answers:
            raw = np.frombuffer(bytes.fromhex(answer.get(key, "")), dtype=np.uint8)
            bits |= np.unpackbits(raw, count=num_parameters).astype(np.bool_)
        union[key] = bits.tolist()
    return union


_SUMS = {"momentum_buffer", "exp_avg", "sum"}


def is_sum(name: str) -> bool:
    """Whether states of this name may be moved by differences, as parameters are: momenta, and
    Adagrad's sum, which only grows. Of others, such as Adam's running average of squares, a
    difference could make a negative number.
    """
    return name in _SUMS


_DIVIDING = ("adam", "adagrad", "rmsprop")


def divides_by_squares(optimizer: torch.optim.Optimizer) -> bool:
    """Whether steps are divided by the root of squared gradients, as the optimizer's name, or that
    of a class it derives from, says: Adam, Adagrad, RMSprop and their variants.
    """
    names = [kind.__name__.lower() for kind in type(optimizer).__mro__]
    return any(word in name for name in names for word in _DIVIDING)


def momentum_name(optimizer: torch.optim.Optimizer) -> str:
    """What `optimizer` calls a parameter's momentum. Raises `ConfigError` for one that has none."""
    for option, name in _MOMENTUM_BY_OPTION.items():
        if all(group.get(option) for group in optimizer.param_groups):
            return name
    raise ConfigError(
        "momenta='averaged' needs an optimizer with a momentum in all its groups, such as"
        f" SGD(momentum=0.9) or AdamW, got {type(optimizer).__name__} without; pass momenta='local'"
    )


class Momenta:
    """The momenta of an optimizer, in the parameters' order.

    Args:
        optimizer: the user's.
        parameters: by name.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]
    ) -> None:
        self._optimizer = optimizer
        self._parameters = list(parameters.values())
        self._name = momentum_name(optimizer)

    @property
    def complete(self) -> bool:
        """Whether every parameter has its momentum already."""
        return all(self._of(parameter) is not None for parameter in self._parameters)

    def tensors(self) -> Sequence[torch.Tensor]:
        """One tensor a parameter: its momentum, or zeros, for nobody to write to, where it has none
        yet.
        """
        found = [(parameter, self._of(parameter)) for parameter in self._parameters]
        return [
            torch.zeros_like(parameter) if momentum is None else momentum
            for parameter, momentum in found
        ]

    def _of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return dense_state(self._optimizer, parameter).get(self._name)
