"""Records, and what steps are made of."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike

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
from offbeat.transport import host
from offbeat_lab.breakdown import Steps, read_steps
from offbeat_lab.config import Request, resolve
from offbeat_lab.records import MegaBatch, Record, Share, add_mega_batch

# A record is read back as written; what is torn is left out, what is foreign is refused, nothing
# is overwritten.


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
    assert record.head.environment["num_cpus"]


def test_cores_of_the_host_that_a_run_may_not_use_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1000)
    monkeypatch.setattr(host, "processor_limits", dict)
    record = Record(create(tmp_path / "run", CONFIG))
    assert record.head.environment["num_cpus"] == len(os.sched_getaffinity(0))


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


@pytest.mark.parametrize("last_bytes", [0, 1, 1000, 3000, 1 << 20])
def test_of_a_long_record_the_last_steps_can_be_read_alone(tmp_path: Path, last_bytes: int) -> None:
    path = create(tmp_path / "run", CONFIG)
    write_events(path, range(1, 21))
    write_events(path, range(13, 17))
    record = Record(path)
    found, whole = [*record.events(0, last_bytes=last_bytes)], [*record.events(0)]
    assert found == whole[len(whole) - len(found) :]
    assert len(found) <= 1 + last_bytes // 100
    assert (found == whole) == (last_bytes == 1 << 20)


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
    run = tmp_path / "a run"
    (run / "checkpoint" / "step-5").mkdir(parents=True)
    (run / "config.json").write_text("{}")
    with pytest.raises(RecordError, match=f"go on with --resume '{run}'"):
        create(run, CONFIG)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "holds the record of an earlier run; choose another --out$"),
        (None, "is not empty; choose another --out"),
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


# Who waited for whom: properties of arbitrary events, and the events of real hosts put on one
# clock.


EVENT = StepEvent(
    step=1,
    loss=1.0,
    batch_size=8,
    began_s=100.0,
    ready_s=100.25,
    duration_s=1.0,
    compute_s=0.5,
    encode_s=0.25,
    wait_s=0.25,
    padded_s=0.0,
    bytes_sent=10,
    messages_sent=2,
    skipped=False,
)


def matrices(ready_s: ArrayLike, **others: ArrayLike) -> Steps:
    """Steps with these times; whatever is not given is zero."""
    ready = np.array(ready_s, dtype=np.float64)
    names = (
        "loss",
        "batch_size",
        "began_s",
        "duration_s",
        "compute_s",
        "encode_s",
        "wait_s",
        "padded_s",
    )
    columns = {
        name: np.zeros_like(ready) for name in (*names, "bytes_sent", "messages_sent", "skipped")
    }
    columns |= {name: np.array(values, dtype=np.float64) for name, values in others.items()}
    return Steps(step=np.arange(1, ready.shape[1] + 1), ready_s=ready, **columns)


@st.composite
def steps(draw: st.DrawFn) -> Steps:
    """Any ranks, any steps; some ranks exchange nothing in some of them, some wait although they do
    not.
    """
    num_ranks, num_steps = draw(st.integers(1, 4)), draw(st.integers(1, 5))

    def table(values: st.SearchStrategy[float]) -> list[list[float]]:
        row = st.lists(values, min_size=num_steps, max_size=num_steps)
        return draw(st.lists(row, min_size=num_ranks, max_size=num_ranks))

    duration = st.floats(0, 100)
    compute_s, encode_s, wait_s = (np.array(table(duration)) for _ in range(3))
    return matrices(
        table(st.one_of(st.floats(1e3, 1e6), st.just(np.nan))),
        compute_s=compute_s,
        encode_s=encode_s,
        wait_s=wait_s,
        duration_s=compute_s + encode_s + wait_s,
    )


@given(steps())
def test_shares_are_fractions_that_add_up_to_one(of: Steps) -> None:
    shares = of.shares()
    assert all(-1e-12 <= share <= 1 + 1e-12 for share in shares.values())
    assert sum(shares.values()) == pytest.approx(1.0 if of.duration_s.sum() else 0.0)


@given(steps())
def test_nobody_is_early_and_in_every_exchange_somebody_is_first(of: Steps) -> None:
    late_s = of.lateness_s()
    assert np.array_equal(np.isnan(late_s), np.isnan(of.ready_s))
    for step in range(of.num_steps):
        here = late_s[:, step][~np.isnan(late_s[:, step])]
        assert not here.size or here.min() == 0.0


def test_an_evaluation_between_two_steps_of_one_rank_is_no_training_of_another() -> None:
    """Rank 0 evaluates for 5 s after its first step; rank 1 waits for it in its second."""
    found = matrices(
        [[0.5, 6.5], [0.7, 1.7]],
        began_s=[[0.0, 6.0], [0.0, 1.0]],
        compute_s=[[0.5, 0.5], [0.7, 0.7]],
        wait_s=[[0.5, 0.3], [0.3, 5.1]],
        duration_s=[[1.0, 0.8], [1.0, 5.8]],
    ).without_pauses()
    np.testing.assert_allclose(found.step_s(), [1.0, 0.9])
    np.testing.assert_allclose(found.wait_s, [[0.5, 0.3], [0.3, 0.3]])
    np.testing.assert_allclose(found.lateness_s(), [[0.0, 0.0], [0.2, 0.2]], atol=1e-12)


def test_a_rank_that_is_late_within_its_step_is_waited_for() -> None:
    late = matrices(
        [[0.5, 6.5], [0.7, 1.7]],
        began_s=[[0.0, 1.0], [0.0, 1.0]],
        compute_s=[[0.5, 5.5], [0.7, 0.7]],
        wait_s=[[0.5, 0.5], [0.3, 5.3]],
        duration_s=[[1.0, 6.0], [1.0, 6.0]],
    )
    np.testing.assert_array_equal(late.without_pauses().wait_s, late.wait_s)


@given(steps())
def test_waiting_for_others_is_a_part_of_waiting_and_the_last_one_waits_for_nobody(
    of: Steps,
) -> None:
    waiting_s = of.waiting_for_others_s()
    assert (waiting_s >= 0).all()
    assert (waiting_s <= of.wait_s).all()
    for step in range(of.num_steps):
        if not np.isnan(of.ready_s[:, step]).all():
            assert waiting_s[np.nanargmax(of.ready_s[:, step]), step] == 0.0


def test_who_comes_first_waits_for_the_last_and_the_rest_is_transfer() -> None:
    of = matrices([[10.0], [10.5], [12.0]], wait_s=[[2.3], [1.8], [0.3]], duration_s=[[4.0]] * 3)
    assert of.lateness_s().ravel().tolist() == [0.0, 0.5, 2.0]
    assert of.waiting_for_others_s().ravel().tolist() == [2.0, 1.5, 0.0]
    assert of.shares()["wait"] == pytest.approx(3.5 / 12)
    assert of.shares()["transfer"] == pytest.approx(0.9 / 12)


def test_without_an_exchange_nobody_waits_for_anybody() -> None:
    of = matrices([[np.nan], [np.nan]], wait_s=[[0.5], [0.0]])
    assert np.isnan(of.lateness_s()).all()
    assert not of.waiting_for_others_s().any()


def write(path: Path, by_rank: Sequence[Sequence[StepEvent]]) -> Path:
    config = RunConfig(
        task="digits",
        task_options={},
        strategy="ddp",
        strategy_options={},
        workers=len(by_rank),
        epochs=None,
        steps=9,
        seed=0,
        checkpoint_every=None,
        eval_every=None,
    )
    create(path, config)
    attempt = begin_attempt(path, config, start_step=0)
    for rank, events in enumerate(by_rank):
        writer = EventWriter(path, rank=rank, attempt=attempt)
        for event in events:
            writer.add(event)
        writer.close()
    return path


def test_steps_that_some_rank_has_finished_count_and_the_others_have_no_number_there(
    tmp_path: Path,
) -> None:
    run = write(
        tmp_path / "run",
        [
            [replace(EVENT, step=step, bytes_sent=10 * rank + step) for step in range(1, 6 - rank)]
            for rank in range(3)
        ],
    )
    of = read_steps(Record(run))
    none = np.nan
    assert of.step.tolist() == [1, 2, 3, 4, 5]
    assert (of.num_ranks, of.num_steps) == (3, 5)
    np.testing.assert_array_equal(
        of.bytes_sent, [[1, 2, 3, 4, 5], [11, 12, 13, 14, none], [21, 22, 23, none, none]]
    )
    assert of.done.sum(axis=1).tolist() == [5, 4, 3]
    assert of.step_s().tolist() == [1.0] * 5


def test_a_run_without_steps_has_none(tmp_path: Path) -> None:
    of = read_steps(Record(write(tmp_path / "run", [[], []])))
    assert (of.num_ranks, of.num_steps) == (2, 0)
    assert of.lateness_s().shape == of.waiting_for_others_s().shape == (2, 0)
    assert (of.samples_per_s(), of.block_samples_per_s()) == (0.0, [])


def test_samples_a_second_are_each_ranks_own_and_none_for_steps_that_it_did_not_do(
    tmp_path: Path,
) -> None:
    """One rank is twice as fast; another one as fast as that, but it dies after half of
    the steps.
    """
    by_rank = [
        [replace(EVENT, step=step, duration_s=duration_s) for step in range(1, last + 1)]
        for duration_s, last in ((1.0, 40), (0.5, 40), (0.5, 20))
    ]
    of = read_steps(Record(write(tmp_path / "run", by_rank)))
    assert of.samples_per_s() == pytest.approx(8 + 16 + 16 / 2)
    assert max(of.block_samples_per_s()) == pytest.approx(40.0)
    assert min(of.block_samples_per_s()) == pytest.approx(24.0)


def test_ranks_that_are_fast_by_turns_do_no_more_than_they_do_over_time(tmp_path: Path) -> None:
    """Two ranks share a core: in each block of steps one of them has it, and then the other."""
    by_rank = [
        [
            replace(EVENT, step=step, duration_s=0.1 if (step // 4 + rank) % 2 else 1.9)
            for step in range(1, 81)
        ]
        for rank in range(2)
    ]
    of = read_steps(Record(write(tmp_path / "run", by_rank)))
    assert of.samples_per_s() == pytest.approx(16.0, rel=0.05)
    assert of.block_samples_per_s() == pytest.approx([16.0] * len(of.block_step_s()), rel=0.05)


@pytest.mark.parametrize(("period", "num_steps"), [(20, 100), (7, 100), (40, 100), (5, 24)])
def test_where_few_steps_exchange_a_step_costs_its_part_of_the_exchange(
    tmp_path: Path, period: int, num_steps: int
) -> None:
    """A block without an exchange would say that it costs nothing."""
    events = [
        replace(
            EVENT,
            step=step,
            duration_s=11.0 if step % period == 0 else 1.0,
            bytes_sent=0 if step % period else 100,
        )
        for step in range(1, num_steps + 1)
    ]
    of = read_steps(Record(write(tmp_path / "run", [events, events])))
    assert of.block_step_s() == pytest.approx([1 + 10 / period] * len(of.block_step_s()))


def write_claimed(
    path: Path, *, updates: Sequence[Sequence[int]], steps_each: int, merge_s: float
) -> Path:
    """Ranks that share samples out: by mega-batch and rank, so many equally long updates within
    `steps_each` seconds.
    """
    events: list[list[StepEvent]] = [[] for _ in updates[0]]
    for number, by_rank in enumerate(updates):
        for rank, made in enumerate(by_rank):
            for place in range(1, made + 1):
                duration_s = steps_each / made + (merge_s if place == made else 0.0)
                step = number * steps_each - (-place * steps_each // made)
                began_s = 100 + number * (steps_each + merge_s) + (place - 1) * steps_each / made
                event = replace(
                    EVENT, step=step, began_s=began_s, duration_s=duration_s, compute_s=duration_s
                )
                events[rank].append(event)
    run = write(path, events)
    writer = EventWriter(run, rank=0, attempt=0)
    for number, of_ranks in enumerate(updates, start=1):
        step = number * steps_each
        add_mega_batch(
            run,
            MegaBatch(
                number=number,
                epoch=0,
                step=step,
                seconds=1.0 * step,
                at_s=0.0,
                duration_s=1.0,
                merge_s=merge_s,
                by_rank=[
                    Share(
                        rank=rank,
                        batch_size=EVENT.batch_size,
                        updates=made,
                        samples=made * EVENT.batch_size,
                        weight=made / sum(of_ranks),
                        computing_s=float(steps_each),
                        idle_s=0.0,
                        claims=[],
                    )
                    for rank, made in enumerate(of_ranks)
                ],
            ),
        )
    writer.close()
    return run


def test_where_samples_are_claimed_a_rank_may_have_several_events_of_a_step_or_none(
    tmp_path: Path,
) -> None:
    of = read_steps(
        Record(write_claimed(tmp_path / "run", updates=[(8, 2)] * 3, steps_each=4, merge_s=0.5))
    )
    assert of.step.tolist() == list(range(1, 13))
    assert of.batch_size[0].tolist() == [16.0] * 12
    assert np.isnan(of.batch_size[1]).tolist() == [True, False] * 6
    assert float(np.nansum(of.duration_s)) == pytest.approx(2 * 3 * 4.5)


def test_where_samples_are_claimed_a_mega_batch_is_measured_whole_and_the_first_is_left_out(
    tmp_path: Path,
) -> None:
    """The second rank takes batches as large, at a quarter of the pace; it is no dead one that did
    fewer steps.
    """
    of = read_steps(
        Record(
            write_claimed(
                tmp_path / "run", updates=[(1, 1), (8, 2), (8, 2)], steps_each=4, merge_s=0.5
            )
        )
    )
    assert of.block_samples_per_s() == pytest.approx([80 / 4.5] * 2)
    assert of.block_step_s() == pytest.approx([4.5 / 4] * 2)


def test_ranks_that_do_not_keep_step_are_not_late_for_each_other(tmp_path: Path) -> None:
    by_rank = [
        [
            replace(EVENT, step=step, began_s=100 + every_s * step, ready_s=100.25 + every_s * step)
            for step in range(1, 5)
        ]
        for every_s in (1.0, 1.6)
    ]
    of = read_steps(Record(write(tmp_path / "run", by_rank)))
    assert of.in_step().tolist() == [True, False, False, False]
    assert of.lateness_s()[:, 0] == pytest.approx([0.0, 0.6])
    assert np.isnan(of.lateness_s()[:, 1:]).all()


def test_a_worker_that_came_back_has_done_some_steps_again(tmp_path: Path) -> None:
    run = write(
        tmp_path / "run",
        [[EVENT], [replace(EVENT, step=step, bytes_sent=1) for step in (1, 2, 3, 4)]],
    )
    writer = EventWriter(run, rank=1, attempt=0, start_step=2)
    for step in (3, 4, 5):
        writer.add(replace(EVENT, step=step, bytes_sent=2))
    writer.close()
    assert [(event.step, event.bytes_sent) for event in Record(run).events(1)] == [
        (1, 1),
        (2, 1),
        (3, 2),
        (4, 2),
        (5, 2),
    ]
    assert [head.start_step for head in Record(run).heads(1)] == [None, 2]


def test_what_has_no_number_is_not_a_number(tmp_path: Path) -> None:
    of = read_steps(
        Record(write(tmp_path / "run", [[replace(EVENT, loss=None, ready_s=None)], [EVENT]]))
    )
    assert np.isnan([of.loss[0, 0], of.ready_s[0, 0]]).all()
    assert (of.loss[1, 0], of.ready_s[1, 0]) == (1.0, 100.25)


@pytest.mark.parametrize(("host", "ahead_s"), [("elsewhere", 0.5), (socket.gethostname(), 0.0)])
def test_times_of_another_host_are_put_on_the_clock_of_the_first(
    tmp_path: Path, host: str, ahead_s: float
) -> None:
    """Each host counts from when it was started; on one host a difference is only the clock's being
    set.
    """
    run = write(tmp_path / "run", [[EVENT], [EVENT]])
    path = run / "events-rank-1.jsonl"
    first, *rest = path.read_text().splitlines()
    head = json.loads(first)
    offset_s = json.loads((run / "events-rank-0.jsonl").read_text().splitlines()[0])[
        "monotonic_to_unix_s"
    ]
    head |= {"host": host, "monotonic_to_unix_s": offset_s + 0.5}
    path.write_text("\n".join([json.dumps(head), *rest]) + "\n")
    of = read_steps(Record(run))
    assert of.began_s[:, 0] == pytest.approx([100.0, 100.0 + ahead_s], abs=1e-5)
    assert of.lateness_s()[:, 0] == pytest.approx([0.0, ahead_s], abs=1e-5)
    assert of.duration_s.tolist() == [[1.0], [1.0]]


def test_a_damaged_record_is_refused(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [[EVENT], [EVENT]])
    (run / "events-rank-1.jsonl").unlink()
    with pytest.raises(RecordError, match="cannot read"):
        read_steps(Record(run))


@given(steps())
def test_a_window_has_those_columns_and_settled_steps_are_the_later_ones(of: Steps) -> None:
    inner = of.window(1, 3)
    assert inner.step.tolist() == of.step[1:3].tolist()
    assert np.array_equal(inner.ready_s, of.ready_s[:, 1:3], equal_nan=True)
    assert inner.num_ranks == of.num_ranks
    settled = of.settled()
    assert (
        settled.step.tolist() == of.step[of.num_steps // 4 :].tolist()
    )  # of so few steps a quarter is left out


def test_cores_that_a_container_may_not_take_the_time_of_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(64)})
    monkeypatch.setattr(host, "processor_limits", lambda: {"cpu.max 1": 2.5})
    record = Record(create(tmp_path / "run", CONFIG))
    assert record.head.environment["num_cpus"] == 2


def test_where_samples_are_claimed_a_dead_worker_makes_steps_no_shorter(tmp_path: Path) -> None:
    """The second rank is dead from the third mega-batch on, and each takes four seconds."""
    updates = [(4, 4), (4, 4), (8, 0), (8, 0)]
    of = read_steps(
        Record(write_claimed(tmp_path / "run", updates=updates, steps_each=4, merge_s=0.0))
    )
    assert of.block_step_s() == pytest.approx([1.0] * 3)
