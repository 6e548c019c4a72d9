"""Runs a user's script as one rank: as `python -m offbeat.run.worker RUN/config.json` under a
supervisor, or within the process that torchrun or srun has started.

The script is run as Python would run it: its own `sys.argv`, its directory first in `sys.path`, the
name `__main__`. Its exit status is this process's.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from offbeat.errors import OffbeatError
from offbeat.run import patches
from offbeat.run.children import CHILD_VARIABLE
from offbeat.run.config import RunConfig, ScriptCommand
from offbeat.run.coordination import group_coordinator, supervised_coordinator
from offbeat.run.coupling import ScriptSessions, is_good_end
from offbeat.run.interrupts import exit_at_stop_signals
from offbeat.run.progress import Failure, Remark, Report, Reporter, pipe_reporter
from offbeat.run.recipes import ScriptRecipe, recipe_for
from offbeat.run.recording import OpenRecord, ScriptRecorder, shared_record
from offbeat.run.records import RunDirectory
from offbeat.session.attach import AttachOverride, overriding
from offbeat.session.metrics import listening
from offbeat.transport.connect import is_returning

_OTHER_HOSTS_S = 60.0
"""For how long the end of a run waits for ranks of other hosts."""


def carry_out(
    config: RunConfig,
    recipe: ScriptRecipe,
    recorder: ScriptRecorder,
    report: Reporter,
    *,
    rank: int,
) -> int:
    """Run a script to its end, as one rank; returns its exit status.

    Args:
        config: of the run.
        recipe: what is put into the script.
        recorder: of this rank.
        report: hears of a failure.
        rank: of this process.
    """
    assert config.script is not None
    script = config.script
    sessions = ScriptSessions(recipe, recorder)
    error = _run(script, recipe, sessions, recorder)
    if error is not None and not is_good_end(error):
        recorder.abandon()
        return _fail(error, script, report, rank)
    if (complaint := sessions.complaint(script.path)) is None:
        recorder.end()
        return 0
    # It may have trained in processes of its own, or have left before it made anything, as at
    # `--help`.
    trains_here = sessions.num_ddp_models or sessions.trains_without_session
    trains_elsewhere = sessions.num_processes and not trains_here
    has_left = error is not None and not sessions.has_made_anything
    return 0 if trains_elsewhere or has_left else _fail(complaint, script, report, rank)


def _run(
    script: ScriptCommand,
    recipe: ScriptRecipe,
    sessions: ScriptSessions,
    recorder: ScriptRecorder,
) -> BaseException | None:
    """What ended the script, if it did not come to its end."""
    process = os.getpid()
    with patched_for(recipe, sessions), listening(recorder):
        try:
            run_as_main(script)
        except BaseException as error:  # noqa: BLE001 - however it ended, peers must hear of it
            if os.getpid() != process:
                _end_forked(error)
            with suppress(OffbeatError):
                sessions.close(error)
            return error
        if os.getpid() != process:
            _end_forked(None)
        sessions.close(None)
    return None


def _fail(error: BaseException, script: ScriptCommand, report: Reporter, rank: int) -> int:
    """Say what has gone wrong; returns the exit status."""
    has_printed = not isinstance(error, OffbeatError | SystemExit)
    failure = Failure.of(error, rank=rank, has_printed=has_printed)
    status = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if isinstance(error, SystemExit):
        status = _status_of(error)
        failure = replace(failure, message=f"the script called sys.exit({error.code!r})")
    elif isinstance(error, OffbeatError):
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == script.path]
        if lines and not str(error).startswith(script.path):
            message = f"{script.path}, line {lines[-1]}: {failure.message}"
            failure = replace(failure, message=message)
    else:
        shown = error.with_traceback(_of_the_script(error.__traceback__))
        sys.excepthook(type(shown), shown, shown.__traceback__)
    report(failure)
    return status


def _status_of(error: SystemExit) -> int:
    """The exit status that Python gives by it. What is no number is printed, as Python does."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    sys.stderr.write(f"{error.code}\n")
    return 1


def _of_the_script(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames that only start the script."""
    starting = (__file__, runpy.run_path.__code__.co_filename)
    while trace is not None and trace.tb_frame.f_code.co_filename in starting:
        trace = trace.tb_next
    return trace


@contextmanager
def patched_for(recipe: ScriptRecipe, sessions: ScriptSessions) -> Iterator[None]:
    """All that a script finds changed while it runs."""
    override = AttachOverride(
        replace=sessions.replacement,
        wrap=recipe.wrap,
        attached=sessions.attached_by_script,
    )
    with ExitStack() as stack:
        stack.enter_context(
            patches.patched(
                sessions, exchanges=recipe.ddp_exchanges, ddp_options=recipe.ddp_options
            )
        )
        stack.enter_context(patches.processes_wrapped(sessions.process_made))
        stack.enter_context(overriding(override))
        if is_returning():
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            stack.enter_context(patches.beside_the_group(rank, world_size))
        yield


def run_as_main(script: ScriptCommand) -> None:
    """Run `script` as Python would."""
    sys.argv = [script.path, *script.arguments]
    if script.as_module:
        sys.path[0] = os.getcwd()  # noqa: PTH109 - a string is what belongs there
        runpy.run_module(script.path, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(script.path).resolve().parent)
        runpy.run_path(script.path, run_name="__main__")


def run_supervised(
    make_recorder: Callable[..., ScriptRecorder] = ScriptRecorder,
    make_recipe: Callable[[RunConfig, OpenRecord], ScriptRecipe] = lambda run, _: recipe_for(run),
    obey: Callable[[str], None] = lambda line: None,
) -> int:
    """Entry point of a supervised worker: run the script of the record that the command line names;
    returns the exit status.

    Args:
        make_recorder: makes the recorder of this rank, by the arguments of `ScriptRecorder`.
        make_recipe: makes what is put into the script.
        obey: is called with each line that the supervisor writes.
    """
    (config_path,) = sys.argv[1:]
    record = RunDirectory(Path(config_path).resolve().parent)
    listen_to_supervisor(obey)
    report = pipe_reporter()
    exit_at_stop_signals()
    coordinator = supervised_coordinator()
    config = record.config
    os.environ[CHILD_VARIABLE] = config.to_json()
    opened = OpenRecord(record=record, coordinator=coordinator)
    # Where a host has gone nobody is left to say that its workers have died.
    patience_s = None if os.environ.get("GROUP_WORLD_SIZE", "1") == "1" else _OTHER_HOSTS_S
    recorder = make_recorder(lambda: opened, report, stop_after=config.steps, patience_s=patience_s)
    recipe = make_recipe(config, opened)
    return carry_out(config, recipe, recorder, report, rank=coordinator.rank)


def run_launched(config: RunConfig, out: Path | None, *, rank: int) -> int:
    """Run the script as the rank that torchrun or srun has made this process; returns its exit
    status.

    Args:
        config: from `script_config`, of as many workers as were launched.
        out: directory of the record; None: the next free one below runs/.
        rank: of this process.
    """
    os.environ[CHILD_VARIABLE] = config.to_json()
    recorder = ScriptRecorder(
        lambda: shared_record(group_coordinator(), config, out), _say, stop_after=config.steps
    )
    # What torch.distributed reads, where srun has set variables of its own.
    os.environ.setdefault("RANK", str(rank))
    os.environ.setdefault("WORLD_SIZE", str(config.workers))
    if local := os.environ.get("SLURM_LOCALID"):
        os.environ.setdefault("LOCAL_RANK", local)
    return carry_out(config, recipe_for(config), recorder, _say, rank=rank)


def _say(report: Report) -> None:
    match report:
        case Failure():
            sys.stderr.write(f"offbeat: rank {report.rank}: {report.message}\n")
        case Remark():
            sys.stderr.write(f"offbeat: rank {report.rank}: {report.text}\n")


def main_and_exit() -> NoReturn:
    """Be a supervised worker, and end this process."""
    sys.exit(run_supervised())


def _end_forked(error: BaseException | None) -> NoReturn:
    """End a process that the script has forked and that has come to the script's end, or to
    `error`: it has no rank, and session and record are its parent's.
    """
    status = 0
    if isinstance(error, SystemExit):
        status = _status_of(error)
    elif error is not None:
        status = 1
        sys.excepthook(type(error), error, error.__traceback__)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # the script may have closed it
            stream.flush()
    os._exit(status)


def listen_to_supervisor(obey: Callable[[str], None]) -> None:
    """Obey lines on the standard input that the supervisor gave; die when it closes, since the
    supervisor holds its other end and may have been killed. The script gets an empty one.
    """
    orders = os.fdopen(os.dup(0))
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)

    def listen() -> None:
        for line in orders:
            obey(line)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=listen, name="supervisor-watch", daemon=True).start()


if __name__ == "__main__":
    main_and_exit()
