"""How long something takes on a device, when nothing else has it."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any, Final

import torch

_REPEATS: Final = 5

_CACHE_ELEMENTS: Final = 1 << 22
"""As much float32 as a core's caches hold, and more."""


def usual_s(call: Callable[[], Any], device: torch.device) -> float:
    """The median of a few calls, in seconds. On a CPU it is the time of the processor, which other
    processes hardly lengthen. Between two calls other memory is written to, since a step finds
    little of what it needs in the caches.
    """
    on_gpu = device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.thread_time
    elsewhere = torch.empty(_CACHE_ELEMENTS, device=device)
    durations_s = []
    for _ in range(_REPEATS):
        elsewhere.zero_()
        if on_gpu:
            torch.cuda.synchronize(device)
        begun_s = clock()
        call()
        if on_gpu:
            torch.cuda.synchronize(device)
        durations_s.append(clock() - begun_s)
    return median(durations_s)
