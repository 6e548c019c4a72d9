"""`offbeat demo`: real digits on four workers behind a slow network, with DDP, with gTop-k, and
with a peer.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from offbeat_lab.cli import comparing
from offbeat_lab.cluster import Cluster, LinkSpec
from offbeat_lab.compare import CompareRequest, plan_comparison, run_comparison
from offbeat_lab.report.page import write_report

_LEAST_ACCURACY = 0.95
_STRATEGIES: Final = ("ddp", "gtopk:density=0.01", "ddp-powersgd:rank=2")
_PROMISED: Final = ("ddp", "gtopk")
_LINK: Final = LinkSpec(rate_bit_per_s=100e6)


def run(*, workers: int, out: Path | None, as_json: bool) -> int:
    """Compare, print, and return the exit status: 0 when DDP and gTop-k reach the accuracy that the
    demo promises.

    Args:
        workers: processes for each run.
        out: new directory for the comparison; by default the first free `runs/demo-001`, `-002`,
            ...
        as_json: print one line of JSON in place of the table.
    """
    request = CompareRequest(
        task="digits",
        strategies=_STRATEGIES,
        cluster=Cluster(name="demo", workers=workers, link=_LINK),
        seeds=(0,),
        turn_s=2.0,
    )
    plan = plan_comparison(request, out=_first_free() if out is None else out)
    with comparing.comparison_display(quiet=as_json) as listener:
        directory, comparison = run_comparison(plan, listener, command="offbeat demo")
    if comparison.status == "stopped":
        print(f"stopped; what was recorded so far is in {directory}", file=sys.stderr)
        return 130
    page = write_report(directory)
    if as_json:
        print(comparison.model_dump_json())
    else:
        comparing.print_comparison(comparison, directory, page)
    status = 0
    for contestant in comparison.contestants:
        if contestant.label in _PROMISED:
            final = contestant.measures.get("final_metric")
            if final is None or final.median is None or final.median < _LEAST_ACCURACY:
                print(
                    f"offbeat: {contestant.label} did not reach the accuracy {_LEAST_ACCURACY} that"
                    " the demo promises",
                    file=sys.stderr,
                )
                status = 1
    return status


def _first_free() -> Path:
    number = 1
    while (path := Path("runs") / f"demo-{number:03d}").exists():
        number += 1
    return path
