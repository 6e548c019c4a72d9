"""Rows of text, streamed block by block into arrays. A wrong line is named by its number, and what
was expected there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ConfigError
from offbeat.xmc import text_kernels
from offbeat.xmc.rows import MOST_COLUMNS, Examples, SparseRows

BLOCK_BYTES = 1 << 20
LONGEST_LINE_BYTES = 1 << 26
MOST_COUNTED = 1 << 27
"""Columns of files that do not say how many they have: to find out, each is counted."""

_HEADER = re.compile(rb"[ \t]*\d+([ \t]+\d+){1,2}[ \t]*\r?\n?")
_EXPECTED = {
    text_kernels.NO_LABEL: "a label, which is a whole number",
    text_kernels.NO_FEATURE: "'{kind}:value' with a whole number before the colon",
    text_kernels.NO_VALUE: "a finite number of 32 bits after the colon",
    text_kernels.NO_BLANK: "a blank, or the end of the line",
}


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
    wrong, at, num_rows = text_kernels.parse_rows(
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
    if wrong != text_kernels.FINE:
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
    kind, position = ("label", 0) if wrong == text_kernels.LABEL_RANGE else (expected.kind, 1)
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
