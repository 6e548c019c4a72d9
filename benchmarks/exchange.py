"""The whole gTop-k exchange of 25 M elements (residual, selection, collective, scatter) against
gloo's dense all-reduce.

Four workers on loopback, interleaved in the same processes. Goal: at least 3x faster. The bound is
the time in which four workers could stream their residual and gradient through this machine's
memory once (read both, write the sum: 12 bytes an element) and zero the result (4 bytes), were
communication free: the ratio that would be left then.

    python benchmarks/exchange.py [--json]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

import offbeat
from _measure import Ratio, interleave, main, ratio, timed
from _ranks import run_ranks
from offbeat.callbacks.context import Context, Notices, stream_counter
from offbeat.codec.tally import Tally
from offbeat.gradients.exchange import GradientTransform
from offbeat.gradients.reductions import WeightedGradient, wait_for
from offbeat.transport.connect import connect
from offbeat.transport.operations import AllReduceTensor

NUM_ELEMENTS = 25_000_000
WORLD_SIZE = 4
NUM_ROUNDS = 15
GOAL = 3.0
STRATEGIES = (
    offbeat.GTopK(density=0.001, collective="reduce_scatter"),
    offbeat.GTopK(density=0.001, collective="tree"),
    offbeat.GTopK(density=0.001, collective="all_gather"),
)


def measure(rank: int, world_size: int) -> dict[str, list[float]]:
    """Seconds of each exchange by name: the slowest rank's, of every round."""
    driver = connect().driver
    streams = stream_counter()
    context = Context(
        parameters={"weight": torch.nn.Parameter(torch.zeros(NUM_ELEMENTS))},
        driver=driver,
        new_stream=streams,
        notices=Notices(rank),
    )
    noise = torch.randn(NUM_ELEMENTS, generator=torch.Generator().manual_seed(rank))
    control = streams()

    def sparse(strategy: offbeat.GTopK) -> Callable[[], float]:
        ((bucket, reduction),) = strategy.reductions(context, GradientTransform(None)).pairs
        tally = Tally(
            weight=1.0, num_nonfinite=0, num_failed=0, used=torch.ones(1, dtype=torch.bool).numpy()
        )

        def exchange() -> None:
            reduction.launch(WeightedGradient(bucket.flat, tally, 1.0, grad_scale=1.0))
            (of_all,) = wait_for([reduction])
            assert of_all.good
            bucket.flat = reduction.commit()

        def once() -> float:
            bucket.flat.copy_(noise)
            return run(exchange)

        return once

    dense = noise.clone()

    def dense_exchange() -> None:
        driver.start(AllReduceTensor(dense), control.next()).wait()

    def stream() -> None:
        torch.add(noise, dense, out=dense)

    def dense_once() -> float:
        dense.copy_(noise)
        return run(dense_exchange)

    def run(work: Callable[[], None]) -> float:
        dist.barrier()
        seconds = torch.tensor(timed(work))
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return float(seconds)

    measured = {"dense": dense_once, "memory": lambda: run(stream)}
    measured |= {strategy.collective: sparse(strategy) for strategy in STRATEGIES}
    try:
        return interleave(measured, num_rounds=NUM_ROUNDS)
    finally:
        driver.close()


def cases() -> Iterator[Ratio]:
    seconds = run_ranks(measure, WORLD_SIZE)
    dense, memory = seconds["dense"], seconds["memory"]
    bound = sorted(dense)[len(dense) // 2] / (sorted(memory)[len(memory) // 2] * 16 / 12)
    for strategy in STRATEGIES:
        name = strategy.collective
        yield ratio(
            f"dense all-reduce / gTop-k by {name}, 25 M elements, {WORLD_SIZE} workers",
            list(zip(dense, seconds[name], strict=True)),
            at_least=GOAL,
            bound=bound,
        )


if __name__ == "__main__":
    main({f"{WORLD_SIZE} workers": cases})
