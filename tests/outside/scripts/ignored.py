"""Parameters and buffers that DistributedDataParallel was told to leave alone."""

import os

import torch
import torch.distributed as dist
from common import batches, save
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
with torch.no_grad():
    model[0].bias.fill_(1.0 + int(os.environ["RANK"]))
ignored = ["0.bias", "1.running_mean"]
DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
for x in batches(4):
    ddp(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
save(model)
