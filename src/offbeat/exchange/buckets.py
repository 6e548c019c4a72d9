"""Flat buffers that hold the gradients of several parameters, so that one message carries them all."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false as is_non_overlapping_and_dense

from offbeat.planning.fusion import fuse


class Bucket:
    """Some parameters of one dtype and device, and a flat buffer with a place for the gradient of each.

    Attributes:
        indices: each parameter's position in the model's order.
        names: their names.
        num_elements: elements of all of them.
        flat: the buffer, shape (num_elements,); may be replaced by another one of the same kind.
    """

    def __init__(self, named: Mapping[str, torch.nn.Parameter], indices: list[int]) -> None:
        names, parameters = list(named), list(named.values())
        self.indices = indices
        self.names = [names[i] for i in indices]
        self.parameters = [parameters[i] for i in indices]
        self.offsets = [0]
        for parameter in self.parameters:
            self.offsets.append(self.offsets[-1] + parameter.numel())
        self.num_elements = self.offsets[-1]
        first = self.parameters[0]
        self.flat = torch.zeros(self.num_elements, dtype=first.dtype, device=first.device)

    def piece(self, position: int, flat: torch.Tensor | None = None) -> torch.Tensor:
        """The part of the parameter at `position`, shape (numel,); of `flat` instead of the buffer if given."""
        source = self.flat if flat is None else flat
        return source[self.offsets[position] : self.offsets[position + 1]]

    def view(self, position: int, flat: torch.Tensor | None = None) -> torch.Tensor:
        """Like `piece`, in the shape and, where it is dense, the memory order of the parameter."""
        parameter, piece = self.parameters[position], self.piece(position, flat)
        if is_non_overlapping_and_dense(parameter):
            return piece.as_strided(parameter.shape, parameter.stride())
        return piece.view(parameter.shape)

    def holds(self, position: int, gradient: torch.Tensor) -> bool:
        """Whether `gradient` already is this bucket's view."""
        return gradient.data_ptr() == self.piece(position).data_ptr() and gradient.device == self.flat.device


def make_buckets(
    named: Mapping[str, torch.nn.Parameter], *, cap_bytes: int | None, first_cap_bytes: int | None = None
) -> list[Bucket]:
    """Fuse parameters into buckets, in the order in which backward completes them. Empty parameters get a place of size 0."""
    parameters = list(named.values())
    sizes = [parameter.numel() * parameter.element_size() for parameter in parameters]
    kinds = [(parameter.dtype, parameter.device) for parameter in parameters]
    groups = fuse(sizes, kinds, cap_bytes=cap_bytes, first_cap_bytes=first_cap_bytes)
    return [Bucket(named, group) for group in groups]
