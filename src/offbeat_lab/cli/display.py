"""What people see: progress while workers train, and tables afterwards. Progress goes to standard
error.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from offbeat.run.progress import MembershipChange, WorkerProgress
from offbeat.run.records import Summary
from offbeat_lab.cli.common import print_line
from offbeat_lab.records import Record
from offbeat_lab.report import charts_dispatch

_PLAIN_EVERY_S = 5.0


class ProgressDisplay(Protocol):
    """What is shown while workers train."""

    def __call__(self, progress: WorkerProgress | MembershipChange) -> None:
        """Show how far a worker is, or that it has died or come back."""

    def say(self, text: str) -> None:
        """Show a line that stays."""


@contextmanager
def progress_display(
    title: str, num_workers: int, *, quiet: bool = False
) -> Iterator[ProgressDisplay]:
    """Show progress and news under `title` while the block runs: bars on a terminal, a line now and
    then elsewhere.
    """
    console = Console(stderr=True, quiet=quiet)
    if quiet or not console.is_terminal:
        yield _Lines(title, console, num_workers)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(
            "loss {task.fields[loss]:.4f}  waiting {task.fields[wait]:>4.0%} "
            " {task.fields[sent]:>9} a step"
        ),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=console) as bars:
        console.print(title, style="bold")
        yield _Bars(bars, console, num_workers)


class _Bars:
    """One bar for each worker."""

    def __init__(self, bars: Bars, console: Console, num_workers: int) -> None:
        self._bars = bars
        self._console = console
        nothing_yet = {"loss": float("nan"), "wait": 0.0, "sent": "", "total": None}
        self._tasks: dict[int, TaskID] = {
            rank: bars.add_task(f"worker {rank}", **nothing_yet)  # type: ignore[arg-type]  # fields of any type
            for rank in range(num_workers)
        }

    def say(self, text: str) -> None:
        print_line(self._console, text)

    def __call__(self, progress: WorkerProgress | MembershipChange) -> None:
        if isinstance(progress, MembershipChange):
            what = "[red]gone[/red]" if progress.departed else "    "
            self._bars.update(
                self._tasks[progress.rank], description=f"worker {progress.rank} {what}"
            )
            _print_change(self._console, progress)
            return
        self._bars.update(
            self._tasks[progress.rank],
            completed=progress.step,
            total=progress.target,
            loss=progress.loss,
            wait=progress.wait_share,
            sent=decimal(round(progress.bytes_per_step)),
        )


class _Lines:
    """One line for all workers every few seconds, and one when the last of them is done."""

    def __init__(self, title: str, console: Console, num_workers: int) -> None:
        self._title = title
        self._num_workers = num_workers
        self._console = console
        self._latest: dict[int, WorkerProgress] = {}
        self._gone: set[int] = set()
        self._printed_s = time.monotonic()

    def say(self, text: str) -> None:
        print_line(self._console, text)

    def __call__(self, progress: WorkerProgress | MembershipChange) -> None:
        if isinstance(progress, MembershipChange):
            self._gone = (
                self._gone | {progress.rank} if progress.departed else self._gone - {progress.rank}
            )
            self._latest.pop(progress.rank, None)
            _print_change(self._console, progress)
            return
        self._latest[progress.rank] = progress
        if len(self._latest) < self._num_workers - len(self._gone):
            return
        slowest = min(self._latest.values(), key=lambda latest: latest.step)
        if time.monotonic() - self._printed_s < _PLAIN_EVERY_S and slowest.step < slowest.target:
            return
        self._printed_s = time.monotonic()
        workers = [self._latest[rank] for rank in sorted(self._latest)]
        losses = " ".join(f"{worker.loss:.4f}" for worker in workers)
        waits = " ".join(f"{worker.wait_share:.0%}" for worker in workers)
        place = f"{self._title}: step {slowest.step}/{slowest.target}"
        print_line(self._console, f"{place}  loss {losses}  waiting {waits}")


def _print_change(console: Console, change: MembershipChange) -> None:
    print_line(console, change.text, "red" if change.departed else "green")


def print_summary(summary: Summary, page: Path | None = None) -> None:
    """One run as a table, and where its page is."""
    table = Table(
        show_header=False, title=f"{summary.task} · {summary.strategy}", title_justify="left"
    )
    table.add_column()
    table.add_column(overflow="fold")
    for label, text in _summary_rows(summary):
        table.add_row(label, text)
    if page is not None:
        table.add_row("page", escape(str(page)))
    Console().print(table)
    if mega_batches := Record(Path(summary.run_directory)).mega_batches():
        print_line(Console(), charts_dispatch.sentence_of(mega_batches))
    for notice in summary.notices:
        print_line(Console(), note_of(summary.strategy, notice))


def note_of(strategy: str, notice: str) -> str:
    """The line that says `notice`."""
    return f"note ({strategy}): {notice}"


def _summary_rows(summary: Summary) -> list[tuple[str, str]]:
    metric = "not measured" if summary.metric is None else f"{summary.metric:.4f}"
    return [
        (summary.metric_name.replace("_", " "), metric),
        *((name, f"{value:.4f}") for name, value in summary.other_metrics.items()),
        ("last loss", "not finite" if summary.loss is None else f"{summary.loss:.4f}"),
        ("workers", str(summary.workers) + _lost(summary)),
        ("parameters", f"{summary.num_parameters:,}"),
        (
            "steps",
            f"{summary.steps:,}"
            + (f" (from {summary.resumed_from_step})" if summary.resumed_from_step else ""),
        ),
        ("training time", f"{summary.seconds:.1f} s"),
        ("steps a second, the first included", f"{summary.steps_per_s:.1f}"),
        ("sent by a worker in a step", decimal(round(summary.bytes_sent_per_step))),
        ("skipped steps", str(summary.skipped_steps)),
        ("replicas", "identical" if summary.replicas_identical else "differ"),
        ("record", escape(summary.run_directory)),
    ]


def _lost(summary: Summary) -> str:
    """How many workers died on the way, and how many of them came back."""
    if not summary.losses:
        return ""
    back = sum(loss.returned_step is not None for loss in summary.losses)
    return f" ({len(summary.losses)} died{f', {back} came back' if back else ''})"
