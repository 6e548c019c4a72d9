"""The `offbeat` command. Nothing heavy is imported before a command needs it: help and version
answer at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated, Final

import typer

import offbeat
from offbeat.errors import ConfigError, OffbeatError
from offbeat_lab.cli.common import EXIT_FAILED, EXIT_MISUSED
from offbeat_lab.cli.inspecting import clean, doctor, report, strategies, tasks, trace
from offbeat_lab.cli.planning import plan, profile
from offbeat_lab.cli.training import compare, demo, run, train

_SUMMARY: Final = (
    "Train PyTorch models on slow links and uneven devices, and see what each strategy does."
)
_SCRIPT, _CHOICE, _LAB, _AFTER, _CLEANING = (
    "Your own script",
    "Choosing a strategy",
    "The lab",
    "After a run",
    "Cleaning up",
)
_COMMANDS: Final[tuple[tuple[Callable[..., None], str, str], ...]] = (
    (run, _SCRIPT, "offbeat run --strategy gtopk:density=0.01 --workers 4 train.py --epochs 3"),
    (compare, _SCRIPT, "offbeat compare --strategies ddp,wagma --link 1gbit -- train.py --small"),
    (strategies, _CHOICE, "offbeat strategies gtopk"),
    (doctor, _CHOICE, "offbeat doctor --workers 4"),
    (plan, _CHOICE, "offbeat plan --profile resnet50 --link 1gbit,10gbit --workers 4..64"),
    (profile, _CHOICE, "offbeat profile --out mine.json -- train.py --small"),
    (demo, _LAB, "offbeat demo"),
    (train, _LAB, "offbeat train --task digits --strategy gtopk --set density=0.01 --workers 4"),
    (tasks, _LAB, "offbeat tasks"),
    (report, _AFTER, "offbeat report runs/demo-001"),
    (trace, _AFTER, "offbeat trace runs/demo-001 --out trace.json.gz"),
)
"""Command, its group in `offbeat --help`, and an example."""

app = typer.Typer(
    help=_SUMMARY,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
lab = typer.Typer(
    help="Look after what emulated clusters leave on this machine.", no_args_is_help=True
)
for _command, _group, _example in _COMMANDS:
    app.command(
        rich_help_panel=_group,
        epilog=f"Example: `{_example}`",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
        if _command is run
        else None,
        add_help_option=_command is not run,
    )(_command)
lab.command(epilog="Example: `offbeat lab clean`")(clean)
app.add_typer(lab, name="lab", rich_help_panel=_CLEANING)


def main() -> None:
    """Entry point: runs the command line and turns what offbeat raises on purpose into one line and
    an exit status.
    """
    try:
        app()
    except OffbeatError as error:
        print(f"offbeat: {error}", file=sys.stderr)
        sys.exit(EXIT_MISUSED if isinstance(error, ConfigError) else EXIT_FAILED)


def start() -> None:
    """`main` in a process of its own."""
    from offbeat.run.interrupts import exit_at_stop_signals

    exit_at_stop_signals()
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # torch warns of every host that has no name
    main()


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"offbeat {offbeat.__version__}")
        raise typer.Exit


@app.callback(epilog="Example: `offbeat run --strategy gtopk:density=0.01 --workers 4 train.py`")
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Train PyTorch models on slow links and uneven devices, and see what each strategy does."""
