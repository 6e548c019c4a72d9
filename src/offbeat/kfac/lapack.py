"""Cholesky decompositions and inverses in main memory, by scipy's LAPACK: torch's takes half as
long again on CPUs by AMD. Sums of outer products, by scipy's BLAS: a product of torch's takes 1.3
to 1.6 times as long, even where only blocks on and above the diagonal are multiplied. And triangles
that are packed and unpacked row by row.

scipy's libraries have threads of their own; here they get as many as torch has, so that one thread
for a worker means one. That needs threadpoolctl, which `offbeat[lab]` and scikit-learn bring;
without it they have as many threads as OMP_NUM_THREADS says, which torchrun sets to 1.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import scipy
import torch
from scipy.linalg import blas, lapack

try:
    from threadpoolctl import ThreadpoolController
except ModuleNotFoundError:
    ThreadpoolController = None


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


def packed_triangles(matrices: torch.Tensor) -> torch.Tensor:
    """The upper triangles of `matrices`, shape (n, d, d), float32 or float64, on the CPU, row by
    row: shape (n, d (d + 1) / 2).
    """
    pack = lapack.dtrttp if matrices.dtype == torch.float64 else lapack.strttp
    # LAPACK's lower triangles, column by column, are upper ones row by row.
    rows = [
        torch.from_numpy(pack(matrix.T, uplo="L")[0])
        for matrix in matrices.detach().contiguous().numpy()
    ]
    return rows[0][None] if len(rows) == 1 else torch.stack(rows)


def unpacked_triangles(packed: torch.Tensor, dim: int) -> torch.Tensor:
    """The inverse of `packed_triangles`, shape (n, dim, dim). What lies below the diagonals means
    nothing.
    """
    unpack = lapack.dtpttr if packed.dtype == torch.float64 else lapack.stpttr
    matrices = [
        torch.from_numpy(unpack(dim, triangle, uplo="L")[0].T)
        for triangle in packed.detach().contiguous().numpy()
    ]
    return matrices[0][None] if len(matrices) == 1 else torch.stack(matrices)
