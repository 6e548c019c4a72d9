"""Copies between the host and a device. The host does not wait for those to a device, and once for
several from one. And how long a call takes there.

From usual memory a copy begins when all that was queued on the device before is done, and the host
waits for it. From pinned memory, which PyTorch keeps for the next copy, it is queued.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

REPEATS: Final = 5
"""How often what is timed is done."""


def numpy_dtype(dtype: torch.dtype) -> np.dtype[np.floating]:
    """A real type of tensors as that of arrays."""
    return np.dtype(str(dtype).removeprefix("torch."))


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


def fetch(*tensors: torch.Tensor) -> list[NDArray[Any]]:
    """What tensors of one device hold, each of shape (n,), as arrays of the host. Numbers of more
    bytes come before those of fewer, so that each array is aligned.
    """
    if tensors[0].device.type != "cuda":
        return [tensor.cpu().numpy() for tensor in tensors]
    joined = torch.cat([tensor.contiguous().view(torch.uint8) for tensor in tensors])
    # Memory of its own, since the arrays outlive the next copy: pinned memory does not come back
    # before the last of them is dropped.
    here = torch.empty(joined.shape, dtype=torch.uint8, pin_memory=True)
    here.copy_(joined, non_blocking=True)
    torch.cuda.current_stream(joined.device).synchronize()
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    return [
        part.view(tensor.dtype).numpy()
        for part, tensor in zip(here.split(sizes), tensors, strict=True)
    ]


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


def fastest_s(
    like: torch.Tensor,
    call: Callable[[], object],
    clock: Callable[[], float],
    *,
    before: Callable[[], object] = lambda: None,
) -> float:
    """The least seconds by `clock` that `call` takes on the device of `like`, each time after
    `before`: everything else is disturbance.
    """
    durations_s = []
    for _ in range(REPEATS):
        before()
        if like.is_cuda:
            torch.cuda.synchronize(like.device)
        begin_s = clock()
        call()
        if like.is_cuda:
            torch.cuda.synchronize(like.device)
        durations_s.append(clock() - begin_s)
    return max(min(durations_s), 1e-9)
