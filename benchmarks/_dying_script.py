"""A script with DistributedDataParallel of which one rank kills itself at a step. Started by
`run_deaths.py`.

A step lasts as long as an accelerator's would, by sleeping, so that a process that starts beside
the others on a few cores does not slow them down, as it would not on a host of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main(dying_rank: int, dies_after: int, steps: int, step_s: float) -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    dies = dist.get_rank() == dying_rank and "OFFBEAT_RETURN" not in os.environ
    for step in range(steps):
        if dies and step == dies_after:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(32, 64)
        loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(dim=1))
        time.sleep(step_s)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
