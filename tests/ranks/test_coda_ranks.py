"""The example of CoDA on several ranks: what its loss has of its own is averaged, too."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

import offbeat
from ranks_support.launch import RunRanks

pytestmark = pytest.mark.ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "coda.py"


def maximise(rank: int, world_size: int) -> list[float]:
    """The area on held-out digits, a, b and alpha."""
    example = runpy.run_path(str(EXAMPLE))
    torch.manual_seed(rank)
    train_set, test_set = example["read_ones"]()
    scores = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
    model = example["AUCLoss"](scores, share=0.1)
    strategy = offbeat.LocalSGD(period=8, warmup=0, optimizer_state="local")
    example["train"](model, strategy, train_set, 12)
    x, y = test_set.tensors
    with torch.no_grad():
        area = example["area"](scores(x).flatten(), y)
        return [area, float(model.a), float(model.b), float(model.alpha)]


def test_all_ranks_end_with_one_loss_and_a_large_area(run_ranks: RunRanks) -> None:
    results = run_ranks(maximise, 3)
    area, a, b, alpha = results[0]
    assert results == [results[0]] * 3
    assert area > 0.9
    assert a > b  # positive samples score higher
    assert alpha > 0
