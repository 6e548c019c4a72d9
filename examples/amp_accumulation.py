"""Mixed precision with a GradScaler, two micro-batches a step, and gradient clipping.

    python examples/amp_accumulation.py
    torchrun --nproc-per-node 2 examples/amp_accumulation.py

Three things differ from a loop without offbeat: `attach`, the scaler handed to it, and `no_sync`
around all micro-batches but the last. On CUDA replace "cpu" by "cuda" and move model and data
there.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import torch
from torch import nn

import offbeat

MAX_NORM = 10.0
MICRO_BATCHES = 2


def main(steps: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    teacher = torch.randn(32, 1)

    strategy = offbeat.TopK(density=0.1, clip_norm=MAX_NORM)
    with offbeat.attach(model, optimizer, strategy, scaler=scaler) as session:
        draw = torch.Generator().manual_seed(session.rank)  # every rank its own data
        for step in range(steps):
            for micro_batch in range(MICRO_BATCHES):
                last = micro_batch == MICRO_BATCHES - 1
                x = torch.randn(16, 32, generator=draw)
                with nullcontext() if last else session.no_sync():
                    with torch.autocast("cpu", dtype=torch.bfloat16):
                        loss = nn.functional.mse_loss(model(x).float(), x @ teacher) / MICRO_BATCHES
                    scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            session.clip_grad_norm_(MAX_NORM)  # TopK has clipped before it selected
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if session.rank == 0 and step % 20 == 0:
                print(
                    f"step {step}: loss {MICRO_BATCHES * loss.item():.4f}, exchanges"
                    f" {session.stats.exchanges}"
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    main(parser.parse_args().steps)
