"""Workers of unlike numbers of threads train one model, as in adaptive Hogbatch (Ma and Rusu, arXiv
2004.08771): who is faster takes more batches, and larger ones.

    python examples/unlike_threads.py                          # alone
    torchrun --nproc-per-node 3 examples/unlike_threads.py     # with 1, 2 and 4 threads
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat


def main(epochs: int) -> None:
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(images).float() / 16, torch.from_numpy(labels).long()
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    with offbeat.attach(model, optimizer, offbeat.AdaptiveSGD(mega_batch=10)) as session:
        torch.set_num_threads(2 ** min(session.rank, 2))
        dataset = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
        loader, num_samples = session.loader(dataset, max_batch_size=64), 0
        for _ in range(epochs):
            for inputs, targets in loader:
                nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
                num_samples += len(targets)

    accuracy = (model(x).argmax(dim=1) == y).float().mean()
    print(
        f"rank {session.rank} with {torch.get_num_threads()} threads: {session.stats.steps} steps"
        f" with {num_samples} samples; training accuracy {accuracy:.3f}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=10)
    main(parser.parse_args().epochs)
