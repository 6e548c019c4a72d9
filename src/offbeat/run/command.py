"""`offbeat run` and `offbeat strategies`: what the command line offers with the library alone.

The script's own output comes first; offbeat says little.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import offbeat
from offbeat.errors import ConfigError, OffbeatError
from offbeat.strategies.registry import REGISTRY

if TYPE_CHECKING:
    from offbeat.strategies.base import Strategy
    from offbeat.strategies.by_name import Option

EXIT_FAILED: Final = 1
EXIT_MISUSED: Final = 2

_COMMANDS: Final = """\
run [OPTIONS] SCRIPT [ARGUMENTS]...   run your own script with a strategy
strategies [NAME]                     list the strategies, or one with its options"""


def main(words: Sequence[str]) -> int:
    """The command line of the library alone; returns the exit status.

    Args:
        words: after `offbeat`.

    Raises:
        ConfigError: no such command, or it cannot be carried out as asked.
    """
    command, *rest = words or ["--help"]
    if command == "run":
        return run_command(rest)
    if command == "strategies":
        return strategies_command(rest)
    parser = argparse.ArgumentParser(
        prog="offbeat",
        usage="offbeat COMMAND ...",
        description="Train PyTorch models on slow links and uneven devices.",
        epilog=_COMMANDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"offbeat {offbeat.__version__}")
    parser.parse_args([command])
    raise AssertionError("every word that is no command ends the parser")


@contextmanager
def errors_in_a_line() -> Iterator[None]:
    """What offbeat raises on purpose, and what this user may not open, becomes one line and an exit
    status.
    """
    try:
        yield
    except OffbeatError as error:
        sys.stderr.write(f"offbeat: {error}\n")
        sys.exit(EXIT_MISUSED if isinstance(error, ConfigError) else EXIT_FAILED)
    except PermissionError as error:
        sys.stderr.write(f"offbeat: permission denied: {error.filename or error}\n")
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt:  # before there are workers, or while torch is imported
        sys.stderr.write("offbeat: interrupted\n")
        sys.exit(128 + signal.SIGINT)


def main_and_exit() -> None:
    """`main` as a process."""
    with errors_in_a_line():
        sys.exit(main(sys.argv[1:]))


def strategies_command(words: Sequence[str]) -> int:
    """`offbeat strategies [NAME]`. Raises `ConfigError`: there is none of this name."""
    parser = argparse.ArgumentParser(
        prog="offbeat strategies",
        description="List the strategies, a line each; or one of them, with its options, their"
        " meaning, what is allowed and the default.",
        epilog="Example: offbeat strategies gtopk",
    )
    parser.add_argument("name", nargs="?", help="only this one, such as gtopk")
    name = parser.parse_args(words).name
    sys.stdout.write("\n".join(strategy_lines() if name is None else option_lines(name)) + "\n")
    return 0


def strategy_lines() -> list[str]:
    """The strategies of the registry by family, a line each."""
    width = max(map(len, REGISTRY))
    lines: list[str] = []
    for family, entries in REGISTRY.families.items():
        lines += [f"{family}:"] if not lines else ["", f"{family}:"]
        lines += [f"  {entry.name:{width}}  {entry.summary} ({entry.paper})" for entry in entries]
    return lines


def option_lines(name: str) -> list[str]:
    """A strategy and its options, as text. Raises `ConfigError`: there is none of this name."""
    from offbeat.strategies.by_name import options_of, strategy_type  # which import torch

    kind: type[Strategy] = strategy_type(name)
    entry = REGISTRY.entries[name]
    return described_lines(f"{name}  {entry.summary} ({entry.paper})", options_of(kind))


def described_lines(title: str, options: Iterable[Option]) -> list[str]:
    """What can be chosen, and its options, two lines each."""
    lines = [title]
    for option in options:
        default = " (required)" if option.default == "required" else f" = {option.default}"
        lines += [f"  {option.name}{default}  {option.allowed}", f"      {option.help}"]
    return lines


def run_command(
    words: Sequence[str], finished: Callable[[Path], None] = lambda directory: None
) -> int:
    """`offbeat run`; returns the exit status.

    Args:
        words: after `run`.
        finished: is called with the directory of a record that is complete.

    Raises:
        ConfigError: it cannot be done as asked.
        RecordError: the directory is in use.
    """
    parser = argparse.ArgumentParser(
        prog="offbeat run",
        usage="offbeat run [OPTIONS] SCRIPT [ARGUMENTS]...",
        description="Run your own script with a strategy. It needs no change if it uses"
        " DistributedDataParallel. Under torchrun or srun this process is one rank.",
        epilog="Example: offbeat run --strategy gtopk:density=0.01 --workers 4 train.py --epochs 3",
        allow_abbrev=False,
    )
    add = parser.add_argument
    # fmt: off
    add("--strategy", default="allreduce", metavar="NAME", help="how workers exchange, with options"
        " after colons: gtopk:density=0.01; `offbeat strategies` lists them (default: allreduce)")
    add("--workers", type=int, metavar="N", help="processes to start on this machine (default: 4)")
    add("-m", "--module", action="store_true", help="SCRIPT is a module, as for python -m")
    add("--restarts", type=int, default=0, metavar="N",
        help="how often workers that die are started again (default: 0)")
    add("--steps", type=int, metavar="N", help="end the script after so many optimizer steps")
    add("--rendezvous", metavar="HOST:PORT", help="of the first of several hosts")
    add("--nodes", type=int, metavar="N", help="how many hosts there are")
    add("--node-rank", type=int, metavar="N", help="which of them this is, from 0")
    add("--metric", metavar="NAME",
        help="which logged value counts (default: the first that is not the loss)")
    add("--log-to", default="", metavar="NAMES",
        help="live metrics: tensorboard, wandb, mlflow, opentelemetry, several with commas")
    add("--out", type=Path, metavar="DIR",
        help="new directory for the record (default: one below runs/)")
    add("words", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGUMENTS]...", help="as for python")
    # fmt: on
    given = parser.parse_args(words)
    return _run(given, finished)


def _run(given: argparse.Namespace, finished: Callable[[Path], None]) -> int:
    """Run a script, with workers of its own or as the rank that this process is, and say what the
    user should know. Arguments and result are those of `run_command`.
    """
    from offbeat.run.plan import DEFAULT_WORKERS, check_strategy_name, script_command, script_config

    script = script_command(given.words, as_module=given.module, metric=given.metric)
    check_strategy_name(given.strategy, script.path)
    # What imports torch is imported once the words are known to be right.
    from offbeat.run.progress import MembershipChange, WorkerProgress
    from offbeat.run.supervise import meet, meeting, run_script
    from offbeat.run.worker import run_launched
    from offbeat.transport.connect import launched

    where = meeting(given.rendezvous, given.nodes, given.node_rank)
    if given.restarts < 0:
        raise ConfigError(f"--restarts is {given.restarts}; allowed is 0 or more")
    loggers = [name.strip() for name in given.log_to.split(",") if name.strip()]
    config_of = partial(script_config, script, given.strategy, steps=given.steps, log_to=loggers)
    # Where hosts are named this process supervises its own, whoever has started it on them.
    launch = None if where is not None else launched()
    if launch is not None:
        if given.workers is not None and given.workers != launch.world_size:
            raise ConfigError(
                f"--workers {given.workers}, but {launch.world_size} processes were launched; leave"
                " --workers out or launch as many"
            )
        if given.restarts:
            raise ConfigError(
                f"--restarts {given.restarts} is for workers that offbeat run starts itself, and"
                " something else has launched these; leave it out, and let that one start them"
                " again, as torchrun --max-restarts does"
            )
        return run_launched(config_of(workers=launch.world_size), given.out, rank=launch.rank)
    num_workers = DEFAULT_WORKERS if given.workers is None else given.workers
    config, host = config_of(workers=num_workers), None
    if where is not None:
        host = meet(where, num_workers)
        config = config_of(workers=host.num_of_all_hosts)
    said: set[str] = set()

    def say_once(notice: str) -> None:
        if notice not in said:
            said.add(notice)
            _say(f"note ({config.strategy}): {notice}")

    def say_change(report: WorkerProgress | MembershipChange) -> None:
        if isinstance(report, MembershipChange):
            _say(report.text)

    outcome = run_script(
        config,
        out=given.out,
        restarts=given.restarts,
        host=host,
        on_progress=say_change,
        on_notice=say_once,
        say=_say,
    )
    if outcome.problem is not None:
        _say(f"offbeat: {outcome.problem}")
    elif outcome.summary is None:
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


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
