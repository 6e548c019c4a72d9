"""SparseLoCo's codec of changes of weights (arXiv 2508.15706): the largest entries of each chunk,
in 2 bits a value and 12 bits an index; what is left out is owed, and fades.

    of each 4,096 entries the 64 of largest magnitude           (14 bits each, .22 bits an element)
    values fall into 4 levels of equal width over +-3 sigma around their mean
    each level is read as the mean of the values in it          (4 numbers in each message)
    a rank's message longer than the median of all is shortened to it

Differences from the paper's code: chunks are of the model's parameters side by side, and not
squares of matrices; each chunk's number of entries is sent, in 2 bytes; of an even number of ranks
the median is the mean of the middle two.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from offbeat.codec.few_bits import LevelValues, pack, unpack
from offbeat.codec.index_codecs import CodedIndices, IndexCodec
from offbeat.codec.selectors import Memory, Selection, Selector
from offbeat.codec.sparse import Sparse
from offbeat.codec.tally import is_finite
from offbeat.codec.topk_codec import TopKCodec, WeightCodec
from offbeat.errors import WireError


class SparseLoCo(WeightCodec):
    """The 64 largest of each 4,096 entries, in 2 bits each; what is owed fades by 5% in an average,
    and no rank counts for more than the median of their norms.
    """

    def __init__(self) -> None:
        entries = TopKCodec(
            selector=ChunkSelector(4096), values=LevelValues(bits=2), indices=ChunkIndices(4096)
        )
        super().__init__(density=1 / 64, decay=0.95, entries=entries, clip_to_median=True)


class ChunkSelector(Selector):
    """The largest entries of each chunk, as many in each.

    Args:
        size: of a chunk, in elements, >= 1.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def largest(self, magnitudes: torch.Tensor, k: int) -> torch.Tensor:
        """The places of about `k` entries of `magnitudes`, shape (n,), n >= 1, in any order."""
        n = magnitudes.numel()
        size = min(self.size, n)
        padded = torch.nn.functional.pad(magnitudes, (0, -n % size)).view(-1, size)
        largest, places = padded.topk(min(size, -(-k * size // n)), sorted=False)
        places += size * torch.arange(len(padded), device=places.device)[:, None]
        return places[largest > 0]  # without the padding

    @override
    def select(
        self, flat: torch.Tensor, residual: torch.Tensor, *, k: int, weight: float, state: Memory
    ) -> Selection:
        torch.add(residual, flat, alpha=weight, out=flat)
        n = flat.numel()
        if not n or not is_finite(flat):
            empty = Sparse.empty(n, flat.cpu().numpy().dtype)
            return Selection(sparse=empty, finite=not n)
        indices = self.largest(flat.abs(), k).sort().values
        indices = indices[flat[indices] != 0]
        picked = flat[indices].cpu().numpy()
        flat[indices] = 0
        return Selection(
            sparse=Sparse(indices=indices.cpu().numpy(), values=picked, num_elements=n), finite=True
        )


class ChunkIndices(IndexCodec):
    """The number of entries of each chunk in 2 bytes, then their places in it, in as few bits as
    these need.

    Args:
        size: of a chunk, in elements, 2 to 65,535, so that the number of its entries takes 2 bytes.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    @override
    def expected_bytes(self, num_pairs: float, num_elements: int) -> float:
        return 2 * -(-num_elements // self.size) + num_pairs * self._bits / 8

    @property
    def _bits(self) -> int:
        return (self.size - 1).bit_length()

    @override
    def encode(self, indices: NDArray[np.int64], num_elements: int) -> CodedIndices:
        chunks, places = np.divmod(indices, self.size)
        counts = np.bincount(chunks, minlength=-(-num_elements // self.size)).astype(np.uint16)
        packed = pack(places.astype(np.uint16), self._bits)
        return CodedIndices(128, np.concatenate([counts.view(np.uint8), packed]))

    @override
    def decode(
        self, layout: int, coded: NDArray[np.uint8], count: int, num_elements: int
    ) -> NDArray[np.int64]:
        num_chunks = -(-num_elements // self.size)
        expected = 2 * num_chunks + -(-count * self._bits // 8)
        if layout != 128 or coded.size != expected:
            raise WireError(
                f"the places of {count} entries in chunks take {expected} bytes in layout 128, got"
                f" {coded.size} in layout {layout}; the message is damaged"
            )
        counts = coded[: 2 * num_chunks].view(np.uint16)
        if int(counts.sum()) != count:
            raise WireError(f"{count} entries came, and their chunks say {counts.sum()}")
        places = unpack(coded[2 * num_chunks :], self._bits, count)
        return np.repeat(np.arange(num_chunks) * self.size, counts) + places
