"""Tree and reduce-scatter against their own alpha-beta cost, with alpha and beta measured in the
same run.

Two and four workers, k = 25,000 of 25 M elements. On loopback, and behind links of 1 Gbit/s and 100
Mbit/s, 100 us, that a wrapper emulates in user space (the receiver waits until the message is due).
Goal: at most 1.5 times the cost. Alpha and beta are the mean of many messages in a row beside each
collective, as ping-pong benchmarks take it, of the slowest rank. The cost counts messages and bytes
only; merging, coding and encryption come on top of it, which shows where they are not small against
the transfer, and where more workers than cores have to do them one after the other. So the
processor time that the busiest rank spends in the collective itself, without sending and receiving,
is set against the same cost: the goal leaves 0.5 for it.

    python benchmarks/studies/collectives.py [--json]
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from scipy.stats import norm

import _benchmarks  # noqa: F401
from _measure import Ratio, main, ratio, timed
from _ranks import run_ranks
from offbeat.arithmetic.costs import LinkCost, NetworkCosts
from offbeat.callbacks.context import stream_counter
from offbeat.codec.sparse import Sparse
from offbeat.codec.tally import Tally
from offbeat.codec.wire import Wire, pair_bytes
from offbeat.collectives import gtopk_tree, sparse_reduce_scatter
from offbeat.transport.connect import connect
from offbeat.transport.driver import Driver, Stream
from offbeat.transport.operations import Collective, Recv, Send
from offbeat_lab.emulation.delaying import Delaying

T = TypeVar("T")

NUM_ELEMENTS = 25_000_000
K = 25_000
WORLD_SIZES = (2, 4)
NUM_ROUNDS = 30
GOAL = 1.5
MESSAGES = {64: 30, 1 << 18: 8}
"""Bytes of a message: how many in a row. The larger is about what the collectives send."""
LINKS = {
    "loopback": None,
    "1 Gbit/s, 100 us": (100e-6, 1e9 / 8),
    "100 Mbit/s, 100 us": (100e-6, 1e8 / 8),
}
COLLECTIVES = {
    "tree": (gtopk_tree.gtopk_tree, gtopk_tree.cost_s),
    "reduce_scatter": (sparse_reduce_scatter.sparse_reduce_scatter, sparse_reduce_scatter.cost_s),
}


def behind_link(driver: Driver, link: tuple[float, float] | None) -> Driver:
    if link is None:
        return driver
    latency_s, bytes_per_s = link
    return Delaying(driver, LinkCost(alpha_s=latency_s, beta_s_per_byte=1 / bytes_per_s))


def contribution(rank: int) -> Sparse:
    """What a selection hands over: the tail of a normal distribution."""
    draw = np.random.default_rng(rank)
    indices = np.sort(draw.choice(NUM_ELEMENTS, K, replace=False))
    values = norm.isf(draw.uniform(0, K / NUM_ELEMENTS / 2, K)) * draw.choice([-1, 1], K)
    return Sparse(indices=indices, values=values.astype(np.float32), num_elements=NUM_ELEMENTS)


def timing(collective: Collective[T], spent_s: list[float]) -> Collective[T]:
    """The same collective; notes the processor time of each stretch between two operations."""
    outcome = None
    while True:
        begin_s = time.thread_time()
        try:
            operation = collective.send(outcome)
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            spent_s.append(time.thread_time() - begin_s)
        outcome = yield operation


def typical_network(driver: Driver, stream: Stream) -> NetworkCosts:
    """What a message typically costs: everyone sends to the next rank and receives from the one
    before, many times in a row.
    """

    def passing(num_bytes: int, times: int) -> Collective[None]:
        for _ in range(times):
            yield Send((driver.rank + 1) % driver.world_size, bytes(num_bytes))
            yield Recv((driver.rank - 1) % driver.world_size)

    def typical_s(num_bytes: int, times: int) -> float:
        dist.barrier()
        driver.run(passing(num_bytes, 2), stream.next())
        slowest = torch.tensor(
            timed(partial(driver.run, passing(num_bytes, times), stream.next())) / times
        )
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest)

    small_s, large_s = (typical_s(num_bytes, times) for num_bytes, times in MESSAGES.items())
    small, large = MESSAGES
    beta = (large_s - small_s) / (large - small)
    link = LinkCost(alpha_s=small_s - small * beta, beta_s_per_byte=beta)
    return NetworkCosts(messages=link, dense=link, select_s_per_element=0.0)


def measure(
    rank: int, world_size: int, link: tuple[float, float] | None
) -> dict[str, list[tuple[float, float, float]]]:
    """(measured, computing, cost) seconds of each round by collective; the cost from a probe beside
    each measurement.
    """
    driver = behind_link(connect().driver, link)
    stream = stream_counter()()
    wire = Wire(num_elements=NUM_ELEMENTS, num_parameters=1, dtype=np.dtype(np.float32))
    tally = Tally(weight=1.0, num_nonfinite=0, num_failed=0, used=np.ones(1, dtype=np.bool_))
    mine = contribution(rank)
    rounds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in COLLECTIVES}
    for turn in range(NUM_ROUNDS + 2):
        network = typical_network(driver, stream)
        for name, (collective, cost_of) in COLLECTIVES.items():
            spent_s: list[float] = []
            exchange = timing(collective(rank, world_size, mine, tally, K, wire), spent_s)
            dist.barrier()
            whole_s = timed(partial(driver.run, exchange, stream.next()))
            slowest = torch.tensor([whole_s, sum(spent_s)])
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            of_pair = pair_bytes(wire.values, wire.indices, k=K, num_elements=NUM_ELEMENTS)
            cost = cost_of(world_size=world_size, k=K, pair_bytes=of_pair, network=network)
            if turn >= 2:
                rounds[name].append((float(slowest[0]), float(slowest[1]), cost))
    driver.close()
    return rounds


def cases(where: str) -> Iterator[Ratio]:
    for world_size in WORLD_SIZES:
        for name, rounds in run_ranks(measure, world_size, LINKS[where]).items():
            against = f"its alpha-beta cost, {where}, {world_size} workers"
            yield ratio(
                f"{name} / {against}",
                [(whole, cost) for whole, _, cost in rounds],
                at_most=GOAL,
                bound=1.0,
            )
            pairs = [(computing, cost) for _, computing, cost in rounds]
            yield ratio(f"{name}, computing alone / {against}", pairs, at_most=GOAL - 1, bound=0.0)


if __name__ == "__main__":
    main({where: partial(cases, where) for where in LINKS})
