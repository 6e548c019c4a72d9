"""Tensors by name as bytes, in the format of safetensors: what is written to disk, and what a
worker that joins is sent.
"""

from __future__ import annotations

from collections.abc import Mapping

import safetensors.torch
import torch


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
