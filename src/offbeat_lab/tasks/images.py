"""`digits`: 1,797 real handwritten digits of 8 x 8 pixels, bundled with scikit-learn; trains in
seconds.

Every fifth image is held out (360 of them). Parameters: tiny 105,226, small 1,012,426, medium
5,016,106, large 24,938,458.

`images`: classification of images from an npz file of the user's; `mnist` is a name for it with
the settings that suit MNIST.

The file holds `x_train`, `y_train`, `x_test`, `y_test`: images of shape (N, height, width) or
(N, height, width, channels), bytes or floats in [0, 1], and labels 0, 1, ... of shape (N,).

Parameters for three channels and ten classes, cnn: tiny 89,638, small 1,005,832, medium 5,002,162,
large 24,973,783. ResNet: tiny 98,524, small 1,008,804, medium 5,050,380, large 25,093,420. Plain,
for 28 x 28 grey pixels: tiny 103,018, small 1,015,370, medium 5,054,026, large 24,578,206.
"""

from __future__ import annotations

import lzma
import math
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import nn
from torch.nn import functional
from typing_extensions import override

from offbeat.errors import MALFORMED, ConfigError, OffbeatError
from offbeat_lab.tasks.base import AbsolutePath, Batch, Size, TaskOptions, dense
from offbeat_lab.tasks.image_task import ImageData, ImageOptions, ImageTask, convolutional_network

MAX_RATIO: Final = 100
"""How many times larger than the file its arrays may be together, beyond `ALWAYS_ALLOWED_BYTES`."""

ALWAYS_ALLOWED_BYTES: Final = 1 << 26

_HEADERS: Final = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_DAMAGED: Final = (
    *MALFORMED,
    EOFError,
    OSError,
    RuntimeError,
    NotImplementedError,
    SyntaxError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)


def check_arrays(path: Path, names: Sequence[str]) -> None:
    """Raise `ConfigError` unless the file at `path` has arrays of these names, and all of them
    together have a size that is plausible for it.
    """
    with _opened(path) as archive:
        _check(path, archive, names)


def read_arrays(path: Path, names: Sequence[str]) -> list[NDArray[Any]]:
    """The arrays of these names. Raises `ConfigError` as `check_arrays`, or when one of them cannot
    be read.
    """
    with _opened(path) as archive:
        _check(path, archive, names)
        return [_read(path, archive, name) for name in names]


def _check(path: Path, archive: zipfile.ZipFile, names: Sequence[str]) -> None:
    members = {member.filename: member for member in archive.infolist()}
    if missing := [name for name in names if f"{name}.npy" not in members]:
        raise ConfigError(f"{path} has no {', '.join(missing)}; it must hold {', '.join(names)}")
    num_bytes = sum(members[f"{name}.npy"].file_size for name in names)
    allowed = max(ALWAYS_ALLOWED_BYTES, MAX_RATIO * path.stat().st_size)
    if num_bytes > allowed:
        raise ConfigError(
            f"the arrays of {path} unpack to {num_bytes:,} bytes, allowed are {allowed:,}, which is"
            f" {MAX_RATIO} times the file; was it made to fill memory? If not, save it with"
            " numpy.savez, which does not compress"
        )


def _read(path: Path, archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    member = f"{name}.npy"
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version not in _HEADERS:
            raise ConfigError(f"{name} in {path} has version {version} of numpy's format")
        shape, _, dtype = _HEADERS[version](file)
        # numpy makes room for the array before it reads it.
        if math.prod(shape) * dtype.itemsize > archive.getinfo(member).file_size:
            raise ConfigError(
                f"{name} in {path} is to have shape {shape} and dtype {dtype}, but there are fewer"
                " bytes; it is damaged"
            )
    with archive.open(member) as file:
        array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    return array


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    if not path.is_file():
        raise ConfigError(f"no data at {path}; give the path of an npz file with --set path=...")
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except OffbeatError:
        raise
    except _DAMAGED as error:
        raise ConfigError(
            f"{path} is not an npz file, or is damaged ({error}); save one with numpy.savez"
        ) from None


_PLAIN: Final[dict[Size, tuple[int, int, int]]] = {
    "tiny": (8, 16, 128),
    "small": (16, 32, 640),
    "medium": (32, 64, 1600),
    "large": (64, 128, 3900),
}
_CNN: Final[dict[Size, int]] = {"tiny": 28, "small": 102, "medium": 232, "large": 523}
_RESNET: Final[dict[Size, int]] = {"tiny": 18, "small": 58, "medium": 130, "large": 290}
_SMALLEST_IMAGE = 8
_MOST_CLASSES = 100_000
_ARRAYS = ("x_train", "y_train", "x_test", "y_test")


class ImagesOptions(ImageOptions):
    """Options of `images`."""

    path: AbsolutePath = Field(description="npz file with x_train, y_train, x_test, y_test")
    model: Literal["cnn", "resnet", "plain"] = Field(
        "cnn",
        description="network: three convolutions or residual blocks with BatchNorm, or two"
        " convolutions and two linear layers without",
    )
    width: int | None = Field(
        None,
        ge=1,
        description="of cnn and resnet: channels after the first convolution; default: by size",
    )
    shrink: int = Field(
        1, ge=1, description="so many pixels, across and down, become one: their mean"
    )
    augment: Literal["none", "crop", "flip_and_crop"] = Field(
        "flip_and_crop", description="how training images are changed at random"
    )
    normalize: bool = Field(
        True, description="whether images are shifted and scaled to mean 0 and deviation 1"
    )


class MnistOptions(ImagesOptions):
    """Options of `mnist`: those of `images`, with a plain network and images as they are."""

    model: Literal["cnn", "resnet", "plain"] = Field("plain", description="network, see `images`")
    augment: Literal["none", "crop", "flip_and_crop"] = Field(
        "none", description="how training images are changed at random"
    )
    normalize: bool = Field(
        False, description="whether images are shifted and scaled to mean 0 and deviation 1"
    )


class Images(ImageTask):
    """Images from an npz file."""

    name = "images"
    summary = (
        "images of any size, grey or coloured, from an npz file (--set path=...), CNN or ResNet"
        " with BatchNorm, accuracy"
    )
    default_epochs = 10
    options_type = ImagesOptions
    options: ImagesOptions

    def __init__(self, options: TaskOptions) -> None:
        super().__init__(options)
        if self.options.hidden is not None and self.options.model != "plain":
            raise ConfigError(
                f"hidden={self.options.hidden} is for model=plain, but model={self.options.model};"
                " leave it out, or choose another size"
            )
        if self.options.width is not None and self.options.model == "plain":
            raise ConfigError(
                f"width={self.options.width} is for model=cnn and model=resnet, but model=plain;"
                " leave it out, or set hidden"
            )
        self._path = self.options.path
        check_arrays(self._path, _ARRAYS)

    @override
    def read(self) -> ImageData:
        train_images, train_labels, test_images, test_labels = read_arrays(self._path, _ARRAYS)
        data = ImageData(
            train_images=self._images(train_images),
            train_labels=self._labels(train_labels, len(train_images)),
            test_images=self._images(test_images),
            test_labels=self._labels(test_labels, len(test_images)),
        )
        if data.train_images.shape[1:] != data.test_images.shape[1:]:
            raise ConfigError(
                f"images in {self._path} have shape {train_images.shape[1:]} to train on and"
                f" {test_images.shape[1:]} held out; both must be equal"
            )
        return data

    @override
    def model(self) -> nn.Module:
        channels, height, width = self.data.train_images.shape[1:]
        size, num_classes = self.options.size, self.data.num_classes
        if self.options.model == "plain":
            first, second, hidden = _PLAIN[size]
            return convolutional_network(
                shape=(channels, height, width),
                num_classes=num_classes,
                widths=(first, second, self.options.hidden or hidden),
                num_poolings=2,
            )
        if self.options.model == "cnn":
            return normalized_network(channels, num_classes, self.options.width or _CNN[size])
        return residual_network(channels, num_classes, self.options.width or _RESNET[size])

    @cached_property
    def _mean_and_deviation(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each channel over the training images, shape (1, channels, 1, 1)."""
        images = super().prepared(self.data.train_images)
        deviation, mean = torch.std_mean(images, dim=(0, 2, 3), keepdim=True)
        return mean, deviation.clamp(min=1e-3)

    @override
    def prepared(self, images: torch.Tensor) -> torch.Tensor:
        # Convolutions on a CPU take half the time where a pixel's channels lie side by side.
        scaled = super().prepared(images).contiguous(memory_format=torch.channels_last)
        if not self.options.normalize:
            return scaled
        mean, deviation = self._mean_and_deviation
        return (scaled - mean) / deviation

    @override
    def training_batch(self, samples: NDArray[np.int64], *, seed: int, epoch: int) -> Batch:
        batch = self.batch(samples)
        if self.options.augment == "none":
            return batch
        images, labels = dense(batch)
        draw = np.random.default_rng((seed, epoch, int(samples[0])))
        flips = self.options.augment == "flip_and_crop"
        return _changed(images, draw, flips=flips), labels

    def _images(self, pixels: NDArray[Any]) -> torch.Tensor:
        shrink = self.options.shrink
        if (
            pixels.ndim not in (3, 4)
            or min(pixels.shape[1:3]) // shrink < _SMALLEST_IMAGE
            or pixels.dtype.kind not in "uif"
            or pixels.size == 0
        ):
            raise ConfigError(
                f"images in {self._path} have shape {pixels.shape} and dtype {pixels.dtype};"
                " allowed is (N, height, width) or (N, height, width, channels), at least"
                f" {_SMALLEST_IMAGE * shrink} pixels high and wide with shrink={shrink}, uint8 or"
                " float"
            )
        if pixels.dtype.kind in "ui":
            # As bytes they take a quarter of the memory; a batch is converted when it is used.
            if pixels.dtype != np.uint8 and not (pixels.min() >= 0 and pixels.max() <= 255):
                raise ConfigError(
                    f"images in {self._path} have pixels from {pixels.min()} to {pixels.max()};"
                    " allowed are integers from 0 to 255, or floats"
                )
            kept = torch.from_numpy(pixels.astype(np.uint8))
        else:
            kept = torch.from_numpy(pixels.astype(np.float32))
        images = kept.unsqueeze(1) if pixels.ndim == 3 else kept.permute(0, 3, 1, 2).contiguous()
        if shrink == 1:
            return images
        smaller = nn.functional.avg_pool2d(images.to(torch.float32), shrink)
        return smaller.round().to(torch.uint8) if images.dtype == torch.uint8 else smaller

    def _labels(self, labels: NDArray[Any], num_images: int) -> torch.Tensor:
        if (
            labels.shape != (num_images,)
            or labels.dtype.kind not in "ui"
            or int(labels.min()) < 0
            or int(labels.max()) >= _MOST_CLASSES
        ):
            raise ConfigError(
                f"labels in {self._path} have shape {labels.shape} and dtype {labels.dtype};"
                f" allowed is ({num_images},), whole numbers from 0 to {_MOST_CLASSES - 1}"
            )
        return torch.from_numpy(labels.astype(np.int64))


class Mnist(Images):
    """`images` with the settings that suit MNIST."""

    name = "mnist"
    summary = "`images` with the settings that suit MNIST and Fashion-MNIST, small CNN, accuracy"
    default_epochs = 3
    options_type = MnistOptions
    options: MnistOptions


def _changed(images: torch.Tensor, draw: np.random.Generator, *, flips: bool) -> torch.Tensor:
    """Each image shifted by up to an eighth of its sides, zeros filling in, and every second one,
    by chance, flipped from left to right.
    """
    count, _, height, width = images.shape
    down, right = height // 8, width // 8
    tops = draw.integers(0, 2 * down + 1, size=count)
    lefts = draw.integers(0, 2 * right + 1, size=count)
    flipped = draw.random(count) < 0.5
    rows = tops[:, None] + np.arange(height)
    columns = lefts[:, None] + np.arange(width)
    if flips:
        columns[flipped] = columns[flipped, ::-1]
    padded = nn.functional.pad(images, (right, right, down, down)).permute(0, 2, 3, 1)
    numbers = torch.arange(count)[:, None, None]
    places = torch.from_numpy(rows)[:, :, None], torch.from_numpy(columns)[:, None, :]
    return padded[(numbers, *places)].permute(0, 3, 1, 2)


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
