"""Runs in which workers die, hang and come back while the others go on, with real processes."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from offbeat.errors import PeerError
from offbeat.run.progress import MembershipChange, WorkerProgress
from offbeat.run.records import Summary
from offbeat_lab.breakdown import read_steps
from offbeat_lab.checkpoints import latest, verify
from offbeat_lab.cluster import Cluster, ClusterFault, SpeedChange
from offbeat_lab.config import Request
from offbeat_lab.emulation import Emulation
from offbeat_lab.records import Record
from offbeat_lab.report.page import write_report
from offbeat_lab.train import plan, train

pytestmark = pytest.mark.ranks

ENDLESS = 1_000_000
Watch = Callable[[WorkerProgress | MembershipChange], None]


def run(
    npz: Path,
    out: Path,
    watch: Watch,
    *,
    steps: int,
    workers: int = 3,
    faults: tuple[ClusterFault, ...] = (),
    strategy: str = "wagma",
    settings: tuple[str, ...] = (),
) -> Summary:
    request = Request(
        task="mnist",
        strategy=strategy,
        workers=workers,
        steps=steps,
        eval_every=steps // 4,
        checkpoint_every=steps // 4,
        cluster=Cluster(workers=workers, step_s=0.01, faults=faults),
        emulation="none",
        settings=[f"path={npz}", "batch_size=4", *settings],
    )
    summary = train(plan(request, out=out), watch)
    assert summary is not None
    return summary


class Killing:
    """Kills the process of some ranks once they have done so many steps, and remembers what was
    said.
    """

    def __init__(self, at_step: dict[int, int]) -> None:
        self.at_step = at_step
        self.changes: list[MembershipChange] = []
        self.pids: dict[int, set[int]] = {}
        self.began: float = math.inf

    def __call__(self, report: WorkerProgress | MembershipChange) -> None:
        if isinstance(report, MembershipChange):
            self.changes.append(report)
            return
        self.pids.setdefault(report.rank, set()).add(report.pid)
        if report.step >= self.at_step.get(report.rank, math.inf):
            del self.at_step[report.rank]
            os.kill(report.pid, signal.SIGKILL)


def test_the_survivors_finish_and_the_loss_is_reported(npz: Path, tmp_path: Path) -> None:
    """Among them the one that measures and writes: another one takes over."""
    killing = Killing({0: 20, 2: 30})
    summary = run(npz, tmp_path / "run", killing, steps=100)
    assert (summary.status, summary.steps) == ("finished", 100)
    assert sorted(loss.rank for loss in summary.losses) == [0, 2]
    assert all(
        loss.cause == "killed by SIGKILL" and loss.returned_step is None for loss in summary.losses
    )
    assert [loss.num_left for loss in summary.losses] == [2, 1]
    assert (
        [change.text for change in killing.changes]
        == [loss.sentence() for loss in summary.losses]
        == summary.notices[:2]
    )
    measured = [evaluation.step for evaluation in Record(tmp_path / "run").evaluations()]
    assert measured == sorted({*measured, 0, 100})
    assert len(measured) >= 3  # of five, one for each leader that died may be missing
    steps = read_steps(Record(tmp_path / "run"))
    assert steps.done.sum(axis=1)[1] == 100
    assert steps.done.sum(axis=1)[0] < 100
    assert sum(steps.shares().values()) == pytest.approx(1.0)
    assert "died" in write_report(tmp_path / "run").read_text()

    manifest = latest(tmp_path / "run" / "checkpoint")
    verify(manifest)
    assert (manifest.step, manifest.world_size) == (100, 1)
    resumed = train(plan(Request(steps=110), resume=tmp_path / "run"), lambda report: None)
    assert resumed is not None
    assert (resumed.steps, resumed.world_size, resumed.resumed_from_step) == (110, 3, 100)
    assert latest(tmp_path / "run" / "checkpoint").world_size == 3


class Waiting(Killing):
    """Ends the run once the worker that came back has trained: for so many steps behind the first
    that it has told of as `at_step` says of rank -1.
    """

    def __call__(self, report: WorkerProgress | MembershipChange) -> None:
        super().__call__(report)
        if (
            isinstance(report, WorkerProgress)
            and report.rank == 1
            and len(self.pids[1]) == 2
            and -1 in self.at_step
        ):
            self.began = min(self.began, report.step)
            if report.step >= self.began + self.at_step[-1]:
                del self.at_step[-1]
                signal.raise_signal(signal.SIGINT)


def test_a_worker_that_returns_joins_the_others_at_their_step(npz: Path, tmp_path: Path) -> None:
    faults = (
        ClusterFault(at_s=0.5, worker=1, action="kill"),
        ClusterFault(at_s=0.6, worker=1, action="return"),
    )
    watch = Waiting({-1: 1})
    summary = run(npz, tmp_path / "run", watch, steps=ENDLESS, workers=2, faults=faults)
    (loss,) = summary.losses
    assert (loss.rank, loss.cause, loss.num_left) == (1, "killed by the script at 0.5 s", 1)
    assert loss.returned_step is not None
    assert loss.returned_s is not None
    assert [change.departed for change in watch.changes] == [True, False]
    record = Record(tmp_path / "run")
    steps = [event.step for event in record.events(1)]
    last = min(loss.step, loss.returned_step)
    assert steps == [*range(1, last + 1), *range(loss.returned_step + 1, steps[-1] + 1)]
    assert last < loss.returned_step < steps[-1]
    assert [head.start_step for head in record.heads(1)] == [None, loss.returned_step]
    assert latest(record.checkpoint_root).world_size == 2
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["losses"] == [asdict(loss)]


def test_where_samples_are_claimed_each_counts_once_whoever_dies(npz: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    summary = run(
        npz, out, Killing({1: 10}), steps=60, strategy="adaptive", settings=("mega_batch=8",)
    )
    assert (summary.status, summary.replicas_identical) == ("finished", True)
    assert [(loss.rank, loss.num_left) for loss in summary.losses] == [(1, 2)]
    assert any("without worker 1" in notice for notice in summary.notices)
    merged: dict[int, list[int]] = {}
    for mega_batch in Record(out).mega_batches():
        places = [
            place
            for share in mega_batch.by_rank
            for claim in share.claims
            for span in claim
            for place in range(*span)
        ]
        merged.setdefault(mega_batch.epoch, []).extend(places)
    *whole, _ = merged.values()
    assert len(whole) > 5
    assert all(sorted(places) == list(range(64)) for places in whole)
    assert [share.rank for share in mega_batch.by_rank] == [0, 2]
    manifest = latest(out / "checkpoint")
    assert (manifest.step, manifest.world_size) == (summary.steps, 2)


def test_where_samples_are_claimed_a_worker_that_returns_claims_again(
    npz: Path, tmp_path: Path
) -> None:
    faults = (
        ClusterFault(at_s=0.5, worker=1, action="kill"),
        # Late enough that the survivor has merged alone, since a worker starts at once.
        ClusterFault(at_s=4.5, worker=1, action="return"),
    )
    out = tmp_path / "run"
    settings = ("mega_batch=8",)
    summary = run(
        npz,
        out,
        Waiting({-1: 8}),  # a merge later
        steps=ENDLESS,
        workers=2,
        faults=faults,
        strategy="adaptive",
        settings=settings,
    )
    (loss,) = summary.losses
    assert loss.returned_step is not None
    assert summary.replicas_identical
    present = [
        [share.rank for share in mega_batch.by_rank] for mega_batch in Record(out).mega_batches()
    ]
    assert present[0] == present[-1] == [0, 1]
    assert [0] in present
    assert latest(out / "checkpoint").world_size == 2


def test_when_all_have_died_the_run_has_failed(npz: Path, tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"worker \d .*was killed by SIGKILL after step \d+"):
        run(npz, tmp_path / "run", Killing({0: 5, 1: 5}), steps=ENDLESS, workers=2)


def test_an_interrupt_stops_the_survivors_with_a_checkpoint_of_theirs(
    npz: Path, tmp_path: Path
) -> None:
    class Interrupting(Killing):
        def __call__(self, report: WorkerProgress | MembershipChange) -> None:
            super().__call__(report)
            if isinstance(report, WorkerProgress) and self.changes and self.at_step.pop(-1, None):
                signal.raise_signal(signal.SIGINT)

    summary = run(npz, tmp_path / "run", Interrupting({0: 10, -1: 1}), steps=ENDLESS)
    assert summary.status == "stopped"
    assert [loss.rank for loss in summary.losses] == [0]
    manifest = latest(tmp_path / "run" / "checkpoint")
    # It is of its first writer's step, and survivors do not keep step.
    assert 10 < manifest.step <= summary.steps
    assert 1 <= manifest.world_size <= 2


def test_a_speed_changes_though_a_fault_holds_all_workers_up(
    npz: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, float]] = []
    monkeypatch.setattr(Emulation, "set_speed", lambda _, rank, speed: told.append((rank, speed)))
    cluster = Cluster(
        workers=2,
        step_s=0.01,
        changes=(SpeedChange(at_s=1.0, worker=0, speed=0.5),),
        faults=(
            ClusterFault(at_s=0.5, worker=1, action="stop"),
            ClusterFault(at_s=1.5, worker=1, action="continue"),
        ),
    )
    request = Request(
        task="mnist",
        strategy="allreduce",
        workers=2,
        steps=150,
        cluster=cluster,
        emulation="none",
        settings=[f"path={npz}", "batch_size=4"],
    )
    assert train(plan(request, out=tmp_path / "run"), lambda report: None) is not None
    assert told == [(0, 0.5)]
