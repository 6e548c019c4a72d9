"""PSWA: training that restarts from the mean of its weights, again and again (Guo et al., arXiv
2201.00519), with `torch.optim.swa_utils`.

    python examples/pswa.py                                    # alone
    torchrun --nproc-per-node 4 examples/pswa.py               # four ranks on this machine

With a strategy that exchanges gradients all ranks hold the same weights, so each takes the mean of
its own and they stay alike: no strategy is needed for it.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import offbeat


def read_digits() -> tuple[TensorDataset, TensorDataset]:
    """Training and held-out images, of shape (64,) and in [0, 1], with their labels."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(images).float() / 16, torch.from_numpy(labels).long()
    held_out = torch.arange(len(y)) % 5 == 0
    return TensorDataset(x[~held_out], y[~held_out]), TensorDataset(x[held_out], y[held_out])


@torch.no_grad()
def go_on_from(model: nn.Module, mean: AveragedModel) -> None:
    """Let `model` hold the mean."""
    for parameter, averaged in zip(model.parameters(), mean.module.parameters(), strict=True):
        parameter.copy_(averaged)


def main(epochs: int, first: int, restart: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train_set, test_set = read_digits()
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)

    with offbeat.attach(model, optimizer, offbeat.TopK(density=0.05)) as session:
        sampler: DistributedSampler[int] = DistributedSampler(
            train_set, session.world_size, session.rank
        )
        mean = AveragedModel(model)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for x, y in DataLoader(train_set, batch_size=32, sampler=sampler):
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            if epoch >= first:
                mean.update_parameters(model)
                if (epoch + 1 - first) % restart == 0 or epoch == epochs - 1:
                    go_on_from(model, mean)
                    mean = AveragedModel(model)

    if session.rank == 0:
        x, y = test_set.tensors
        accuracy = (model(x).argmax(dim=1) == y).float().mean()
        print(f"{session.stats.steps} steps, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--first", type=int, default=4, help="the first epoch of a mean")
    parser.add_argument("--restart", type=int, default=4, help="epochs of a mean")
    arguments = parser.parse_args()
    main(arguments.epochs, arguments.first, arguments.restart)
