"""Checkpoints of several ranks: nothing damaged or half-written is ever read."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

from offbeat.errors import CheckpointError
from offbeat.session.checkpoint import save
from offbeat_lab.checkpoints import (
    latest,
    read_manifest,
    read_shard,
    remove_partial,
    verify,
    write_checkpoint,
)


def write(root: Path, step: int, world_size: int = 2) -> Path:
    """All ranks of a checkpoint, each in a thread."""
    meeting = threading.Barrier(world_size)
    threads = [
        threading.Thread(
            target=write_checkpoint,
            args=(root, {"rank": rank, "x": torch.full((3,), float(rank))}),
            kwargs={
                "step": step,
                "rank": rank,
                "world_size": world_size,
                "barrier": meeting.wait,
                "metadata": {"seed": 7},
            },
        )
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return root / f"step-{step:08d}"


def test_the_newest_checkpoint_replaces_the_one_before(tmp_path: Path) -> None:
    write(tmp_path, 10)
    write(tmp_path, 20, world_size=3)
    manifest = latest(tmp_path)
    verify(manifest)
    assert (manifest.step, manifest.world_size, manifest.metadata) == (20, 3, {"seed": 7})
    assert [read_shard(manifest, rank)["rank"] for rank in range(3)] == [0, 1, 2]
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000020"]


def test_a_writer_killed_at_any_point_leaves_the_previous_one(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    def kill() -> None:
        raise Killed

    write(tmp_path, 10)
    with pytest.raises(Killed):
        write_checkpoint(tmp_path, {"x": 1}, step=20, rank=0, world_size=2, barrier=kill)
    assert latest(tmp_path).step == 10
    left = tmp_path / ".partial-00000020"  # by one that had no time to remove its part
    left.mkdir(exist_ok=True)
    save(left, "rank-00001", {"x": 2})
    write(tmp_path, 20, world_size=1)  # the leftovers of the killed attempt are in nobody's way
    assert latest(tmp_path).world_size == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000020"]


def test_a_checkpoint_for_which_there_is_no_room_leaves_the_previous_one(tmp_path: Path) -> None:
    write(tmp_path, 10)
    partial = tmp_path / ".partial-00000020"
    partial.mkdir()
    (partial / ".rank-00000.safetensors.tmp").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match="No space left"):
        write_checkpoint(
            tmp_path, {"x": 1}, step=20, rank=0, world_size=1, barrier=threading.Barrier(1).wait
        )
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000010"]


def test_what_killed_writers_have_left_can_be_removed(tmp_path: Path) -> None:
    write(tmp_path, 10)
    (tmp_path / ".partial-00000020").mkdir()
    save(tmp_path / ".partial-00000020", "rank-00001", {"x": 1})
    remove_partial(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000010"]


def test_a_step_that_has_a_checkpoint_keeps_it(tmp_path: Path) -> None:
    path = write(tmp_path, 10)
    before = (path / "manifest.json").read_bytes()
    write(tmp_path, 10)
    assert (path / "manifest.json").read_bytes() == before


def truncate(path: Path) -> None:
    shard = path / "rank-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])


def flip_a_bit(path: Path) -> None:
    shard = path / "rank-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)


def remove_a_shard(path: Path) -> None:
    (path / "rank-00000.safetensors").unlink()


def swap_shards(path: Path) -> None:
    first, second = path / "rank-00000.safetensors", path / "rank-00001.safetensors"
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)


def remove_the_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def cut_the_manifest(path: Path) -> None:
    manifest = path / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:50])


def edit_manifest(path: Path, key: str, value: object) -> None:
    content = json.loads((path / "manifest.json").read_text())
    content["body"][key] = value
    (path / "manifest.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "truncated"),
        (flip_a_bit, "checksum"),
        (remove_a_shard, "missing"),
        (swap_shards, "checksum"),
        (remove_the_manifest, "cannot read"),
        (cut_the_manifest, "not a manifest"),
        (lambda path: edit_manifest(path, "schema", 99), "schema 99"),
        (lambda path: edit_manifest(path, "step", 11), "altered"),
        (lambda path: path.rename(path.with_name("step-00000011")), "step 10"),
    ],
)
def test_a_damaged_checkpoint_is_refused(damage: object, message: str, tmp_path: Path) -> None:
    damage(write(tmp_path, 10))
    with pytest.raises(CheckpointError, match=message):
        verify(latest(tmp_path))


def test_reading_a_shard_checks_it_too(tmp_path: Path) -> None:
    path = write(tmp_path, 10)
    manifest = read_manifest(path)
    flip_a_bit(path)
    assert read_shard(manifest, 0)["rank"] == 0
    with pytest.raises(CheckpointError, match="altered"):
        read_shard(manifest, 1)
    with pytest.raises(CheckpointError, match="asked for rank 2"):
        read_shard(manifest, 2)


def test_no_checkpoint_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        latest(tmp_path / "nowhere")
