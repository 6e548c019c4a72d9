"""Top-k S-SGD: each rank sends its own k largest entries to everyone, and all of them are applied.

    acc = residual + gradient
    mine = the k largest entries of acc; residual = the others
    gradient = (sum over ranks of their entries) / P          (up to P k entries)

The baseline that gTop-k S-SGD (arXiv 1901.04359) improves on; error feedback after 1809.07599.

Cost per step: ceil(log2 P) messages, (P-1) k pairs sent by each rank, which grows with P.

Differences from the paper: by default momentum is applied before selection, and more entries
travel while the learning rate rises; bfloat16 values and threshold re-use are offered too.
"""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.callbacks.context import Context
from offbeat.collectives.topk_allgather import topk_sum
from offbeat.gradients.density import DensitySchedule
from offbeat.strategies.sparse_gradient import Scheduled, SparseGradientStrategy


@dataclass(frozen=True, kw_only=True)
class TopK(SparseGradientStrategy):
    """Local top-k, summed over all ranks without a further selection."""

    trains_islands = True

    density: float = 0.001

    def schedule(self, context: Context) -> Scheduled:
        warmup = self.stages()
        return DensitySchedule(self.density, context, warmup=warmup, collective=topk_sum), []
