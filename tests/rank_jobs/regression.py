"""A small model, its data, and steps with it: what jobs of ranks train."""

from __future__ import annotations

import torch


def make_net(seed: int = 1) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 32),
        torch.nn.Tanh(),
        torch.nn.Linear(32, 16),
        torch.nn.Tanh(),
        torch.nn.Linear(16, 3),
    )


def data(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn((4, 6), generator=generator), torch.randn((4, 3), generator=generator)


def loss_of(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    x, y = data(rank, step)
    return torch.nn.functional.mse_loss(model(x), y)


def fingerprint(model: torch.nn.Module) -> str:
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters()).hex()


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range
) -> None:
    for step in steps:
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def flat(tensors: list[torch.Tensor | None]) -> torch.Tensor:
    return torch.cat([torch.zeros(0) if t is None else t.reshape(-1) for t in tensors]).double()
