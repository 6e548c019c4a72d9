"""One worker of the lab: it trains a task, or runs a user's script as `offbeat run` does.

Run by the supervisor as `python -m offbeat_lab.worker RUN/config.json`, or forked from
`offbeat_lab.worker_server`.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from offbeat.run.config import RunConfig
from offbeat.run.coordination import Coordinator
from offbeat.run.progress import EXIT_STOPPED, TURNS_VARIABLE, Failure, pipe_reporter
from offbeat.run.recipes import ScriptRecipe
from offbeat.run.recording import OpenRecord
from offbeat.run.worker import listen_to_supervisor, run_supervised
from offbeat_lab.attaching import link_delay, script_recipe
from offbeat_lab.compared_script import ComparedScript
from offbeat_lab.config import recipe_of
from offbeat_lab.joining import join, leave
from offbeat_lab.pauses import StepLimit
from offbeat_lab.records import Record
from offbeat_lab.training import train_rank


def train_task(run_directory: Path, turns: StepLimit, obey: Callable[[str], None]) -> int:
    """Train the task of a record; returns the exit status."""
    listen_to_supervisor(obey)
    report = pipe_reporter()
    coordinator: Coordinator | None = None
    try:
        coordinator = join()
        summary = train_rank(run_directory, coordinator, report, limit=turns)
        leave()
    except Exception as error:  # noqa: BLE001 - the supervisor wants to know of every kind
        report(Failure.of(error, rank=coordinator.rank if coordinator else -1))
        with suppress(OSError):  # a full disk takes no log
            traceback.print_exc()
        return 1
    return 0 if summary is None or summary.status == "finished" else EXIT_STOPPED


def run_script(turns: StepLimit, obey: Callable[[str], None]) -> int:
    """Run the script of the record that the command line names; returns the exit status."""

    def recipe(config: RunConfig, opened: OpenRecord) -> ScriptRecipe:
        return script_recipe(recipe_of(config), link_delay(opened.record, opened.coordinator.rank))

    return run_supervised(partial(ComparedScript, turns=turns), recipe, obey)


def main_and_exit() -> NoReturn:
    """Be a supervised worker, and end this process."""
    run_directory = Path(sys.argv[1]).parent
    turns = StepLimit(0) if TURNS_VARIABLE in os.environ else StepLimit.unlimited()

    def obey(line: str) -> None:
        turns.raise_to(int(line))

    if Record(run_directory).config.script is not None:
        sys.exit(run_script(turns, obey))
    status = train_task(run_directory, turns, obey)
    # Not sys.exit: after a failure, threads and groups that wait for a dead peer must not keep this
    # process alive.
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    main_and_exit()
