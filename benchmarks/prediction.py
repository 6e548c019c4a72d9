"""`offbeat plan` against the lab: predicted and measured steps, cell by cell, on emulated clusters.

A cell is a number of workers, a link, and stragglers or none. All its strategies take turns in one
comparison, `alone` among them. The profile is `offbeat profile`'s of the same task, with the step
that `alone` took in the cell: what workers that share cores cost each other is in it, and what the
exchange adds to that is not. A prediction is good if it is within 15% of the measured step;
strategies are in the right order where their measured steps differ by more than that.

    python benchmarks/prediction.py [--json] [--workers 2,4,8] [--links 100mbit,1gbit]
    [--delays none,1x100ms] [--strategies ...] [--steps 60]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from math import log
from pathlib import Path
from statistics import median

import numpy as np

from _measure import Row, add_output_options, present
from _results import Figure
from links import Quiet
from offbeat.errors import ConfigError
from offbeat.lab.breakdown import read_steps
from offbeat.lab.cluster import from_flags
from offbeat.lab.compare import CompareRequest, plan_comparison, run_comparison
from offbeat.lab.records import Record
from offbeat.lab.statistics import num_warm_up
from offbeat.plan.measure import measure_task
from offbeat.plan.predictions import predict_step
from offbeat.plan.simulation import Setting

TASK = "digits"
STRATEGIES = (
    "ddp",
    "ddp-fp16",
    "ddp-powersgd",
    "allreduce",
    "gtopk:density=0.001:collective=reduce_scatter",
    "gtopk:density=0.001:collective=tree",
    "localsgd",
    "wagma",
    "dpsgd",
    "spdkfac",
)
WITHIN = 0.15


def run(
    workers: int, link: str, delay: str, specs: Sequence[str], steps: int, settings: Sequence[str]
) -> Iterator[Row]:
    cluster = from_flags(workers=workers, link=link, delay=delay)
    where = f"{workers} workers, {link}, stragglers {delay}"
    request = CompareRequest(
        task=TASK,
        strategies=specs,
        settings=settings,
        cluster=cluster,
        seeds=(0,),
        steps=steps,
        eval_every=steps,
    )
    measured_s: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as keep:
        plan = plan_comparison(request, out=Path(keep) / "comparison")
        directory, comparison = run_comparison(
            plan, Quiet(), command="python benchmarks/prediction.py"
        )
        runs = {"alone": directory / "runs/alone-seed-0"}
        runs |= {
            spec: directory / contestant.runs[0]
            for spec, contestant in zip(specs, comparison.contestants, strict=True)
            if contestant.failure is None
        }
        for spec, record in runs.items():
            found = read_steps(Record(record))
            settled = found.window(num_warm_up(found.num_steps))
            measured_s[spec] = float(np.nanmean(settled.duration_s))
    profile = measure_task(TASK, settings, steps=5)
    late_s = sum(one.delay_s * one.probability for one in cluster.straggling) / workers
    profile = profile.with_step(
        batch_size=profile.batch.batch_size,
        forward_backward_s=measured_s["alone"] - profile.optimizer_s - late_s,
        device=profile.device,
    )
    setting = Setting(profile=profile, cluster=cluster)
    errors: list[float] = []
    predicted_s: dict[str, float] = {}
    for spec in specs:
        if spec not in measured_s:
            continue
        try:
            predicted_s[spec] = predict_step(spec, setting).step_s
        except ConfigError:
            continue  # a profile of the lab has no Kronecker factors
        ratio = predicted_s[spec] / measured_s[spec]
        errors.append(abs(log(ratio)))
        case = f"{where}: {spec}"
        yield Figure(case=case, table="steps", column="measured", value=measured_s[spec], unit="s")
        yield Figure(
            case=case, table="steps", column="predicted", value=predicted_s[spec], unit="s"
        )
        yield Figure(case=case, table="steps", column="predicted over measured", value=ratio)
    good = sum(error <= log(1 + WITHIN) for error in errors) / len(errors)
    yield Figure(
        case=f"{where}: strategies within {WITHIN:.0%}",
        value=good,
        goal="at least 0.9",
        holds=good >= 0.9,
    )
    factor = float(np.exp(median(errors)))
    yield Figure(
        case=f"{where}: median factor", value=factor, goal="at most 1.08", holds=factor <= 1.08
    )
    pairs = [
        (first, second)
        for first in predicted_s
        for second in predicted_s
        if measured_s[first] > (1 + WITHIN) * measured_s[second]
    ]
    wrong = sum(predicted_s[first] <= predicted_s[second] for first, second in pairs)
    yield Figure(
        case=f"{where}: pairs apart that are in the wrong order, of {len(pairs)}",
        value=float(wrong),
        decimals=0,
        goal="none",
        holds=not wrong,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    add_output_options(parser)
    parser.add_argument("--workers", default="2,4,8")
    parser.add_argument("--links", default="100mbit,1gbit")
    parser.add_argument("--delays", default="none")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--size", default="large")
    asked = parser.parse_args()
    specs = asked.strategies.split(",")
    settings = (f"size={asked.size}", "batch_size=8")
    cells = {
        f"{workers} {link} {delay} {asked.size}": partial(
            run, int(workers), link, delay, specs, asked.steps, settings
        )
        for workers in asked.workers.split(",")
        for link in asked.links.split(",")
        for delay in asked.delays.split(",")
    }
    present(cells, asked)


if __name__ == "__main__":
    main()
