"""Copies from the host to a device for which the host does not wait, and back, for which it waits
once.

From usual memory such a copy begins when all that was queued on the device before is done, and the
host waits for it. From pinned memory, which PyTorch keeps for the next copy, it is queued.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice

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


def on_host(source: torch.Tensor) -> torch.Tensor:
    """A copy of `source` in the host's memory, which is complete when its device has come to the
    end of what is queued on it.
    """
    if source.is_meta:
        return source  # as arithmetic they are alike
    copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
    return copy.copy_(source, non_blocking=True)


def read_numbers(tensors: Sequence[torch.Tensor]) -> list[float]:
    """The elements of all `tensors`, which are few. The host waits once for all that have the same
    device and type.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(tensors):
        alike.setdefault((tensor.device, tensor.dtype), []).append(place)
    found: dict[int, list[float]] = {}
    for places in alike.values():
        numbers = iter(
            torch.cat([tensors[place].detach().reshape(-1) for place in places]).tolist()
        )
        found |= {place: [*islice(numbers, tensors[place].numel())] for place in places}
    return [*chain.from_iterable(found[place] for place in range(len(tensors)))]
