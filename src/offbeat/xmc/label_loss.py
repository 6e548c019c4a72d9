"""Output layer and loss for large sets of labels, softmax cross-entropy against several labels at
once; and the model that ends in them.

A row's target is its labels' values divided by their sum, y / sum(y); a row without labels has no
target and no loss. The loss is the sum over rows divided by the number of rows, so batches weighted
by their rows average correctly.

All labels: the scores of a batch are looked at `MOST_SCORES` at a time and computed anew in the
backward pass, so that memory does not grow with rows x labels. Time does.

Some labels: the batch's own labels, all of them, and others drawn evenly. The sum that softmax
divides by is estimated without bias, each label drawn counting for those that were not. Time,
memory and the gradient's rows follow the labels looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from offbeat.errors import ConfigError
from offbeat.xmc.row_gradients import densely, take_rows
from offbeat.xmc.rows import SparseBatch
from offbeat.xmc.sparse_linear import SparseLinear

MOST_SCORES = 1 << 25
"""Scores, 4 bytes each, that are in memory at once; a few times as many bytes are needed beside
them.
"""


def label_cross_entropy(scores: torch.Tensor, labels: SparseBatch) -> torch.Tensor:
    """Loss of given scores.

    Args:
        scores: shape (rows, labels).
        labels: of the same rows; values >= 0.

    Returns:
        A scalar.
    """
    scores = _widened(scores)
    rows, shares = _targets(labels, scores.dtype)
    normaliser = scores.logsumexp(dim=1)
    return (shares * (normaliser[rows] - scores[rows, labels.columns.long()])).sum() / max(
        labels.num_rows, 1
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Candidates:
    """The labels that one loss looks at.

    Attributes:
        labels: int64, strictly ascending; every label of the batch is among them.
        log_counts: shape of `labels`: the logarithm of how many labels each stands for, 0 for those
            of the batch.
    """

    labels: torch.Tensor
    log_counts: torch.Tensor


def draw_candidates(
    labels: SparseBatch,
    *,
    num_labels: int,
    num_drawn: int,
    generator: torch.Generator | None = None,
) -> Candidates:
    """The batch's labels, and what is new among `num_drawn` others drawn evenly with replacement.

    How many new ones there are is chance, but given that number every set of them is equally
    likely; so each of n new ones stands for (num_labels - labels of the batch) / n.

    Args:
        labels: of the batch.
        num_labels: how many there are altogether.
        num_drawn: at least 1. From `num_labels` on, all labels are taken.
        generator: torch's default one if there is none.

    Raises:
        ConfigError: a label or `num_drawn` is out of range.
    """
    if num_drawn < 1:
        raise ConfigError(
            f"{num_drawn} labels are to be drawn for each batch; at least 1 is needed"
        )
    labels.require_columns(num_labels, "labels")
    device = labels.columns.device
    own = torch.zeros(num_labels, dtype=torch.bool, device=device)
    own[labels.columns.long()] = True
    if num_drawn >= num_labels:
        everything = torch.arange(num_labels, device=device)
        return Candidates(labels=everything, log_counts=torch.zeros(num_labels, device=device))
    drawn = torch.randint(num_labels, (num_drawn,), generator=generator).to(device)
    taken = own.clone()
    taken[drawn] = True
    chosen = taken.nonzero().flatten()
    is_own = own[chosen]
    num_own = int(is_own.sum())
    others = torch.tensor((num_labels - num_own) / max(chosen.numel() - num_own, 1), device=device)
    return Candidates(
        labels=chosen, log_counts=torch.where(is_own, torch.zeros_like(others), others.log())
    )


class LabelLayer(nn.Module):
    """A linear layer from hidden units to labels, together with its loss.

    Attributes:
        weight: shape (num_labels, num_inputs).
        bias: shape (num_labels,).
        dense_gradients: whether gradients are to be dense even where a loss looks at some labels
            only.
    """

    def __init__(self, num_inputs: int, num_labels: int) -> None:
        super().__init__()
        bound = num_inputs**-0.5
        self.weight = nn.Parameter(torch.empty(num_labels, num_inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(num_labels))
        self.dense_gradients = False

    @property
    def num_labels(self) -> int:
        return self.weight.shape[0]

    def forward(
        self, hidden: torch.Tensor, labels: SparseBatch, candidates: Candidates | None = None
    ) -> torch.Tensor:
        """The loss, a scalar.

        Args:
            hidden: shape (rows, num_inputs).
            labels: of the same rows; values >= 0.
            candidates: the labels to look at; None for all. With them, gradients are sparse.

        Raises:
            ConfigError: a label is out of range, or not among the candidates.
        """
        labels.require_columns(self.num_labels, "labels")
        if candidates is not None:
            return self._sampled_loss(hidden, labels, candidates)
        rows, shares = _targets(labels, hidden.dtype)
        size = max(MOST_SCORES // max(hidden.shape[0], 1), 1)
        if size >= self.num_labels:
            return label_cross_entropy(self.scores(hidden), labels)
        normalisers, hits, begin = [], hidden.new_zeros(()), 0
        for weight, bias in zip(self.weight.split(size), self.bias.split(size), strict=True):
            inside = (labels.columns >= begin) & (labels.columns < begin + size)
            entries = rows[inside], labels.columns[inside].long() - begin, shares[inside]
            normaliser, hit = checkpoint(
                _normaliser_and_target_share,
                hidden,
                weight,
                bias,
                *entries,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            normalisers.append(normaliser)
            hits = hits + hit
            begin += size
        total = torch.stack(normalisers).logsumexp(dim=0)
        return ((shares * total[rows]).sum() - hits) / max(labels.num_rows, 1)

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of all labels, shape (rows, num_labels)."""
        return functional.linear(hidden, self.weight, self.bias)

    @torch.no_grad()
    def top_labels(self, hidden: torch.Tensor, k: int) -> torch.Tensor:
        """The `k` labels of highest score, best first: int64, shape (rows, min(k, num_labels)).
        Memory is bounded.
        """
        size = max(MOST_SCORES // max(hidden.shape[0], 1), k)
        best_scores, begin = hidden.new_empty(hidden.shape[0], 0), 0
        best = torch.empty(hidden.shape[0], 0, dtype=torch.int64, device=hidden.device)
        for weight, bias in zip(self.weight.split(size), self.bias.split(size), strict=True):
            scores, labels = functional.linear(hidden, weight, bias).topk(
                min(k, weight.shape[0]), dim=1
            )
            scores, labels = (
                torch.cat([best_scores, scores], dim=1),
                torch.cat([best, labels + begin], dim=1),
            )
            best_scores, places = scores.topk(min(k, scores.shape[1]), dim=1)
            best = labels.gather(1, places)
            begin += weight.shape[0]
        return best

    def _sampled_loss(
        self, hidden: torch.Tensor, labels: SparseBatch, candidates: Candidates
    ) -> torch.Tensor:
        parameters = [densely(p) if self.dense_gradients else p for p in (self.weight, self.bias)]
        weight, bias = (take_rows(parameter, candidates.labels) for parameter in parameters)
        columns = labels.columns.long()
        places = torch.searchsorted(candidates.labels, columns)
        if not torch.equal(
            candidates.labels[places.clamp(max=candidates.labels.numel() - 1)], columns
        ):
            raise ConfigError(
                "a label of the batch is not among the candidates; draw them for this batch"
            )
        rows, shares = _targets(labels, hidden.dtype)
        scores = functional.linear(hidden, weight, bias)
        normaliser = (scores + candidates.log_counts).logsumexp(dim=1)
        return (shares * (normaliser[rows] - scores[rows, places])).sum() / max(labels.num_rows, 1)


def _normaliser_and_target_share(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    rows: torch.Tensor,
    columns: torch.Tensor,
    shares: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of some labels' scores: each row's logarithm of summed exponentials, and the targets' share
    of them.
    """
    scores = _widened(functional.linear(hidden, weight, bias))
    return scores.logsumexp(dim=1), (shares * scores[rows, columns]).sum()


def _widened(scores: torch.Tensor) -> torch.Tensor:
    """In at least 32 bits, as torch's own cross-entropy has them under autocast: in 16 a loss of 10
    is known to a sixteenth.
    """
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def _targets(labels: SparseBatch, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and share of each label, at least in 32 bits; shares of a row sum to 1, or are 0 where
    its values are.
    """
    # Half precision would round shares, and end sums of many labels at 256 or 2,048.
    values = labels.values.to(torch.promote_types(dtype, torch.float32))
    rows = labels.row_of_entry()
    sums = values.new_zeros(labels.num_rows).index_add_(0, rows, values)
    return rows, values / torch.where(sums > 0, sums, torch.ones_like(sums))[rows]


class SparseClassifier(nn.Module):
    """The model of the papers on sparse extreme classification: features to hidden units with ReLU
    to labels. Calling it gives the loss, since the scores of all labels may be too many.

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
