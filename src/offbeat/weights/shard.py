"""A rank's part of a parameter that `fully_shard` (FSDP2) has divided, for callbacks that know
plain tensors only.

A `Shard` has the memory of the local tensor and the gradient of the DTensor, so whoever writes to
one has written to the other. An optimizer is shown in the same way: its groups have shards, and its
state local tensors.

Nothing here imports `torch.distributed.tensor`, which takes a second: a DTensor is known by what it
can do, and made by the class of one that is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from typing_extensions import override


def is_distributed(tensor: object) -> bool:
    """Whether `tensor` is a DTensor."""
    return hasattr(tensor, "to_local")


def local_of(value: Any) -> Any:
    """This rank's part of a DTensor, which shares its memory; anything else as it is."""
    if not is_distributed(value):
        return value
    with torch.no_grad():
        return value.to_local()


def shard_number(model: torch.nn.Module) -> int:
    """Which of its island's ranks this one is, by the parameters; 0 where they are whole."""
    first: Any = next(model.parameters())
    return int(first.device_mesh.get_coordinate()[0]) if is_distributed(first) else 0


class Shard(torch.nn.Parameter):
    """This rank's part of a parameter.

    Attributes:
        whole: the parameter, a DTensor, which the model and the optimizer have.
    """

    whole: Any

    def __new__(cls, whole: torch.nn.Parameter) -> Shard:
        shard: Shard = super().__new__(cls, local_of(whole.detach()), whole.requires_grad)
        shard.whole = whole
        return shard

    def follow(self) -> None:
        """Have the memory that the parameter has now, which may be another one."""
        local = local_of(self.whole.detach())
        if local.data_ptr() != self.data_ptr():
            self.data = local

    def wrap(self, value: Any) -> Any:
        """A DTensor, laid out as the parameter, of a tensor that has this shard's shape; anything
        else as it is.
        """
        if not isinstance(value, torch.Tensor) or is_distributed(value):
            return value
        if value.shape != self.shape or not value.dim():
            return value
        whole = self.whole
        return type(whole.data).from_local(
            value,
            whole.device_mesh,
            whole.placements,
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )

    @property
    def grad(self) -> torch.Tensor | None:
        gradient: torch.Tensor | None = local_of(self.whole.grad)
        return gradient

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        self.whole.grad = None if gradient is None else self.wrap(gradient)

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]  # the parameter's
        return bool(self.whole.requires_grad)


def whole_of(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """What the model has of `parameter`, which may be a shard."""
    return parameter.whole if isinstance(parameter, Shard) else parameter


def wrap(parameter: torch.nn.Parameter, value: torch.Tensor) -> Any:
    """`value` as a DTensor, where `parameter` is a shard and it has its shape."""
    return parameter.wrap(value) if isinstance(parameter, Shard) else value


class _View(MutableMapping[Any, Any]):
    """A mapping, as far as another one has it, with values, and keys, in another form.

    Args:
        inner: gives the one that is read and written.
        show: makes the form that is shown of a key and a value.
        take: the inverse, of the key that is shown and a value.
        key_of: gives the key of the inner one.
        shown: the inverse.
    """

    def __init__(
        self,
        inner: Callable[[], MutableMapping[Any, Any]],
        show: Callable[[Any, Any], Any],
        take: Callable[[Any, Any], Any],
        *,
        key_of: Callable[[Any], Any] = lambda key: key,
        shown: Callable[[Any], Any] = lambda key: key,
    ) -> None:
        self._inner, self._show, self._take = inner, show, take
        self._key_of, self._shown = key_of, shown

    @override
    def __getitem__(self, key: Any) -> Any:
        # As in an optimizer's state, what is not there yet is made by being asked for.
        return self._show(key, self._inner()[self._key_of(key)])

    @override
    def __setitem__(self, key: Any, value: Any) -> None:
        self._inner()[self._key_of(key)] = self._take(key, value)

    @override
    def __delitem__(self, key: Any) -> None:
        del self._inner()[self._key_of(key)]

    @override
    def __contains__(self, key: object) -> bool:
        return self._key_of(key) in self._inner()

    @override
    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 - this is `get`

    @override
    def pop(self, key: Any, default: Any = None) -> Any:
        found = self.get(key, default)
        self._inner().pop(self._key_of(key), None)
        return found

    @override
    def __iter__(self) -> Iterator[Any]:
        return map(self._shown, self._inner())

    @override
    def __len__(self) -> int:
        return len(self._inner())


class _Groups(Sequence[_View]):
    """The groups of an optimizer as they are at the moment, with shards for parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer, shards: Mapping[int, Shard]) -> None:
        self._optimizer, self._shards = optimizer, shards

    @override
    def __len__(self) -> int:
        return len(self._optimizer.param_groups)

    @override
    def __getitem__(self, number: Any) -> Any:
        group = self._optimizer.param_groups[number]
        return _View(lambda: group, self._show, lambda _, value: value)

    def _show(self, key: str, value: Any) -> Any:
        return [self._shards[id(whole)] for whole in value] if key == "params" else value


def optimizer_of_shards(
    optimizer: torch.optim.Optimizer, shards: Sequence[Shard]
) -> torch.optim.Optimizer:
    """`optimizer` as callbacks see it: of the same class, with shards for parameters. What is
    written to its groups and its state is written to the optimizer's. It is never stepped.
    """
    by_id = {id(shard.whole): shard for shard in shards}
    shown: Any = object.__new__(type(optimizer))
    vars(shown).update(vars(optimizer))
    shown.param_groups = _Groups(optimizer, by_id)
    shown.state = _View(
        lambda: optimizer.state,
        lambda shard, kept: _View(
            lambda: kept, lambda _, value: local_of(value), lambda _, value: shard.wrap(value)
        ),
        lambda shard, kept: {key: shard.wrap(value) for key, value in kept.items()},
        key_of=lambda shard: getattr(shard, "whole", None),
        shown=lambda whole: by_id[id(whole)],
    )

    def show_in_saved(hook: Callable[[Any, dict[str, Any]], None]) -> Any:
        def call(_: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
            hook(shown, saved)
            parameters = (shard for group in shown.param_groups for shard in group["params"])
            for number, shard in enumerate(parameters):
                for key, value in saved["state"].get(number, {}).items():
                    saved["state"][number][key] = shard.wrap(value)

        return optimizer.register_state_dict_post_hook(call)

    shown.register_state_dict_post_hook = show_in_saved
    return shown  # type: ignore[no-any-return]  # made without its constructor
