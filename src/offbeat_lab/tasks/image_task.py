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
from offbeat_lab.tasks.dealing import skewed_samples
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
        *(
            nn.Conv2d(channels, first, 3, padding=1),
            nn.ReLU(),
            *first_pool,
        ),
        *(nn.Conv2d(first, second, 3, padding=1), nn.ReLU(), *pool, nn.Flatten()),
        *(nn.Linear(second * pixels, hidden), nn.ReLU(), nn.Linear(hidden, num_classes)),
    )
