"""The `offbeat` command. Nothing heavy is imported before a command needs it: help and version
answer at once. The commands that only look at things stand here: records, traces, this machine,
what there is to choose from.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import typer

import offbeat
from offbeat.run.command import errors_in_a_line
from offbeat_lab.cli.common import NATIVE_NAMES, JsonFlag, complete_strategy, write_page
from offbeat_lab.cli.planning import plan, profile
from offbeat_lab.cli.training import compare, demo, run, train


def report(
    directory: Annotated[Path, typer.Argument(help="The record of a run or of a comparison.")],
) -> None:
    """Write the page of a record again, and print where it is."""
    print(write_page(directory))


def watch(
    directory: Annotated[Path, typer.Argument(help="The record of a run that is under way.")],
) -> None:
    """Show how each worker of a run does: steps, loss, who is late, bytes. It ends with the run."""
    from offbeat_lab.cli.watching import watch as watch_run

    watch_run(directory)


def trace(
    directory: Annotated[Path, typer.Argument(help="The record of a run or of a comparison.")],
    out: Annotated[Path, typer.Option(help="File to write, .json or .json.gz.")],
) -> None:
    """Write a trace of all workers for Perfetto (ui.perfetto.dev) or chrome://tracing."""
    from offbeat_lab.report.trace import write_trace

    print(f"{write_trace(directory, out):,} events in {out}; open it at https://ui.perfetto.dev")


def doctor(
    workers: Annotated[
        int | None,
        typer.Option(help="Local processes to measure between, where nobody launched any."),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(help="Write the cluster that was measured here, for plan and the lab."),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(help="Advise by a plan for this model: a profile's file, or resnet50."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Say what this machine has, measure the network between workers, and what that means for the
    choice of strategy.
    """
    from offbeat_lab.cli import doctor as diagnosing

    raise typer.Exit(diagnosing.run(workers=workers, write=write, profile=profile, as_json=as_json))


def clean() -> None:
    """Remove the namespaces, quotas and workers that a killed run left behind, and nothing else."""
    from offbeat_lab.emulation import clean as remove_leftovers

    removed = remove_leftovers()
    print("\n".join(removed) if removed else "nothing was left behind")


def tasks() -> None:
    """List the tasks and what --set takes for each."""
    from offbeat.run.command import described_lines
    from offbeat_lab.options import task_options
    from offbeat_lab.tasks import TASKS

    for name, kind in TASKS.items():
        print(*described_lines(f"{name}  {kind.summary}", task_options(name)), "", sep="\n")


def strategies(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Only this one, such as gtopk, with all its options.",
            show_default=False,
            autocompletion=complete_strategy,
        ),
    ] = None,
) -> None:
    """List the strategies, a line each; or one of them, with its options, their meaning, what is
    allowed and the default.
    """
    from offbeat.run.command import described_lines, option_lines, strategy_lines
    from offbeat.strategies.registry import ALONE

    others = (ALONE, *NATIVE_NAMES)
    if name is None:
        print("\n".join(strategy_lines()))
        print(f"\nOf others, to compare with: {', '.join(others)}")
    elif name in others:
        from offbeat.codec.described_options import first_sentence
        from offbeat_lab.options import strategy_options, strategy_type

        said = first_sentence(strategy_type(name).__doc__)
        print(*described_lines(f"{name}  {said}", strategy_options(name)), sep="\n")
    else:
        print(*option_lines(name), sep="\n")


_SUMMARY: Final = (
    "Train PyTorch models on slow links and uneven devices, and see what each strategy does."
)
_SCRIPT, _CHOICE, _LAB, _AFTER, _CLEANING = (
    "Your own script",
    "Choosing a strategy",
    "The lab",
    "During and after a run",
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
    (watch, _AFTER, "offbeat watch runs/demo-001"),
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
    """Entry point: runs the command line."""
    with errors_in_a_line():
        app()


def start() -> None:
    """`main` in a process of its own."""
    from offbeat.run.interrupts import exit_at_stop_signals

    exit_at_stop_signals()
    # Torch warns of every host that has no name.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
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
