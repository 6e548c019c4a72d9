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

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from offbeat.errors import ConfigError
from offbeat.xmc.rows import Examples, regroup
from offbeat.xmc.text_rows import ExpectedFormat, read_header, read_rows

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


def shaped(files: XmlFiles) -> XmlFiles:
    """The same files with both numbers of columns. Goes through files that have no header."""
    num_features, num_labels = declared_shape(files)
    if num_features is None or num_labels is None:
        last = [-1, -1]
        num_rows = 0
        for piece in pieces(files):
            num_rows += len(piece)
            for kind, rows in enumerate((piece.features, piece.labels)):
                last[kind] = max(last[kind], int(rows.columns.max(initial=-1)))
        if num_rows == 0:
            raise ConfigError(f"{files.path} has no rows")
        num_features = num_features or max(last[0] + 1, 1)
        num_labels = num_labels or max(last[1] + 1, 1)
    return replace(files, num_features=num_features, num_labels=num_labels)


def declared_shape(files: XmlFiles) -> tuple[int | None, int | None]:
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
    num_features, num_labels = declared_shape(files)
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
