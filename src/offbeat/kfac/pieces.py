"""Factors as a block's shapes keep them: whole, cut into pieces along their diagonals, or diagonals
alone.

A factor of d rows that is cut into k pieces of r rows has zeros for what lies between pieces: its
inverse is the pieces' inverses, and multiplying by it takes d^2 / k operations for each row instead
of d^2. Where k r > d the last piece has rows of zeros, and matrices get columns of zeros to match.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from offbeat.kfac.blocks import FactorShape
from offbeat.kfac.symmetric import diagonal, gram, num_packed, pack

Product = Callable[[torch.Tensor], torch.Tensor]
"""Multiplies matrices, one for each of a factor's: shape (groups, n, r) or (groups, r, n)."""


def num_pieces(shape: FactorShape, dim: int) -> int:
    """Into how many pieces a factor of `dim` rows is cut."""
    return -(-dim // shape.dim)


def moment_of(rows: torch.Tensor, shape: FactorShape, *, ones: bool = False) -> torch.Tensor:
    """The sum over n of the outer products of `rows`, packed as `shape` says.

    Args:
        rows: shape (groups, n, d), float32 or float64.
        shape: of the factor.
        ones: each row is followed by a 1, the input of a bias.
    """
    dim = rows.shape[2] + ones
    if shape.is_diagonal:
        squares = torch.linalg.vector_norm(rows, dim=1).square()
        return F.pad(squares, (0, 1), value=rows.shape[1]) if ones else squares
    pieces = num_pieces(shape, dim)
    if pieces == 1:
        return pack(gram(rows, ones=ones))
    if ones:
        rows = F.pad(rows, (0, 1), value=1.0)
    cut = F.pad(rows, (0, pieces * shape.dim - dim)).unflatten(2, (pieces, shape.dim))
    return pack(gram(cut.movedim(2, 1).flatten(0, 1)))


def packed_pieces(moment: torch.Tensor, shape: FactorShape) -> torch.Tensor:
    """What `shape` keeps of `moment`, shape (groups, d, d), of which only upper triangles are read:
    packed.
    """
    groups, dim, _ = moment.shape
    if shape.is_diagonal:
        return moment.diagonal(dim1=1, dim2=2).contiguous()
    pieces = num_pieces(shape, dim)
    if pieces == 1:
        return pack(moment)
    cut = moment.new_zeros(groups, pieces, shape.dim, shape.dim)
    for piece in range(pieces):
        some = slice(piece * shape.dim, min((piece + 1) * shape.dim, dim))
        length = some.stop - some.start
        cut[:, piece, :length, :length] = moment[:, some, some]
    return pack(cut.flatten(0, 1))


def is_whole(size: Sequence[int], shape: FactorShape) -> bool:
    """Whether `size` is that of packed matrices which `shape` keeps in pieces, or the diagonals
    of. Matrices in other pieces are none of these.
    """
    groups, dim = _uncut(shape)
    return shape.uses == 1 and tuple(size) == (groups, num_packed(dim))


def _uncut(shape: FactorShape) -> tuple[int, int]:
    """How many matrices there are before they are cut, and the rows of each."""
    groups = shape.groups // shape.pieces
    return groups, (shape.groups * shape.dim - shape.padding) // groups


def cut_packed(packed: torch.Tensor, shape: FactorShape) -> torch.Tensor:
    """What `shape` keeps of whole matrices, packed, of which `is_whole` is true."""
    groups, dim = _uncut(shape)
    if shape.is_diagonal:
        return diagonal(packed, dim)
    pieces = num_pieces(shape, dim)
    cut = packed.new_zeros(groups, pieces, num_packed(shape.dim))
    for piece in range(pieces):
        first, stop, place = piece * shape.dim, min((piece + 1) * shape.dim, dim), 0
        for row in range(first, stop):
            begin, length = row * dim - row * (row - 1) // 2, stop - row
            cut[:, piece, place : place + length] = packed[:, begin : begin + length]
            place += first + shape.dim - row
    return cut.flatten(0, 1)


def padded(matrices: torch.Tensor, outputs: FactorShape, inputs: FactorShape) -> torch.Tensor:
    """`matrices`, shape (groups, m, n), with zeros as far as pieces need them."""
    _, rows, columns = matrices.shape
    down = num_pieces(outputs, rows) * outputs.dim - rows
    right = num_pieces(inputs, columns) * inputs.dim - columns
    return F.pad(matrices, (0, right, 0, down)) if right or down else matrices


def multiply_columns(matrices: torch.Tensor, shape: FactorShape, product: Product) -> torch.Tensor:
    """Have the columns of `matrices` multiplied, piece by piece.

    Args:
        matrices: shape (groups, m, n), padded.
        shape: of the factor that goes with the columns, not a diagonal. If it serves all groups,
            they are one large matrix.
        product: gets and returns shape (matrices of the factor, rows, r).

    Returns:
        Shape (groups, m, n).
    """
    groups, rows, columns = matrices.shape
    pieces = columns // shape.dim
    is_shared = shape.groups == pieces and groups > 1
    whole = matrices.flatten(0, 1)[None] if is_shared else matrices
    if pieces == 1:
        return product(whole).reshape(groups, rows, columns)
    cut = whole.unflatten(2, (pieces, shape.dim)).movedim(2, 1).flatten(0, 1)
    found: torch.Tensor = product(cut).unflatten(0, (-1, pieces)).movedim(1, 2)
    return found.reshape(groups, rows, columns)


def multiply_rows(matrices: torch.Tensor, shape: FactorShape, product: Product) -> torch.Tensor:
    """The same for the rows of `matrices`, which have a factor for each group. `product` gets and
    returns shape (matrices of the factor, r, n).
    """
    groups, rows, columns = matrices.shape
    if rows == shape.dim:
        return product(matrices)
    cut: torch.Tensor = matrices.unflatten(1, (rows // shape.dim, shape.dim)).flatten(0, 1)
    found: torch.Tensor = product(cut).reshape(groups, rows, columns)
    return found
