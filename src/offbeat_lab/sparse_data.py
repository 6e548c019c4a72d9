"""Files of sparse rows, looked at, written, and turned from one layout into another; and rows of
any number to put into them, drawn from a seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import BinaryIO, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ConfigError
from offbeat.xmc.rows import MOST_COLUMNS, Examples, SparseRows, regroup
from offbeat.xmc.text_rows import MOST_COUNTED
from offbeat.xmc.xmlrepo import XmlFiles, declared_shape, headers_of, pieces, shaped


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """What there is in the files.

    Attributes:
        num_rows: samples.
        num_features: as told, else as the header says, else one more than the largest there is.
        num_labels: the same.
        num_entries: features of all rows together.
        num_label_entries: labels of all rows together.
        features_seen: how many different ones occur.
        labels_seen: the same.
        rows_without_features: how many rows have none.
        rows_without_labels: the same.
        longest_row: most features of a row.
        most_labels: of a row.
        lowest_feature: the smallest number in the files, None if there is none. A 1 may mean that
            they count from 1.
        lowest_label: the same.
        has_header: whether the files say how many rows they have.
    """

    num_rows: int
    num_features: int
    num_labels: int
    num_entries: int
    num_label_entries: int
    features_seen: int
    labels_seen: int
    rows_without_features: int
    rows_without_labels: int
    longest_row: int
    most_labels: int
    lowest_feature: int | None
    lowest_label: int | None
    has_header: bool


def inspect(files: XmlFiles) -> Inspection:
    """Read everything once and count. Raises `ConfigError` as `read` does."""
    features, labels = _Count(), _Count()
    for piece in pieces(files):
        features.add(piece.features)
        labels.add(piece.labels)
    told_features, told_labels = declared_shape(files)
    return Inspection(
        num_rows=features.num_rows,
        num_features=told_features or features.num_columns,
        num_labels=told_labels or labels.num_columns,
        num_entries=features.num_entries,
        num_label_entries=labels.num_entries,
        features_seen=features.num_seen,
        labels_seen=labels.num_seen,
        rows_without_features=features.num_empty,
        rows_without_labels=labels.num_empty,
        longest_row=features.longest,
        most_labels=labels.longest,
        lowest_feature=features.lowest(files.first_feature),
        lowest_label=labels.lowest(files.first_label),
        has_header=headers_of(files)[0] is not None,
    )


class _Count:
    """What is told of rows without keeping them."""

    def __init__(self) -> None:
        self.num_rows = self.num_empty = self.longest = self.num_entries = 0
        # Which columns occur: a truth value for each of the first ones, and the numbers of those
        # beyond, so that a column of a high number costs no more than its entry.
        self._near = np.zeros(0, dtype=np.bool_)
        self._far = np.zeros(0, dtype=np.int32)

    def add(self, rows: SparseRows) -> None:
        lengths, columns = rows.lengths(), rows.columns
        self.num_rows += lengths.size
        self.num_empty += int(np.count_nonzero(lengths == 0))
        self.longest = max(self.longest, int(lengths.max(initial=0)))
        self.num_entries += columns.size
        near = columns[columns < MOST_COUNTED]
        if near.size < columns.size:
            self._far = np.union1d(self._far, columns[columns >= MOST_COUNTED])
        if (needed := int(near.max(initial=-1)) + 1) > self._near.size:
            size = min(max(needed, 2 * self._near.size), MOST_COUNTED)
            self._near = np.concatenate((self._near, np.zeros(size - self._near.size, np.bool_)))
        self._near[near] = True

    @property
    def num_seen(self) -> int:
        """How many columns occur."""
        return int(np.count_nonzero(self._near)) + self._far.size

    @property
    def num_columns(self) -> int:
        """One more than the last column that occurs."""
        if self._far.size:
            return int(self._far[-1]) + 1
        return self._near.size - int(self._near[::-1].argmax()) if self._near.any() else 0

    def lowest(self, first: int) -> int | None:
        if self._near.any():
            return int(self._near.argmax()) + first
        return int(self._far[0]) + first if self._far.size else None


def write(
    files: XmlFiles, samples: Iterable[Examples], *, header: tuple[int, int, int] | None
) -> int:
    """Write samples as `files` describes. Nothing is there under its name before all is written.

    Args:
        files: where, and the numbers to count from.
        samples: chunks, in order.
        header: rows, features, labels; None writes none, and the numbers of columns are lost.

    Returns:
        How many rows were written.

    Raises:
        ConfigError: a label's value is not 1 where everything goes into one file, or the header is
            not true.
    """
    unfinished = [path.with_name(f"{path.name}.unfinished") for path in files.paths]
    num_rows = 0
    try:
        with ExitStack() as stack:
            outputs = [stack.enter_context(path.open("wb")) for path in unfinished]
            if header is not None:
                _write_header(outputs, header)
            for chunk in samples:
                _write_chunk(outputs, chunk, files)
                num_rows += len(chunk)
        if header is not None and header[0] != num_rows:
            raise ConfigError(f"the header says {header[0]} rows, and there are {num_rows}")
        for path, target in zip(unfinished, files.paths, strict=True):
            path.replace(target)
    finally:
        for path in unfinished:
            path.unlink(missing_ok=True)
    return num_rows


def convert(source: XmlFiles, target: XmlFiles, *, header: bool = True) -> int:
    """Write what is in `source` as `target` describes. Returns how many rows there are. Raises
    `ConfigError` as `read` does.
    """
    known = shaped(source)
    if not header:
        return write(target, pieces(known), header=None)
    told = headers_of(known)[0]
    num_rows = told[0] if told is not None else inspect(known).num_rows
    assert known.num_features is not None
    assert known.num_labels is not None
    return write(target, pieces(known), header=(num_rows, known.num_features, known.num_labels))


def _write_header(outputs: Sequence[BinaryIO], header: tuple[int, int, int]) -> None:
    num_rows, num_features, num_labels = header
    if len(outputs) == 1:
        outputs[0].write(b"%d %d %d\n" % header)
        return
    outputs[0].write(b"%d %d\n" % (num_rows, num_features))
    outputs[1].write(b"%d %d\n" % (num_rows, num_labels))


def _write_chunk(outputs: Sequence[BinaryIO], chunk: Examples, files: XmlFiles) -> None:
    features = _lines(chunk.features, _entries(chunk.features, files.first_feature), " ")
    if files.labels_path is not None:
        labels = _lines(chunk.labels, _entries(chunk.labels, files.first_label), " ")
        outputs[0].write("\n".join([*features, ""]).encode())
        outputs[1].write("\n".join([*labels, ""]).encode())
        return
    if np.any(chunk.labels.values != 1):
        raise ConfigError(
            "labels with values other than 1 do not fit into one file with the features; write"
            " labels to a file of their own"
        )
    labels = _lines(
        chunk.labels,
        [str(label) for label in (chunk.labels.columns + files.first_label).tolist()],
        ",",
    )
    outputs[0].write(
        "".join(f"{of} {row}\n" for of, row in zip(labels, features, strict=True)).encode()
    )


def _entries(rows: SparseRows, first: int) -> list[str]:
    distinct, which = np.unique(rows.values, return_inverse=True)
    texts = [
        str(value).removesuffix(".0") for value in distinct
    ]  # the shortest text that reads as the same float32
    columns = (rows.columns.astype(np.int64) + first).tolist()
    return [
        f"{column}:{texts[value]}" for column, value in zip(columns, which.tolist(), strict=True)
    ]


def _lines(rows: SparseRows, tokens: list[str], separator: str) -> list[str]:
    bounds = rows.offsets.tolist()
    return [separator.join(tokens[begin:end]) for begin, end in pairwise(bounds)]


Split: TypeAlias = Literal["train", "test"]

BLOCK_ROWS = 1024
_SPLITS: Final[dict[Split, int]] = {"train": 1, "test": 2}
_TEACHER = 0


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

    num_features: int
    num_labels: int
    mean_draws: float = 76.0
    mean_labels: float = 5.0
    spread: float = 0.7
    feature_exponent: float = 1.0
    label_exponent: float = 0.8
    features_per_label: int = 16
    signal: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("num_features", 2),
            ("num_labels", 1),
            ("mean_draws", 1),
            ("mean_labels", 1),
            ("features_per_label", 1),
        ):
            if not least <= (number := getattr(self, name)) <= MOST_COLUMNS:
                raise ConfigError(f"{name} is {number}; allowed are {least} to {MOST_COLUMNS}")
        for name in ("spread", "feature_exponent", "label_exponent", "seed"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must not be negative")
        if not 0 <= self.signal <= 1:
            raise ConfigError(f"signal is {self.signal}; it is a share, from 0 to 1")

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
