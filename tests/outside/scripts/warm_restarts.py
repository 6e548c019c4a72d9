"""Learning rates that fall almost to nothing and jump up again."""

import torch
import torch.distributed as dist
from common import batches, save
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = torch.nn.Linear(6, 2)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=4, eta_min=1e-6)
for x in batches(10):
    ddp(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
save(model)
