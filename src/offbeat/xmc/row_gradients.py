"""Gradients that have some rows only: how they are made, and how they are read again."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from offbeat.errors import ConfigError
from offbeat.torch_private import stored_entries


class RowGradient(NamedTuple):
    """Rows of a gradient; the others are zero.

    Attributes:
        rows: int64, strictly ascending.
        values: shape (rows, *of a row).
    """

    rows: torch.Tensor
    values: torch.Tensor


def as_sparse(gradient: RowGradient, shape: torch.Size) -> torch.Tensor:
    """As torch's sparse tensor, sharing memory."""
    return torch.sparse_coo_tensor(
        gradient.rows.unsqueeze(0),
        gradient.values,
        shape,
        is_coalesced=True,
        check_invariants=False,
    )


def read_sparse(gradient: torch.Tensor) -> RowGradient:
    """The rows of a sparse tensor, sharing memory where no row is there twice.

    Raises:
        ConfigError: it is sparse in other dimensions than the first.
    """
    if gradient.sparse_dim() != 1:
        raise ConfigError(
            f"a gradient of shape {tuple(gradient.shape)} is sparse in {gradient.sparse_dim()}"
            " dimensions; it may be so in the first one only, as those of SparseLinear and"
            " nn.Embedding(sparse=True) are"
        )
    # Autograd forgets that a gradient was coalesced when it puts it into `grad`, and sorting its
    # rows again takes longer than everything else that an optimizer does to them.
    indices, values = stored_entries(gradient)
    rows = indices[0]
    if gradient.is_coalesced() or bool((rows.diff() > 0).all()):
        return RowGradient(rows, values)
    summed = gradient.coalesce()
    return RowGradient(summed.indices()[0], summed.values())


def take_rows(weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The given rows of `weight`, which gets a sparse gradient.

    Args:
        weight: at least one dimension.
        rows: int64, strictly ascending.
    """
    # torch leaves it so
    taken: torch.Tensor = _Rows.apply(weight, rows)  # type: ignore[no-untyped-call]
    return taken


def densely(weight: torch.Tensor) -> torch.Tensor:
    """`weight`, whose gradient becomes dense. A hook cannot do that: autograd lets none change a
    gradient's layout.
    """
    # torch leaves it so
    same: torch.Tensor = _Densely.apply(weight)  # type: ignore[no-untyped-call]
    return same


class _Densely(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].to_dense() if gradients[0].is_sparse else gradients[0]


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = weight.shape
        return weight.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (rows,) = ctx.saved_tensors
        return as_sparse(RowGradient(rows, gradients[0]), ctx.shape), None
