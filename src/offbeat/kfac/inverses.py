"""Damped inverses of factors: many matrices at a time, and a way out where one is not positive
definite.

1. Matrices of one size, whatever layers they belong to, are decomposed by Cholesky in one call.
2. One that is not positive definite is tried again with ten times the damping, then in float64.
3. One that never is gets an inverse of zeros, which stands for "none": what is kept of an inverse
   has a positive diagonal, so zeros cannot be mistaken, travel like any inverse, and tell every
   rank that this layer gets plain gradients.

What is kept is either the inverse itself or the triangle U of A = U^T U, of the same size. Making a
triangle takes a third of the operations and a quarter of the time; solving with U takes as many as
multiplying by the inverse, but more time. So triangles are for those who make new ones often.

In bfloat16 an inverse is kept as a square, which has as many bytes as a float32 triangle, can be
multiplied by as it is, and is several times as fast to multiply by where the hardware knows
bfloat16. Against preconditioned gradients P in float64 of the same factors and gradients, with
damping 0.003 and 0.01, those of a convolutional network on images of 32 x 32 were off by 0.4 to
0.5% of their length after 12 and 60 steps, those on `digits` by 1.1 to 1.7% after 20 to 200, and
<P, gradient> by at most 0.15%; the worst layer, a factor with condition number 300, by 2.4%.
Rounding gradients alone makes half to five sixths of that. Keeping the diagonal apart in float32,
or 1 - damping * inverse in place of the inverse, takes off an eighth to two thirds: not worth a
form of its own. The error is relative to the largest eigenvalue of the inverse; so where a damped
factor's condition number is above 2^8 or so, little but rounding is left of P along the
eigenvectors with its largest eigenvalues.

Many matrices of one or two rows, as norms have one for each channel, are kept as inverses in place
of triangles, and are inverted by their cofactors.

Cost for d rows: d^3 / 3 operations for a triangle, d^3 for an inverse, and d^2 numbers of scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from offbeat.kfac.blocks import FactorSlot
from offbeat.kfac.curvature import KFACSettings
from offbeat.kfac.factors import (
    FactorShape,
    cholesky_,
    mirror_,
    pack,
    unpack,
    unpack_triangles,
)
from offbeat.torch_private import has_avx512_bfloat16

InverseForm: TypeAlias = Literal["triangle", "inverse", "bfloat16"]
"""What is kept of an inverse; "bfloat16": itself, rounded, and square."""

RETRIES: tuple[tuple[float, torch.dtype | None], ...] = ((10.0, None), (10.0, torch.float64))
"""How a matrix that is not positive definite is tried again: by how much the damping is multiplied,
and in which dtype (None: the factor's).
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class InversionTask:
    """One factor to be inverted.

    Attributes:
        name: for warnings.
        packed: the factor's average, of its packed shape.
        shape: of the factor.
        damping: added to its diagonal, > 0; a scalar tensor, on the factor's device.
        valid: whether there is an average at all; a scalar tensor of bools, on the factor's device.
    """

    name: str
    packed: torch.Tensor
    shape: FactorShape
    damping: torch.Tensor
    valid: torch.Tensor


MOST_AT_ONCE = 1 << 21
"""Elements of the squares that a CPU inverts in one call, unless one has more."""

STEPS_OF_A_TRIANGLE = 25
"""On a CPU an inverse is worth its making if it serves more steps than this."""


def usual_form(device: torch.device, inverse_interval: int) -> InverseForm:
    """Inverses, except where a CPU makes new ones often. GPUs are slow at solving."""
    are_worth_it = is_asynchronous(device) or inverse_interval > STEPS_OF_A_TRIANGLE
    return "inverse" if are_worth_it else "triangle"


def form_for(form: InverseForm, shape: FactorShape) -> InverseForm:
    """In which form inverses of a factor are kept where others are in `form`."""
    return "inverse" if form == "triangle" and shape.is_tiny else form


def is_asynchronous(device: torch.device) -> bool:
    """Whether asking for a value makes the host wait."""
    return device.type not in ("cpu", "meta")


class Inverter:
    """Inverts factors by Cholesky decomposition.

    Args:
        warn: is told, once for each, of factors that have no inverse.
        form: what to keep of inverses; diagonal factors have reciprocals in either form.
    """

    def __init__(self, warn: Callable[[str], None], form: InverseForm) -> None:
        self._warn = warn
        self._form = form
        self._warned: set[str] = set()

    def stored_shape(self, shape: FactorShape) -> tuple[int, int]:
        """Shape of what is kept of a factor's inverse."""
        if self._form == "bfloat16" and not shape.is_diagonal:
            return shape.groups, shape.dim**2
        return shape.joined.packed

    def stored_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In what dtype inverses of factors in `dtype` are kept."""
        return torch.bfloat16 if self._form == "bfloat16" else dtype

    def invert(
        self, tasks: Sequence[InversionTask], *, rooms: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """What stands for the inverses of (factor + damping * identity), in the order of `tasks`;
        zeros where there is none. They may be made in `rooms`, the memory where they will be kept.
        """
        inverses: list[torch.Tensor] = [task.packed for task in tasks]
        are_good: list[tuple[list[int], torch.Tensor]] = []
        kinds: dict[object, list[int]] = {}
        for number, task in enumerate(tasks):
            shape, packed = task.shape, task.packed
            kind = shape.dim, shape.is_diagonal, shape.is_tiny, packed.dtype, packed.device
            kinds.setdefault(kind, []).append(number)
        for numbers in kinds.values():  # what can be done in one call
            some = [tasks[number] for number in numbers]
            room = rooms[numbers[0]] if rooms is not None and len(some) == 1 else None
            if some[0].shape.is_diagonal:
                results = _reciprocals(some, self.stored_dtype(some[0].packed.dtype))
            else:
                results, good = self._decompose(some, room)
                are_good.append((numbers, good))
            for number, result in zip(numbers, results, strict=True):
                inverses[number] = result
        # The host waits for the answers of all batches together.
        if are_good and not bool(torch.cat([good for _, good in are_good]).all()):
            for numbers, good in are_good:
                self._retry_failed([(tasks[number], inverses[number]) for number in numbers], good)
        return inverses

    def _decompose(
        self, tasks: Sequence[InversionTask], room: torch.Tensor | None
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """What stands for the inverses of factors of one shape, and for each of their matrices
        whether nothing went wrong.
        """
        dim, groups = tasks[0].shape.dim, [task.shape.groups for task in tasks]
        packed = tasks[0].packed if len(tasks) == 1 else torch.cat([task.packed for task in tasks])
        damping = torch.cat([task.damping.expand(task.shape.groups) for task in tasks])
        form = form_for(self._form, tasks[0].shape)
        num_at_once = len(packed)
        if not is_asynchronous(packed.device):
            # A CPU gains nothing by further ones in one call, and needs memory for all of them.
            num_at_once = max(MOST_AT_ONCE // dim**2, 1)
        goods = []
        found = room
        if found is None:
            found = torch.empty(
                (len(packed), self.stored_shape(tasks[0].shape)[1]),
                dtype=self.stored_dtype(packed.dtype),
                device=packed.device,
            )
        portions = (whole.split(num_at_once) for whole in (packed, damping, found))
        for some, of_each, place in zip(*portions, strict=True):
            results, good = damp_and_invert_(unpack_triangles(some, dim), of_each, form)
            place.copy_(self._keep(results))
            goods.append(good)
        good = torch.cat(goods)
        counted = torch.cat([task.valid.expand(task.shape.groups) for task in tasks])
        found.masked_fill_(~counted[:, None], 0.0)
        return list(found.split(groups)), good | ~counted

    def _retry_failed(
        self, done: Sequence[tuple[InversionTask, torch.Tensor]], good: torch.Tensor
    ) -> None:
        """Make anew what is not `good` of the inverses of factors of one shape."""
        matrices = [(*each, group) for each in done for group in range(each[0].shape.groups)]
        for (task, inverse, group), is_good in zip(matrices, good.tolist(), strict=True):
            if not is_good:
                inverse[group] = self._keep(self._retry(task, task.packed[group : group + 1]))[0]

    def _keep(self, results: torch.Tensor) -> torch.Tensor:
        """What is kept of inverses, shape (n, d, d): shape (n, ...)."""
        return results.flatten(1) if self._form == "bfloat16" else pack(results)

    def _retry(self, task: InversionTask, packed: torch.Tensor) -> torch.Tensor:
        """What stands for the inverse of the one matrix `packed` of a factor, which failed, shape
        (1, d, d); zeros where every further attempt fails too.
        """
        form, dim = form_for(self._form, task.shape), task.shape.dim
        for times, dtype in RETRIES:
            matrix = unpack(packed.to(dtype or packed.dtype), dim)
            damping = (task.damping * times).to(matrix.dtype)[None]
            result, good = damp_and_invert_(matrix, damping, form)
            if good:
                return result.to(packed.dtype)
        if task.name not in self._warned:
            self._warned.add(task.name)
            self._warn(
                f"K-FAC's factor {task.name} is not positive definite, even in float64 and with"
                f" {RETRIES[-1][0]:g} times the damping; its layer gets plain gradients until it is"
            )
        return packed.new_zeros(1, dim, dim)


def damp_and_invert_(
    matrices: torch.Tensor, damping: torch.Tensor, form: InverseForm
) -> tuple[torch.Tensor, torch.Tensor]:
    """Invert `matrices`, shape (n, d, d), which are overwritten, after adding `damping`, shape
    (n,), to their diagonals.

    Returns:
        Inverses, or triangles in upper triangles; zeros where there is none. And whether there is
        one, shape (n,).
    """
    matrices.diagonal(dim1=1, dim2=2).add_(damping[:, None])
    has_tiny = FactorShape(groups=len(matrices), dim=matrices.shape[1]).is_tiny
    if has_tiny and form != "triangle":
        return _by_cofactors(matrices)
    has_values = matrices.device.type != "meta"
    if not has_tiny and has_values and not is_asynchronous(matrices.device):
        return _on_host(matrices, form)
    return _on_device(matrices, form)


def _on_host(matrices: torch.Tensor, form: InverseForm) -> tuple[torch.Tensor, torch.Tensor]:
    """In main memory, where the host may ask for a value at no cost."""
    good = cholesky_(matrices, inverts=form != "triangle") & _all_finite(matrices)
    if form == "bfloat16":
        mirror_(matrices)
    if not good.all():
        matrices = torch.where(good[:, None, None], matrices, 0.0)
    return matrices, good


def _on_device(matrices: torch.Tensor, form: InverseForm) -> tuple[torch.Tensor, torch.Tensor]:
    """Without asking for values, for which the host would wait on a GPU: every matrix is masked."""
    result, info = torch.linalg.cholesky_ex(matrices)
    good = (info == 0) & _all_finite(result)
    # In a simulation the decomposition takes the time of the whole inversion.
    if form != "triangle" and not matrices.is_meta:
        identity = torch.eye(matrices.shape[1], dtype=matrices.dtype, device=matrices.device)
        # A broken triangle could make the next call raise for the whole batch.
        lower = torch.where(good[:, None, None], result, identity)
        # By `cholesky_solve` the inverses of ResNet-50's factors take 1.7 times as long on an H100.
        right = torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False)
        result = right.mT @ right
        good &= _all_finite(result)
    return result.masked_fill(~good[:, None, None], 0.0).mT, good


def _by_cofactors(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Matrices of one or two rows: what is kept of them are inverses."""
    first = matrices[:, 0, 0]
    if matrices.shape[1] == 1:
        determinant, adjugate = first, torch.ones_like(matrices)
    else:
        between, last = matrices[:, 0, 1], matrices[:, 1, 1]
        determinant = first * last - between * between
        adjugate = torch.stack([last, -between, -between, first], dim=1).view_as(matrices)
    good = (first > 0) & (determinant > 0) & torch.isfinite(determinant)
    found = adjugate / determinant[:, None, None]
    return found.masked_fill(~good[:, None, None], 0.0), good


def _all_finite(matrices: torch.Tensor) -> torch.Tensor:
    """Whether diagonals are finite, shape (n,). What is not finite elsewhere in a decomposition
    gets into the diagonal.
    """
    return torch.isfinite(matrices.diagonal(dim1=1, dim2=2).sum(dim=1))


def _reciprocals(tasks: Sequence[InversionTask], dtype: torch.dtype) -> list[torch.Tensor]:
    """Diagonal factors need no decomposition."""
    return [
        (1 / (task.packed + task.damping)).to(dtype).masked_fill(~task.valid, 0.0) for task in tasks
    ]


def form_of(
    slots: Sequence[FactorSlot], settings: KFACSettings, *, same_devices: bool
) -> InverseForm:
    """In which form inverses are kept. The same on all ranks.

    Where the settings leave bfloat16 open it is taken where it costs nothing: inverses are made
    anyway, no factor is in float64, and the devices, which must be of one kind, multiply in
    bfloat16 faster than in float32.

    Args:
        slots: the factors.
        settings: what the user has asked for.
        same_devices: whether all ranks compute on devices of one kind.
    """
    device = slots[0].device
    usual = usual_form(device, settings.inverse_interval)
    rounds = settings.curvature.inverse_dtype == "bfloat16"
    if settings.curvature.inverse_dtype == "auto":
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
