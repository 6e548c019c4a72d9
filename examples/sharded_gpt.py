"""A small GPT on text, sharded inside each node by `fully_shard` (FSDP2).

    python examples/sharded_gpt.py                                              # alone
    offbeat run --strategy localsgd --workers 4 examples/sharded_gpt.py --shards 2
    torchrun --nproc-per-node 4 examples/sharded_gpt.py --shards 2 --hsdp       # PyTorch's own

The script knows nothing of offbeat. With `--hsdp` FSDP exchanges between nodes itself, in each
step, unless `offbeat run` starts the script; without, nobody does unless `offbeat run` does.
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

CONTEXT, WIDTH, HEADS, BLOCKS, BATCH = 32, 64, 4, 2, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.mixed(self.before(x)).view(batch, length, 3, HEADS, width // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(F.gelu(self.wide(self.between(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_text() -> tuple[torch.Tensor, torch.Tensor, int]:
    """Python's help on its topics, as numbers of characters: to train with, and held out."""
    text = "".join(pydoc_data.topics.topics.values())[:400_000]
    number_of = {character: number for number, character in enumerate(sorted(set(text)))}
    numbers = torch.tensor([number_of[character] for character in text])
    return numbers[:-20_000], numbers[-20_000:], len(number_of)


def batch_of(text: torch.Tensor, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=draw)
    pieces = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()])
    return pieces[:, :-1], pieces[:, 1:]


def main(shards: int, steps: int, hsdp: bool) -> float:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    is_mine = not dist.is_initialized()
    if is_mine:
        alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0}
        dist.init_process_group("gloo", world_size=1 if alone else -1, **alone)
    rank, islands = dist.get_rank(), dist.get_world_size() // shards
    mesh = init_device_mesh("cpu", (islands, shards), mesh_dim_names=("replicate", "shard"))
    train_text, held_out, vocabulary = read_text()
    model = GPT(vocabulary)
    inside = mesh if hsdp else mesh["shard"]
    for block in model.blocks:
        fully_shard(block, mesh=inside)
    fully_shard(model, mesh=inside)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draw = torch.Generator().manual_seed(1 + rank)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20) * (1 - step / steps)
        loss = model(*batch_of(train_text, draw))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        draw = torch.Generator().manual_seed(0)  # all ranks evaluate the same
        losses = [float(model(*batch_of(held_out, draw))) for _ in range(20)]
    mean = sum(losses) / len(losses)
    if rank == 0:
        print(f"{islands} islands of {shards}, {steps} steps, held-out loss {mean:.4f}")
    if is_mine:
        dist.destroy_process_group()
    return mean


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--shards", type=int, default=1, help="ranks that share a model")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--hsdp", action="store_true", help="let FSDP exchange between nodes")
    arguments = parser.parse_args()
    main(arguments.shards, arguments.steps, arguments.hsdp)
