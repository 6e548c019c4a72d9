"""Losses over many labels against a slow reference, whole, in pieces and sampled."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from offbeat.errors import ConfigError
from offbeat.xmc import label_loss
from offbeat.xmc.label_loss import (
    Candidates,
    LabelLayer,
    SparseClassifier,
    draw_candidates,
    label_cross_entropy,
)
from offbeat.xmc.metrics import RankingMetrics
from offbeat.xmc.row_gradients import read_sparse
from offbeat.xmc.row_optimizers import RowAdagrad
from offbeat.xmc.rows import SparseBatch, SparseRows
from offbeat_lab.sparse_data import Synthetic

NUM_LABELS, NUM_INPUTS = 17, 4

row = st.dictionaries(
    st.integers(0, NUM_LABELS - 1), st.sampled_from([0.0, 0.5, 1.0, 2.0]), max_size=5
)
many_rows = st.lists(row, min_size=1, max_size=6)


def make_labels(listed: list[dict[int, float]]) -> SparseBatch:
    return SparseRows.from_entries(
        [row.items() for row in listed], num_columns=NUM_LABELS
    ).to_batch()


def make_layer() -> LabelLayer:
    layer = LabelLayer(NUM_INPUTS, NUM_LABELS).double()
    with torch.no_grad():
        layer.weight.copy_(
            torch.sin(torch.arange(layer.weight.numel()).view_as(layer.weight) * 1.7) * 2
        )
        layer.bias.copy_(torch.cos(torch.arange(NUM_LABELS)))
    return layer


def make_hidden(num_rows: int) -> torch.Tensor:
    return (
        torch.sin(torch.arange(num_rows * NUM_INPUTS, dtype=torch.float64) + 1)
        .view(num_rows, NUM_INPUTS)
        .requires_grad_()
    )


def reference(scores: torch.Tensor, listed: list[dict[int, float]]) -> float:
    total = 0.0
    for of_row, row in zip(scores.tolist(), listed, strict=True):
        normaliser = math.log(sum(math.exp(score) for score in of_row))
        if sum(row.values()) > 0:
            total += sum(
                value / sum(row.values()) * (normaliser - of_row[label])
                for label, value in row.items()
            )
    return total / len(listed)


@given(listed=many_rows)
def test_the_loss_is_cross_entropy_with_shares_of_the_labels(
    listed: list[dict[int, float]],
) -> None:
    layer, hidden = make_layer(), make_hidden(len(listed))
    expected = reference(layer.scores(hidden), listed)
    labels = make_labels(listed)
    assert layer(hidden, labels).item() == pytest.approx(expected, rel=1e-9)
    assert label_cross_entropy(layer.scores(hidden), labels).item() == pytest.approx(
        expected, rel=1e-9
    )


@pytest.mark.parametrize("most_scores", [5, label_loss.MOST_SCORES])
def test_under_autocast_the_loss_is_as_exact_as_torchs(
    monkeypatch: pytest.MonkeyPatch, most_scores: int
) -> None:
    """It was rounded to eight bits."""
    monkeypatch.setattr(label_loss, "MOST_SCORES", most_scores)
    listed = [{0: 1.0}, {1: 1.0}, {2: 1.0}]
    layer, hidden = make_layer().float(), 30 * make_hidden(len(listed)).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(hidden, make_labels(listed))
        expected = functional.cross_entropy(layer.scores(hidden), torch.tensor([0, 1, 2]))
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("draws", [False, True])
def test_in_half_precision_the_shares_of_many_labels_add_up(
    monkeypatch: pytest.MonkeyPatch, draws: bool
) -> None:
    """They added up to more, since a sum of ones in bfloat16 ends at 256."""
    monkeypatch.setattr(label_loss, "MOST_SCORES", 60)
    row = [(label, 1.0) for label in range(300)]
    labels = SparseRows.from_entries([row], num_columns=300).to_batch()
    layer = LabelLayer(NUM_INPUTS, 300).bfloat16()
    with torch.no_grad():
        layer.weight.zero_()
    candidates = draw_candidates(labels, num_labels=300, num_drawn=300) if draws else None
    loss = layer(make_hidden(1).bfloat16(), labels, candidates)
    assert loss.item() == pytest.approx(math.log(300), rel=1e-5)


@given(listed=many_rows, most_scores=st.integers(1, 60))
def test_pieces_change_neither_loss_nor_gradients(
    listed: list[dict[int, float]], most_scores: int
) -> None:
    labels = make_labels(listed)
    found = []
    for limit in (label_loss.MOST_SCORES, most_scores):
        layer, hidden = make_layer(), make_hidden(len(listed))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(label_loss, "MOST_SCORES", limit)
            loss = layer(hidden, labels)
        loss.backward()
        found.append([loss.detach(), hidden.grad, layer.weight.grad, layer.bias.grad])
    torch.testing.assert_close(found[0], found[1])


@given(listed=many_rows)
def test_candidates_of_all_labels_are_the_whole_loss(listed: list[dict[int, float]]) -> None:
    labels = make_labels(listed)
    candidates = draw_candidates(labels, num_labels=NUM_LABELS, num_drawn=NUM_LABELS)
    found = []
    for chosen in (None, candidates):
        layer, hidden = make_layer(), make_hidden(len(listed))
        loss = layer(hidden, labels, chosen)
        loss.backward()
        assert layer.weight.grad is not None
        assert layer.bias.grad is not None
        found.append(
            [loss.detach(), hidden.grad, layer.weight.grad.to_dense(), layer.bias.grad.to_dense()]
        )
    torch.testing.assert_close(found[0], found[1])


@given(listed=many_rows, num_drawn=st.integers(1, 30), seed=st.integers(0, 2**31))
def test_candidates_hold_the_batch_and_stand_for_all_labels(
    listed: list[dict[int, float]], num_drawn: int, seed: int
) -> None:
    labels = make_labels(listed)
    generator = torch.Generator().manual_seed(seed)
    candidates = draw_candidates(
        labels, num_labels=NUM_LABELS, num_drawn=num_drawn, generator=generator
    )
    assert candidates.labels.tolist() == sorted(set(candidates.labels.tolist()))
    own = set(labels.columns.tolist())
    assert own <= set(candidates.labels.tolist())
    counts = dict(
        zip(candidates.labels.tolist(), candidates.log_counts.exp().tolist(), strict=True)
    )
    assert all(counts[label] == 1 for label in own)
    if len(counts) > len(own):
        assert sum(counts.values()) == pytest.approx(NUM_LABELS)


def test_the_estimated_normaliser_is_right_on_average() -> None:
    """The mean of many draws lies within five standard errors of the sum over all labels."""
    labels = make_labels([{2: 1.0, 5: 1.0}])
    scores = make_layer().scores(make_hidden(1)).detach()[0]
    generator = torch.Generator().manual_seed(0)
    sums = []
    for _ in range(2000):
        drawn = draw_candidates(labels, num_labels=NUM_LABELS, num_drawn=6, generator=generator)
        sums.append((scores[drawn.labels] + drawn.log_counts).exp().sum())
    estimates = torch.stack(sums)
    error = estimates.std() / len(sums) ** 0.5
    assert abs(estimates.mean() - scores.exp().sum()) < 5 * error


def test_sampled_gradients_have_the_candidates_rows() -> None:
    labels, layer, hidden = make_labels([{2: 1.0}, {9: 1.0}]), make_layer(), make_hidden(2)
    candidates = draw_candidates(labels, num_labels=NUM_LABELS, num_drawn=5)
    layer(hidden, labels, candidates).backward()
    for parameter in (layer.weight, layer.bias):
        assert parameter.grad is not None
        assert torch.equal(read_sparse(parameter.grad).rows, candidates.labels)


def test_a_batch_without_labels_has_no_loss_and_moves_nothing() -> None:
    layer, hidden = make_layer(), make_hidden(2)
    loss = layer(hidden, make_labels([{}, {}]))
    loss.backward()
    assert loss.item() == 0
    assert layer.weight.grad is not None
    assert not layer.weight.grad.any()


@given(num_rows=st.integers(1, 5), k=st.integers(1, 20), most_scores=st.integers(1, 60))
def test_top_labels_are_the_best_of_all(num_rows: int, k: int, most_scores: int) -> None:
    layer, hidden = make_layer(), make_hidden(num_rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(label_loss, "MOST_SCORES", most_scores)
        found = layer.top_labels(hidden, k)
    assert torch.equal(found, layer.scores(hidden).argsort(dim=1, descending=True)[:, :k])


def test_what_does_not_fit_is_refused() -> None:
    layer, hidden = make_layer(), make_hidden(1)
    outside = SparseBatch(
        torch.tensor([0, 1]), torch.tensor([17], dtype=torch.int32), torch.ones(1)
    )
    with pytest.raises(ConfigError, match="labels run from 17 to 17; there are 17 of them"):
        layer(hidden, outside)
    with pytest.raises(ConfigError, match="labels run from 17 to 17"):
        draw_candidates(outside, num_labels=NUM_LABELS, num_drawn=3)
    with pytest.raises(ConfigError, match="0 labels are to be drawn"):
        draw_candidates(make_labels([{}]), num_labels=NUM_LABELS, num_drawn=0)
    foreign = Candidates(labels=torch.tensor([1, 3]), log_counts=torch.zeros(2))
    with pytest.raises(ConfigError, match="not among the candidates"):
        layer(hidden, make_labels([{2: 1.0}]), foreign)


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
