"""What `Auto`'s benchmark concludes from seeds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from auto import judged


@pytest.mark.parametrize(
    ("values", "verdict"),
    [((1.0, 1.05), True), ((1.2, 1.3), False), ((1.0, 1.2), "undecided"), ((1.0,), "undecided")],
)
def test_one_seed_decides_nothing(values: Sequence[float], verdict: object) -> None:
    assert judged("over DDP", values, 1.1).holds == verdict
