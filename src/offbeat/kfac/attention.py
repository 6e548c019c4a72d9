"""Seeing into nn.MultiheadAttention, which calls its projections as functions and not as modules.

PyTorch's own forward pass runs, to the bit: its code is executed with the name `linear` bound to an
observer that calls the real one and shows what went in and came out. While watched, a module has a
subclass as its class; copies of it, such as averaged models, are not watched, and `unwatch` gives
the class back.

What this relies on: in torch.nn.functional, `multi_head_attention_forward`, `_in_projection_packed`
and `_in_projection` project through the global `linear`. A version where they do not shows nothing,
which the observer must notice (`Projections.finished`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn

from offbeat.kfac.blocks import LayerBlock
from offbeat.torch_private import attention_functions

if TYPE_CHECKING:
    from offbeat.kfac.capture import Capture

_NOT_SELF_ATTENTION = (
    "it was called with query, key and value that are not one and the same tensor, or without a"
    " batch dimension; name its module in cross_attention"
)


_watched: WeakKeyDictionary[nn.Module, tuple[FunctionType, Projections]] = WeakKeyDictionary()


class _WatchedAttention(nn.MultiheadAttention):
    """The class of an attention while it is watched."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        watched = _watched.get(self)
        if watched is None or not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        forward, observer = watched
        output = forward(self, *args, **kwargs)
        observer.finished()
        return output

    def _get_name(self) -> str:
        return nn.MultiheadAttention.__name__

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        # Copies, and what is pickled, are attentions of PyTorch's class.
        return object.__new__, (nn.MultiheadAttention,), vars(self).copy()


def watch(module: nn.MultiheadAttention, observer: Projections) -> None:
    """Show each projection in forward passes with gradients to `observer`, in the order
    they happen.
    """

    def linear(
        inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        output = F.linear(inputs, weight, bias)
        observer.projected(inputs, weight, output)
        return output

    # PyTorch's functions are copied with other globals rather than patched, so that no other module
    # and no other thread sees the change.
    functional = {**vars(F), "linear": linear}
    for name, function in attention_functions().items():
        functional[name] = rebound(function, functional)
    forward = nn.MultiheadAttention.forward
    _watched[module] = (
        rebound(forward, {**forward.__globals__, "F": SimpleNamespace(**functional)}),
        observer,
    )
    module.__class__ = _WatchedAttention


def unwatch(module: nn.MultiheadAttention) -> None:
    """The inverse of `watch`."""
    _watched.pop(module, None)
    module.__class__ = nn.MultiheadAttention


def rebound(function: Any, names: dict[str, Any]) -> FunctionType:
    """`function` with its global names looked up in `names`."""
    bound = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    bound.__kwdefaults__ = function.__kwdefaults__
    return bound


class Projections:
    """Is shown what the projections of an attention get and return, and knows which block each of
    them belongs to.

    Args:
        capture: is told of inputs and outputs of blocks.
        module: the attention.
        blocks: its blocks, by the number of the use that `capture` knows them by.
    """

    def __init__(
        self, capture: Capture, module: nn.MultiheadAttention, blocks: Mapping[int, LayerBlock]
    ) -> None:
        self._capture, self._blocks = capture, blocks
        self._module = module
        self._num_examples = self._num_terms = 1
        self._seen = False

    def projected(self, inputs: torch.Tensor, weight: torch.Tensor, output: torch.Tensor) -> None:
        """`output` is `inputs` times `weight`, transposed, plus a bias."""
        self._seen = True
        if inputs.ndim == 2:  # the output projection gets positions and examples in one dimension
            inputs = inputs.unflatten(0, (-1, self._num_examples))
        self._num_examples = inputs.shape[1]
        for index, block in self._blocks.items():
            wanted = block.weight.detach()[block.rows]
            if wanted.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr():
                continue
            first = (wanted.storage_offset() - weight.storage_offset()) // weight.shape[1]
            if self._is_query(weight):
                self._num_terms = block.num_terms(inputs)
            if first == 0 and len(wanted) > len(weight):
                self._capture.retire_use(index, _NOT_SELF_ATTENTION)
            elif 0 <= first < len(weight):
                self._show(index, inputs, output, slice(first, first + len(wanted)))

    def finished(self) -> None:
        """A forward pass is over."""
        if not self._seen:
            for index in self._blocks:
                self._capture.retire_use(
                    index,
                    "this version of PyTorch computes attention in a way that cannot be observed",
                )

    def _is_query(self, weight: torch.Tensor) -> bool:
        module = self._module
        query = module.q_proj_weight if module.in_proj_weight is None else module.in_proj_weight
        return query.data_ptr() == weight.data_ptr()

    def _show(self, index: int, inputs: torch.Tensor, output: torch.Tensor, columns: slice) -> None:
        leading = inputs.shape[:-1]

        def select(gradient: torch.Tensor) -> torch.Tensor:
            return gradient[..., columns].reshape(*leading, -1)

        self._capture.saw_inputs(index, inputs, num_terms=self._num_terms)
        self._capture.saw_output(index, inputs, output, num_terms=self._num_terms, select=select)
