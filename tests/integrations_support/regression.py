"""What Accelerate and transformers train."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

SAMPLES = 96


class Line(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(index)
        x = torch.randn(8, generator=draw)
        return {"x": x, "labels": x.sum(dim=0, keepdim=True)}


class Regression(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.net(x)
        return {"loss": torch.nn.functional.mse_loss(out, labels), "logits": out}
