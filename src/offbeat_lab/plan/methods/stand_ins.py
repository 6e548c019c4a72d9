"""What stands for tensors of a model where only sizes count."""

from __future__ import annotations

from typing import Final

import torch

from offbeat.transport.operations import AllReduceTensor, Collective
from offbeat_lab.plan.simulation import Run

MINIATURE: Final = 1024
"""Elements of a model that stands for the real one where protocols compute with their messages."""


def all_reduce(run: Run, rank: int, num_bytes: int) -> Collective[None]:
    """As `collectives.dense` does it, of a tensor without content."""
    operation = AllReduceTensor(torch.empty(num_bytes, dtype=torch.uint8, device="meta"))
    yield from run.dense(rank, operation)
