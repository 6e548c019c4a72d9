"""Whole runs whose workers claim samples: each counts once, runs go on in the middle of an epoch,
and stop at merges.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from offbeat.run.progress import WorkerProgress
from offbeat.run.records import Summary
from offbeat_lab.breakdown import read_steps
from offbeat_lab.cluster import Cluster
from offbeat_lab.config import Request
from offbeat_lab.records import Record
from offbeat_lab.train import plan, train

pytestmark = pytest.mark.ranks

NUM_SAMPLES = 64
"""Of the data set of fixture `npz`: with two workers and batches of four, eight steps an epoch; two
mega-batches of 32.
"""


def run(npz: Path, out: Path, strategy: str = "adaptive", **changes: object) -> Summary:
    settings = [f"path={npz}", "batch_size=4", "mega_batch=8"]
    request = Request(
        **({"task": "mnist", "strategy": strategy, "workers": 2, "settings": settings} | changes)
    )
    summary = train(plan(request, out=out), lambda progress: None)
    assert summary is not None
    return summary


def resume(out: Path, **changes: int) -> Summary:
    summary = train(plan(Request(**changes), resume=out), lambda progress: None)
    assert summary is not None
    return summary


def assert_each_sample_counts_once(
    record: Record, *, num_epochs: int, num_workers: int = 2
) -> None:
    given: dict[int, list[int]] = {}
    for mega_batch in record.mega_batches():
        assert sum(share.weight for share in mega_batch.by_rank) == pytest.approx(1.0)
        for share in mega_batch.by_rank:
            taken = [place for claim in share.claims for span in claim for place in range(*span)]
            assert share.samples == len(taken)
            given.setdefault(mega_batch.epoch, []).extend(taken)
    assert {epoch: sorted(places) for epoch, places in given.items()} == {
        epoch: list(range(NUM_SAMPLES)) for epoch in range(num_epochs)
    }
    sizes = [event.batch_size for rank in range(num_workers) for event in record.events(rank)]
    assert sum(sizes) == num_epochs * NUM_SAMPLES


def test_uneven_workers_share_each_epoch_and_go_on_in_the_middle_of_one(
    npz: Path, tmp_path: Path
) -> None:
    """With merges beside training, of which those before an evaluation are waited for."""
    cluster = Cluster(workers=2, speeds=(1.0, 0.25), step_s=0.02)
    out = tmp_path / "run"
    settings = [f"path={npz}", "batch_size=4", "mega_batch=8", "overlap=true"]
    first = run(npz, out, settings=settings, cluster=cluster, steps=12, eval_every=8)
    record = Record(out)
    assert (first.steps, [mega_batch.number for mega_batch in record.mega_batches()]) == (
        12,
        [1, 2, 3],
    )
    assert [evaluation.step for evaluation in record.evaluations()] == [0, 8, 12]
    resumed = resume(out, steps=24)
    assert (resumed.steps, resumed.resumed_from_step) == (24, 12)
    assert [mega_batch.step for mega_batch in record.mega_batches()] == [4, 8, 12, 16, 20, 24]
    assert_each_sample_counts_once(record, num_epochs=3)
    fast, slow = record.mega_batches()[-1].by_rank
    assert fast.samples > slow.samples
    assert read_steps(record).step.tolist() == list(range(1, 25))


def test_equal_shares_resume_to_the_bit_in_the_middle_of_an_epoch(
    npz: Path, tmp_path: Path
) -> None:
    straight = run(npz, tmp_path / "straight", "elasticsgd", epochs=2)
    run(npz, tmp_path / "halves", "elasticsgd", steps=4)
    resumed = resume(tmp_path / "halves", epochs=2)
    assert (straight.steps, resumed.steps) == (16, 16)
    assert resumed.parameters_sha256 == straight.parameters_sha256
    assert straight.replicas_identical
    assert_each_sample_counts_once(Record(tmp_path / "halves"), num_epochs=2)


def test_another_number_of_workers_takes_what_is_left_of_the_epoch(
    npz: Path, tmp_path: Path
) -> None:
    run(npz, tmp_path / "run", steps=4)
    alone = resume(tmp_path / "run", workers=1, epochs=2)
    assert (alone.world_size, alone.steps) == (1, 4 + 24)
    assert_each_sample_counts_once(Record(tmp_path / "run"), num_epochs=2)


def test_a_request_to_stop_is_kept_at_the_next_merge(npz: Path, tmp_path: Path) -> None:
    settings = [f"path={npz}", "batch_size=4", "mega_batch=8"]
    request = Request(
        task="mnist", strategy="adaptive", workers=2, settings=settings, steps=100_000
    )

    def stop(progress: WorkerProgress) -> None:
        if progress.rank == 1 and progress.step > 4:
            os.kill(progress.pid, signal.SIGTERM)

    summary = train(plan(request, out=tmp_path / "run"), stop)
    assert summary is not None
    assert summary.status == "stopped"
    assert summary.steps % 4 == 0
    assert resume(tmp_path / "run", steps=summary.steps + 4).steps == summary.steps + 4
