"""Which rows of a model's sparse parameters have changed since the last merge, and whether it is
cheaper to merge those rows alone.

After a merge all ranks hold the same bits. A row that no rank has changed since then is the same
everywhere, and is its own mean. Whether a row has changed is found by comparing its bits with a
copy, so it does not matter who changed it: an optimizer with momentum, or the user. What is
computed from replicated numbers after a merge, such as the momentum of merges, changes rows alike
on all ranks, and it does so before the copy is made.

Cost: a copy of the parameters whose gradients have been sparse, and one pass over them in each
merge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.codec.jit import kernel
from offbeat.codec.row_sets import RowSet

# Bits are compared as integers: as floating-point numbers, -0.0 would equal 0.0, and a NaN would
# not equal itself.
_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}

INDEX_BYTES = 4


class TouchedRows:
    """Compares the parameters whose gradients have been sparse with a copy from the last merge.

    Args:
        parameters: in the model's order.

    Attributes:
        known_since: number of the merge whose result was copied; None: there is no copy.
        copies: by the parameter's position.
        sparse: positions of the parameters whose gradient has been sparse on this rank.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self.copies: Mapping[int, torch.Tensor] = {}
        self.known_since: int | None = None
        self.sparse: set[int] = set()

    def note_sparse_gradients(self) -> None:
        """An optimizer step is about to be taken: note which gradients are sparse."""
        for position, parameter in enumerate(self._parameters):
            if parameter.grad is not None and parameter.grad.is_sparse and parameter.dtype in _BITS:
                self.sparse.add(position)

    def keep(self, copies: Mapping[int, torch.Tensor], merge: int) -> None:
        """`copies`, by position, are the result of merge number `merge`. The parameters may be
        ahead of it.
        """
        self.sparse.update(copies)
        self.copies = dict(sorted(copies.items()))
        self.known_since = merge

    def forget(self) -> None:
        """The parameters hold something else, which other ranks may not hold."""
        self.copies, self.known_since = {}, None


def touched_rows(
    copies: Mapping[int, torch.Tensor], parameters: Sequence[torch.Tensor]
) -> dict[int, RowSet]:
    """The rows in which `parameters` differ from their copies, by the parameter's position."""
    found = {}
    for position, copy in copies.items():
        bits = _BITS[copy.dtype]
        now, then = (
            tensor.detach().view(bits).unsqueeze(1).flatten(1)
            for tensor in (parameters[position], copy)
        )
        if copy.device.type == "cpu":
            found[position] = np.zeros(len(copy), np.bool_)
            _note_changed(now.numpy(), then.numpy(), found[position])
        else:
            found[position] = (now != then).any(dim=1).cpu().numpy()
    return found


@kernel
def _note_changed(
    now: NDArray[np.integer], then: NDArray[np.integer], changed: NDArray[np.bool_]
) -> None:
    # In most rows that an optimizer has changed, the first element has.
    for row in range(changed.size):
        for column in range(now.shape[1]):
            if now[row, column] != then[row, column]:
                changed[row] = True
                break


def index_bytes(num_touched: int, num_rows: int) -> int:
    """How many bytes it takes to say which rows: a list of numbers, or a bit for each row.

    >>> index_bytes(10, 1000), index_bytes(900, 1000)
    (40, 125)
    """
    return min(INDEX_BYTES * num_touched, -(-num_rows // 8))


def rows_are_cheaper(num_touched: Sequence[int], *, num_rows: int, row_bytes: int) -> bool:
    """Whether to exchange sets of touched rows, and then to merge their union alone: 2(P-1)/P of
    the values, and P-1 sets.

    The union has at least as many rows as the largest set; how many it has is known only after the
    sets were exchanged. It never has more than all rows, so that what can be lost is the sets.

    Args:
        num_touched: how many rows each rank has changed, >= 0.
        num_rows: of the matrix.
        row_bytes: size of one row, in bytes.

    >>> rows_are_cheaper([2_000, 3_000], num_rows=135_909, row_bytes=512)
    True
    >>> rows_are_cheaper([135_909, 3_000], num_rows=135_909, row_bytes=512)
    False
    >>> rows_are_cheaper([10], num_rows=1000, row_bytes=512)
    False
    """
    num_ranks = len(num_touched)
    hops = num_ranks - 1
    sets = hops * max(index_bytes(count, num_rows) for count in num_touched)
    return (
        2 * hops / num_ranks * max(num_touched) * row_bytes + sets
        < 2 * hops / num_ranks * num_rows * row_bytes
    )
