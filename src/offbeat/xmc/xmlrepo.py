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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ConfigError
from offbeat.xmc.rows import MOST_COLUMNS, Examples, SparseRows, offsets_of, regroup

BLOCK_BYTES = 1 << 20

LONGEST_LINE_BYTES = 1 << 26

MOST_COUNTED = 1 << 27
"""Columns of files that do not say how many they have: to find out, each is counted."""

CHUNK_ROWS = 4096

_HEADER = re.compile(rb"[ \t]*\d+([ \t]+\d+){1,2}[ \t]*\r?\n?")
_VALUE = re.compile(rb"[+-]?(?:\d++\.?\d*+|\.\d++)(?:[eE][+-]?\d++)?+(?![eE])")
_PAIR = rb"\d++:" + _VALUE.pattern
_LABELS = re.compile(rb"\d++(?:,\d++)*+(?![,:])")
_FEATURES = re.compile(rb"[ \t]*(?:%b(?:[ \t]++%b)*+[ \t]*)?\r?" % (_PAIR, _PAIR))
_INDEX = re.compile(rb"\d+")
_BLANKS = re.compile(rb"[ \t]*")
_TO_BLANKS = bytes.maketrans(b",:", b"  ")


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


def load(files: XmlFiles) -> Examples:
    """All samples, in order. Files without a header are read twice unless their shape is told.

    Raises:
        ConfigError: a file is missing, without a sample or not as described; the message names the
            line and what was expected there.
    """
    parts = list(_pieces(shaped(files)))
    if not parts:
        raise ConfigError(f"{files.path} has no rows")
    return Examples.concatenate(parts)


def shaped(files: XmlFiles) -> XmlFiles:
    """The same files with both numbers of columns. Goes through files that have no header."""
    num_features, num_labels = _declared_shape(files)
    if num_features is None or num_labels is None:
        last = [-1, -1]
        num_rows = 0
        for piece in _pieces(files):
            num_rows += len(piece)
            for kind, rows in enumerate((piece.features, piece.labels)):
                last[kind] = max(last[kind], int(rows.columns.max(initial=-1)))
        if num_rows == 0:
            raise ConfigError(f"{files.path} has no rows")
        num_features = num_features or max(last[0] + 1, 1)
        num_labels = num_labels or max(last[1] + 1, 1)
    return replace(files, num_features=num_features, num_labels=num_labels)


def _declared_shape(files: XmlFiles) -> tuple[int | None, int | None]:
    """Numbers of features and labels: as the caller says, else the headers."""
    said = [columns for header in _headers_of(files) if header for columns in header[1:]]
    features, labels = said or (None, None)
    return files.num_features or features, files.num_labels or labels


def _headers_of(files: XmlFiles) -> list[tuple[int, ...] | None]:
    """What each file says of itself in its first line. Raises `ConfigError` if that cannot be."""
    for path in files.paths:
        if not path.is_file():
            raise ConfigError(
                f"no data at {path}; a file of the Extreme Classification Repository's format is"
                " needed"
            )
    headers = [
        _read_header(path, num_numbers=3 if files.labels_path is None else 2)
        for path in files.paths
    ]
    if len({None if header is None else header[0] for header in headers}) > 1:
        rows = ["no header" if header is None else f"{header[0]} rows" for header in headers]
        raise ConfigError(
            f"{files.path} has {rows[0]} and {files.labels_path} has {rows[1]}; their rows must"
            " belong together. Give both files of the same set, both with a header or both without"
        )
    return headers


def _read_header(path: Path, *, num_numbers: int) -> tuple[int, ...] | None:
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


def _pieces(files: XmlFiles) -> Iterator[Examples]:
    """The samples in order, as many at a time as is convenient. Raises `ConfigError` as `load`
    does. Where a number of columns is not known, it is `MOST_COUNTED`.
    """
    headers = _headers_of(files)
    num_features, num_labels = _declared_shape(files)
    files = replace(files, num_features=num_features, num_labels=num_labels)
    features = _RowsReader(files.path, files, headers[0]).read()
    if files.labels_path is None:
        yield from features
        return
    as_features = replace(files, num_features=files.num_labels, first_feature=files.first_label)
    labels = _RowsReader(files.labels_path, as_features, headers[1], kind="label").read()
    groups = zip_longest(regroup(features, CHUNK_ROWS), regroup(labels, CHUNK_ROWS))
    for piece, other in groups:
        if piece is None or other is None or len(piece) != len(other):
            raise ConfigError(
                f"{files.path} and {files.labels_path} have different numbers of rows; their rows"
                " must belong together"
            )
        yield Examples(features=piece.features, labels=other.features)


class _RowsReader:
    """Reads one file, about a megabyte of text at a time.

    With a header there are as many rows as it says, and blank lines may follow them. Without one,
    every line is a row. Labels have the value 1.

    Args:
        path: of the file.
        files: that it is one of, with both numbers of columns. A line begins with labels, as
            `3,17 5:0.25`, where these have no file of their own.
        header: its first line, if that is one.
        kind: what messages call the columns that have a value.
    """

    def __init__(
        self, path: Path, files: XmlFiles, header: tuple[int, ...] | None, *, kind: str = "feature"
    ) -> None:
        self._path = path
        self._with_labels = files.labels_path is None
        self._num_expected = None if header is None else header[0]
        self._kind = kind
        self._labels, self._features = (
            range(first, first + (MOST_COUNTED if number is None else number))
            for first, number in (
                (files.first_label, files.num_labels),
                (files.first_feature, files.num_features),
            )
        )

    def read(self) -> Iterator[Examples]:
        """All rows. Raises `ConfigError` where the file is not as it is said to be."""
        expected, num_rows = self._num_expected, 0
        num_before = 0 if expected is None else 1
        for lines in self._blocks(num_before):
            kept = lines if expected is None else lines[: expected - num_rows]
            if any(line.strip() for line in lines[len(kept) :]):
                raise ConfigError(
                    f"{self._path}, line {num_rows + len(kept) + 2}: the end was expected, since"
                    f" line 1 says that there are {expected} rows"
                )
            if kept:
                yield self._parse(kept, num_before + num_rows)
                num_rows += len(kept)
        if expected is not None and num_rows != expected:
            raise ConfigError(
                f"{self._path} says in line 1 that it has {expected} rows, and has {num_rows}; was"
                " it cut off?"
            )

    def _blocks(self, num_skipped: int) -> Iterator[list[bytes]]:
        with self._path.open("rb") as file:
            for _ in range(num_skipped):
                file.readline()
            rest = b""
            for block in chain(iter(lambda: file.read(BLOCK_BYTES), b""), [b""]):
                # What is left at the end of the file is a line too, though nothing ends it.
                *lines, rest = (rest + (block or (b"\n" if rest else b""))).split(b"\n")
                if len(rest) > LONGEST_LINE_BYTES:
                    raise ConfigError(
                        f"{self._path} has a line of more than {LONGEST_LINE_BYTES >> 20} MiB; is"
                        " it a text file of rows?"
                    )
                yield lines

    def _parse(self, lines: Sequence[bytes], num_before: int) -> Examples:
        heads = [b""] * len(lines)
        if self._with_labels:
            heads = [match[0] if (match := _LABELS.match(line)) else b"" for line in lines]
        tails = [line[len(head) :] for line, head in zip(lines, heads, strict=True)]
        labels = _numbers(heads)
        if all(map(_FEATURES.fullmatch, tails)) and _are_in(labels, self._labels):
            columns, decimals = _numbers(tails).reshape(-1, 2).T
            with np.errstate(over="ignore"):
                values = decimals.astype(np.float32)
            if np.isfinite(values).all() and _are_in(columns, self._features):
                num_labels = [head.count(b",") + bool(head) for head in heads]
                ones = np.ones(labels.size, dtype=np.float32)
                num_columns = [tail.count(b":") for tail in tails]
                return Examples(
                    features=_rows(num_columns, columns, values, self._features),
                    labels=_rows(num_labels, labels, ones, self._labels),
                )
        for number, line in enumerate(lines, start=num_before + 1):
            self._check(line.removesuffix(b"\r"), f"{self._path}, line {number}")
        raise AssertionError("a line is wrong")

    def _check(self, line: bytes, where: str) -> None:
        """Raise `ConfigError` for the first thing in `line` that is wrong, if something is."""
        at = 0
        if self._with_labels and line[:1].strip(b" \t") and not re.match(rb"\d+:", line):
            while True:
                end = _end(_INDEX, line, at)
                if end == at:
                    _complain(line, at, where, "a label, which is a whole number")
                _check_range(line[at:end], self._labels, "label", f"{where}, character {at + 1}")
                at = end + 1
                if line[end:at] != b",":
                    break
            at = self._after_blank(line, end, where)
        at = _end(_BLANKS, line, at)
        while at < len(line):
            end = _end(_INDEX, line, at)
            if end == at or line[end : end + 1] != b":":
                wanted = f"'{self._kind}:value' with a whole number before the colon"
                _complain(line, at, where, wanted)
            allowed, place = self._features, f"{where}, character {at + 1}"
            _check_range(line[at:end], allowed, self._kind, place)
            value = _VALUE.match(line, end + 1)
            with np.errstate(over="ignore"):
                if value is None or not np.isfinite(np.float32(float(value[0]))):
                    _complain(line, end + 1, where, "a finite number of 32 bits after the colon")
            at = self._after_blank(line, value.end(), where)

    @staticmethod
    def _after_blank(line: bytes, at: int, where: str) -> int:
        end = _end(_BLANKS, line, at)
        if end == at < len(line):
            _complain(line, at, where, "a blank, or the end of the line")
        return end


def _numbers(texts: Sequence[bytes]) -> NDArray[np.float64]:
    """Those of lines that are known to hold numbers with blanks, commas and colons between."""
    return np.fromstring(b" ".join(texts).translate(_TO_BLANKS).strip(), sep=" ")


def _are_in(numbers: NDArray[np.float64], allowed: range) -> bool:
    return bool(((numbers >= allowed.start) & (numbers < allowed.stop)).all())


def _rows(
    lengths: Sequence[int],
    numbers: NDArray[np.float64],
    values: NDArray[np.float32],
    allowed: range,
) -> SparseRows:
    return SparseRows(
        offsets=offsets_of(lengths),
        columns=(numbers - allowed.start).astype(np.int32),
        values=values,
        num_columns=len(allowed),
    )


def _end(pattern: re.Pattern[bytes], line: bytes, at: int) -> int:
    """Where what matches `pattern` from `at` on ends; `at` where nothing does."""
    match = pattern.match(line, at)
    return at if match is None else match.end()


def _check_range(digits: bytes, allowed: range, kind: str, where: str) -> None:
    number = int(digits.lstrip(b"0")[:30] or b"0")
    if number not in allowed:
        other = (
            f"; does the file count {kind}s from {1 - allowed.start}?"
            if number in (0, allowed.stop)
            else ""
        )
        raise ConfigError(
            f"{where}: {kind} {number} is out of range; allowed are {allowed.start} to"
            f" {allowed.stop - 1}{other}"
        )


def _complain(line: bytes, at: int, where: str, wanted: str) -> NoReturn:
    token = re.split(r"[\s,]", line[at : at + 30].decode(errors="replace"))[0]
    got = f", got {token!r}" if token else ""
    raise ConfigError(f"{where}, character {at + 1}: expected {wanted}{got}")
