"""Checkpoints that are damaged, or were made by somebody who can sign a manifest anew."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

import offbeat
from fuzz_support import (
    JSON,
    NESTED,
    NESTED_OBJECTS,
    altered,
    altered_bytes,
    altered_text,
    places_in,
    succeeds_or_refuses,
)
from offbeat import reshard
from offbeat.errors import CheckpointError
from offbeat.session.checkpoint import (
    latest,
    load,
    read_manifest,
    read_shard,
    verify,
    write_checkpoint,
)

TREE = {"model": {"weight": torch.ones(2, 3)}, "step": 3, "pair": (1, None), "more": [float("inf")]}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    return write_checkpoint(root, TREE, step=7, rank=0, world_size=1, barrier=lambda: None)


def read_all(path: Path) -> None:
    manifest = latest(path.parent)
    verify(manifest)
    for rank in range(manifest.world_size):
        read_shard(manifest, rank)


def signed(body: Any) -> bytes:
    """A manifest whose checksum is right."""
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({"body": body, "sha256": digest}).encode()


def body_of(path: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((path / "manifest.json").read_bytes())["body"]
    return body


def with_manifest(path: Path, content: bytes) -> None:
    """Read everything with another manifest, which is taken away afterwards."""
    file = path / "manifest.json"
    before = file.read_bytes()
    file.write_bytes(content)
    try:
        succeeds_or_refuses(lambda: read_all(path))
    finally:
        file.write_bytes(before)


@given(data=st.data())
def test_a_manifest_is_read_or_refused(checkpoint: Path, data: st.DataObject) -> None:
    manifest = json.loads((checkpoint / "manifest.json").read_bytes())
    with_manifest(checkpoint, data.draw(altered_text(manifest)))


@given(data=st.data())
def test_a_manifest_that_was_signed_anew_is_read_or_refused(
    checkpoint: Path, data: st.DataObject
) -> None:
    with_manifest(checkpoint, signed(data.draw(altered(body_of(checkpoint)))))


@pytest.mark.parametrize(
    "change",
    [
        {"step": "7"},
        {"step": True},
        {"step": -7},
        {"world_size": 10**12},
        {"world_size": 0, "files": {}, "num_bytes": {}},
        {"files": [], "num_bytes": []},
        {"files": {"../../secret": "00"}, "num_bytes": {"../../secret": 1}},
        {"num_bytes": {"/etc/passwd": 1}},
        {"metadata": None},
        {"metadata": [1]},
    ],
)
def test_a_signed_manifest_of_other_types_or_files_is_refused(
    checkpoint: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    path = tmp_path / checkpoint.name
    path.mkdir()
    (path / "manifest.json").write_bytes(signed(body_of(checkpoint) | change))
    with pytest.raises(CheckpointError, match="is not a manifest"):
        read_manifest(path)


@pytest.mark.parametrize("content", [NESTED, NESTED_OBJECTS, "[]", '{"body": [1]}', "1"])
def test_a_file_that_is_no_manifest_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "step-00000007"
    path.mkdir()
    (path / "manifest.json").write_text(content)
    with pytest.raises(CheckpointError, match="is not a manifest"):
        read_manifest(path)


@given(data=st.data())
def test_a_shard_is_read_or_refused(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = (checkpoint / "rank-00000.safetensors").read_bytes()
    directory = tmp_path_factory.mktemp("shard")
    (directory / "shard.safetensors").write_bytes(data.draw(altered_bytes(content)))
    succeeds_or_refuses(lambda: load(directory, "shard"))


STRUCTURE = {"dict": [["a", {"tensor": "t"}], [1, {"tuple": [{"array": "t"}, {"float": "nan"}]}]]}
TENSORS = {"t": torch.ones(3, dtype=torch.bfloat16), "u": torch.ones(2)}


@given(data=st.data())
def test_the_structure_of_a_tree_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    structure = data.draw(altered_text(STRUCTURE)).decode(errors="replace")
    metadata = data.draw(JSON.map(json.dumps) | st.sampled_from([NESTED, "{}"]))
    header = {"schema": "1", "structure": structure, "metadata": metadata}
    directory = tmp_path_factory.mktemp("shard")
    content = safetensors.torch.save(TENSORS, header)
    (directory / "shard.safetensors").write_bytes(content)
    succeeds_or_refuses(lambda: load(directory, "shard"))


@pytest.mark.parametrize("text", [NESTED, '{"dict": ' * 400 + "1" + "}" * 400])
def test_a_nested_structure_is_refused(tmp_path: Path, text: str) -> None:
    header = {"schema": "1", "structure": text, "metadata": "{}"}
    (tmp_path / "shard.safetensors").write_bytes(safetensors.torch.save(TENSORS, header))
    with pytest.raises(CheckpointError, match="is damaged"):
        load(tmp_path, "shard")


STRATEGIES = [
    offbeat.AllReduce(),
    offbeat.GTopK(),
    offbeat.EF21(density=0.5),
    offbeat.LocalSGD(),
    offbeat.SGP(),
    offbeat.WAGMA(),
    offbeat.EagerSGD(),
    offbeat.AdaptiveSGD(mega_batch=8, warmup=0),
    offbeat.ElasticSGD(mega_batch=8),
    offbeat.SPDKFAC(),
]


@pytest.fixture(scope="module", params=STRATEGIES, ids=lambda strategy: strategy.name)
def saved(request: pytest.FixtureRequest) -> Iterator[tuple[offbeat.Session, dict[str, Any]]]:
    """A session, and its state."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with offbeat.attach(model, optimizer, request.param) as session:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        yield session, session.state_dict()


@given(data=st.data())
def test_a_state_is_loaded_or_refused(
    saved: tuple[offbeat.Session, dict[str, Any]], data: st.DataObject
) -> None:
    session, state = saved[0], deepcopy(saved[1])
    *path, key = data.draw(st.sampled_from(places_in(state)[1:]))
    holder: Any = state
    for name in path:
        holder = holder[name]
    if data.draw(st.booleans()):
        holder[key] = data.draw(JSON | st.just(torch.ones(5)))
    else:
        del holder[key]
    succeeds_or_refuses(lambda: reshard([state, state], 3, 1))
    succeeds_or_refuses(lambda: session.load_state_dict(state))
