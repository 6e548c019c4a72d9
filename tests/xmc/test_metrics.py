"""Streamed metrics against the formulas, row by row."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import ConfigError
from offbeat.xmc.metrics import (
    PROPENSITY_CONSTANTS,
    PropensityConstants,
    RankingMetrics,
    propensities,
)
from offbeat.xmc.rows import SparseRows

NUM_LABELS = 9
KS = (1, 3, 5)

ranking = st.permutations(range(NUM_LABELS))
sample = st.tuples(ranking, st.sets(st.integers(0, NUM_LABELS - 1)))
many_samples = st.lists(sample, min_size=1, max_size=10)
Samples = list[tuple[list[int], set[int]]]


def make_rows(listed: list[set[int]]) -> SparseRows:
    return SparseRows.from_entries(
        [[(label, 1.0) for label in row] for row in listed], num_columns=NUM_LABELS
    )


def reference(samples: Samples, p: list[float]) -> dict[str, float]:
    found = {}
    for k in KS:
        precision = [sum(label in truth for label in ranked[:k]) / k for ranked, truth in samples]
        gains = []
        for ranked, truth in samples:
            gain = sum(1 / math.log2(j + 2) for j, label in enumerate(ranked[:k]) if label in truth)
            best = sum(1 / math.log2(j + 2) for j in range(min(k, len(truth))))
            gains.append(gain / best if truth else 0.0)
        rarity = sum(
            1 / p[label] for ranked, truth in samples for label in ranked[:k] if label in truth
        )
        best_rarity = sum(
            sum(sorted((1 / p[label] for label in truth), reverse=True)[:k]) for _, truth in samples
        )
        found[f"P@{k}"] = sum(precision) / len(samples)
        found[f"nDCG@{k}"] = sum(gains) / len(samples)
        found[f"PSP@{k}"] = rarity / best_rarity if best_rarity else math.nan
    return found


@given(samples=many_samples, cut=st.integers(0, 10))
def test_batches_add_up_to_the_formulas(samples: Samples, cut: int) -> None:
    p = [1 / (2 + label) for label in range(NUM_LABELS)]
    metrics = RankingMetrics(KS, propensities=np.array(p))
    for part in (samples[:cut], samples[cut:]):
        ranked = np.array([ranked for ranked, _ in part], dtype=np.int64).reshape(-1, NUM_LABELS)
        metrics.add(ranked, make_rows([truth for _, truth in part]))
    assert metrics.num_rows == len(samples)
    assert metrics.result() == pytest.approx(reference(samples, p), nan_ok=True)


@given(truth=st.sets(st.integers(0, NUM_LABELS - 1), min_size=1))
def test_the_best_ranking_gets_everything(truth: set[int]) -> None:
    p = propensities(make_rows([{0, 1, 2}, {1, 2}, {2}, {5}]))
    ranked = sorted(range(NUM_LABELS), key=lambda label: (label not in truth, p[label]))
    metrics = RankingMetrics((1, 5), propensities=p)
    metrics.add(np.array([ranked]), make_rows([truth]))
    found = metrics.result()
    assert [found["nDCG@1"], found["nDCG@5"], found["PSP@1"], found["PSP@5"]] == pytest.approx(
        [1] * 4
    )
    assert found["P@5"] == min(len(truth), 5) / 5


def test_propensities_follow_the_formula_and_grow_with_frequency() -> None:
    train = make_rows([{0, 1}] * 30 + [{1}] * 70)
    a, b = PROPENSITY_CONSTANTS["other"]
    c = (math.log(100) - 1) * (b + 1) ** a
    found = propensities(train)
    assert found[:3] == pytest.approx(
        [1 / (1 + c * math.exp(-a * math.log(n + b))) for n in (30, 100, 0)]
    )
    assert found[1] > found[0] > found[2] > 0
    assert propensities(train, PropensityConstants(a=0.6, b=2.6))[1] != found[1]


def test_labels_of_value_zero_are_none() -> None:
    labels = SparseRows.from_entries([[(3, 0.0), (4, 1.0)]], num_columns=NUM_LABELS)
    metrics = RankingMetrics((1,))
    metrics.add(np.array([[3]]), labels)
    assert metrics.result() == {"P@1": 0.0, "nDCG@1": 0.0}


def test_fewer_labels_than_k_are_ranked_as_far_as_they_go() -> None:
    labels = SparseRows.from_entries([[(0, 1.0), (1, 1.0)]], num_columns=2)
    metrics = RankingMetrics((5,))
    metrics.add(np.array([[1, 0]]), labels)
    assert metrics.result() == {"P@5": 0.4, "nDCG@5": pytest.approx(1.0)}


def test_no_rows_have_no_mean() -> None:
    assert all(
        math.isnan(mean)
        for mean in RankingMetrics((1, 3), propensities=np.ones(4)).result().values()
    )


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"rankings of shape \(1, 2\) were given; 1 rows of at least 5 are needed"
    ):
        RankingMetrics().add(np.array([[1, 2]]), make_rows([{1}]))
    with pytest.raises(ConfigError, match="give numbers of at least 1"):
        RankingMetrics((0, 1))
