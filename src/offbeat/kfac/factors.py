"""Kronecker factors in memory: symmetric matrices, packed as triangles; whole, cut into pieces
along their diagonals, or diagonals alone.

`gram` sums outer products, X^T X, of which only the upper triangle is needed. In main memory
scipy's BLAS has an operation for it; a product of torch's takes 1.3 to 1.6 times as long.
Elsewhere, cut into four blocks of columns, the blocks on and above its diagonal are ten of sixteen,
so that much of the arithmetic of one large product is enough.

`pack` and `unpack` keep d (d + 1) / 2 numbers of a matrix, the upper triangle row by row. Large
ones in main memory are copied by rows, by scipy's LAPACK, which takes a fraction of the time of
gathering single numbers. For others flat indices are made once for each size and device and kept as
int32; making them anew takes ten times as long as using them. They are shared by all factors of one
size.

A factor of d rows that is cut into k pieces of r rows has zeros for what lies between pieces: its
inverse is the pieces' inverses, and multiplying by it takes d^2 / k operations for each row instead
of d^2. Where k r > d the last piece has rows of zeros, and matrices get columns of zeros to match.

Cholesky decompositions in main memory are scipy's too: torch's takes half as long again on CPUs by
AMD. scipy's libraries have threads of their own; here they get as many as torch has, so that one
thread for a worker means one. That needs threadpoolctl, which `offbeat[lab]` and scikit-learn
bring; without it they have as many threads as OMP_NUM_THREADS says, which torchrun sets to 1.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache

import scipy
import torch
import torch.nn.functional as F
from scipy.linalg import blas, lapack

try:
    from threadpoolctl import ThreadpoolController
except ModuleNotFoundError:
    ThreadpoolController = None


MAX_PIECES = 8
"""Into how many pieces a factor is cut at most. One that would need more is kept as its diagonal.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class FactorShape:
    """A factor of `groups` symmetric `dim` x `dim` matrices.

    Attributes:
        groups: how many, >= 1.
        dim: rows of each, >= 1.
        is_diagonal: only the diagonals are kept, and nothing else is there.
        padding: how many rows, of all matrices together, stand for nothing and are zeros, since
            what was cut has not the length of its pieces.
        uses: 2 for a weight that is used both ways round, whose factors are averaged apart and
            joined before they are inverted (`kfac.callback`); else 1.
    """

    groups: int
    dim: int
    is_diagonal: bool = False
    padding: int = 0
    uses: int = 1

    @property
    def packed(self) -> tuple[int, int]:
        """Shape of the packed factor: (groups, d (d + 1) / 2), or (groups, d) if diagonal; as often
        as there are uses.
        """
        return self.uses * self.groups, self.dim if self.is_diagonal else num_packed(self.dim)

    @property
    def is_tiny(self) -> bool:
        """Whether matrices are so many and so small that handling each one costs more than its
        arithmetic.
        """
        return not self.is_diagonal and self.dim <= 2 and self.groups >= 8

    @property
    def joined(self) -> FactorShape:
        """What is inverted: of all uses together."""
        return replace(self, uses=1)

    @property
    def num_elements(self) -> int:
        """Elements of the packed factor."""
        return self.packed[0] * self.packed[1]


def factor_shape(groups: int, dim: int, max_dim: int, *, spare: int = 0) -> FactorShape:
    """A factor of `groups` matrices of `dim` rows, cut into pieces of about `max_dim` rows.

    Args:
        groups: how many matrices, >= 1.
        dim: rows of each, >= 1.
        max_dim: up to how many rows a matrix is kept whole, >= 1.
        spare: how many rows more than `max_dim` are borne, so that a bias cuts nothing.

    >>> factor_shape(1, 4608, 2048)
    FactorShape(groups=3, dim=1536, is_diagonal=False, padding=0, uses=1)
    >>> factor_shape(1, 4609, 2048)
    FactorShape(groups=3, dim=1537, is_diagonal=False, padding=2, uses=1)
    >>> factor_shape(1, 50257, 2048)
    FactorShape(groups=1, dim=50257, is_diagonal=True, padding=0, uses=1)
    """
    if dim <= max_dim + spare:
        return FactorShape(groups=groups, dim=dim)
    fewest = -(-dim // max_dim)
    if fewest > MAX_PIECES:
        return FactorShape(groups=groups, dim=dim, is_diagonal=True)
    pieces = next((some for some in range(fewest, 2 * fewest) if dim % some == 0), fewest)
    rows = -(-dim // pieces)
    return FactorShape(groups=groups * pieces, dim=rows, padding=groups * (pieces * rows - dim))


NUM_CUTS = 4
MIN_BLOCK = 96
"""Narrower products than this run slower by more than what is saved."""

MIN_BY_ROWS = 64
"""Shorter rows than this are gathered."""


def gram(rows: torch.Tensor, *, ones: bool = False) -> torch.Tensor:
    """Sum over n of the outer products of `rows`.

    Args:
        rows: shape (groups, n, d), float32 or float64.
        ones: each row is followed by a 1, the input of a bias.

    Returns:
        Shape (groups, d, d), or (groups, d + 1, d + 1) with `ones`; only the upper triangles are
        meant to be read.
    """
    groups, num_rows, dim = rows.shape
    total = rows.new_zeros(groups, dim + ones, dim + ones)
    if rows.device.type == "cpu" and dim >= MIN_BLOCK and num_rows:
        squares = rows.new_zeros(groups, dim, dim) if ones else total
        sum_outer_products_(squares, rows)
        if ones:
            total[:, :dim, :dim] = squares
    else:
        block = max(-(-dim // NUM_CUTS), MIN_BLOCK)
        for start in range(0, dim, block):
            stop = min(start + block, dim)
            total[:, start:stop, start:dim] = rows[:, :, start:stop].mT @ rows[:, :, start:]
    if ones:
        total[:, :dim, dim] = rows.sum(dim=1)
        total[:, dim, dim] = num_rows
    return total


def num_packed(dim: int) -> int:
    """Elements of a packed triangle of a `dim` x `dim` matrix."""
    return dim * (dim + 1) // 2


def pack(matrices: torch.Tensor) -> torch.Tensor:
    """The upper triangles of `matrices`.

    Args:
        matrices: shape (groups, d, d), any dtype. What lies below the diagonal is not read.

    Returns:
        Shape (groups, d (d + 1) / 2), a copy.
    """
    groups, dim, _ = matrices.shape
    if not _is_copied_by_rows(matrices, dim):
        return matrices.reshape(groups, dim * dim).index_select(1, _upper(dim, matrices.device))
    copy = lapack.dtrttp if matrices.dtype == torch.float64 else lapack.strttp
    # LAPACK's lower triangles, column by column, are upper ones row by row.
    rows = [
        torch.from_numpy(copy(matrix.T, uplo="L")[0])
        for matrix in matrices.detach().contiguous().numpy()
    ]
    return rows[0][None] if len(rows) == 1 else torch.stack(rows)


def unpack(packed: torch.Tensor, dim: int) -> torch.Tensor:
    """The symmetric matrices, shape (groups, dim, dim), of `packed`, shape (groups, dim (dim + 1) /
    2).
    """
    if _is_copied_by_rows(packed, dim):
        return mirror_(unpack_triangles(packed, dim))
    both: torch.Tensor = packed.index_select(1, _both(dim, packed.device))
    return both.view(-1, dim, dim)


def unpack_triangles(packed: torch.Tensor, dim: int) -> torch.Tensor:
    """As `unpack`, for those who read upper triangles only: what lies below means nothing."""
    if not _is_copied_by_rows(packed, dim):
        return unpack(packed, dim)
    copy = lapack.dtpttr if packed.dtype == torch.float64 else lapack.stpttr
    matrices = [
        torch.from_numpy(copy(dim, triangle, uplo="L")[0].T)
        for triangle in packed.detach().contiguous().numpy()
    ]
    return matrices[0][None] if len(matrices) == 1 else torch.stack(matrices)


def mirror_(matrices: torch.Tensor) -> torch.Tensor:
    """Overwrite what lies below the diagonals of `matrices`, shape (groups, d, d), by what lies
    above. Returns them.
    """
    matrices.triu_()
    for matrix in matrices:
        # Torch transposes one matrix block by block, and several number by number.
        lower = matrix.mT.clone(memory_format=torch.contiguous_format)
        lower.diagonal().zero_()
        matrix += lower
    return matrices


def _is_copied_by_rows(tensor: torch.Tensor, dim: int) -> bool:
    return (
        tensor.device.type == "cpu"
        and dim >= MIN_BY_ROWS
        and tensor.dtype in (torch.float32, torch.float64)
    )


def diagonal_of(
    packed: torch.Tensor, shape: FactorShape, *, becomes: torch.Tensor | None = None
) -> torch.Tensor:
    """The diagonals of a factor, shape (groups, dim), which may be the packed factor itself; first
    overwritten by `becomes` if that is given.
    """
    if shape.is_diagonal:
        return packed if becomes is None else packed.copy_(becomes)
    places = _diagonal(shape.dim, packed.device)
    if becomes is not None:
        packed.index_copy_(1, places.long(), becomes)
    return packed.index_select(1, places)


def products_of_roots(diagonals: torch.Tensor, shape: FactorShape) -> torch.Tensor:
    """The roots of the diagonals' numbers, each times each, packed: what no number of a positive
    semidefinite factor exceeds.
    """
    roots = diagonals.clamp(min=0).sqrt()
    if shape.is_diagonal:
        return roots * roots
    return pack(roots[:, :, None] * roots[:, None, :])


@cache
def _upper(dim: int, device: torch.device) -> torch.Tensor:
    """Where the packed elements lie in the flattened square."""
    rows, columns = torch.triu_indices(dim, dim)
    return torch.add(columns, rows, alpha=dim).to(device=device, dtype=torch.int32)


@cache
def _both(dim: int, device: torch.device) -> torch.Tensor:
    """Where the elements of the flattened square lie among the packed ones."""
    places = torch.zeros(dim * dim, dtype=torch.int32)
    places[_upper(dim, places.device)] = torch.arange(num_packed(dim), dtype=torch.int32)
    square = places.view(dim, dim)
    return torch.maximum(square, square.mT).flatten().to(device)


@cache
def _diagonal(dim: int, device: torch.device) -> torch.Tensor:
    rows = torch.arange(dim, dtype=torch.int32, device=device)
    return dim * rows - torch.div(rows * (rows - 1), 2, rounding_mode="floor")


@cache
def _blas() -> ThreadpoolController | None:
    if ThreadpoolController is None:
        return None
    return ThreadpoolController().select(user_api="blas")


def _as_many_threads_as_torch() -> AbstractContextManager[object]:
    blas = _blas()
    return nullcontext() if blas is None else blas.limit(limits=torch.get_num_threads())


def lapack_version() -> str:
    """What decides how results are rounded, besides the number of threads."""
    blas = _blas()
    kernels = set() if blas is None else {str(entry.get("architecture")) for entry in blas.info()}
    return f"scipy {scipy.__version__} {' '.join(sorted(kernels))}"


def cholesky_(matrices: torch.Tensor, *, inverts: bool) -> torch.Tensor:
    """Decompose symmetric matrices in place, or invert them.

    Args:
        matrices: shape (n, d, d), float32 or float64, contiguous, on the CPU. Upper triangles
            become those of U, for A = U^T U, or those of the inverses; what lies below means
            nothing afterwards.
        inverts: whether to invert.

    Returns:
        Which were positive definite, as far as LAPACK can tell, shape (n,), bools. What is left of
        others means nothing.
    """
    double = matrices.dtype == torch.float64
    decompose, invert = (lapack.dpotrf, lapack.dpotri) if double else (lapack.spotrf, lapack.spotri)
    good = []
    with _as_many_threads_as_torch():
        for matrix in matrices.numpy():
            # LAPACK's lower triangles, which are laid out by columns, are upper ones by rows.
            columns = matrix.T
            _, info = decompose(columns, lower=1, clean=0, overwrite_a=1)
            if inverts and info == 0:
                _, info = invert(columns, lower=1, overwrite_c=1)
            good.append(info == 0)
    return torch.tensor(good)


def sum_outer_products_(squares: torch.Tensor, rows: torch.Tensor) -> None:
    """Overwrite the upper triangles of `squares` by the sums over n of the outer products of
    `rows`.

    Args:
        squares: shape (groups, d, d), float32 or float64, contiguous, on the CPU. What lies below
            the diagonals is left as it is.
        rows: shape (groups, n, d), of the same dtype.
    """
    product = blas.dsyrk if squares.dtype == torch.float64 else blas.ssyrk
    with _as_many_threads_as_torch():
        for square, some in zip(squares.numpy(), rows.detach().numpy(), strict=True):
            # BLAS lays matrices out by columns. One that lies otherwise would be copied.
            is_by_rows = some.strides[1] == some.itemsize
            product(
                1.0,
                some.T if is_by_rows else some,
                trans=not is_by_rows,
                beta=0.0,
                c=square.T,
                lower=1,
                overwrite_c=1,
            )


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
    if shape.is_diagonal:
        return moment.diagonal(dim1=1, dim2=2).contiguous()
    pieces = num_pieces(shape, moment.shape[1])
    if pieces == 1:
        return pack(moment)
    more = pieces * shape.dim - moment.shape[1]
    cut = F.pad(moment, (0, more, 0, more)).unflatten(2, (pieces, -1)).unflatten(1, (pieces, -1))
    return pack(cut.diagonal(dim1=1, dim2=3).movedim(3, 1).flatten(0, 1))


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
