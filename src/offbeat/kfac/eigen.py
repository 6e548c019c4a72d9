"""Eigendecompositions of factors: an alternative to damped inverses.

With A = Q_A diag(v_A) Q_A^T, and G likewise, the damping is added to the eigenvalues of the
Kronecker product, once, and may be changed without decomposing anew:

    P = Q_G ((Q_G^T grad Q_A) / (v_G v_A^T + damping)) Q_A^T

(arXiv 2007.00784). That is what damping with pi comes near to. Without pi the damping is added to
v_G and to v_A, as to the factors. A decomposition takes several times as long as a Cholesky
inverse, twice the memory of a packed one, and applying it takes two more products.

What is kept and travels of one is a row of numbers for each group: 1, eigenvalues, eigenvectors.
Zeros stand for none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

# documented, but not in its __all__
from torch.linalg import LinAlgError

from offbeat.kfac.blocks import FactorShape, FactorSlot
from offbeat.kfac.inverses import (
    InverseForm,
    InversionTask,
    Inverter,
    batches_of_one_shape,
    has_inverse,
    usual_form,
)
from offbeat.kfac.options import KFACSettings
from offbeat.kfac.symmetric import unpack
from offbeat.torch_private import has_avx512_bfloat16

StoredForm: TypeAlias = InverseForm | Literal["eigen"]
"""What is kept of factors, to be put to use in several steps."""


@dataclass(frozen=True, slots=True)
class Eigendecomposition:
    """A factor's eigenvectors and eigenvalues.

    Attributes:
        vectors: shape (groups, d, d), in columns; None for a diagonal factor, whose vectors are the
            identity's. Zeros: none.
        values: shape (groups, d), >= 0. -1: there is no decomposition.
    """

    vectors: torch.Tensor | None
    values: torch.Tensor

    @classmethod
    def of(cls, kept: torch.Tensor, shape: FactorShape) -> Eigendecomposition:
        """What `kept`, of the shape that `Decomposer.stored_shape` says, stands for. The results
        are views of it, as far as they can be.
        """
        values = torch.where(has_inverse(kept), kept[:, 1 : 1 + shape.dim], -1.0)
        vectors = (
            None
            if shape.is_diagonal
            else kept[:, 1 + shape.dim :].unflatten(1, (shape.dim, shape.dim))
        )
        return cls(vectors, values)

    def row(self) -> torch.Tensor:
        """The inverse of `of`."""
        exists = (self.values >= 0).all()
        parts = [torch.ones_like(self.values[:, :1]), self.values]
        if self.vectors is not None:
            parts.append(self.vectors.flatten(1))
        return torch.where(exists, torch.cat(parts, dim=1), 0.0)


class Decomposer:
    """Decomposes factors where `Inverter` inverts them.

    Args:
        warn: is told, once for each, of factors that have no decomposition.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._warned: set[str] = set()

    def stored_shape(self, shape: FactorShape) -> tuple[int, int]:
        """Shape of what is kept of a factor's decomposition."""
        shape = shape.joined
        return shape.groups, 1 + shape.dim + (0 if shape.is_diagonal else shape.dim**2)

    def invert(
        self, tasks: Sequence[InversionTask], *, rooms: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """What stands for the decompositions of the factors, undamped, in the order of `tasks`;
        zeros where there is none.
        """
        return [eigen.row() for eigen in decompose(tasks, self._warn_once)]

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            self._warn(message)


def form_of(
    slots: Sequence[FactorSlot], settings: KFACSettings, *, same_devices: bool
) -> StoredForm:
    """In which form inverses are kept. The same on all ranks.

    Where the settings leave bfloat16 open it is taken where it costs nothing: inverses are made
    anyway, no factor is in float64, and the devices, which must be of one kind, multiply in
    bfloat16 faster than in float32.

    Args:
        slots: the factors.
        settings: what the user has asked for.
        same_devices: whether all ranks compute on devices of one kind.
    """
    if settings.eigen:
        return "eigen"
    device = slots[0].device
    usual = usual_form(device, settings.inverse_steps.first_interval)
    rounds = settings.bfloat16
    if rounds is None:
        rounds = (
            same_devices
            and usual == "inverse"
            and all(slot.dtype == torch.float32 for slot in slots)
            and multiplies_bfloat16_fast(device)
        )
    return "bfloat16" if rounds else usual


def multiplies_bfloat16_fast(device: torch.device) -> bool:
    """Whether `device` has instructions for products in bfloat16."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and has_avx512_bfloat16()


def make_inverter(form: StoredForm, warn: Callable[[str], None]) -> Inverter | Decomposer:
    """What turns factors into what is kept of them in `form`. `warn` is told of failures."""
    return Decomposer(warn) if form == "eigen" else Inverter(warn, form)


def decompose(
    tasks: Sequence[InversionTask], warn: Callable[[str], None]
) -> list[Eigendecomposition]:
    """Eigendecompositions of the factors of `tasks`, undamped, those of one size in one call.
    `warn` is told of failures.
    """
    found: list[Eigendecomposition | None] = [None] * len(tasks)
    for numbers in batches_of_one_shape(tasks):
        some = [tasks[number] for number in numbers]
        for number, eigen in zip(numbers, _decompose(some, warn), strict=True):
            valid = tasks[number].valid
            found[number] = Eigendecomposition(
                eigen.vectors, torch.where(valid, eigen.values, -1.0)
            )
    return [eigen for eigen in found if eigen is not None]


def _decompose(
    tasks: Sequence[InversionTask], warn: Callable[[str], None]
) -> list[Eigendecomposition]:
    if tasks[0].shape.is_diagonal:
        return [Eigendecomposition(None, task.packed) for task in tasks]
    groups = [task.shape.groups for task in tasks]
    matrices = unpack(torch.cat([task.packed for task in tasks]), tasks[0].shape.dim)
    try:
        values, vectors = torch.linalg.eigh(matrices)
    except LinAlgError:
        # One matrix without a decomposition must not cost the others of its batch theirs.
        if len(tasks) > 1:
            return [eigen for task in tasks for eigen in _decompose([task], warn)]
        return [_decompose_in_float64(tasks[0], matrices, warn)]
    pairs = zip(vectors.split(groups), values.clamp_(min=0).split(groups), strict=True)
    return [Eigendecomposition(some_vectors, some_values) for some_vectors, some_values in pairs]


def _decompose_in_float64(
    task: InversionTask, matrices: torch.Tensor, warn: Callable[[str], None]
) -> Eigendecomposition:
    """In float64, or not at all."""
    try:
        values, vectors = torch.linalg.eigh(matrices.double())
    except LinAlgError:
        warn(
            f"K-FAC's factor {task.name} has no eigendecomposition, even in float64; its layer gets"
            " plain gradients until it has"
        )
        return Eigendecomposition(
            torch.zeros_like(matrices), torch.full_like(matrices[..., 0], -1.0)
        )
    return Eigendecomposition(vectors.to(matrices), values.clamp_(min=0).to(matrices))
