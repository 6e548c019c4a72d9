"""A script with DistributedDataParallel, as users have it, which trains when it is its turn.

Started by `run_overhead.py`, by `offbeat run` and by plain Python: one process a rank.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def make_cnn() -> torch.nn.Module:
    """About 0.3 M parameters, computation-bound."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(32, 64, 3, stride=2, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(64, 128, 3, stride=2, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(128, 128, 3, stride=2, padding=1),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(128, 10),
    )


def make_mlp() -> torch.nn.Module:
    """About 9.5 M parameters in large layers, communication-bound."""
    torch.manual_seed(0)
    widths = [1024, 2048, 2048, 1536, 10]
    layers: list[torch.nn.Module] = [
        torch.nn.Flatten(),
        torch.nn.Linear(3 * 32 * 32, 256),
        torch.nn.Linear(256, widths[0]),
    ]
    for width, following in pairwise(widths):
        layers += [torch.nn.ReLU(), torch.nn.Linear(width, following)]
    return torch.nn.Sequential(*layers)


MODELS = {"cnn": make_cnn, "mlp": make_mlp}


def main(place: str, strategy: str, name: str) -> None:
    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(MODELS[name]())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    batch = torch.randn(32, 3, 32, 32)
    with socket.socket(socket.AF_UNIX) as referee, referee.makefile("rw") as lines:
        referee.connect(place)
        print(strategy, dist.get_rank(), os.getppid(), file=lines, flush=True)
        for line in lines:
            begin_s = time.perf_counter()
            for _ in range(int(line)):
                ddp(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            print(time.perf_counter() - begin_s, file=lines, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
