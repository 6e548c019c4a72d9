"""A script is run, with workers of its own or as the rank that this process is, and what the user
should know is said.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from offbeat.errors import ConfigError
from offbeat.run.config import RunConfig
from offbeat.run.hosts import Meeting, meet
from offbeat.run.plan import (
    DEFAULT_WORKERS,
    script_command,
    script_config,
    with_strategys_problem,
)
from offbeat.run.progress import MembershipChange, WorkerProgress
from offbeat.run.supervise import run_script
from offbeat.run.worker import run_launched
from offbeat.transport.connect import launched


def run(
    words: Sequence[str],
    *,
    strategy: str,
    workers: int | None,
    as_module: bool,
    restarts: int,
    steps: int | None,
    metric: str | None,
    log_to: Sequence[str],
    where: Meeting | None,
    out: Path | None,
    finished: Callable[[Path], None] = lambda directory: None,
) -> int:
    """Run a script, with workers of its own or as the rank that this process is. Returns the exit
    status.

    Args:
        words: the script and its arguments.
        strategy, workers, as_module, restarts, steps, metric, log_to, out: as on the command line.
        where: the hosts of the run meet; None if this is the only one.
        finished: is called with the directory of a record that is complete.
    """
    if restarts < 0:
        raise ConfigError(f"--restarts is {restarts}; allowed is 0 or more")
    try:
        script = script_command(words, as_module=as_module, metric=metric)
    except ConfigError as problem:
        raise with_strategys_problem(problem, strategy, words) from None

    def resolved(workers: int) -> RunConfig:
        return script_config(script, strategy, workers=workers, steps=steps, log_to=log_to)

    # Where hosts are named this process supervises its own, whoever has started it on them.
    launch = None if where is not None else launched()
    if launch is not None:
        if workers is not None and workers != launch.world_size:
            raise ConfigError(
                f"--workers {workers}, but {launch.world_size} processes were launched; leave"
                " --workers out or launch as many"
            )
        config = resolved(launch.world_size)
        return run_launched(config, out)
    num_workers = DEFAULT_WORKERS if workers is None else workers
    config = resolved(num_workers)
    host = None
    if where is not None:
        host = meet(where, num_workers)
        config = resolved(host.num_of_all_hosts)
    said: set[str] = set()

    def say_once(notice: str) -> None:
        if notice not in said:
            said.add(notice)
            _say(f"note ({config.strategy}): {notice}")

    outcome = run_script(
        config,
        out=out,
        restarts=restarts,
        host=host,
        on_progress=_say_change,
        on_notice=say_once,
        say=_say,
    )
    if outcome.problem is not None:
        _say(f"offbeat: {outcome.problem}")
        return outcome.status
    if outcome.summary is None:
        _say(
            "offbeat: no step is recorded: the script ended before its first one, or trained in"
            " processes that it started itself"
        )
    else:
        for notice in outcome.summary.notices:
            say_once(notice)
        _say(f"record: {outcome.directory}")
        if host is None:
            finished(outcome.directory)
    return outcome.status


def _say_change(report: WorkerProgress | MembershipChange) -> None:
    if isinstance(report, MembershipChange):
        _say(report.text)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
