"""Values are written as people write them, and everywhere alike."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat_lab.figures import (
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
        (41.238, 35.123, 147.9, SECONDS, ("41.2 s", "35.1 to 148")),
        (0.97231, 0.968, 0.975, NUMBER, ("0.9723", "0.9680 to 0.9750")),
        (2061.52, 2061.50, 2061.58, BYTES, ("2.06 kB", "")),
        (5.2e6, 5.2e6, 5.2e6, BYTES, ("5.20 MB", "")),
        (0.5, None, None, SECONDS, ("500 ms", "")),
    ],
)
def test_an_interval_has_the_unit_of_its_median(
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
def test_a_median_looks_the_same_with_an_interval(median: float, spread: float) -> None:
    low, high = median * (1 - spread), median * (1 + spread)
    known = Estimate(values=[median], median=median, low=low, high=high)
    assert write_estimate(known, SECONDS)[0] == write(median, SECONDS)


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
