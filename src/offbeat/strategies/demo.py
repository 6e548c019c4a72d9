"""DeMo: the fast components of momentum travel, the slow ones stay (arXiv 2411.19870, algorithm 1).

    m = decay m + gradient                                 on each rank: what is owed
    of each block of at most 64 x 64 elements of a matrix: C = its discrete cosine transform
    q = the largest entries of C;  m = m - inverse transform of q
    gradient = sign of the inverse transform of the mean of all ranks' q

The transform is linear and keeps lengths, so it is the gradient that is transformed, once, and all
else happens to cosine coefficients: what is not sent is owed, and fades by `decay`, as with any
error feedback. With `torch.optim.SGD` without momentum the step is the paper's.

Cost per step: the all-gather of k pairs (P-1 times a message's bytes for each rank); two transforms
of 64 + 64 multiplications an element.

Differences from the paper: blocks have all lengths up to 64 that divide a parameter's first
dimension and the product of the others; indices are 1 or 2 bytes where the published code sends 8;
the mean is over all ranks, and not over those that sent an entry; the learning rate and weight
decay are the optimizer's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from typing_extensions import override

from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.codec.described_options import UpToOne
from offbeat.codec.selectors import Exact
from offbeat.codec.sparseloco import ChunkSelector
from offbeat.codec.topk_codec import TopKCodec
from offbeat.collectives.topk_allgather import topk_sum
from offbeat.gradients.buckets import Bucket, num_rows
from offbeat.gradients.exchange import GradientTransform
from offbeat.gradients.reductions import (
    ExchangePlan,
    Reduction,
    SparseReduction,
    WeightedGradient,
)
from offbeat.strategies.gradient import GradientStrategy, Reductions
from offbeat.strategies.options import require_density

BLOCK = 64


@dataclass(frozen=True, kw_only=True)
class DeMo(GradientStrategy):
    """Momentum of which the largest cosine coefficients travel.

    Args:
        density: fraction of the coefficients of each block that travel in a step, in (0, 1].
        decay: of momentum, in (0, 1].
        sign: whether the optimizer gets the signs of the mean, and not the mean.
        codec: how coefficients are written: a `TopKCodec`, or names of its parts such as "linear4";
            with a selector such as "reuse" they are picked among all, and not in each block. None:
            "float32", all exact.
    """

    bucket_mib: ClassVar[float | None] = None

    density: float = 1 / 128
    decay: UpToOne = 0.999
    sign: bool = True
    codec: TopKCodec | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_density(self.density)
        self.entries()

    def entries(self) -> TopKCodec:
        """How coefficients travel. Raises `ConfigError` for a codec that is none."""
        return TopKCodec() if self.codec is None else TopKCodec.of(self.codec)

    @override
    def reduction(self, bucket: Bucket, context: Context) -> Reduction:
        return _Transformed(bucket, context, self)

    @override
    def reductions(self, context: Context, transform: GradientTransform) -> Reductions:
        found = super().reductions(context, transform)
        return found._replace(callbacks=[_Signs(context)] if self.sign else [])


class _Signs(Callback):
    """Leaves signs of gradients to the optimizer. Not before its step: what belongs to it may be
    the sum of several exchanges, and signs that were clipped would be none.
    """

    state_key: ClassVar[str] = "signs"
    may_begin_anew: ClassVar[bool] = True

    def __init__(self, context: Context) -> None:
        self._parameters, self._optimizer = context.parameters.values(), context.optimizer

    @override
    def on_before_update(self) -> None:
        # A fused optimizer divides by a GradScaler's scale within its step.
        scale = getattr(self._optimizer, "grad_scale", None)
        for parameter in self._parameters:
            if (gradient := parameter.grad) is not None:
                gradient.sign_().mul_(1.0 if scale is None else scale)


class CosineBlock(NamedTuple):
    """The blocks of one parameter: `down` x `across` of `rows` x `columns` elements, from `begin`
    on in its bucket.
    """

    begin: int
    down: int
    rows: int
    across: int
    columns: int

    @property
    def size(self) -> int:
        return self.down * self.rows * self.across * self.columns


def blocks_of(bucket: Bucket) -> list[CosineBlock]:
    """The blocks of each of its parameters."""
    found = []
    for parameter, begin in zip(bucket.parameters, bucket.offsets, strict=False):
        if size := parameter.numel():
            height = num_rows(parameter)
            width = size // height
            rows, columns = _divisor(height), _divisor(width)
            found.append(CosineBlock(begin, height // rows, rows, width // columns, columns))
    return found


def transform_(flat: torch.Tensor, blocks: Sequence[CosineBlock], *, inverse: bool = False) -> None:
    """Replace a bucket's elements by their cosine coefficients, block after block, or back."""
    for block in blocks:
        down, rows, across, columns = block[1:]
        part = flat[block.begin : block.begin + block.size]
        left, right = (cosines(size).to(flat) for size in (rows, columns))
        if inverse:
            whole = left.T @ part.view(down, across, rows, columns) @ right
            part.view(down, rows, across, columns).copy_(whole.transpose(1, 2))
        else:
            apart = part.view(down, rows, across, columns).transpose(1, 2)
            part.view(down, across, rows, columns).copy_(left @ apart @ right.T)


@cache
def cosines(size: int) -> torch.Tensor:
    """The orthogonal matrix of the discrete cosine transform (DCT-II), float64."""
    place = np.arange(size)
    matrix = np.cos(np.pi / size * (place + 0.5) * place[:, None]) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return torch.from_numpy(matrix)


def _divisor(length: int) -> int:
    return max(each for each in range(1, min(BLOCK, length) + 1) if length % each == 0)


class _LargestOfBlocks(ChunkSelector):
    def __init__(self, blocks: Sequence[CosineBlock], density: float) -> None:
        super().__init__(BLOCK * BLOCK)
        self.blocks, self.density = blocks, density

    @override
    def largest(self, magnitudes: torch.Tensor, k: int) -> torch.Tensor:
        places = []
        for block in self.blocks:
            size = block.rows * block.columns
            part = magnitudes[block.begin : block.begin + block.size].view(-1, size)
            found = part.topk(max(1, round(self.density * size)), sorted=False).indices
            first = block.begin + size * torch.arange(len(part), device=part.device)
            places.append((found + first[:, None]).flatten())
        return torch.cat(places)


class _Transformed(SparseReduction):
    """The sparse mean of cosine coefficients."""

    def __init__(self, bucket: Bucket, context: Context, strategy: DeMo) -> None:
        self._blocks = blocks_of(bucket)
        codec = strategy.entries()
        selector = codec.selector
        if selector == Exact():
            selector = _LargestOfBlocks(self._blocks, strategy.density)
        plan = ExchangePlan(
            k=max(1, round(strategy.density * bucket.num_elements)), collective=topk_sum
        )
        super().__init__(
            bucket,
            context.driver,
            context.new_stream(),
            codec=codec,
            plan=lambda: plan,
            selector=selector,
            decay=strategy.decay,
        )

    @override
    def _launch(self, given: WeightedGradient) -> None:
        gradient = given.gradient.to(self._bucket.state_dtype)
        transform_(gradient, self._blocks)
        super()._launch(given._replace(gradient=gradient))

    @override
    def _commit(self) -> torch.Tensor:
        flat = super()._commit()
        wide = flat.to(self._bucket.state_dtype)
        transform_(wide, self._blocks, inverse=True)
        if wide is not flat:
            flat.copy_(wide)
        return flat
