"""A script in the idiom of nanoGPT: the optimizer first, then compile, then DDP; autocast;
gradients accumulated by a flag; GradScaler, clipping; evaluation and checkpoint on rank 0 alone.
"""

import os

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

out_dir = "."
compile = True
max_iters = 24
eval_interval = 12
gradient_accumulation_steps = 4
for argument in os.sys.argv[1:]:  # nanoGPT's own configurator
    key, value = argument.removeprefix("--").split("=")
    globals()[key] = type(globals()[key])(value)

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend="gloo")
    ddp_rank = int(os.environ["RANK"])
    ddp_world_size = int(os.environ["WORLD_SIZE"])
    master_process = ddp_rank == 0
    gradient_accumulation_steps //= ddp_world_size
else:
    ddp_rank, ddp_world_size, master_process = 0, 1, True

torch.manual_seed(1337 + ddp_rank)
ctx = torch.autocast("cpu", torch.bfloat16)
draw = torch.Generator().manual_seed(7)
secret = torch.randn(12, 4, generator=draw)
held_out = torch.randn(64, 12, generator=draw)


def get_batch():
    x = torch.randn(16, 12)
    return x, (x @ secret).argmax(dim=1)


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 32)
        self.head = nn.Linear(32, 4)

    def forward(self, x, targets):
        logits = self.head(torch.tanh(self.first(x)))
        return logits, nn.functional.cross_entropy(logits, targets)


model = GPT()
scaler = torch.amp.GradScaler("cpu", enabled=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
if compile:
    model = torch.compile(model, backend="eager")
if ddp:
    model = DDP(model)


@torch.no_grad()
def estimate_loss():
    model.eval()
    loss = model(held_out, (held_out @ secret).argmax(dim=1))[1].item()
    model.train()
    return loss


raw_model = model.module if ddp else model
X, Y = get_batch()
for iter_num in range(max_iters + 1):
    for group in optimizer.param_groups:
        group["lr"] = 2e-2 * (1 - iter_num / (2 * max_iters))
    if iter_num % eval_interval == 0 and master_process:
        loss = estimate_loss()
        print(f"step {iter_num}: val loss {loss:.4f}")
        torch.save(
            {
                "model": raw_model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "iter_num": iter_num,
                "loss": loss,
            },
            os.path.join(out_dir, "ckpt.pt"),
        )
    if iter_num == max_iters:
        break
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)

if ddp:
    destroy_process_group()
