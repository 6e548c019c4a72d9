"""A script with DistributedDataParallel, as many people have one. Only the line that logs the
accuracy is offbeat's, and does nothing outside of it.

    torchrun --nproc-per-node 4 examples/digits_ddp.py                # plain DDP
    offbeat run --strategy gtopk:density=0.01 examples/digits_ddp.py  # the same with gTop-k
    offbeat compare --strategies ddp,wagma --link 100mbit -- examples/digits_ddp.py
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

import offbeat


def read_digits() -> tuple[TensorDataset, TensorDataset]:
    """Training and held-out images, of shape (64,) and in [0, 1], with their labels."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(images).float() / 16, torch.from_numpy(labels).long()
    held_out = torch.arange(len(y)) % 5 == 0
    return TensorDataset(x[~held_out], y[~held_out]), TensorDataset(x[held_out], y[held_out])


def main(epochs: int, width: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    is_distributed = "RANK" in os.environ  # started by torchrun or offbeat run
    if is_distributed:
        dist.init_process_group("gloo")
    train_set, test_set = read_digits()
    x_test, y_test = test_set.tensors

    model: nn.Module = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler: DistributedSampler[int] | RandomSampler = RandomSampler(train_set)
    if is_distributed:
        model = DistributedDataParallel(model)
        sampler = DistributedSampler(train_set)

    step = 0
    for epoch in range(epochs):
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(epoch)
        for x, y in DataLoader(train_set, batch_size=32, sampler=sampler):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        if is_distributed and dist.get_rank():
            continue
        model.eval()
        with torch.no_grad():
            accuracy = (model(x_test).argmax(dim=1) == y_test).float().mean().item()
        model.train()
        offbeat.log(accuracy=accuracy)
        print(f"epoch {epoch}, step {step}: accuracy {accuracy:.3f}")

    if is_distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--width", type=int, default=2048)
    arguments = parser.parse_args()
    main(arguments.epochs, arguments.width)
