"""A script with DistributedDataParallel, as users have it, which trains when it is its turn.

Started by `run_overhead.py`, by `offbeat run` and by plain Python: one process a rank.
"""

from __future__ import annotations

import os
import socket
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_overhead import MODELS


def main(place: str, contestant: str, name: str) -> None:
    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(MODELS[name]())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    batch = torch.randn(32, 3, 32, 32)
    with socket.socket(socket.AF_UNIX) as referee, referee.makefile("rw") as lines:
        referee.connect(place)
        print(contestant, dist.get_rank(), os.getppid(), file=lines, flush=True)
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
