"""`offbeat plan` against the lab: predicted and measured steps, cell by cell, on emulated clusters.

All strategies of a number of workers and a link take turns in one comparison, `alone` among them,
and `offbeat plan --check` holds predictions against it: from a profile of the same task, with the
step that `alone` took. Passes are padded as an accelerator would need them, unless `--step-time` is
none: then the machine's cores, which all workers share, are what most cells depend on. A prediction
is good if it is within 15% of the measured step; strategies are in the right order where their
measured steps differ by more than that. Cells whose halves differ by more than 10% are not judged.

With `--results` the grid goes on where it stopped, and its summary is of all cells that are there.
With `--comparisons` the lab's records are kept, and a cell whose record is there is not measured
again but only predicted anew (`--again` in that case means the prediction). With `--apart NAME`
figures go into tables of their own, whose names begin with NAME: predictions that were made before
the cells had told the model anything.

    python benchmarks/prediction.py [--json] [--workers 2,4,8] [--links 100mbit,1gbit]
    [--delays none,1x100ms] [--speeds 1,0.5] [--step-time 100ms] [--strategies ...] [--steps 48]
    [--comparisons build/prediction] [--profile digits.json] [--apart first]
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import median

from _measure import Row, add_output_options, origin, present
from _results import CASES, Figure, ResultFile
from links import watched
from offbeat_lab.cluster import from_flags
from offbeat_lab.compare import CompareRequest, plan_comparison
from offbeat_lab.comparison import read_comparison
from offbeat_lab.plan.check import WITHIN, CheckedStep, check_comparison
from offbeat_lab.plan.measure import measure_task
from offbeat_lab.plan.profile import ModelProfile, read_profile

TASK = "digits"
STRATEGIES = (
    "ddp",
    "ddp-powersgd:start_step=2",
    "gtopk:density=0.01",
    "localsgd:warmup=0:optimizer_state=local",
    "wagma",
    "spdkfac",
)
STEPS = 48
PROFILED_STEPS = 20
SUMMARY = "the grid"
MEASURED, PREDICTED, RATIO = "measured", "predicted", "predicted over measured"
HALVES = "halves of the run differ"


@cache
def profile_of(settings: tuple[str, ...]) -> ModelProfile:
    options = dict(setting.split("=", 1) for setting in settings)
    return measure_task(TASK, options, steps=PROFILED_STEPS)


def run(
    workers: int,
    link: str,
    delay: str,
    step_time: str,
    *,
    specs: Sequence[str],
    steps: int,
    settings: tuple[str, ...],
    speeds: str | None,
    record: Path | None,
    profile: Path | None = None,
    prefix: str = "",
) -> Iterator[Row]:
    """Compare and predict.

    Args:
        workers, link, delay, step_time, speeds: the cluster's.
        specs: strategies.
        steps: of each.
        settings: of the task.
        record: directory of the comparison, which may be there; None: one that is deleted.
        profile: of the task; None: it is measured.
        prefix: of tables.
    """
    cluster = from_flags(
        workers=workers, link=link, delay=delay, step_time=step_time, speeds=speeds
    )
    request = CompareRequest(
        task=TASK,
        strategies=specs,
        settings=settings,
        cluster=cluster,
        seeds=(0,),
        steps=steps,
        eval_every=steps,
    )
    with tempfile.TemporaryDirectory() as short_lived:
        directory = record or Path(short_lived) / "comparison"
        if not directory.exists():
            # A comparison that was stopped leaves no record to predict from.
            under_way = directory.with_name(f"{directory.name}.part")
            shutil.rmtree(under_way, ignore_errors=True)
            plan = plan_comparison(request, out=under_way)
            watched(plan)
            under_way.rename(directory)
        comparison = read_comparison(directory)
        model = profile_of(settings) if profile is None else read_profile(profile)
        found = check_comparison(directory, model)
    where = f"{workers} workers, {link}{_unless_none(', late', delay)}"
    where += f", speeds {speeds}" if speeds else ""
    where += _unless_none(", padded to", step_time)
    for strategy in comparison.strategies:
        if strategy.failure is not None:
            yield Figure(
                case=f"{where}: {strategy.label}",
                table=f"{prefix}failed",
                value=strategy.failure,
            )
    specs_of = {
        strategy.label: spec for strategy, spec in zip(comparison.strategies, specs, strict=True)
    }
    for one in found.steps:
        yield from _rows(f"{where}: {specs_of[one.strategy]}", one, f"{prefix}steps")
    apart, misplaced = len(found.apart), len(found.misplaced)
    for column, value in (("pairs apart", apart), ("in the wrong order", misplaced)):
        yield Figure(
            case=where, table=f"{prefix}order", column=column, value=float(value), decimals=0
        )


def _unless_none(words: str, value: str) -> str:
    return "" if value == "none" else f"{words} {value}"


def _rows(case: str, one: CheckedStep, table: str) -> Iterator[Figure]:
    figure = partial(Figure, case=case, table=table)
    yield figure(column=MEASURED, value=one.measured_s, unit="s")
    if one.predicted_s is None:
        yield figure(column=PREDICTED, value=one.why)
        return
    yield figure(column=PREDICTED, value=one.predicted_s, unit="s")
    yield figure(column=RATIO, value=one.ratio, decimals=2)
    if one.repeats_differ is not None:
        yield figure(column=HALVES, value=one.repeats_differ, decimals=2)
    yield figure(column="judged", value="yes" if one.is_judged else "no")


def summary(figures: Sequence[Figure], prefix: str) -> Iterator[Figure]:
    """Of all cells in tables that begin with `prefix`: the goals, and the misses, worst first."""
    cases, misses = f"{prefix}{CASES}", f"{prefix}misses"

    def column(name: str, table: str = "steps") -> dict[str, object]:
        key = (f"{prefix}{table}", name)
        return {one.case: one.value for one in figures if (one.table, one.column) == key}

    judged = {case for case, word in column("judged").items() if word == "yes"}
    ratios = {
        case: value
        for case, value in column(RATIO).items()
        if case in judged and isinstance(value, float)
    }
    if not ratios:
        return
    errors = {case: math.exp(abs(math.log(ratio))) - 1 for case, ratio in ratios.items()}
    error, good = median(errors.values()), [case for case in errors if errors[case] <= WITHIN]
    share = len(good) / len(errors)
    yield Figure(
        case=f"median error of {len(errors)} judged cells",
        table=cases,
        value=error,
        goal="at most 0.08",
        holds=error <= 0.08,
    )
    yield Figure(
        case=f"cells within {WITHIN:.0%}",
        table=cases,
        value=share,
        goal="at least 0.9",
        holds=share >= 0.9,
    )
    apart, wrong = (
        sum(value for value in column(name, "order").values() if isinstance(value, float))
        for name in ("pairs apart", "in the wrong order")
    )
    yield Figure(
        case=f"pairs in the wrong order, of {apart:.0f} that differ by more than {WITHIN:.0%}",
        table=cases,
        value=wrong,
        decimals=0,
        goal="none",
        holds=not wrong,
    )
    if len(good) == len(errors):
        yield Figure(case="none", table=misses, column=RATIO, value="")
    for case in sorted(errors, key=lambda case: -errors[case]):
        if errors[case] > WITHIN:
            for name in (MEASURED, PREDICTED, RATIO):
                key = (case, f"{prefix}steps", name)
                (figure,) = (one for one in figures if (one.case, one.table, one.column) == key)
                yield Figure(
                    case=case,
                    table=misses,
                    column=name,
                    value=figure.value,
                    unit=figure.unit,
                    decimals=figure.decimals,
                )


def main() -> None:
    parser = argparse.ArgumentParser()
    add_output_options(parser)
    parser.add_argument("--workers", default="2,4,8")
    parser.add_argument("--links", default="100mbit,1gbit")
    parser.add_argument("--delays", default="none")
    parser.add_argument("--step-time", default="100ms")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--size", default="small")
    parser.add_argument("--speeds")
    parser.add_argument("--comparisons", type=Path)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--apart", metavar="NAME")
    asked = parser.parse_args()
    prefix = "" if asked.apart is None else f"{asked.apart} "
    measure = partial(
        run,
        specs=asked.strategies.split(","),
        steps=asked.steps,
        settings=(f"size={asked.size}", "batch_size=8"),
        speeds=asked.speeds,
        profile=asked.profile,
        prefix=prefix,
    )
    cells = {}
    for workers in asked.workers.split(","):
        for link in asked.links.split(","):
            for delay in asked.delays.split(","):
                words = [workers, link, delay, asked.step_time, asked.size]
                words += [asked.speeds] if asked.speeds else []
                words += [] if asked.strategies == ",".join(STRATEGIES) else [asked.strategies]
                words += [] if asked.steps == STEPS else [f"{asked.steps} steps"]
                cell = " ".join(words)
                name = re.sub(r"[^a-z0-9.]+", "-", cell)
                record = None if asked.comparisons is None else asked.comparisons / name
                cells[f"{prefix}{cell}"] = partial(
                    measure, int(workers), link, delay, asked.step_time, record=record
                )
    present(cells, asked)
    if asked.results is not None:
        kept = ResultFile(asked.results / "prediction.jsonl")
        figures = [one.figure for one in kept.results]
        kept.replace(f"{prefix}{SUMMARY}", summary(figures, prefix), origin(None))
        kept.sort(sorted(kept.cells, key=lambda cell: (not cell.endswith(SUMMARY), cell)))


if __name__ == "__main__":
    main()
