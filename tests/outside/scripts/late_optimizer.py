"""An optimizer that is made after the first backward pass."""

import torch
import torch.distributed as dist
from common import batches, save
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = torch.nn.Linear(6, 2)
ddp = DistributedDataParallel(model)
optimizer = None
for x in batches(4):
    ddp(x).square().mean().backward()
    optimizer = optimizer or torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    optimizer.step()
    optimizer.zero_grad()
save(model)
