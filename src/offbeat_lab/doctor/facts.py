"""What of torch, devices, privileges and kernel features is there, what it means, and how to get
what is missing.

What the kernel can do is tried where it disturbs no one: a network namespace, queues on its
loopback, an empty cgroup. All of it is taken away again.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import psutil
import torch
import torch.distributed as dist

State = Literal["ok", "missing", "unknown"]
Purpose = Literal["training", "emulation"]

_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21  # linux/capability.h
_LEAST_TORCH = (2, 10)
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that is there or not.

    Attributes:
        name: what.
        purpose: what it is needed for: training, or only emulating a cluster on this machine.
        state: "unknown" where it could not be tried.
        value: what was found, in a few words.
        means: what follows from it.
        remedy: how to get it; empty where it is there, or cannot be got.
    """

    name: str
    purpose: Purpose
    state: State
    value: str
    means: str
    remedy: str = ""


def find_all() -> list[Finding]:
    """Everything, in the order in which people ask. Tries the kernel in a network namespace that is
    removed afterwards.
    """
    return [*_software(), *_machine(), *_emulation()]


def capabilities(process_status: str) -> frozenset[int]:
    """The numbers of the effective capabilities in the text of /proc/PID/status; none where the
    system has no such file.
    """
    mask = next(
        (
            int(line.split()[1], 16)
            for line in process_status.splitlines()
            if line.startswith("CapEff:")
        ),
        0,
    )
    return frozenset(bit for bit in range(mask.bit_length()) if mask >> bit & 1)


def _software() -> Iterator[Finding]:
    version = str(torch.__version__)
    recent = tuple(map(int, version.split("+")[0].split(".")[:2])) >= _LEAST_TORCH
    yield Finding(
        name="torch",
        purpose="training",
        state="ok" if recent else "missing",
        value=f"{version}, {torch.get_num_threads()} threads",
        means="recent enough"
        if recent
        else f"offbeat needs {'.'.join(map(str, _LEAST_TORCH))} or newer",
        remedy="" if recent else "pip install --upgrade torch",
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
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    yield Finding(
        name="cores",
        purpose="training",
        state="ok",
        value=str(cores),
        means=f"at most {cores} workers compute at once here",
    )
    memory = psutil.virtual_memory()
    yield Finding(
        name="memory",
        purpose="training",
        state="ok",
        value=f"{memory.available / 2**30:.1f} GiB free of {memory.total / 2**30:.1f}",
        means="a worker takes about 0.3 GiB besides its model",
    )


def _emulation() -> Iterator[Finding]:
    held = capabilities(_read(Path("/proc/self/status")))
    privileged = {_CAP_NET_ADMIN, _CAP_SYS_ADMIN} <= held
    yield _there(
        "privileges",
        privileged,
        value="CAP_NET_ADMIN and CAP_SYS_ADMIN",
        purpose="emulation",
        yes="workers can be put into network namespaces",
        no="slow links are emulated by delays inside the workers, not by the kernel",
        remedy="start as root, or with CAP_NET_ADMIN and CAP_SYS_ADMIN",
    )
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    yield _there(
        "ip, tc",
        not tools,
        purpose="emulation",
        yes="namespaces and queues can be set up",
        no=f"{' and '.join(tools)} not found: no emulation by the kernel",
        remedy="apt install iproute2",
    )
    yield from _kernel_features(may_try=privileged and not tools)
    yield from _cgroups()


_FEATURES = {
    "namespaces": ("each worker gets an address of its own", "no emulation by the kernel", ""),
    "tbf": (
        "links with a limited rate",
        "rates are emulated inside the workers",
        "modprobe sch_tbf",
    ),
    "fq": ("even pacing of many connections", "not needed where tbf is", ""),
    "netem": (
        "latency and loss by the kernel",
        "latency is emulated outside the kernel",
        "modprobe sch_netem, if this kernel was built with it",
    ),
}


def _kernel_features(*, may_try: bool) -> Iterator[Finding]:
    failures = try_kernel() if may_try else {}
    for name, (yes, no, remedy) in _FEATURES.items():
        if name not in failures:
            yield Finding(
                name=name,
                purpose="emulation",
                state="unknown",
                value="",
                means="could not be tried",
            )
            continue
        failure = failures[name]
        yield Finding(
            name=name,
            purpose="emulation",
            state="ok" if failure is None else "missing",
            value=failure or "",
            means=yes if failure is None else no,
            remedy="" if failure is None else remedy,
        )


def _cgroups() -> Iterator[Finding]:
    """Version 1 has a directory for each controller; in version 2 the root lists them."""
    unified = _CGROUPS if (_CGROUPS / "cgroup.controllers").exists() else _CGROUPS / "unified"
    failures: dict[str, str | None] = {}
    if (_CGROUPS / "cpu" / "cpu.cfs_quota_us").exists() or (_CGROUPS / "cpu" / "tasks").exists():
        failures["v1"] = try_writing(_CGROUPS / "cpu")
    if "cpu" in _read(unified / "cgroup.controllers").split():
        failures["v2"] = try_writing(unified)
    usable = [version for version, failure in failures.items() if failure is None]
    refusals = "; ".join(f"{version}: {failure}" for version, failure in failures.items())
    yield _there(
        "CPU quotas",
        bool(usable),
        value=f"cgroup {' and '.join(usable)}" if usable else refusals,
        purpose="emulation",
        yes="slow workers get a smaller share of a core",
        no="slow workers are emulated by sleeping after their work",
        remedy="start as root, where cgroups are mounted writable"
        if failures
        else "mount a cgroup with the cpu controller",
    )


def _there(
    name: str,
    there: bool,
    *,
    yes: str,
    no: str,
    remedy: str,
    value: str = "",
    purpose: Purpose = "training",
) -> Finding:
    if there:
        return Finding(name=name, purpose=purpose, state="ok", value=value, means=yes)
    return Finding(
        name=name,
        purpose=purpose,
        state="missing",
        value="" if name == "privileges" else value,
        means=no,
        remedy=remedy,
    )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


_TIMEOUT_S = 10.0
_QDISCS: Final[Mapping[str, tuple[str, ...]]] = {
    "tbf": ("rate", "1gbit", "burst", "128kb", "limit", "512kb"),
    "fq": (),
    "netem": ("delay", "1ms"),
}


def try_kernel() -> dict[str, str | None]:
    """What stands in the way of network namespaces and of each queueing discipline; None where it
    works.

    Needs the privileges, `ip` and `tc`. Without namespaces nothing else is tried.
    """
    name = scratch_name()
    failure = _run("ip", "netns", "add", name)
    if failure is not None:
        return {"namespaces": failure}
    try:
        return {"namespaces": None} | {
            qdisc: _run("tc", "-n", name, "qdisc", "replace", "dev", "lo", "root", qdisc, *options)
            for qdisc, options in _QDISCS.items()
        }
    finally:
        _run("ip", "netns", "delete", name)


def try_writing(directory: Path) -> str | None:
    """What stands in the way of making a cgroup in `directory`; None when it can be done."""
    path = directory / scratch_name()
    try:
        path.mkdir()
        path.rmdir()
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return None


def scratch_name() -> str:
    """What this process calls what it makes to try and takes away again."""
    return f"offbeat-doctor-{os.getpid()}"


def _run(*command: str) -> str | None:
    """The last line that the command complains with; None when it succeeds."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    complaint = next(
        reversed(done.stderr.strip().splitlines()),
        f"{command[0]} exited with status {done.returncode}",
    )
    return complaint.removeprefix("Error: ").rstrip(".")
