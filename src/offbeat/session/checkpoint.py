"""Checkpoints without pickle: trees of tensors and plain values as safetensors, and a manifest that
vouches for them.

A checkpoint of several ranks lies in a directory of its own below a root:

    ROOT/step-00000120/rank-00000.safetensors   each rank's tree: tensors, and the tree's shape as
    JSON in the file's header ROOT/step-00000120/rank-00001.safetensors
    ROOT/step-00000120/manifest.json            schema version, step, world size, size and SHA-256
    of every file, metadata

Everything is written into `ROOT/.partial-00000120`, flushed to disk, and renamed as the last act;
only then is the previous checkpoint removed. So a directory named `step-...` is always complete,
whenever the writer was killed. Reading checks every checksum before a single tensor is used.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import safetensors
import safetensors.torch
import torch
from numpy.typing import NDArray

from offbeat.codec.tensor_bytes import to_bytes
from offbeat.errors import MALFORMED, CheckpointError, OffbeatError

SCHEMA = 1
"""Version of the layout. A reader refuses a newer one."""

Json: TypeAlias = "None | bool | int | float | str | list[Json] | dict[str, Json]"
Leaf: TypeAlias = None | bool | int | float | str | torch.Tensor | NDArray[np.generic]
Tree: TypeAlias = (
    "Leaf | list[Tree] | tuple[Tree, ...] | dict[str | int, Tree] | Mapping[str, Tree]"
)
"""What can be stored. Dictionary keys are strings or integers, as in `optimizer.state_dict()`, and
keep their type.
"""

_MANIFEST = "manifest.json"
_STEP_NAME = re.compile(r"step-(\d{8,})")


class Stored(NamedTuple):
    """A tree as read back, with the metadata it was saved with."""

    tree: Tree
    metadata: dict[str, Json]


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


def save(
    directory: str | Path, name: str, tree: Tree, *, metadata: Mapping[str, Json] | None = None
) -> Path:
    """Write `tree` to `directory/name.safetensors`, atomically and durably.

    Tensors of any dtype safetensors knows (bfloat16 included) are stored contiguous and come back
    on the CPU. Numpy arrays come back as arrays; numpy scalars as Python numbers.

    Args:
        directory: must exist.
        name: of the file, without its ending.
        tree: nested dicts and lists of tensors, arrays, numbers, strings and None.
        metadata: kept in the file's header, to be read without the tensors.

    Raises:
        CheckpointError: the tree holds something of another kind, and the message names where; or
            the disk does not take the file, of which nothing is left then.
    """
    tensors: dict[str, torch.Tensor] = {}
    structure = _encode(tree, "", tensors)
    header = {
        "schema": str(SCHEMA),
        "structure": json.dumps(structure),
        "metadata": json.dumps(dict(metadata or {})),
    }
    path = Path(directory) / f"{name}.safetensors"
    _write_durably(path, to_bytes(tensors, header))
    return path


def load(directory: str | Path, name: str) -> Stored:
    """Inverse of `save`.

    Raises:
        CheckpointError: the file is missing, damaged, foreign, or of a newer schema.
    """
    path = Path(directory) / f"{name}.safetensors"
    return _parse(path, _read(path))


def write_checkpoint(
    root: str | Path,
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
    root = Path(root)
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
            _flush_directory(root)
            _remove_all_but(final)
        barrier()
    except OSError as error:
        _discard_part(partial, rank)
        raise _cannot_write(final, error) from None
    except BaseException:
        _discard_part(partial, rank)
        raise
    return final


def remove_partial(root: str | Path) -> None:
    """Remove what writers have left under `root` that ended before their checkpoint was complete.
    Nobody may be writing there.
    """
    for entry in Path(root).glob(".partial-*"):
        shutil.rmtree(entry, ignore_errors=True)


def latest(root: str | Path) -> Manifest:
    """The newest checkpoint under `root`, its manifest checked against the files' presence and
    sizes.

    Raises:
        CheckpointError: there is none, or it is damaged or of a newer schema.
    """
    root = Path(root)
    found = (
        [entry for entry in root.iterdir() if _STEP_NAME.fullmatch(entry.name)]
        if root.is_dir()
        else []
    )
    if not found:
        raise CheckpointError(
            f"no checkpoint in {root}; a run writes one every few steps, at its end and when it is"
            " interrupted; start a new one"
        )
    return read_manifest(max(found, key=lambda entry: int(entry.name.removeprefix("step-"))))


def read_manifest(path: str | Path) -> Manifest:
    """Read and check the manifest of the checkpoint in directory `path`; shards are checked when
    they are read.

    Raises:
        CheckpointError: it is missing, damaged or of a newer schema.
    """
    path = Path(path)
    raw = _read(path / _MANIFEST)
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
    content = _read(manifest.path / name)
    if hashlib.sha256(content).hexdigest() != manifest.files[name]:
        raise _altered(manifest.path / name)
    return _parse(manifest.path / name, content).tree


def verify(manifest: Manifest) -> None:
    """Compare the checksum of every shard without reading tensors. Raises `CheckpointError`."""
    for name, expected in manifest.files.items():
        if _digest_file(manifest.path / name) != expected:
            raise _altered(manifest.path / name)


@contextmanager
def naming_misfit(what: str) -> Iterator[None]:
    """`what`, which was read, is loaded into objects: `CheckpointError` where it does not fit."""
    try:
        yield
    except OffbeatError:
        raise
    except (*MALFORMED, RuntimeError) as error:
        raise CheckpointError(
            f"{what} does not fit what it is loaded into ({type(error).__name__}: {error}); was it"
            " saved with the same model, optimizer and strategy?"
        ) from error


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
    _write_durably(partial / _MANIFEST, text.encode())


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
        if entry != final and _STEP_NAME.fullmatch(
            entry.name
        ):  # renamed first: killed halfway, it must not look complete
            shutil.rmtree(entry.rename(entry.with_name(f".partial-old-{entry.name}")))
        elif entry.name.startswith(".partial-"):
            shutil.rmtree(entry)


def _encode(tree: Tree, where: str, tensors: dict[str, torch.Tensor]) -> Json:
    """JSON for the shape of `tree`; what does not fit into JSON is marked by an object with one
    key, its kind.
    """
    match tree:
        case np.generic():
            return _encode(tree.item(), where, tensors)
        case float() if not math.isfinite(tree):
            return {"float": str(tree)}
        case None | bool() | int() | float() | str():
            return tree
        case torch.Tensor(layout=layout) if layout != torch.strided:
            raise CheckpointError(
                f"cannot store a sparse tensor at {where or 'the top'}; convert it with to_dense()"
                " first"
            )
        case torch.Tensor():
            return {"tensor": _add_tensor(tree, where, tensors)}
        case np.ndarray():
            return {"array": _add_tensor(_tensor_of(tree, where), where, tensors)}
        case list():
            return [_encode(item, f"{where}[{i}]", tensors) for i, item in enumerate(tree)]
        case tuple():
            return {
                "tuple": [_encode(item, f"{where}[{i}]", tensors) for i, item in enumerate(tree)]
            }
        case Mapping():
            pairs: list[Json] = []
            for key, item in tree.items():
                if isinstance(key, bool) or not isinstance(key, str | int):
                    raise CheckpointError(
                        f"cannot store the key {key!r} at {where or 'the top'}: keys are strings or"
                        " integers"
                    )
                pairs.append([key, _encode(item, f"{where}.{key}", tensors)])
            return {"dict": pairs}
    raise CheckpointError(
        f"cannot store a {type(tree).__name__} at {where or 'the top'}: only tensors, arrays,"
        " numbers, strings, None, lists, tuples and dictionaries are; convert it first"
    )


def _add_tensor(tensor: torch.Tensor, where: str, tensors: dict[str, torch.Tensor]) -> str:
    name = f"{len(tensors)}:{where}"
    tensors[name] = tensor
    return name


def _tensor_of(array: NDArray[np.generic], where: str) -> torch.Tensor:
    try:
        return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
    except TypeError:
        raise CheckpointError(
            f"cannot store an array of dtype {array.dtype} at {where or 'the top'}; use a"
            " numeric one"
        ) from None


def _decode(structure: Json, tensors: Mapping[str, torch.Tensor]) -> Tree:
    if isinstance(structure, list):
        return [_decode(item, tensors) for item in structure]
    if not isinstance(structure, dict):
        return structure
    ((kind, content),) = structure.items()
    match kind, content:
        case "float", str():
            return float(content)
        case "tensor", str():
            return tensors[content]
        case "array", str():
            return tensors[content].numpy()
        case "tuple", list():
            return tuple(_decode(item, tensors) for item in content)
        case "dict", list():
            pairs = cast("list[tuple[str | int, Json]]", content)
            return {key: _decode(item, tensors) for key, item in pairs}
    raise ValueError(f"unknown kind {kind!r}")


def _parse(path: Path, content: bytes) -> Stored:
    try:
        header_length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + header_length])["__metadata__"]
        if header["schema"] != str(SCHEMA):
            raise CheckpointError(
                f"{path} has checkpoint schema {header['schema']}, this version reads {SCHEMA};"
                " update offbeat"
            )
        tensors = safetensors.torch.load(content)
        metadata = json.loads(header["metadata"])
        if not isinstance(metadata, dict):
            raise TypeError(f"the metadata are {metadata!r:.80}")
        return Stored(_decode(json.loads(header["structure"]), tensors), metadata)
    except (*MALFORMED, RuntimeError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"{path} is damaged or was not written by offbeat ({error}); restore it from a copy, or"
            " start a new run"
        ) from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path}: {error.strerror}; is this the directory of a checkpoint?"
        ) from None


def _write_durably(path: Path, content: bytes) -> None:
    """Write under a temporary name, flush to disk, rename. What cannot be written whole is
    removed.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _flush_directory(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise _cannot_write(path, error) from None


def _cannot_write(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"cannot write {path}: {error.strerror}; what was saved before is untouched; make room on"
        " its disk, or save to another directory"
    )


def _flush_directory(path: Path) -> None:
    """Make renames in `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_json(body: Json) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
