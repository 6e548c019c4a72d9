"""Whether workers fit into this machine's memory, before they are started."""

from __future__ import annotations

import psutil

from offbeat.errors import ConfigError

_WORKER_BYTES = 220 << 20
_BYTES_PER_PARAMETER = 32
"""Parameters, gradients, two optimizer moments, residual, buckets, and what a step allocates."""


def num_runs_that_fit(wanted: int, workers: int, num_parameters: int) -> int:
    """How many runs fit into memory at a time. Raises `ConfigError` if not even one does."""
    each = workers * (_WORKER_BYTES + num_parameters * _BYTES_PER_PARAMETER)
    available = available_bytes()
    if each > available:
        raise ConfigError(
            f"{workers} workers with {num_parameters:,} parameters need about {each / 1e9:.1f} GB,"
            f" and {available / 1e9:.1f} GB are free; use fewer workers or a smaller model"
        )
    return min(wanted, int(available * 0.8 // each) or 1)


def available_bytes() -> int:
    """What processes may take before the machine swaps."""
    return int(psutil.virtual_memory().available)
