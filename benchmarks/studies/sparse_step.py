"""A training step of the sparse input layer against one of `torch.nn.EmbeddingBag` whose gradient
is dense.

135,909 features, 128 outputs, batches of 1,024 rows as in Amazon-670k (generated), one thread, CPU
time: forward, backward, the optimizer's step. EmbeddingBag computes the same output. Its gradient
has a row for each feature, and torch's optimizers go through all of them; SparseLinear's has the
rows of the batch, and the optimizers of rows look at these alone.

No step is shorter than its forward pass, which both share: that is the bound.

    python benchmarks/studies/sparse_step.py [--json]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import count
from statistics import median

import torch

import _benchmarks  # noqa: F401
from _measure import Ratio, interleave, main, ratio
from offbeat.xmc.row_optimizers import RowAdagrad, RowAdam, RowSGD
from offbeat.xmc.rows import SparseBatch
from offbeat.xmc.sparse_linear import SparseLinear
from offbeat_lab.sparse_data import AMAZON_670K

NUM_OUTPUTS = 128
BATCH_SIZE = 1024
NUM_BATCHES = 4
NUM_ROUNDS = 20
LR = 0.1

MakeOptimizer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, tuple[MakeOptimizer, MakeOptimizer]] = {
    "SGD": (partial(RowSGD, lr=LR), partial(torch.optim.SGD, lr=LR)),
    "SGD with momentum": (
        partial(RowSGD, lr=LR, momentum=0.9),
        partial(torch.optim.SGD, lr=LR, momentum=0.9),
    ),
    "Adagrad": (partial(RowAdagrad, lr=LR), partial(torch.optim.Adagrad, lr=LR)),
    "Adam": (partial(RowAdam, lr=LR), partial(torch.optim.Adam, lr=LR)),
}
"""By name: of rows, and torch's."""


class Bag(torch.nn.Module):
    """The same layer out of torch's parts."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = torch.nn.EmbeddingBag(
            AMAZON_670K.num_features, NUM_OUTPUTS, mode="sum", include_last_offset=True
        )

    def forward(self, batch: SparseBatch) -> torch.Tensor:
        sums: torch.Tensor = self.bag(
            batch.columns, batch.offsets.int(), per_sample_weights=batch.values
        )
        return sums


def cpu_seconds(function: Callable[[], object]) -> float:
    begin_s = time.process_time()
    function()
    return time.process_time() - begin_s


def stepping(
    layer: torch.nn.Module, make: MakeOptimizer, batches: Sequence[SparseBatch]
) -> Callable[[], float]:
    """A function that does one step, with the next batch, and returns how long it took."""
    optimizer, turns, upstream = (
        make(layer.parameters()),
        count(),
        torch.randn(BATCH_SIZE, NUM_OUTPUTS),
    )

    def step() -> None:
        layer(batches[next(turns) % NUM_BATCHES]).backward(upstream)
        optimizer.step()
        optimizer.zero_grad()

    return lambda: cpu_seconds(step)


@cache
def read_batches() -> list[SparseBatch]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    samples = AMAZON_670K.read(BATCH_SIZE * NUM_BATCHES, num_rows=BATCH_SIZE)
    return [chunk.features.to_batch() for chunk in samples]


def cases(name: str) -> Iterator[Ratio]:
    batches, (of_rows, of_torch) = read_batches(), OPTIMIZERS[name]
    layer = SparseLinear(AMAZON_670K.num_features, NUM_OUTPUTS, bias=False)
    seconds = interleave(
        {
            "dense": stepping(Bag(), of_torch, batches),
            "sparse": stepping(layer, of_rows, batches),
            "forward": partial(cpu_seconds, partial(layer, batches[0])),
        },
        num_rounds=NUM_ROUNDS,
    )
    pairs = list(zip(seconds["dense"], seconds["sparse"], strict=True))
    bound = median(seconds["dense"]) / median(seconds["forward"])
    yield ratio(
        f"a step with {name}: EmbeddingBag over SparseLinear", pairs, at_least=3, bound=bound
    )


if __name__ == "__main__":
    main({name: partial(cases, name) for name in OPTIMIZERS})
