"""Strategies against AllReduce, seed by seed: the same first parameters, the same samples.

Every strategy has the same trials: its learning rates, with a few seeds, of which the best is kept.
A run's metric is the mean of its last three measurements, of a model that holds the mean of the
ranks' weights and statistics. Where only samples count, ranks are threads of one process: each has
model, data, session and state of its own, and messages stay in memory.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from statistics import fmean

import numpy as np

from _measure import Ratio, Row, add_output_options, figure_of, origin, script_command
from _results import Figure, Origin, ResultFile
from offbeat.strategies.base import Strategy
from offbeat_lab.cluster import Cluster
from offbeat_lab.config import Request, recipe_of, task_of
from offbeat_lab.options import parse_spec
from offbeat_lab.records import Record
from offbeat_lab.statistics import Estimate, estimate
from offbeat_lab.tasks import Task
from offbeat_lab.tasks.base import Batch
from offbeat_lab.train import RunPlan, plan, train

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # whose drivers for threads serve here

from thread_support.world import ThreadDriver, results_of, session_on

LAST, MEASUREMENTS = 3, 20
RUN_LIMIT_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TriedStrategy:
    """One strategy.

    Attributes:
        label: its name in tables.
        spec: as on the command line.
        workers: how many.
        in_threads: whether its ranks may be threads of one process.
        cluster: the links on which its workers train, where they are processes.
        slower: by which its learning rates are lower than the task's.
        goal: in place of the case's; None: the case's.
        tuned_with: seeds with which its learning rates are tried.
    """

    label: str
    spec: str
    workers: int = 4
    in_threads: bool = True
    cluster: Cluster | None = None
    slower: Mapping[str, float] = field(default_factory=dict)
    goal: float | None = None
    tuned_with: Sequence[int] = (0,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One task.

    Attributes:
        name: of its table.
        task: as on the command line.
        settings: of the task.
        lrs: the trials.
        steps: of a run.
        goal: the largest difference, in `unit`; relative where that is "%", else in hundredths.
    """

    name: str
    task: str
    settings: Sequence[str]
    lrs: Sequence[float]
    steps: int
    higher_is_better: bool
    goal: float
    unit: str

    def worse(self, metric: float, baseline: float) -> float:
        """By how much `metric` is worse than `baseline`, in `unit`."""
        gap = 100 * (baseline - metric if self.higher_is_better else metric - baseline)
        return gap / baseline if self.unit == "%" else gap


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run of one strategy."""

    case: Case
    strategy: TriedStrategy
    lr: float
    seed: int

    @property
    def cell(self) -> str:
        return f"{self.case.name}, {self.strategy.label}, lr {self.lr:g}, seed {self.seed}"

    def figure(self, metric: float) -> Figure:
        several = len(self.case.lrs) > 1
        return Figure(
            table=f"{self.case.name}, all runs" if several else self.case.name,
            case=f"{self.strategy.label}, {self.lr:g}" if several else self.strategy.label,
            column=f"seed {self.seed}",
            value=metric,
            decimals=4,
        )

    def plan(self) -> RunPlan:
        name, options = parse_spec(self.strategy.spec)
        given = (f"{key}={value}" for key, value in options.items())
        planned = plan(
            Request(
                task=self.case.task,
                strategy=name,
                settings=(*self.case.settings, f"lr={self.lr}", *given),
                workers=self.strategy.workers,
                steps=self.case.steps,
                seed=self.seed,
                eval_every=self.case.steps // MEASUREMENTS,
                cluster=self.strategy.cluster,
            )
        )
        return replace(planned, config=replace(planned.config, checkpoint_every=None))

    def metric(self) -> float:
        measured = in_threads if self.strategy.in_threads else in_processes
        return round(float(np.mean(measured(self.plan())[-LAST:])), 4)


def in_processes(planned: RunPlan) -> list[float]:
    """The metric now and then, as `offbeat train` measures it."""
    with tempfile.TemporaryDirectory() as directory:
        record = Path(directory) / "run"
        summary = train(replace(planned, out=record), lambda progress: None)
        assert summary is not None
        assert summary.metric is not None, f"the run ended as {summary.status}"
        return [one.metric for one in Record(record).evaluations()]


def in_threads(planned: RunPlan) -> list[float]:
    """The metric at the last places where `in_processes` measures it."""
    config = planned.config
    task, strategy = task_of(config), recipe_of(config)
    assert isinstance(strategy, Strategy)
    assert config.steps is not None
    assert config.eval_every is not None
    # Each model is drawn from torch's own generator, which threads would share.
    models = [task.build_model(config.seed) for _ in range(config.workers)]
    measured_at = {config.steps - config.eval_every * back for back in range(LAST)}
    steps, seed, world_size = config.steps, config.seed, config.workers

    def rank(driver: ThreadDriver) -> list[float]:
        model, metrics = models[driver.rank], []
        optimizer = task.optimizer(model)
        with session_on(driver, model, optimizer, strategy) as session:
            batches = batches_of(task, seed=seed, rank=driver.rank, world_size=world_size)
            for step, batch in enumerate(islice(batches, steps), start=1):
                for group in optimizer.param_groups:
                    group["lr"] = task.lr_at((step - 0.5) / steps)
                task.loss(model, batch).backward()
                if task.max_grad_norm is not None:
                    session.clip_grad_norm_(task.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
                if step in measured_at:
                    mean = session.averaged_model()
                    if driver.rank == 0:
                        metrics.append(task.evaluate(mean.eval()))
        return metrics

    return results_of(world_size, rank, limit_s=RUN_LIMIT_S)[0]


def batches_of(task: Task, *, seed: int, rank: int, world_size: int) -> Iterator[Batch]:
    for epoch in count():
        yield from task.batches(seed=seed, epoch=epoch, rank=rank, world_size=world_size)


class Runs:
    """What has been measured, and measures what has not.

    Args:
        kept: where to keep figures; None: nowhere.
        seconds: after so many nothing more is measured.
        again: whether to measure anew what is kept.
    """

    def __init__(self, kept: ResultFile | None, seconds: float, *, again: bool = False) -> None:
        self._kept = kept
        self._ends_s = time.monotonic() + seconds
        self._metrics: dict[str, float] = {}
        for result in () if kept is None or again else kept.results:
            if isinstance(result.figure.value, float) and result.figure.column.startswith("seed "):
                self._metrics[result.cell] = result.figure.value

    def metric(self, run: Run) -> float | None:
        """None: there was no time for it."""
        if run.cell not in self._metrics:
            begun_s = time.monotonic()
            if begun_s > self._ends_s:
                return None
            metric = self._metrics[run.cell] = run.metric()
            print(f"{run.cell}: {metric:.4f} in {time.monotonic() - begun_s:.0f} s", flush=True)
            if self._kept is not None:
                self._kept.replace(run.cell, [run.figure(metric)], source())
        return self._metrics[run.cell]


def tuned(case: Case, strategy: TriedStrategy, runs: Runs) -> float | None:
    """The best of its learning rates, by the mean of seeds; None where some were not tried."""
    metrics: dict[float, float] = {}
    rates = [lr / strategy.slower.get(case.name, 1.0) for lr in case.lrs]
    if len(rates) == 1:
        return rates[0]
    for lr in rates:
        found = [
            runs.metric(Run(case=case, strategy=strategy, lr=lr, seed=seed))
            for seed in strategy.tuned_with
        ]
        known = [metric for metric in found if metric is not None]
        if len(known) < len(found):
            return None
        metrics[lr] = fmean(known)
    choose = max if case.higher_is_better else min
    return choose(metrics, key=lambda lr: metrics[lr])


def compared(
    case: Case, strategies: Sequence[TriedStrategy], runs: Runs, seeds: int
) -> dict[str, Result]:
    """By label, as far as there are runs; the first strategy is the baseline.

    Args:
        case: the task.
        strategies: what is compared.
        runs: finds or makes a run.
        seeds: how many.
    """
    found = {
        one.label: Result(
            case=case if one.goal is None else replace(case, goal=one.goal),
            lr=tuned(case, one, runs),
        )
        for one in strategies
    }
    for seed in range(seeds):  # by seeds, so that what is stopped has compared all
        for one in strategies:
            result = found[one.label]
            if result.lr is not None:
                run = Run(case=case, strategy=one, lr=result.lr, seed=seed)
                result.metrics.append(runs.metric(run))
    baseline = found[strategies[0].label]
    for result in found.values():
        result.baseline = baseline.metrics
    return found


@dataclass(kw_only=True, slots=True)
class Result:
    """What one strategy has reached, by seed."""

    case: Case
    lr: float | None
    metrics: list[float | None] = field(default_factory=list)
    baseline: list[float | None] = field(default_factory=list)

    @property
    def gaps(self) -> Estimate:
        """By how much it is worse than the baseline."""
        return estimate(
            [
                None if mine is None or its is None else self.case.worse(mine, its)
                for mine, its in zip(self.metrics, self.baseline, strict=False)
            ],
            signed=True,
        )

    def figures(self, label: str, baseline: str) -> Iterator[Row]:
        """Its row, and whether the goal is met."""
        known = [metric for metric in self.metrics if metric is not None]
        if self.lr is None or not known:
            return
        case, gap = self.case, self.gaps
        gaps = [value for value in gap.values if value is not None]
        cell = partial(Figure, table=case.name, case=label)
        if len(case.lrs) > 1:
            yield cell(column="learning rate", value=self.lr)
        yield cell(column="mean", value=float(np.mean(known)), decimals=4)
        if label == baseline or not gaps:
            return
        worse = float(np.mean(gaps))
        if gap.low is None or gap.high is None:
            yield cell(column=f"worse than {baseline}, {case.unit}", value=worse, decimals=2)
            return
        yield Ratio(
            case=f"{case.name}, {label} worse than {baseline}",
            value=worse,
            unit=case.unit,
            goal=f"at most {case.goal:g}",
            holds="undecided" if gap.low <= case.goal < gap.high else gap.high <= case.goal,
            bound=0.0,
            interval=(gap.low, gap.high),
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    add_output_options(parser)
    parser.add_argument("--images", type=Path, metavar="NPZ", help="images")
    parser.add_argument("--seeds", type=int, default=3, help="how many; default: %(default)s")
    parser.add_argument(
        "--seconds", type=float, default=np.inf, help="begin no run after so many seconds"
    )


def source() -> Origin:
    """Where figures come from: the command that measures all of them, however few this one has
    been asked for.
    """
    words, kept = iter(sys.argv[1:]), list[str]()
    for word in words:
        if word == "--own-rate":
            kept.append(word)
        if word in ("--images", "--text", "--steps", "--lr", "--workers"):
            kept += [word, Path(next(words)).name]
    here = origin(None)
    return replace(here, command=" ".join([script_command(), *kept]))


def keep(kept: ResultFile | None, cell: str, rows: Sequence[Row]) -> None:
    if kept is not None and rows:
        kept.replace(cell, map(figure_of, rows), source())


def images(path: Path, *, name: str, lrs: Sequence[float], steps: int) -> Case:
    """Photographs, a small CNN with BatchNorm, SGD with momentum.

    Args:
        path: npz file.
        name: of the case.
        lrs: the trials.
        steps: of a run.
    """
    return Case(
        name=name,
        task="images",
        settings=(
            f"path={path}",
            *("width=16", "shrink=2", "batch_size=32", "momentum=0.9"),
            *("lr_warmup=0.0625", "lr_schedule=linear"),
        ),
        lrs=lrs,
        steps=steps,
        higher_is_better=True,
        goal=0.5,
        unit="points",
    )
