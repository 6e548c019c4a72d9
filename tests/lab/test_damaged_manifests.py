"""Manifests that are damaged, or were made by somebody who can sign one anew."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz_support import NESTED, NESTED_OBJECTS, altered, altered_text, succeeds_or_refuses
from offbeat.errors import CheckpointError
from offbeat_lab.checkpoints import latest, read_manifest, read_shard, verify, write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    return write_checkpoint(root, {"step": 3}, step=7, rank=0, world_size=1, barrier=lambda: None)


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
