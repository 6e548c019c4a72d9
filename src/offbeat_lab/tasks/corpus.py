"""Text to train on: a file or a directory, by default the source of Python's own standard library.

One block of 16 KiB in twenty is held out, so that both parts come from all over the text.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

_BLOCK_BYTES = 16_384
_HELD_OUT_EVERY = 20

_Token = TypeVar("_Token", bound=np.unsignedinteger[Any])


def held_out_blocks(num_bytes: int) -> NDArray[np.bool_]:
    """Which bytes of a text are held out, shape (num_bytes,)."""
    held_out: NDArray[np.bool_] = (
        np.arange(num_bytes) // _BLOCK_BYTES % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1
    )
    # A text of fewer than twenty blocks has no held-out one: keep its last twentieth.
    if not held_out.any():
        held_out = np.arange(num_bytes) >= num_bytes * (1 - 1 / _HELD_OUT_EVERY)
    return held_out


def cut(tokens: NDArray[_Token], length: int) -> NDArray[_Token]:
    """Consecutive windows, shape (windows, length); what is left at the end is dropped."""
    num_windows = len(tokens) // length
    return tokens[: num_windows * length].reshape(num_windows, length)


def read_text(path: Path | None, max_bytes: int) -> bytes:
    """The first `max_bytes` of the text at `path`: a file, or a directory's files in order of name.
    None stands for the source of Python's standard library.
    """
    parts: list[bytes] = []
    num_bytes = 0
    for file in _files(path):
        with file.open("rb") as opened:
            parts.append(opened.read(max_bytes - num_bytes))
        num_bytes += len(parts[-1])
        if num_bytes >= max_bytes:
            break
    return b"".join(parts)


def _files(path: Path | None) -> Iterator[Path]:
    if path is not None:
        yield from (
            [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        )
        return
    library = Path(sysconfig.get_path("stdlib"))
    yield from sorted(library.glob("*.py"))
    yield from sorted(
        file for file in library.glob("[a-z]*/*.py") if not file.parent.name.endswith("-packages")
    )
