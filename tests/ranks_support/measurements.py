"""What sessions measure as they begin, in brief: tests attach thousands of them, and what is found
decides none. So no test measures with as much data as users do; benchmarks and the demo do.
"""

from __future__ import annotations

from offbeat.gradients import collective_choice
from offbeat.kfac import costs


def measure_little() -> None:
    """From now on this process measures selection, messages and inversions with little data."""
    collective_choice.SAMPLE_ELEMENTS = 1 << 16
    costs.MESSAGE_ELEMENTS = (16, 1 << 12)
    costs.CACHE_ELEMENTS = 1 << 12


def send_little() -> None:
    """From now on this process measures links with no more than they need to take longer than
    their latency where they are slow: loopback is measured with a tenth of what users send.
    """
    collective_choice.LARGE_BYTES = collective_choice.LARGE_BYTES[:2]
