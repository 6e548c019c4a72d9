"""`mnist`: images of 28 x 28 pixels and ten classes from an npz file of the user's.

The file holds `x_train`, `y_train`, `x_test`, `y_test`: images of shape (N, 28, 28), bytes or
floats in [0, 1], and labels 0 to 9 of shape (N,). MNIST and Fashion-MNIST are distributed so.
Parameters: tiny 103,018, small 1,015,370, medium 5,054,026, large 24,578,206.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.lib.npyio import NpzFile
from pydantic import Field
from torch import nn

from offbeat.errors import ConfigError
from offbeat.lab.tasks.base import AbsolutePath, Size, TaskOptions
from offbeat.lab.tasks.images import ImageData, ImageOptions, ImageTask

_WIDTHS: Final[dict[Size, tuple[int, int, int]]] = {
    "tiny": (8, 16, 128),
    "small": (16, 32, 640),
    "medium": (32, 64, 1600),
    "large": (64, 128, 3900),
}
_IMAGE_SIZE = 28
_ARRAYS = ("x_train", "y_train", "x_test", "y_test")


class MnistOptions(ImageOptions):
    """Options of `mnist`."""

    path: AbsolutePath = Field(description="npz file with x_train, y_train, x_test, y_test")


class Mnist(ImageTask):
    """Digits of 28 x 28 pixels, from an npz file."""

    name = "mnist"
    summary = (
        "images of 28 x 28 pixels in ten classes from an npz file (--set path=...), small CNN,"
        " accuracy"
    )
    default_epochs = 3
    options_type = MnistOptions
    options: MnistOptions

    def __init__(self, options: TaskOptions) -> None:
        super().__init__(options)
        self._path = self.options.path
        with _opened(self._path) as arrays:
            missing = [name for name in _ARRAYS if name not in arrays]
        if missing:
            raise ConfigError(
                f"{self._path} has no {', '.join(missing)}; it must hold {', '.join(_ARRAYS)}"
            )

    def read(self) -> ImageData:
        with _opened(self._path) as arrays:
            try:
                train_images, train_labels, test_images, test_labels = (
                    arrays[name] for name in _ARRAYS
                )
            except (ValueError, zipfile.BadZipFile) as error:
                raise ConfigError(
                    f"cannot read the arrays of {self._path}: {error}; save them with numpy.savez"
                ) from None
        return ImageData(
            train_images=self._images(train_images),
            train_labels=self._labels(train_labels, len(train_images)),
            test_images=self._images(test_images),
            test_labels=self._labels(test_labels, len(test_images)),
        )

    def model(self) -> nn.Module:
        return self.network(_IMAGE_SIZE, _WIDTHS[self.options.size], num_poolings=2)

    def _images(self, pixels: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> torch.Tensor:
        if (
            pixels.shape[1:] != (_IMAGE_SIZE, _IMAGE_SIZE)
            or pixels.dtype.kind not in "uif"
            or len(pixels) == 0
        ):
            raise ConfigError(
                f"images in {self._path} have shape {pixels.shape} and dtype {pixels.dtype}; "
                "allowed is (N, 28, 28), uint8 or float"
            )
        scale = 255.0 if pixels.dtype.kind in "ui" else 1.0
        return torch.from_numpy(pixels.astype(np.float32) / scale).unsqueeze(1)

    def _labels(
        self, labels: np.ndarray[tuple[int, ...], np.dtype[np.generic]], num_images: int
    ) -> torch.Tensor:
        classes = torch.from_numpy(labels.astype(np.int64))
        if classes.shape != (num_images,) or int(classes.min()) < 0 or int(classes.max()) > 9:
            raise ConfigError(
                f"labels in {self._path} have shape {labels.shape}; allowed is ({num_images},) with"
                " values 0 to 9"
            )
        return classes


@contextmanager
def _opened(path: Path) -> Iterator[NpzFile]:
    if not path.is_file():
        raise ConfigError(f"no data at {path}; give the path of an npz file with --set path=...")
    with path.open("rb") as file:
        try:
            arrays = np.load(file, allow_pickle=False)
        except (ValueError, OSError, EOFError, zipfile.BadZipFile):
            raise ConfigError(f"{path} is not an npz file; save one with numpy.savez") from None
        if not isinstance(arrays, NpzFile):
            raise ConfigError(
                f"{path} holds a single array; allowed is an npz file with {', '.join(_ARRAYS)}"
            )
        yield arrays
