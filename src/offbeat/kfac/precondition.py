"""From gradients to preconditioned gradients: P = G^-1 grad A^-1, and how long a step along them
may be.

P is the direction of steepest descent per unit of change in what the model predicts, rather than
per unit of change in its parameters. Its length is limited by KL clipping (arXiv 1708.05509,
section 5): the step lr * P changes predictions by about lr^2 <P, grad>, summed over layers, and is
shortened where that exceeds a limit:

    nu = min(1, sqrt(kl_clip / |sum of lr^2 <P, grad>|))

Grafting gives a layer's P the length of its gradient (Agarwal et al., arXiv 2002.11803), because a
learning rate that was chosen without K-FAC is one for such lengths:

    "layer": P |grad| / |P|, and no limit
    "floor": P max(1, |grad| / |P|), times nu; nu is that of P as it was

A layer's P takes the place of its gradient as soon as it is made, and is multiplied by nu when all
are. Layers without an inverse keep their plain gradient, unclipped, and do not count.

Cost for a layer of d_out x d_in: 2 d_out d_in (d_out + d_in) operations, 2 d_out d_in more for <P,
grad>, and 4 d_out d_in more for grafting. Memory while it lasts: two
or three times the largest gradient, and the largest inverse, unpacked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

import torch

from offbeat.kfac.blocks import Block, BlockGradient
from offbeat.kfac.curvature import Grafting
from offbeat.kfac.factors import (
    FactorShape,
    multiply_columns,
    multiply_rows,
    padded,
    unpack,
    unpack_triangles,
)
from offbeat.kfac.inverses import InverseForm, form_for, has_inverse, is_asynchronous


@dataclass(frozen=True)
class InversePair:
    """Damped inverses of one block's factors, A's and G's, or the triangles that stand for them, as
    `form` keeps them. Once they change in place, another pair must be made.
    """

    inputs: torch.Tensor
    outputs: torch.Tensor
    form: InverseForm

    @cached_property
    def exists(self) -> torch.Tensor:
        """Whether there are inverses, a scalar tensor."""
        return has_inverse(self.inputs) & has_inverse(self.outputs)

    def apply(
        self, gradient: torch.Tensor, inputs: FactorShape, outputs: FactorShape
    ) -> torch.Tensor:
        """Precondition `gradient`, of the `matrix_shape` of a block of such factors. The result
        means nothing where there is no inverse.
        """
        _, num_outputs, num_inputs = gradient.shape
        matrices = padded(gradient.to(self.inputs.dtype), outputs, inputs)
        if inputs.is_diagonal:
            half = matrices * self.inputs[:, None, :]
        else:
            squares, form = self._squares(self.inputs, inputs)
            half = multiply_columns(matrices, inputs, lambda some: _from_right(some, squares, form))
        if outputs.is_diagonal:
            whole = half * self.outputs[:, :, None]
        else:
            squares, form = self._squares(self.outputs, outputs)
            whole = multiply_rows(half, outputs, lambda some: _from_left(squares, some, form))
        return whole[:, :num_outputs, :num_inputs].to(gradient.dtype)

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
    return torch.bmm(matrices, symmetric)


def _from_left(symmetric: torch.Tensor, matrices: torch.Tensor, form: InverseForm) -> torch.Tensor:
    """The inverses times `matrices`, shape (groups, d, n)."""
    if form == "triangle":
        return _from_right(matrices.mT, symmetric, form).mT
    return symmetric * matrices if symmetric.shape[1] == 1 else torch.bmm(symmetric, matrices)


def kl_scale(change: torch.Tensor, kl_clip: float) -> torch.Tensor:
    """nu: by what to multiply preconditioned gradients P, a scalar tensor in (0, 1].

    Args:
        change: the sum of lr^2 <P, gradient> over layers, a scalar tensor.
        kl_clip: the limit, > 0.
    """
    return (kl_clip / change.abs()).sqrt().clamp(max=1)


def share_of(preconditioned: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """How long `preconditioned` is over `plain`, a scalar tensor; 1 where both are zeros."""
    share: torch.Tensor = preconditioned.norm() / plain.norm()
    return share.nan_to_num(nan=1.0, posinf=1.0)


def graft_(preconditioned: torch.Tensor, share: torch.Tensor, grafting: Grafting) -> None:
    """Give a layer's `preconditioned` gradient, `share` times as long as the plain one, the length
    that `grafting` says. One that is all zeros stays so.
    """
    if grafting == "floor":
        preconditioned.div_(torch.where(share > 0, share, 1.0).clamp(max=1))
    elif grafting == "layer":
        preconditioned.div_(torch.where(share > 0, share, 1.0))


@torch.no_grad()
def precondition_(
    blocks: Sequence[Block],
    inverses: Sequence[InversePair],
    *,
    lrs: Sequence[float],
    kl_clip: float | None,
    grafting: Grafting = "none",
    shares: dict[str, torch.Tensor] | None = None,
) -> torch.Tensor | None:
    """Replace the gradients of `blocks` by preconditioned gradients. Blocks without gradient, or of
    another shape by now, are passed over.

    Args:
        blocks: not the retired ones.
        inverses: one for each block.
        lrs: learning rates, one for each block.
        kl_clip: the limit, > 0; None: no limit.
        grafting: whose length a layer's preconditioned gradient has. With "layer" give no limit.
        shares: takes for each block's name how long its preconditioned gradient is over the plain
            one, before anything scales it; None: nobody asks.

    Returns:
        nu, a scalar tensor in (0, 1]; None without a limit, or without a preconditioned gradient.
    """
    done: list[_Preconditioned] = []
    change: torch.Tensor | float = 0.0
    live = [
        _Live(block, inverse, lr)
        for block, inverse, lr in zip(blocks, inverses, lrs, strict=True)
        if block.has_gradient()
        # on a GPU asking would make the host wait
        and (is_asynchronous(inverse.exists.device) or inverse.exists)
    ]
    for each, gradient, matrix, preconditioned in _apply_each(live):
        exists = each.inverse.exists
        may_ask = not is_asynchronous(exists.device)
        if not may_ask:
            preconditioned = torch.where(exists, preconditioned, matrix)
        product = None if kl_clip is None else _product(preconditioned, matrix)
        if shares is not None or grafting != "none":
            share = share_of(preconditioned, matrix)
            graft_(preconditioned, share, grafting)
            if shares is not None:
                shares[each.block.name] = share
        if product is None:
            gradient.write_(preconditioned)
            continue
        own = float(product) if may_ask else torch.where(exists, product, 0.0)
        change = change + own * each.lr**2
        done.append(_Preconditioned(gradient, preconditioned, None if may_ask else exists))
    if kl_clip is None or not done:
        return None
    nu = kl_scale(torch.as_tensor(change, dtype=torch.float64), kl_clip)
    shortens = is_asynchronous(nu.device) or bool(nu < 1)
    for waiting in done:
        waiting.finish_(nu, shortens=shortens)
    return nu


class _Live(NamedTuple):
    """A block that has a gradient, with its inverses and its learning rate."""

    block: Block
    inverse: InversePair
    lr: float


_Applied: TypeAlias = tuple[_Live, BlockGradient, torch.Tensor, torch.Tensor]
"""A block, its gradient, that as a matrix, and the preconditioned gradient."""


def _apply_each(live: Sequence[_Live]) -> Iterator[_Applied]:
    """The preconditioned gradients of all blocks. Those of norms, each of which has a tiny matrix
    for each channel, are made together: handling each norm costs more than its arithmetic.
    """
    norms: dict[object, list[_Live]] = {}
    for each in live:
        block, inverse, _ = each
        if block.inputs.is_tiny and block.outputs.is_tiny:
            kind = block.inputs.dim, block.outputs.dim, block.weight.dtype, block.weight.device
            norms.setdefault(kind, []).append(each)
            continue
        gradient = block.gradient()
        matrix = gradient.matrix()
        yield each, gradient, matrix, inverse.apply(matrix, block.inputs, block.outputs)
    for some in norms.values():
        yield from _apply_together(some)


def _apply_together(norms: Sequence[_Live]) -> Iterator[_Applied]:
    gradients = [block.gradient() for block, _, _ in norms]
    matrices = [gradient.matrix() for gradient in gradients]
    sizes = [len(matrix) for matrix in matrices]
    first, inverse, _ = norms[0]
    together = InversePair(
        torch.cat([each.inverse.inputs for each in norms]),
        torch.cat([each.inverse.outputs for each in norms]),
        inverse.form,
    )
    found = together.apply(
        torch.cat(matrices),
        replace(first.inputs, groups=sum(sizes)),
        replace(first.outputs, groups=sum(sizes)),
    )
    yield from zip(norms, gradients, matrices, found.split(sizes), strict=True)


class _Preconditioned:
    """A block whose preconditioned gradient waits for nu: in the place of its gradient, or, where
    that is too short a type for it, apart.

    Args:
        gradient: the block's.
        preconditioned: the preconditioned gradient.
        exists: whether there is one, a scalar tensor; None: there is.
    """

    def __init__(
        self, gradient: BlockGradient, preconditioned: torch.Tensor, exists: torch.Tensor | None
    ) -> None:
        self._gradient, self._exists = gradient, exists
        self._apart: torch.Tensor | None = None
        if gradient.weight.dtype.itemsize < preconditioned.dtype.itemsize:
            self._apart = preconditioned
        else:
            gradient.write_(preconditioned)

    def finish_(self, nu: torch.Tensor, *, shortens: bool) -> None:
        """Multiply by `nu`, which is less than 1 or may be, if `shortens`."""
        factor = nu if self._exists is None else torch.where(self._exists, nu, 1.0)
        if self._apart is not None:
            self._gradient.write_(self._apart * factor)
        elif shortens:
            self._gradient.scale_(factor)


def _product(some: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """The sum of elementwise products, a scalar tensor."""
    product: torch.Tensor = torch.linalg.vecdot(some.flatten(), others.flatten())
    return product
