"""`digits`: 1,797 real handwritten digits of 8 x 8 pixels, bundled with scikit-learn; trains in
seconds.

Every fifth image is held out (360 of them). Parameters: tiny 105,226, small 1,012,426, medium
5,016,106, large 24,938,458.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from offbeat_lab.tasks.base import Size
from offbeat_lab.tasks.image_task import (
    ImageData,
    ImageOptions,
    ImageTask,
    convolutional_network,
)

_WIDTHS: Final[dict[Size, tuple[int, int, int]]] = {
    "tiny": (16, 32, 192),
    "small": (32, 64, 960),
    "medium": (64, 128, 2400),
    "large": (128, 256, 6000),
}
_LARGEST_VALUE = 16.0
_HELD_OUT_EVERY = 5
_BUNDLED = "datasets/data/digits.csv.gz"
"""The table's file within scikit-learn."""


class Digits(ImageTask):
    """Handwritten digits bundled with scikit-learn, and a small CNN."""

    name = "digits"
    summary = (
        "1,797 real handwritten digits (8 x 8, bundled with scikit-learn), small CNN, accuracy"
    )
    default_epochs = 30
    options_type = ImageOptions

    def read(self) -> ImageData:
        table = torch.from_numpy(bundled_table())
        pixels = table[:, :-1].to(torch.float32).div(_LARGEST_VALUE).view(-1, 1, 8, 8)
        classes = table[:, -1].to(torch.int64)
        held_out = torch.arange(len(classes)) % _HELD_OUT_EVERY == 0
        return ImageData(
            train_images=pixels[~held_out],
            train_labels=classes[~held_out],
            test_images=pixels[held_out],
            test_labels=classes[held_out],
        )

    def model(self) -> nn.Module:
        first, second, hidden = _WIDTHS[self.options.size]
        return convolutional_network(
            shape=(1, 8, 8),
            num_classes=10,
            widths=(first, second, self.options.hidden or hidden),
            num_poolings=1,
        )


@cache
def bundled_table() -> NDArray[np.float64]:
    """A row for each image: its 64 pixels, 0 to 16, and its class."""
    # Importing scikit-learn takes more than a second, and its file can be read without that.
    package = find_spec("sklearn")
    if package is not None and package.origin is not None:
        path = Path(package.origin).parent / _BUNDLED
        if path.is_file():
            return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return np.column_stack([images, labels])
