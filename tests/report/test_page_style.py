"""Values are written as people write them, with no more digits than are known."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat_lab.report.style import (
    BYTES,
    COUNT,
    NUMBER,
    SAMPLES_PER_S,
    SECONDS,
    SHARE,
    Unit,
    write,
    write_estimate,
    write_option,
)
from offbeat_lab.statistics import Estimate

SUFFIXES = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (3141, BYTES, "3.14 kB"),
        (999.96e3, BYTES, "1.00 MB"),
        (0, BYTES, "0 B"),
        (0.42, SECONDS, "420 ms"),
        (0, SECONDS, "0 s"),
        (59.99, SECONDS, "60.0 s"),
        (700, SECONDS, "11.7 min"),
        (12_345, SAMPLES_PER_S, "12.3 k samples/s"),
        (0.313, SHARE, "31%"),
        (0.004, SHARE, "0.4%"),
        (4213, COUNT, "4,213"),
        (0.98765, NUMBER, "0.9877"),
        (None, SECONDS, "–"),
        (math.nan, NUMBER, "–"),
        (math.inf, BYTES, "–"),
    ],
)
def test_a_value_alone(value: float | None, unit: Unit, text: str) -> None:
    assert write(value, unit) == text


@pytest.mark.parametrize(
    ("median", "low", "high", "unit", "text"),
    [
        (41.238, 40.1, 42.9, SECONDS, ("41.2 s", "40.1 to 42.9")),
        (41.238, 35.1, 47.9, SECONDS, ("41 s", "35 to 48")),
        (0.97231, 0.968, 0.975, NUMBER, ("0.972", "0.968 to 0.975")),
        (2061.52, 2061.50, 2061.58, BYTES, ("2.062 kB", "")),
        (5.2e6, 5.2e6, 5.2e6, BYTES, ("5.20 MB", "")),
        (0.5, None, None, SECONDS, ("500 ms", "")),
    ],
)
def test_the_interval_decides_the_digits(
    median: float, low: float | None, high: float | None, unit: Unit, text: tuple[str, str]
) -> None:
    assert (
        write_estimate(Estimate(values=[median], median=median, low=low, high=high), unit) == text
    )


@given(st.floats(1.0, 9e14))
def test_what_is_written_is_the_value(value: float) -> None:
    number, suffix = write(value, BYTES).replace(",", "").split(" ")
    assert float(number) * SUFFIXES[suffix] == pytest.approx(value, rel=0.006)


@given(st.floats(0.01, 1e6), st.floats(1e-4, 0.5))
def test_no_more_digits_than_the_interval_supports(median: float, spread: float) -> None:
    half_width = median * spread
    text, interval = write_estimate(
        Estimate(values=[median], median=median, low=median - half_width, high=median + half_width),
        NUMBER,
    )
    decimals = len(text.partition(".")[2])
    assert (
        decimals == 0 or 10.0**-decimals > half_width / 31
    )  # two digits of the half width at most
    assert all(
        len(bound.partition(".")[2]) == decimals for bound in interval.split(" to ") if bound
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "none"),
        (True, "yes"),
        (0.001, "0.001"),
        ([1, 2], "1, 2"),
        ([], "none"),
        ("<b>", "<b>"),
    ],
)
def test_options(value: object, text: str) -> None:
    assert write_option(value) == text


def test_scales_ascend() -> None:
    for unit in (SECONDS, BYTES, SAMPLES_PER_S):
        begins = [begin for begin, _, _ in unit.scales]
        assert begins == sorted(begins)
        assert all(re.fullmatch(r"\S+( \S+)?", name) for _, _, name in unit.scales)
