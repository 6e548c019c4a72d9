"""A model that DistributedDataParallel is told not to copy from rank 0, and one whose buffers it is
told not to.
"""

import os

import torch
import torch.distributed as dist
from common import batches, save
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
models = torch.nn.ModuleList(
    torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.BatchNorm1d(3)) for _ in range(2)
)
for model, options in zip(
    models, ({"init_sync": False}, {"broadcast_buffers": False}), strict=True
):
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
        model[1].running_mean.fill_(1.0 + int(os.environ["RANK"]))
    ddp = DistributedDataParallel(model, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    if "init_sync" in options:
        ddp.broadcast_buffers = False
    for x in batches(4):
        ddp(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
save(models)
