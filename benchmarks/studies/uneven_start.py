"""How should AdaptiveSGD begin: with merges of models after each update or two, or with steps by
the mean of all ranks' gradients?

Task `xmc` on four workers with a gap of 32% between the fastest and the slowest, batches of 32,
mega-batches of 50. Training is real; the clock is virtual: a batch takes 50 ms on the fastest
worker, each worker has a link of 1 Gbit/s, a claim takes 1 ms, and nothing else takes time. So
figures do not depend on what else the machine does.

    AllReduce             equal batches, gradients averaged in each step
    models merged first   AdaptiveSGD whose warm-up merges models, as rule="published" does
    AdaptiveSGD           as it comes

The targets are 95% and 98% of what AllReduce reaches in the end, mean over seeds.

    python benchmarks/studies/uneven_start.py [--json] [--quick] [--seeds N] [--epochs N]
        [--mega-batch N] [--train FILE --test FILE] [--results DIR]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from torch.distributed import HashStore
from torch.utils.data import DataLoader
from typing_extensions import override

import _benchmarks  # noqa: F401
import offbeat
from _measure import Ratio, Row, add_output_options, present
from _results import Figure
from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context, Notices, stream_counter
from offbeat.megabatch.callback import MegaBatchCallback, MegaBatchPlan
from offbeat.megabatch.claims import ClaimLog
from offbeat.megabatch.fetching import ReadAhead
from offbeat.megabatch.loader import DispatchLoader
from offbeat.membership.agreement import Generation
from offbeat.membership.generations import GenerationHost
from offbeat.session.loaders import LockstepLoader
from offbeat.simulation.virtual import VirtualCluster, VirtualLink
from offbeat.simulation.virtual_driver import VirtualThread
from offbeat.strategies.base import Strategy
from offbeat.transport.driver import Driver
from offbeat.transport.operations import Collective, Sleep
from offbeat_lab.tasks import Task, build_task

SPEEDS = (1.0, 0.92, 0.84, 0.76)
BATCH, STEP_S, CLAIM_S = 32, 0.05, 0.001
LINK = VirtualLink(latency_s=1e-4, bytes_per_s=1e9 / 8)
TARGETS = (0.95, 0.98)
EVALUATED_EVERY = 4  # updates of the first worker
Curve = Sequence[tuple[float, float]]
"""Seconds and the metric of the mean of all workers' models."""


class _ModelsMergedPlan(MegaBatchPlan):
    @override
    def averages_gradients(self, samples_before: int, num_ranks: int, base: int) -> bool:
        return False


@dataclass(frozen=True, kw_only=True)
class _ModelsMerged(offbeat.AdaptiveSGD):
    """Whose warm-up merges models after each update, and after two, in the place of gradients."""

    @override
    def plan(self) -> MegaBatchPlan:
        plan = super().plan()
        return _ModelsMergedPlan(**{each.name: getattr(plan, each.name) for each in fields(plan)})


def strategies(mega_batch: int) -> Mapping[str, Strategy]:
    return {
        "AllReduce": offbeat.AllReduce(),
        "models merged first": _ModelsMerged(mega_batch=mega_batch),
        "AdaptiveSGD": offbeat.AdaptiveSGD(mega_batch=mega_batch),
    }


def sleeping(seconds: float) -> Collective[None]:
    yield Sleep(seconds)


class Store:
    """The run's store, of which each answer takes its time."""

    def __init__(self, store: HashStore, driver: Driver) -> None:
        self._store, self._driver = store, driver

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def answer(*asked: Any) -> Any:
            self._driver.run(sleeping(CLAIM_S), 0)
            return getattr(self._store, name)(*asked)

        return answer


class Worker:
    """One worker of a run.

    Args:
        strategy: that all train with.
        task: what they train.
        driver: of this one.
        store: that all share.
        seed: of the model and the order of samples.
        stepped: is called after each of its steps.
    """

    def __init__(
        self,
        strategy: Strategy,
        task: Task,
        driver: VirtualThread,
        store: HashStore,
        *,
        seed: int,
        stepped: Callable[[int], None],
    ) -> None:
        self.model = task.build_model(seed)
        self.work = partial(self._work, strategy, store, seed)
        self._task, self._driver, self._stepped = task, driver, stepped
        self._optimizer = task.optimizer(self.model)
        self._parameters = dict(self.model.named_parameters())
        self._num_samples, self._num_steps = 0, 0

    @torch.no_grad()
    def _work(self, strategy: Strategy, store: HashStore, seed: int, epochs: int) -> None:
        rank, world_size = self._driver.rank, self._driver.world_size

        def enter(host: GenerationHost) -> None:
            host.begin(Generation.of_founders(world_size), rank, self._driver)

        callbacks = list(
            strategy.build(
                Context(
                    parameters=self._parameters,
                    driver=self._driver,
                    new_stream=stream_counter(),
                    notices=Notices(rank=rank),
                    optimizer=self._optimizer,
                    model=self.model,
                    buffers=lambda: dict(self.model.named_buffers()),
                    enter=enter,
                    own_store=lambda: store,
                )
            )
        )
        loader = self._loader(callbacks, store, seed)
        callbacks.append(loader)
        while loader.epoch < epochs:
            for batch in loader:
                self._step(callbacks, batch)

    def _loader(
        self, callbacks: Sequence[Callback], store: HashStore, seed: int
    ) -> DispatchLoader | LockstepLoader:
        def batch_of(samples: list[int]) -> Any:
            self._num_samples = len(samples)
            return self._task.batch(np.array(samples, dtype=np.int64))

        driver = self._driver
        numbers = cast(Any, range(self._task.num_samples))
        fetcher = ReadAhead(
            DataLoader(numbers, collate_fn=batch_of),
            num_processes=0,
            batches_each=1,
            seed=seed,
            rank=driver.rank,
        )
        policy = next((each for each in callbacks if isinstance(each, MegaBatchCallback)), None)
        if policy is None:
            sizes = [BATCH] * driver.world_size

            def claimed(num_samples: int) -> None:
                for callback in callbacks:
                    callback.on_batch_claimed(num_samples)

            return LockstepLoader(
                fetcher, batch_sizes=sizes, claimed=claimed, seed=seed, rank=driver.rank
            )
        policy.feed(BATCH, dict.fromkeys(range(driver.world_size)))
        return DispatchLoader(
            fetcher,
            log=ClaimLog(Store(store, driver)),  # type: ignore[arg-type]  # as one of torch
            policy=policy,
            seed=seed,
            rank=driver.rank,
            notify=lambda _: None,
            clock=lambda: driver.now_s(0),
        )

    def _step(self, callbacks: Sequence[Callback], batch: Any) -> None:
        for callback in callbacks:
            callback.on_forward_begins(trains=True)
        with torch.enable_grad():
            loss = self._task.loss(self.model, batch)
            for callback in callbacks:
                callback.on_backward_begins(synchronised=True)
            loss.backward()
        seconds = STEP_S * self._num_samples / BATCH / SPEEDS[self._driver.rank]
        self._driver.run(sleeping(seconds), 0)
        for index in range(len(self._parameters)):
            for callback in callbacks:
                callback.on_gradient_ready(index, synchronised=True)
        for callback in callbacks:
            callback.on_backward_done(synchronised=True)
        for callback in callbacks:
            callback.on_before_step()
        for callback in callbacks:
            callback.on_before_update()
        self._optimizer.step()
        for callback in callbacks:
            callback.on_after_step()
        self._optimizer.zero_grad()
        self._num_steps += 1
        self._stepped(self._num_steps)


def train(strategy: Strategy, task: Task, *, seed: int, epochs: int) -> Curve:
    """One run."""
    cluster = VirtualCluster(len(SPEEDS), seed=seed, link=LINK)
    store, mean = HashStore(), task.build_model(seed)
    curve: list[tuple[float, float]] = [(0.0, task.evaluate(mean))]
    workers: list[Worker] = []

    @torch.no_grad()
    def measure() -> None:
        for into, *values in zip(
            mean.parameters(), *(worker.model.parameters() for worker in workers), strict=True
        ):
            into.copy_(torch.stack(values).mean(0))
        curve.append((cluster.now_s, task.evaluate(mean)))

    def stepped(rank: int, num_steps: int) -> None:
        if rank == 0 and num_steps % EVALUATED_EVERY == 0:
            measure()

    threads = [VirtualThread(driver) for driver in cluster.drivers]
    workers += [
        Worker(strategy, task, thread, store, seed=seed, stepped=partial(stepped, thread.rank))
        for thread in threads
    ]
    cluster.run(
        [
            thread.carry(partial(worker.work, epochs))
            for thread, worker in zip(threads, workers, strict=True)
        ]
    )
    measure()
    return curve


def time_to(curve: Curve, target: float) -> float:
    """Seconds, on a straight line between measurements; infinity if it never gets there."""
    for (before_s, before), (after_s, after) in pairwise(curve):
        if after >= target:
            return before_s + (after_s - before_s) * max(0.0, (target - before) / (after - before))
    return float("inf")


def cases(
    name: str, paths: Mapping[str, str], seeds: Sequence[int], epochs: int, mega_batch: int
) -> Iterator[Row]:
    task = build_task("xmc", {**paths, "batch_size": BATCH})
    curves: dict[str, list[Curve]] = {}
    for label, strategy in strategies(mega_batch).items():
        curves[label] = []
        for seed in seeds:
            curves[label].append(train(strategy, task, seed=seed, epochs=epochs))
            print(f"{label}, seed {seed}: {curves[label][-1][-1]}", file=sys.stderr, flush=True)
    final = float(np.mean([curve[-1][1] for curve in curves["AllReduce"]]))
    for label, those in curves.items():
        cell = partial(Figure, table=name, case=label)
        yield cell(
            column="best precision", value=tuple(max(m for _, m in c) for c in those), decimals=4
        )
        for share in TARGETS:
            reached = [time_to(curve, share * final) for curve in those]
            known = tuple(s if np.isfinite(s) else None for s in reached)
            yield cell(column=f"seconds to {share:.0%}", value=known, decimals=2)
            if label == "AdaptiveSGD":
                theirs = [time_to(curve, share * final) for curve in curves["AllReduce"]]
                ratios = [mine / other for mine, other in zip(reached, theirs, strict=True)]
                low, high = min(ratios), max(ratios)
                yield Ratio(
                    case=f"{name}: seconds to {share:.0%}, over AllReduce's",
                    value=float(np.median(ratios)),
                    unit="x",
                    goal="at most 1",
                    holds="undecided" if low < 1 < high else high <= 1,
                    bound=float(np.mean(SPEEDS) ** -1 * min(SPEEDS)),
                    interval=(low, high),
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_output_options(parser)
    parser.add_argument(
        "--quick", action="store_true", help="one seed, one pass: only to see that it runs"
    )
    parser.add_argument("--seeds", type=int, default=3, help="how many; default: %(default)s")
    parser.add_argument("--epochs", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--mega-batch", type=int, default=50, help="default: %(default)s")
    parser.add_argument(
        "--train",
        help="data in the Extreme Classification Repository's format; default: the bundled task",
    )
    parser.add_argument("--test", help="data held out; needed with --train")
    given = parser.parse_args()
    torch.set_num_threads(1)
    paths = {} if given.train is None else {"path": given.train, "test_path": given.test}
    name = "bundled data" if given.train is None else "Delicious"
    seeds, epochs = (1, 1) if given.quick else (given.seeds, given.epochs)
    which = partial(cases, name, paths, range(seeds), epochs, given.mega_batch)
    present({name: which}, given, seeds=seeds)
