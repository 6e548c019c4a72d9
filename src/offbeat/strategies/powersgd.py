"""PowerSGD (arXiv 1905.13727, algorithms 1 and 2): gradients as products of two thin matrices.

    M = residual + weight * gradient                of each parameter, shape (n, m)
    P = M Q                                         Q: the last step's, at first random
    all-reduce P, a message for each bucket while backward goes on
    orthonormalise the columns of P
    Q = M^T P
    all-reduce Q, one message for all buckets
    result = P Q^T;  residual = M - P (M^T P)^T

The exchange is linear, so there is one way for any number of ranks, and the mean is that of all.
Parameters whose P and Q would be more than half of them (vectors, thin matrices) travel whole, in
P's message.

Cost per step: two all-reduces of r (n + m) elements for each parameter of shape (n, m), the first
one overlapped with backward; three products of n m r multiplications.

Differences from the paper: a rank owes what its own projection has lost, and not the difference
from the mean of all. The sum over ranks is the same, so the result is; what one rank owes is less.
Elements of Q that come out as zero keep their last value for the next step: with the paper's rule a
matrix whose gradient is zero once, as below a layer that begins with zeros, is zero ever after.

Replicas stay identical only as long as all ranks multiply matrices alike: on unlike processors the
last bits may differ.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

import torch
from typing_extensions import override

from offbeat.callbacks.context import Context
from offbeat.codec.described_options import OneOrMore
from offbeat.codec.tally import Tally
from offbeat.gradients.buckets import Bucket, num_rows
from offbeat.gradients.exchange import GradientTransform
from offbeat.gradients.reductions import (
    ResidualReduction,
    WeightedGradient,
    launch_sums,
)
from offbeat.strategies.gradient import GradientStrategy, Reductions
from offbeat.torch_private import for_each
from offbeat.transport.driver import Driver, Stream


@dataclass(frozen=True, kw_only=True)
class PowerSGD(GradientStrategy):
    """Gradients as products of two thin matrices.

    Args:
        rank: columns of these matrices, >= 1: 1, 2 or 4 are usual.
    """

    trains_islands = True
    needs_optimizer: ClassVar[bool] = False

    rank: OneOrMore = 2

    @override
    def reductions(self, context: Context, transform: GradientTransform) -> Reductions:
        driver, new_stream = context.driver, context.new_stream
        rights = RightFactors(driver, new_stream())
        pairs = [
            (bucket, LowRankReduction(bucket, driver, new_stream(), rank=self.rank, rights=rights))
            for bucket in self.buckets(context)
        ]
        return Reductions(pairs)


_MAX_SHARE = 0.5  # of the elements of a parameter that its P and Q may have


@dataclass(frozen=True, kw_only=True, slots=True)
class _Matrix:
    """A parameter that is reduced by two factors.

    Attributes:
        name: the parameter's.
        position: the parameter's, in the bucket.
        rows: n.
        right: Q transposed, shape (r, m), the same on every rank.
    """

    name: str
    position: int
    rows: int
    right: torch.Tensor


class RightFactors:
    """The second message of an exchange, which brings Q of all buckets.

    Args:
        driver: carries it out.
        stream: its channels.

    Attributes:
        reductions: of the buckets whose factors travel, in the order in which they are launched.
    """

    def __init__(self, driver: Driver, stream: Stream) -> None:
        self._driver, self._stream = driver, stream
        self.reductions: list[LowRankReduction] = []

    def exchange(self) -> None:
        """Called when all buckets are launched, at the same point on all ranks: dense operations of
        different ranks are matched by the order in which they begin.
        """
        sums = [reduction.left_sums() for reduction in self.reductions]
        tallies = Tally.read_from([tail for _, tail in sums])
        is_good = all(tally.good for tally in tallies)  # else the other factors are of no use
        lefts = _orthonormal([parts if is_good else [] for parts, _ in sums])
        factors = [
            factor
            for reduction, tally, left in zip(self.reductions, tallies, lefts, strict=True)
            for factor in reduction.right_factors(tally, left)
        ]
        if not factors:
            return
        message = torch.cat([factor.flatten() for factor in factors])
        for pending in launch_sums(self._driver, self._stream, message):
            pending.wait()
        last = torch.cat([each.flatten() for one in self.reductions for each in one.rights])
        # What is zero would be so for ever, and a layer whose first gradient is zero never learn.
        coming = torch.where(message == 0, last, message)
        sizes = [factor.numel() for factor in factors]
        both = zip(message.split(sizes), coming.split(sizes), strict=True)
        for reduction in self.reductions:
            reduction.take(list(islice(both, len(reduction.rights))))


class LowRankReduction(ResidualReduction):
    """Weighted mean of one bucket. All of an exchange share `rights`.

    Memory beside the gradient: two buffers of its size and the factors.

    Args:
        bucket: what will be reduced; fixes sizes and names of the state.
        driver: carries the all-reduces out.
        stream: this bucket's channels.
        rank: r, of the matrices that travel, >= 1.
        rights: brings Q.
    """

    only_queues: ClassVar[bool] = True

    def __init__(
        self, bucket: Bucket, driver: Driver, stream: Stream, *, rank: int, rights: RightFactors
    ) -> None:
        super().__init__(bucket, driver, stream)
        self._rights = rights
        self._sizes = [parameter.numel() for parameter in bucket.parameters]
        self._matrices, self._whole = _split(bucket, rank, self._residual)
        rights.reductions.append(self)
        # What one exchange leaves for the methods that end it, from `launch` on:
        self._totals: Sequence[torch.Tensor] = ()  # of P, and of the parameters that travel whole
        self._lefts: list[torch.Tensor] = []
        self._new_rights: list[list[torch.Tensor]] = []

    @override
    def _launch(self, given: WeightedGradient) -> None:
        self._add_owed(given)
        # Factors are kept and multiplied by rows: thin columns take up to 16 times as long.
        matrices, whole = self._places(self._mine)
        lefts = [
            each.right @ matrix.T for each, matrix in zip(self._matrices, matrices, strict=True)
        ]
        # A gradient that is not finite makes its P so, or is a part itself.
        self._totals = self._sum_tallied([*lefts, *whole], given.tally)

    def _places(self, flat: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """In a buffer: the matrices, each of shape (n, m), and what travels whole."""
        places = flat.split(self._sizes)
        matrices = [places[each.position].view(each.rows, -1) for each in self._matrices]
        return matrices, [places[position] for position in self._whole]

    def left_sums(self) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        """The sums over ranks of P of each matrix, shape (r, n), and what the tally of all ranks is
        written to.
        """
        for pending in self._sums:
            pending.wait()
        self._sums = ()
        lefts = zip(self._matrices, self._totals, strict=False)
        return [total.view(each.right.shape[0], -1) for each, total in lefts], self._tail

    @property
    def rights(self) -> list[torch.Tensor]:
        """Q of each matrix, shape (r, m), that this step began with."""
        return [each.right for each in self._matrices]

    def right_factors(self, tally: Tally, lefts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """This rank's Q of each matrix, shape (r, m).

        Args:
            tally: of all ranks.
            lefts: P of each matrix, orthonormal, shape (r, n); empty: this step is not applied.
        """
        begin_s, mine = time.perf_counter(), []
        self.tally, self._lefts, self._new_rights = tally, list(lefts), []
        for matrix, left in zip(self._places(self._mine)[0], lefts, strict=False):
            right = left @ matrix
            matrix.addmm_(left.T, right, alpha=-1)  # what is left of it is owed
            mine.append(right)
        self.encode_s += time.perf_counter() - begin_s
        return mine

    def take(self, factors: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Of each matrix, the sum of Q over all ranks, and the Q that the next step begins with,
        each of shape (r m,).
        """
        self._new_rights = [
            [factor.to(right.dtype).view_as(right) for factor in both]
            for right, both in zip(self.rights, factors, strict=True)
        ]

    @override
    def wait(self) -> Tally:
        if self._sums:  # the first bucket that is waited for
            self._rights.exchange()
        return self.tally

    @override
    def _commit(self) -> torch.Tensor:
        flat = self._bucket.flat
        total = flat if flat.dtype == self._mine.dtype else torch.empty_like(self._mine)
        matrices, whole = self._places(total)
        for matrix, left, (right, _) in zip(matrices, self._lefts, self._new_rights, strict=True):
            torch.mm(left.T, right, out=matrix)
        # In one call each: on a GPU the host would otherwise launch a kernel for each parameter.
        for_each("copy_", self.rights, [coming for _, coming in self._new_rights])
        for_each("copy_", whole, self._totals[len(matrices) :])
        for_each("zero_", self._places(self._mine)[1])
        self._residual, self._mine = self._mine, self._residual
        self._show(total)
        self._mark_unused_with_gradient()
        return flat

    @override
    def send_all(self) -> None:
        self._matrices, self._whole = [], [0]
        self._sizes = [self._bucket.num_elements]

    @override
    def local_state(self) -> dict[str, float | torch.Tensor]:
        rights = {f"right/{each.name}": each.right for each in self._matrices}
        return super().local_state() | rights

    @override
    def load(self, additive: Mapping[str, torch.Tensor], local: Mapping[str, Any]) -> None:
        """A parameter that travelled whole begins with the Q that a new run has."""
        super().load(additive, local)
        for each in self._matrices:
            saved = local.get(f"right/{each.name}")
            if saved is not None:
                each.right.copy_(saved)


def _split(bucket: Bucket, rank: int, like: torch.Tensor) -> tuple[list[_Matrix], list[int]]:
    """The matrices of a bucket, and the positions of those parameters that travel whole."""
    matrices, whole = [], []
    for position, (name, parameter, begin) in enumerate(
        zip(bucket.names, bucket.parameters, bucket.offsets, strict=False)
    ):
        size = parameter.numel()
        rows = num_rows(parameter)
        columns = size // max(1, rows)
        if parameter.dim() > 1 and (rows + columns) * rank < _MAX_SHARE * size:
            # The same on every rank, and another one for each parameter.
            draw = torch.Generator().manual_seed(len(name) + begin + size)
            right = torch.randn(rank, columns, generator=draw).to(like)
            matrices.append(_Matrix(name=name, position=position, rows=rows, right=right))
        else:
            whole.append(position)
    return matrices, whole


def _orthonormal(parts: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """`orthonormal` of each matrix of each bucket: those of one shape together, since on a GPU the
    host needs longer to launch what is done with one than the device to do it.
    """
    every = [matrix for part in parts for matrix in part]
    alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[int]] = {}
    for number, matrix in enumerate(every):
        alike.setdefault((matrix.shape, matrix.dtype, matrix.device), []).append(number)
    for numbers in alike.values():
        made = orthonormal(torch.stack([every[number] for number in numbers]))
        for number, matrix in zip(numbers, made.unbind(), strict=True):
            every[number] = matrix
    result = iter(every)
    return [list(islice(result, len(part))) for part in parts]


def orthonormal(rows: torch.Tensor) -> torch.Tensor:
    """The rows of matrices, shape (..., r, n), each made orthogonal to those before it and of norm
    1 (Gram and Schmidt); one that depends on those before it becomes zero.
    """
    result = rows.clone()
    for place in range(result.shape[-2]):
        row, before = result[..., place, :], result[..., :place, :]
        norm = torch.linalg.vector_norm(row, dim=-1, keepdim=True)
        for _ in range(2 if place else 0):  # once more, for what rounding has left of the others
            shares = (before * row.unsqueeze(-2)).sum(-1, keepdim=True)
            row -= (shares * before).sum(-2)
        rest = torch.linalg.vector_norm(row, dim=-1, keepdim=True) if place else norm
        keeps = rest > 1e-6 * norm
        row.mul_(torch.where(keeps, 1 / torch.where(keeps, rest, 1.0), 0.0))
    return result
