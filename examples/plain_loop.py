"""A plain training loop on real digits, on one rank or on many.

    python examples/plain_loop.py                                    # alone
    torchrun --nproc-per-node 4 examples/plain_loop.py               # four ranks on this machine

See torchrun.md beside this file for several machines and for SLURM.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import offbeat


def read_digits() -> tuple[TensorDataset, TensorDataset]:
    """Training and held-out images, of shape (64,) and in [0, 1], with their labels."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(images).float() / 16, torch.from_numpy(labels).long()
    held_out = torch.arange(len(y)) % 5 == 0
    return TensorDataset(x[~held_out], y[~held_out]), TensorDataset(x[held_out], y[held_out])


def main(epochs: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train_set, test_set = read_digits()
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    with offbeat.attach(
        model, optimizer, offbeat.GTopK(density=0.01, collective="reduce_scatter")
    ) as session:
        sampler: DistributedSampler[int] = DistributedSampler(
            train_set, session.world_size, session.rank
        )
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for x, y in DataLoader(train_set, batch_size=32, sampler=sampler):
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

    if session.rank == 0:
        x, y = test_set.tensors
        accuracy = (model(x).argmax(dim=1) == y).float().mean()
        stats = session.stats
        bytes_per_step = stats.bytes_sent / stats.steps
        print(
            f"{session.world_size} ranks, {stats.steps} steps, accuracy {accuracy:.3f},"
            f" {bytes_per_step:,.0f} bytes a step"
        )
        for notice in session.notices:
            print(notice)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=20)
    main(parser.parse_args().epochs)
