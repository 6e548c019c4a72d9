"""Files of the Extreme Classification Repository and its kin: read in chunks, never held whole as
text. A wrong line is named by its number, and what was expected there.

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

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from offbeat.codec.jit import kernel
from offbeat.errors import ConfigError
from offbeat.xmc.rows import MOST_COLUMNS, Examples, SparseRows, regroup

FINE, NO_LABEL, NO_FEATURE, NO_VALUE, NO_BLANK, LABEL_RANGE, FEATURE_RANGE = range(7)
"""What may be wrong with a line."""

_TAB, _NEWLINE, _RETURN, _BLANK, _PLUS, _COMMA, _MINUS, _POINT, _ZERO, _NINE, _COLON = (
    b"\t\n\r +,-.09:"
)
_UPPER_E, _LOWER_E = b"Ee"
_LARGE = 1 << 40  # beyond every index that is allowed
_MOST_DIGITS = 18  # of a mantissa that fits in 64 bits
_POWERS = 10.0 ** np.arange(23)  # exact, as larger ones are not
_TOO_LARGE = (
    float(np.finfo(np.float32).max) + 2.0**103
)  # what is below this is rounded to a finite number


BLOCK_BYTES = 1 << 20

LONGEST_LINE_BYTES = 1 << 26

MOST_COUNTED = 1 << 27
"""Columns of files that do not say how many they have: to find out, each is counted."""

_HEADER = re.compile(rb"[ \t]*\d+([ \t]+\d+){1,2}[ \t]*\r?\n?")

_EXPECTED = {
    NO_LABEL: "a label, which is a whole number",
    NO_FEATURE: "'{kind}:value' with a whole number before the colon",
    NO_VALUE: "a finite number of 32 bits after the colon",
    NO_BLANK: "a blank, or the end of the line",
}


@kernel
def _skip_blanks(text: NDArray[np.uint8], at: int) -> int:
    while (
        text[at] == _BLANK or text[at] == _TAB or (text[at] == _RETURN and text[at + 1] == _NEWLINE)
    ):
        at += 1
    return at


@kernel
def _read_index(text: NDArray[np.uint8], at: int) -> tuple[int, int]:
    """A whole number, and where it ends; the end is the beginning if there is none."""
    number = 0
    while _ZERO <= text[at] <= _NINE:
        number = min(number * 10 + text[at] - _ZERO, _LARGE)
        at += 1
    return number, at


@kernel
def _scale(mantissa: float, exponent: int) -> float:
    """mantissa * 10**exponent."""
    while exponent > 22:
        if mantissa == 0 or mantissa > 1e40:
            return mantissa
        mantissa *= 1e22
        exponent -= 22
    while exponent < -22:
        if mantissa < 1e-60:
            return 0.0
        mantissa /= 1e22
        exponent += 22
    power: float = _POWERS[abs(exponent)]
    return mantissa * power if exponent >= 0 else mantissa / power


@kernel
def _read_value(text: NDArray[np.uint8], at: int) -> tuple[float, int]:
    """A decimal number, and where it ends; -1 if there is none or it does not fit in a float32."""
    negative = text[at] == _MINUS
    if text[at] == _MINUS or text[at] == _PLUS:
        at += 1
    mantissa, exponent, num_digits, num_read, in_fraction = np.int64(0), 0, 0, 0, False
    while True:
        if _ZERO <= text[at] <= _NINE:
            num_read += 1
            if num_digits < _MOST_DIGITS:
                mantissa = mantissa * 10 + (text[at] - _ZERO)
                num_digits += mantissa > 0
                exponent -= in_fraction
            else:
                exponent += not in_fraction
        elif text[at] == _POINT and not in_fraction:
            in_fraction = True
        else:
            break
        at += 1
    if num_read == 0:
        return 0.0, -1
    if text[at] == _LOWER_E or text[at] == _UPPER_E:
        at += 1
        down = text[at] == _MINUS
        if text[at] == _MINUS or text[at] == _PLUS:
            at += 1
        written, end = _read_index(text, at)
        if end == at:
            return 0.0, -1
        at = end
        exponent += -written if down else written
    value = _scale(float(mantissa), exponent)
    if value >= _TOO_LARGE:
        return 0.0, -1
    return -value if negative else value, at


@kernel
def _read_labels(
    text: NDArray[np.uint8], at: int, first: int, limit: int, columns: NDArray[np.int32], count: int
) -> tuple[int, int, int]:
    """The labels of a line, which may be none. Returns what is wrong, where, and how many labels
    there are altogether.
    """
    if text[at] == _NEWLINE or _skip_blanks(text, at) > at:
        return FINE, at, count
    begin, listed = at, count
    while True:
        label, end = _read_index(text, at)
        if end == at:
            return NO_LABEL, at, count
        if text[end] == _COLON and at == begin:  # the line begins with a feature
            return FINE, begin, listed
        if not first <= label < first + limit:
            return LABEL_RANGE, at, count
        columns[count] = label - first
        count += 1
        at = end
        if text[at] != _COMMA:
            return (
                (FINE if text[at] == _NEWLINE or _skip_blanks(text, at) > at else NO_BLANK),
                at,
                count,
            )
        at += 1


@kernel
def _read_features(
    text: NDArray[np.uint8],
    at: int,
    first: int,
    limit: int,
    columns: NDArray[np.int32],
    values: NDArray[np.float32],
    count: int,
) -> tuple[int, int, int]:
    """The features of a line. Returns what is wrong, where, and how many features there are
    altogether.
    """
    at = _skip_blanks(text, at)
    while text[at] != _NEWLINE:
        feature, end = _read_index(text, at)
        if end == at or text[end] != _COLON:
            return NO_FEATURE, at, count
        if not first <= feature < first + limit:
            return FEATURE_RANGE, at, count
        value, after = _read_value(text, end + 1)
        if after < 0:
            return NO_VALUE, end + 1, count
        at = _skip_blanks(text, after)
        if at == after and text[at] != _NEWLINE:
            return NO_BLANK, at, count
        columns[count] = feature - first
        values[count] = value
        count += 1
    return FINE, at, count


@kernel
def parse_rows(
    text: NDArray[np.uint8],
    with_labels: bool,
    firsts: tuple[int, int],
    limits: tuple[int, int],
    label_offsets: NDArray[np.int64],
    labels: NDArray[np.int32],
    offsets: NDArray[np.int64],
    columns: NDArray[np.int32],
    values: NDArray[np.float32],
) -> tuple[int, int, int]:
    """Parse whole lines.

    Args:
        text: ends with a line feed.
        with_labels: whether a line begins with labels.
        firsts: the numbers of the first label and the first feature, 0 or 1.
        limits: how many labels and features there are.
        label_offsets: takes where each row's labels begin; one place more than there are lines.
        labels: takes the labels, counted from 0; half as many places as there are bytes.
        offsets: the same for features.
        columns: takes the features, counted from 0; a quarter as many places as there are bytes,
            and one.
        values: takes their values; as long.

    Returns:
        What is wrong, at which byte, and how many rows are before it.
    """
    at = num_rows = num_labels = num_entries = 0
    label_offsets[0] = offsets[0] = 0
    while at < text.size:
        if with_labels:
            wrong, at, num_labels = _read_labels(text, at, firsts[0], limits[0], labels, num_labels)
            if wrong != FINE:
                return wrong, at, num_rows
        wrong, at, num_entries = _read_features(
            text, at, firsts[1], limits[1], columns, values, num_entries
        )
        if wrong != FINE:
            return wrong, at, num_rows
        at += 1
        num_rows += 1
        label_offsets[num_rows] = num_labels
        offsets[num_rows] = num_entries
    return FINE, at, num_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedFormat:
    """What rows of a file may hold.

    Attributes:
        with_labels: whether a line begins with labels, as `3,17 5:0.25`.
        kind: what messages call the columns that have a value.
        num_labels: None where it is unknown, which allows up to `MOST_COUNTED`.
        num_features: the same.
        first_label: the number of the first one, 0 or 1.
        first_feature: the same.
    """

    with_labels: bool
    kind: str = "feature"
    num_labels: int | None = None
    num_features: int | None = None
    first_label: int = 0
    first_feature: int = 0

    @property
    def limits(self) -> tuple[int, int]:
        """How many labels and features there may be."""
        bounds = (self.num_labels, self.num_features)
        labels, features = (MOST_COUNTED if bound is None else bound for bound in bounds)
        return labels, features


def read_header(path: Path, *, num_numbers: int) -> tuple[int, ...] | None:
    """The whole numbers in the first line of the file; None if it holds something else.

    Raises:
        ConfigError: the line is the header of the other layout, or a number is out of range.
    """
    with path.open("rb") as file:
        line = file.readline(200)
    if not _HEADER.fullmatch(line):
        return None
    numbers = tuple(int(number) for number in line.split())
    if len(numbers) != num_numbers:
        raise ConfigError(
            f"{path}, line 1: a header of {num_numbers} numbers was expected, or none, got"
            f" {line.decode().strip()!r}. Three numbers (rows, features, labels) begin a file that"
            " holds everything; two (rows, columns) begin each of two files, one of features and"
            " one of labels"
        )
    if max(numbers[1:]) > MOST_COLUMNS:
        raise ConfigError(
            f"{path}, line 1: there may be {MOST_COLUMNS} columns, got {max(numbers[1:])}"
        )
    return numbers


def read_rows(
    path: Path, expected: ExpectedFormat, *, header: tuple[int, ...] | None
) -> Iterator[Examples]:
    """The rows of a file, about a megabyte of text at a time.

    With a header there are as many rows as it says, and blank lines may follow them. Without one,
    every line is a row. Labels have the value 1. Where the number of columns is not known, it is
    `MOST_COUNTED`.

    Raises:
        ConfigError: the file cannot be read as `expected` says.
    """
    num_expected = None if header is None else header[0]
    num_rows = 0
    num_lines_before = 0 if header is None else 1
    for block in _whole_lines(path, num_lines_before):
        room = None if num_expected is None else num_expected - num_rows
        kept = block if room is None else _cut(block, room, path, num_lines_before + num_rows)
        if kept.size:
            rows = _parse(kept, expected, path, num_lines_before + num_rows)
            num_rows += len(rows)
            yield rows
    if num_expected is not None and num_rows != num_expected:
        raise ConfigError(
            f"{path} says in line 1 that it has {num_expected} rows, and has {num_rows}; was it cut"
            " off?"
        )


def _whole_lines(path: Path, num_skipped: int) -> Iterator[NDArray[np.uint8]]:
    with path.open("rb") as file:
        for _ in range(num_skipped):
            file.readline()
        rest = b""
        for block in chain(iter(lambda: file.read(BLOCK_BYTES), b""), [b""]):
            # What is left at the end of the file is a line too, though nothing ends it.
            text = rest + (block or (b"\n" if rest else b""))
            end = text.rfind(b"\n") + 1
            rest = text[end:]
            if len(rest) > LONGEST_LINE_BYTES:
                raise ConfigError(
                    f"{path} has a line of more than {LONGEST_LINE_BYTES >> 20} MiB; is it a text"
                    " file of rows?"
                )
            if end:
                yield np.frombuffer(text, dtype=np.uint8, count=end)


def _cut(
    block: NDArray[np.uint8], num_lines: int, path: Path, num_lines_before: int
) -> NDArray[np.uint8]:
    """The first lines of `block`; raises unless the others are blank."""
    ends = np.flatnonzero(block == ord("\n")) + 1
    if ends.size <= num_lines:
        return block
    end = int(ends[num_lines - 1]) if num_lines else 0
    if block[end:].tobytes().strip():
        raise ConfigError(
            f"{path}, line {num_lines_before + num_lines + 1}: the end was expected, since line 1"
            f" says that there are {num_lines_before + num_lines - 1} rows"
        )
    return block[:end]


def _parse(
    text: NDArray[np.uint8], expected: ExpectedFormat, path: Path, num_lines_before: int
) -> Examples:
    num_lines = int(np.count_nonzero(text == ord("\n")))
    label_offsets, offsets = (
        np.empty(num_lines + 1, dtype=np.int64),
        np.empty(num_lines + 1, dtype=np.int64),
    )
    labels = np.empty(text.size // 2 + 1 if expected.with_labels else 0, dtype=np.int32)
    columns = np.empty(text.size // 4 + 1, dtype=np.int32)
    values = np.empty(columns.size, dtype=np.float32)
    firsts = (expected.first_label, expected.first_feature)
    wrong, at, num_rows = parse_rows(
        text,
        expected.with_labels,
        firsts,
        expected.limits,
        label_offsets,
        labels,
        offsets,
        columns,
        values,
    )
    if wrong != FINE:
        raise ConfigError(
            _describe_error(
                text, at, wrong, expected, f"{path}, line {num_lines_before + num_rows + 1}"
            )
        )
    limits = expected.limits
    num_labels, num_entries = label_offsets[-1] if expected.with_labels else 0, offsets[-1]
    if not expected.with_labels:
        label_offsets[:] = 0
    return Examples(
        features=SparseRows(
            offsets=offsets,
            columns=columns[:num_entries].copy(),
            values=values[:num_entries].copy(),
            num_columns=limits[1],
        ),
        labels=SparseRows(
            offsets=label_offsets,
            columns=labels[:num_labels].copy(),
            values=np.ones(num_labels, dtype=np.float32),
            num_columns=limits[0],
        ),
    )


def _describe_error(
    text: NDArray[np.uint8], at: int, wrong: int, expected: ExpectedFormat, where: str
) -> str:
    begin = text[:at].tobytes().rfind(b"\n") + 1
    token = re.split(r"[\s,]", text[at : at + 30].tobytes().decode(errors="replace"))[0]
    where = f"{where}, character {at - begin + 1}"
    if wrong in _EXPECTED:
        wanted = f"{where}: expected {_EXPECTED[wrong].format(kind=expected.kind)}"
        return f"{wanted}, got {token!r}" if token else wanted
    kind, position = ("label", 0) if wrong == LABEL_RANGE else (expected.kind, 1)
    first, limit = (
        (expected.first_label, expected.first_feature)[position],
        expected.limits[position],
    )
    number = int(re.split(r"\D", token)[0])
    other = (
        f"; does the file count {kind}s from {1 - first}?" if number in (0, first + limit) else ""
    )
    return (
        f"{where}: {kind} {number} is out of range; allowed are {first} to"
        f" {first + limit - 1}{other}"
    )


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
