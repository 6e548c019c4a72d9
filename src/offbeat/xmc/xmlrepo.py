"""Files of the Extreme Classification Repository and its kin: read in chunks, never held whole as
text.

One file holds everything,

    3 500 983               rows, features, labels; this line may be absent
    3,17 5:0.25 9:1         labels, then features with their values
     5:1                    a row without labels begins with a blank; a row without anything is a
     blank line

or two files, whose rows belong together, hold features and labels, each beginning with "rows
columns" or with nothing:

    2 500                   2 983
    5:0.25 9:1              3:1 17:1
    5:1

Numbers count from 0 or from 1. The formats are described at
http://manikvarma.org/downloads/XC/XMLRepository.html.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np

from offbeat.errors import ConfigError
from offbeat.xmc.rows import Examples, SparseRows, regroup
from offbeat.xmc.text_rows import MOST_COUNTED, ExpectedFormat, read_header, read_rows

CHUNK_ROWS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class XmlFiles:
    """Data as they lie on disk.

    Attributes:
        path: the file that holds everything, or the features if there is another one for labels.
        labels_path: the labels, where they have a file of their own.
        num_features: how many there are, whatever the header says; None takes the header's word, or
            counts without one.
        num_labels: the same.
        first_feature: the number of the first one in the files, 0 or 1. In memory it is always 0.
        first_label: the same.

    Raises:
        ConfigError: a number is out of range.
    """

    path: Path
    labels_path: Path | None = None
    num_features: int | None = None
    num_labels: int | None = None
    first_feature: int = 0
    first_label: int = 0

    def __post_init__(self) -> None:
        for name in ("first_feature", "first_label"):
            if getattr(self, name) not in (0, 1):
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; numbers count from 0 or from 1"
                )
        for name in ("num_features", "num_labels"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise ConfigError(f"{name} is {number}; at least 1 is needed")

    @property
    def paths(self) -> list[Path]:
        return [self.path] if self.labels_path is None else [self.path, self.labels_path]


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


def read(files: XmlFiles, *, num_rows: int = CHUNK_ROWS) -> Iterator[Examples]:
    """The samples in order, `num_rows` at a time. Files without a header are read twice
    unless their shape is told.

    Raises:
        ConfigError: a file is missing or not as described; the message names the line and what was
            expected there.
    """
    if num_rows < 1:
        raise ConfigError(f"rows are read {num_rows} at a time; at least 1 is needed")
    return regroup(pieces(shaped(files)), num_rows)


def load(files: XmlFiles) -> Examples:
    """All samples. Raises `ConfigError` as `read` does, and where there is no sample at all."""
    parts = list(pieces(shaped(files)))
    if not parts:
        raise ConfigError(f"{files.path} has no rows")
    return Examples.concatenate(parts)


def inspect(files: XmlFiles) -> Inspection:
    """Read everything once and count. Raises `ConfigError` as `read` does."""
    features, labels = _Count(), _Count()
    for piece in pieces(files):
        features.add(piece.features)
        labels.add(piece.labels)
    told_features, told_labels = _declared_shape(files)
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


def shaped(files: XmlFiles) -> XmlFiles:
    """The same files with both numbers of columns. Goes through files that have no header."""
    num_features, num_labels = _declared_shape(files)
    if num_features is None or num_labels is None:
        counted = inspect(files)
        if counted.num_rows == 0:
            raise ConfigError(f"{files.path} has no rows")
        num_features, num_labels = max(counted.num_features, 1), max(counted.num_labels, 1)
    return replace(files, num_features=num_features, num_labels=num_labels)


def _declared_shape(files: XmlFiles) -> tuple[int | None, int | None]:
    """Numbers of features and labels: as the caller says, else the headers."""
    said = [
        columns
        for header in headers_of(files)
        for columns in (header[1:] if header is not None else ())
    ]
    features, labels = said or (None, None)
    return files.num_features or features, files.num_labels or labels


def headers_of(files: XmlFiles) -> list[tuple[int, ...] | None]:
    """What each file says of itself in its first line. Raises `ConfigError` if that cannot be."""
    for path in files.paths:
        if not path.is_file():
            raise ConfigError(
                f"no data at {path}; a file of the Extreme Classification Repository's format is"
                " needed"
            )
    headers = [
        read_header(path, num_numbers=3 if files.labels_path is None else 2) for path in files.paths
    ]
    if len({None if header is None else header[0] for header in headers}) > 1:
        rows = ["no header" if header is None else f"{header[0]} rows" for header in headers]
        raise ConfigError(
            f"{files.path} has {rows[0]} and {files.labels_path} has {rows[1]}; their rows must"
            " belong together. Give both files of the same set, both with a header or both without"
        )
    return headers


def pieces(files: XmlFiles) -> Iterator[Examples]:
    """The samples in order, as many at a time as is convenient. Raises `ConfigError` as `read`
    does.
    """
    headers = headers_of(files)
    num_features, num_labels = _declared_shape(files)
    expected = ExpectedFormat(
        with_labels=files.labels_path is None,
        num_labels=num_labels,
        num_features=num_features,
        first_label=files.first_label,
        first_feature=files.first_feature,
    )
    features = read_rows(files.path, expected, header=headers[0])
    if files.labels_path is None:
        yield from features
        return
    as_features = replace(
        expected, kind="label", num_features=num_labels, first_feature=files.first_label
    )
    labels = read_rows(files.labels_path, as_features, header=headers[1])
    yield from _side_by_side(regroup(features, CHUNK_ROWS), regroup(labels, CHUNK_ROWS), files)


def _side_by_side(
    features: Iterator[Examples], labels: Iterator[Examples], files: XmlFiles
) -> Iterator[Examples]:
    for piece in features:
        other = next(labels, None)
        if other is None or len(other) != len(piece):
            break
        yield Examples(features=piece.features, labels=other.features)
    else:
        if next(labels, None) is None:
            return
    raise ConfigError(
        f"{files.path} and {files.labels_path} have different numbers of rows; their rows must"
        " belong together"
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
