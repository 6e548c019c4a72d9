"""Sparse rows of any number, drawn from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offbeat.codec.described_options import Range, ZeroToOne, check_options
from offbeat.errors import ConfigError
from offbeat.xmc.rows import MOST_COLUMNS, Examples, SparseRows, regroup

Split: TypeAlias = Literal["train", "test"]

BLOCK_ROWS = 1024
_SPLITS: Final[dict[Split, int]] = {"train": 1, "test": 2}
_TEACHER = 0
_NOT_NEGATIVE: Final = Range("of at least 0", lambda number: number >= 0)


def _columns(least: int) -> Range:
    return Range(f"from {least} to {MOST_COLUMNS}", lambda n: least <= n <= MOST_COLUMNS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Synthetic:
    """What data are to be like: Zipf features, Zipf labels, log-normal lengths of rows, and
    something to learn. Train and test rows follow the same law.

    Of each row:

    1. The number of labels and the number of draws of features are log-normal, rounded, at least 1.
    2. Labels are drawn by Zipf's law: the r-th most frequent one with a chance proportional to 1 /
       r^exponent.
    3. Each label has a few features of its own, drawn for good by Zipf's law. Of the row's draws a
       share, `signal`, are features of its labels, and the others are drawn by Zipf's law.
    4. Repeated draws become one entry, (1 + ln draws) ln(1 / chance of the feature); the row is
       scaled to length 1.

    Rows are drawn in blocks, each from (seed, split, number of the block), so any part of the data
    can be had without the rest, and no more than a block is in memory.

    Attributes:
        num_features: columns of the features.
        num_labels: columns of the labels.
        mean_draws: features drawn for a row, on average; what a row has is less, since draws are
            repeated.
        mean_labels: the same for labels, whose number is between 1 and `num_labels`.
        spread: deviation of the logarithm of both numbers.
        feature_exponent: of Zipf's law.
        label_exponent: of Zipf's law.
        features_per_label: that hint at it.
        signal: share of draws that hint at a row's labels, in [0, 1].
        seed: of everything.

    Raises:
        ConfigError: a number is out of range.
    """

    num_features: Annotated[int, _columns(2)]
    num_labels: Annotated[int, _columns(1)]
    mean_draws: Annotated[float, _columns(1)] = 76.0
    mean_labels: Annotated[float, _columns(1)] = 5.0
    spread: Annotated[float, _NOT_NEGATIVE] = 0.7
    feature_exponent: Annotated[float, _NOT_NEGATIVE] = 1.0
    label_exponent: Annotated[float, _NOT_NEGATIVE] = 0.8
    features_per_label: Annotated[int, _columns(1)] = 16
    signal: ZeroToOne = 0.5
    seed: Annotated[int, _NOT_NEGATIVE] = 0

    def __post_init__(self) -> None:
        check_options(self)

    def read(
        self, num_samples: int, *, split: Split = "train", num_rows: int = 4096
    ) -> Iterator[Examples]:
        """The first `num_samples` of a split, `num_rows` at a time. Longer ones begin with the same
        samples.
        """
        return regroup(self._blocks(num_samples, split), num_rows)

    def load(self, num_samples: int, *, split: Split = "train") -> Examples:
        """The first `num_samples` of a split, at least 1."""
        return Examples.concatenate(list(self._blocks(num_samples, split)))

    def _blocks(self, num_samples: int, split: Split) -> Iterator[Examples]:
        if num_samples < 1:
            raise ConfigError(f"{num_samples} samples are asked for; at least 1 is needed")
        teacher = _Teacher(self)
        for number, begin in enumerate(range(0, num_samples, BLOCK_ROWS)):
            rng = np.random.default_rng((self.seed, _SPLITS[split], number))
            yield teacher.draw(rng).part(0, min(BLOCK_ROWS, num_samples - begin))


AMAZON_670K: Final = Synthetic(
    num_features=135_909, num_labels=670_091, mean_draws=119.0, mean_labels=5.45
)
"""Of the shape of Amazon-670k, with about 76 features a row; 490,449 rows to train on and 153,025
to test.
"""


class _Teacher:
    """What all rows of one `Synthetic` share."""

    def __init__(self, like: Synthetic) -> None:
        self._like = like
        rng = np.random.default_rng((like.seed, _TEACHER))
        self._features = _Zipf(like.num_features, like.feature_exponent, rng)
        self._labels = _Zipf(like.num_labels, like.label_exponent, rng)
        self._hints = self._features.draw(like.num_labels * like.features_per_label, rng).reshape(
            like.num_labels, -1
        )
        self._rarity = -np.log(self._features.chances)

    def draw(self, rng: np.random.Generator) -> Examples:
        like = self._like
        num_labels = np.minimum(_lengths(like.mean_labels, like.spread, rng), like.num_labels)
        label_rows = np.arange(BLOCK_ROWS).repeat(num_labels)
        labels, _ = _distinct(label_rows, self._labels.draw(label_rows.size, rng), like.num_labels)
        rows = np.arange(BLOCK_ROWS).repeat(_lengths(like.mean_draws, like.spread, rng))
        drawn = self._features.draw(rows.size, rng)
        hinting = rng.random(rows.size) < like.signal
        at = rows[hinting]
        chosen = labels.columns[labels.offsets[at] + rng.integers(labels.lengths()[at])]
        drawn[hinting] = self._hints[chosen, rng.integers(like.features_per_label, size=at.size)]
        features, draws = _distinct(rows, drawn, like.num_features)
        features.values[:] = (1 + np.log(draws)) * self._rarity[features.columns]
        return Examples(features=features.normalised(), labels=labels)


class _Zipf:
    """Columns whose chances follow Zipf's law, the frequent ones anywhere.

    Attributes:
        chances: of each column, shape (columns,).
    """

    def __init__(self, num_columns: int, exponent: float, rng: np.random.Generator) -> None:
        by_rank = np.arange(1, num_columns + 1, dtype=np.float64) ** -exponent
        by_rank /= by_rank.sum()
        self._below = by_rank.cumsum()
        self._below[-1] = 1.0  # rounding may leave it just short of that
        self._columns = rng.permutation(num_columns).astype(np.int32)
        self.chances = np.empty(num_columns)
        self.chances[self._columns] = by_rank

    def draw(self, num: int, rng: np.random.Generator) -> NDArray[np.int32]:
        return self._columns[np.searchsorted(self._below, rng.random(num), side="right")]


def _lengths(mean: float, spread: float, rng: np.random.Generator) -> NDArray[np.int64]:
    drawn = rng.lognormal(np.log(mean) - spread**2 / 2, spread, BLOCK_ROWS)
    return np.maximum(np.rint(drawn), 1).astype(np.int64)


def _distinct(
    rows: NDArray[np.int64], columns: NDArray[np.int32], num_columns: int
) -> tuple[SparseRows, NDArray[np.int64]]:
    """The different columns of each row, ascending, with the value 1; and how often each occurs
    there.
    """
    places, counts = np.unique(rows * num_columns + columns, return_counts=True)
    offsets = np.searchsorted(places, np.arange(BLOCK_ROWS + 1) * num_columns)
    distinct = SparseRows(
        offsets=offsets.astype(np.int64),
        columns=(places % num_columns).astype(np.int32),
        values=np.ones(places.size, dtype=np.float32),
        num_columns=num_columns,
    )
    return distinct, counts
