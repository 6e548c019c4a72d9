"""A model whose gradients have some rows only, beside dense ones: what an embedding yields, and
what offbeat's layers yield.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from offbeat.xmc.label_loss import LabelLayer, draw_candidates
from offbeat.xmc.rows import SparseBatch
from offbeat.xmc.sparse_linear import SparseLinear

NUM_FEATURES, NUM_LABELS, NUM_HIDDEN = 30, 40, 4

MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


class SparseNet(torch.nn.Module):
    """Sparse rows and a word each, to hidden units, to labels of which some are drawn; calling it
    gives the loss.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.rows = SparseLinear(NUM_FEATURES, NUM_HIDDEN)
        self.words = torch.nn.Embedding(20, NUM_HIDDEN, sparse=True)
        self.between = torch.nn.Linear(NUM_HIDDEN, NUM_HIDDEN)
        self.labels = LabelLayer(NUM_HIDDEN, NUM_LABELS)

    def forward(
        self, features: SparseBatch, words: torch.Tensor, labels: SparseBatch
    ) -> torch.Tensor:
        draw = torch.Generator().manual_seed(int(words.sum()))
        candidates = draw_candidates(labels, num_labels=NUM_LABELS, num_drawn=5, generator=draw)
        hidden = torch.tanh(self.between(self.rows(features) + self.words(words)))
        loss: torch.Tensor = self.labels(hidden, labels, candidates)
        return loss

    def sparse_parameters(self) -> list[torch.nn.Parameter]:
        return [self.rows.weight, self.words.weight, self.labels.weight, self.labels.bias]


def batch(step: int, *, num_rows: int = 3) -> tuple[SparseBatch, torch.Tensor, SparseBatch]:
    """Features, words and labels that are others in every step."""
    draw = torch.Generator().manual_seed(step)
    parts = []
    for num_columns in (NUM_FEATURES, NUM_LABELS):
        offsets = torch.arange(num_rows + 1) * 2
        columns = torch.stack(
            [torch.randperm(num_columns, generator=draw)[:2].sort().values for _ in range(num_rows)]
        )
        parts.append(SparseBatch(offsets, columns.flatten().int(), torch.ones(2 * num_rows)))
    return parts[0], torch.randint(20, (num_rows,), generator=draw), parts[1]


def train(
    net: SparseNet,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[int],
    *,
    set_to_none: bool = True,
) -> None:
    for step in steps:
        net(*batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
