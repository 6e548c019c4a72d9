"""Whole runs with real worker processes: they finish, resume to the bit, die loudly, and leave
nobody behind.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from offbeat.errors import CheckpointError, PeerError, RecordError
from offbeat.run.coordination import serve_store
from offbeat.run.progress import WorkerProgress
from offbeat.run.records import Summary
from offbeat_lab.checkpoints import latest, verify
from offbeat_lab.cli import main as command_line
from offbeat_lab.cluster import Cluster
from offbeat_lab.config import Request
from offbeat_lab.forking import ForkServerError, WorkerForks
from offbeat_lab.records import Record
from offbeat_lab.train import plan, train
from ranks_support.launch import Place, launch_in_places
from ranks_support.process import StartProcess, start_process
from ranks_support.templates import Templates

__all__ = ["start_process"]
pytestmark = pytest.mark.ranks

ENDLESS = 1_000_000
DEADLINE_S = 60


def request(npz: Path, **changes: object) -> Request:
    settings = [f"path={npz}", "batch_size=4", "density=0.01", "collective=reduce_scatter"]
    return Request(
        **({"task": "mnist", "strategy": "gtopk", "workers": 2, "settings": settings} | changes)
    )


def run(
    npz: Path,
    out: Path,
    watch: Callable[[WorkerProgress], None] = lambda progress: None,
    **changes: object,
) -> Summary:
    summary = train(plan(request(npz, **changes), out=out), watch)
    assert summary is not None
    return summary


def resume(out: Path, **changes: int) -> Summary:
    summary = train(plan(Request(**changes), resume=out), lambda progress: None)
    assert summary is not None
    return summary


def assert_gone(pids: set[int]) -> None:
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


def test_a_resumed_run_is_identical_to_one_that_never_stopped(npz: Path, tmp_path: Path) -> None:
    straight = run(npz, tmp_path / "straight", steps=20)
    run(npz, tmp_path / "halves", steps=10)
    resumed = resume(tmp_path / "halves", steps=20)
    assert resumed.parameters_sha256 == straight.parameters_sha256
    assert (resumed.resumed_from_step, resumed.steps, resumed.metric) == (10, 20, straight.metric)
    assert straight.replicas_identical
    assert straight.bytes_sent_per_step > 0
    losses = [
        [[event.loss for event in Record(tmp_path / name).events(rank)] for rank in range(2)]
        for name in ("straight", "halves")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0][0]) == 20


def test_where_no_worker_can_be_forked_fresh_interpreters_do_the_same(
    npz: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise ForkServerError("not on this system")

    forked = run(npz, tmp_path / "forked", steps=5, workers=1)
    monkeypatch.setattr(WorkerForks, "fork", refuse)
    fresh = run(npz, tmp_path / "fresh", steps=5, workers=1)
    assert forked.parameters_sha256 == fresh.parameters_sha256
    log = Path("logs", "rank-0.log")
    assert (tmp_path / "forked" / log).read_text() == ""
    assert "not forked: not on this system" in (tmp_path / "fresh" / log).read_text()


def test_another_number_of_workers_may_go_on(npz: Path, tmp_path: Path) -> None:
    run(npz, tmp_path / "run", steps=6)
    summary = resume(tmp_path / "run", workers=3, steps=9)
    assert (summary.world_size, summary.steps, summary.resumed_from_step) == (3, 9, 6)
    assert summary.replicas_identical
    assert latest(tmp_path / "run" / "checkpoint").world_size == 3
    assert resume(tmp_path / "run", workers=1, steps=11).steps == 11


def test_an_altered_checkpoint_starts_nothing_and_changes_nothing(
    npz: Path, tmp_path: Path
) -> None:
    run(npz, tmp_path / "run", steps=2, workers=1)
    shard = tmp_path / "run" / "checkpoint" / "step-00000002" / "rank-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match="altered"):
        resume(tmp_path / "run", steps=4)
    assert before == {
        path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()
    }
    with pytest.raises(RecordError, match="holds the record of an earlier run"):
        run(npz, tmp_path / "run", steps=2, workers=1)


def test_a_killed_worker_ends_the_run_with_its_name_and_a_good_checkpoint(
    npz: Path, tmp_path: Path
) -> None:
    pids: dict[int, int] = {}
    killed: list[int] = []

    def kill_rank_1(progress: WorkerProgress) -> None:
        pids[progress.rank] = progress.pid
        # Rank 0 may report once more before the supervisor knows.
        if len(pids) == 2 and progress.step > 5 and not killed:
            killed.append(pids[1])
            os.kill(pids[1], signal.SIGKILL)

    with pytest.raises(
        PeerError,
        match=(
            r"worker 1 \(pid \d+\) was killed by SIGKILL after step \d+ was recorded"
            r".*resume from step \d+ with"
        ),
    ) as caught:
        run(npz, tmp_path / "run", kill_rank_1, steps=ENDLESS, checkpoint_every=2)
    assert caught.value.rank == 1
    assert_gone(set(pids.values()))
    manifest = latest(tmp_path / "run" / "checkpoint")
    verify(manifest)
    assert resume(tmp_path / "run", steps=manifest.step + 2, workers=1).steps == manifest.step + 2


def test_a_worker_that_fails_says_why(npz: Path, tmp_path: Path) -> None:
    with np.load(npz) as arrays:
        good = dict(arrays)
    planned = plan(request(npz, steps=3), out=tmp_path / "run")
    np.savez(npz, **(good | {"y_test": np.full(10, -1)}))
    with pytest.raises(
        PeerError,
        match=(
            r"worker \d \(pid \d+\) failed before its first step was recorded: labels in"
            r" .*no checkpoint yet"
        ),
    ):
        train(planned, lambda progress: None)


def test_clocks_stop_for_an_evaluation_when_the_last_rank_has_come(
    npz: Path, tmp_path: Path
) -> None:
    """Between averages the fast rank does not wait for the slow one, which would else catch up
    while the fast one's clock stands still.
    """
    settings = [f"path={npz}", "batch_size=4", "period=100", "warmup=0", "optimizer_state=local"]
    cluster = Cluster(workers=2, speeds=(1.0, 0.25), step_s=0.02)
    run(
        npz,
        tmp_path / "run",
        strategy="localsgd",
        settings=settings,
        cluster=cluster,
        steps=12,
        eval_every=4,
    )
    by_rank = [list(Record(tmp_path / "run").events(rank)) for rank in range(2)]
    for step in (4, 8):
        events = [events[step - 1] for events in by_rank]
        first_stops_s = min(event.began_s + event.duration_s for event in events)
        assert first_stops_s >= max(event.began_s + event.compute_s for event in events)


def test_an_interrupt_writes_a_checkpoint_and_leaves_nobody(npz: Path, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    pids: set[int] = set()

    def interrupt(progress: WorkerProgress) -> None:
        pids.add(progress.pid)
        if progress.step > 5 and len(pids) == 2:
            signal.raise_signal(signal.SIGINT)
            pids.add(0)  # once is enough: twice means "at once"

    summary = run(npz, tmp_path / "run", interrupt, steps=ENDLESS)
    assert summary.status == "stopped"
    assert_gone(pids - {0})
    manifest = latest(tmp_path / "run" / "checkpoint")
    assert manifest.step == summary.steps
    verify(manifest)
    assert signal.getsignal(signal.SIGINT) is before
    assert resume(tmp_path / "run", steps=summary.steps + 1).steps == summary.steps + 1


def supervise(rank: int, world_size: int, *, npz: str, out: str, pids: str) -> None:
    """Trains for ever, and says which processes do it."""
    with Path(pids).open("w", buffering=1) as told:
        planned = plan(request(Path(npz), steps=ENDLESS, workers=1), out=Path(out))
        train(planned, lambda progress: print(progress.pid, file=told))


def test_workers_do_not_outlive_a_killed_supervisor(
    npz: Path, tmp_path: Path, start_process: StartProcess
) -> None:
    said = tmp_path / "pids"
    os.mkfifo(said)
    supervisor = start_process(
        supervise, 0, 1, npz=str(npz), out=str(tmp_path / "run"), pids=str(said)
    )
    with said.open() as lines:
        pid = int(lines.readline())
        supervisor.kill()
    assert_gone({pid})


def train_by_command(rank: int, world_size: int, *, command: list[str]) -> list[Any]:
    """The command line, as in a process of its own: its exit status and its standard output."""
    sys.argv = ["offbeat", *command]
    with redirect_stdout(StringIO()) as printed, pytest.raises(SystemExit) as ended:
        command_line.start()
    return [ended.value.code, printed.getvalue()]


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_launched_ranks_join_each_other(
    npz: Path,
    tmp_path: Path,
    launcher: str,
    templates: Templates,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    # Stands in for the agent's: torchrun itself would listen on every interface.
    store = serve_store()
    names = ("RANK", "WORLD_SIZE") if launcher == "torchrun" else ("SLURM_PROCID", "SLURM_NTASKS")
    places = [
        Place(
            environment={
                names[0]: str(rank),
                names[1]: "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
        )
        for rank in range(2)
    ]
    command = ["train", "--task", "mnist", "--strategy", "gtopk", "--steps", "3", "--json"]
    command += ["--set", f"path={npz}", "--set", "batch_size=4", "--out", "run"]
    outcomes = launch_in_places(
        train_by_command,
        places,
        templates=templates,
        directory=tmp_path,
        arguments={"command": command},
    )
    assert [status for status, _ in outcomes] == [0, 0]
    assert outcomes[1][1] == ""
    assert json.loads(outcomes[0][1])["world_size"] == 2
    assert len(list(Record(tmp_path / "run").events(1))) == 3
