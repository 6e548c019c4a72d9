"""A record as a trace that Perfetto and chrome://tracing open: one process a worker, and on it what
that worker did when.

Each worker has a track of steps, with the phases inside them, and as many tracks of collectives as
were under way at once, because viewers drop slices that overlap without nesting. Times are whole
nanoseconds until they are written, so that what nests in the record nests to the digit in the
trace. `docs/trace.md` tells how to read one.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, as a JSON
object.
"""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import TypeAlias

from offbeat.errors import ConfigError, RecordError
from offbeat.run.records import ELSEWHERE, Evaluation, StepEvent, naming_failed_file
from offbeat.session.checkpoint import Json, whole_file
from offbeat.transport.driver import Arrival
from offbeat_lab.comparison import is_comparison, read_comparison
from offbeat_lab.records import Record

Event: TypeAlias = dict[str, Json]

_STEPS = 1
"""Number of the track of steps; those of collectives follow it."""

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False).encode


def write_trace(run: Path, out: Path) -> int:
    """Write the trace of a run, or of every run of a comparison, to the file `out`; compressed when
    its name ends in ``.gz``.

    Every run begins at time 0. Memory does not grow with the number of steps.

    Returns:
        The number of trace events.

    Raises:
        ConfigError: `out` exists. Nothing in it is touched.
        RecordError: `run` is no record, one of a newer version, damaged or still empty, or `out`
            cannot be written. There is no half-written file then.
    """
    runs = _open_runs(run)
    if out.exists():
        raise ConfigError(f"{out} exists; choose another --out")
    num_events = 0
    with naming_failed_file(out, ELSEWHERE):
        if not out.parent.exists():
            out.parent.mkdir(parents=True)
        with (
            whole_file(out) as whole,
            # The fastest level: a trace is so repetitive that the others gain little.
            (
                gzip.open(whole, "wt", 1, "utf-8")
                if out.suffix == ".gz"
                else TextIOWrapper(whole, "utf-8")
            ) as file,
        ):
            file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
            for event in _trace(runs):
                file.write(f",\n{_encode(event)}" if num_events else _encode(event))
                num_events += 1
            file.write("\n]}\n")
    return num_events


def _open_runs(path: Path) -> list[tuple[str, TraceTimeline]]:
    """The runs of a comparison that have begun, with their names; or the one run that `path` is,
    without a name.

    Raises:
        RecordError: there is nothing to read, or nothing that this version can read.
    """
    if is_comparison(path):
        places = [
            path / run for strategy in read_comparison(path).strategies for run in strategy.runs
        ]
        runs = [
            (place.name, TraceTimeline(Record(place)))
            for place in places
            if (place / "config.json").exists()
        ]
    else:
        runs = [("", TraceTimeline(Record(path)))]
    begun = [(name, timeline) for name, timeline in runs if timeline.ranks]
    if not begun:
        raise RecordError(
            f"{path} holds no step yet; wait until the first is done, or see {path / 'logs'} for"
            " what kept it"
        )
    return begun


class TraceTimeline:
    """The times of all ranks and attempts of a run on one axis, which begins with the first thing
    recorded.

    Attributes:
        record: the run.
        ranks: which ranks have recorded a step, ascending.
        began_unix_ns: Unix time of the beginning, in nanoseconds.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        firsts = {
            rank: first
            for rank in _ranks_with_events(record)
            if (first := next(record.events(rank), None))
        }
        self.ranks = list(firsts)
        self._heads = {rank: record.heads(rank) for rank in self.ranks}
        self._start_steps = [attempt.start_step for attempt in record.attempts]
        # whole numbers, because a Unix time in seconds leaves a float no room for nanoseconds
        self._offset_ns = self._offsets_ns()
        self.began_unix_ns = 0
        beginnings = [
            self.at_ns(rank, first.step, at_s)
            for rank, first in firsts.items()
            for at_s in (first.began_s, *(arrival.arrived_at_s for arrival in first.arrivals))
        ]
        beginnings += [self.at_ns(one.rank, one.step, one.at_s) for one in self.evaluations()]
        self.began_unix_ns = min(beginnings, default=0)

    def at_ns(self, rank: int, step: int, monotonic_s: float) -> int:
        """Nanoseconds from the beginning to `monotonic_s` on the clock that `rank` had
        in `step`.
        """
        attempt = max(
            (number for number, start in enumerate(self._start_steps) if start < step), default=0
        )
        return round(monotonic_s * 1e9) + self._offset_ns[rank, attempt] - self.began_unix_ns

    def evaluations(self) -> list[Evaluation]:
        """Those of ranks that have recorded steps too: their clocks are known from there."""
        return [
            evaluation for evaluation in self.record.evaluations() if evaluation.rank in self.ranks
        ]

    def label(self, rank: int) -> str:
        """Such as ``worker 3 (node-b, pid 4242)``, with one place for each attempt."""
        places = dict.fromkeys(f"{head.host}, pid {head.pid}" for head in self._heads[rank])
        return f"worker {rank} ({'; '.join(places)})"

    def _offsets_ns(self) -> dict[tuple[int, int], int]:
        """What turns a monotonic time into a Unix time, by (rank, attempt).

        Ranks of one host share a clock, but each has noted the offset at another moment: they all
        get the first one's.
        """
        shared: dict[tuple[str, int], int] = {}
        return {
            (rank, head.attempt): shared.setdefault(
                (head.host, round(head.monotonic_to_unix_s)), round(head.monotonic_to_unix_s * 1e9)
            )
            for rank, heads in self._heads.items()
            for head in heads
        }


def _trace(runs: list[tuple[str, TraceTimeline]]) -> Iterator[Event]:
    first_pid = 0
    for name, timeline in runs:
        for rank in timeline.ranks:
            label = timeline.label(rank)
            yield from _Worker(timeline, rank, first_pid + rank).events(
                f"{name} · {label}" if name else label
            )
        first_pid += timeline.ranks[-1] + 1


class _Worker:
    """One process of the trace. What it puts on one track never overlaps without nesting."""

    def __init__(self, timeline: TraceTimeline, rank: int, pid: int) -> None:
        self._timeline = timeline
        self._rank = rank
        self._pid = pid
        # when the last slice on each track ended
        self._steps_free_ns = 0
        self._collectives_free_ns: list[int] = []

    def events(self, label: str) -> Iterator[Event]:
        yield self._metadata("process_name", _STEPS, {"name": label})
        yield self._metadata("process_sort_index", _STEPS, {"sort_index": self._pid})
        yield from self._name_track(_STEPS, "steps")
        for event in self._timeline.record.events(self._rank):
            yield from self._step(event)
            for began_ns, ended_ns, arrival in sorted(
                (*self._span(event.step, other), other) for other in event.arrivals
            ):
                yield from self._collective(event.step, arrival, began_ns, ended_ns)
        for evaluation in (one for one in self._timeline.evaluations() if one.rank == self._rank):
            at_ns = self._ns(evaluation.step, evaluation.at_s)
            # JSON has no word for the others.
            metric = evaluation.metric if math.isfinite(evaluation.metric) else None
            args: Event = {"step": evaluation.step, "metric": metric}
            yield self._instant(f"evaluation {evaluation.metric:.4g}", at_ns, args)

    def _step(self, event: StepEvent) -> Iterator[Event]:
        # a sum of rounded times may reach past the next step's beginning, and viewers drop what
        # overlaps
        began_ns = max(self._ns(event.step, event.began_s), self._steps_free_ns)
        ended_ns = self._steps_free_ns = max(
            self._ns(event.step, event.began_s + event.duration_s), began_ns
        )
        args: Event = {"loss": event.loss, "batch size": event.batch_size, "skipped": event.skipped}
        args |= {
            "bytes sent": event.bytes_sent,
            "messages sent": event.messages_sent,
            "compute (s)": event.compute_s,
        }
        args |= {
            "encode (s)": event.encode_s,
            "wait (s)": event.wait_s,
            "padded (s)": event.padded_s,
        }
        yield self._slice(f"step {event.step}", "step", _STEPS, began_ns, ended_ns, args)
        for name, from_ns, to_ns in self._phases(event, began_ns, ended_ns):
            if from_ns < to_ns:
                yield self._slice(name, "phase", _STEPS, from_ns, to_ns)
        if event.loss is not None:
            yield self._event("C", "loss", began_ns, _STEPS, args={"loss": event.loss})
        yield self._event("C", "bytes per step", began_ns, _STEPS, args={"bytes": event.bytes_sent})
        if event.skipped:
            yield self._instant(f"step {event.step} skipped", ended_ns, {"step": event.step})

    def _phases(self, event: StepEvent, began_ns: int, ended_ns: int) -> list[tuple[str, int, int]]:
        """What happened within the step. A record keeps the sum of the waits: they are drawn as
        one, where the first began.
        """
        if event.ready_s is None:
            return [("compute", began_ns, ended_ns)]
        ready_ns = min(max(self._ns(event.step, event.ready_s), began_ns), ended_ns)
        waited_ns = min(ready_ns + round(max(event.wait_s, 0.0) * 1e9), ended_ns)
        return [
            ("compute", began_ns, ready_ns),
            ("wait", ready_ns, waited_ns),
            ("finish", waited_ns, ended_ns),
        ]

    def _span(self, step: int, arrival: Arrival) -> tuple[int, int]:
        began_ns = self._ns(step, arrival.arrived_at_s)
        return began_ns, max(self._ns(step, arrival.arrived_at_s + arrival.waited_s), began_ns)

    def _collective(
        self, step: int, arrival: Arrival, began_ns: int, ended_ns: int
    ) -> Iterator[Event]:
        # The first track that has nothing at this time, named when it is new.
        free_ns = self._collectives_free_ns
        lane = next((lane for lane, free in enumerate(free_ns) if free <= began_ns), len(free_ns))
        track = _STEPS + 1 + lane
        if lane == len(free_ns):
            free_ns.append(0)
            yield from self._name_track(track, f"collectives {lane + 1}" if lane else "collectives")
        free_ns[lane] = ended_ns
        # as text: a channel has up to 63 bits, and viewers in a browser keep 53 of a number
        args: Event = {"channel": str(arrival.channel), "step": step}
        yield self._slice(arrival.operation, "collective", track, began_ns, ended_ns, args)

    def _ns(self, step: int, monotonic_s: float) -> int:
        """Nanoseconds from the beginning of the run; no clock that was set back leads before it."""
        return max(self._timeline.at_ns(self._rank, step, monotonic_s), 0)

    def _name_track(self, track: int, name: str) -> Iterator[Event]:
        yield self._metadata("thread_name", track, {"name": name})
        yield self._metadata("thread_sort_index", track, {"sort_index": track})

    def _metadata(self, name: str, track: int, args: Event) -> Event:
        return self._event("M", name, 0, track, args=args)

    def _instant(self, name: str, at_ns: int, args: Event) -> Event:
        return self._event("i", name, at_ns, _STEPS, s="p", args=args)

    def _slice(
        self,
        name: str,
        category: str,
        track: int,
        from_ns: int,
        to_ns: int,
        args: Event | None = None,
    ) -> Event:
        return self._event(
            "X", name, from_ns, track, cat=category, dur=(to_ns - from_ns) / 1000, args=args or {}
        )

    def _event(self, phase: str, name: str, at_ns: int, track: int, **more: Json) -> Event:
        return {
            "ph": phase,
            "name": name,
            "ts": at_ns / 1000,
            "pid": self._pid,
            "tid": track,
            **more,
        }


def _ranks_with_events(record: Record) -> list[int]:
    names = (re.fullmatch(r"events-rank-(\d+)\.jsonl", path.name) for path in record.path.iterdir())
    return sorted(int(name[1]) for name in names if name)
