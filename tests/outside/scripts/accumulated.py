"""A synchronised backward pass, one inside `no_sync`, and a synchronised one, in the same step."""

import torch
import torch.distributed as dist
from common import batches, save
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = torch.nn.Linear(6, 2)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
seen = []
for number, x in enumerate(batches(9)):
    ddp.require_backward_grad_sync = number % 3 != 1
    ddp(x).square().mean().backward()
    seen.append(model.weight.grad.tolist())
    if number % 3 == 2:
        optimizer.step()
        optimizer.zero_grad()
save(model, gradients=seen)
