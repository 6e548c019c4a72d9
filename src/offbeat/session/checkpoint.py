"""Checkpoints without pickle: trees of tensors and plain values as safetensors, a file each, with
the tree's shape as JSON in the file's header.

A file is written under another name, flushed to disk, and renamed as the last act, so it is always
complete, whenever the writer was killed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple, TypeAlias, cast

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


class Stored(NamedTuple):
    """A tree as read back, with the metadata it was saved with."""

    tree: Tree
    metadata: dict[str, Json]


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
    write_durably(path, to_bytes(tensors, header))
    return path


def load(directory: str | Path, name: str) -> Stored:
    """Inverse of `save`.

    Raises:
        CheckpointError: the file is missing, damaged, foreign, or of a newer schema.
    """
    path = Path(directory) / f"{name}.safetensors"
    return parse(path, read_file(path))


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
        case list() | tuple():
            items = [_encode(item, f"{where}[{i}]", tensors) for i, item in enumerate(tree)]
            return items if isinstance(tree, list) else {"tuple": items}
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


def parse(path: Path, content: bytes) -> Stored:
    """What the file `path`, which has this `content`, holds. Raises as `load`."""
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


def read_file(path: Path) -> bytes:
    """All of a file. Raises `CheckpointError`."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path}: {error.strerror}; is this the directory of a checkpoint?"
        ) from None


def write_durably(path: Path, content: bytes) -> None:
    """Write under a temporary name, flush to disk, rename. What cannot be written whole is
    removed, and `CheckpointError` raised.
    """
    try:
        with whole_file(path) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        flush_directory(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from None


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes the place of `path` once all of it has been written, and is removed if that
    fails.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink()


def cannot_write(path: Path, error: OSError) -> CheckpointError:
    """The error of who could not."""
    return CheckpointError(
        f"cannot write {path}: {error.strerror}; what was saved before is untouched; make room on"
        " its disk, or save to another directory"
    )


def flush_directory(path: Path) -> None:
    """Make renames in `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
