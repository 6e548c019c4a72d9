"""A model that is trained in part, then as a whole, and wrapped anew for that."""

import torch
import torch.distributed as dist
from common import batches, save
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.Linear(3, 2))
for frozen in (True, False, True):
    model[0].requires_grad_(not frozen)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for x in batches(3):
        ddp(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
save(model)
