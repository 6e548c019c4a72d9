"""Checkpoints of several ranks, each in a directory of its own below a root:

    ROOT/step-00000120/rank-00000.safetensors   each rank's tree, as `offbeat.session.checkpoint`
    ROOT/step-00000120/rank-00001.safetensors   writes it
    ROOT/step-00000120/manifest.json            schema version, step, world size, size and SHA-256
                                                of every file, metadata

Everything is written into `ROOT/.partial-00000120`, flushed to disk, and renamed as the last act;
only then is the previous checkpoint removed. So a directory named `step-...` is always complete,
whenever the writer was killed. Reading checks every checksum before a single tensor is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offbeat.errors import MALFORMED, CheckpointError
from offbeat.session.checkpoint import (
    SCHEMA,
    Json,
    Tree,
    cannot_write,
    flush_directory,
    parse,
    read_file,
    save,
    write_durably,
)

_MANIFEST = "manifest.json"
_STEP_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        path: the checkpoint's own directory.
        step: optimizer steps taken when it was written.
        world_size: number of ranks, and of shards.
        files: SHA-256 in hexadecimal by file name.
        num_bytes: size by file name.
        metadata: whatever the writer added.
    """

    path: Path
    step: int
    world_size: int
    files: Mapping[str, str]
    num_bytes: Mapping[str, int]
    metadata: Mapping[str, Json]


def write_checkpoint(
    root: Path,
    tree: Tree,
    *,
    step: int,
    rank: int,
    world_size: int,
    barrier: Callable[[], None],
    metadata: Mapping[str, Json] | None = None,
) -> Path:
    """Write this rank's part of the checkpoint of `step` and, on rank 0, make it the one that
    counts. Every rank calls it.

    A step that already has a checkpoint is left as it is.

    Args:
        root: directory that holds checkpoints and that all ranks see.
        tree: this rank's state.
        barrier: returns once every rank has called it.
        metadata: JSON values for the manifest; rank 0's are used.

    Returns:
        The checkpoint's directory, complete.

    Raises:
        CheckpointError: it cannot be written. This rank's part of it is removed, and the checkpoint
            before stays.
    """
    final, partial = root / f"step-{step:08d}", root / f".partial-{step:08d}"
    if final.exists():
        return final
    try:
        partial.mkdir(parents=True, exist_ok=True)
        save(partial, _shard_name(rank), tree)
        barrier()
        if rank == 0:
            _write_manifest(partial, step=step, world_size=world_size, metadata=metadata or {})
            os.replace(partial, final)
            flush_directory(root)
            _remove_all_but(final)
        barrier()
    except BaseException as error:
        _discard_part(partial, rank)
        if isinstance(error, OSError):
            raise cannot_write(final, error) from None
        raise
    return final


def remove_partial(root: Path) -> None:
    """Remove what writers have left under `root` that ended before their checkpoint was complete.
    Nobody may be writing there.
    """
    for entry in root.glob(".partial-*"):
        shutil.rmtree(entry, ignore_errors=True)


def latest(root: Path) -> Manifest:
    """The newest checkpoint under `root`, its manifest checked against the files' presence and
    sizes.

    Raises:
        CheckpointError: there is none, or it is damaged or of a newer schema.
    """
    entries = root.iterdir() if root.is_dir() else ()
    found = [entry for entry in entries if _STEP_NAME.fullmatch(entry.name)]
    if not found:
        raise CheckpointError(
            f"no checkpoint in {root}; a run writes one every few steps, at its end and when it is"
            " interrupted; start a new one"
        )
    return read_manifest(max(found, key=lambda entry: int(entry.name.removeprefix("step-"))))


def read_manifest(path: Path) -> Manifest:
    """Read and check the manifest of the checkpoint in directory `path`; shards are checked when
    they are read.

    Raises:
        CheckpointError: it is missing, damaged or of a newer schema.
    """
    raw = read_file(path / _MANIFEST)
    try:
        content = json.loads(raw)
        body, digest = content["body"], content.get("sha256")
        schema, actual_digest = body["schema"], _digest_json(body)
    except MALFORMED as error:
        raise _not_a_manifest(path, str(error)) from None
    if schema != SCHEMA:
        raise CheckpointError(
            f"{path} has checkpoint schema {schema!r}, this version reads {SCHEMA}; install the"
            " offbeat that wrote it"
        )
    if digest != actual_digest:
        raise _altered(path / _MANIFEST)
    manifest = _manifest_of(path, body)
    if path.name != f"step-{manifest.step:08d}":
        raise CheckpointError(
            f"{path} holds the checkpoint of step {manifest.step}: it was renamed; give it its own"
            " name back"
        )
    for name, size in manifest.num_bytes.items():
        actual = (path / name).stat().st_size if (path / name).is_file() else None
        if actual != size:
            state = (
                "is missing"
                if actual is None
                else f"has {actual} bytes instead of {size}: it was truncated or altered"
            )
            raise CheckpointError(
                f"{path / name} {state}; restore it from a copy, or start a new run"
            )
    return manifest


def read_shard(manifest: Manifest, rank: int) -> Tree:
    """Rank `rank`'s tree, 0 <= rank < manifest.world_size, after its checksum has been compared.

    Raises:
        CheckpointError: no such rank, or the file is not the one that was written.
    """
    name = f"{_shard_name(rank)}.safetensors"
    if name not in manifest.files:
        raise CheckpointError(
            f"{manifest.path} has shards for ranks 0 to {manifest.world_size - 1}, asked for rank"
            f" {rank}"
        )
    content = read_file(manifest.path / name)
    if hashlib.sha256(content).hexdigest() != manifest.files[name]:
        raise _altered(manifest.path / name)
    return parse(manifest.path / name, content).tree


def verify(manifest: Manifest) -> None:
    """Compare the checksum of every shard without reading tensors. Raises `CheckpointError`."""
    for name, expected in manifest.files.items():
        if _digest_file(manifest.path / name) != expected:
            raise _altered(manifest.path / name)


def _manifest_of(path: Path, body: Mapping[str, Any]) -> Manifest:
    """The manifest in `path`. A checksum shows that it was not damaged, not who wrote it: so the
    names of files are those that a checkpoint has, and none leads out of its directory.
    """
    kinds = {"step": int, "world_size": int, "files": dict, "num_bytes": dict, "metadata": dict}
    for name, kind in kinds.items():
        if type(body.get(name)) is not kind:
            raise _not_a_manifest(path, f"{name} is {body.get(name)!r:.80}")
    manifest = Manifest(path=path, **{name: body[name] for name in kinds})
    names = [f"{_shard_name(rank)}.safetensors" for rank in range(len(manifest.files))]
    if (
        manifest.step < 0
        or manifest.world_size != len(names)
        or not names
        or manifest.files.keys() != set(names)
        or manifest.num_bytes.keys() != set(names)
    ):
        raise _not_a_manifest(path, "the files that it names are not those of its ranks")
    return manifest


def _not_a_manifest(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path / _MANIFEST} is not a manifest ({why}); restore it from a copy, or start a new run"
    )


def _altered(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} does not match its checksum: it was altered; restore a copy, or start a new run"
    )


def _shard_name(rank: int) -> str:
    return f"rank-{rank:05d}"


def _write_manifest(
    partial: Path, *, step: int, world_size: int, metadata: Mapping[str, Json]
) -> None:
    names = [f"{_shard_name(rank)}.safetensors" for rank in range(world_size)]
    for entry in partial.iterdir():
        if entry.name not in names:  # an earlier attempt at this step, with more ranks, was killed
            entry.unlink()
    body: dict[str, Json] = {
        "schema": SCHEMA,
        "step": step,
        "world_size": world_size,
        "files": {name: _digest_file(partial / name) for name in names},
        "num_bytes": {name: (partial / name).stat().st_size for name in names},
        "metadata": dict(metadata),
        "torch": str(torch.__version__),
    }
    text = json.dumps({"body": body, "sha256": _digest_json(body)}, indent=1)
    write_durably(partial / _MANIFEST, text.encode())


def _discard_part(partial: Path, rank: int) -> None:
    """Remove this rank's part of a checkpoint that will not be complete; other ranks may still
    write theirs.
    """
    with suppress(OSError):
        (partial / f"{_shard_name(rank)}.safetensors").unlink(missing_ok=True)
        if rank == 0:
            (partial / _MANIFEST).unlink(missing_ok=True)
        partial.rmdir()  # only if the other ranks have left nothing in it


def _remove_all_but(final: Path) -> None:
    for entry in list(final.parent.iterdir()):
        # Renamed first: killed halfway, it must not look complete.
        if entry != final and _STEP_NAME.fullmatch(entry.name):
            shutil.rmtree(entry.rename(entry.with_name(f".partial-old-{entry.name}")))
        elif entry.name.startswith(".partial-"):
            shutil.rmtree(entry)


def _digest_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_json(body: Json) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
