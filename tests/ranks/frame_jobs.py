"""What the ranks of `test_run_ranks.py` do."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from pathlib import Path

import torch
import torch.distributed as dist


def add(rank: int, world_size: int, *, offset: int) -> dict[str, int | str]:
    total = torch.tensor([rank + offset])
    dist.all_reduce(total)
    return {
        "total": int(total),
        "rank": rank,
        "threads": torch.get_num_threads(),
        "interface": os.environ["OFFBEAT_INTERFACE"],
    }


def raise_on_one(rank: int, world_size: int, *, victim: int) -> None:
    if rank == victim:
        raise ValueError("no such luck")


def warn(rank: int, world_size: int) -> None:
    warnings.warn("this is getting old", DeprecationWarning, stacklevel=1)


def leave_the_others_waiting(rank: int, world_size: int, *, victim: int) -> None:
    if rank == victim:
        raise ValueError("no such luck")
    wait_forever()


def die_on_one(rank: int, world_size: int, *, victim: int) -> int:
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def hang_on_one(rank: int, world_size: int, *, victim: int) -> None:
    if rank == victim:
        wait_forever()


def stop_on_one(rank: int, world_size: int, *, victim: int) -> None:
    if rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
        wait_forever()


def never_end(rank: int, world_size: int) -> int:
    threading.Thread(target=wait_forever).start()
    return rank


def exit_early(rank: int, world_size: int) -> None:
    os._exit(3)


def return_what_is_no_json(rank: int, world_size: int) -> object:
    return object()


def note_pid_and_leave_the_others_waiting(
    rank: int, world_size: int, *, victim: int, directory: str
) -> None:
    Path(directory, f"pid-{os.getpid()}").touch()
    dist.barrier()
    leave_the_others_waiting(rank, world_size, victim=victim)


def wait_forever() -> None:
    threading.Event().wait()
