"""What the survivors feel when workers die, hang, are cut off or return: eight workers, links of 1
Gbit/s, steps of 100 ms.

Who is hit, and when, is drawn from the seed. A survivor is a worker that nothing was done to. Its
stall is what one of its steps took beyond its median step. In the end it should be as good as a run
of as many workers as were left, from the start; where everybody comes back, as one of all eight.

    every run finishes; no stall of a survivor after the first fault above 1 s; none of them loses
    more than one step the mean of the last five of twenty measurements at most 0.3 points worse
    than that of the world that was left

The store that workers meet in lives in the launcher, which nothing happens to. Cutting links takes
root and network namespaces; where they are missing, the record's notices say so, and nothing is
felt.

    python benchmarks/deaths.py [--json] [--quick] [--strategy SPEC] [--scenarios NAME,...] [--seeds
    N] [--keep DIRECTORY]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, Literal

import numpy as np

from _measure import Cells, Ratio, Row, add_output_options, present
from _results import Figure
from offbeat.errors import OffbeatError
from offbeat.run.records import StepEvent
from offbeat_lab.cluster import Cluster, ClusterFault, LinkSpec
from offbeat_lab.config import Request
from offbeat_lab.options import parse_spec
from offbeat_lab.records import Record
from offbeat_lab.statistics import Estimate, estimate
from offbeat_lab.train import plan, train

WORKERS = 8
STEP_S = 0.1
STEPS = 200
ABSENT = 0.15
"""How long what is taken back lasts, as a fraction of the run: 3 s."""
STRATEGY = "wagma"
LONGEST_STALL_S = 1.0
POINTS = 0.3
MEASUREMENTS = 20
"""Of the metric, in a run."""
LAST = 5
"""The last of them, whose mean is what a run has reached: with batches of 8 a single one says
little.
"""
_WARM_UP_STEPS = 10

Undo = Literal["continue", "mend", "return"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """How many workers are hit, by what, and what takes it back a while later, if anything."""

    num_hit: int
    action: Literal["kill", "stop", "cut"]
    undo: Undo | None = None

    @property
    def num_left(self) -> int:
        """Workers that train in the end."""
        return WORKERS if self.undo else WORKERS - self.num_hit


SCENARIOS: Final = {
    "kill-1": Scenario(num_hit=1, action="kill"),
    "kill-4": Scenario(num_hit=4, action="kill"),
    "kill-7": Scenario(num_hit=7, action="kill"),
    "stop-2": Scenario(num_hit=2, action="stop", undo="continue"),
    "cut-2": Scenario(num_hit=2, action="cut", undo="mend"),
    "return-2": Scenario(num_hit=2, action="kill", undo="return"),
}


@dataclass(kw_only=True, slots=True)
class Found:
    """What a scenario has shown. Stalls in seconds, of every step of a survivor after the first
    fault; the rest by seed.
    """

    stalls_s: list[float] = field(default_factory=list)
    steps_lost: list[int] = field(default_factory=list)
    metrics: list[float | None] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def faults(scenario: Scenario, seed: int, steps: int) -> tuple[ClusterFault, ...]:
    """Between a quarter and half of the run, so that who returns can come in before its end."""
    draws = np.random.default_rng((seed, scenario.num_hit))
    whole_s = steps * STEP_S
    script = []
    for worker in draws.choice(WORKERS, scenario.num_hit, replace=False).tolist():
        at_s = float(draws.uniform(whole_s / 4, whole_s / 2))
        script.append(ClusterFault(at_s=at_s, worker=worker, action=scenario.action))
        if scenario.undo is not None:
            script.append(
                ClusterFault(at_s=at_s + ABSENT * whole_s, worker=worker, action=scenario.undo)
            )
    return tuple(script)


def train_once(spec: str, cluster: Cluster, seed: int, steps: int, out: Path) -> float | None:
    """What one run has reached, whose record is left in `out`. Raises `OffbeatError` when it does
    not finish.

    What the run's record remarks, such as who died and who could not come back, goes to standard
    error.
    """
    name, options = parse_spec(spec)
    request = Request(
        task="digits",
        strategy=name,
        settings=["batch_size=8", *(f"{key}={value}" for key, value in options.items())],
        workers=cluster.workers,
        steps=steps,
        seed=seed,
        checkpoint_every=steps,
        eval_every=max(1, steps // MEASUREMENTS),
        cluster=cluster,
    )
    summary = train(plan(request, out=out), lambda progress: None)
    if summary is None:
        return None
    print(
        *(f"{out.parent.name}, seed {seed}: {notice}" for notice in summary.notices),
        sep="\n",
        file=sys.stderr,
    )
    seen = Record(out).evaluations()[-LAST:]
    return float(np.mean([evaluation.metric for evaluation in seen])) if len(seen) == LAST else None


def measure(spec: str, scenario: Scenario, seeds: Sequence[int], steps: int, keep: Path) -> Found:
    found = Found()
    for seed in seeds:
        script = faults(scenario, seed, steps)
        cluster = Cluster(
            workers=WORKERS,
            link=LinkSpec(rate_bit_per_s=1e9),
            step_s=STEP_S,
            faults=script,
            seed=seed,
        )
        out = keep / f"seed-{seed}"
        try:
            found.metrics.append(train_once(spec, cluster, seed, steps, out))
        except OffbeatError as error:
            found.failures.append(f"seed {seed}: {error}")
            found.metrics.append(None)
            continue
        record = Record(out)
        hit = {fault.worker for fault in script}
        for rank in set(range(WORKERS)) - hit:
            events = list(record.events(rank))
            found.steps_lost.append(steps - sum(not event.skipped for event in events))
            found.stalls_s += stalls(events, min(fault.at_s for fault in script))
    return found


def stalls(events: Sequence[StepEvent], since_s: float) -> list[float]:
    """What each step took beyond the median one, in seconds, once `since_s` seconds of training are
    over.
    """
    durations_s = np.array([event.duration_s for event in events])
    later = durations_s.cumsum() >= since_s
    return list(map(float, (durations_s - np.median(durations_s[_WARM_UP_STEPS:]))[later]))


def reference(
    spec: str, workers: int, seeds: Sequence[int], steps: int, keep: Path
) -> list[float | None]:
    """What runs in which nothing happens have reached, by seed."""
    cluster = partial(Cluster, workers=workers, link=LinkSpec(rate_bit_per_s=1e9), step_s=STEP_S)
    return [
        train_once(spec, cluster(seed=seed), seed, steps, keep / f"left-{workers}-seed-{seed}")
        for seed in seeds
    ]


def goals(name: str, found: Found, worse: Estimate, num_runs: int) -> Iterator[Ratio]:
    finished = 1 - len(found.failures) / num_runs
    yield _case(
        f"{name}: runs that finished",
        finished,
        "x",
        "at least 1",
        not found.failures,
        (finished, finished),
        bound=1.0,
    )
    if not found.stalls_s:
        return
    late_s, longest_s = (float(value) for value in np.quantile(found.stalls_s, [0.99, 1.0]))
    what = f"{name}: longest stall of a survivor's step (interval: 99th percentile to longest)"
    limit = f"at most {LONGEST_STALL_S:g}"
    yield _case(what, longest_s, "s", limit, longest_s <= LONGEST_STALL_S, (late_s, longest_s))
    lost = float(max(found.steps_lost))
    yield _case(
        f"{name}: most steps lost by a survivor", lost, "steps", "at most 1", lost <= 1, (0.0, lost)
    )
    if worse.median is not None:
        low, high = (
            (worse.median, worse.median)
            if worse.low is None or worse.high is None
            else (worse.low, worse.high)
        )
        holds: bool | Literal["undecided"] = "undecided" if low <= POINTS < high else high <= POINTS
        goal = f"at most {POINTS:g}"
        yield _case(
            f"{name}: worse than the world that was left",
            worse.median,
            "points",
            goal,
            holds,
            (low, high),
        )


def _case(
    case: str,
    value: float,
    unit: str,
    goal: str,
    holds: bool | Literal["undecided"],
    interval: tuple[float, float],
    *,
    bound: float = 0.0,
) -> Ratio:
    return Ratio(
        case=case, value=value, unit=unit, goal=goal, holds=holds, bound=bound, interval=interval
    )


def figures(name: str, found: Found, references: Sequence[float | None]) -> Iterator[Figure]:
    """What the page shows of a scenario; failures are said on standard error."""
    for failure in found.failures:
        print(f"{name}: {failure}", file=sys.stderr)
    cell = partial(Figure, table="scenarios", case=name)
    num_runs = len(found.metrics)
    finished = f"{num_runs - len(found.failures)} of {num_runs}"
    yield cell(column="runs that finished", value=finished)
    if found.stalls_s:
        late_s, longest_s = map(float, np.quantile(found.stalls_s, [0.99, 1.0]))
        yield cell(column="stall: 99th percentile, s", value=late_s, decimals=2)
        yield cell(column="stall: longest, s", value=longest_s, decimals=2)
        yield cell(column="steps lost", value=float(max(found.steps_lost)), decimals=0)
    yield cell(column="metric by seed", value=tuple(found.metrics), decimals=3)
    yield cell(column="metric of the world that was left", value=tuple(references), decimals=3)


def cells(
    spec: str, names: Sequence[str], seeds: Sequence[int], steps: int, directory: Path
) -> Cells:
    references: dict[int, list[float | None]] = {}

    def cases(name: str) -> Iterator[Row]:
        scenario = SCENARIOS[name]
        found = measure(spec, scenario, seeds, steps, directory / name)
        left = scenario.num_left
        if left not in references:
            references[left] = reference(spec, left, seeds, steps, directory)
        pairs = zip(references[left], found.metrics, strict=True)
        worse = [None if a is None or b is None else 100 * (a - b) for a, b in pairs]
        yield from figures(shown(name), found, references[left])
        yield from goals(shown(name), found, estimate(worse, signed=True), len(seeds))

    def shown(name: str) -> str:
        return name if spec == STRATEGY else f"{name}, {spec}"

    return {shown(name): partial(cases, name) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser()
    add_output_options(parser)
    parser.add_argument(
        "--quick", action="store_true", help="one seed, 60 steps: only to see that it runs"
    )
    parser.add_argument("--strategy", default=STRATEGY, help="default: %(default)s")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS), help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="how many; default: %(default)s")
    parser.add_argument(
        "--keep", type=Path, help="directory for the records; by default they are thrown away"
    )
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        seeds, steps = 1 if asked.quick else asked.seeds, 60 if asked.quick else STEPS
        names, directory = asked.scenarios.split(","), asked.keep or Path(temporary)
        found_cells = cells(asked.strategy, names, range(seeds), steps, directory)
        present(found_cells, asked, seeds=seeds)


if __name__ == "__main__":
    main()
