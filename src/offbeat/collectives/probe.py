"""Measures what messages and dense all-reduces cost between the ranks, and makes all ranks agree on
the numbers.

Everyone sends to the next rank and receives from the one before, at once, as the sparse collectives
do. The slowest rank's figures count. Two message sizes give alpha and beta.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch

from offbeat.arithmetic.costs import LinkCost, NetworkCosts
from offbeat.transport.operations import AllGather, AllReduceTensor, Collective, Now, Recv, Send

_REPORT = struct.Struct("<5d")
MESSAGE_BYTES = (64, 1 << 20)
TENSOR_BYTES = (64, 1 << 22)
"""Sizes that are measured. Gradients do not fit into a cache, so neither should the larger tensor.
"""

REPEATS: Final = 5
"""How often each is measured; the fastest counts, since everything else is disturbance."""


def probe(
    rank: int,
    world_size: int,
    *,
    select_s_per_element: float,
    device: torch.device,
    repeats: int = REPEATS,
) -> Collective[NetworkCosts]:
    """The network as the slowest rank sees it; the same on every rank. About 35 MiB each way at the
    default.

    Args:
        rank: this rank.
        world_size: number of ranks.
        select_s_per_element: this rank's own cost of selection, to be agreed on with the rest.
        device: of the gradients: a dense all-reduce of CUDA tensors goes another way than one of
            CPU tensors.
        repeats: measurements of each kind.
    """
    small_s, large_s = yield from _fastest(
        repeats, [partial(_pass_on, rank, world_size, n) for n in MESSAGE_BYTES]
    )
    messages = fit_cost(small_s, large_s, *MESSAGE_BYTES)
    small_s, large_s = yield from _fastest(
        repeats, [partial(_reduce, n, device) for n in TENSOR_BYTES]
    )
    hops = max(2 * (world_size - 1), 1)
    dense = fit_cost(
        small_s / hops, large_s / hops, *(num_bytes / world_size for num_bytes in TENSOR_BYTES)
    )
    mine = (
        messages.alpha_s,
        messages.beta_s_per_byte,
        dense.alpha_s,
        dense.beta_s_per_byte,
        select_s_per_element,
    )
    reports = yield AllGather(_REPORT.pack(*mine))
    slowest = [
        max(column) for column in zip(*(_REPORT.unpack(report) for report in reports), strict=True)
    ]
    return NetworkCosts(
        messages=LinkCost(alpha_s=slowest[0], beta_s_per_byte=slowest[1]),
        dense=LinkCost(alpha_s=slowest[2], beta_s_per_byte=slowest[3]),
        select_s_per_element=slowest[4],
    )


def _fastest(
    repeats: int, makes: Sequence[Callable[[], Collective[None]]]
) -> Collective[list[float]]:
    """The least seconds that each takes. They take turns, so that a disturbance does not hit all
    repeats of one of them.
    """
    durations_s: list[list[float]] = [[] for _ in makes]
    for _ in range(repeats):
        for make, durations in zip(makes, durations_s, strict=True):
            begin_s = yield Now()
            yield from make()
            durations.append((yield Now()) - begin_s)
    return [min(durations) for durations in durations_s]


def _pass_on(rank: int, world_size: int, num_bytes: int) -> Collective[None]:
    if world_size > 1:
        yield Send((rank + 1) % world_size, bytes(num_bytes))
        yield Recv((rank - 1) % world_size)


def _reduce(num_bytes: int, device: torch.device) -> Collective[None]:
    total = yield AllReduceTensor(torch.zeros(num_bytes // 4, device=device))
    float(total[0])  # on a GPU the sum is over only when the host can read it


def fit_cost(small_s: float, large_s: float, small_bytes: float, large_bytes: float) -> LinkCost:
    """The line through both points.

    If the measurement of the small one was disturbed, the line would be flat, and any number of
    bytes would seem to cost nothing: so at least half of the large one's time is put down to its
    bytes.

    Args:
        small_s: seconds that `small_bytes` took, > 0.
        large_s: seconds that `large_bytes` took, > 0.
        small_bytes: >= 0.
        large_bytes: more than `small_bytes`.
    """
    beta = max((large_s - small_s) / (large_bytes - small_bytes), large_s / large_bytes / 2)
    return LinkCost(alpha_s=max(small_s - small_bytes * beta, 0.0), beta_s_per_byte=beta)
