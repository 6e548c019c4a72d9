"""The whole model learns, with all labels and with drawn ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from offbeat.errors import ConfigError
from offbeat.xmc.classifier import SparseClassifier
from offbeat.xmc.metrics import RankingMetrics
from offbeat.xmc.row_optimizers import RowAdagrad
from offbeat_lab.sparse_data import Synthetic

DATA = Synthetic(num_features=300, num_labels=40, mean_draws=20.0, mean_labels=1.5, seed=3)


@pytest.mark.parametrize("num_drawn_labels", [None, 20])
def test_a_model_learns_more_than_which_label_is_frequent(num_drawn_labels: int | None) -> None:
    torch.manual_seed(0)
    train, test = DATA.load(2048), DATA.load(512, split="test")
    model = SparseClassifier(300, 40, num_hidden=32, num_drawn_labels=num_drawn_labels)
    optimizer = RowAdagrad(model.parameters(), 0.1)
    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(len(train))
        for begin in range(0, len(train), 64):
            batch = train.take(order[begin : begin + 64])
            optimizer.zero_grad()
            model(batch.features.to_batch(), batch.labels.to_batch()).backward()
            optimizer.step()
    metrics = RankingMetrics()
    metrics.add(model.top_labels(test.features.to_batch()).numpy(), test.labels)
    most_frequent = test.labels.counts().max() / len(test)
    assert metrics.result()["P@1"] > 2 * most_frequent


def test_drawn_labels_keep_every_gradient_sparse() -> None:
    model = SparseClassifier(300, 40, num_drawn_labels=3)
    batch = DATA.load(4)
    model(batch.features.to_batch(), batch.labels.to_batch()).backward()
    sparse = {
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and parameter.grad.is_sparse
    }
    assert sparse == {"hidden.weight", "labels.weight", "labels.bias"}


def test_no_drawn_labels_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_drawn_labels is 0"):
        SparseClassifier(5, 5, num_drawn_labels=0)
