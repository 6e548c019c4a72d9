"""An outer optimizer: any optimizer of `torch.optim`, whose gradient is the change that averaged
weights made since the last average.

    pseudo-gradient = anchor - mean
    anchor          = the optimizer's step from the anchor with that gradient

With the mean of models after H local steps and SGD with momentum this is SlowMo (arXiv 1910.00643,
algorithm 1); with Nesterov's momentum, and AdamW as the local optimizer, it is DiLoCo (arXiv
2311.08105, algorithm 1). SGD with a learning rate of 1 and no momentum leaves the mean as it is.

Difference from SlowMo: it divides the change by the local learning rate and multiplies by it again,
which is the same as long as that stays what it is. Here a new learning rate does not rescale the
momentum gathered so far.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from typing_extensions import override

from offbeat.averaging.periodic import TakeMean
from offbeat.codec.device_copies import on_device, on_host
from offbeat.errors import CheckpointError, ConfigError, UnsupportedError
from offbeat.weights.model_weights import restore_, wide

OuterFactory: TypeAlias = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer of the parameters it is given, as
`functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9)` does.
"""


class OuterOptimizer(TakeMean):
    """The anchor, which is where the last average left the weights, and the optimizer that moves
    it. Both are the same on every rank, since the means they are made of are.

    Args:
        parameters: the model's, by name.
        make: makes the optimizer of the anchor's parameters, which are float32 or float64. If it
            has an attribute `offload` that is true, the host's memory holds both between averages.

    Raises:
        ConfigError: `make` returns no optimizer, or one of other parameters.
        UnsupportedError: the optimizer cannot take a step with a dense gradient alone.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], *, make: OuterFactory) -> None:
        self._parameters = parameters
        self._make = make
        self._offloads, self._is_away = bool(getattr(make, "offload", False)), False
        self._anchor, self._optimizer = self._fresh()
        self._has_begun = False

    @property
    def anchor(self) -> Mapping[str, torch.nn.Parameter]:  # type: ignore[override]  # nobody sets it
        """Where the last average left the parameters, by name: on their devices, from now on until
        the next average.
        """
        if self._is_away:
            self._is_away = False
            self._move(on_device)
        return self._anchor

    def _offload(self) -> None:
        if self._offloads:
            self._is_away = True
            self._move(lambda tensor, home: on_host(tensor))
            for device in {each.device for each in self._parameters.values() if each.is_cuda}:
                torch.cuda.current_stream(device).synchronize()

    def _move(self, copied: Callable[[torch.Tensor, torch.device], torch.Tensor]) -> None:
        """Replace the anchor's memory, and that of what the optimizer keeps beside it."""
        for name, anchor in self._anchor.items():
            home = self._parameters[name].device
            anchor.data = copied(anchor.data, home)
            kept = self._optimizer.state.get(anchor, {})
            for key, value in kept.items():
                if isinstance(value, torch.Tensor) and value.dim():
                    kept[key] = copied(value, home)

    @override
    def begin(self) -> None:
        """Take the parameters as they are for the anchor, unless there is one."""
        if not self._has_begun:
            for name, anchor in self.anchor.items():
                anchor.detach().copy_(self._parameters[name].detach())
            self._has_begun = True
            self._offload()

    @override
    def changes(self) -> Iterator[torch.Tensor]:
        return (
            wide(self._parameters[name]) - _begun(anchor, self._parameters[name])
            for name, anchor in self.anchor.items()
        )

    @override
    def merge_(self, changes: Sequence[torch.Tensor] | None) -> None:
        """Replace the parameters by where the outer optimizer takes them, and those that were
        frozen meanwhile by the mean.

        Args:
            changes: the mean of them, which is overwritten; None: the parameters hold the mean.
        """
        for place, (name, anchor) in enumerate(self.anchor.items()):
            parameter = self._parameters[name]
            if parameter.requires_grad:
                anchor.grad = (
                    _begun(anchor, parameter) - parameter.detach()
                    if changes is None
                    else changes[place].neg_()
                )
            elif changes is None:
                anchor.detach().copy_(parameter.detach())  # without a gradient it is not stepped
            else:
                anchor.detach().add_(changes[place])
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)  # a gradient weighs as much as the model
        for name, anchor in self.anchor.items():
            self._parameters[name].detach().copy_(anchor.detach())
        self._offload()

    @override
    def state(self) -> dict[str, Any]:
        """Everything by kind and parameter name; empty before `begin`. Tensors are live ones."""
        if not self._has_begun:
            return {}
        anchors = {f"anchor/{name}": anchor.detach() for name, anchor in self._anchor.items()}
        kept = {
            f"{_prefix(self._optimizer)}{key}/{name}": value
            for name, anchor in self._anchor.items()
            for key, value in self._optimizer.state.get(anchor, {}).items()
            if value is not None
        }
        return anchors | kept

    @override
    def load(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state`; other keys are ignored. Options such as learning rates are not part
        of the state: they are the strategy's.

        Raises:
            CheckpointError: the state is of another model or optimizer; nothing has changed then.
        """
        saved = {
            key: value for key, value in state.items() if key.startswith(("anchor/", "outer/"))
        }
        anchors, optimizer = self._fresh()
        for key in saved:
            if key.startswith("outer/") and not key.startswith(_prefix(optimizer)):
                raise CheckpointError(
                    f"the outer optimizer's state was saved with {key.split('/')[1]}, and this one"
                    f" is {type(optimizer).__name__}; resume with the same one, or start a new run"
                )
        if saved:
            _fill(anchors, optimizer, saved)
        self._anchor, self._optimizer, self._has_begun = anchors, optimizer, bool(saved)
        self._is_away = False

    def _fresh(self) -> tuple[dict[str, torch.nn.Parameter], torch.optim.Optimizer]:
        anchors = {
            name: torch.nn.Parameter(wide(parameter).clone())
            for name, parameter in self._parameters.items()
        }
        optimizer = self._make(list(anchors.values()))
        _check(optimizer, anchors.values())
        return anchors, optimizer


def _check(optimizer: object, anchors: Iterable[torch.nn.Parameter]) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"outer must return an optimizer of torch.optim, got {optimizer!r}; pass for example"
            " functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)"
        )
    given = (parameter for group in optimizer.param_groups for parameter in group["params"])
    if sorted(map(id, given)) != sorted(map(id, anchors)):
        raise ConfigError(
            "outer must make an optimizer of the very parameters that it is given, each once; pass"
            " them all on to the optimizer"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    needs_closure = closure is not None and closure.default is inspect.Parameter.empty
    if needs_closure or isinstance(optimizer, torch.optim.SparseAdam):
        needs = "closures" if needs_closure else "sparse gradients"
        raise UnsupportedError(
            f"{type(optimizer).__name__} needs {needs}, and the change of averaged weights is one"
            " dense gradient; use for example torch.optim.SGD or torch.optim.Adam as outer"
            " optimizer"
        )


def _fill(
    anchors: Mapping[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    saved: Mapping[str, Any],
) -> None:
    """Overwrite what `_fresh` made by what was saved."""
    # What an optimizer keeps is known only once it has taken a step. What this one does to the
    # anchors is overwritten below.
    for anchor in anchors.values():
        anchor.grad = torch.zeros_like(anchor)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    moved = {f"anchor/{name}": anchor.detach() for name, anchor in anchors.items()}
    began = {key: value for key, value in saved.items() if key.startswith("anchor/")}
    restore_(moved, began, "the outer optimizer's state")
    for name, anchor in anchors.items():
        kept = optimizer.state.get(anchor, {})
        keys = {
            key: f"{_prefix(optimizer)}{key}/{name}"
            for key, value in kept.items()
            if value is not None
        }
        if not any(key in saved for key in keys.values()):
            optimizer.state.pop(anchor, None)  # it was never stepped, as frozen ones are not
            continue
        for key, full_key in keys.items():
            value, live = saved.get(full_key), kept[key]
            shape = live.shape if isinstance(live, torch.Tensor) else None
            if full_key not in saved or getattr(value, "shape", None) != shape:
                raise CheckpointError(
                    "the outer optimizer's state was saved with another model or strategy: see"
                    f" {full_key!r}"
                )
            kept[key] = value if shape is None else live.copy_(value)


def _prefix(optimizer: torch.optim.Optimizer) -> str:
    """What the names of its state begin with. The class is among them, since two optimizers may
    keep tensors of the same name that mean different things.
    """
    return f"outer/{type(optimizer).__name__}/"


def _begun(anchor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Where local steps began: at the anchor as the parameter's own dtype holds it. Without this
    rounding a bfloat16 weight that did not move would seem to have moved.
    """
    return wide(anchor.to(parameter.dtype))
