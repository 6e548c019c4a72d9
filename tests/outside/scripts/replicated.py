"""`replicate`, which makes a DistributedDataParallel of a list of parameters."""

import torch
import torch.distributed as dist
from common import batches, save
from torch.distributed._composable import replicate

dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.Linear(3, 2))
replicate(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for x in batches(4):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
save(model)
