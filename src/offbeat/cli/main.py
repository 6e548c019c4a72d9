"""The `offbeat` command. Nothing heavy is imported before a command needs it: help and version answer at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

import offbeat
from offbeat.errors import ConfigError, OffbeatError

app = typer.Typer(
    help="Train PyTorch models on slow links and uneven devices, and see what each strategy does.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

EXIT_FAILED = 1
EXIT_MISUSED = 2
EXIT_INTERRUPTED = 130

Out = Annotated[Path | None, typer.Option(help="New directory for the record; by default one below runs/.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one line of JSON on standard output, and nothing else.")]


def main() -> None:
    """Entry point: runs the command line and turns what offbeat raises on purpose into one line and an exit status."""
    try:
        app()
    except OffbeatError as error:
        print(f"offbeat: {error}", file=sys.stderr)
        sys.exit(EXIT_MISUSED if isinstance(error, ConfigError) else EXIT_FAILED)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"offbeat {offbeat.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train PyTorch models on slow links and uneven devices, and see what each strategy does."""


@app.command()
def train(
    task: Annotated[str | None, typer.Option(help="What to train; `offbeat tasks` lists them.")] = None,
    strategy: Annotated[str | None, typer.Option(help="How workers exchange; `offbeat strategies` lists them.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes to start on this machine (default 4).")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option of task or strategy.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data (default: the task's).")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps, in place of epochs.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of initial parameters and sample order (default 0).")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Steps between checkpoints (default 100).")] = None,
    out: Out = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run recorded in this directory.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Train a task on local workers, or as one rank where torchrun or srun started this command."""
    from offbeat.cli import display
    from offbeat.lab.config import Request
    from offbeat.lab.train import plan
    from offbeat.lab.train import train as carry_out

    request = Request(
        task=task,
        strategy=strategy,
        workers=workers,
        settings=settings or (),
        epochs=epochs,
        steps=steps,
        seed=seed,
        checkpoint_every=checkpoint_every,
    )
    planned = plan(request, out=out, resume=resume)
    quiet = planned.launch is not None and planned.launch.rank != 0
    num_watched = planned.config.workers if planned.launch is None else 1
    with display.watching(f"{planned.config.task} · {planned.config.strategy}", num_watched, quiet=quiet) as watcher:
        summary = carry_out(planned, watcher)
    if summary is None:
        return
    if as_json:
        print(summary.model_dump_json())
    else:
        display.print_summary(summary)
    if summary.status == "stopped":
        print(
            f"stopped after step {summary.steps}; go on with: offbeat train --resume {summary.run_directory}", file=sys.stderr
        )
        raise typer.Exit(EXIT_INTERRUPTED)


@app.command()
def demo(
    workers: Annotated[int, typer.Option(help="Processes to start.")] = 4,
    out: Out = None,
    as_json: JsonFlag = False,
) -> None:
    """Train real digits with S-SGD and with gTop-k, and put them side by side."""
    from offbeat.cli import demonstration

    raise typer.Exit(demonstration.run(workers=workers, out=out, as_json=as_json))


@app.command()
def tasks() -> None:
    """List the tasks and what --set takes for each."""
    from offbeat.cli import display
    from offbeat.lab.options import task_options
    from offbeat.lab.tasks import TASKS

    for name, kind in TASKS.items():
        display.print_options(name, kind.summary, task_options(name))


@app.command()
def strategies() -> None:
    """List the strategies and what --set takes for each."""
    from offbeat.cli import display
    from offbeat.lab.options import strategy_options, summary_line
    from offbeat.strategies import REGISTRY

    for name, kind in REGISTRY.items():
        display.print_options(name, summary_line(kind), strategy_options(name))
