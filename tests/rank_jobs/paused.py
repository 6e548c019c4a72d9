"""Ranks of unlike speeds whose computing is a pause."""

from __future__ import annotations

import links


def with_a_slow_rank(rank: int, world_size: int, slow_s: float) -> list[float]:
    """The seconds of steps in which nothing is exchanged, and all ranks but the first pause."""
    links.PAUSE_S = slow_s if rank else 0.0
    spec = "localsgd:period=100:warmup=0"
    return [s for s, _ in links.paused_steps(rank, world_size, (spec,), 2, 800)[spec]]
