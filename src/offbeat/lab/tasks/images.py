"""Small grey images of ten classes: the network and the bookkeeping that `digits` and `mnist`
share.
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

from offbeat.lab.tasks.base import Batch, SizedOptions, Task, dense, mean_over_batches

_EVALUATION_BATCH = 500
_NUM_CLASSES = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageData:
    """Images float32 of shape (N, 1, height, width) in [0, 1] and labels int64 of shape (N,), to
    train on and held out.
    """

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


class ImageOptions(SizedOptions):
    """Options that image tasks share."""

    momentum: float = Field(
        0.9,
        ge=0,
        lt=1,
        description="of SGD; 0 where the strategy's momentum_correction takes its place",
    )
    hidden: int | None = Field(
        None, ge=1, description="units of the hidden linear layer; default: by size"
    )


class ImageTask(Task):
    """Classification, trained by SGD with momentum and measured by accuracy."""

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
    def num_samples(self) -> int:
        return len(self.data.train_labels)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            model.parameters(), lr=self.options.lr, momentum=self.options.momentum
        )

    def batch(self, samples: NDArray[np.int64]) -> Batch:
        chosen = torch.from_numpy(samples)
        return self.data.train_images[chosen], self.data.train_labels[chosen]

    def network(
        self, image_size: int, widths: tuple[int, int, int], *, num_poolings: int
    ) -> nn.Sequential:
        """That of `convolutional_network`, with as many hidden units as were asked for."""
        first, second, hidden = widths
        widths = (first, second, self.options.hidden or hidden)
        return convolutional_network(
            image_size=image_size, widths=widths, num_poolings=num_poolings
        )

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        images, labels = dense(batch)
        return functional.cross_entropy(model(images), labels)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        images, labels = self.data.test_images, self.data.test_labels

        def num_right(part: slice) -> float:
            return float((model(images[part]).argmax(dim=1) == labels[part]).sum())

        return mean_over_batches(len(labels), _EVALUATION_BATCH, num_right)


def convolutional_network(
    *, image_size: int, widths: tuple[int, int, int], num_poolings: int
) -> nn.Sequential:
    """Two 3 x 3 convolutions and two linear layers.

    Args:
        image_size: height and width.
        widths: channels of the first and second convolution, units of the hidden linear layer.
        num_poolings: 1 to halve the image after the second convolution, 2 to halve it after the
            first as well.
    """
    first, second, hidden = widths
    pixels = (image_size // 2**num_poolings) ** 2
    pool: list[nn.Module] = [nn.MaxPool2d(2)]
    return nn.Sequential(
        *(nn.Conv2d(1, first, 3, padding=1), nn.ReLU(), *(pool if num_poolings == 2 else [])),
        *(nn.Conv2d(first, second, 3, padding=1), nn.ReLU(), *pool, nn.Flatten()),
        *(nn.Linear(second * pixels, hidden), nn.ReLU(), nn.Linear(hidden, _NUM_CLASSES)),
    )
