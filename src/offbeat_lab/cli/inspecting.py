"""The commands that look at things: records, traces, this machine, what there is to choose from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offbeat_lab.cli.common import JsonFlag, complete_strategy


def report(
    directory: Annotated[Path, typer.Argument(help="The record of a run or of a comparison.")],
) -> None:
    """Write the page of a record again, and print where it is."""
    from offbeat_lab.report.page import write_report

    print(write_report(directory))


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
    from offbeat_lab.cli import display
    from offbeat_lab.options import task_options
    from offbeat_lab.tasks import TASKS

    for name, kind in TASKS.items():
        display.print_options(name, kind.summary, task_options(name))


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
    from offbeat.run.command import option_lines, strategy_lines
    from offbeat.run.recipes import ALONE, NoExchange
    from offbeat.strategies.docstrings import first_sentence
    from offbeat_lab.cli import display
    from offbeat_lab.native import NATIVE
    from offbeat_lab.options import strategy_options, strategy_type

    others: dict[str, type] = {ALONE: NoExchange, **NATIVE}
    if name is not None and name in others:
        display.print_options(name, first_sentence(strategy_type(name)), strategy_options(name))
    elif name is not None:
        print("\n".join(option_lines(name)))
    else:
        print("\n".join(strategy_lines()), end="\n\nOf others, to compare with:\n")
        for other, kind in others.items():
            print(f"  {other:12}  {first_sentence(kind)}")
