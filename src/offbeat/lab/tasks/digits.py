"""`digits`: 1,797 real handwritten digits of 8 x 8 pixels, bundled with scikit-learn; trains in
seconds.

Every fifth image is held out (360 of them). Parameters: tiny 105,226, small 1,012,426, medium
5,016,106, large 24,938,458.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from offbeat.lab.tasks.base import Size
from offbeat.lab.tasks.images import ImageData, ImageOptions, ImageTask

_WIDTHS: Final[dict[Size, tuple[int, int, int]]] = {
    "tiny": (16, 32, 192),
    "small": (32, 64, 960),
    "medium": (64, 128, 2400),
    "large": (128, 256, 6000),
}
_LARGEST_VALUE = 16.0
_HELD_OUT_EVERY = 5


class Digits(ImageTask):
    """Handwritten digits bundled with scikit-learn, and a small CNN."""

    name = "digits"
    summary = (
        "1,797 real handwritten digits (8 x 8, bundled with scikit-learn), small CNN, accuracy"
    )
    default_epochs = 30
    options_type = ImageOptions

    def read(self) -> ImageData:
        from sklearn.datasets import load_digits  # seconds to import: only for whoever trains on it

        images, labels = load_digits(return_X_y=True)
        pixels = torch.from_numpy(images).to(torch.float32).div(_LARGEST_VALUE).view(-1, 1, 8, 8)
        classes = torch.from_numpy(labels).to(torch.int64)
        held_out = torch.arange(len(classes)) % _HELD_OUT_EVERY == 0
        return ImageData(
            train_images=pixels[~held_out],
            train_labels=classes[~held_out],
            test_images=pixels[held_out],
            test_labels=classes[held_out],
        )

    def model(self) -> nn.Module:
        return self.network(8, _WIDTHS[self.options.size], num_poolings=1)
