"""The `offbeat` command. Nothing heavy is imported before a command needs it: help and version
answer at once.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

import offbeat
from offbeat.cli.data import data
from offbeat.cli.planning import plan, profile
from offbeat.errors import ConfigError, OffbeatError, nearest

if TYPE_CHECKING:
    from offbeat.lab.cluster import Cluster
    from offbeat.lab.emulation import Mode as EmulationMode

app = typer.Typer(
    help="Train PyTorch models on slow links and uneven devices, and see what each strategy does.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

lab = typer.Typer(
    help="Look after what emulated clusters leave on this machine.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(lab, name="lab")
app.add_typer(data, name="data")
app.command()(plan)
app.command()(profile)

EXIT_FAILED = 1
EXIT_MISUSED = 2
EXIT_INTERRUPTED = 130

Preset = Annotated[
    str | None,
    typer.Option("--cluster", help="A cluster to emulate: a TOML file, or the name of a preset."),
]
Workers = Annotated[
    int | None, typer.Option(help="Processes to start on this machine (default 4).")
]
Link = Annotated[
    str | None, typer.Option(help="Every worker's link to emulate: 1gbit, or 1gbit/0.2ms.")
]
Speeds = Annotated[
    str | None,
    typer.Option(help="Relative speeds to emulate, such as 1,1,1,0.5; repeated in turn."),
]
Delay = Annotated[
    str | None, typer.Option(help="Straggling: 2x320ms makes two random workers late in each step.")
]
StepTime = Annotated[
    str | None,
    typer.Option(help="Fixed duration of forward and backward, as on an accelerator: 200ms."),
]
How = Annotated[
    str, typer.Option("--emulation", help="auto, namespaces (needs root), delaying, or none.")
]
Out = Annotated[
    Path | None, typer.Option(help="New directory for the record; by default one below runs/.")
]
JsonFlag = Annotated[
    bool,
    typer.Option("--json", help="Print one line of JSON on standard output, and nothing else."),
]


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
    from offbeat.lab.interrupts import exit_at_stop_signals

    exit_at_stop_signals()
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # torch warns of every host that has no name
    main()


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"offbeat {offbeat.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Train PyTorch models on slow links and uneven devices, and see what each strategy does."""


@app.command()
def train(
    task: Annotated[
        str | None, typer.Option(help="What to train; `offbeat tasks` lists them.")
    ] = None,
    strategy: Annotated[
        str | None, typer.Option(help="How workers exchange; `offbeat strategies` lists them.")
    ] = None,
    workers: Workers = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An option of task or strategy."),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the data (default: the task's).")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps, in place of epochs.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of initial parameters and sample order (default 0).")
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints (default 100).")
    ] = None,
    eval_every: Annotated[
        int | None, typer.Option(help="Steps between measurements (default: only at the end).")
    ] = None,
    cluster: Preset = None,
    link: Link = None,
    speeds: Speeds = None,
    delay: Delay = None,
    step_time: StepTime = None,
    emulation: How = "auto",
    out: Out = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run recorded in this directory.")
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            hidden=True, help="Repeat the claims of this record; see docs/methods/adaptive.md."
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Train a task on local workers, or as one rank where torchrun or srun started this command."""
    from offbeat.cli import display
    from offbeat.lab.config import Request
    from offbeat.lab.train import plan
    from offbeat.lab.train import train as train_workers

    request = Request(
        task=task,
        strategy=strategy,
        workers=workers,
        settings=settings or (),
        epochs=epochs,
        steps=steps,
        seed=seed,
        checkpoint_every=checkpoint_every,
        eval_every=eval_every,
        cluster=_cluster(cluster, workers, link, speeds, delay, step_time),
        emulation=_emulation(emulation),
        replay=replay,
    )
    planned = plan(request, out=out, resume=resume)
    quiet = planned.launch is not None and planned.launch.rank != 0
    num_watched = planned.config.workers if planned.launch is None else 1
    with display.progress_display(
        f"{planned.config.task} · {planned.config.strategy}", num_watched, quiet=quiet
    ) as listener:
        summary = train_workers(planned, listener)
    if summary is None:
        return
    page = _write_page(Path(summary.run_directory))
    if as_json:
        print(summary.model_dump_json())
    else:
        display.print_summary(summary, page)
    if summary.status == "stopped":
        print(
            f"stopped after step {summary.steps}; go on with: offbeat train --resume"
            f" {summary.run_directory}",
            file=sys.stderr,
        )
        raise typer.Exit(EXIT_INTERRUPTED)


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCRIPT [ARGUMENTS]...", help="As for python.", show_default=False),
    ] = None,
    strategy: Annotated[
        str,
        typer.Option(
            help="How workers exchange, with options after colons: gtopk:density=0.01."
            " `offbeat strategies` lists them."
        ),
    ] = "allreduce",
    workers: Workers = None,
    as_module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is a module, as for python -m.")
    ] = False,
    restarts: Annotated[
        int, typer.Option(help="How often workers that die are started again.")
    ] = 0,
    steps: Annotated[
        int | None, typer.Option(help="End the script after so many optimizer steps.")
    ] = None,
    rendezvous: Annotated[
        str | None, typer.Option(help="HOST:PORT of the first of several hosts.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="How many hosts there are.")] = None,
    node_rank: Annotated[int | None, typer.Option(help="Which of them this is, from 0.")] = None,
    metric: Annotated[
        str | None,
        typer.Option(help="Which logged value counts (default: the first that is not the loss)."),
    ] = None,
    out: Out = None,
) -> None:
    """Run your own script with a strategy: offbeat run --strategy gtopk:density=0.01 --workers 4
    train.py --epochs 3. It needs no change if it uses DistributedDataParallel. Under torchrun or
    srun this process is one rank.
    """
    from offbeat.cli import running
    from offbeat.script.hosts import meeting

    sys.exit(
        running.run(
            words or [],
            strategy=strategy,
            workers=workers,
            as_module=as_module,
            restarts=restarts,
            steps=steps,
            metric=metric,
            where=meeting(rendezvous, nodes, node_rank),
            out=out,
        )
    )


@app.command()
def compare(
    strategies: Annotated[
        str,
        typer.Option(
            help=(
                "Separated by commas, with options after colons:"
                " ddp,gtopk:density=0.01,ddp-powersgd:rank=1."
            )
        ),
    ],
    task: Annotated[
        str | None, typer.Option(help="What to train; `offbeat tasks` lists them.")
    ] = None,
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
        int | None, typer.Option(help="Runs of each strategy (default 3; 1 of a script).")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option of the task.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the data (default: the task's).")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps, in place of epochs.")] = None,
    eval_every: Annotated[
        int | None, typer.Option(help="Steps between measurements (default: a dozen in a run).")
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(help="The metric to reach (default: the best that all runs reach)."),
    ] = None,
    turn: Annotated[
        float, typer.Option(help="Seconds that a strategy trains before the next one's turn.")
    ] = 3.0,
    out: Out = None,
    as_json: JsonFlag = False,
) -> None:
    """Train a task, or your own script, with several strategies by turns, on this machine or an
    emulated cluster, and say which is best.
    """
    from offbeat.cli import comparing
    from offbeat.lab.cluster import Cluster
    from offbeat.lab.compare import CompareRequest, plan_comparison, run_comparison

    if seeds is not None and seeds < 1:
        raise ConfigError(f"--seeds is {seeds}; allowed is 1 or more")
    compared = comparing.what_to_compare(task, words, settings, epochs)
    request = CompareRequest(
        task=compared.task,
        script=compared.script,
        strategies=[text for text in strategies.split(",") if text.strip()],
        settings=settings or (),
        cluster=_cluster(cluster, workers, link, speeds, delay, step_time)
        or Cluster(workers=workers or 4),
        emulation=_emulation(emulation),
        seeds=range(seeds or compared.num_seeds),
        epochs=epochs,
        steps=steps,
        eval_every=eval_every,
        target=target,
        turn_s=turn,
    )
    planned = plan_comparison(request, out=out, program=compared.program(request.cluster.workers))
    with comparing.comparison_display(quiet=as_json) as listener:
        directory, comparison = run_comparison(
            planned, listener, command=shlex.join(["offbeat", *sys.argv[1:]])
        )
    if comparison.status == "stopped":
        print(f"stopped; what was recorded so far is in {directory}", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED)
    page = _write_page(directory)
    if as_json:
        print(comparison.model_dump_json())
    else:
        comparing.print_comparison(comparison, directory, page)
    if all(contestant.failure is not None for contestant in comparison.contestants):
        raise typer.Exit(EXIT_FAILED)


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(help="The record of a run or of a comparison.")],
) -> None:
    """Write the page of a record again, and print where it is."""
    from offbeat.report.page import write_report

    print(write_report(directory))


@app.command()
def trace(
    directory: Annotated[Path, typer.Argument(help="The record of a run or of a comparison.")],
    out: Annotated[
        Path,
        typer.Option(help="File to write (.json or .json.gz), or a directory with --tensorboard."),
    ],
    tensorboard: Annotated[bool, typer.Option(help="Write TensorBoard scalars instead.")] = False,
) -> None:
    """Write a trace of all workers for Perfetto (ui.perfetto.dev) or chrome://tracing."""
    from offbeat.report.tensorboard import write_scalars
    from offbeat.report.trace import write_trace

    if tensorboard:
        write_scalars(directory, out)
        print(f"scalars in {out}; look at them with: tensorboard --logdir {out}")
    else:
        print(
            f"{write_trace(directory, out):,} events in {out}; open it at https://ui.perfetto.dev"
        )


@app.command()
def doctor(
    workers: Annotated[
        int | None,
        typer.Option(help="Local processes to measure between, where nobody launched any."),
    ] = None,
    parameters: Annotated[
        list[int] | None, typer.Option(help="Size of a model to predict for; may be given again.")
    ] = None,
    density: Annotated[float, typer.Option(help="That gTop-k would send.")] = 0.001,
    write: Annotated[
        Path | None,
        typer.Option(help="Write the cluster that was measured here, for plan and the lab."),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(help="Plan for this model on it: a file of offbeat profile, or resnet50."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Say what this machine has, measure the network between workers, and what that means for the
    choice of strategy.
    """
    from offbeat.cli import doctor as diagnosing

    raise typer.Exit(
        diagnosing.run(
            workers=workers,
            parameters=parameters or (),
            density=density,
            write=write,
            profile=profile,
            as_json=as_json,
        )
    )


@app.command()
def demo(
    workers: Annotated[int, typer.Option(help="Processes to start.")] = 4,
    out: Out = None,
    as_json: JsonFlag = False,
) -> None:
    """Compare DDP, gTop-k and PowerSGD on real digits behind a slow link, and write a page about
    it.
    """
    from offbeat.cli import demonstration

    raise typer.Exit(demonstration.run(workers=workers, out=out, as_json=as_json))


@lab.command()
def clean() -> None:
    """Remove the namespaces, quotas and workers that a killed run left behind, and nothing else."""
    from offbeat.lab.emulation import clean as remove_leftovers

    removed = remove_leftovers()
    print("\n".join(removed) if removed else "nothing was left behind")


@app.command()
def tasks() -> None:
    """List the tasks and what --set takes for each."""
    from offbeat.cli import display
    from offbeat.lab.options import task_options
    from offbeat.lab.tasks import TASKS

    for name, kind in TASKS.items():
        display.print_options(name, kind.summary, task_options(name))


@app.command()
def strategies(
    name: Annotated[
        str | None, typer.Argument(help="Only this one, such as gtopk.", show_default=False)
    ] = None,
) -> None:
    """List the strategies, and what --set takes for each: its meaning, what is allowed and the
    default.
    """
    from offbeat.cli import display
    from offbeat.lab.options import RECIPES, strategy_options, strategy_type
    from offbeat.strategies import REGISTRY
    from offbeat.strategies.docstrings import first_sentence

    kinds = RECIPES if name is None else {name: strategy_type(name)}
    for kind_name, kind in kinds.items():
        entry = REGISTRY.entries.get(kind_name)
        summary = first_sentence(kind) + (f" ({entry.paper})" if entry is not None else "")
        display.print_options(kind_name, summary, strategy_options(kind_name))


def _cluster(
    cluster: str | None,
    workers: int | None,
    link: str | None,
    speeds: str | None,
    delay: str | None,
    step_time: str | None,
) -> Cluster | None:
    """The cluster that these flags describe; None where they say nothing about one."""
    from offbeat.lab.cluster import from_flags

    if all(flag is None for flag in (cluster, link, speeds, delay, step_time)):
        return None
    return from_flags(
        cluster=cluster, workers=workers, link=link, speeds=speeds, delay=delay, step_time=step_time
    )


def _emulation(name: str) -> EmulationMode:
    from offbeat.lab.emulation import Mode as EmulationMode

    if name not in get_args(EmulationMode):
        allowed = ", ".join(get_args(EmulationMode))
        raise ConfigError(
            f"--emulation is {name!r}; allowed are"
            f" {allowed}{nearest(name, get_args(EmulationMode))}"
        )
    return cast("EmulationMode", name)


def _write_page(directory: Path) -> Path:
    from offbeat.report.page import write_report

    return write_report(directory)
