"""Replicas are compared by what strategies keep equal."""

from __future__ import annotations

import torch

from offbeat.run.run_summary import digest


def test_replicas_are_compared_by_their_parameters() -> None:
    """Not by BatchNorm's statistics, of which each rank has its own."""
    torch.manual_seed(0)
    first = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    second = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    second.load_state_dict(first.state_dict())
    second(torch.randn(4, 3))
    assert digest(first) == digest(second)
    with torch.no_grad():
        second[0].weight[0, 0] += 1e-6
    assert digest(first) != digest(second)
