"""Every trace is well formed whatever the record holds, and shows what the record says."""

from __future__ import annotations

import gzip
import json
import resource
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import ConfigError, RecordError
from offbeat.run.records import Evaluation, EventWriter, StepEvent, begin_attempt, create
from offbeat.transport.driver import Arrival
from offbeat_lab.config import Request, resolve
from offbeat_lab.records import Record
from offbeat_lab.report import trace
from offbeat_lab.report.trace import write_trace
from offbeat_lab.train import plan, train

CONFIG = resolve(Request(task="digits", strategy="allreduce", steps=20, workers=2))
EVENT = StepEvent(
    step=1,
    loss=0.5,
    batch_size=4,
    began_s=1000.0,
    ready_s=1000.25,
    duration_s=1.0,
    compute_s=0.5,
    encode_s=0.0,
    wait_s=0.5,
    padded_s=0.0,
    bytes_sent=7,
    messages_sent=2,
    skipped=False,
    arrivals=[Arrival(0, 1 << 62, "AllReduce", 1000.25, 0.5)],
)

TraceEvent = dict[str, Any]


def write_record(path: Path, ranks: Sequence[Sequence[StepEvent]], *, start_step: int = 0) -> Path:
    """A record of one attempt, or a further attempt in the record that is there."""
    if not path.exists():
        create(path, CONFIG)
    attempt = begin_attempt(path, CONFIG, start_step=start_step)
    for rank, events in enumerate(ranks):
        writer = EventWriter(path, rank=rank, attempt=attempt)
        for event in events:
            writer.add(event)
        writer.close()
    return path


def set_head(path: Path, rank: int, number: int = 0, **values: object) -> None:
    """Change head line `number` of a rank's events."""
    file = path / f"events-rank-{rank}.jsonl"
    lines = file.read_text().splitlines()
    places = [place for place, line in enumerate(lines) if "offbeat events" in line]
    lines[places[number]] = json.dumps(json.loads(lines[places[number]]) | values)
    file.write_text("".join(f"{line}\n" for line in lines))


def read(out: Path) -> list[TraceEvent]:
    with gzip.open(out) if out.suffix == ".gz" else out.open("rb") as file:
        events: list[TraceEvent] = json.load(file, parse_constant=pytest.fail)["traceEvents"]
    return events


def traced(run: Path) -> list[TraceEvent]:
    """The trace of `run`, checked."""
    with TemporaryDirectory() as directory:
        out = Path(directory) / "trace.json"
        count = write_trace(run, out)
        events = read(out)
        assert [path.name for path in out.parent.iterdir()] == [out.name]
    assert count == len(events)
    check(events)
    return events


def span(event: TraceEvent) -> tuple[int, int]:
    """Beginning and end of a slice in nanoseconds."""
    return round(event["ts"] * 1000), round(event["ts"] * 1000) + round(event["dur"] * 1000)


def check(events: Sequence[TraceEvent]) -> None:
    """What the format demands, and viewers silently drop where it is not so."""
    names: dict[str, set[tuple[int, int]]] = defaultdict(set)
    tracks: dict[tuple[int, int], list[TraceEvent]] = defaultdict(list)
    for event in events:
        assert event.keys() >= {"ph", "ts", "pid", "tid", "name", "args"}
        assert event["ph"] in set("XCiM")
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append(event)
        elif event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
        elif event["ph"] == "i":
            assert event["s"] == "p"
        else:
            names[event["name"]].add((event["pid"], event["tid"]))
    for slices in tracks.values():
        check_nesting(slices)
    assert set(tracks) == names["thread_name"]
    assert {pid for pid, _ in tracks} == {pid for pid, _ in names["process_name"]}


def check_nesting(slices: Sequence[TraceEvent]) -> None:
    under_way: list[tuple[int, int]] = []
    for event in slices:  # in the order of the file, in which whoever contains another comes first
        begins, ends = span(event)
        while under_way and under_way[-1][1] <= begins:
            under_way.pop()
        assert not under_way or (under_way[-1][0] <= begins and ends <= under_way[-1][1])
        under_way.append((begins, ends))


def slices(events: Sequence[TraceEvent], category: str, pid: int = 0) -> list[TraceEvent]:
    return [
        event
        for event in events
        if event["ph"] == "X" and event["cat"] == category and event["pid"] == pid
    ]


def of_name(events: Sequence[TraceEvent], name: str) -> list[TraceEvent]:
    return [event for event in events if event["name"] == name]


seconds = st.floats(0, 3) | st.sampled_from([0.0, 0.1, 0.2, 0.3])
arrivals = st.builds(
    Arrival,
    st.just(0),
    st.integers(0, 2**63 - 1),
    st.sampled_from(["Recv", "AllReduce"]),
    seconds,
    seconds,
)


@st.composite
def rank_events(draw: st.DrawFn) -> list[StepEvent]:
    """Steps one after the other, up to what rounding and a careless writer make of that."""
    events, now_s = [], draw(st.floats(0.5, 1e6))
    for step in range(1, draw(st.integers(1, 4)) + 1):
        duration_s, wait_s = draw(seconds), draw(seconds)
        event = replace(
            EVENT,
            step=step,
            loss=draw(st.none() | st.floats(-10, 10)),
            began_s=now_s,
            ready_s=draw(st.none() | seconds.map(lambda after, now_s=now_s: now_s + after)),
            duration_s=duration_s,
            wait_s=wait_s,
            skipped=draw(st.booleans()),
            arrivals=[
                a._replace(arrived_at_s=now_s + a.arrived_at_s)
                for a in draw(st.lists(arrivals, max_size=6))
            ],
        )
        events.append(event)
        now_s += duration_s + draw(st.sampled_from([0.0, 0.5, -1e-9]))
    return events


@given(st.lists(rank_events(), min_size=1, max_size=3))
def test_any_record_gives_a_trace_that_viewers_accept(ranks: list[list[StepEvent]]) -> None:
    with TemporaryDirectory() as directory:
        events = traced(write_record(Path(directory) / "run", ranks))
    for rank, recorded in enumerate(ranks):
        steps = slices(events, "step", rank)
        assert [step["name"] for step in steps] == [f"step {event.step}" for event in recorded]
        phases = slices(events, "phase", rank)
        assert sum(e - b for b, e in map(span, phases)) == sum(e - b for b, e in map(span, steps))
        drawn = Counter(event["args"]["channel"] for event in slices(events, "collective", rank))
        assert drawn == Counter(
            str(arrival.channel) for event in recorded for arrival in event.arrivals
        )
        skipped = [
            event["args"]["step"] for event in events if event["ph"] == "i" and event["pid"] == rank
        ]
        assert skipped == [event.step for event in recorded if event.skipped]
    losses = [event["args"]["loss"] for event in of_name(events, "loss")]
    assert losses == [
        event.loss for recorded in ranks for event in recorded if event.loss is not None
    ]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=12))
def test_there_are_no_more_tracks_than_collectives_at_once(spans: list[tuple[int, int]]) -> None:
    some = [Arrival(0, 0, "Recv", begins_s, lasts_s) for begins_s, lasts_s in spans]
    with TemporaryDirectory() as directory:
        events = traced(write_record(Path(directory) / "run", [[replace(EVENT, arrivals=some)]]))
    most_at_once = max(
        sum(begins <= at < begins + lasts for begins, lasts in spans) for at in range(40)
    )
    assert len({event["tid"] for event in slices(events, "collective")}) == most_at_once


def test_a_step_is_drawn_as_it_was(tmp_path: Path) -> None:
    run = write_record(tmp_path / "run", [[EVENT]])
    set_head(run, 0, host="node-a", pid=42)
    events = traced(run)
    (step,) = slices(events, "step")
    assert (step["ts"], step["dur"], step["name"]) == (0, 1e6, "step 1")
    assert step["args"]["loss"] == 0.5
    assert step["args"]["batch size"] == 4
    assert step["args"]["bytes sent"] == 7
    assert step["args"]["skipped"] is False
    phases = [(event["name"], event["ts"], event["dur"]) for event in slices(events, "phase")]
    assert phases == [("compute", 0, 0.25e6), ("wait", 0.25e6, 0.5e6), ("finish", 0.75e6, 0.25e6)]
    (collective,) = slices(events, "collective")
    assert (collective["name"], collective["ts"], collective["dur"]) == ("AllReduce", 0.25e6, 0.5e6)
    assert collective["args"]["channel"] == str(1 << 62)
    assert [event["args"] for event in of_name(events, "bytes per step")] == [{"bytes": 7}]
    assert of_name(events, "process_name")[0]["args"]["name"] == "worker 0 (node-a, pid 42)"


def test_a_step_that_exchanged_nothing_is_all_compute(tmp_path: Path) -> None:
    events = traced(write_record(tmp_path / "run", [[replace(EVENT, ready_s=None, arrivals=())]]))
    assert [(event["name"], event["dur"]) for event in slices(events, "phase")] == [
        ("compute", 1e6)
    ]


def test_evaluations_stand_where_they_were_made(tmp_path: Path) -> None:
    run = write_record(tmp_path / "run", [[EVENT], [EVENT]])
    writer = EventWriter(run, rank=0, attempt=0)
    for step, at_s, metric in ((0, 999.5, float("inf")), (1, 1001.5, 0.25)):
        writer.add_evaluation(
            Evaluation(step=step, seconds=0.0, bytes_sent=0, metric=metric, at_s=at_s)
        )
    writer.close()
    events = traced(run)
    marks = [(event["ts"], event["pid"], event["args"]) for event in events if event["ph"] == "i"]
    assert marks == [(0, 0, {"step": 0, "metric": None}), (2e6, 0, {"step": 1, "metric": 0.25})]
    assert [event["name"] for event in events if event["ph"] == "i"] == [
        "evaluation inf",
        "evaluation 0.25",
    ]
    assert [event["ts"] for event in events if event["name"] == "step 1"] == [0.5e6, 0.5e6]


@pytest.mark.parametrize(
    ("head", "later_us"),
    [
        ({"host": "other", "monotonic_to_unix_s": 1_700_000_500.0}, 500e6),
        (
            {"monotonic_to_unix_s": 1_700_000_000.000_1},
            0,
        ),  # the same clock, with the offset noted at another moment
        (
            {"monotonic_to_unix_s": 1_700_000_500.0},
            500e6,
        ),  # a host that was started again, or another of the same name
    ],
)
def test_ranks_are_put_on_one_clock(
    tmp_path: Path, head: Mapping[str, object], later_us: float
) -> None:
    run = write_record(tmp_path / "run", [[EVENT], [replace(EVENT, began_s=1000.000_001)]])
    set_head(run, 0, monotonic_to_unix_s=1_700_000_000.0)
    set_head(run, 1, **head)
    starts = [event["ts"] for event in traced(run) if event["name"] == "step 1"]
    assert starts == [0, later_us + 1]


def test_a_resume_goes_on_with_its_own_clock(tmp_path: Path) -> None:
    run = write_record(
        tmp_path / "run",
        [[replace(EVENT, step=step, began_s=1000.0 + step, arrivals=()) for step in (1, 2, 3)]],
    )
    write_record(
        run,
        [[replace(EVENT, step=step, began_s=50.0 + step, arrivals=()) for step in (3, 4)]],
        start_step=2,
    )
    set_head(run, 0, 0, host="a", pid=1, monotonic_to_unix_s=1_700_000_000.0)
    set_head(run, 0, 1, host="b", pid=2, monotonic_to_unix_s=1_700_002_000.0)
    events = traced(run)
    assert [(step["name"], step["ts"]) for step in slices(events, "step")] == [
        ("step 1", 0),
        ("step 2", 1e6),
        ("step 3", 1052e6),
        ("step 4", 1053e6),
    ]
    assert of_name(events, "process_name")[0]["args"]["name"] == "worker 0 (a, pid 1; b, pid 2)"


def test_the_runs_of_a_comparison_stand_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = replace(EVENT, began_s=2000.0, arrivals=())
    write_record(tmp_path / "runs" / "ddp-seed-0", [[EVENT], [EVENT]])
    write_record(tmp_path / "runs" / "gtopk-seed-0", [[later], [later]])
    create(tmp_path / "runs" / "gtopk-seed-1", CONFIG)
    (tmp_path / "runs" / "gtopk-seed-2").mkdir()
    (tmp_path / "comparison.json").write_text("{}")
    places = [["runs/ddp-seed-0"], [f"runs/gtopk-seed-{seed}" for seed in range(4)]]
    comparison = SimpleNamespace(strategies=[SimpleNamespace(runs=runs) for runs in places])
    monkeypatch.setattr(trace, "read_comparison", lambda path: comparison)
    events = traced(tmp_path)
    labels = [event["args"]["name"].partition(" (")[0] for event in of_name(events, "process_name")]
    assert labels == [
        f"{run} · worker {rank}" for run in ("ddp-seed-0", "gtopk-seed-0") for rank in (0, 1)
    ]
    assert [(event["pid"], event["ts"]) for event in events if event["name"] == "step 1"] == [
        (pid, 0) for pid in range(4)
    ]


@pytest.mark.ranks
def test_a_real_run_is_traced(tmp_path: Path) -> None:
    request = Request(
        task="digits", strategy="gtopk", workers=2, steps=4, settings=["collective=tree"]
    )
    train(plan(request, out=tmp_path / "run"), lambda progress: None)
    events = traced(tmp_path / "run")
    write_trace(tmp_path / "run", tmp_path / "new" / "trace.json.gz")
    assert read(tmp_path / "new" / "trace.json.gz") == events
    record = Record(tmp_path / "run")
    for rank in range(2):
        assert [step["args"]["loss"] for step in slices(events, "step", rank)] == [
            e.loss for e in record.events(rank)
        ]
        assert slices(events, "collective", rank)
        assert "wait" in {phase["name"] for phase in slices(events, "phase", rank)}


def test_what_exists_is_left_alone(tmp_path: Path) -> None:
    run = write_record(tmp_path / "run", [[EVENT]])
    out = tmp_path / "trace.json"
    out.write_text("mine")
    with pytest.raises(ConfigError, match="exists; choose another --out"):
        write_trace(run, out)
    assert out.read_text() == "mine"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "holds no run record"),
        ('{"kind": "offbeat run", "schema_version": 999}', "has run record schema 999"),
    ],
)
def test_what_is_no_record_of_this_version_is_refused(
    tmp_path: Path, config: str | None, message: str
) -> None:
    if config:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(RecordError, match=message):
        write_trace(tmp_path, tmp_path / "out" / "trace.json")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("ranks", [[], [[]]])
def test_a_run_without_a_step_is_refused(tmp_path: Path, ranks: list[list[StepEvent]]) -> None:
    run = write_record(tmp_path / "run", ranks)
    with pytest.raises(RecordError, match="holds no step yet"):
        write_trace(run, tmp_path / "trace.json")


def test_a_damaged_record_leaves_no_half_trace(tmp_path: Path) -> None:
    run = write_record(tmp_path / "run", [[EVENT]])
    with (run / "events-rank-0.jsonl").open("a") as file:
        file.write('{"step": "soon"}\n')
    with pytest.raises(RecordError, match="no event"):
        write_trace(run, tmp_path / "trace.json")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@contextmanager
def no_file_larger_than(num_bytes: int) -> Iterator[None]:
    """What a full disk does, done by the kernel to this process alone."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_full_disk_leaves_no_half_trace(tmp_path: Path, name: str) -> None:
    run = write_record(
        tmp_path / "run",
        [[replace(EVENT, step=step, began_s=1000.0 + step) for step in range(1, 400)]],
    )
    with (
        no_file_larger_than(4096),
        pytest.raises(RecordError, match=r"cannot write .*: .*; choose another --out"),
    ):
        write_trace(run, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_place_where_nothing_can_be_written_is_named(tmp_path: Path) -> None:
    run = write_record(tmp_path / "run", [[EVENT]])
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot write .*trace.json: Not a directory"):
        write_trace(run, tmp_path / "file" / "trace.json")
