"""Copies from the host to a device for which the host does not wait.

From usual memory such a copy begins when all that was queued on the device before is done, and the
host waits for it. From pinned memory, which PyTorch keeps for the next copy, it is queued.
"""

from __future__ import annotations

import torch


def put(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy `source`, a tensor of the CPU, into `target`, of the same shape and on any device."""
    if target.is_cuda:
        source = source.to(target.dtype).pin_memory()
    target.copy_(source, non_blocking=True)


def on_device(source: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`source`, a tensor of the CPU, on `device`."""
    if device.type != "cuda":
        return source.to(device)
    return source.pin_memory().to(device, non_blocking=True)
