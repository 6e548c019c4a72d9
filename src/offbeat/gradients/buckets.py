"""Flat buffers that hold the gradients of several parameters, so that one message
carries them all.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate

import torch

from offbeat.torch_private import for_each

_NUM_BUFFERS = 2
"""Buffers that a sparse reduction uses in turns."""


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of `tensor` fill its memory without gaps and without overlap, in any
    order of dimensions. Autograd then gives its gradient the same strides.
    """
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dimension: -strides[dimension])
    return tensor.permute(order).is_contiguous()


def num_rows(parameter: torch.Tensor) -> int:
    """Of the matrix that a parameter's place in a bucket is: the size of the dimension that is the
    outermost in memory, which of a transposed parameter is not the first one.
    """
    if parameter.dim() < 2:
        return 1
    strides = parameter.stride() if is_dense(parameter) else (1,)
    return parameter.shape[strides.index(max(strides))]


class Bucket:
    """Some parameters of one dtype and device, and a flat buffer with a place for the gradient of
    each.

    Attributes:
        indices: each parameter's position in the model's order.
        names: their names.
        parameters: the parameters. Others of the same shapes may take their places.
        offsets: where each one's place begins, and the end of the last.
        places: of each.
        num_elements: elements of all of them.
        flat: the buffer, shape (num_elements,). May be replaced by another one of the same kind.
    """

    def __init__(self, named: Mapping[str, torch.nn.Parameter], indices: list[int]) -> None:
        names, parameters = list(named), list(named.values())
        self.indices = indices
        self.names = [names[i] for i in indices]
        self.parameters = [parameters[i] for i in indices]
        self.offsets = list(accumulate((p.numel() for p in self.parameters), initial=0))
        self.places = [*map(slice, self.offsets, self.offsets[1:])]
        self.num_elements = self.offsets[-1]
        # In which memory order each one's place is; None: that of its dimensions.
        self._strides = [p.stride() if is_dense(p) else None for p in self.parameters]
        self._views: dict[int, list[torch.Tensor]] = {}
        first = self.parameters[0]
        self.flat = torch.zeros(self.num_elements, dtype=first.dtype, device=first.device)

    @property
    def views(self) -> list[torch.Tensor]:
        """The place of each parameter in the buffer, in the parameter's shape and, where it is
        dense, memory order.
        """
        place = self.flat.data_ptr()
        if place not in self._views:
            if len(self._views) == _NUM_BUFFERS:
                self._views.clear()
            self._views[place] = self.views_of(self.flat)
        return self._views[place]

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Like `views`, of another buffer with at least as many elements."""
        pieces = zip(self.parameters, self._strides, self.offsets, strict=False)
        return [
            flat[offset : offset + p.numel()].view(p.shape)
            if strides is None
            else flat.as_strided(p.shape, strides, flat.storage_offset() + offset)
            for p, strides, offset in pieces
        ]

    def named(self, kind: str, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of another buffer, of state of some kind, by "kind/parameter"."""
        views = zip(self.names, self.views_of(flat), strict=True)
        return {f"{kind}/{name}": view for name, view in views}

    @property
    def state_dtype(self) -> torch.dtype:
        """In which state is kept that gathers gradients: float32, also for half precision."""
        return torch.float64 if self.flat.dtype == torch.float64 else torch.float32

    def holds(self, position: int, gradient: torch.Tensor) -> bool:
        """Whether `gradient` already is this bucket's view."""
        if gradient.is_sparse:  # which has no place in memory of its own
            return False
        return (
            gradient.data_ptr() == self.views[position].data_ptr()
            and gradient.device == self.flat.device
        )

    def copy_in(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Copy gradients, which may be sparse, into their places by position, unless they are
        there already.
        """
        places, dense = list[torch.Tensor](), list[torch.Tensor]()
        views = self.views
        for position, gradient in gradients.items():
            place = views[position]
            if gradient.is_sparse:
                place.zero_().add_(gradient.detach())
            elif gradient.data_ptr() != place.data_ptr() or gradient.device != place.device:
                places.append(place)
                dense.append(gradient.detach() if gradient.requires_grad else gradient)
        for_each("copy_", places, dense)


def make_buckets(
    named: Mapping[str, torch.nn.Parameter],
    *,
    cap_bytes: int | None,
    first_cap_bytes: int | None = None,
) -> list[Bucket]:
    """Fuse parameters into buckets, in the order in which backward completes them. Empty parameters
    get a place of size 0.

    Args:
        named: the parameters by name, in the model's order.
        cap_bytes: size of a bucket; None: no limit.
        first_cap_bytes: of the first bucket of a dtype and device, where that differs.
    """
    parameters = list(named.values())
    sizes = [parameter.numel() * parameter.element_size() for parameter in parameters]
    kinds = [(p.dtype, p.device) for p in parameters]
    groups = fuse(sizes, kinds, cap_bytes=cap_bytes, first_cap_bytes=first_cap_bytes)
    return [Bucket(named, group) for group in groups]


def fuse(
    sizes_bytes: Sequence[int],
    kinds: Sequence[Hashable],
    *,
    cap_bytes: int | None,
    first_cap_bytes: int | None = None,
) -> list[list[int]]:
    """Group parameters, last one first, into buckets of at most `cap_bytes`.

    Backward yields gradients roughly in the reverse order of the parameters, so the first bucket is
    complete first. It may be kept smaller than the others, to have something on the wire early.

    Args:
        sizes_bytes: size of each parameter, in the order of the model.
        kinds: what must not be mixed in one bucket, such as (dtype, device); one for each
            parameter.
        cap_bytes: a bucket is closed before it would exceed this; one larger parameter makes a
            bucket alone. None: no limit.
        first_cap_bytes: the same for the first bucket of each kind; default `cap_bytes`.

    Returns:
        Buckets in the order in which they should be sent, each with indices of parameters in the
        order of their gradients.

    >>> fuse([4, 4, 4], ["f32"] * 3, cap_bytes=8)
    [[2, 1], [0]]
    """
    limit = float("inf") if cap_bytes is None else cap_bytes
    first_limit = limit if first_cap_bytes is None else first_cap_bytes
    closed: list[list[int]] = []
    open_buckets: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    num_closed: dict[Hashable, int] = {}
    for index in reversed(range(len(sizes_bytes))):
        kind = kinds[index]
        bucket = open_buckets.setdefault(kind, [])
        cap = limit if num_closed.get(kind) else first_limit
        if bucket and filled[kind] + sizes_bytes[index] > cap:
            closed.append(bucket)
            num_closed[kind] = num_closed.get(kind, 0) + 1
            bucket = open_buckets[kind] = []
            filled[kind] = 0
        bucket.append(index)
        filled[kind] = filled.get(kind, 0) + sizes_bytes[index]
    return closed + [bucket for bucket in open_buckets.values() if bucket]
