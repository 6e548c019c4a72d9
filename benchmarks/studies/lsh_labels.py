"""Which labels a loss should look at, where it does not look at all of them: drawn ones, or those
that a hash table finds (SLIDE: Chen, Medini, Farwell, Gobriel, Tai and Shrivastava, arXiv
1903.03129).

In SLIDE the labels' weight vectors lie in L hash tables, made anew every few steps. A hidden vector
is hashed likewise, and softmax runs over the labels that share a bucket with it, besides the right
ones. Hashes are signs of random projections (SimHash) or the places of the largest of a few inputs
(WTA). Here the labels found for any row of a batch serve all of its rows, at most so many as are
drawn otherwise, those that were found most often first.

One thread, and the processor time of training alone, the tables' included: precision of the first
label after equally many seconds. With three seeds; the learning rate is that of each method's best
run with seed 0.

    labels from hash tables are worth an option if they are ahead of as many drawn ones

    python benchmarks/studies/lsh_labels.py [--json] [--results DIR]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np
import torch

import _benchmarks  # noqa: F401
from _measure import Ratio, Row, main
from _results import Figure
from offbeat.xmc.label_loss import Candidates, SparseClassifier, draw_candidates
from offbeat.xmc.metrics import RankingMetrics
from offbeat.xmc.row_optimizers import RowAdagrad
from offbeat.xmc.rows import Examples, SparseBatch
from offbeat_lab.sparse_data import Synthetic
from offbeat_lab.statistics import estimate
from offbeat_lab.tasks.xmc import load_standard_library

SEEDS = range(3)
NUM_HIDDEN = 128
TABLES, BITS, WTA_INPUTS, REBUILD_EVERY = 16, 8, 4, 50
"""L and the bits of a bucket's number; a WTA hash of 4 inputs has 2 of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One task: how long it trains, and how many labels are drawn or found for a batch."""

    name: str
    load: Callable[[], tuple[Examples, Examples]]
    seconds: float
    batch_size: int
    lrs: tuple[float, ...]
    numbers: tuple[int, ...]


def generated() -> tuple[Examples, Examples]:
    like = Synthetic(num_features=20_000, num_labels=50_000)
    return like.load(20_000), like.load(2_000, split="test")


def bundled() -> tuple[Examples, Examples]:
    calls = load_standard_library()
    return calls.train, calls.test


CASES = (
    Case(
        name="bundled",
        load=bundled,
        seconds=1.5,
        batch_size=64,
        lrs=(0.1, 0.05, 0.025),
        numbers=(64, 256),
    ),
    Case(
        name="generated, 50,000 labels",
        load=generated,
        seconds=6.0,
        batch_size=256,
        lrs=(0.1, 0.05),
        numbers=(1_000, 5_000),
    ),
)


class HashTables:
    """Buckets of labels by the hashes of their weight vectors.

    Args:
        num_inputs: of a weight vector.
        kind: "SimHash" or "WTA".
        generator: draws the hash functions.
    """

    def __init__(self, num_inputs: int, kind: str, generator: torch.Generator) -> None:
        self._kind = kind
        if kind == "SimHash":
            self._functions = torch.randn(num_inputs, TABLES * BITS, generator=generator)
        else:
            places = torch.rand(TABLES * BITS // 2, num_inputs, generator=generator)
            self._functions = places.topk(WTA_INPUTS).indices
        self._sorted = self._order = torch.empty(0)

    def rebuild(self, weight: torch.Tensor) -> None:
        """Fill the tables with labels, of which `weight` has a row each."""
        self._sorted, self._order = self._hashes(weight).sort(dim=1)

    def find(self, hidden: torch.Tensor, at_most: int) -> torch.Tensor:
        """The labels that are most often in a bucket with a row of `hidden`."""
        hashes = self._hashes(hidden)
        first = torch.searchsorted(self._sorted, hashes).flatten()
        sizes = torch.searchsorted(self._sorted, hashes, right=True).flatten() - first
        num_labels = self._order.shape[1]
        table = torch.arange(TABLES).repeat_interleave(hidden.shape[0])
        begins = (first + table * num_labels).repeat_interleave(sizes)
        within = torch.arange(begins.numel()) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        found = self._order.flatten()[begins + within]
        hits = torch.bincount(found, minlength=num_labels)
        often, labels = hits.topk(min(at_most, num_labels))
        return labels[often > 0]

    def _hashes(self, vectors: torch.Tensor) -> torch.Tensor:
        """The number of each vector's bucket, by table: shape (tables, vectors)."""
        if self._kind == "SimHash":
            digits, base = (vectors @ self._functions > 0).long(), 2
        else:
            digits, base = vectors[:, self._functions].argmax(dim=2), WTA_INPUTS
        digits = digits.view(len(vectors), TABLES, -1)
        powers = base ** torch.arange(digits.shape[2])
        return (digits * powers).sum(dim=2).T.contiguous()


class Method:
    """Chooses the labels that the loss of a batch looks at. `number`: None for all of them."""

    def __init__(self, kind: str, number: int | None) -> None:
        self.kind = kind
        self.number = number

    @property
    def name(self) -> str:
        return self.kind if self.number is None else f"{self.kind}, {self.number:,}"

    def begin(self, model: SparseClassifier, generator: torch.Generator) -> None:
        self._model, self._generator, self._steps = model, generator, count()
        if self.kind in ("SimHash", "WTA"):
            self._tables = HashTables(NUM_HIDDEN, self.kind, generator)

    @torch.no_grad()
    def candidates(self, hidden: torch.Tensor, labels: SparseBatch) -> Candidates | None:
        if self.number is None:
            return None
        layer = self._model.labels
        if self.kind == "drawn":
            return draw_candidates(
                labels,
                num_labels=layer.num_labels,
                num_drawn=self.number,
                generator=self._generator,
            )
        if next(self._steps) % REBUILD_EVERY == 0:
            self._tables.rebuild(layer.weight)
        found = self._tables.find(hidden, self.number)
        chosen = torch.cat([labels.columns.long(), found]).unique()
        return Candidates(labels=chosen, log_counts=torch.zeros(chosen.numel()))


def methods(case: Case) -> Iterator[Method]:
    yield Method("all labels", None)
    for number in case.numbers:
        for kind in ("drawn", "SimHash", "WTA"):
            yield Method(kind, number)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What came of a run: P@1, the milliseconds of a step, the labels looked at in one."""

    precision: float
    step_ms: float
    num_looked_at: float


def train(
    case: Case, data: tuple[Examples, Examples], method: Method, lr: float, seed: int
) -> Trained:
    samples, held_out = data
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = SparseClassifier(
        samples.features.num_columns, samples.labels.num_columns, num_hidden=NUM_HIDDEN
    )
    optimizer = RowAdagrad(model.parameters(), lr)
    method.begin(model, generator)
    spent_s, steps, looked_at = 0.0, 0, 0
    for batch in batches(samples, case.batch_size, seed):
        begin_s = time.thread_time()
        features, labels = batch.features.to_batch(), batch.labels.to_batch()
        hidden = torch.relu(model.hidden(features))
        candidates = method.candidates(hidden, labels)
        model.labels(hidden, labels, candidates).backward()
        optimizer.step()
        optimizer.zero_grad()
        spent_s += time.thread_time() - begin_s
        steps += 1
        looked_at += model.labels.num_labels if candidates is None else candidates.labels.numel()
        if spent_s >= case.seconds:
            break
    metrics = RankingMetrics((1,))
    for part in held_out.batches(500):
        metrics.add(model.top_labels(part.features.to_batch(), 1).numpy(), part.labels)
    return Trained(
        precision=metrics.result()["P@1"],
        step_ms=1e3 * spent_s / steps,
        num_looked_at=looked_at / steps,
    )


def batches(samples: Examples, batch_size: int, seed: int) -> Iterator[Examples]:
    for epoch in count():
        order = np.random.default_rng((seed, epoch)).permutation(len(samples))
        for first in range(0, len(samples) - batch_size + 1, batch_size):
            yield samples.take(order[first : first + batch_size])


def measure(case: Case) -> Iterator[Row]:
    torch.set_num_threads(1)
    data = case.load()
    found: dict[str, Sequence[float]] = {}
    for method in methods(case):
        tried = {lr: train(case, data, method, lr, SEEDS[0]) for lr in case.lrs}
        lr = max(tried, key=lambda each: tried[each].precision)
        runs = [tried[lr], *(train(case, data, method, lr, seed) for seed in SEEDS[1:])]
        found[method.name] = [run.precision for run in runs]
        cell = partial(Figure, table=case.name, case=method.name)
        yield cell(column="learning rate", value=lr)
        yield cell(column="labels looked at", value=float(np.mean([r.num_looked_at for r in runs])))
        yield cell(column="a step, ms", value=float(np.mean([r.step_ms for r in runs])))
        yield cell(column="P@1 by seed", value=tuple(found[method.name]), decimals=4)
    for number in case.numbers:
        drawn = found[f"drawn, {number:,}"]
        for kind in ("SimHash", "WTA"):
            ahead = estimate(
                [100 * (a - b) for a, b in zip(found[f"{kind}, {number:,}"], drawn, strict=True)],
                signed=True,
            )
            low, high = ahead.low or 0.0, ahead.high or 0.0
            yield Ratio(
                case=f"{case.name}, {number:,} labels, {kind} ahead of drawn",
                value=ahead.median or 0.0,
                unit="points",
                goal="at least 0",
                holds="undecided" if low < 0 < high else low >= 0,
                bound=float("inf"),
                interval=(low, high),
            )


if __name__ == "__main__":
    main({case.name: partial(measure, case) for case in CASES})
