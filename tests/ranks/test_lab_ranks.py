"""The lab with real processes: torch's own strategies do what they are called, and comparisons take
turns, fail and stop.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import nn

import offbeat_lab.cli.comparing
import offbeat_lab.cli.main
from lab_support.data import npz
from offbeat.errors import ConfigError, UnsupportedError
from offbeat.run import supervisor
from offbeat.run.local_worker import LocalWorker
from offbeat.run.progress import MembershipChange, WorkerProgress
from offbeat.run.records import StepEvent
from offbeat_lab.cli.common import EXIT_INTERRUPTED
from offbeat_lab.cluster import Cluster, ClusterFault
from offbeat_lab.compare import CompareRequest, plan_comparison, run_comparison
from offbeat_lab.comparison import Comparison, Measure, read_comparison
from offbeat_lab.config import Request
from offbeat_lab.records import Record
from offbeat_lab.train import plan, train
from rank_jobs.lab import attach, flat_parameters
from ranks_support.launch import RunRanks

__all__ = ["npz"]
pytestmark = pytest.mark.ranks

ENDLESS = 1_000_000
DEADLINE_S = 60
STEPS = 8


def train_with(
    rank: int, world_size: int, steps: int, name: str, options: dict[str, Any]
) -> dict[str, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    try:
        attached = attach(name, options, model, optimizer, world_size)
    except UnsupportedError as error:
        return {"refused": str(error)}
    trace = []
    with attached.session as session:
        for step in range(1, steps + 1):
            before = session.stats
            generator = torch.Generator().manual_seed(100 * step + rank)
            x, y = (
                torch.randn((8, 16), generator=generator),
                torch.randn((8, 4), generator=generator),
            )
            attached.backward(nn.functional.mse_loss(attached.module(x), y))
            attached.optimizer.step()
            attached.optimizer.zero_grad()
            after = session.stats
            trace.append(
                {
                    "bytes": after.bytes_sent - before.bytes_sent,
                    "messages": after.messages_sent - before.messages_sent,
                    "waited": after.wait_s > before.wait_s,
                    "ready": session.take_ready_at_s() is not None,
                    "channels": [arrival.channel for arrival in session.take_arrivals()],
                    "parameters": flat_parameters(model),
                }
            )
    return {
        "steps": trace,
        "counted": session.stats.steps,
        "num_parameters": len(flat_parameters(model)),
    }


def train_with_each(
    rank: int, world_size: int, *, steps: int, strategies: dict[str, tuple[str, dict[str, Any]]]
) -> dict[str, dict[str, Any]]:
    """Train with several strategies, one after the other in the same processes, and say what each
    did.
    """
    return {
        label: train_with(rank, world_size, steps, name, options)
        for label, (name, options) in strategies.items()
    }


def test_torchs_strategies_do_what_they_are_called(run_ranks: RunRanks) -> None:
    strategies = {
        "allreduce": ("allreduce", {}),
        "ddp": ("ddp", {}),
        "fp16": ("ddp-fp16", {}),
        "bf16": ("ddp-bf16", {}),
        "powersgd": ("ddp-powersgd", {"rank": 1, "start_step": 3}),
        "local": ("post-localsgd", {"start_step": 2, "period": 3}),
        "alone": ("alone", {}),
    }
    ranks = run_ranks(train_with_each, 2, steps=STEPS, strategies=strategies)
    of = {label: [result[label] for result in ranks] for label in strategies}
    num_parameters = of["ddp"][0]["num_parameters"]
    for label, results in of.items():
        if "refused" not in results[0]:
            assert [result["counted"] for result in results] == [STEPS, STEPS], label

    dense = np.array([step["parameters"] for step in of["ddp"][0]["steps"]])
    for label, tolerance in (("allreduce", 1e-6), ("fp16", 2e-3), ("bf16", 2e-2)):
        if label == "bf16" and "refused" in of[label][0]:
            assert "backend cannot add bfloat16" in of[label][0]["refused"]
            assert of[label][0]["refused"].endswith("use ddp-fp16")
            continue
        for rank in range(2):
            assert np.abs(parameters(of[label][rank]) - dense).max() < tolerance, label
    assert np.abs(parameters(of["fp16"][0]) - dense).max() > 0  # half the digits are lost
    assert counted(of["ddp"][0], "bytes") == [4 * num_parameters] * STEPS
    assert counted(of["allreduce"][0], "bytes")[0] >= 4 * num_parameters
    assert counted(of["fp16"][0], "bytes") == [2 * num_parameters] * STEPS

    compressed = counted(of["powersgd"][0], "bytes")
    assert compressed[:3] == [4 * num_parameters] * 3
    assert len(set(compressed[3:])) == 1
    assert 0 < compressed[3] < 4 * num_parameters / 4
    assert counted(of["powersgd"][0], "messages") == [2] * 3 + [6] * (STEPS - 3)
    assert (
        counted(of["powersgd"][0], "channels") == [[0]] * STEPS
    )  # one bucket, whatever DDP would make
    assert np.array_equal(parameters(of["powersgd"][0])[:3], dense[:3])
    assert np.array_equal(parameters(of["powersgd"][0]), parameters(of["powersgd"][1]))
    assert np.abs(parameters(of["powersgd"][0])[3:] - dense[3:]).max() > 0

    # Two steps of DDP; then steps 3, 6, ... end with an average.
    exchanges = [step in (1, 2, 3, 6) for step in range(1, STEPS + 1)]
    assert counted(of["local"][0], "bytes") == [
        4 * num_parameters * exchange for exchange in exchanges
    ]
    assert counted(of["local"][0], "ready") == counted(of["local"][0], "waited") == exchanges
    same = [
        bool(np.allclose(a, b))
        for a, b in zip(parameters(of["local"][0]), parameters(of["local"][1]), strict=True)
    ]
    assert same == exchanges
    assert np.array_equal(parameters(of["local"][0])[:2], dense[:2])

    for result in of["alone"]:
        for what, nothing in (
            ("bytes", 0),
            ("messages", 0),
            ("ready", False),
            ("waited", False),
            ("channels", []),
        ):
            assert counted(result, what) == [nothing] * STEPS
    assert not np.allclose(parameters(of["alone"][0])[0], parameters(of["alone"][1])[0])
    for label in ("ddp", "fp16", "powersgd", "allreduce"):
        assert all(counted(of[label][0], "ready"))


def parameters(result: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Shape (steps, parameters)."""
    return np.array(counted(result, "parameters"))


def counted(result: dict[str, Any], what: str) -> list[Any]:
    return [step[what] for step in result["steps"]]


def test_what_cannot_be_resumed_is_refused_and_left_as_it_was(npz: Path, tmp_path: Path) -> None:
    settings = [f"path={npz}", "batch_size=4"]
    request = Request(task="mnist", strategy="post-localsgd", workers=1, steps=2, settings=settings)
    summary = train(plan(request, out=tmp_path / "run"), lambda progress: None)
    assert summary is not None
    assert (summary.status, summary.steps) == ("finished", 2)
    with pytest.raises(
        ConfigError, match="post-localsgd keeps state that torch does not let anybody save"
    ):
        plan(Request(steps=4), resume=tmp_path / "run")


class ComparisonListener:
    """Hears a comparison, and does something about it at the right moment."""

    def __init__(self) -> None:
        self.pids: dict[tuple[str, int], int] = {}
        self.failures: dict[str, str] = {}
        self.turns: list[str] = []

    def begin(self, labels: object, num_workers: int, num_seeds: int, steps: int) -> None: ...

    def seed(self, place: int) -> None: ...

    def turn(self, label: str) -> None:
        self.turns.append(label)

    def progress(self, label: str, progress: WorkerProgress) -> None:
        self.pids[label, progress.rank] = progress.pid

    def membership_changed(self, label: str, change: MembershipChange) -> None: ...

    def failed(self, label: str, reason: str) -> None:
        self.failures[label] = reason


def comparing(npz: Path, **changes: Any) -> CompareRequest:
    settings: dict[str, Any] = {
        "task": "mnist",
        "strategies": ["ddp", "gtopk:density=0.01:collective=reduce_scatter"],
        "settings": [f"path={npz}", "batch_size=4"],
        "cluster": Cluster(workers=2),
        "emulation": "none",
        "seeds": (5,),
        "steps": 60,
        "turn_s": 1e-3,  # a step or two
    }
    return CompareRequest(**(settings | changes))


def run_of(directory: Path, comparison: Comparison, label: str) -> Record:
    (run,) = [directory / run for c in comparison.strategies if c.label == label for run in c.runs]
    return Record(run)


def assert_gone(pids: Iterator[int]) -> None:
    """Wait for processes that are not ours to end; fails if one does not."""
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            assert select.select([handle], [], [], DEADLINE_S)[0], f"process {pid} is still there"
        finally:
            os.close(handle)


def spans(events: list[StepEvent]) -> list[tuple[float, float]]:
    return [(event.began_s, event.began_s + event.duration_s) for event in events]


def test_strategies_take_turns_and_all_of_it_is_recorded(npz: Path, tmp_path: Path) -> None:
    listener = ComparisonListener()
    directory, comparison = run_comparison(
        plan_comparison(comparing(npz), out=tmp_path / "out"), listener, command="offbeat compare"
    )
    assert comparison.status == "finished"
    assert read_comparison(directory) == comparison
    assert listener.failures == {}
    assert {"ddp", "gtopk", "alone"} == set(listener.turns)
    assert_gone(iter(listener.pids.values()))

    labelled: list[tuple[float, float, str]] = []
    for strategy in comparison.strategies:
        record = run_of(directory, comparison, strategy.label)
        summary = record.summary()
        assert summary is not None
        assert (summary.status, summary.steps, record.config.seed) == ("finished", 60, 5)
        assert [evaluation.step for evaluation in record.evaluations()] == list(range(0, 61, 5))
        for rank in range(2):
            events = list(record.events(rank))
            assert [event.step for event in events] == list(range(1, 61))
            labelled += [(began_s, ended_s, strategy.label) for began_s, ended_s in spans(events)]
            for event in events:
                parts_s = event.compute_s, event.encode_s, event.wait_s
                assert min(parts_s) >= 0
                assert sum(parts_s) == pytest.approx(event.duration_s)
        assert strategy.measures.keys() == {*get_args(Measure)}
        assert len(strategy.lateness_s) == 2
    alone = Record(directory / "runs/alone-seed-5")
    for rank in range(2):
        labelled += [
            (began_s, ended_s, "alone") for began_s, ended_s in spans(list(alone.events(rank)))
        ]
    labelled.sort()
    changes = 0
    for (_, ended_s, label), (began_s, _, following) in pairwise(labelled):
        if following != label:
            changes += 1
            assert began_s >= ended_s, f"{following} trained in the turn of {label}"
    assert changes >= 5  # two turns of each run at least: the first one has three steps
    assert comparison.target is not None
    assert {(d.measure, d.a, d.b) for d in comparison.differences} >= {("step_s", "ddp", "gtopk")}
    assert comparison.verdict


def test_batches_in_proportion_make_the_same_steps_as_equal_ones(npz: Path, tmp_path: Path) -> None:
    """The loss of all samples of each step, wherever they were computed."""
    strategies = ["allreduce", "allreduce:batch_shares=3/1"]
    directory, comparison = run_comparison(
        plan_comparison(comparing(npz, strategies=strategies, steps=12), out=tmp_path / "out"),
        ComparisonListener(),
        command="offbeat compare",
    )
    losses = []
    for label, sizes in (("allreduce", [4, 4]), ("allreduce batch_shares=3/1", [6, 2])):
        by_rank = [list(run_of(directory, comparison, label).events(rank)) for rank in range(2)]
        assert [[event.batch_size for event in events] for events in by_rank] == [
            [size] * 12 for size in sizes
        ]
        losses.append(
            [
                sum(each.loss * each.batch_size for each in step)
                for step in zip(*by_rank, strict=True)
            ]
        )
    np.testing.assert_allclose(*losses, rtol=1e-4)


def test_a_model_with_tied_weights_is_compared_where_the_leader_averages_alone(
    npz: Path, tmp_path: Path
) -> None:
    settings = ["max_bytes=65536", "window=8", "batch_size=2"]
    request = comparing(
        npz, task="text", strategies=["wagma"], settings=settings, steps=4, eval_every=2
    )
    directory, comparison = run_comparison(
        plan_comparison(request, out=tmp_path / "out"), ComparisonListener(), command=""
    )
    assert [strategy.failure for strategy in comparison.strategies] == [None]
    record = run_of(directory, comparison, "wagma")
    assert [evaluation.step for evaluation in record.evaluations()] == [0, 2, 4]


def test_a_strategy_whose_worker_dies_is_out_and_the_other_goes_on(
    npz: Path, tmp_path: Path
) -> None:
    class Killing(ComparisonListener):
        def progress(self, label: str, progress: WorkerProgress) -> None:
            super().progress(label, progress)
            if (
                (label, progress.rank) == ("gtopk", 1)
                and "gtopk" not in self.failures
                and progress.step >= 3
            ):
                os.kill(progress.pid, signal.SIGKILL)

    listener = Killing()
    request = comparing(npz, steps=40)
    _, comparison = run_comparison(
        plan_comparison(request, out=tmp_path / "out"), listener, command=""
    )
    ddp, gtopk = comparison.strategies
    assert comparison.status == "finished"
    assert gtopk.failure is not None
    assert "worker 1" in gtopk.failure
    assert "killed by SIGKILL" in gtopk.failure
    assert listener.failures == {"gtopk": gtopk.failure}
    assert gtopk.measures == {}
    assert None not in ddp.measures["step_s"].values
    assert comparison.verdict.startswith("Only ddp finished")
    assert_gone(iter(listener.pids.values()))


@pytest.mark.parametrize("when", ["starting", "training"])
def test_an_interrupt_stops_all_and_leaves_nobody(
    npz: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    started: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    start = supervisor.start_worker

    def noting(*arguments: Any, **options: Any) -> LocalWorker:
        worker = start(*arguments, **options)
        started.append(worker.process.pid)
        if when == "starting" and len(started) == 2:
            signal.raise_signal(
                signal.SIGINT
            )  # the first strategy's workers are on their way, the others' are not
        return worker

    class Interrupting(ComparisonListener):
        def progress(self, label: str, progress: WorkerProgress) -> None:
            super().progress(label, progress)
            if when == "training" and not self.interrupted and progress.step >= 5:
                self.interrupted = True
                signal.raise_signal(signal.SIGINT)

        interrupted = False

    monkeypatch.setattr(supervisor, "start_worker", noting)
    monkeypatch.setattr(
        offbeat_lab.cli.comparing, "comparison_display", lambda quiet: nullcontext(Interrupting())
    )
    arguments = (
        "compare --task mnist --strategies ddp,gtopk:density=0.01:collective=reduce_scatter"
        " --workers 2 --seeds 1"
    )
    arguments += (
        f" --emulation none --steps {ENDLESS} --eval-every {ENDLESS} --turn 0.001 --set path={npz}"
        " --set batch_size=4"
    )
    monkeypatch.setattr("sys.argv", ["offbeat", *arguments.split(), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        offbeat_lab.cli.main.main()
    assert ended.value.code == EXIT_INTERRUPTED
    comparison = read_comparison(tmp_path / "out")
    assert comparison.status == "stopped"
    assert all(c.failure is None for c in comparison.strategies)
    assert len(started) == (2 if when == "starting" else 6)
    assert_gone(iter(started))
    assert signal.getsignal(signal.SIGINT) is before
    if when == "training":
        summary = run_of(tmp_path / "out", comparison, "ddp").summary()
        assert summary is not None
        assert summary.status == "stopped"


def test_a_worker_that_stands_still_goes_on_when_the_script_says_so(
    npz: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it stands still nobody finishes a step, so training time stands still too, and would
    never come to the moment at which the worker goes on.
    """
    sent: list[tuple[int, int]] = []
    pids: dict[int, int] = {}

    def noting(group: int, number: int, *, send: Any = os.killpg) -> None:
        sent.append((group, number))
        send(group, number)

    def hear(report: WorkerProgress | MembershipChange) -> None:
        if isinstance(report, WorkerProgress):
            pids[report.rank] = report.pid

    monkeypatch.setattr(os, "killpg", noting)
    stopped = Cluster(
        workers=2,
        step_s=0.01,
        faults=(
            ClusterFault(at_s=0.1, worker=1, action="stop"),
            ClusterFault(at_s=1.5, worker=1, action="continue"),
        ),
    )
    request = Request(
        task="mnist",
        strategy="allreduce",
        cluster=stopped,
        emulation="none",
        steps=100,
        eval_every=None,
        settings=[f"path={npz}", "batch_size=4"],
    )
    summary = train(plan(request, out=tmp_path / "run"), hear)
    assert summary is not None
    assert (summary.status, summary.steps) == ("finished", 100)
    assert sent[:2] == [(pids[1], signal.SIGSTOP), (pids[1], signal.SIGCONT)]


def average_local_models(rank: int, world_size: int) -> dict[str, list[float]]:
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    options = {"start_step": 1, "period": 8}
    attached = attach("post-localsgd", options, model, optimizer, world_size)
    with attached.session:
        for step in range(4):
            x = torch.full((2, 4), 1.0 + rank + step)
            attached.backward(attached.module(x).square().mean())
            attached.optimizer.step()
            attached.optimizer.zero_grad()
        return {"own": flat_parameters(model), "mean": flat_parameters(attached.averaged_model())}


def test_what_is_measured_of_torchs_local_steps_is_the_mean(run_ranks: RunRanks) -> None:
    ranks = run_ranks(average_local_models, 2)
    own = np.array([each["own"] for each in ranks])
    assert not np.allclose(own[0], own[1])
    for each in ranks:
        np.testing.assert_allclose(each["mean"], own.mean(axis=0), rtol=1e-5)
