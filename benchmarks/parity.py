"""How accurate each strategy is after equally many samples, against AllReduce, each with a learning
rate of its own.

Every strategy has the same trials: its learning rates, with seed 0, of which the best is kept. With
it the strategy trains from the same parameters and on the same samples as AllReduce with its own,
seed by seed. A run's metric is the mean of its last three measurements, of a model that holds the
mean of the ranks' weights and statistics.

    worse than AllReduce: at most 0.5 points of accuracy, 1% of bits

Only samples count here. So strategies that need no clock train in threads of one process (each rank
with model, data, session and state of its own; messages stay in memory), and the others as `offbeat
train` runs them: WAGMA and AdaptiveSGD, whose averages depend on who comes first, and
`gtopk` without a density, which it chooses by what its link carries, of 100 Mbit/s.

Each run is kept as soon as it is over, so the benchmark may be stopped at any time and goes on with
`--results`. `images` and `text` need `--images` and `--text`; what is not given is left out.

    python benchmarks/parity.py [--json] [--images NPZ] [--text FILE] [--tasks NAME,...]
        [--strategies SPEC,...] [--seeds N] [--seconds S] [--results DIR]
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

import numpy as np
import torch

from _measure import Ratio, Row, add_output_options, figure_of, origin, print_rows
from _results import Figure, ResultFile
from offbeat.lab.cluster import Cluster, LinkSpec
from offbeat.lab.config import Request
from offbeat.lab.options import parse_spec
from offbeat.lab.records import Record
from offbeat.lab.statistics import estimate
from offbeat.lab.tasks import Task
from offbeat.lab.tasks.base import Batch
from offbeat.lab.train import RunPlan, plan, train
from offbeat.strategies.base import Strategy

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from thread_support.world import ThreadDriver, results_of, session_on

WORKERS = 4
BASELINE = "allreduce"
LAST, MEASUREMENTS = 3, 20
TUNED_WITH = 0
LINK = Cluster(workers=WORKERS, link=LinkSpec(rate_bit_per_s=100e6))


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    """One strategy.

    Attributes:
        spec: as on the command line.
        in_threads: whether its ranks may be threads of one process.
        cluster: the links on which its workers train, where they are processes.
        slower: by which its learning rates are lower than the task's.
    """

    spec: str
    in_threads: bool = True
    cluster: Cluster | None = None
    slower: Mapping[str, float] = field(default_factory=dict)


CONTESTANTS = (
    Contestant(spec=BASELINE),
    Contestant(spec="gtopk", in_threads=False, cluster=LINK),
    Contestant(spec="gtopk:density=0.01"),
    Contestant(spec="localsgd"),
    Contestant(spec="wagma", in_threads=False),
    Contestant(spec="adaptive", in_threads=False),
    Contestant(spec="spdkfac", slower={"images": 2.0}),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One task.

    Attributes:
        task: its name.
        settings: of the task.
        lrs: the trials.
        steps: of a run.
        goal: the largest difference, in `unit`; relative where that is "%", else in hundredths.
    """

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


def cases_of(images: Path | None, text: Path | None) -> Iterator[Case]:
    if images is not None:
        yield Case(
            task="images",
            settings=(
                f"path={images}",
                *("width=16", "shrink=2", "batch_size=32", "lr_warmup=0.0625"),
                "lr_schedule=linear",
            ),
            lrs=(0.2, 0.1, 0.05),
            steps=800,
            higher_is_better=True,
            goal=0.5,
            unit="points",
        )
    if text is not None:
        yield Case(
            task="text",
            settings=(f"path={text}", "batch_size=8"),
            lrs=(0.012, 0.006, 0.003),
            steps=400,
            higher_is_better=False,
            goal=1.0,
            unit="%",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run of one strategy."""

    case: Case
    contestant: Contestant
    lr: float
    seed: int

    @property
    def cell(self) -> str:
        return f"{self.case.task}, {self.contestant.spec}, lr {self.lr:g}, seed {self.seed}"

    def figure(self, metric: float) -> Figure:
        return Figure(
            table=f"{self.case.task}, all runs",
            case=f"{self.contestant.spec}, {self.lr:g}",
            column=f"seed {self.seed}",
            value=metric,
            decimals=4,
        )

    def plan(self) -> RunPlan:
        name, options = parse_spec(self.contestant.spec)
        given = (f"{key}={value}" for key, value in options.items())
        planned = plan(
            Request(
                task=self.case.task,
                strategy=name,
                settings=(*self.case.settings, f"lr={self.lr}", *given),
                workers=WORKERS,
                steps=self.case.steps,
                seed=self.seed,
                eval_every=self.case.steps // MEASUREMENTS,
                cluster=self.contestant.cluster,
            )
        )
        return replace(planned, config=planned.config.model_copy(update={"checkpoint_every": None}))

    def metric(self) -> float:
        measured = in_threads if self.contestant.in_threads else in_processes
        return round(float(np.mean(measured(self.plan())[-LAST:])), 4)


def in_processes(planned: RunPlan) -> list[float]:
    """The metric now and then, as `offbeat train` measures it."""
    with tempfile.TemporaryDirectory() as directory:
        record = Path(directory) / "run"
        summary = train(replace(planned, out=record), lambda progress: None)
        assert summary is not None
        assert summary.metric is not None, f"the run ended as {summary.status}"
        return [*(one.metric for one in Record(record).evaluations()), summary.metric]


def in_threads(planned: RunPlan) -> list[float]:
    """The metric at the last places where `in_processes` measures it."""
    config = planned.config
    task, strategy = config.build_task(), config.build_strategy()
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

    return results_of(world_size, rank)[0]


def batches_of(task: Task, *, seed: int, rank: int, world_size: int) -> Iterator[Batch]:
    for epoch in count():
        yield from task.batches(seed=seed, epoch=epoch, rank=rank, world_size=world_size)


class Runs:
    """What has been measured, and measures what has not.

    Args:
        kept: where to keep figures; None: nowhere.
        seconds: after so many nothing more is measured.
    """

    def __init__(self, kept: ResultFile | None, seconds: float) -> None:
        self._kept = kept
        self._ends_s = time.monotonic() + seconds
        self._metrics: dict[str, float] = {}
        for result in () if kept is None else kept.results:
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
                self._kept.replace(run.cell, [run.figure(metric)], origin(None))
        return self._metrics[run.cell]


def tuned(case: Case, contestant: Contestant, runs: Runs) -> float | None:
    """The best of its learning rates; None where not all have been tried."""
    metrics: dict[float, float] = {}
    for lr in case.lrs:
        slower = lr / contestant.slower.get(case.task, 1.0)
        metric = runs.metric(Run(case=case, contestant=contestant, lr=slower, seed=TUNED_WITH))
        if metric is None:
            return None
        metrics[slower] = metric
    choose = max if case.higher_is_better else min
    return choose(metrics, key=lambda lr: metrics[lr])


def compared(case: Case, contestants: Sequence[Contestant], runs: Runs, seeds: int) -> list[Row]:
    """The table of one task, as far as there are runs for it."""
    rates = {one.spec: tuned(case, one, runs) for one in contestants}
    metrics: dict[str, list[float | None]] = {one.spec: [] for one in contestants}
    for seed in range(seeds):  # by seeds, so that what is stopped has compared all
        for one in contestants:
            lr = rates[one.spec]
            run = None if lr is None else Run(case=case, contestant=one, lr=lr, seed=seed)
            metrics[one.spec].append(None if run is None else runs.metric(run))
    rows: list[Row] = []
    for one in contestants:
        rows += _rows(case, one.spec, rates[one.spec], metrics[one.spec], metrics[BASELINE])
    return rows


def _rows(
    case: Case,
    spec: str,
    lr: float | None,
    metrics: Sequence[float | None],
    baseline: Sequence[float | None],
) -> Iterator[Row]:
    known = [metric for metric in metrics if metric is not None]
    if lr is None or not known:
        return
    cell = partial(Figure, table=case.task, case=spec)
    yield cell(column="learning rate", value=lr)
    yield cell(column="metric by seed", value=tuple(metrics), decimals=4)
    yield cell(column="mean", value=float(np.mean(known)), decimals=4)
    pairs = zip(metrics, baseline, strict=True)
    gap = estimate(
        [None if one is None or its is None else case.worse(one, its) for one, its in pairs]
    )
    gaps = [value for value in gap.values if value is not None]
    if spec == BASELINE or not gaps:
        return
    low, high = (-np.inf, np.inf) if gap.low is None or gap.high is None else (gap.low, gap.high)
    yield cell(
        column=f"worse than {BASELINE}, {case.unit}",
        value=float(np.mean(gaps)),
        interval=None if gap.low is None else (low, high),
        decimals=2,
    )
    if gap.low is not None:
        yield Ratio(
            case=f"{case.task}, {spec} worse than {BASELINE}",
            value=float(np.mean(gaps)),
            unit=case.unit,
            goal=f"at most {case.goal:g}",
            holds="undecided" if low <= case.goal < high else high <= case.goal,
            bound=0.0,
            interval=(low, high),
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    add_output_options(parser)
    parser.add_argument("--images", type=Path, help="npz file of images")
    parser.add_argument("--text", type=Path, help="text file")
    parser.add_argument("--tasks", help="only these, such as images,text")
    parser.add_argument(
        "--strategies",
        default=",".join(one.spec for one in CONTESTANTS),
        help="which; default: %(default)s",
    )
    parser.add_argument("--seeds", type=int, default=3, help="how many; default: %(default)s")
    parser.add_argument(
        "--seconds", type=float, default=np.inf, help="begin no run after so many seconds"
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    specs = [BASELINE, *asked.strategies.split(",")]
    contestants = [one for one in CONTESTANTS if one.spec in specs]
    if unknown := set(specs) - {one.spec for one in contestants}:
        raise SystemExit(f"no contestants: {', '.join(sorted(unknown))}")
    kept = None if asked.results is None else ResultFile(asked.results / "parity.jsonl")
    runs = Runs(kept, asked.seconds)
    rows: list[Row] = []
    for case in cases_of(asked.images, asked.text):
        if asked.tasks is None or case.task in asked.tasks.split(","):
            found = compared(case, contestants, runs, asked.seeds)
            rows += found
            if kept is not None:
                kept.replace(case.task, map(figure_of, found), origin(asked.seeds))
    print_rows([row for row in rows if isinstance(row, Ratio)], as_json=asked.json)


if __name__ == "__main__":
    main()
