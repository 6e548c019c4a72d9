"""Reads arrays from an npz file, which is a zip archive: a small one may unpack to any size, and an
array in it may say that it has any number of elements.
"""

from __future__ import annotations

import lzma
import math
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import MALFORMED, ConfigError, OffbeatError

MAX_RATIO: Final = 100
"""How many times larger than the file its arrays may be together, beyond `ALWAYS_ALLOWED_BYTES`."""

ALWAYS_ALLOWED_BYTES: Final = 1 << 26

_HEADERS: Final = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_DAMAGED: Final = (
    *MALFORMED,
    EOFError,
    OSError,
    RuntimeError,
    NotImplementedError,
    SyntaxError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)


def check_arrays(path: Path, names: Sequence[str]) -> None:
    """Raise `ConfigError` unless the file at `path` has arrays of these names, and all of them
    together have a size that is plausible for it.
    """
    with _opened(path) as archive:
        _check(path, archive, names)


def read_arrays(path: Path, names: Sequence[str]) -> list[NDArray[Any]]:
    """The arrays of these names. Raises `ConfigError` as `check_arrays`, or when one of them cannot
    be read.
    """
    with _opened(path) as archive:
        _check(path, archive, names)
        return [_read(path, archive, name) for name in names]


def _check(path: Path, archive: zipfile.ZipFile, names: Sequence[str]) -> None:
    members = {member.filename: member for member in archive.infolist()}
    if missing := [name for name in names if f"{name}.npy" not in members]:
        raise ConfigError(f"{path} has no {', '.join(missing)}; it must hold {', '.join(names)}")
    num_bytes = sum(members[f"{name}.npy"].file_size for name in names)
    allowed = max(ALWAYS_ALLOWED_BYTES, MAX_RATIO * path.stat().st_size)
    if num_bytes > allowed:
        raise ConfigError(
            f"the arrays of {path} unpack to {num_bytes:,} bytes, allowed are {allowed:,}, which is"
            f" {MAX_RATIO} times the file; was it made to fill memory? If not, save it with"
            " numpy.savez, which does not compress"
        )


def _read(path: Path, archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    member = f"{name}.npy"
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version not in _HEADERS:
            raise ConfigError(f"{name} in {path} has version {version} of numpy's format")
        shape, _, dtype = _HEADERS[version](file)
        # numpy makes room for the array before it reads it.
        if math.prod(shape) * dtype.itemsize > archive.getinfo(member).file_size:
            raise ConfigError(
                f"{name} in {path} is to have shape {shape} and dtype {dtype}, but there are fewer"
                " bytes; it is damaged"
            )
    with archive.open(member) as file:
        array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    return array


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    if not path.is_file():
        raise ConfigError(f"no data at {path}; give the path of an npz file with --set path=...")
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except OffbeatError:
        raise
    except _DAMAGED as error:
        raise ConfigError(
            f"{path} is not an npz file, or is damaged ({error}); save one with numpy.savez"
        ) from None
