"""How long SPD-KFAC takes to a target, against SGD with momentum, AdamW and Muon: one process, one
thread, seconds without measuring.

1. Each strategy has six trials of its own, a grid, with seed 0. The target is the best that any
   trial of the others has reached after 90% of the steps; the trial that gets there in the fewest
   seconds is the strategy's setting, or the one that ends best where none gets there.
2. With other seeds, three unless `--seeds` says otherwise, all strategies train by turns, a few
   steps at a time, from the same parameters and with the same samples in the same order. The target
   is what the best of the others has reached after 90% of the steps, as a mean over the seeds.

Muon is `torch.optim.Muon` for weights of at least two dimensions, a convolution's as a matrix of
one row for each output, but not for the embedding and the last layer; these and all else go to
AdamW, with the same learning rate, which Muon scales to match it. `images` and `text` have it;
`digits`, `mnist` and `charlm` were there before it.

A metric is the mean of three measurements in a row. A step is as many samples for all. `images`,
`mnist`, and `text` with `charlm` need `--photos`, `--mnist` and `--text`; without them they are
left out. `--curves FILE` keeps the curves of runs, and nothing that it has is run anew: so a
benchmark that was stopped goes on.

    seconds to the target over those of the fastest of the others: at most 0.75 on `images`, 0.9 on
    `text` and 0.85 elsewhere; bound: if a step took as long as theirs

    python benchmarks/studies/kfac_accuracy.py [--json] [--quick] [--photos NPZ] [--mnist NPZ]
        [--text FILE] [--tasks NAME,...] [--curves FILE] [--others SPEC,...] [--seeds N]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import _benchmarks  # noqa: F401
import offbeat
from _measure import Row, add_output_options, present, ratio
from _results import Figure
from offbeat.errors import NonFiniteError
from offbeat.strategies.base import Strategy
from offbeat_lab.options import build_strategy, parse_spec
from offbeat_lab.tasks import Task, build_task
from offbeat_lab.tasks.base import Batch

SMOOTHED = 3
TARGET_AT = 0.9
TUNED_WITH = 0
SEEDS = 3
JUDGED = "spdkfac"
AT_MOST = 0.85
LEARNING_RATES = (5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2)
"""Of AdamW and Muon."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One setting. `momentum` is SGD's; `strategy`: as on the command line, none for a plain
    optimizer.
    """

    optimizer: Literal["sgd", "adamw", "muon"]
    lr: float
    momentum: float = 0.9
    strategy: str = ""

    def __str__(self) -> str:
        momentum = f" with momentum {self.momentum:g}" if self.optimizer == "sgd" else ""
        return ", ".join(filter(None, (f"{self.optimizer} {self.lr:g}{momentum}", self.strategy)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One task, with the trials of each strategy. In the `steps` of a run the metric is measured
    `measurements` times.
    """

    task: str
    steps: int
    measurements: int
    options: Mapping[str, str]
    trials: Mapping[str, Sequence[Trial]]
    at_most: float = AT_MOST

    @property
    def others(self) -> list[str]:
        """What SPD-KFAC is compared with."""
        return [name for name in self.trials if name != JUDGED]

    def build(self) -> Task:
        return build_task(self.task, dict(self.options))


@dataclass(kw_only=True, slots=True)
class Curve:
    """What one run has reached: steps, seconds and metrics, the latter so that more is better. Ends
    where it diverged.
    """

    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    metrics: list[float] = field(default_factory=list)

    def best(self) -> np.ndarray:
        """The best mean of three measurements in a row so far; -inf before there are three."""
        metrics = np.nan_to_num(np.array(self.metrics), nan=-np.inf)
        means = [
            metrics[end - SMOOTHED : end].mean() if end >= SMOOTHED else -np.inf
            for end in range(1, len(metrics) + 1)
        ]
        return np.maximum.accumulate(means) if means else np.array([-np.inf])

    def at(self, step: float) -> float:
        """The best up to `step`."""
        return float(self.best()[sum(seen <= step for seen in self.steps) - 1])

    def reached(self, target: float) -> tuple[float, float] | None:
        """Steps and seconds to `target`, on straight lines between measurements."""
        best = self.best()
        if best[-1] < target:
            return None
        after = int(np.argmax(best >= target))
        span = slice(max(0, after - 1), after + 1)
        if not np.isfinite(best[span]).all():
            return self.steps[after], self.seconds[after]
        steps, seconds = (
            float(np.interp(target, best[span], axis[span])) for axis in (self.steps, self.seconds)
        )
        return steps, seconds


class Training:
    """One run, a few steps at a time."""

    def __init__(self, task: Task, trial: Trial, *, seed: int) -> None:
        self._task, self._seed = task, seed
        self._model = task.build_model(seed)
        self._optimizer: torch.optim.Optimizer | Muon = (
            Muon(self._model, trial.lr)
            if trial.optimizer == "muon"
            else make_optimizer(trial, self._model)
        )
        self._session = None
        if trial.strategy:
            strategy = build_strategy(*parse_spec(trial.strategy))
            assert isinstance(strategy, Strategy)
            assert isinstance(self._optimizer, torch.optim.Optimizer)
            self._session = offbeat.attach(self._model, self._optimizer, strategy)
        self._batches = self._endless()
        self._failed = False
        self._sign = 1 if task.higher_is_better else -1
        self.curve = Curve()

    def _endless(self) -> Iterator[Batch]:
        epoch = 0
        while True:
            yield from self._task.batches(seed=self._seed, epoch=epoch, rank=0, world_size=1)
            epoch += 1

    def advance(self, num_steps: int) -> None:
        """Train, then measure."""
        if self._failed:
            return
        curve, batches = self.curve, [next(self._batches) for _ in range(num_steps)]
        begin_s = time.perf_counter()
        try:
            for batch in batches:
                self._task.loss(self._model, batch).backward()
                self._optimizer.step()
                self._optimizer.zero_grad()
        except NonFiniteError:
            self._failed = True
            return
        seconds = time.perf_counter() - begin_s
        curve.seconds.append(seconds + (curve.seconds[-1] if curve.seconds else 0.0))
        curve.steps.append(num_steps + (curve.steps[-1] if curve.steps else 0))
        self._model.eval()
        curve.metrics.append(self._sign * self._task.evaluate(self._model))
        self._model.train()

    def close(self) -> None:
        if self._session is not None:
            self._session.close()


def make_optimizer(trial: Trial, model: torch.nn.Module) -> torch.optim.Optimizer:
    if trial.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=trial.lr)
    return torch.optim.SGD(model.parameters(), lr=trial.lr, momentum=trial.momentum)


class Muon:
    """`torch.optim.Muon`, which takes matrices only, and AdamW for the other parameters."""

    def __init__(self, model: torch.nn.Module, lr: float) -> None:
        embeddings = {
            id(module.weight)
            for module in model.modules()
            if isinstance(module, torch.nn.Embedding)
        }
        last = [each for each in model.modules() if isinstance(each, torch.nn.Linear)][-1]
        matrices = [
            parameter
            for parameter in model.parameters()
            if parameter.ndim >= 2 and id(parameter) not in {*embeddings, id(last.weight)}
        ]
        self._pairs = [(each, each.detach().flatten(1)) for each in matrices]
        known = {id(each) for each in matrices}
        self._muon = torch.optim.Muon(
            [flat for _, flat in self._pairs],
            lr=lr,
            weight_decay=0.01,
            adjust_lr_fn="match_rms_adamw",
        )
        self._adamw = torch.optim.AdamW(
            [each for each in model.parameters() if id(each) not in known], lr=lr
        )
        self._model = model

    def step(self) -> None:
        for parameter, flat in self._pairs:
            flat.grad = None if parameter.grad is None else parameter.grad.flatten(1)
        self._muon.step()
        self._adamw.step()

    def zero_grad(self) -> None:
        self._model.zero_grad()


def train_by_turns(case: Case, trials: Mapping[str, Trial], *, seed: int) -> dict[str, Curve]:
    """Train all `trials`, the order reversed in each turn."""
    task = case.build()
    runs = {name: Training(task, trial, seed=seed) for name, trial in trials.items()}
    names = list(runs)
    for _ in range(case.measurements):
        for name in names:
            runs[name].advance(case.steps // case.measurements)
        names.reverse()
    for run in runs.values():
        run.close()
    return {name: run.curve for name, run in runs.items()}


def curves_of(
    case: Case, trials: Mapping[str, Trial], *, seed: int, kept: Path | None
) -> dict[str, Curve]:
    """What `train_by_turns` finds: as `kept` has it, or found now and added to it."""
    known = json.loads(kept.read_text()) if kept is not None and kept.exists() else {}
    key = (
        f"{case.task} {dict(case.options)}, {case.steps} steps, seed {seed}:"
        f" {'; '.join(map(str, trials.values()))}"
    )
    if key not in known:
        known[key] = {
            name: asdict(curve) for name, curve in train_by_turns(case, trials, seed=seed).items()
        }
        if kept is not None:
            kept.write_text(json.dumps(known))
    return {name: Curve(**curve) for name, curve in known[key].items()}


def tune(case: Case, kept: Path | None) -> dict[str, Trial]:
    """The best trial of each strategy."""
    curves = {
        name: [curves_of(case, {"": trial}, seed=TUNED_WITH, kept=kept)[""] for trial in trials]
        for name, trials in case.trials.items()
    }
    target = max(curve.at(TARGET_AT * case.steps) for name in case.others for curve in curves[name])
    chosen = {}
    table = Table(
        "trial",
        "ends with",
        "steps to the target",
        title=f"{case.task}, seed {TUNED_WITH}, target {target:.4f}",
    )
    for name, trials in case.trials.items():
        for trial, curve in zip(trials, curves[name], strict=True):
            found = curve.reached(target)
            table.add_row(
                str(trial), f"{curve.best()[-1]:.4f}", "" if found is None else f"{found[0]:.0f}"
            )
        ranks = [
            (-(curve.reached(target) or (0, np.inf))[1], curve.best()[-1]) for curve in curves[name]
        ]
        chosen[name] = trials[ranks.index(max(ranks))]
    Console(stderr=True, width=140).print(table)
    return chosen


def analyse(
    case: Case, chosen: Mapping[str, Trial], seeds: Sequence[int], kept: Path | None
) -> Iterator[Row]:
    curves = [curves_of(case, chosen, seed=seed, kept=kept) for seed in seeds]
    target = max(
        float(np.mean([found[name].at(TARGET_AT * case.steps) for found in curves]))
        for name in case.others
    )
    # who never gets there is counted as if it took twice the steps there were
    reached = {
        name: [
            found[name].reached(target) or (2.0 * case.steps, 2.0 * found[name].seconds[-1])
            for found in curves
        ]
        for name in chosen
    }
    print(f"{case.task}, {case.steps} steps, target {target:.4f}", file=sys.stderr)
    for name, trial in chosen.items():
        ms = 1e3 * np.median([found[name].seconds[-1] / found[name].steps[-1] for found in curves])
        steps, seconds = np.median(reached[name], axis=0)
        ends = np.mean([found[name].best()[-1] for found in curves])
        missed = sum(found[name].reached(target) is None for found in curves)
        cell = partial(Figure, table=case.task, case=str(trial))
        yield cell(column="ms a step", value=float(ms), decimals=2)
        yield cell(column="ends with", value=float(ends), decimals=4)
        yield cell(column="steps", value=float(steps), decimals=0)
        yield cell(column="seconds", value=float(seconds), decimals=2)
        yield cell(column="seeds that missed the target", value=float(missed))
    faster = min(case.others, key=lambda name: np.median(reached[name], axis=0)[1])
    pairs = [
        (mine[1], theirs[1]) for mine, theirs in zip(reached[JUDGED], reached[faster], strict=True)
    ]
    steps_ratio = np.median(reached[JUDGED], axis=0)[0] / np.median(reached[faster], axis=0)[0]
    case_name = f"{case.task}, {JUDGED}, seconds to the target over {faster}'s"
    yield ratio(case_name, pairs, bound=float(steps_ratio), at_most=case.at_most)


def trials_of(
    sgd: Sequence[float], adamw: Sequence[float], kfac: Sequence[Trial]
) -> dict[str, Sequence[Trial]]:
    """Six of each: learning rates of SGD and AdamW, and K-FAC's."""
    return {
        "sgd": [Trial(optimizer="sgd", lr=lr) for lr in sgd],
        "adamw": [Trial(optimizer="adamw", lr=lr) for lr in adamw],
        JUDGED: kfac,
    }


def cases_of(photos: Path | None, mnist: Path | None, text: Path | None) -> Iterator[Case]:
    images = trials_of(
        sgd=(0.01, 0.02, 0.05, 0.1, 0.2, 0.4),
        adamw=LEARNING_RATES,
        kfac=[
            Trial(
                optimizer="sgd", lr=0.05, momentum=momentum, strategy=f"{JUDGED}:damping={damping}"
            )
            for momentum, damping in product((0.5, 0.9), (0.003, 0.01, 0.03))
        ],
    )
    muon = [Trial(optimizer="muon", lr=lr) for lr in LEARNING_RATES]
    if photos is not None:
        cheaper = ":max_dim=256:sample_stride=4"
        photographs = trials_of(
            sgd=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
            adamw=(1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3),
            kfac=[
                Trial(
                    optimizer="sgd",
                    lr=0.05,
                    momentum=0.5,
                    strategy=f"{JUDGED}:damping={damping}{more}",
                )
                for more, damping in product(("", cheaper), (0.003, 0.01, 0.03))
            ],
        )
        options = {"batch_size": "32", "path": str(photos), "shrink": "2"}
        yield Case(
            task="images",
            steps=300,
            measurements=20,
            options=options,
            trials=photographs | {"muon": muon},
            at_most=0.75,
        )
    yield Case(
        task="digits", steps=240, measurements=48, options={"batch_size": "128"}, trials=images
    )
    if mnist is not None:
        options = {"batch_size": "128", "path": str(mnist)}
        yield Case(task="mnist", steps=240, measurements=24, options=options, trials=images)
    if text is not None:
        options = {"batch_size": "32", "path": str(text), "model": "transformer"}
        characters = trials_of(
            sgd=(0.05, 0.1, 0.2, 0.3, 0.5, 1.0),
            adamw=LEARNING_RATES,
            kfac=[
                replace(trial, strategy=f"{JUDGED}:loss_terms=position:damping={damping}")
                for trial in (Trial(optimizer="sgd", lr=0.05), Trial(optimizer="adamw", lr=5e-3))
                for damping in (0.003, 0.01, 0.03)
            ],
        )
        yield Case(task="charlm", steps=300, measurements=20, options=options, trials=characters)
        options = {"batch_size": "16", "path": str(text)}
        texts = trials_of(
            sgd=(0.05, 0.1, 0.2, 0.3, 0.5, 1.0),
            adamw=LEARNING_RATES,
            kfac=[
                Trial(
                    optimizer="adamw",
                    lr=lr,
                    strategy=f"{JUDGED}:loss_terms=position:damping={damping}",
                )
                for lr, damping in product((0.005, 0.01), (1e-3, 1e-4, 1e-5))
            ],
        )
        yield Case(
            task="text",
            steps=240,
            measurements=16,
            options=options,
            trials=texts | {"muon": [Trial(optimizer="muon", lr=4 * each.lr) for each in muon]},
            at_most=0.9,
        )


def run(case: Case, asked: argparse.Namespace, seeds: Sequence[int]) -> Iterator[Row]:
    chosen = tune(case, asked.curves)
    for more in filter(None, asked.others.split(",")):
        chosen[more] = replace(chosen[JUDGED], strategy=f"{chosen[JUDGED].strategy}:{more}")
    yield from analyse(case, chosen, seeds, asked.curves)


def main() -> None:
    parser = argparse.ArgumentParser()
    add_output_options(parser)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="few steps, one trial each, two seeds: only to see that it runs",
    )
    parser.add_argument("--photos", type=Path, help="npz file of images")
    parser.add_argument("--mnist", type=Path, help="npz file of mnist")
    parser.add_argument("--text", type=Path, help="text for text and charlm")
    parser.add_argument("--tasks", help="only these, such as digits,mnist")
    parser.add_argument("--curves", type=Path, help="JSON file that keeps the curves of runs")
    parser.add_argument(
        "--others",
        default="",
        help="more rows: what to add to SPD-KFAC's setting, such as sample_stride=4",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=SEEDS,
        help="how many, besides the one for trials; default: %(default)s",
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    cases = [
        case
        for case in cases_of(asked.photos, asked.mnist, asked.text)
        if asked.tasks is None or case.task in asked.tasks.split(",")
    ]
    if asked.quick:
        cases = [
            replace(
                case,
                steps=case.measurements,
                trials={name: trials[1:2] for name, trials in case.trials.items()},
            )
            for case in cases
        ]
    seeds = 2 if asked.quick else asked.seeds
    cells = {case.task: partial(run, case, asked, range(1, 1 + seeds)) for case in cases}
    present(cells, asked, seeds=seeds)


if __name__ == "__main__":
    main()
