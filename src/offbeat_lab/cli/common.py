"""What several commands share: flags, the panels of `--help`, exit statuses, completion."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast, get_args

import typer

from offbeat.errors import ConfigError, nearest

if TYPE_CHECKING:
    from rich.console import Console

    from offbeat.run.config import EmulationMode

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

WHAT: Final = "What to train"
CLUSTER: Final = "The cluster"
LENGTH: Final = "How long"
OUTPUT: Final = "Record and output"

NATIVE_NAMES: Final = ("ddp", "ddp-fp16", "ddp-bf16", "ddp-powersgd", "post-localsgd")
"""Those of `offbeat_lab.native`, which imports torch."""


@contextmanager
def working(what: str, *, quiet: bool = False) -> Iterator[None]:
    """Say on standard error that `what` goes on: beside a running clock on a terminal, in a line
    elsewhere.
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, quiet=quiet)
    if not console.is_terminal:
        print_line(console, what)
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        bars.add_task(what, total=None)
        yield


def check_names(strategies: Sequence[str]) -> None:
    """Raises `ConfigError` if one of `strategies` does not begin with a strategy's name. Imports
    none of them, since torch takes seconds.
    """
    from offbeat.strategies.by_name import strategy_type
    from offbeat.strategies.registry import ALONE, REGISTRY

    known = dict.fromkeys((*NATIVE_NAMES, *REGISTRY, ALONE), object)
    for text in strategies:
        strategy_type(text.partition(":")[0].strip(), known)


def complete_strategy(incomplete: str) -> Iterator[str]:
    """Names that the last of some strategies, with commas between, can go on to."""
    from offbeat.strategies import REGISTRY

    before, comma, last = incomplete.rpartition(",")
    for name in REGISTRY:
        if name.startswith(last):
            yield f"{before}{comma}{name}"


def flag(panel: str, help: str, *names: str, **more: Any) -> Any:
    """An option that stands in `panel` of `--help`."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


TaskName = Annotated[str | None, flag(WHAT, "What to train; `offbeat tasks` lists them.")]
Epochs = Annotated[int | None, flag(LENGTH, "Passes over the data (default: the task's).")]
Steps = Annotated[int | None, flag(LENGTH, "Optimizer steps, in place of epochs.")]
Preset = Annotated[
    str | None,
    flag(CLUSTER, "A cluster to emulate: a TOML file, or the name of a preset.", "--cluster"),
]
Workers = Annotated[int | None, flag(CLUSTER, "Processes to start on this machine (default 4).")]
Link = Annotated[
    str | None, flag(CLUSTER, "Every worker's link to emulate: 1gbit, or 1gbit/0.2ms.")
]
Speeds = Annotated[
    str | None, flag(CLUSTER, "Relative speeds to emulate, such as 1,1,1,0.5; repeated in turn.")
]
Delay = Annotated[
    str | None, flag(CLUSTER, "Straggling: 2x320ms makes two random workers late in each step.")
]
StepTime = Annotated[
    str | None,
    flag(CLUSTER, "Fixed duration of forward and backward, as on an accelerator: 200ms."),
]
How = Annotated[
    str, flag(CLUSTER, "auto, namespaces (needs root), delaying, or none.", "--emulation")
]
Out = Annotated[
    Path | None, flag(OUTPUT, "New directory for the record; by default one below runs/.")
]
LogTo = Annotated[
    str | None,
    flag(
        OUTPUT,
        "Live metrics: tensorboard, wandb, mlflow or opentelemetry, or several with commas.",
    ),
]
JsonFlag = Annotated[
    bool, flag(OUTPUT, "Print one line of JSON on standard output, and nothing else.", "--json")
]


def print_line(console: Console, text: str, style: str | None = None) -> None:
    """Print `text` as it is, in one line however long it is."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def require_writable(path: Path) -> None:
    """Raise `ConfigError` where a file cannot be written, before work is done that goes into it."""
    directory = path.resolve().parent
    if not directory.is_dir():
        raise ConfigError(f"cannot write {path}: there is no directory {directory}")
    if path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a directory; name a file in it")
    if not os.access(path if path.exists() else directory, os.W_OK):
        raise ConfigError(f"cannot write {path}: permission denied")


def names_in(text: str | None) -> list[str]:
    """The words of a flag that takes several with commas."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def emulation_mode(name: str) -> EmulationMode:
    """The means of emulation called `name`. Raises `ConfigError` where there is none."""
    from offbeat.run.config import EmulationMode

    if name not in get_args(EmulationMode):
        allowed = ", ".join(get_args(EmulationMode))
        raise ConfigError(
            f"--emulation is {name!r}; allowed are"
            f" {allowed}{nearest(name, get_args(EmulationMode))}"
        )
    return cast("EmulationMode", name)


def write_page(directory: Path) -> Path:
    """Write the page of a record; returns where it is."""
    from offbeat_lab.report.page import write_report

    return write_report(directory)
