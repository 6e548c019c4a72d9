"""`ddp.forward(x)` in the place of `ddp(x)`."""

import torch
import torch.distributed as dist
from common import batches, save
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = torch.nn.Linear(6, 2)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
for x in batches(4):
    ddp.forward(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
save(model)
