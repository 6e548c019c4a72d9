"""What sessions measure as they begin, in brief: tests attach thousands of them, and what is found
decides none. So no test measures with as much data as users do; benchmarks and the demo do.
"""

from __future__ import annotations

from typing import Final

import pytest

from offbeat.gradients import collective_choice
from offbeat.kfac import costs

LARGE_BYTES: Final = collective_choice.LARGE_BYTES
"""What a session of a user sends to measure links."""


def measure_little() -> None:
    """From now on this process measures selection, links and inversions with little data."""
    collective_choice.SAMPLE_ELEMENTS = 1 << 16
    collective_choice.LARGE_BYTES = LARGE_BYTES[:2]  # a tenth of what users send over loopback
    costs.MESSAGE_ELEMENTS = (16, 1 << 12)
    costs.CACHE_ELEMENTS = 1 << 12


@pytest.fixture
def as_much_as_users_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of how links are measured."""
    monkeypatch.setattr(collective_choice, "LARGE_BYTES", LARGE_BYTES)
