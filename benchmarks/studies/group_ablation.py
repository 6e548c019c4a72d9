"""What rotating groups are worth: WAGMA with other groups, periods and quorums, after equally many
steps.

Eight workers train `images` (SGD, each worker with few of the labels) or `sequences` (AdamW, where
steps last as long as their longest sequence). Gradients, models and WAGMA's callbacks, with values
in float32, are the real ones; time is that of a virtual clock, in one process. So no other work on
the machine makes an average more stale, and a run can be repeated to the bit. A step of `images`
takes 60 ms, and two random workers are 30 ms late in each; where there is one slow worker, its
steps take 15% longer. A step of `sequences` takes 100 ms where its longest sequence has 128 bytes,
and less in proportion. Messages take 0.1 ms and pass at 1 Gbit/s. AllReduce and LocalSGD are
computed beside that, as if they needed no time to communicate.

The metric is that of the mean of the workers' models, each after equally many steps of its own; the
figure is the mean of the last three of 20 measurements. The target is what AllReduce has reached on
average after 60% of the steps.

    the paper's claims: fixed groups, no groups, and too small ones (of two) are worse than WAGMA as
    it comes
    WAGMA at most 0.3 points (`sequences`: 1%) worse than AllReduce

Each run is a cell, so the benchmark may be stopped between them. A table has a row for each of
`--strategies`, so name all of them each time. `images` needs `--images`.

    python benchmarks/studies/group_ablation.py [--json] [--quick] [--images NPZ] [--tasks NAME,...]
        [--strategies SPEC,...] [--seeds N] [--jobs N] [--results DIR]
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from pathlib import Path

import numpy as np
import torch

import _benchmarks  # noqa: F401
from _measure import Cells, Ratio, Row, add_output_options, origin, present
from _results import Figure, ResultFile
from averaging_accuracy import Case, Found, gaps, steps_to_target, target_of
from offbeat.arithmetic.groups import VersionGroup
from offbeat.callbacks.context import Context, Notices, stream_counter
from offbeat.codec.model_wire import Values
from offbeat.errors import ConfigError
from offbeat.membership.agreement import Generation
from offbeat.simulation.virtual import VirtualCluster, VirtualLink
from offbeat.simulation.virtual_driver import VirtualThread
from offbeat.strategies.base import Strategy
from offbeat.strategies.localsgd import LocalSGD
from offbeat.strategies.wagma import WAGMA
from offbeat.transport.operations import Collective, Sleep
from offbeat.weights.model_weights import Staging
from offbeat_lab.cluster import Cluster, Straggling
from offbeat_lab.options import build_strategy, parse_spec
from offbeat_lab.statistics import Estimate
from offbeat_lab.tasks import Batch, Task, build_task

WORKERS = 8
BASELINE, JUDGED = "allreduce", "wagma"
CLAIMED_WORSE = ("wagma:groups=fixed", "wagma:groups=off", "wagma:group_size=2")
STRATEGIES = (
    *(BASELINE, JUDGED, "wagma:groups=off", "wagma:groups=fixed", "wagma:group_size=2"),
    *("wagma:group_size=8", "wagma:period=5", "wagma:period=40", "wagma:quorum=1"),
    "localsgd:period=10:warmup=0:optimizer_state=local",
)
"""WAGMA as it comes has groups of four."""
LINK = VirtualLink(latency_s=1e-4, bytes_per_s=125e6)
LONGEST = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Ablation(Case):
    """A case with a name of its own. `slowest`: by which the last worker's steps are longer."""

    name: str
    slowest: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Of one run. `metrics`: before the first step and after every `Case.every`. `seconds`: of the
    virtual clock, mean over workers.
    """

    metrics: tuple[float, ...]
    seconds: float


def cases_of(images: Path | None) -> Iterator[Ablation]:
    if images is not None:
        settings: tuple[str, ...] = (
            *(f"path={images}", "width=16", "shrink=2", "skew=0.3"),
            *("lr=0.025", "momentum=0.9", "lr_schedule=linear", "lr_warmup=0.0625"),
        )
        one = Ablation(name="images", task="images", settings=settings, steps=400, step_s=0.06)
        yield one
        yield replace(one, name="images with one slow worker", slowest=1.15)
    settings = (
        *(f"longest={LONGEST}", "optimizer=adamw", "lr=0.003"),
        *("lr_warmup=0.0625", "lr_schedule=cosine"),
    )
    yield Ablation(
        name="sequences",
        task="sequences",
        settings=settings,
        steps=300,
        batch_size=4,
        step_s=0.1,
        higher_is_better=False,
        goal=1.0,
        unit="%",
    )


class FixedGroups(WAGMA):
    """WAGMA with the same groups in every version."""

    def group_of(self, version: int, position: int, num_members: int) -> VersionGroup:
        in_a_period = self.period // self.interval
        is_global = (version + 1) % in_a_period == 0
        return super().group_of(version if is_global else 0, position, num_members)


ABLATED: dict[str, Strategy] = {
    "wagma:groups=fixed": FixedGroups(),
    "wagma:groups=off": WAGMA(interval=WAGMA.period),
}
"""What `offbeat.WAGMA` itself has no option for, by the name in the tables."""


class Rank:
    """One worker: its model and optimizer."""

    def __init__(self, case: Ablation, task: Task, rank: int, seed: int) -> None:
        self.rank = rank
        self.model = task.build_model(seed)
        self.kept: list[Values] = []
        self.ends_s: list[float] = []
        statistics = [each for each in self.model.buffers() if each.is_floating_point()]
        self._tensors = [*self.model.parameters(), *statistics]
        self._staging = Staging(self._tensors)
        self._case, self._task = case, task
        self._optimizer = task.optimizer(self.model)
        self._batches = islice(_batches(task, rank, seed), case.steps)
        self._late = Cluster(
            workers=WORKERS,
            straggling=(Straggling(workers=2, delay_s=(case.step_s or 0.0) / 2),),
            seed=seed,
        )
        self._next = next(self._batches)

    def duration_s(self, step: int) -> float:
        """Of the step after `step` others."""
        assert self._case.step_s is not None
        if self._case.task == "sequences":
            inputs, _ = self._next
            assert isinstance(inputs, torch.Tensor)
            usual_s = self._case.step_s * inputs.shape[1] / LONGEST
        else:
            usual_s = self._case.step_s + self._late.delayed_ranks(step + 1).get(self.rank, 0.0)
        return usual_s * (self._case.slowest if self.rank == WORKERS - 1 else 1.0)

    def backward(self) -> None:
        self._task.loss(self.model, self._next).backward()
        self._next = next(self._batches, self._next)

    def update(self, step: int, *, behind: int = 0) -> None:
        # As `offbeat train` does it.
        place = min(step + behind, self._case.steps - 1)
        for group in self._optimizer.param_groups:
            group["lr"] = self._task.lr_at((place + 0.5) / self._case.steps)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def read(self) -> Values:
        return self._staging.read(self._tensors)

    def write(self, values: Values) -> None:
        self._staging.write_(values, self._tensors)

    def gradients(self) -> list[torch.Tensor]:
        return [each.grad for each in self.model.parameters() if each.grad is not None]

    def keep(self, step: int) -> None:
        if step % self._case.every == 0:
            self.kept.append(self.read().copy())


def _batches(task: Task, rank: int, seed: int) -> Iterator[Batch]:
    for epoch in count():
        yield from task.batches(seed=seed, epoch=epoch, rank=rank, world_size=WORKERS)


class VirtualTraining:
    """WAGMA's own callbacks on the virtual clock."""

    def __init__(self, case: Ablation, strategy: WAGMA, ranks: Sequence[Rank], seed: int) -> None:
        self._case = case
        self._strategy = replace(strategy, values="float32")
        self._ranks = ranks
        self._cluster = VirtualCluster(WORKERS, seed=seed, link=LINK)

    def run(self) -> None:
        threads = [VirtualThread(driver) for driver in self._cluster.drivers]
        self._cluster.run(
            [
                thread.carry(partial(self._train, rank, thread))
                for rank, thread in zip(self._ranks, threads, strict=True)
            ]
        )

    def _train(self, rank: Rank, thread: VirtualThread) -> None:
        average, _ = self._strategy.build(
            Context(
                parameters=dict(rank.model.named_parameters()),
                buffers=lambda: dict(rank.model.named_buffers()),
                driver=thread,
                new_stream=stream_counter(),
                notices=Notices(rank.rank),
                enter=lambda host: host.begin(Generation.of_founders(WORKERS), rank.rank, thread),
            )
        )
        rank.keep(0)
        for step in range(self._case.steps):
            average.on_backward_begins(synchronised=True)
            thread.run(_sleep(rank.duration_s(step)), 0)
            rank.backward()
            average.on_before_update()
            rank.update(step, behind=average.steps_behind())
            average.on_after_step()
            rank.ends_s.append(thread.now_s(0))
            rank.keep(step + 1)
        average.on_finish()
        average.close()


def _sleep(seconds: float) -> Collective[None]:
    yield Sleep(seconds)


def in_step(case: Ablation, ranks: Sequence[Rank], *, period: int | None) -> None:
    """AllReduce, where `period` is None; else LocalSGD. Communication takes no time."""
    clocks_s = np.zeros(WORKERS)
    for rank in ranks:
        rank.keep(0)
    for step in range(case.steps):
        clocks_s += [rank.duration_s(step) for rank in ranks]
        for rank in ranks:
            rank.backward()
        if period is None:
            for gradients in zip(*(rank.gradients() for rank in ranks), strict=True):
                mean = torch.stack(gradients).mean(dim=0)
                for gradient in gradients:
                    gradient.copy_(mean)
        for rank in ranks:
            rank.update(step)
        if (step + 1) % (period or 1) == 0:
            clocks_s[:] = clocks_s.max()
            if period is not None:
                values = np.stack([rank.read() for rank in ranks]).mean(axis=0, dtype=np.float32)
                for rank in ranks:
                    rank.write(values)
        for rank, clock_s in zip(ranks, clocks_s, strict=True):
            rank.ends_s.append(float(clock_s))
            rank.keep(step + 1)


def strategy_of(spec: str) -> Strategy:
    """The strategy of `spec`.

    Raises:
        ConfigError: a run here would leave out what an option asks for.
    """
    strategy = ABLATED[spec] if spec in ABLATED else build_strategy(*parse_spec(spec))
    if isinstance(strategy, WAGMA):
        left_out = {
            "values=bfloat16": strategy.values == "bfloat16",
        }
    elif isinstance(strategy, LocalSGD):
        left_out = {
            "warmup": strategy.steps_of_growth > 0,
            "optimizer_state=averaged": bool(strategy.averages_state),
            "start_step": strategy.start_step > 0,
            "outer": strategy.outer is not None,
        }
    else:
        left_out = {strategy.name: strategy.name != BASELINE}
    if any(left_out.values()):
        asked = ", ".join(option for option, is_asked in left_out.items() if is_asked)
        raise ConfigError(
            f"{spec} asks for what runs on the virtual clock leave out: {asked}; use allreduce,"
            " wagma without that, or localsgd:warmup=0:optimizer_state=local"
        )
    return strategy


def run(case: Ablation, spec: str, seed: int) -> Outcome:
    """Train with one strategy and one seed."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    task = build_task(
        case.task,
        dict(each.split("=", 1) for each in (f"batch_size={case.batch_size}", *case.settings)),
    )
    strategy = strategy_of(spec)
    ranks = [Rank(case, task, rank, seed) for rank in range(WORKERS)]
    if isinstance(strategy, WAGMA):
        VirtualTraining(case, strategy, ranks, seed).run()
    else:
        period = strategy.period if isinstance(strategy, LocalSGD) else None
        assert period is None or isinstance(period, int)
        in_step(case, ranks, period=period)
    model = ranks[0]
    metrics = []
    for models in zip(*(rank.kept for rank in ranks), strict=True):
        model.write(np.mean(models, axis=0, dtype=np.float32))
        model.model.eval()
        metrics.append(float(task.evaluate(model.model)))
    seconds = float(np.mean([rank.ends_s[-1] for rank in ranks]))
    return Outcome(metrics=tuple(metrics), seconds=seconds)


@dataclass(kw_only=True)
class Table:
    """The runs of one task, in a cell for each strategy and seed, and their table."""

    case: Ablation
    specs: Sequence[str]
    seeds: Sequence[int]
    kept: ResultFile | None
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def name(self, spec: str, seed: int) -> str:
        return f"{self.case.name}, {spec}, seed {seed}"

    def cells(self, pool: ProcessPoolExecutor, *, again: bool) -> Cells:
        """Begin those runs that are missing."""
        names = {self.name(spec, seed): (spec, seed) for seed in self.seeds for spec in self.specs}
        known = set() if self.kept is None or again else self.kept.cells
        started = {
            name: pool.submit(run, self.case, *of)
            for name, of in names.items()
            if name not in known
        }
        title = self.case.name
        if self.kept is not None and title in known:
            told = {each.figure.case for each in self.kept.results if each.figure.table == title}
            if started or told != set(self.specs):
                self.kept.replace(title, [], origin(None))  # of other runs
        runs = {
            name: partial(self._run, *names[name], started[name]) if name in started else tuple
            for name in names
        }
        return {**runs, title: self._table}

    def _run(self, spec: str, seed: int, begun: Future[Outcome]) -> Iterable[Row]:
        case, name = self.case, self.name(spec, seed)
        one = self.outcomes[name] = begun.result()
        print(f"{name}: {one.metrics[-1]:.4f} after {one.seconds:.1f} s", file=sys.stderr)
        cell = partial(Figure, table=f"{case.name}, all runs", case=f"{spec}, seed {seed}")
        return [
            cell(column="s", value=one.seconds, decimals=1),
            cell(column=f"every {case.every} steps", value=one.metrics, decimals=3),
        ]

    def _known(self, name: str) -> Outcome:
        if name in self.outcomes or self.kept is None:
            return self.outcomes[name]
        seconds, metrics = (each.figure.value for each in self.kept.results if each.cell == name)
        assert isinstance(seconds, float)
        assert isinstance(metrics, tuple)
        return Outcome(metrics=tuple(one for one in metrics if one is not None), seconds=seconds)

    def _table(self) -> Iterator[Row]:
        case, seeds = self.case, self.seeds
        runs = {spec: [self._known(self.name(spec, seed)) for seed in seeds] for spec in self.specs}
        found = {spec: Found() for spec in self.specs}
        for spec, those in runs.items():
            for seed, one in zip(seeds, those, strict=True):
                found[spec].curves[seed] = case.curve(one.metrics)
        target = target_of(case, found[BASELINE])
        print(f"{case.name}, {case.steps} steps, target {target:.4f}", file=sys.stderr)
        for spec, curves in found.items():
            cell = partial(Figure, table=case.name, case=spec)
            metrics = [metric for seed in seeds if (metric := curves.metric(seed)) is not None]
            yield cell(column="metric", value=float(np.mean(metrics)), decimals=4)
            for other in (BASELINE, JUDGED):
                if other in found and other != spec:
                    gap = gaps(case, curves, found[other], seeds)
                    low, high = _ends(gap)
                    yield cell(
                        column=f"worse than {other}, {case.unit}",
                        value=_mean(gap),
                        interval=(low, high) if low < high else None,
                        decimals=2,
                    )
            steps = steps_to_target(case, curves, target, seeds)
            step_s = float(np.mean([each.seconds for each in runs[spec]])) / case.steps
            yield cell(column="step, ms", value=1e3 * step_s, decimals=1)
            reached = steps.median
            yield cell(column="steps to the target", value=reached, decimals=0)
            yield cell(
                column="s to the target",
                value=None if reached is None else reached * step_s,
                decimals=1,
            )
            yield cell(column="seeds that missed the target", value=float(steps.values.count(None)))
        yield from self._claims(found)

    def _claims(self, found: dict[str, Found]) -> Iterator[Ratio]:
        case = self.case
        if JUDGED not in found:
            return
        gap = gaps(case, found[JUDGED], found[BASELINE], self.seeds)
        low, high = _ends(gap)
        name = f"{case.name}, {JUDGED} worse than {BASELINE}"
        holds = "undecided" if low <= case.goal < high else high <= case.goal
        yield _ratio(case, name, gap, f"at most {case.goal:g}", holds=holds)
        for spec in CLAIMED_WORSE:
            if spec in found:
                gap = gaps(case, found[spec], found[JUDGED], self.seeds)
                low, high = _ends(gap)
                name = f"{case.name}, {spec} worse than {JUDGED}"
                yield _ratio(
                    case, name, gap, "above 0", holds="undecided" if low <= 0 < high else low > 0
                )


def _ratio(case: Ablation, name: str, gap: Estimate, goal: str, *, holds: bool | str) -> Ratio:
    return Ratio(
        case=name,
        value=_mean(gap),
        unit=case.unit,
        goal=goal,
        holds=holds if isinstance(holds, bool) else "undecided",
        bound=float("inf"),
        interval=_ends(gap),
    )


def _mean(found: Estimate) -> float:
    return float(np.mean([value for value in found.values if value is not None]))


def _ends(found: Estimate) -> tuple[float, float]:
    mean = _mean(found)
    return (mean, mean) if found.low is None or found.high is None else (found.low, found.high)


def main() -> None:
    parser = argparse.ArgumentParser()
    add_output_options(parser)
    parser.add_argument(
        "--quick", action="store_true", help="one seed, 40 steps: only to see that it runs"
    )
    parser.add_argument("--images", type=Path, help="npz file of photographs")
    parser.add_argument("--tasks", help="only these, such as images,sequences")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="how many; default: %(default)s")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; default: %(default)s")
    asked = parser.parse_args()
    cases = [
        case
        for case in cases_of(asked.images)
        if asked.tasks is None or case.name in asked.tasks.split(",")
    ]
    specs = list(dict.fromkeys([BASELINE, *asked.strategies.split(",")]))
    for spec in specs:
        strategy_of(spec)  # before an hour is spent on those before it
    if asked.quick:
        cases = [replace(case, steps=40) for case in cases]
    seeds = 1 if asked.quick else asked.seeds
    kept = asked.results and ResultFile(asked.results / "group_ablation.jsonl")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(asked.jobs, mp_context=context) as pool:
        cells: dict[str, Callable[[], Iterable[Row]]] = {}
        for case in cases:
            table = Table(case=case, specs=specs, seeds=range(seeds), kept=kept)
            cells |= table.cells(pool, again=asked.again)
        present(cells, asked, seeds=seeds)


if __name__ == "__main__":
    main()
