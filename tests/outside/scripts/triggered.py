"""Several forward passes inside `no_sync`, and then several backward passes, of which the last one
is told to synchronise as Accelerate's `trigger_sync_in_backward` does it.
"""

import torch
import torch.distributed as dist
from common import batches, save
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = torch.nn.Linear(6, 2)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
seen = []
for _ in range(3):
    with ddp.no_sync():
        losses = [ddp(x).square().mean() for x in batches(3)]
    for loss in losses:
        ddp.require_backward_grad_sync = loss is losses[-1]
        if ddp.require_backward_grad_sync:
            ddp.reducer.prepare_for_backward([])
        loss.backward()
    seen.append(model.weight.grad.tolist())
    optimizer.step()
    optimizer.zero_grad()
save(model, gradients=seen)
