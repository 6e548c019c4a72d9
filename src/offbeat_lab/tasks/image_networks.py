"""Networks with BatchNorm for images: a plain one, and one of residual blocks."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

_GRID = 4
"""Height and width of what the last linear layer of `normalized_network` sees."""


def normalized_network(channels: int, num_classes: int, width: int) -> nn.Sequential:
    """Three 3 x 3 convolutions of `width`, twice and four times as many channels, each with
    BatchNorm, ReLU and pooling by 2, and one linear layer.

    Args:
        channels: of an image, whose sides are 8 pixels or more.
        num_classes: how many scores come out.
        width: channels after the first convolution.
    """
    widths = (channels, width, 2 * width, 4 * width)
    blocks: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        blocks += [
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    return nn.Sequential(
        *blocks,
        ToGrid(_GRID),
        nn.Flatten(),
        nn.Linear(widths[-1] * _GRID**2, num_classes),
    )


class ToGrid(nn.AdaptiveAvgPool2d):
    """Pooling to a square, without the time that it takes where the image has that size."""

    @override
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Shape (N, C, H, W) to (N, C, output_size, output_size)."""
        square = (self.output_size, self.output_size)
        return inputs if inputs.shape[-2:] == square else super().forward(inputs)


def residual_network(channels: int, num_classes: int, width: int) -> nn.Sequential:
    """ResNet-8: a 3 x 3 convolution, three residual blocks of `width`, twice and four times as many
    channels, of which the last two halve the image, the mean over pixels, and a linear layer.

    Args:
        channels: of an image, whose sides are 8 pixels or more.
        num_classes: how many scores come out.
        width: channels of the first block.
    """
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        ResidualBlock(width, width, stride=1),
        ResidualBlock(width, 2 * width, stride=2),
        ResidualBlock(2 * width, 4 * width, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, num_classes),
    )


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut, as of He et al. (arXiv 1512.03385), section 3."""

    def __init__(self, inputs: int, outputs: int, *, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    @override
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Shape (N, inputs, H, W) to (N, outputs, H / stride, W / stride)."""
        return functional.relu(self.convolutions(inputs) + self.shortcut(inputs))
