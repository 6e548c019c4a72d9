"""CoDA: the area under the ROC curve, maximised by local steps, on digits of which one in ten is a
one (Guo et al., arXiv 2005.02426).

    python examples/coda.py                                    # alone
    torchrun --nproc-per-node 4 examples/coda.py               # four ranks on this machine

The loss has three numbers of its own: a and b, the mean scores of both classes, which are descended
like weights, and alpha, which is ascended. They are parameters of the module that is attached, so
LocalSGD averages them with the weights. Nothing else is needed of it.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import offbeat


class AUCLoss(nn.Module):
    """A model and the loss whose saddle point has the largest area under its curve.

    Args:
        scores: gives a score for each sample, shape (n, 1).
        share: of positive samples, in (0, 1).
        margin: by which positive samples are to score higher.
        gamma: how far parameters may move from those of the last stage.
    """

    def __init__(
        self, scores: nn.Module, *, share: float, margin: float = 1.0, gamma: float = 500.0
    ) -> None:
        super().__init__()
        self.scores, self.share, self.margin, self.gamma = scores, share, margin, gamma
        self.a, self.b, self.alpha = (nn.Parameter(torch.zeros(())) for _ in range(3))
        self.stage: dict[str, torch.Tensor] = {}

    def descended(self) -> list[nn.Parameter]:
        """All parameters but alpha."""
        return [*self.scores.parameters(), self.a, self.b]

    def begin_stage(self, reference: dict[str, torch.Tensor]) -> None:
        """Draw parameters to `reference` from now on."""
        self.stage = {name: reference[name] for name, _ in self.named_parameters()}

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        p, alpha = self.share, self.alpha
        score, positive = self.scores(x).sigmoid().flatten(), y.float()
        negative = 1 - positive
        near = (1 - p) * (score - self.a).square() * positive
        near = near + p * (score - self.b).square() * negative
        gap = p * score * negative - (1 - p) * score * positive
        apart = 2 * alpha * (p * (1 - p) * self.margin + gap) - p * (1 - p) * alpha.square()
        moved = [
            (parameter - self.stage[name]).square().sum()
            for name, parameter in self.named_parameters()
            if name in self.stage and name != "alpha"
        ]
        drawn: torch.Tensor = (near + apart).mean() + sum(moved) / (2 * self.gamma)
        return drawn


def area(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of pairs of a positive and a negative sample in which the positive one scores
    higher.
    """
    positive, negative = scores[labels == 1], scores[labels == 0]
    wins = positive[:, None] - negative
    return float(((wins > 0).float() + (wins == 0).float() / 2).mean())


def read_ones() -> tuple[TensorDataset, TensorDataset]:
    """Training and held-out images of digits, in [0, 1]; the label says whether it is a one."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(images).float() / 16, torch.from_numpy(labels == 1).long()
    held_out = torch.arange(len(y)) % 5 == 0
    return TensorDataset(x[~held_out], y[~held_out]), TensorDataset(x[held_out], y[held_out])


def train(model: AUCLoss, strategy: offbeat.LocalSGD, train_set: TensorDataset, epochs: int) -> int:
    """Train, with a stage an epoch. Returns the number of steps."""
    groups = [
        {"params": model.descended()},
        {"params": [model.alpha], "maximize": True},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    with offbeat.attach(model, optimizer, strategy) as session:
        sampler: DistributedSampler[int] = DistributedSampler(
            train_set, session.world_size, session.rank
        )
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            model.begin_stage(session.averaged_tensors())
            for x, y in DataLoader(train_set, batch_size=32, sampler=sampler):
                model(x, y).backward()
                session.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                model.alpha.detach().clamp_(min=0)
    return session.stats.steps


def main(epochs: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train_set, test_set = read_ones()
    scores = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    model = AUCLoss(scores, share=0.1)
    strategy = offbeat.LocalSGD(period=8, warmup=0, optimizer_state="local")
    steps = train(model, strategy, train_set, epochs)
    x, y = test_set.tensors
    with torch.no_grad():
        print(f"{steps} steps, area under the curve {area(scores(x).flatten(), y):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=10)
    main(parser.parse_args().epochs)
