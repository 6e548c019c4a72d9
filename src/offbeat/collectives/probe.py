"""Measures what messages and dense all-reduces cost between the ranks, and makes all ranks agree on the numbers.

Everyone sends to the next rank and receives from the one before, at once, as the sparse collectives do. The slowest rank's
figures count. Two message sizes give alpha and beta.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import torch

from offbeat.planning.costs import Link, Network
from offbeat.transport.operations import AllGather, AllReduce, Collective, Now, Recv, Send

_REPORT = struct.Struct("<5d")
SMALL_BYTES = 64
LARGE_BYTES = 1 << 20


def probe(
    rank: int, world_size: int, *, select_s_per_element: float, device: torch.device, repeats: int = 5
) -> Collective[Network]:
    """The network as the slowest rank sees it; the same on every rank. About 15 MiB each way at the default.

    Args:
        rank: this rank.
        world_size: number of ranks.
        select_s_per_element: this rank's own cost of selection, to be agreed on with the rest.
        device: of the gradients: a dense all-reduce of CUDA tensors goes another way than one of CPU tensors.
        repeats: measurements of each kind; the fastest counts, since everything else is disturbance.
    """
    small_s = yield from _fastest(repeats, lambda: _pass_on(rank, world_size, SMALL_BYTES))
    large_s = yield from _fastest(repeats, lambda: _pass_on(rank, world_size, LARGE_BYTES))
    messages = _fit(small_s, large_s, SMALL_BYTES, LARGE_BYTES)
    small_s = yield from _fastest(repeats, lambda: _reduce(SMALL_BYTES, device))
    large_s = yield from _fastest(repeats, lambda: _reduce(LARGE_BYTES, device))
    hops = max(2 * (world_size - 1), 1)
    dense = _fit(small_s / hops, large_s / hops, SMALL_BYTES / world_size, LARGE_BYTES / world_size)
    mine = (messages.alpha_s, messages.beta_s_per_byte, dense.alpha_s, dense.beta_s_per_byte, select_s_per_element)
    reports = yield AllGather(_REPORT.pack(*mine))
    slowest = [max(column) for column in zip(*(_REPORT.unpack(report) for report in reports), strict=True)]
    return Network(
        messages=Link(alpha_s=slowest[0], beta_s_per_byte=slowest[1]),
        dense=Link(alpha_s=slowest[2], beta_s_per_byte=slowest[3]),
        select_s_per_element=slowest[4],
    )


def _fastest(repeats: int, make: Callable[[], Collective[None]]) -> Collective[float]:
    durations_s = []
    for _ in range(repeats):
        begin_s = yield Now()
        yield from make()
        durations_s.append((yield Now()) - begin_s)
    return float(min(durations_s))


def _pass_on(rank: int, world_size: int, num_bytes: int) -> Collective[None]:
    if world_size > 1:
        yield Send((rank + 1) % world_size, bytes(num_bytes))
        yield Recv((rank - 1) % world_size)


def _reduce(num_bytes: int, device: torch.device) -> Collective[None]:
    total = yield AllReduce(torch.zeros(num_bytes // 4, device=device))
    float(total[0])  # on a GPU the sum is over only when the host can read it


def _fit(small_s: float, large_s: float, small_bytes: float, large_bytes: float) -> Link:
    beta = max(large_s - small_s, 0.0) / (large_bytes - small_bytes)
    return Link(alpha_s=max(small_s - small_bytes * beta, 0.0), beta_s_per_byte=beta)
