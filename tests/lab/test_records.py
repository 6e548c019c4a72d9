"""A record is read back as written; what is torn is left out, what is foreign is refused, nothing
is overwritten.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from offbeat.codec.json_objects import build
from offbeat.errors import RecordError
from offbeat.run.config import RunConfig
from offbeat.run.records import (
    EventWriter,
    StepEvent,
    Summary,
    begin_attempt,
    create,
    lock,
    write_summary,
)
from offbeat_lab.config import Request, resolve
from offbeat_lab.records import MegaBatch, Record, Share, add_mega_batch

CONFIG = resolve(Request(task="digits", strategy="allreduce", steps=20, workers=2))


def event(step: int, loss: float = 0.5) -> StepEvent:
    return StepEvent(
        step=step,
        loss=loss,
        batch_size=4,
        began_s=float(step),
        ready_s=step + 0.1,
        duration_s=0.3,
        compute_s=0.1,
        encode_s=0.0,
        wait_s=0.2,
        padded_s=0.05,
        bytes_sent=7,
        messages_sent=2,
        skipped=False,
        arrivals=[(step, 2, "AllReduce", 1.5, 0.25)],
    )


def summary(path: Path, **changes: object) -> Summary:
    values: dict[str, object] = {
        "status": "finished",
        "task": "digits",
        "strategy": "allreduce",
        "workers": 2,
        "world_size": 2,
        "steps": 20,
        "metric": 0.5,
        "metric_name": "accuracy",
        "higher_is_better": True,
        "loss": 1.0,
        "seconds": 2.0,
        "steps_per_s": 10.0,
        "samples_per_s": 80.0,
        "bytes_sent_per_step": 7.0,
        "messages_sent_per_step": 2.0,
        "peak_memory_bytes": [1000, 2000],
        "skipped_steps": 0,
        "num_parameters": 3,
        "parameters_sha256": "0",
        "replicas_identical": True,
        "resumed_from_step": None,
        "notices": ["so it is"],
        "run_directory": str(path),
    }
    return build(Summary, values | changes)


def write_events(path: Path, steps: range, config: RunConfig = CONFIG, loss: float = 0.5) -> None:
    attempt = begin_attempt(path, config, start_step=steps.start - 1)
    for rank in range(config.workers):
        writer = EventWriter(path, rank=rank, attempt=attempt)
        for step in steps:
            writer.add(event(step, loss))
        writer.close()


def test_a_record_is_read_back_as_written(tmp_path: Path) -> None:
    path = create(tmp_path / "run", CONFIG)
    write_events(path, range(1, 4))
    record = Record(path)
    assert record.config == CONFIG
    assert record.summary() is None
    write_summary(summary(path))
    assert record.summary() == summary(path)
    assert list(record.events(1)) == [event(step) for step in (1, 2, 3)]
    assert record.environment["num_cpus"]


def test_steps_that_a_resume_took_back_are_left_out(tmp_path: Path) -> None:
    path = create(tmp_path / "run", CONFIG)
    write_events(path, range(1, 8))
    write_events(path, range(4, 9), replace(CONFIG, workers=1), loss=0.25)
    record = Record(path)
    assert [attempt.start_step for attempt in record.attempts] == [0, 3]
    assert [(event.step, event.loss) for event in record.events(0)] == [
        *((s, 0.5) for s in (1, 2, 3)),
        *((s, 0.25) for s in range(4, 9)),
    ]
    assert [event.step for event in record.events(1)] == [1, 2, 3]


def mega_batch(step: int, weight: float = 0.5) -> MegaBatch:
    share = Share(
        rank=1,
        batch_size=4,
        updates=2,
        samples=7,
        weight=weight,
        computing_s=1.5,
        idle_s=0.25,
        claims=[[(0, 4)], [(9, 10), (20, 22)]],
    )
    return MegaBatch(
        number=step // 2,
        epoch=0,
        step=step,
        seconds=2.0,
        at_s=50.0,
        duration_s=2.0,
        merge_s=0.1,
        by_rank=[share, share],
    )


def test_mega_batches_are_read_back_without_those_that_a_resume_took_back(tmp_path: Path) -> None:
    path = create(tmp_path / "run", CONFIG)
    assert Record(path).mega_batches() == []
    for attempt, steps in enumerate([(2, 4, 6), (4, 6, 8)]):
        writer = EventWriter(
            path, rank=0, attempt=begin_attempt(path, CONFIG, start_step=2 * attempt)
        )
        for step in steps:
            add_mega_batch(path, mega_batch(step, weight=attempt))
        writer.close()
    EventWriter(path, rank=1, attempt=1).close()
    assert Record(path).mega_batches() == [
        mega_batch(2, weight=0),
        *(mega_batch(step, weight=1) for step in (4, 6, 8)),
    ]


@pytest.mark.parametrize("resumed", [False, True])
def test_a_line_torn_by_a_kill_is_left_out(tmp_path: Path, resumed: bool) -> None:
    path = create(tmp_path / "run", CONFIG)
    write_events(path, range(1, 4))
    file = path / "events-rank-0.jsonl"
    file.write_text(file.read_text()[:-20])
    if resumed:
        write_events(path, range(3, 5))
    assert [event.step for event in Record(path).events(0)] == ([1, 2, 3, 4] if resumed else [1, 2])


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = create(tmp_path / "run", CONFIG)
    write_events(path, range(1, 4))
    file = path / "events-rank-0.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:2], lines[2][:9] + "\n", *lines[3:]]))
    with pytest.raises(RecordError, match="damaged near line 4"):
        list(Record(path).events(0))


def test_an_event_of_another_shape_is_an_error(tmp_path: Path) -> None:
    path = create(tmp_path / "run", CONFIG)
    write_events(path, range(1, 2))
    with (path / "events-rank-0.jsonl").open("a") as file:
        file.write('{"step": "soon"}\n')
    with pytest.raises(RecordError, match="no event"):
        list(Record(path).events(0))


def test_the_summary_of_the_attempt_before_is_kept(tmp_path: Path) -> None:
    path = create(tmp_path / "run", CONFIG)
    begin_attempt(path, CONFIG, start_step=0)
    write_summary(summary(path))
    begin_attempt(path, CONFIG, start_step=20)
    assert Record(path).summary() is None
    assert json.loads((path / "summary-attempt-0.json").read_text())["steps"] == 20


def test_going_on_is_offered_where_there_is_something_to_go_on_from(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "checkpoint" / "step-5").mkdir(parents=True)
    with pytest.raises(RecordError, match=f"go on with --resume {tmp_path}"):
        create(tmp_path, CONFIG)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "holds the record of an earlier run; choose another --out$"),
        (None, "is not empty and holds no run"),
    ],
)
def test_nothing_is_overwritten(
    tmp_path: Path, content: dict[str, object] | None, message: str
) -> None:
    name = "notes.txt" if content is None else "config.json"
    (tmp_path / name).write_text("{}")
    with pytest.raises(RecordError, match=message):
        create(tmp_path, CONFIG)
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [(name, "{}")]


def test_runs_without_a_name_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [str(create(None, CONFIG)) for _ in range(2)] == [
        "runs/digits-allreduce-001",
        "runs/digits-allreduce-002",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "holds no run record"),
        ("not json", "is damaged"),
        ('{"kind": "something else"}', "was not written by offbeat"),
        ("[1, 2]", "was not written by offbeat"),
        (
            '{"kind": "offbeat run", "schema_version": 3}',
            "has run record schema 3, this version reads 2",
        ),
        ('{"kind": "offbeat run", "schema_version": 2}', "damaged at attempts"),
    ],
)
def test_foreign_and_newer_records_are_refused(
    tmp_path: Path, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(RecordError, match=message):
        Record(tmp_path)


def test_a_directory_serves_one_run_at_a_time(tmp_path: Path) -> None:
    with lock(tmp_path), pytest.raises(RecordError, match="another process is running"):
        lock(tmp_path)
    lock(tmp_path).close()


def test_a_loss_that_is_not_finite_stays_valid_json(tmp_path: Path) -> None:
    path = create(tmp_path / "run", CONFIG)
    write_summary(summary(path, loss=float("nan"), metric=float("inf")))
    assert (
        json.loads((path / "summary.json").read_text(), parse_constant=pytest.fail)["loss"] is None
    )


def test_a_full_disk_is_an_error_of_ours(tmp_path: Path) -> None:
    path = create(tmp_path / "run", CONFIG)
    (path / "events-rank-0.jsonl").symlink_to("/dev/full")
    (path / ".summary.json.tmp").symlink_to("/dev/full")
    message = "cannot write .* No space left .* make room"

    writer = EventWriter(path, rank=0, attempt=0)
    with pytest.raises(RecordError, match=message):
        writer.add(event(1))
    with pytest.raises(RecordError, match=message):
        writer.close()
    with pytest.raises(RecordError, match=message):
        write_summary(summary(path))

    assert not list(path.glob(".*.tmp"))
