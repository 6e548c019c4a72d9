"""Samples, a model and what became of each mega-batch, for strategies that share samples."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

from offbeat.megabatch.loader import DispatchLoader
from offbeat.transport.driver import Driver, Ticket, Wrapper
from offbeat.transport.operations import Operation, Send
from rank_jobs.regression import fingerprint

NUM_SAMPLES = 103


class Numbers(torch.utils.data.Dataset):
    """Sample i is a vector drawn from i, a target, and i itself."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self.x = torch.randn(num_samples, 6, generator=torch.Generator().manual_seed(1))
        self.y = self.x.sum(dim=1, keepdim=True).sin()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.x[index], self.y[index], index


def make_net(seed: int = 1) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def sgd(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def step(net: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> list[int]:
    """One step; the samples that it was taken with."""
    x, y, indices = batch
    torch.nn.functional.mse_loss(net(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    return indices.tolist()


class Dying(Wrapper):
    """Ends this process at the n-th message that it is to send, of those while `is_armed`."""

    is_armed = True

    def __init__(self, inner: Driver, at_message: int) -> None:
        super().__init__(inner)
        self._left = at_message

    def start(self, operation: Operation, channel: int) -> Ticket:
        if isinstance(operation, Send) and Dying.is_armed:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.inner.start(operation, channel)


def merges_of(loader: DispatchLoader, net: torch.nn.Module) -> dict[str, Any]:
    """What became of the mega-batch merged last."""
    works = [
        [work.rank, [list(span) for claim in work.claims for span in claim.spans]]
        for work in loader.last
    ]
    return {"print": fingerprint(net), "works": works, "place": [loader.epoch, loader.mega_batch]}


def samples(merges: list[dict[str, Any]]) -> list[int]:
    """Positions in the epoch's order that were merged, whoever computed them."""
    spans = [span for merge in merges for _, spans in merge["works"] for span in spans]
    return sorted(position for begin, end in spans for position in range(begin, end))
