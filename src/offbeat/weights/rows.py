"""Which rows of a model's sparse parameters have changed since the last merge; no others need to be
merged.

After a merge all ranks hold the same bits. A row that no rank has changed since is the same
everywhere, and is its own mean. Whether a row has changed is seen by comparing its bits with a
copy: so it does not matter who changes it, an optimizer with momentum or the user. What is computed
from replicated numbers after a merge, such as its momentum, changes rows alike on all ranks, before
the copy is made.

Cost: a copy of the parameters whose gradients have been sparse, and one pass over them in each
merge.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from offbeat.codec.row_sets import RowSet

_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}


class TouchedRows:
    """What the last merge left, of the parameters whose gradients have been sparse.

    Args:
        parameters: in the model's order.

    Attributes:
        merge: number of the merge whose result is kept; None: there is none.
        sparse: positions of the parameters whose gradient has been sparse here.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._kept: dict[int, torch.Tensor] = {}
        self.merge: int | None = None
        self.sparse: set[int] = set()

    def look_at_gradients(self) -> None:
        """An optimizer step is about to be taken."""
        for position, parameter in enumerate(self._parameters):
            if parameter.grad is not None and parameter.grad.is_sparse and parameter.dtype in _BITS:
                self.sparse.add(position)

    def keep(self, positions: Iterable[int], merge: int) -> None:
        """The parameters hold the result of merge number `merge`; from now on rows of those at
        `positions` are watched.
        """
        self.sparse.update(positions)
        self._kept = {
            position: self._parameters[position].detach().clone()
            for position in sorted(self.sparse)
        }
        self.merge = merge

    def forget(self) -> None:
        """The parameters hold something else, which other ranks may not hold."""
        self._kept, self.merge = {}, None

    def touched(self) -> dict[int, RowSet]:
        """By position, the rows that have changed since."""
        found = {}
        for position, kept in self._kept.items():
            bits = _BITS[kept.dtype]
            changed = self._parameters[position].detach().view(bits) != kept.view(bits)
            found[position] = (
                changed.flatten(1).any(dim=1).cpu().numpy()
                if changed.dim() > 1
                else changed.cpu().numpy()
            )
        return found
