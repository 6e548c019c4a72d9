"""What the scripts beside this file have in common: data of each rank, and the result on disk."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

torch.manual_seed(int(os.environ["RANK"]))  # so that only DDP makes models equal


def batches(count: int) -> Iterator[torch.Tensor]:
    """Batches of this rank's own."""
    draw = torch.Generator().manual_seed(int(os.environ["RANK"]))
    for _ in range(count):
        yield torch.randn(4, 6, generator=draw)


def save(model: torch.nn.Module, **others: object) -> None:
    """Write all that `model` holds, and `others`, for the test to compare, on all ranks."""
    found = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    place = Path(sys.argv[1]) / f"{os.environ['RANK']}.json"
    place.write_text(json.dumps(found | others))
    dist.barrier()
