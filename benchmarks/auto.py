"""Does `Auto` find the strategy that is done first, and what does finding it cost?

Four workers behind emulated links train with `Auto`, with three seeds, and with each of its
candidates, with one. Steps are padded, so that two cores can stand for four accelerators. In every
other situation one random worker is late in each step. A strategy's step is the mean of those after
it has settled; the worth of a step is that of `Auto`'s table
(`benchmarks/studies/steps_to_equal.py`).

A run of 2,000 steps is what is judged, of which only a few hundred are made: what `Auto` spends
until its strategy has settled was measured, and the steps after it are taken to be like those that
were.

    time to equal quality at most 1.1 times that of the best single strategy
    never more than 1.03 times DDP's
    what measuring takes, beyond the steps meanwhile, at most 1% of the run
    after all steps never more than .5 points below AllReduce, which links do not change

Where two of the four workers take twice as long for a sample, and `session.loader` shares samples
out, the bound is the workers' summed speed.

    python benchmarks/auto.py [--json] [--sizes SIZE,...] [--links LINK,...] [--seeds N]
        [--results DIR] [--keep DIRECTORY]
    python benchmarks/auto.py --speeds [--json] [--results DIR]
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Final

import numpy as np
import torch

import offbeat
from _measure import Cells, Ratio, Row, add_output_options, present, ratio
from _ranks import run_ranks
from _results import Figure
from links import watched
from offbeat.strategies.choice import CANDIDATES, FIRST_LOOK, SETTLING
from offbeat_lab.breakdown import read_steps
from offbeat_lab.cluster import Cluster, LinkSpec, Straggling
from offbeat_lab.compare import CompareRequest, plan_comparison
from offbeat_lab.records import Record

SIZES: Final = ("tiny", "small", "medium")
LINKS: Final = {
    "10 Gbit/s": LinkSpec(rate_bit_per_s=1e10),
    "1 Gbit/s": LinkSpec(rate_bit_per_s=1e9),
    "100 Mbit/s": LinkSpec(rate_bit_per_s=1e8),
    "unlike": LinkSpec(rate_bit_per_s=1e9),
}
SLOW_LINK: Final = LinkSpec(rate_bit_per_s=1e8)
"""Of one worker of four, where links are unlike."""
WORKERS, STEP_S, DELAY_S = 4, 0.06, 0.04
STEPS, OF_A_RUN, LAST = 500, 2000, 60
"""That are made, that a run has, and of which a strategy's step is the mean."""
FEW: Final = 100
"""Steps of a strategy without a warm-up."""
_ONE_TURN_S = 1e6
SINGLE: Final = ("ddp", *CANDIDATES)
WITHOUT_WARMUP: Final = ("ddp", "allreduce")
TABLE: Final = "situations"
AVERAGES: Final = re.compile(r"had (\d+) averages")
"""In what WAGMA says at the end."""


def cluster_of(link: str, *, late: bool) -> Cluster:
    straggling = (Straggling(workers=1, delay_s=DELAY_S),) if late else ()
    links = {0: SLOW_LINK} if link == "unlike" else {}
    return Cluster(
        workers=WORKERS, link=LINKS[link], links=links, straggling=straggling, step_s=STEP_S
    )


def runs_of(
    size: str,
    strategies: Sequence[str],
    cluster: Cluster,
    out: Path,
    *,
    seeds: int = 1,
    steps: int = STEPS,
) -> dict[str, list[Record]]:
    """The runs by strategy, one for each seed. What failed has none."""
    request = CompareRequest(
        task="digits",
        strategies=strategies,
        settings=(f"size={size}", "batch_size=8"),
        cluster=cluster,
        seeds=range(seeds),
        steps=steps,
        eval_every=steps,
        turn_s=_ONE_TURN_S,
    )
    plan = plan_comparison(request, out=out)
    directory, comparison = watched(plan)
    return {
        spec: [Record(directory / run) for run in one.runs]
        for spec, one in zip(strategies, comparison.strategies, strict=True)
        if one.failure is None
    }


def situation(size: str, link: str, *, late: bool, seeds: int, keep: Path) -> Iterator[Row]:
    name = f"{size}, {link}{', one late' if late else ''}"
    out, cluster = keep / name.replace(", ", "-").replace(" ", "-"), cluster_of(link, late=late)
    others = [each for each in SINGLE if each not in WITHOUT_WARMUP]
    single = runs_of(size, WITHOUT_WARMUP, cluster, out / "dense", steps=FEW)
    single |= runs_of(size, others, cluster, out / "others")
    (autos,) = runs_of(size, ("auto",), cluster, out / "auto", seeds=seeds).values()
    unlinked = Cluster(workers=WORKERS)
    (exact,) = runs_of(size, ("allreduce",), unlinked, out / "exact", seeds=seeds).values()

    step_s = {each: last_step_s(run) for each, (run,) in single.items()}
    run_s = {each: worth_of(each, run) * seconds_of(run) for each, (run,) in single.items()}
    best = min(run_s, key=lambda each: run_s[each])
    auto_s, measuring_s = [], []
    for run in autos:
        durations_s, look = read_steps(run).step_s(), looked_after(run)
        first_s = float(np.sum(durations_s[: look + 1]))
        later_s = seconds_of(run) - first_s
        auto_s.append(first_s + later_s * worth_of(chosen_in(run), run))
        # What measuring took lies in the step after which it was done, or in the next one.
        around = durations_s[look - 1 : look + 2]
        before = float(np.median(durations_s[SETTLING : look - 1]))
        measuring_s.append(max(0.0, float(np.sum(around)) - 3 * before))

    cell = partial(Figure, table=TABLE, case=name)
    yield cell(column="chosen", value=", ".join(dict.fromkeys(map(chosen_in, autos))))
    yield cell(column="first", value=best)
    step_s = {"auto": float(np.mean([last_step_s(run) for run in autos]))} | step_s
    for each in ("auto", *SINGLE):
        if each in step_s:
            yield cell(column=f"{each}, ms", value=1e3 * step_s[each], decimals=0)
    yield judged(f"{name}, over {best}", [each / run_s[best] for each in auto_s], 1.1)
    yield judged(f"{name}, over DDP", [each / run_s["ddp"] for each in auto_s], 1.03)
    shares = [took_s / run_s for took_s, run_s in zip(measuring_s, auto_s, strict=True)]
    yield judged(f"{name}, measuring, of a run", shares, 0.01, bound=0.0)
    points = [
        100 * (metric_of(there) - metric_of(here)) for here, there in zip(autos, exact, strict=True)
    ]
    yield judged(f"{name}, below AllReduce", points, 0.5, unit="points", bound=0.0)


def last_step_s(run: Record) -> float:
    return float(np.mean(read_steps(run).step_s()[-LAST:]))


def seconds_of(run: Record) -> float:
    """Of a run of `OF_A_RUN` steps, whose further ones are like the last ones that were made."""
    made_s = read_steps(run).step_s()
    return float(np.sum(made_s)) + last_step_s(run) * (OF_A_RUN - len(made_s))


def worth_of(strategy: str, run: Record) -> float:
    """Steps of it that are worth one of AllReduce, with the averages that `run` had in a step."""
    candidate, summary = CANDIDATES.get(strategy), run.summary()
    if candidate is None or summary is None:
        return 1.0
    counts = [float(n) for told in summary.notices for n in AVERAGES.findall(told)]
    began = summary.decisions[-1].step if summary.decisions else 0
    averages = fmean(counts) / (summary.steps - began) if counts else 1.0
    return candidate.sgd.with_averages(averages).mean


def metric_of(run: Record) -> float:
    summary = run.summary()
    if summary is None or summary.metric is None:
        raise SystemExit(f"{run.path} has no metric")
    return summary.metric


def judged(
    case: str, values: Sequence[float], limit: float, *, unit: str = "x", bound: float = 1.0
) -> Ratio:
    """The mean over seeds; the interval is their range, which one seed does not have."""
    low, high = min(values), max(values)
    return Ratio(
        case=case,
        value=fmean(values),
        unit=unit,
        goal=f"at most {limit:g}",
        holds="undecided" if len(values) < 2 or low <= limit < high else high <= limit,
        bound=bound,
        interval=(low, high),
    )


def looked_after(record: Record) -> int:
    """How many steps it was when candidates were predicted first."""
    summary = record.summary()
    return summary.decisions[0].step if summary and summary.decisions else FIRST_LOOK


def chosen_in(record: Record) -> str:
    """What was at work at the end."""
    summary = record.summary()
    return summary.decisions[-1].after if summary and summary.decisions else "allreduce"


SAMPLE_S: Final = (0.002, 0.002, 0.004, 0.004)
"""What a sample takes on each worker."""
BATCH, STEPS_OF_EPOCH, EPOCHS, SPEEDS = 16, 50, 6, "unlike speeds"


def unlike_speeds() -> Iterator[Row]:
    """Seconds of epochs over those at the summed speed."""
    num_samples = BATCH * WORKERS * STEPS_OF_EPOCH
    bound_s = num_samples / sum(1 / each for each in SAMPLE_S)
    later_s = {}
    for name in ("allreduce", "auto", "adaptive"):
        epochs_s = np.array([run_ranks(paced, WORKERS, name) for _ in range(3)])
        later_s[name] = epochs_s[:, 1:].mean(axis=1)
        yield Figure(
            table=SPEEDS, case=name, column="first epoch, s", value=float(np.median(epochs_s[:, 0]))
        )
        yield Figure(
            table=SPEEDS,
            case=name,
            column="later ones, s",
            value=float(np.median(epochs_s[:, 1:])),
            bound=bound_s,
        )
    yield ratio(
        "unlike speeds, an epoch over AllReduce's",
        list(zip(later_s["auto"], later_s["allreduce"], strict=True)),
        bound=bound_s / (BATCH * STEPS_OF_EPOCH * max(SAMPLE_S)),
        at_most=0.75,
    )


def paced(rank: int, world_size: int, name: str) -> list[float]:
    """Seconds of each epoch of a rank whose samples take `SAMPLE_S`."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 8)
    model.register_forward_hook(lambda _, __, output: time.sleep(len(output) * SAMPLE_S[rank]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = torch.randn(BATCH * world_size * STEPS_OF_EPOCH, 64)
    found = []
    with offbeat.attach(model, optimizer, name) as session:
        loader = session.loader(samples, batch_size=BATCH)
        for _ in range(EPOCHS):
            begin_s = time.perf_counter()
            for x in loader:
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(time.perf_counter() - begin_s)
    return found


def cells(sizes: list[str], links: list[str], seeds: int, keep: Path) -> Cells:
    return {
        f"{size}, {link}{', one late' if late else ''}": partial(
            situation, size, link, late=late, seeds=seeds, keep=keep
        )
        for place, size in enumerate(SIZES)
        for number, link in enumerate(LINKS)
        for late in [(place + number) % 2 == 1]
        if size in sizes and link in links
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_output_options(parser)
    parser.add_argument("--sizes", default=",".join(SIZES), help="default: %(default)s")
    parser.add_argument("--links", default=",".join(LINKS), help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument(
        "--keep", type=Path, help="directory for the comparisons; by default they are thrown away"
    )
    parser.add_argument(
        "--speeds", action="store_true", help="workers of unlike speeds, in the place of links"
    )
    asked = parser.parse_args()
    if asked.speeds:
        present({SPEEDS: unlike_speeds}, asked)
        raise SystemExit
    with tempfile.TemporaryDirectory() as temporary:
        directory = asked.keep or Path(temporary)
        sizes, links = asked.sizes.split(","), asked.links.split(",")
        present(cells(sizes, links, asked.seeds, directory), asked, seeds=asked.seeds)
