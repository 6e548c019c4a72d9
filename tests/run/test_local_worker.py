"""A worker of a script, and what it records."""

from __future__ import annotations

import json
import math
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import offbeat
from offbeat.errors import ConfigError, RecordError
from offbeat.run import recording, records, step_recorder
from offbeat.run.children import CHILD_VARIABLE
from offbeat.run.config import ScriptCommand, script_run
from offbeat.run.coordination import Coordinator
from offbeat.run.local_worker import description_of_end
from offbeat.run.plan import script_command, script_config
from offbeat.run.progress import Failure, Report
from offbeat.run.recipes import recipe_for
from offbeat.run.recording import OpenRecord, ScriptRecorder, higher_is_better, shared_record
from offbeat.run.records import RunDirectory, begin_attempt, create, events_path
from offbeat.run.run_summary import digest
from offbeat.run.step_recorder import phases
from offbeat.run.worker import carry_out, run_launched
from offbeat.session.metrics import listening
from offbeat.transport.connect import RETURN_VARIABLE
from offbeat_lab.records import Record
from offbeat_lab.report.page import write_report
from thread_support.world import ThreadDriver, results_of, session_on

# What is said of a worker that has ended before its time: one sentence, and where to look.


IN_ANOTHER_PROCESS = """

-- Process 1 terminated with the following error:
Traceback (most recent call last):
  File "train.py", line 3, in train
ValueError: the file is empty
"""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("the file is empty"), "ValueError: the file is empty"),
        (ValueError(), "ValueError: "),
        (RuntimeError(IN_ANOTHER_PROCESS), "RuntimeError: ValueError: the file is empty"),
        (RuntimeError("\nout of memory\nallocated: 4 GB\n"), "RuntimeError: out of memory"),
        (ConfigError("add\n    these lines"), "add\n    these lines"),
    ],
)
def test_a_failure_says_in_one_line_what_was_wrong(error: Exception, message: str) -> None:
    assert Failure.of(error, rank=2).message == message


def test_it_is_said_where_a_traceback_is(tmp_path: Path) -> None:
    failure = Failure.of(ValueError("no"), rank=2)
    silent = Failure.of(ConfigError("no"), rank=2, has_printed=False)

    def said(failure: Failure | None, *, code: int = 1, is_shown: bool = False) -> str:
        return description_of_end(tmp_path, 2, 77, code, failure, is_shown=is_shown)

    before = "before its first step was recorded"
    assert said(None, code=4).endswith(f"with status 4 {before}")  # it has no log
    log = tmp_path / "logs" / "rank-2.log"
    log.parent.mkdir()
    log.write_text("what it printed")
    assert said(failure).endswith(f"before its first step was recorded: ValueError: no (see {log})")
    assert said(failure, is_shown=True).endswith("ValueError: no (see what it printed above)")
    assert said(silent) == "worker 2 (pid 77) failed before its first step was recorded: no"
    assert said(None, code=4).endswith(f"with status 4 {before}; see {log}")
    assert said(None, code=-11).endswith(f"by SIGSEGV {before}; see {log}")


# What is said of scripts that come to their end without a session.


TRAINS_ALONE = """
import torch
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.1)
weight.sum().backward()
try:
    optimizer.step()
except Exception:
    pass
"""


@pytest.mark.parametrize(
    ("body", "said", "unsaid"),
    [
        ("print(1 + 1)", "no training was seen", "init_process_group"),
        (TRAINS_ALONE, "trains on one rank only", "no training"),
    ],
)
def test_a_script_that_trains_nothing_is_told_so_and_one_that_trains_alone_what_to_add(
    body: str, said: str, unsaid: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = tmp_path / "script.py"
    script.write_text(body)
    config = script_config(script_command([str(script)]), "gtopk", workers=1)
    reports: list[Report] = []
    recorder = ScriptRecorder(lambda: None, reports.append, stop_after=None)
    recipe = recipe_for(config)
    assert carry_out(config, recipe, recorder, reports.append, rank=0) == 1
    (failure,) = reports
    assert isinstance(failure, Failure)
    assert said in failure.message
    assert unsaid not in failure.message


# Replicas are compared by what strategies keep equal.


def test_replicas_are_compared_by_their_parameters() -> None:
    """Not by BatchNorm's statistics, of which each rank has its own."""
    torch.manual_seed(0)
    first = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    second = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    second.load_state_dict(first.state_dict())
    second(torch.randn(4, 3))
    assert digest(first) == digest(second)
    with torch.no_grad():
        second[0].weight[0, 0] += 1e-6
    assert digest(first) != digest(second)


# What a step is divided into.


SECONDS = st.floats(0, 1e4)


@given(SECONDS, SECONDS, SECONDS)
def test_the_phases_of_a_step_add_up_to_it_whatever_was_counted(
    step_s: float, encode_s: float, wait_s: float
) -> None:
    """A rank may have waited within its encoding, or between two steps."""
    found = phases(step_s, encode_s, wait_s)
    assert min(found) >= 0
    assert sum(found) == pytest.approx(step_s)
    assert found[1] <= encode_s
    assert found[2] <= wait_s


def test_what_was_counted_is_kept_where_it_fits() -> None:
    assert phases(8.0, 2.0, 1.0) == (5.0, 2.0, 1.0)
    assert phases(4.0, 3.0, 2.0) == (0.0, 2.0, 2.0)
    assert phases(4.0, 3.0, 9.0) == (0.0, 0.0, 4.0)


# `attach(..., recorder=...)` in a world of one: the record is that of any run.


def train(session: offbeat.Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        x = torch.ones(5, 2)
        loss = (model(input=x) if step == 1 else model(x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=step + 0.5, accuracy=torch.tensor(step / 4))
        offbeat.log(loss=step + 0.5)


def test_a_session_writes_a_record(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = offbeat.GTopK(density=0.5, codec="exact")
    with offbeat.attach(
        model, optimizer, strategy, recorder=offbeat.Recorder(tmp_path / "mine")
    ) as session:
        train(session, model, optimizer)
    record = Record(tmp_path / "mine")
    assert [(e.step, e.loss, e.batch_size) for e in record.events(0)] == [
        (1, 0.5, 5),
        (2, 1.5, 5),
        (3, 2.5, 5),
    ]
    assert [(e.step, e.metric) for e in record.evaluations()] == [(1, 0.0), (2, 0.25), (3, 0.5)]
    summary = record.summary()
    assert summary is not None
    assert (summary.steps, summary.metric_name, summary.metric) == (3, "accuracy", 0.5)
    assert summary.higher_is_better
    assert record.config.strategy_options["density"] == 0.5
    assert "Accuracy 0.5" in write_report(record.path).read_text()


def recorded_run(directory: Path, name: str = "script", metric: str | None = None) -> Path:
    script = directory / f"{name}.py"
    script.touch()
    command = script_command([str(script)], metric=metric)
    config = script_config(command, "allreduce", workers=2)
    path = create(directory / name, config)
    begin_attempt(path, config, start_step=0)
    return path


def recorder_of(path: Path) -> ScriptRecorder:
    """Of a worker that is alone."""
    opened = OpenRecord(record=RunDirectory(path), coordinator=Coordinator(dist.HashStore(), 0, 1))
    return ScriptRecorder(lambda: opened, lambda report: None, stop_after=None)


def test_a_session_that_takes_the_place_of_another_goes_on_with_its_record(tmp_path: Path) -> None:
    path, store = recorded_run(tmp_path), dist.HashStore()

    def run(driver: ThreadDriver) -> None:
        opened = OpenRecord(
            record=RunDirectory(path), coordinator=Coordinator(store, driver.rank, 2)
        )
        recorder = ScriptRecorder(lambda: opened, lambda report: None, stop_after=None)
        model = nn.Linear(2, 1)
        for phase in range(2):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with session_on(driver, model, optimizer, offbeat.AllReduce()) as session:
                recorder.attached(session, model, optimizer)
                for _ in range(4):
                    model(torch.ones(5, 2)).sum().backward()
                    optimizer.step()
                session.log(accuracy=phase / 2)
        recorder.end()

    results_of(2, run)
    record = Record(path)
    summary = record.summary()
    assert summary is not None
    assert summary.steps_per_s == pytest.approx(8 / summary.seconds)
    sent = [event.bytes_sent for event in record.events(0)]
    assert [e.bytes_sent for e in record.evaluations()] == [sum(sent[:4]), sum(sent)]
    assert summary.bytes_sent_per_step == sum(sent) / 8


def test_samples_are_counted_where_a_loop_calls_parts_of_the_model_as_lightning_does(
    tmp_path: Path,
) -> None:
    model = nn.ModuleDict({"net": nn.Linear(2, 3), "head": nn.Linear(3, 1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = offbeat.Recorder(tmp_path / "mine")
    with offbeat.attach(model, optimizer, offbeat.AllReduce(), recorder=recorder):
        for num_batches in (1, 2):
            for _ in range(num_batches):
                with torch.no_grad():
                    model["net"](torch.ones(7, 2))
                model["head"](model["net"](torch.ones(5, 2))).sum().backward()
            optimizer.step()
    assert [e.batch_size for e in Record(tmp_path / "mine").events(0)] == [5, 10]


def test_a_session_ends_well_though_the_disk_takes_no_summary(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = offbeat.Recorder(tmp_path / "mine")
    with offbeat.attach(model, optimizer, offbeat.AllReduce(), recorder=recorder) as session:
        train(session, model, optimizer)
        (tmp_path / "mine" / ".summary.json.tmp").mkdir()
    assert "the record is not complete: cannot write" in caplog.text


def test_nobody_waits_for_a_summary_that_the_disk_does_not_take(tmp_path: Path) -> None:
    """Of ranks that a supervisor watches: the one that writes has ended well, and is not dead."""
    path = recorded_run(tmp_path)
    coordinator = Coordinator(dist.HashStore(), 0, 1, supervised=True)
    opened = OpenRecord(record=RunDirectory(path), coordinator=coordinator)
    recorder = ScriptRecorder(lambda: opened, lambda report: None, stop_after=None)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.attach(model, optimizer, offbeat.AllReduce()) as session:
        recorder.attached(session, model, optimizer)
        train(session, model, optimizer)
    (path / ".summary.json.tmp").mkdir()
    recorder.end()
    assert Record(path).summary() is None
    assert coordinator.published("summary") is not None


def test_a_metric_that_the_script_never_logs_is_missed(tmp_path: Path) -> None:
    path = recorded_run(tmp_path, metric="acuracy")
    recorder = recorder_of(path)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.attach(model, optimizer, offbeat.AllReduce()) as session:
        recorder.attached(session, model, optimizer)
        train(session, model, optimizer)
    recorder.end()
    summary = Record(path).summary()
    assert summary is not None
    assert summary.metric is None
    assert any("has logged no 'acuracy'" in notice for notice in summary.notices)


def test_what_is_logged_beside_the_metric_may_be_no_number(tmp_path: Path) -> None:
    path = recorded_run(tmp_path)
    recorder = recorder_of(path)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.attach(model, optimizer, offbeat.AllReduce()) as session:
        recorder.attached(session, model, optimizer)
        train(session, model, optimizer)
        session.log(accuracy=0.75, f1=0.5, val_loss=torch.nan, grad_norm=torch.inf)
    recorder.end()
    record = Record(path)
    assert record.evaluations()[-1].others["grad_norm"] == torch.inf
    summary = record.summary()
    assert summary is not None
    assert (summary.metric, summary.other_metrics) == (0.75, {"f1": 0.5})


def test_a_metric_that_float32_does_not_hold_is_infinite_in_a_record(tmp_path: Path) -> None:
    """As the perplexity of a run that diverges."""
    path = recorded_run(tmp_path)
    recorder = recorder_of(path)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.attach(model, optimizer, offbeat.AllReduce()) as session:
        recorder.attached(session, model, optimizer)
        for loss in (1.0, 100.0):
            model(torch.ones(5, 2)).sum().backward()
            optimizer.step()
            session.log(perplexity=math.exp(loss), loss=math.exp(loss))
    recorder.end()
    record = Record(path)
    assert [e.metric for e in record.evaluations()] == [math.exp(1.0), math.inf]
    assert [event.loss for event in record.events(0)] == [math.exp(1.0), None]
    summary = record.summary()
    assert summary is not None
    assert summary.metric is None


def test_losses_of_what_is_trained_between_two_sessions_are_in_no_step(tmp_path: Path) -> None:
    path = recorded_run(tmp_path)
    recorder = recorder_of(path)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with offbeat.attach(model, optimizer, offbeat.AllReduce()) as session:
            recorder.attached(session, model, optimizer)
            recorder.loss_seen(torch.tensor(1.0), 1.0)
            model(torch.ones(5, 2)).sum().backward()
            optimizer.step()
        for _ in range(3):
            recorder.loss_seen(torch.tensor(5.0), 1.0)
    recorder.end()
    assert [event.loss for event in Record(path).events(0)] == [1.0, 1.0]


def test_of_a_long_run_without_a_metric_few_means_of_the_loss_stay_equally_far_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the last one, which the summary has."""
    monkeypatch.setattr(recording, "MOST_LOSSES", 4)
    path = recorded_run(tmp_path)
    recorder = recorder_of(path)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.attach(model, optimizer, offbeat.AllReduce()) as session:
        recorder.attached(session, model, optimizer)
        for step in range(1, 111):
            recorder.loss_seen(torch.tensor(float(step)), 1.0)
            model(torch.ones(5, 2)).sum().backward()
            optimizer.step()
    recorder.end()
    record = Record(path)
    assert [(e.step, e.metric) for e in record.evaluations()] == [
        (40, 35.5),
        (80, 75.5),
        (110, 105.5),
    ]
    summary = record.summary()
    assert summary is not None
    assert (summary.metric_name, summary.metric) == ("training loss", 105.5)


def test_losses_of_another_model_are_in_no_step(tmp_path: Path) -> None:
    path = recorded_run(tmp_path)
    recorder = recorder_of(path)
    recorded, other = nn.Linear(2, 1), nn.Linear(2, 1)
    for model, loss in ((recorded, 1.0), (other, 5.0), (recorded, 2.0)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with offbeat.attach(model, optimizer, offbeat.AllReduce()) as session:
            recorder.attached(session, model, optimizer)
            recorder.loss_seen(torch.tensor(loss), 1.0)
            model(torch.ones(5, 2)).sum().backward()
            optimizer.step()
    recorder.end()
    assert [event.loss for event in Record(path).events(0)] == [1.0, 2.0]


def test_loggers_hear_what_a_script_measures_when_its_session_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[object] = []
    logger = SimpleNamespace(
        log=lambda values, step: heard.append((values, step)), close=lambda: heard.append("closed")
    )
    monkeypatch.setattr(step_recorder, "named_loggers", lambda names, record: [logger])
    opened = OpenRecord(
        record=RunDirectory(recorded_run(tmp_path)), coordinator=Coordinator(dist.HashStore(), 0, 1)
    )
    recorder = ScriptRecorder(lambda: opened, lambda report: None, stop_after=None)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with listening(recorder):
        with offbeat.attach(model, optimizer, offbeat.AllReduce()) as session:
            recorder.attached(session, model, optimizer)
            for _ in range(3):
                model(torch.ones(5, 2)).sum().backward()
                optimizer.step()
            offbeat.log(accuracy=0.5)
        offbeat.log(accuracy=0.75)
    recorder.end()
    assert heard == [({"accuracy": 0.5}, 3), ({"accuracy": 0.75}, 3), "closed"]


def test_a_worker_that_comes_back_leaves_the_record_of_its_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = recorded_run(tmp_path)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.attach(model, optimizer, offbeat.AllReduce()) as session:
        monkeypatch.setenv(RETURN_VARIABLE, "1")
        offbeat.Recorder(path).begin(session, model, optimizer)
        train(session, model, optimizer)
    assert not events_path(path, 0).exists()
    assert "came back to a run whose record has begun without it" in caplog.text


def test_a_directory_in_use_is_refused_and_nothing_stays_attached(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RecordError, match="not empty"):
        offbeat.attach(model, optimizer, offbeat.AllReduce(), recorder=offbeat.Recorder(tmp_path))
    offbeat.attach(model, optimizer, offbeat.AllReduce()).close()


def test_without_a_record_logging_does_nothing_but_check() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    offbeat.log(loss=1.0)
    with offbeat.attach(model, optimizer, offbeat.AllReduce()) as session:
        train(session, model, optimizer)
        for log in (session.log, offbeat.log):
            with pytest.raises(ConfigError, match="tensors of one element"):
                log(loss=torch.ones(2))
            with pytest.raises(ConfigError, match="numbers"):
                log(loss="low")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "higher"),
    [
        ("val/acc", True),
        ("val.acc", True),
        ("eval:f1", True),
        ("mAP50", True),
        ("top1", True),
        ("top1_error", False),
        ("dice_loss", False),
        ("mape", False),
        ("perplexity", False),
        ("val_nDCG@10", True),
        ("hits@1", True),
        ("num_correct", True),
        ("val_auroc", True),
        ("auprc", True),
        ("mIoU", True),
        ("cohen_kappa", True),
        ("mcc", True),
        ("fid_score", False),
        ("fidelity_score", True),
    ],
)
def test_a_name_says_whether_more_is_better(name: str, higher: bool) -> None:
    assert higher_is_better(name) is higher


def record_one_step(opened: OpenRecord) -> None:
    recorder = ScriptRecorder(lambda: opened, lambda report: None, stop_after=None)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.attach(model, optimizer, offbeat.AllReduce()) as session:
        recorder.attached(session, model, optimizer)
        model(torch.ones(5, 2)).sum().backward()
        optimizer.step()
    recorder.end()


def test_a_rank_ends_well_though_another_one_takes_longer_than_the_store_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As rank 0 that evaluates by itself, where no supervisor serves the store."""
    path, store = recorded_run(tmp_path), dist.HashStore()
    store.set_timeout(timedelta(milliseconds=1))
    opened = OpenRecord(record=RunDirectory(path), coordinator=Coordinator(store, 1, 2))
    record_one_step(opened)
    assert "the record is not complete" in caplog.text
    assert [event.step for event in Record(path).events(1)] == [1]


def test_of_runs_that_begin_at_once_each_has_a_directory_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the supervisors of two hosts do in one directory, once they have met."""
    monkeypatch.chdir(tmp_path)
    found = [Path("runs") / name for name in ("mine-001", "mine-001", "mine-002")]
    monkeypatch.setattr(records, "first_free", lambda name: found.pop(0))
    config = script_run(ScriptCommand(path="mine.py"), "allreduce", {}, workers=1)
    assert [create(None, config).name for _ in range(2)] == ["mine-001", "mine-002"]


def test_nobody_waits_for_the_end_of_a_rank_that_does_not_see_the_record(tmp_path: Path) -> None:
    """As on a second host of torchrun's that has a disk of its own."""
    path, store = recorded_run(tmp_path), dist.HashStore()
    store.set_timeout(timedelta(milliseconds=1))
    first, other = Coordinator(store, 0, 2), Coordinator(store, 1, 2)
    first.publish("attempt/0", "0")
    first.publish("begun/0", json.dumps(["", str(tmp_path / "of another host")]))
    opened = OpenRecord(record=RunDirectory(path), coordinator=first)
    assert shared_record(other, opened.record.config, None) is None
    record_one_step(opened)
    summary = Record(path).summary()
    assert summary is not None
    assert summary.steps == 1
    assert summary.notices[-1].startswith("what rank 1 did is not recorded")


ONE_STEP = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(5, 2)).sum().backward()
optimizer.step()
dist.destroy_process_group()
"""


def test_each_attempt_of_torchrun_has_a_record_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), (CHILD_VARIABLE, "")):
        monkeypatch.setenv(name, value)
    script = tmp_path / "script.py"
    script.write_text(ONE_STEP)
    config = script_config(script_command([str(script)]), "allreduce", workers=1)
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        assert run_launched(config, tmp_path / "mine", rank=0) == 0
    for name in ("mine", "mine-1"):
        summary = Record(tmp_path / name).summary()
        assert summary is not None
        assert summary.steps == 1


def test_restarts_are_counted_over_the_nodes_since_each_agent_counts_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers of the other node were started a second time, and those of this one were not."""
    store, script = dist.HashStore(), tmp_path / "script.py"
    script.touch()
    other = Coordinator(store, 1, 2)
    other.publish("attempt/1", "1")
    other.publish("begun/1", json.dumps([None, ""]))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    config = script_config(script_command([str(script)]), "allreduce", workers=2)
    opened = shared_record(Coordinator(store, 0, 2), config, tmp_path / "mine")
    assert opened is not None
    assert opened.record.path == tmp_path / "mine-1"
