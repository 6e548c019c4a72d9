"""Trees survive a round trip exactly, and nothing damaged or half-written is ever read."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import CheckpointError
from offbeat.session.checkpoint import (
    latest,
    load,
    read_manifest,
    read_shard,
    remove_partial,
    save,
    verify,
    write_checkpoint,
)


def same(left: object, right: object) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right or (isinstance(left, float) and math.isnan(left) and math.isnan(right))


def tensors(dtype: torch.dtype) -> st.SearchStrategy[torch.Tensor]:
    return st.lists(st.integers(-100, 100), max_size=5).map(
        lambda numbers: torch.tensor(numbers, dtype=dtype)
    )


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(
        [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8]
    ).flatmap(tensors)
    | st.just(torch.tensor(True))
    | st.just(np.arange(6, dtype=np.uint16).reshape(2, 3))
    | st.just(np.array(1.5))
)
trees = st.recursive(
    leaves,
    lambda children: (
        st.lists(children, max_size=3)
        | st.lists(children, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(-3, 3), children, max_size=3)
    ),
    max_leaves=8,
)


@given(tree=trees)
def test_any_tree_comes_back_exactly(
    tree: object, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("tree")
    save(directory, "part", tree, metadata={"note": "x"})
    assert same(load(directory, "part").tree, tree)
    assert load(directory, "part").metadata == {"note": "x"}


def test_a_directory_may_be_named_by_a_string(tmp_path: Path) -> None:
    directory = str(tmp_path)
    save(directory, "part", {"a": 1})
    assert load(directory, "part").tree == {"a": 1}
    written = write_checkpoint(
        directory, {"b": 2}, step=3, rank=0, world_size=1, barrier=lambda: None
    )
    remove_partial(directory)
    assert latest(directory) == read_manifest(str(written))
    assert read_shard(latest(directory), 0) == {"b": 2}


def test_views_of_one_buffer_and_transposed_tensors_are_stored(tmp_path: Path) -> None:
    flat = torch.arange(6.0)
    tree = {"a": flat[:3], "b": flat[2:], "again": flat, "t": flat.view(2, 3).t()}
    save(tmp_path, "views", tree)
    assert same(load(tmp_path, "views").tree, tree)


@pytest.mark.parametrize(
    "make",
    [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.AdamW(p, lr=0.1)],
)
def test_an_optimizer_goes_on_as_if_never_stored(make: object, tmp_path: Path) -> None:
    def trained(num_steps: int, interrupt: bool) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 5))
        optimizer = make([weight])
        for step in range(num_steps):
            if interrupt and step == 3:
                save(tmp_path, "optimizer", optimizer.state_dict())
                optimizer = make([weight])
                optimizer.load_state_dict(load(tmp_path, "optimizer").tree)
            (weight**2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weight.detach()

    assert torch.equal(trained(6, interrupt=False), trained(6, interrupt=True))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": [object()]}, r"\.a\[0\]"),
        ({(1, 2): 3}, "keys"),
        ({True: 3}, "keys"),
        ({"a": torch.ones(2).to_sparse()}, r"sparse tensor at \.a; convert it with to_dense"),
    ],
)
def test_what_cannot_be_stored_is_named(tree: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path, "part", tree)
    assert not list(tmp_path.iterdir())


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


def without_room(path: Path) -> None:
    """Let the disk be full for whoever writes the file `path`."""
    path.parent.mkdir(exist_ok=True)
    path.with_name(f".{path.name}.tmp").symlink_to("/dev/full")


def test_a_full_disk_is_an_error_of_ours_and_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path, "part", {"x": 1})
    without_room(tmp_path / "part.safetensors")
    with pytest.raises(CheckpointError, match="cannot write .* No space left .* make room"):
        save(tmp_path, "part", {"x": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["part.safetensors"]
    assert load(tmp_path, "part").tree == {"x": 1}


def test_a_checkpoint_for_which_there_is_no_room_leaves_the_previous_one(tmp_path: Path) -> None:
    write(tmp_path, 10)
    without_room(tmp_path / ".partial-00000020" / "rank-00000.safetensors")
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


@given(garbage=st.binary(max_size=60))
def test_foreign_bytes_are_refused(
    garbage: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("foreign")
    (directory / "part.safetensors").write_bytes(garbage)
    with pytest.raises(CheckpointError):
        load(directory, "part")
