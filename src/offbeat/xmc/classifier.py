"""The model of the papers on sparse extreme classification: sparse rows, one layer of hidden units,
softmax over labels.
"""

from __future__ import annotations

import torch
from torch import nn

from offbeat.errors import ConfigError
from offbeat.xmc.label_loss import LabelLayer, draw_candidates
from offbeat.xmc.rows import SparseBatch
from offbeat.xmc.sparse_linear import SparseLinear


class SparseClassifier(nn.Module):
    """Features to hidden units with ReLU to labels. Calling it gives the loss, since the scores of
    all labels may be too many.

    Args:
        num_features: columns of the features.
        num_labels: columns of the labels.
        num_hidden: hidden units.
        num_drawn_labels: how many labels are drawn for each batch beside its own, by torch's
            default generator; None looks at all labels.

    Attributes:
        hidden: the first layer.
        labels: the second one, with its loss.
    """

    def __init__(
        self,
        num_features: int,
        num_labels: int,
        *,
        num_hidden: int = 128,
        num_drawn_labels: int | None = None,
    ) -> None:
        super().__init__()
        if num_drawn_labels is not None and num_drawn_labels < 1:
            raise ConfigError(
                f"num_drawn_labels is {num_drawn_labels}; at least 1 is needed, or None for all"
                " labels"
            )
        self.num_drawn_labels = num_drawn_labels
        self.hidden = SparseLinear(num_features, num_hidden)
        self.labels = LabelLayer(num_hidden, num_labels)

    def forward(self, features: SparseBatch, labels: SparseBatch) -> torch.Tensor:
        """Mean loss over the rows, a scalar."""
        candidates = None
        if self.num_drawn_labels is not None:
            candidates = draw_candidates(
                labels, num_labels=self.labels.num_labels, num_drawn=self.num_drawn_labels
            )
        loss: torch.Tensor = self.labels(self._hidden(features), labels, candidates)
        return loss

    @torch.no_grad()
    def top_labels(self, features: SparseBatch, k: int = 5) -> torch.Tensor:
        """The `k` likeliest labels of each row, best first: int64, shape (rows, min(k, labels))."""
        return self.labels.top_labels(self._hidden(features), k)

    def _hidden(self, features: SparseBatch) -> torch.Tensor:
        return torch.relu(self.hidden(features))
