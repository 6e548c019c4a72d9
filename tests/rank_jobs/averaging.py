"""A model with running statistics and steps with it, for strategies that average weights."""

from __future__ import annotations

import torch

from rank_jobs.regression import data


def make_net(seed: int = 1) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.Tanh(),
        torch.nn.Linear(16, 5),
        torch.nn.Linear(5, 3),
    )


def sgd(net: torch.nn.Module, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=momentum)


def backward(net: torch.nn.Module, rank: int, step: int) -> None:
    x, y = data(rank, step)
    torch.nn.functional.mse_loss(net(x), y).backward()


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        backward(net, rank, step)
        optimizer.step()
        optimizer.zero_grad()
