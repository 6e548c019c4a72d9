"""The commands that train: `offbeat train`, `run`, `compare` and `demo`."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from offbeat.errors import ConfigError
from offbeat_lab.cli.common import (
    CLUSTER,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    LENGTH,
    OUTPUT,
    WHAT,
    Delay,
    Epochs,
    How,
    JsonFlag,
    Link,
    LogTo,
    Out,
    Preset,
    Speeds,
    Steps,
    StepTime,
    TaskName,
    Workers,
    check_names,
    complete_strategy,
    emulation_mode,
    flag,
    names_in,
    write_page,
)

if TYPE_CHECKING:
    from offbeat_lab.compare import ComparePlan
    from offbeat_lab.comparison import Comparison

_SHOWN: Final = ("ddp", "gtopk:density=0.01", "ddp-powersgd:rank=2")
_PROMISED: Final = ("ddp", "gtopk")
_LEAST_ACCURACY: Final = 0.95
"""What the demo compares, and what those that it promises are to reach."""


def train(
    task: TaskName = None,
    strategy: Annotated[
        str | None,
        flag(
            WHAT,
            "How workers exchange, with options after colons: gtopk:density=0.01."
            " `offbeat strategies` lists them.",
            autocompletion=complete_strategy,
        ),
    ] = None,
    workers: Workers = None,
    settings: Annotated[
        list[str] | None, flag(WHAT, "An option of task or strategy.", "--set", metavar="KEY=VALUE")
    ] = None,
    epochs: Epochs = None,
    steps: Steps = None,
    seed: Annotated[
        int | None, flag(WHAT, "Of initial parameters and sample order (default 0).")
    ] = None,
    checkpoint_every: Annotated[
        int | None, flag(LENGTH, "Steps between checkpoints (default 100).")
    ] = None,
    eval_every: Annotated[
        int | None, flag(LENGTH, "Steps between measurements (default: only at the end).")
    ] = None,
    cluster: Preset = None,
    link: Link = None,
    speeds: Speeds = None,
    delay: Delay = None,
    step_time: StepTime = None,
    emulation: How = "auto",
    log_to: LogTo = None,
    out: Out = None,
    resume: Annotated[
        Path | None, flag(OUTPUT, "Go on with the run recorded in this directory.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Train a task on local workers, or as one rank where torchrun or srun started this command."""
    from offbeat_lab.cli import display
    from offbeat_lab.cluster import from_flags
    from offbeat_lab.config import Request
    from offbeat_lab.options import parse_spec
    from offbeat_lab.train import plan
    from offbeat_lab.train import train as train_workers

    name, options = (None, {}) if strategy is None else parse_spec(strategy)
    flags = {"link": link, "speeds": speeds, "delay": delay, "step_time": step_time}
    request = Request(
        task=task,
        strategy=name,
        workers=workers,
        settings=[*(settings or ()), *(f"{key}={value}" for key, value in options.items())],
        epochs=epochs,
        steps=steps,
        seed=seed,
        checkpoint_every=checkpoint_every,
        eval_every=eval_every,
        cluster=None
        if cluster is None and set(flags.values()) == {None}
        else from_flags(cluster=cluster, workers=workers, **flags),
        emulation=emulation_mode(emulation),
        log_to=names_in(log_to),
    )
    planned = plan(request, out=out, resume=resume)
    quiet = planned.launch is not None and planned.launch.rank != 0
    num_watched = planned.config.workers if planned.launch is None else 1
    with display.progress_display(
        f"{planned.config.task} · {planned.config.strategy}", num_watched, quiet=quiet
    ) as shown:
        summary = train_workers(
            planned,
            shown,
            lambda notice: shown.say(display.note_of(planned.config.strategy, notice)),
        )
    if summary is None:
        return
    page = write_page(Path(summary.run_directory))
    if as_json:
        print(json.dumps(asdict(summary)))
    else:
        display.print_summary(summary, page)
    if summary.status == "stopped":
        print(
            f"stopped after step {summary.steps}; go on with: offbeat train --resume"
            f" {shlex.quote(summary.run_directory)}",
            file=sys.stderr,
        )
        raise typer.Exit(EXIT_INTERRUPTED)


def run(context: typer.Context) -> None:
    """Run your own script with a strategy. It needs no change if it uses DistributedDataParallel.
    Under torchrun or srun this process is one rank.
    """
    from offbeat.run.command import run_command

    def show_page(directory: Path) -> None:
        sys.stderr.write(f"page:   {write_page(directory)}\n")

    raise typer.Exit(run_command(context.args, show_page))


def compare(
    strategies: Annotated[
        str,
        flag(
            WHAT,
            "Separated by commas, with options after colons:"
            " ddp,gtopk:density=0.01,ddp-powersgd:rank=1.",
            autocompletion=complete_strategy,
        ),
    ],
    task: TaskName = None,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- SCRIPT [ARGUMENTS]...]",
            help="Your own script, in the place of a task; it runs as by offbeat run.",
            show_default=False,
        ),
    ] = None,
    cluster: Preset = None,
    workers: Workers = None,
    link: Link = None,
    speeds: Speeds = None,
    delay: Delay = None,
    step_time: StepTime = None,
    emulation: How = "auto",
    seeds: Annotated[
        int | None, flag(LENGTH, "Runs of each strategy (default 3; 1 of a script).")
    ] = None,
    settings: Annotated[
        list[str] | None, flag(WHAT, "An option of the task.", "--set", metavar="KEY=VALUE")
    ] = None,
    epochs: Epochs = None,
    steps: Steps = None,
    eval_every: Annotated[
        int | None, flag(LENGTH, "Steps between measurements (default: a dozen in a run).")
    ] = None,
    target: Annotated[
        float | None, flag(LENGTH, "The metric to reach (default: the best that all runs reach).")
    ] = None,
    turn: Annotated[
        float, flag(LENGTH, "Seconds, at least 8 steps, before the next strategy's turn.")
    ] = 3.0,
    out: Out = None,
    as_json: JsonFlag = False,
) -> None:
    """Train a task, or your own script, with several strategies by turns, on this machine or an
    emulated cluster, and say which is best.
    """
    if not words and task is None:
        raise ConfigError(
            "nothing to train; give --task (offbeat tasks lists them), or a script of your own"
            " after two dashes: -- train.py --epochs 3"
        )
    named = names_in(strategies)
    check_names(named)
    from offbeat_lab.cli import comparing
    from offbeat_lab.cluster import from_flags
    from offbeat_lab.compare import CompareRequest, plan_comparison

    if seeds is not None and seeds < 1:
        raise ConfigError(f"--seeds is {seeds}; allowed is 1 or more")
    script = comparing.compared_script(task, words, settings, epochs, eval_every)
    flags = {"link": link, "speeds": speeds, "delay": delay, "step_time": step_time}
    request = CompareRequest(
        task=script.name if script is not None else task or "",
        script=script,
        strategies=named,
        settings=settings or (),
        cluster=from_flags(cluster=cluster, workers=workers, **flags),
        emulation=emulation_mode(emulation),
        seeds=range(seeds or (3 if script is None else 1)),
        epochs=epochs,
        steps=steps,
        eval_every=eval_every,
        target=target,
        turn_s=turn,
    )
    planned = plan_comparison(request, out=out)
    comparison = _carry_out(planned, shlex.join(["offbeat", *sys.argv[1:]]), as_json=as_json)
    if all(strategy.failure is not None for strategy in comparison.strategies):
        raise typer.Exit(EXIT_FAILED)


def demo(
    workers: Annotated[int, flag(CLUSTER, "Processes to start.")] = 4,
    out: Out = None,
    as_json: JsonFlag = False,
) -> None:
    """Compare DDP, gTop-k and PowerSGD on real digits behind a slow link, and write a page about
    it.
    """
    from offbeat.run.records import first_free
    from offbeat_lab.cluster import Cluster, LinkSpec
    from offbeat_lab.compare import CompareRequest, plan_comparison

    request = CompareRequest(
        task="digits",
        strategies=_SHOWN,
        cluster=Cluster(name="demo", workers=workers, link=LinkSpec(rate_bit_per_s=100e6)),
        seeds=(0,),
        turn_s=2.0,
    )
    planned = plan_comparison(request, out=first_free("demo") if out is None else out)
    comparison = _carry_out(planned, "offbeat demo", as_json=as_json)
    failed = False
    for strategy in comparison.strategies:
        final = strategy.measures.get("final_metric")
        reached = final is not None and final.median is not None and final.median >= _LEAST_ACCURACY
        if strategy.label in _PROMISED and not reached:
            failed = True
            print(
                f"offbeat: {strategy.label} did not reach the accuracy {_LEAST_ACCURACY} that"
                " the demo promises",
                file=sys.stderr,
            )
    if failed:
        raise typer.Exit(EXIT_FAILED)


def _carry_out(planned: ComparePlan, command: str, *, as_json: bool) -> Comparison:
    """Run a comparison, and print what it found."""
    from offbeat_lab.cli import comparing
    from offbeat_lab.compare import run_comparison

    with comparing.comparison_display(quiet=as_json) as listener:
        directory, comparison = run_comparison(planned, listener, command=command)
    if comparison.status == "stopped":
        print(f"stopped; what was recorded so far is in {directory}", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED)
    page = write_page(directory)
    if as_json:
        print(comparison.model_dump_json())
    else:
        comparing.print_comparison(comparison, directory, page)
    return comparison
