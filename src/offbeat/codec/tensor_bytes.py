"""Tensors by name as bytes, in the format of safetensors: what is written to disk, and what a
worker that joins is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import safetensors
import safetensors.torch
import torch

from offbeat.errors import WireError

_PAIRS: Final = "pairs/"


def to_bytes(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> bytes:
    """`tensors`, each with its own memory, and `metadata` in the header. Read by safetensors.

    The format refuses tensors that share memory, as tied weights and views of a flat buffer do. So
    each one is copied, and what is tied is there under each of its names.
    """
    copies = {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    return safetensors.torch.save(copies, None if metadata is None else dict(metadata))


def packed(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """`tensors` as workers send them: the format has no complex128, so that complex numbers travel
    as pairs.
    """
    pairs = {
        _PAIRS + name: torch.view_as_real(each)
        for name, each in tensors.items()
        if each.is_complex()
    }
    return to_bytes({k: each for k, each in tensors.items() if not each.is_complex()} | pairs)


def unpacked(content: bytes | bytearray | memoryview, what: str) -> dict[str, torch.Tensor]:
    """Inverse of `packed`. Raises `WireError`, which says that `what` is damaged."""
    try:
        return {
            name.removeprefix(_PAIRS): (
                torch.view_as_complex(each) if name.startswith(_PAIRS) else each
            )
            for name, each in safetensors.torch.load(bytes(content)).items()
        }
    except (safetensors.SafetensorError, RuntimeError) as error:
        raise WireError(f"{what} is damaged: {error}") from error
