"""Classification of images: the bookkeeping that all image tasks share, and the network of
`digits` and `mnist`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import nn
from torch.nn import functional
from typing_extensions import override

from offbeat_lab.tasks.base import Batch, dense, mean_over_batches
from offbeat_lab.tasks.training import TrainedTask, TrainingOptions

_EVALUATION_BATCH = 100
"""Activations of more images do not fit into the caches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageData:
    """Images of shape (N, channels, height, width), float32 in [0, 1] or uint8, and labels int64 of
    shape (N,), to train on and held out.
    """

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor

    @property
    def num_classes(self) -> int:
        return int(max(self.train_labels.max(), self.test_labels.max())) + 1


class ImageOptions(TrainingOptions):
    """Options that image tasks share."""

    hidden: int | None = Field(
        None, ge=1, description="units of the hidden linear layer; default: by size"
    )
    skew: float | None = Field(
        None,
        gt=0,
        description="labels are dealt unequally over workers: concentration of a Dirichlet"
        " distribution, the smaller the more unequal; not for strategies that share samples",
    )


class ImageTask(TrainedTask):
    """Classification, measured by accuracy."""

    metric_name = "accuracy"
    higher_is_better = True

    options: ImageOptions

    @abstractmethod
    def read(self) -> ImageData:
        """Load the data set."""

    @cached_property
    def data(self) -> ImageData:
        return self.read()

    @property
    @override
    def num_samples(self) -> int:
        return len(self.data.train_labels)

    @override
    def samples(self, *, seed: int, epoch: int, world_size: int) -> NDArray[np.int64]:
        if self.options.skew is None:
            return super().samples(seed=seed, epoch=epoch, world_size=world_size)
        return skewed_samples(
            self.data.train_labels.numpy(),
            self.options.skew,
            shape=(self.steps_per_epoch(world_size), world_size, self.options.batch_size),
            seed=seed,
            epoch=epoch,
        )

    @property
    @override
    def deals_unequally(self) -> bool:
        return self.options.skew is not None

    @override
    def batch(self, samples: NDArray[np.int64]) -> Batch:
        chosen = torch.from_numpy(samples)
        return self.prepared(self.data.train_images[chosen]), self.data.train_labels[chosen]

    def prepared(self, images: torch.Tensor) -> torch.Tensor:
        """Images as the network takes them, float32 of the same shape."""
        return images if images.dtype == torch.float32 else images.to(torch.float32).div(255.0)

    @override
    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        images, labels = dense(batch)
        return functional.cross_entropy(model(images), labels)

    @override
    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        images, labels = self.data.test_images, self.data.test_labels

        def num_right(part: slice) -> float:
            scores = model(self.prepared(images[part]))
            return float((scores.argmax(dim=1) == labels[part]).sum())

        return mean_over_batches(len(labels), _EVALUATION_BATCH, num_right)


def convolutional_network(
    *,
    shape: tuple[int, int, int],
    num_classes: int,
    widths: tuple[int, int, int],
    num_poolings: int,
) -> nn.Sequential:
    """Two 3 x 3 convolutions and two linear layers, without normalization.

    Args:
        shape: channels, height and width of an image.
        num_classes: how many scores come out.
        widths: channels of the first and second convolution, units of the hidden linear layer.
        num_poolings: 1 to halve the image after the second convolution, 2 to halve it after the
            first as well.
    """
    first, second, hidden = widths
    channels, height, width = shape
    pixels = (height // 2**num_poolings) * (width // 2**num_poolings)
    pool: list[nn.Module] = [nn.MaxPool2d(2)]
    first_pool = pool if num_poolings == 2 else []
    return nn.Sequential(
        *(nn.Conv2d(channels, first, 3, padding=1), nn.ReLU(), *first_pool),
        *(nn.Conv2d(first, second, 3, padding=1), nn.ReLU(), *pool, nn.Flatten()),
        *(nn.Linear(second * pixels, hidden), nn.ReLU(), nn.Linear(hidden, num_classes)),
    )


_BALANCING_ROUNDS = 200
"""Of Sinkhorn's iteration, which converges by a factor in each round."""


def skewed_samples(
    labels: NDArray[np.int64], skew: float, *, shape: tuple[int, int, int], seed: int, epoch: int
) -> NDArray[np.int64]:
    """Samples of one epoch. Each rank has as many as its peers and keeps its own from epoch to
    epoch, in another order.

    Args:
        labels: of all training samples, >= 0, shape (N,).
        skew: concentration of the Dirichlet distribution, > 0: 0.1 leaves a rank few classes, 100
            deals nearly equally.
        shape: (steps, world_size, batch_size) of what is returned; N is at least its product.
        seed: of the run, >= 0.
        epoch: passes over the data completed before this one.

    Returns:
        Sample numbers, none of them twice.
    """
    steps, world_size, batch_size = shape
    shares = label_shares(labels, skew, world_size=world_size, seed=seed)
    draw = np.random.default_rng((seed, epoch))
    dealt = [draw.permutation(share)[: steps * batch_size] for share in shares]
    return np.stack([share.reshape(steps, batch_size) for share in dealt], axis=1)


def label_shares(
    labels: NDArray[np.int64], skew: float, *, world_size: int, seed: int
) -> list[NDArray[np.int64]]:
    """Each rank's samples: equally many, with proportions of labels drawn for each rank from a
    Dirichlet distribution and then balanced, so that together they use up the data.

    Args:
        labels: of all training samples, >= 0, shape (N,).
        skew: concentration of the Dirichlet distribution, > 0.
        world_size: number of ranks.
        seed: of the run, >= 0.

    Returns:
        Sample numbers of each rank, N // world_size of them; no sample is dealt twice.
    """
    draw = np.random.default_rng((seed, world_size))
    sizes = np.bincount(labels)
    quota = len(labels) // world_size
    proportions = draw.dirichlet(np.full(sizes.size, skew), size=world_size)
    wanted = _balanced(np.maximum(proportions, 1e-9), quota, sizes)
    counts = np.floor(wanted).astype(np.int64)
    pools = [draw.permutation(np.flatnonzero(labels == label)) for label in range(sizes.size)]
    starts = np.cumsum(counts, axis=0) - counts
    shares = [
        [
            pool[start : start + count]
            for pool, start, count in zip(pools, starts[rank], counts[rank], strict=True)
        ]
        for rank in range(world_size)
    ]
    # Rounding down has left some samples of each label, which fill the ranks up.
    totals = counts.sum(axis=0)
    unused = [pool[total:] for pool, total in zip(pools, totals, strict=True)]
    left = draw.permutation(np.concatenate(unused))
    dealt = []
    for share in shares:
        own = np.concatenate(share)[:quota]
        missing = quota - own.size
        dealt.append(np.concatenate([own, left[:missing]]))
        left = left[missing:]
    return dealt


def _balanced(
    proportions: NDArray[np.float64], quota: int, sizes: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Sinkhorn's iteration: scale rows and columns until each rank has its quota and no label more
    samples than there are.
    """
    counts = proportions * quota
    for _ in range(_BALANCING_ROUNDS):
        counts *= sizes / np.maximum(counts.sum(axis=0), 1e-300)
        counts *= quota / counts.sum(axis=1, keepdims=True)
    # The last round has left columns nearly, not quite, within their bounds.
    within: NDArray[np.float64] = counts * np.minimum(
        1.0, sizes / np.maximum(counts.sum(axis=0), 1e-300)
    )
    return within
