"""Kernels that parse rows of text such as `3,17 5:0.25 9:1`: labels, then features with their
values.

Bytes are looked at once, nothing is copied, and nothing is allocated but the result. A number of up
to 15 digits and a moderate exponent becomes what Python's `float` makes of it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from offbeat.codec.jit import kernel

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
