"""`offbeat compare` on the terminal: how far every strategy is while it runs, and a table at the
end.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table

from offbeat.errors import ConfigError
from offbeat.run.config import ScriptCommand
from offbeat.run.plan import script_command
from offbeat.run.progress import MembershipChange, WorkerProgress
from offbeat_lab.cli.common import print_line
from offbeat_lab.comparison import ComparedStrategy, Comparison
from offbeat_lab.figures import MEASURES, capital, write_estimate

_PLAIN_EVERY_S = 5.0
_WORKER_AND_LOG: Final = re.compile(r"worker \d+ \(pid \d+\)|\S*/logs\S*")
"""What differs between failures that have one reason."""
_REFRESHES_PER_S = 4


def compared_script(
    task: str | None,
    words: Sequence[str] | None,
    settings: Sequence[str] | None,
    epochs: int | None,
    eval_every: int | None,
) -> ScriptCommand | None:
    """The script that is compared; None for a task, as the command line says.

    Args:
        task: of --task.
        words: a script and its arguments.
        settings, epochs, eval_every: of the flags that only tasks have.

    Raises:
        ConfigError: both, or there is no such script.
    """
    if words and task is not None:
        raise ConfigError(f"got --task {task} and the script {words[0]}; give one of them")
    if not words:
        return None
    if settings or epochs is not None or eval_every is not None:
        raise ConfigError(
            "--set, --epochs and --eval-every are for tasks; a script takes its own arguments after"
            " its name, logs its metric when it likes, and --steps ends it"
        )
    return script_command(words)


@dataclass(kw_only=True, slots=True)
class _Row:
    """What is known of one strategy in the runs of the current seed."""

    workers: dict[int, WorkerProgress] = field(default_factory=dict)
    seeds_done: int = 0
    metric: float | None = None
    failure: str | None = None

    @property
    def step(self) -> int:
        return min((progress.step for progress in self.workers.values()), default=0)

    @property
    def seconds(self) -> float:
        return max((progress.seconds for progress in self.workers.values()), default=0.0)


class ComparisonDisplay:
    """Shows how a comparison goes on: a live table on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rows: dict[str, _Row] = {}
        self._reasons: set[str] = set()
        self._turn = ""
        self._num_workers = self._num_seeds = self._steps = self._seed = 0
        self._printed_s = self._begun_s = time.monotonic()
        self.live: Live | None = None

    def begin(self, labels: Sequence[str], num_workers: int, num_seeds: int, steps: int) -> None:
        self._rows = {label: _Row() for label in labels}
        self._num_workers, self._num_seeds, self._steps = num_workers, num_seeds, steps
        self._printed_s = self._begun_s = time.monotonic()

    def seed(self, place: int) -> None:
        self._seed = place
        for row in self._rows.values():
            row.workers, row.metric, row.seeds_done = {}, None, place
        self._show()

    def turn(self, label: str) -> None:
        self._turn = label
        self._show()

    def progress(self, label: str, progress: WorkerProgress) -> None:
        if label not in self._rows:  # the runs without exchange are no strategy
            return
        row = self._rows[label]
        row.workers[progress.rank] = progress
        row.metric = row.metric if progress.metric is None else progress.metric
        self._show()

    def membership_changed(self, label: str, change: MembershipChange) -> None:
        if label not in self._rows:
            return
        if change.departed:
            self._rows[label].workers.pop(change.rank, None)
        style = "red" if change.departed else "green"
        print_line(self._console, f"{label}: {change.text}", style)

    def failed(self, label: str, reason: str) -> None:
        if label in self._rows:
            self._rows[label].failure = reason
        why = _WORKER_AND_LOG.sub("", reason)
        text = "for the same reason" if why in self._reasons else reason
        self._reasons.add(why)
        print_line(self._console, f"{label} is out: {text}", "red")

    def left_s(self) -> float | None:
        """Seconds until the end, as far as can be said: what is left of every strategy's steps at
        the pace it has.
        """
        left_s = 0.0
        for row in self._rows.values():
            if row.failure is not None:
                continue
            if not row.step:
                return None
            steps_left = self._steps * (self._num_seeds - row.seeds_done) - row.step
            left_s += steps_left * row.seconds / row.step
        return left_s

    def table(self) -> Table:
        """The state of all strategies."""
        left_s = self.left_s()
        starting = not any(row.step for row in self._rows.values())
        rest = (
            "  starting workers"
            if starting
            else ""
            if left_s is None
            else f"  about {_duration(left_s)} left"
        )
        table = Table(
            title=f"seed {self._seed + 1} of {self._num_seeds}{rest}",
            title_justify="left",
            box=box.SIMPLE,
        )
        for name in (
            "",
            "step",
            "ms a step",
            "metric",
            "sent a step",
            *(f"w{rank}" for rank in range(self._num_workers)),
        ):
            table.add_column(name, justify="left" if not name else "right", no_wrap=True)
        for label, row in self._rows.items():
            name = (
                f"[bold]> {escape(label)}[/bold]" if label == self._turn else f"  {escape(label)}"
            )
            if row.failure is not None:
                table.add_row(name, "[red]out[/red]")
                continue
            sent = [progress.bytes_per_step for progress in row.workers.values()]
            table.add_row(
                name,
                f"{row.step}/{self._steps}",
                f"{row.seconds / row.step * 1e3:.1f}" if row.step else "",
                "" if row.metric is None else f"{row.metric:.4f}",
                decimal(round(sum(sent) / len(sent))) if sent else "",
                *(
                    f"{row.workers[rank].wait_share:.0%}" if rank in row.workers else ""
                    for rank in range(self._num_workers)
                ),
            )
        table.caption = "w0, w1, ...: share of its time each worker waits"
        table.caption_justify = "left"
        return table

    def _show(self) -> None:
        if self.live is not None:
            self.live.update(self.table())
            return
        if time.monotonic() - self._printed_s >= _PLAIN_EVERY_S:
            self._printed_s = time.monotonic()
            parts = [f"{label} {row.step}/{self._steps}" for label, row in self._rows.items()]
            left_s = self.left_s()
            rest = "" if left_s is None else f"; about {_duration(left_s)} left"
            line = f"seed {self._seed + 1}/{self._num_seeds}: {', '.join(parts)}{rest}"
            print_line(self._console, line)


@contextmanager
def comparison_display(*, quiet: bool = False) -> Iterator[ComparisonDisplay]:
    """A display for as long as the block runs. It writes to standard error."""
    console = Console(stderr=True, quiet=quiet)
    display = ComparisonDisplay(console)
    begins = "making the cluster, and starting workers"
    if not console.is_terminal or quiet:
        print_line(console, begins)
        yield display
        return
    waiting = Spinner("dots", text=begins)
    with Live(waiting, console=console, refresh_per_second=_REFRESHES_PER_S) as live:
        display.live = live
        yield display


_LEAST_COLUMN: Final = 9
"""Characters that every word of a cell has room for: digits are not to be broken apart."""

_WITH_INTERVAL: Final = {"time_to_target_s", "final_metric", "step_s"}


def print_comparison(comparison: Comparison, directory: Path, page: Path | None) -> None:
    """The verdict, the table, and where the rest is."""
    console = Console()
    if all(strategy.failure is not None for strategy in comparison.strategies):
        # Each failure has been said when it came.
        print_line(console, comparison.verdict, "bold")
        print(f"record: {directory}")
        return
    table = Table(
        title=f"{comparison.task} on {comparison.cluster.describe()}",
        title_justify="left",
        box=box.SIMPLE,
    )
    table.add_column("", min_width=_LEAST_COLUMN)
    for strategy in comparison.strategies:
        table.add_column(
            escape(strategy.label), justify="right", overflow="fold", min_width=_LEAST_COLUMN
        )
    metric = comparison.metric_name.replace("_", " ")
    for name, measure in MEASURES.items():
        cells = [_cell(strategy, name) for strategy in comparison.strategies]
        if any(cells):
            table.add_row(capital(measure.title.format(metric=metric)), *cells)
    console.print(table, crop=False)
    print_line(console, comparison.verdict, "bold")
    for finding in comparison.findings:
        print_line(console, f"- {finding}")
    target = "" if comparison.target is None else f"target {comparison.target:.4g}"
    reason = (
        "" if comparison.target_was_given or not target else " (the best that every run reached)"
    )
    seeds = (
        f"medians over {len(comparison.seeds)} seeds" if len(comparison.seeds) > 1 else "one seed"
    )
    print_line(console, f"{target}{reason}{'; ' if target else ''}{seeds}", "dim")
    emulation = comparison.emulation
    print_line(console, f"network: {emulation.network}; compute: {emulation.compute}", "dim")
    for notice in emulation.notices:
        print_line(console, f"note: {notice}")
    for strategy in comparison.strategies:
        for notice in strategy.notices:
            print_line(console, f"note ({strategy.label}): {notice}")
    print_line(console, f"record: {directory}")
    if page is not None:
        print_line(console, f"page:   {page}")


def _cell(strategy: ComparedStrategy, measure: str) -> str:
    if strategy.failure is not None:
        return "failed" if measure == "step_s" else ""
    figure = {str(name): one for name, one in strategy.measures.items()}.get(measure)
    if figure is None or figure.median is None:
        return ""
    text, interval = write_estimate(figure, MEASURES[measure].unit)
    return f"{text}\n[dim]{interval}[/dim]" if interval and measure in _WITH_INTERVAL else text


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
