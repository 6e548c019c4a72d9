"""Generated data: the same from a seed however they are read, of the law that was asked for, and
with something to learn.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import ConfigError
from offbeat.xmc.rows import Examples
from offbeat_lab.sparse_data import AMAZON_670K, BLOCK_ROWS, Synthetic

SMALL = Synthetic(num_features=500, num_labels=80, mean_draws=30.0, mean_labels=3.0, seed=7)


def content(samples: Examples) -> list[bytes]:
    return [
        array.tobytes()
        for rows in (samples.features, samples.labels)
        for array in (rows.offsets, rows.columns, rows.values)
    ]


@given(num_samples=st.integers(1, 2500), num_rows=st.integers(1, 3000))
def test_longer_data_begin_with_shorter_ones(num_samples: int, num_rows: int) -> None:
    whole = SMALL.load(2500)
    read = Examples.concatenate(list(SMALL.read(num_samples, num_rows=num_rows)))
    assert content(read) == content(whole.part(0, num_samples))


def test_splits_and_seeds_differ() -> None:
    other = Synthetic(num_features=500, num_labels=80, mean_draws=30.0, mean_labels=3.0, seed=8)
    found = [SMALL.load(10), SMALL.load(10, split="test"), other.load(10)]
    assert len({content(samples)[1] for samples in found}) == 3


def test_rows_hold_different_columns_in_order_at_length_one() -> None:
    samples = SMALL.load(BLOCK_ROWS + 10)
    for rows in (samples.features, samples.labels):
        assert rows.lengths().min() >= 1
        inside = np.repeat(np.arange(len(rows)), rows.lengths())
        assert np.all(np.diff(inside * rows.num_columns + rows.columns) > 0)
    features = samples.features
    squares = np.bincount(
        np.repeat(np.arange(len(features)), features.lengths()), weights=features.values**2.0
    )
    assert squares == pytest.approx(1, rel=1e-5)


def test_lengths_are_log_normal_and_labels_follow_zipfs_law() -> None:
    like = Synthetic(
        num_features=200_000,
        num_labels=50,
        mean_draws=40.0,
        mean_labels=1.0,
        feature_exponent=0.0,
        signal=0.0,
    )
    samples = like.load(8 * BLOCK_ROWS)
    logs = np.log(samples.features.lengths())  # so many features that hardly any is drawn twice
    assert samples.features.lengths().mean() == pytest.approx(40, rel=0.1)
    assert logs.std() == pytest.approx(0.7, rel=0.1)
    assert abs(np.mean((logs - logs.mean()) ** 3)) < 0.1 * logs.std() ** 3 + 0.02
    counts = np.sort(samples.labels.counts())[::-1]
    slope = np.polyfit(np.log(np.arange(1, 51)), np.log(counts), 1)[0]
    assert slope == pytest.approx(-like.label_exponent, abs=0.1)


def test_labels_can_be_guessed_from_features_and_without_a_signal_they_cannot() -> None:
    """Rows of the same rare label have more features in common than others, if there is
    a signal.
    """

    def likeness(samples: Examples) -> float:
        features = np.zeros((len(samples), 500))
        features[
            np.repeat(np.arange(len(samples)), samples.features.lengths()), samples.features.columns
        ] = samples.features.values
        products = features @ features.T
        single = samples.labels.lengths() == 1
        first = samples.labels.columns[samples.labels.offsets[:-1]]
        same = (
            (first[:, None] == first) & single[:, None] & single & ~np.eye(len(samples), dtype=bool)
        )
        different = (first[:, None] != first) & single[:, None] & single
        return float(products[same].mean() / products[different].mean())

    silent = Synthetic(
        num_features=500, num_labels=80, mean_draws=30.0, mean_labels=3.0, seed=7, signal=0.0
    )
    assert likeness(SMALL.load(1000)) > 2
    assert likeness(silent.load(1000)) == pytest.approx(1, abs=0.1)


def test_amazons_shape_streams() -> None:
    quick = replace(AMAZON_670K, features_per_label=1)  # to begin takes a while with all of them
    samples = next(islice(quick.read(490_449, num_rows=256), 1))
    assert (samples.features.num_columns, samples.labels.num_columns) == (135_909, 670_091)
    assert len(samples) == 256


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_features": 1}, "num_features is 1; allowed are 2 to 2147483647"),
        ({"num_labels": 0}, "num_labels is 0"),
        ({"mean_draws": float("nan")}, "mean_draws is nan"),
        ({"spread": -1.0}, "spread is -1.0; it must not be negative"),
        ({"signal": 1.5}, "signal is 1.5; it is a share, from 0 to 1"),
    ],
)
def test_numbers_out_of_range_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Synthetic(**{"num_features": 5, "num_labels": 5, **change})  # type: ignore[arg-type]


def test_no_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="0 samples are asked for"):
        list(SMALL.read(0))
