"""From gradients to preconditioned gradients: P = G^-1 grad A^-1, and how long a step along them
may be.

P is the direction of steepest descent per unit of change in what the model predicts, rather than
per unit of change in its parameters. Its length is limited by KL clipping (arXiv 1708.05509,
section 5): the step lr * P changes predictions by about lr^2 <P, grad>, summed over layers, and is
shortened where that exceeds a limit:

    nu = min(1, sqrt(kl_clip / |sum of lr^2 <P, grad>|))

A layer's P takes the place of its gradient as soon as it is made, and is multiplied by nu when all
are. Layers without an inverse keep their plain gradient, unclipped, and do not count.

Cost for a layer of d_out x d_in: 2 d_out d_in (d_out + d_in) operations. Memory while it lasts: two
or three times the largest gradient, and the largest inverse, unpacked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from offbeat.kfac.blocks import Block, FactorShape
from offbeat.kfac.eigen import Eigendecomposition
from offbeat.kfac.inverses import InverseForm, form_for, has_inverse, is_asynchronous
from offbeat.kfac.pieces import multiply_columns, multiply_rows, padded
from offbeat.kfac.symmetric import unpack, unpack_triangles


@dataclass(frozen=True, slots=True)
class InversePair:
    """Damped inverses of one block's factors, A's and G's, or the triangles that stand for them, as
    `form` keeps them.
    """

    inputs: torch.Tensor
    outputs: torch.Tensor
    form: InverseForm

    def apply(self, gradient: torch.Tensor, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        """Precondition `gradient`, of the block's `matrix_shape`.

        Returns:
            The preconditioned gradient, which means nothing where there is no inverse, and whether
            there is one, a scalar tensor.
        """
        _, num_outputs, num_inputs = gradient.shape
        matrices = padded(gradient.to(self.inputs.dtype), block.outputs, block.inputs)
        if block.inputs.is_diagonal:
            half = matrices * self.inputs[:, None, :]
        else:
            squares, form = self._squares(self.inputs, block.inputs)
            half = multiply_columns(
                matrices, block.inputs, lambda some: _from_right(some, squares, form)
            )
        if block.outputs.is_diagonal:
            whole = half * self.outputs[:, :, None]
        else:
            squares, form = self._squares(self.outputs, block.outputs)
            whole = multiply_rows(half, block.outputs, lambda some: _from_left(squares, some, form))
        exists = has_inverse(self.inputs) & has_inverse(self.outputs)
        return whole[:, :num_outputs, :num_inputs].to(gradient.dtype), exists

    def _squares(self, kept: torch.Tensor, shape: FactorShape) -> tuple[torch.Tensor, InverseForm]:
        dim, form = shape.dim, form_for(self.form, shape)
        if self.form == "bfloat16":
            return kept.unflatten(1, (dim, dim)), form
        return (unpack_triangles if form == "triangle" else unpack)(kept, dim), form


def _from_right(matrices: torch.Tensor, symmetric: torch.Tensor, form: InverseForm) -> torch.Tensor:
    """`matrices`, shape (groups, n, d), times the inverses: `symmetric` itself, or those of U^T U
    for the triangles U in `symmetric`.
    """
    if form == "triangle":
        half = torch.linalg.solve_triangular(symmetric, matrices, upper=True, left=False)
        whole: torch.Tensor = torch.linalg.solve_triangular(
            symmetric.mT, half, upper=False, left=False
        )
        return whole
    if matrices.shape[1] == 1 and symmetric.shape[2] <= 2:
        # The channels of a norm: as many products of tiny matrices, one by one, take far longer.
        return (matrices.mT * symmetric).sum(dim=1, keepdim=True)
    return matrices @ symmetric


def _from_left(symmetric: torch.Tensor, matrices: torch.Tensor, form: InverseForm) -> torch.Tensor:
    """The inverses times `matrices`, shape (groups, d, n)."""
    if form == "triangle":
        return _from_right(matrices.mT, symmetric, form).mT
    return symmetric * matrices if symmetric.shape[1] == 1 else symmetric @ matrices


@dataclass(frozen=True, slots=True)
class EigenPair:
    """Eigendecompositions of one block's factors, A's and G's.

    Attributes:
        damping: of their product, or of each.
        damps_each: which of the two.
    """

    inputs: Eigendecomposition
    outputs: Eigendecomposition
    damping: float
    damps_each: bool = False

    def apply(self, gradient: torch.Tensor, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        """As of `InversePair`."""
        _, num_outputs, num_inputs = gradient.shape
        right, left = self.inputs.vectors, self.outputs.vectors
        turned = padded(gradient, block.outputs, block.inputs)
        rows, columns = turned.shape[1:]
        if left is not None:
            turned = multiply_rows(turned, block.outputs, lambda some: left.mT @ some)
        if right is not None:
            turned = multiply_columns(turned, block.inputs, lambda some: some @ right)
        of_g = self.outputs.values.view(-1, rows, 1)
        of_a = self.inputs.values.view(-1, 1, columns)
        if self.damps_each:
            turned = turned / ((of_g + self.damping) * (of_a + self.damping))
        else:
            turned = turned / (of_g * of_a + self.damping)
        if right is not None:
            turned = multiply_columns(turned, block.inputs, lambda some: some @ right.mT)
        if left is not None:
            turned = multiply_rows(turned, block.outputs, lambda some: left @ some)
        exists = (self.inputs.values >= 0).all() & (self.outputs.values >= 0).all()
        return turned[:, :num_outputs, :num_inputs], exists


Curvature: TypeAlias = InversePair | EigenPair


def kl_scale(change: torch.Tensor, kl_clip: float, grad_scale: float = 1.0) -> torch.Tensor:
    """nu: by what to multiply preconditioned gradients P, a scalar tensor in (0, 1].

    Args:
        change: the sum of lr^2 <P, gradient> over layers, a scalar tensor.
        kl_clip: the limit, > 0.
        grad_scale: by what factor gradients are scaled (AMP).
    """
    return (kl_clip * grad_scale**2 / change.abs()).sqrt().clamp(max=1)


@torch.no_grad()
def precondition_(
    blocks: Sequence[Block],
    curvatures: Sequence[Curvature],
    *,
    lrs: Sequence[float],
    kl_clip: float | None,
    grad_scale: float = 1.0,
) -> None:
    """Replace the gradients of `blocks` by preconditioned gradients. Blocks without gradient, or of
    another shape by now, are passed over.

    Args:
        blocks: not the retired ones.
        curvatures: one for each block.
        lrs: learning rates, one for each block.
        kl_clip: the limit, > 0; None: no limit.
        grad_scale: by what factor gradients are scaled at the moment (AMP).
    """
    done: list[_Preconditioned] = []
    change: torch.Tensor | float = 0.0
    for block, curvature, lr in zip(blocks, curvatures, lrs, strict=True):
        if not block.has_gradient():
            continue
        gradient = block.gradient_matrix()
        preconditioned, exists = curvature.apply(gradient, block)
        may_ask = not is_asynchronous(exists.device)
        if not may_ask:  # asking would make the host wait
            preconditioned = torch.where(exists, preconditioned, gradient)
        elif not exists:
            continue
        if kl_clip is None:
            block.write_gradient_(preconditioned)
            continue
        product = _product(preconditioned, gradient)
        own = float(product) if may_ask else torch.where(exists, product, 0.0)
        change = change + own * lr**2
        done.append(_Preconditioned(block, preconditioned, None if may_ask else exists))
    if kl_clip is not None and done:
        nu = kl_scale(torch.as_tensor(change, dtype=torch.float64), kl_clip, grad_scale)
        for each in done:
            each.scale_(nu)


class _Preconditioned:
    """A block whose preconditioned gradient waits for nu: in the place of its gradient, or, where
    that is too short a type for it, apart.

    Args:
        block: whose gradient it is.
        preconditioned: the preconditioned gradient.
        exists: whether there is one, a scalar tensor; None: there is.
    """

    def __init__(
        self, block: Block, preconditioned: torch.Tensor, exists: torch.Tensor | None
    ) -> None:
        self._block, self._exists = block, exists
        self._apart: torch.Tensor | None = None
        if block.weight.dtype.itemsize < preconditioned.dtype.itemsize:
            self._apart = preconditioned
        else:
            block.write_gradient_(preconditioned)

    def scale_(self, nu: torch.Tensor) -> None:
        factor = nu if self._exists is None else torch.where(self._exists, nu, 1.0)
        if self._apart is not None:
            self._block.write_gradient_(self._apart * factor)
        elif self._exists is not None or nu < 1:
            self._block.scale_gradient_(factor)


def _product(some: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """The sum of elementwise products, a scalar tensor."""
    product: torch.Tensor = torch.linalg.vecdot(some.flatten(), others.flatten())
    return product
