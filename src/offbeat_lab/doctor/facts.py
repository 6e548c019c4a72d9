"""What of torch and devices is there, what it means, and how to get what is missing."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch
import torch.distributed as dist

from offbeat.transport.host import usable_cores

State = Literal["ok", "missing"]

_LEAST_TORCH = (2, 10)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that is there or not.

    Attributes:
        name: what.
        state: whether it is there.
        value: what was found, in a few words.
        means: what follows from it.
        remedy: how to get it; empty where it is there, or cannot be got.
    """

    name: str
    state: State
    value: str
    means: str
    remedy: str = ""


def find_all() -> list[Finding]:
    """Everything, in the order in which people ask."""
    return [*_software(), *_machine()]


def _software() -> Iterator[Finding]:
    version = str(torch.__version__)
    recent = tuple(map(int, version.split("+")[0].split(".")[:2])) >= _LEAST_TORCH
    yield _there(
        "torch",
        recent,
        value=f"{version}, {torch.get_num_threads()} threads",
        yes="recent enough",
        no=f"offbeat needs {'.'.join(map(str, _LEAST_TORCH))} or newer",
        remedy="pip install --upgrade torch",
    )
    yield _there(
        "gloo",
        dist.is_available() and dist.is_gloo_available(),
        yes="dense collectives of CPU tensors, and control messages",
        no="offbeat cannot train on several workers",
        remedy="install a build of torch that has it, such as the one on PyPI",
    )
    yield from _accelerators()


def _accelerators() -> Iterator[Finding]:
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    hidden = not devices and Path("/proc/driver/nvidia/version").exists()
    yield _there(
        "CUDA",
        bool(devices),
        value=", ".join(devices),
        yes="models can train on these devices",
        no="a driver is there, but this torch sees no device"
        if hidden
        else "training runs on the CPU",
        remedy="install torch built for CUDA, from pytorch.org" if hidden else "",
    )
    yield _there(
        "NCCL",
        dist.is_available() and dist.is_nccl_available(),
        yes="dense collectives of CUDA tensors",
        no="CUDA tensors would be reduced by gloo, through the host"
        if devices
        else "not needed without CUDA devices",
        remedy="install torch built for CUDA, from pytorch.org" if devices else "",
    )
    yield _there(
        "Triton",
        importlib.util.find_spec("triton") is not None,
        yes="selection on CUDA in one pass",
        no="selection on CUDA takes several passes of torch"
        if devices
        else "not needed without CUDA devices",
        remedy='pip install "offbeat[triton]"' if devices else "",
    )


def _machine() -> Iterator[Finding]:
    cores = usable_cores()
    yield Finding(
        name="cores",
        state="ok",
        value=str(cores),
        means=f"at most {cores} workers compute at once here",
    )
    memory = psutil.virtual_memory()
    yield Finding(
        name="memory",
        state="ok",
        value=f"{memory.available / 2**30:.1f} GiB free of {memory.total / 2**30:.1f}",
        means="a worker takes about 0.3 GiB besides its model",
    )


def _there(name: str, there: bool, *, yes: str, no: str, remedy: str, value: str = "") -> Finding:
    if there:
        return Finding(name=name, state="ok", value=value, means=yes)
    return Finding(name=name, state="missing", value=value, means=no, remedy=remedy)
