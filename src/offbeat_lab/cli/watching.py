"""`offbeat watch`: what a run under way does, read from its record again and again until the run
ends. Nothing is asked of the run itself.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Final

import numpy as np
import psutil
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from offbeat.errors import RecordError
from offbeat.run.records import Head, events_path
from offbeat_lab.breakdown import Matrix, Steps, read_steps
from offbeat_lab.comparison import is_comparison
from offbeat_lab.figures import BYTES, COUNT, NUMBER, SECONDS, SHARE, write
from offbeat_lab.records import Record

_RECENT: Final = 50
"""Steps that figures are means over."""

_LAST_BYTES: Final = 1 << 20
"""Of each worker's steps: those of a long run are more than fit into memory, and take minutes to
read.
"""

_EVERY_S: Final = 1.0
_READING_SHARE: Final = 0.1
"""At most this part of the time goes into reading, however long a record is."""

_SILENT_S: Final = 10.0
"""A worker of which no step was heard for so long is shown as such."""


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """What a run did lately; arrays have a place for each worker, with NaN where nothing is known.

    Attributes:
        title: what runs.
        step: the last one that each worker finished.
        loss: of that step.
        step_s, waiting, late_s, bytes_sent: means over recent steps; `late_s` is how long after
            the first worker one came to an exchange.
        silent_s: since each worker's last step.
        target: steps that it is to take; None where nobody has said.
        news: the metric on the way, and how the run ended.
        ended: whether it has.
    """

    title: str
    step: Matrix
    loss: Matrix
    step_s: Matrix
    waiting: Matrix
    late_s: Matrix
    bytes_sent: Matrix
    silent_s: Matrix
    target: int | None
    news: list[str]
    ended: bool

    def table(self) -> Group:
        """The view for a terminal."""
        table = Table(
            box=box.SIMPLE, pad_edge=False, title=escape(self.title), title_justify="left"
        )
        for name in ("", "step", "loss", "a step", "waiting", "late by", "sent"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("")  # which is long: in 80 characters it would cut the figures
        slowest = self._slowest()
        of = "" if self.target is None else f"/{self.target}"
        for rank in range(self.step.size):
            silent = not self.ended and self.silent_s[rank] > _SILENT_S
            table.add_row(
                f"worker {rank}",
                f"{write(self.step[rank], COUNT)}{of}",
                write(self.loss[rank], NUMBER),
                write(self.step_s[rank], SECONDS),
                write(self.waiting[rank], SHARE),
                write(self.late_s[rank], SECONDS),
                write(self.bytes_sent[rank], BYTES),
                f"[red]silent for {self.silent_s[rank]:.0f} s[/red]"
                if silent
                else "[yellow]the others wait for it[/yellow]"
                if rank == slowest
                else "",
            )
        return Group(table, *(Text(line) for line in self.news))

    def _slowest(self) -> int | None:
        """The worker that comes last by much, or None."""
        if np.isnan(self.late_s).all():
            return None
        last = int(np.nanargmax(self.late_s))
        return last if self.late_s[last] > 0.1 * np.nanmean(self.step_s) else None


def view_of(path: Path, now_s: float) -> View:
    """What the record at `path` says at `now_s`, in seconds since 1970.

    Raises:
        RecordError: there is no run there, or its record is damaged.
    """
    if is_comparison(path):
        raise RecordError(
            f"{path} is a comparison, which shows by itself how it goes on; watch one of its runs,"
            f" such as {path / 'runs'}/LABEL-seed-0"
        )
    record = Record(path)
    config, summary = record.config, record.summary()
    files = [events_path(path, rank) for rank in range(config.workers)]
    begun = all(file.exists() and file.stat().st_size for file in files)
    steps = read_steps(record, last_bytes=_LAST_BYTES) if begun else None
    was_killed = summary is None and _has_nobody(record)
    news = [
        f"{evaluation.seconds:.1f} s, step {evaluation.step:,}: metric"
        f" {write(evaluation.metric, NUMBER)}"
        for evaluation in record.evaluations()[-1:]
    ]
    if summary is not None:
        news.append(
            f"{summary.status} after {summary.steps:,} steps; offbeat report {quote(str(path))}"
        )
    elif was_killed:
        news.append("no worker is alive, and there is no summary: the run was killed")
    elif steps is None or not steps.num_steps:
        news.append("workers start; no step is done yet")
    columns = _columns(record, steps, now_s) if steps is not None and steps.num_steps else {}
    nothing = np.full(config.workers, np.nan)
    names = ("step", "loss", "step_s", "waiting", "late_s", "bytes_sent", "silent_s")
    return View(
        title=f"{config.strategy} on {config.task}",
        **{name: columns.get(name, nothing) for name in names},
        target=config.steps,
        news=news,
        ended=summary is not None or was_killed,
    )


def _columns(record: Record, steps: Steps, now_s: float) -> dict[str, Matrix]:
    done, recent = steps.done, steps.window(-_RECENT)
    # A worker's last step; the first one, of which nothing is known, where it has done none.
    last = np.where(done.any(axis=1), steps.num_steps - 1 - done[:, ::-1].argmax(axis=1), 0)
    ranks = np.arange(steps.num_ranks)
    known = done[ranks, last]
    ended_s = (steps.began_s + steps.duration_s)[ranks, last]
    head = record.heads(0)[-1]
    duration_s = _mean(recent.duration_s)
    return {
        "step": np.where(known, steps.step[last], np.nan),
        "loss": steps.loss[ranks, last],
        "step_s": duration_s,
        "waiting": _mean(recent.waiting_for_others_s()) / duration_s,
        "late_s": _mean(recent.lateness_s()),
        "bytes_sent": _mean(recent.bytes_sent),
        "silent_s": now_s - head.monotonic_to_unix_s - ended_s,
    }


def _mean(values: Matrix) -> Matrix:
    """Of each row, without NaN; NaN where it holds nothing else."""
    known = np.isfinite(values)
    sums = np.where(known, values, 0.0).sum(axis=1)
    counts = known.sum(axis=1)
    means: Matrix = np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)
    return means


def _has_nobody(record: Record) -> bool:
    """Whether workers have begun to record, and no process of theirs is there any more, as far as
    this host can see.
    """
    begun = [r for r in range(record.config.workers) if events_path(record.path, r).exists()]
    heads = [head for rank in begun for head in record.heads(rank)[-1:]]
    return bool(heads) and not any(map(_is_alive, heads))


def _is_alive(head: Head) -> bool:
    return head.host != socket.gethostname() or psutil.pid_exists(head.pid)


def views(
    path: Path,
    *,
    now_s: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[View]:
    """Views of the run at `path`, one a second or fewer, until it has ended."""
    while True:
        begun_s = time.monotonic()
        view = view_of(path, now_s())
        yield view
        if view.ended:
            return
        sleep(max(_EVERY_S, (time.monotonic() - begun_s) / _READING_SHARE))


def watch(path: Path) -> None:
    """Show the run at `path` until it ends; where there is no terminal, only how it ended."""
    with Live(console=Console(), auto_refresh=False) as live:
        for view in views(path):
            live.update(view.table(), refresh=True)
