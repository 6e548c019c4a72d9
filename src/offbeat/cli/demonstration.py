"""`offbeat demo`: the same digits, the same seed, two strategies."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from offbeat.cli import display
from offbeat.errors import RecordError
from offbeat.lab.config import Request
from offbeat.lab.records import Summary
from offbeat.lab.train import plan, train

_LEAST_ACCURACY = 0.95
# The collective is named: on one machine the network costs nothing, and "auto" would rightly choose to send everything.
_RUNS: Final[dict[str, tuple[str, ...]]] = {"allreduce": (), "gtopk": ("density=0.01", "collective=reduce_scatter")}


def run(*, workers: int, out: Path | None, as_json: bool) -> int:
    """Train, print, and return the exit status: 0 when both runs reach the accuracy that the demo promises.

    Args:
        workers: processes for each run.
        out: new directory for both records; by default the first free `runs/demo-001`, `-002`, ...
        as_json: print one line of JSON in place of the table.
    """
    directory = _first_free() if out is None else out
    if directory.exists():
        raise RecordError(f"{directory} exists; choose another --out")
    plans = {
        name: plan(Request(task="digits", strategy=name, workers=workers, settings=settings), out=directory / name)
        for name, settings in _RUNS.items()
    }
    summaries: list[Summary] = []
    for name, planned in plans.items():
        with display.watching(f"digits · {name}", workers) as watcher:
            summary = train(planned, watcher)
        if summary is None:
            return 0
        summaries.append(summary)
        if summary.status != "finished":
            return 130
    reached = all((summary.metric or 0.0) >= _LEAST_ACCURACY for summary in summaries)
    if as_json:
        print(json.dumps({"reached": reached, "runs": [json.loads(summary.model_dump_json()) for summary in summaries]}))
    else:
        display.print_side_by_side(summaries)
        print(_remark(summaries))
    if not reached:
        print(f"offbeat: accuracy below {_LEAST_ACCURACY}, which the demo promises", file=sys.stderr)
    return 0 if reached else 1


def _remark(summaries: Sequence[Summary]) -> str:
    dense, sparse = summaries
    if not sparse.bytes_sent_per_step:
        return "One worker has nobody to send to."
    return (
        f"gTop-k sent {dense.bytes_sent_per_step / sparse.bytes_sent_per_step:.1f} times fewer bytes. On one machine bytes are "
        "nearly free, so compare times on a real network."
    )


def _first_free() -> Path:
    number = 1
    while (path := Path("runs") / f"demo-{number:03d}").exists():
        number += 1
    return path
