"""Eigendecompositions of factors: an alternative to damped inverses.

With A = Q_A diag(v_A) Q_A^T, and G likewise, the damping is added to the eigenvalues of the Kronecker product, once, and may be
changed without decomposing anew:

    P = Q_G ((Q_G^T grad Q_A) / (v_G v_A^T + damping)) Q_A^T

(arXiv 2007.00784). A decomposition takes several times as long as a Cholesky inverse, twice the memory of a packed one, and
applying it takes two more products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # documented, but not in its __all__

from offbeat.curvature.inverses import Job, alike
from offbeat.curvature.packing import unpack


@dataclass(frozen=True, slots=True)
class Eigen:
    """A factor's eigenvectors and eigenvalues.

    Attributes:
        vectors: shape (groups, d, d), in columns; None for a diagonal factor, whose vectors are the identity's. Zeros: none.
        values: shape (groups, d), >= 0. -1: there is no decomposition.
    """

    vectors: torch.Tensor | None
    values: torch.Tensor


def decompose(jobs: Sequence[Job], warn: Callable[[str], None]) -> list[Eigen]:
    """Eigendecompositions of the factors of `jobs`, undamped, those of one size in one call. `warn` is told of failures."""
    found: list[Eigen | None] = [None] * len(jobs)
    for numbers in alike(jobs):
        some = [jobs[number] for number in numbers]
        for number, eigen in zip(numbers, _decompose(some, warn), strict=True):
            valid = jobs[number].valid
            found[number] = Eigen(eigen.vectors, torch.where(valid, eigen.values, -1.0))
    return [eigen for eigen in found if eigen is not None]


def _decompose(jobs: Sequence[Job], warn: Callable[[str], None]) -> list[Eigen]:
    if jobs[0].shape.is_diagonal:
        return [Eigen(None, job.packed) for job in jobs]
    groups = [job.shape.groups for job in jobs]
    matrices = unpack(torch.cat([job.packed for job in jobs]), jobs[0].shape.dim)
    try:
        values, vectors = torch.linalg.eigh(matrices)
    except LinAlgError:
        if len(jobs) > 1:
            return [eigen for job in jobs for eigen in _decompose([job], warn)]
        return [_carefully(jobs[0], matrices, warn)]
    pairs = zip(vectors.split(groups), values.clamp_(min=0).split(groups), strict=True)
    return [Eigen(some_vectors, some_values) for some_vectors, some_values in pairs]


def _carefully(job: Job, matrices: torch.Tensor, warn: Callable[[str], None]) -> Eigen:
    """In float64, or not at all."""
    try:
        values, vectors = torch.linalg.eigh(matrices.double())
    except LinAlgError:
        warn(
            f"K-FAC's factor {job.name} has no eigendecomposition, even in float64; its layer gets plain gradients until it has"
        )
        return Eigen(torch.zeros_like(matrices), torch.full_like(matrices[..., 0], -1.0))
    return Eigen(vectors.to(matrices), values.clamp_(min=0).to(matrices))
