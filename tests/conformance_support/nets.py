"""What every strategy's conformance tests train: a small model with everything odd in it, and a
plain loop.
"""

from __future__ import annotations

import torch


class Net(torch.nn.Module):
    """A frozen, an empty, a scalar, an unaligned and a shared parameter, a buffer, an unusual
    layout, and a branch.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.conv = torch.nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = torch.nn.BatchNorm2d(4)
        self.shared = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 2)
        self.branch = torch.nn.Linear(4, 2)
        self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        self.empty = torch.nn.Parameter(torch.empty(0, 3))
        self.scale = torch.nn.Parameter(torch.tensor(1.0))
        self.unaligned = torch.nn.Parameter(torch.ones(5)[1:3])
        self.use_branch = False
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw))
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.conv(x)).mean(dim=(2, 3))
        hidden = torch.tanh(self.shared(torch.tanh(self.shared(hidden))))
        head = self.branch if self.use_branch else self.head
        return self.scale * head(hidden) * self.frozen * self.unaligned + self.empty.sum()


def batch(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn((5, 3, 4, 4), generator=torch.Generator().manual_seed(step)).to(dtype)


def loss_of(net: torch.nn.Module, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return net(batch(step, dtype)).square().mean()


def train(
    net: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    *,
    set_to_none: bool = True,
) -> None:
    for step in steps:
        loss_of(net, step).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)


def assert_same(left: torch.nn.Module, right: torch.nn.Module, **tolerance: float) -> None:
    for (name, a), (_, b) in zip(left.named_parameters(), right.named_parameters(), strict=True):
        torch.testing.assert_close(
            a,
            b,
            msg=lambda text, name=name: f"{name}: {text}",
            **(tolerance or {"rtol": 0, "atol": 0}),
        )
