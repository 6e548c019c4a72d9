"""From gradients to preconditioned gradients: P = G^-1 grad A^-1, and how long a step along them
may be.

P is the direction of steepest descent per unit of change in what the model predicts, rather than
per unit of change in its parameters. Its length is limited by KL clipping (arXiv 1708.05509,
section 5): the step lr * P changes predictions by about lr^2 <P, grad>, summed over layers, and is
shortened where that exceeds a limit:

    nu = min(1, sqrt(kl_clip / |sum of lr^2 <P, grad>|))

Gradients and preconditioned gradients of all layers lie in two flat buffers, so that the sum is one
product. Layers without an inverse keep their plain gradient, unclipped, and do not count.

Cost for a layer of d_out x d_in: 2 d_out d_in (d_out + d_in) operations. Memory while it lasts:
twice the gradients, and the largest inverse, unpacked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TypeAlias

import torch

from offbeat.kfac.blocks import Block
from offbeat.kfac.eigen import Eigendecomposition
from offbeat.kfac.inverses import InverseForm, has_inverse, is_asynchronous
from offbeat.kfac.symmetric import unpack


@dataclass(frozen=True, slots=True)
class InversePair:
    """Damped inverses of one block's factors, A's and G's, or the triangles that stand for them, as
    `form` keeps them.
    """

    inputs: torch.Tensor
    outputs: torch.Tensor
    form: InverseForm

    def apply(self, gradient: torch.Tensor, block: Block, *, out: torch.Tensor) -> torch.Tensor:
        """Write the preconditioned `gradient` into `out`, both of the block's `matrix_shape`; zeros
        where there is no inverse.

        Returns:
            Whether there is one, a scalar tensor.
        """
        gradient = gradient.to(self.inputs.dtype)
        if block.inputs.is_diagonal:
            half = gradient * self.inputs[:, None, :]
        else:
            half = _from_right(gradient, self._square(self.inputs, block.inputs.dim), self.form)
        outputs = self._square(self.outputs, block.outputs.dim)
        if self.form == "inverse":
            torch.bmm(outputs, half, out=out)
        elif self.form == "bfloat16":
            out.copy_(outputs @ half)
        else:
            out.copy_(_from_right(half.mT, outputs, self.form).mT)
        exists = has_inverse(self.inputs) & has_inverse(self.outputs)
        _zero_unless_(exists, out)
        return exists

    def _square(self, kept: torch.Tensor, dim: int) -> torch.Tensor:
        return kept.unflatten(1, (dim, dim)) if self.form == "bfloat16" else unpack(kept, dim)


def _zero_unless_(exists: torch.Tensor, preconditioned: torch.Tensor) -> None:
    """Zeros, unless there is an inverse. On a GPU that is masked rather than asked."""
    if is_asynchronous(exists.device):
        preconditioned.masked_fill_(~exists, 0)
    elif not exists:
        preconditioned.zero_()


def _from_right(matrices: torch.Tensor, symmetric: torch.Tensor, form: InverseForm) -> torch.Tensor:
    """`matrices` times the inverse: `symmetric` itself, or that of U^T U for the triangle U in
    `symmetric`.
    """
    groups = max(len(matrices), len(symmetric))
    if form != "triangle":
        # One matrix that serves all groups is one large product, and not as many copies of it.
        return (
            matrices @ symmetric
            if groups == len(symmetric)
            else (matrices.flatten(0, 1) @ symmetric[0]).view_as(matrices)
        )
    square = symmetric.expand(groups, -1, -1)
    half = torch.linalg.solve_triangular(square, matrices, upper=True, left=False)
    whole: torch.Tensor = torch.linalg.solve_triangular(square.mT, half, upper=False, left=False)
    return whole


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

    def apply(self, gradient: torch.Tensor, block: Block, *, out: torch.Tensor) -> torch.Tensor:
        """Write the preconditioned `gradient` into `out`, both of the block's `matrix_shape`; zeros
        where there is no inverse.

        Returns:
            Whether there is one, a scalar tensor.
        """
        right, left = self.inputs.vectors, self.outputs.vectors
        assert left is not None
        turned = left.mT @ gradient
        if right is not None:
            turned = turned @ right
        of_g, of_a = self.outputs.values[:, :, None], self.inputs.values[:, None, :]
        if self.damps_each:
            turned /= (of_g + self.damping) * (of_a + self.damping)
        else:
            turned /= of_g * of_a + self.damping
        if right is not None:
            turned = turned @ right.mT
        exists = (self.inputs.values >= 0).all() & (self.outputs.values >= 0).all()
        torch.matmul(left, turned, out=out).mul_(exists)
        return exists


Curvature: TypeAlias = InversePair | EigenPair


@dataclass(frozen=True, slots=True)
class BlockMatrices:
    """A matrix for each of some blocks, all in one flat buffer.

    Attributes:
        flat: the buffer.
        each: views of it, of the blocks' `matrix_shape`.
    """

    flat: torch.Tensor
    each: Sequence[torch.Tensor]

    @classmethod
    def empty(cls, blocks: Sequence[Block]) -> BlockMatrices:
        """Uninitialised: float32, or float64 if any weight is."""
        weights = [block.weight for block in blocks]
        dtype = reduce(torch.promote_types, (weight.dtype for weight in weights), torch.float32)
        sizes = [torch.Size(block.matrix_shape).numel() for block in blocks]
        flat = torch.empty(sum(sizes), dtype=dtype, device=weights[0].device if weights else None)
        parts = zip(flat.split(sizes), blocks, strict=True)
        return cls(flat, [part.view(block.matrix_shape) for part, block in parts])


@torch.no_grad()
def read_gradients(blocks: Sequence[Block]) -> BlockMatrices:
    """Copies of the gradients of `blocks`, all of which must have one."""
    gradients = BlockMatrices.empty(blocks)
    for block, matrix in zip(blocks, gradients.each, strict=True):
        block.read_gradient(matrix)
    return gradients


@torch.no_grad()
def kl_scale(
    preconditioned: BlockMatrices,
    gradients: BlockMatrices,
    *,
    lrs: Sequence[float],
    kl_clip: float,
    grad_scale: float = 1.0,
) -> torch.Tensor:
    """nu: by what to multiply the preconditioned gradients, a scalar tensor in (0, 1].

    Args:
        preconditioned, gradients: of the same blocks.
        lrs: the learning rate of each block.
        kl_clip: the limit, > 0.
        grad_scale: by what factor gradients are scaled (AMP).
    """
    if len(set(lrs)) == 1:
        change = torch.dot(preconditioned.flat, gradients.flat) * lrs[0] ** 2
    else:
        pairs = zip(lrs, preconditioned.each, gradients.each, strict=True)
        change = sum(
            (torch.dot(p.flatten(), g.flatten()) * lr**2 for lr, p, g in pairs),
            preconditioned.flat.new_zeros(()),
        )
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
    live = [number for number, block in enumerate(blocks) if block.has_gradient()]
    if not live:
        return
    blocks = [blocks[number] for number in live]
    gradients, preconditioned = read_gradients(blocks), BlockMatrices.empty(blocks)
    matrices = list(zip(blocks, gradients.each, preconditioned.each, strict=True))
    found = [
        curvatures[number].apply(gradient, block, out=out)
        for number, (block, gradient, out) in zip(live, matrices, strict=True)
    ]
    if kl_clip is not None:
        nu = kl_scale(
            preconditioned,
            gradients,
            lrs=[lrs[number] for number in live],
            kl_clip=kl_clip,
            grad_scale=grad_scale,
        )
        preconditioned.flat.mul_(nu)
    for exists, (block, gradient, out) in zip(found, matrices, strict=True):
        if is_asynchronous(exists.device):
            block.write_gradient_(torch.where(exists, out, gradient))
        elif exists:
            block.write_gradient_(out)
