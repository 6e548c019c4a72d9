"""What the death of a worker costs the others under `offbeat run --strategy wagma --restarts 1`.

Four workers run a script whose steps take 50 ms each; one of them kills itself (SIGKILL), is
started again as a fresh interpreter, and joins the others. Who it is, and when, is drawn from the
seed. A survivor's stall is what a step took beyond its median step; what it has lost is the sum of
that over all steps from the death to the end.

    it comes back; no stall above 1 s; nobody loses more than 1 s in all

    python benchmarks/run_deaths.py [--json] [--quick] [--seeds N]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from _measure import Ratio, Row, add_output_options, present
from _results import Figure
from offbeat.run.plan import script_command, script_config
from offbeat.run.supervise import run_script
from offbeat_lab.records import Record

WORKERS = 4
STEPS = 400
STEP_S = 0.05
WARM_UP_STEPS = 10
MOST_S = 1.0
SCRIPT = Path(__file__).with_name("_dying_script.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """What one run has shown.

    Attributes:
        stall_s: the longest of a survivor.
        lost_s: by the survivor that has lost most.
        away_s: from the death until the worker trained again; None: it did not come back.
    """

    stall_s: float
    lost_s: float
    away_s: float | None


def measure(seed: int, steps: int) -> Death:
    draws = np.random.default_rng(seed)
    dying, after = int(draws.integers(WORKERS)), int(draws.integers(steps // 8, steps // 4))
    words = [str(SCRIPT), *map(str, (dying, after, steps, STEP_S))]
    with tempfile.TemporaryDirectory() as directory:
        outcome = run_script(
            script_config(script_command(words), "wagma", workers=WORKERS),
            out=Path(directory) / "run",
            restarts=1,
            on_progress=lambda report: None,
            # `run_all.py` reads what comes to the standard output.
            say=partial(print, file=sys.stderr),
        )
        if outcome.problem is not None or outcome.summary is None:
            raise RuntimeError(f"seed {seed}: {outcome.problem}")
        (loss,) = outcome.summary.losses
        excess = {}
        for rank in set(range(WORKERS)) - {dying}:
            durations_s = np.array([e.duration_s for e in Record(outcome.directory).events(rank)])
            excess[rank] = durations_s[after:] - np.median(durations_s[WARM_UP_STEPS:after])
    return Death(
        stall_s=max(float(each.max()) for each in excess.values()),
        lost_s=max(float(each.sum()) for each in excess.values()),
        away_s=None if loss.returned_s is None else loss.returned_s - loss.seconds,
    )


def cases(seeds: int, steps: int) -> Iterator[Row]:
    deaths = [measure(seed, steps) for seed in range(seeds)]
    came_back = sum(death.away_s is not None for death in deaths)
    cell = partial(Figure, table="deaths", case=f"{WORKERS} workers, one killed")
    stalls, lost = ([getattr(each, name) for each in deaths] for name in ("stall_s", "lost_s"))
    yield cell(column="longest stall by seed, s", value=tuple(stalls), decimals=2)
    yield cell(column="most lost by seed, s", value=tuple(lost), decimals=2)
    yield cell(column="away by seed, s", value=tuple(death.away_s for death in deaths), decimals=1)
    for what, found_s in (("longest stall of a survivor's step", stalls), ("most lost", lost)):
        yield Ratio(
            case=f"offbeat run --strategy wagma --restarts 1, one of {WORKERS} killed: {what}",
            value=max(found_s),
            unit="s",
            goal=f"at most {MOST_S:g}",
            holds=max(found_s) <= MOST_S,
            bound=0.0,
            interval=(min(found_s), max(found_s)),
        )
    yield Ratio(
        case=f"offbeat run --strategy wagma --restarts 1, one of {WORKERS} killed: came back",
        value=came_back / seeds,
        unit="x",
        goal="at least 1",
        holds=came_back == seeds,
        bound=1.0,
        interval=(came_back / seeds, came_back / seeds),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    add_output_options(parser)
    parser.add_argument("--quick", action="store_true", help="one seed: only to see that it runs")
    parser.add_argument("--seeds", type=int, default=5, help="how many; default: %(default)s")
    asked = parser.parse_args()
    seeds = 1 if asked.quick else asked.seeds
    present({"wagma": partial(cases, seeds, STEPS)}, asked, seeds=seeds)


if __name__ == "__main__":
    main()
