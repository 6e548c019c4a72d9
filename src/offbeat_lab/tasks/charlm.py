"""`charlm`: predict the next byte of a text, with an LSTM or a small transformer.

The text is a file or a directory (its files in order of name), by default the source of Python's
own standard library on this machine. One block of 16 KiB in twenty is held out. A character is a
byte, so any file will do.

Parameters, LSTM: tiny 125,056, small 1,048,064, medium 5,007,632, large 24,787,328.
Parameters, transformer: tiny 137,216, small 1,029,256, medium 4,886,784, large 25,515,264.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import nn
from torch.nn import functional

from offbeat.errors import ConfigError
from offbeat_lab.tasks.base import (
    AbsolutePath,
    Batch,
    Size,
    SizedOptions,
    Task,
    TaskOptions,
    dense,
    mean_over_batches,
)
from offbeat_lab.tasks.corpus import check_path, cut, held_out_blocks, read_text

_VOCABULARY = 256
_EVALUATION_BATCH = 64
_EVALUATION_WINDOWS = 512

# size: (embedding, hidden units, layers)
_LSTM: Final[dict[Size, tuple[int, int, int]]] = {
    "tiny": (64, 112, 1),
    "small": (128, 416, 1),
    "medium": (256, 590, 2),
    "large": (512, 1340, 2),
}
# size: (width, heads, layers)
_TRANSFORMER: Final[dict[Size, tuple[int, int, int]]] = {
    "tiny": (64, 4, 2),
    "small": (140, 4, 4),
    "medium": (256, 8, 6),
    "large": (512, 8, 8),
}


class CharlmOptions(SizedOptions):
    """Options of `charlm`."""

    lr: float = Field(0.003, gt=0, description="learning rate; try 1.0 with optimizer=sgd")
    path: AbsolutePath | None = Field(
        None, description="text file or directory; default: the source of Python's standard library"
    )
    model: Literal["lstm", "transformer"] = Field("lstm", description="network")
    optimizer: Literal["adam", "sgd"] = Field("adam", description="optimizer")
    momentum: float = Field(
        0.9,
        ge=0,
        lt=1,
        description="of sgd; 0 where the strategy's momentum_correction takes its place",
    )
    window: int = Field(64, ge=2, le=4096, description="bytes read before the gradient is cut")
    max_bytes: int = Field(2_000_000, ge=65_536, description="the text is cut here")


class Charlm(Task):
    """Next-byte prediction on source code or any text."""

    name = "charlm"
    summary = (
        "next-character prediction on a text (default: Python's standard library), LSTM or"
        " transformer, bits per character"
    )
    metric_name = "bits_per_character"
    higher_is_better = False
    default_epochs = 1
    options_type = CharlmOptions
    options: CharlmOptions

    def __init__(self, options: TaskOptions) -> None:
        super().__init__(options)
        check_path(self.options.path)

    @cached_property
    def windows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Bytes to train on and held out, uint8, shape (windows, window + 1) each."""
        text = np.frombuffer(read_text(self.options.path, self.options.max_bytes), dtype=np.uint8)
        length = self.options.window + 1
        held_out = held_out_blocks(len(text))
        train, test = (cut(text[part], length) for part in (~held_out, held_out))
        if len(train) == 0 or len(test) == 0:
            raise ConfigError(
                f"the text has {len(text)} bytes, too few for windows of {length}; give a longer"
                " one or --set window=..."
            )
        spread = np.linspace(0, len(test) - 1, min(len(test), _EVALUATION_WINDOWS)).astype(np.int64)
        return torch.from_numpy(train), torch.from_numpy(test[spread])

    @property
    def num_samples(self) -> int:
        return len(self.windows[0])

    def model(self) -> nn.Module:
        if self.options.model == "lstm":
            return LstmModel(*_LSTM[self.options.size])
        return TransformerModel(*_TRANSFORMER[self.options.size], window=self.options.window)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.options.optimizer == "sgd":
            return torch.optim.SGD(
                model.parameters(), lr=self.options.lr, momentum=self.options.momentum
            )
        return torch.optim.Adam(model.parameters(), lr=self.options.lr)

    def batch(self, samples: NDArray[np.int64]) -> Batch:
        return _shifted(self.windows[0][torch.from_numpy(samples)])

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        inputs, targets = dense(batch)
        return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        held_out = self.windows[1]

        def total(part: slice) -> float:
            return self.loss(model, _shifted(held_out[part])).item() * len(held_out[part])

        nats = mean_over_batches(len(held_out), _EVALUATION_BATCH, total)
        return nats / math.log(2)


class LstmModel(nn.Module):
    """Embedding, LSTM, linear: bytes (batch, time) int64 to scores (batch, time, 256)."""

    def __init__(self, embedding: int, hidden: int, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, embedding)
        self.lstm = nn.LSTM(embedding, hidden, num_layers, batch_first=True)
        self.scores = nn.Linear(hidden, _VOCABULARY)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.embedding(inputs))
        scores: torch.Tensor = self.scores(states)
        return scores


class TransformerModel(nn.Module):
    """Pre-norm decoder without dropout: bytes (batch, time <= window) int64 to scores (batch, time,
    256).

    Args:
        width: of the residual stream; a multiple of `num_heads`.
        num_heads: of attention.
        num_layers: of the decoder.
        window: the longest input, in bytes.
    """

    def __init__(self, width: int, num_heads: int, num_layers: int, *, window: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(window, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, num_heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, num_layers, norm=nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.scores = nn.Linear(width, _VOCABULARY)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time = inputs.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(time, device=inputs.device)
        states = self.layers(
            self.embedding(inputs) + self.position[:time], mask=mask, is_causal=True
        )
        scores: torch.Tensor = self.scores(states)
        return scores


def _shifted(windows: torch.Tensor) -> Batch:
    numbers = windows.long()
    return numbers[:, :-1], numbers[:, 1:]
