"""`text`: predict the next byte or word of a text with a small GPT.

Parameters with bytes: tiny 120,576, small 1,049,184, medium 4,820,992, large 25,383,936; words add
width x (vocabulary - 256) to that.

`charlm`: `text` with an LSTM, or a transformer whose embeddings are not tied, and a constant
learning rate.

Parameters with bytes, LSTM: tiny 125,056, small 1,048,064, medium 5,007,632, large 24,787,328;
transformer: tiny 137,216, small 1,029,256, medium 4,886,784, large 25,515,264.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from functools import cached_property
from typing import Any, ClassVar, Final, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import nn
from typing_extensions import override

from offbeat.errors import ConfigError
from offbeat_lab.tasks.base import Batch, Size, mean_over_batches
from offbeat_lab.tasks.corpus import cut, held_out_blocks, read_text
from offbeat_lab.tasks.gpt import SHAPES, Gpt, GptOptions, GptTask
from offbeat_lab.tasks.training import LrSchedule, LrWarmup, MaxGradNorm, Optimizer

Tokens: TypeAlias = NDArray[np.unsignedinteger[Any]]

_NUM_BYTES = 256
_EVALUATION_BATCH = 64
_EVALUATION_WINDOWS = 512
_WORD = re.compile(rb"\w+|\s+|[^\w\s]")


class TextOptions(GptOptions):
    """Options of `text`."""

    tokens: Literal["bytes", "words"] = Field("bytes", description="what is predicted")
    vocabulary: int = Field(
        4096, ge=2, le=65_535, description="with words: how many are told apart, the usual ones"
    )
    window: int = Field(64, ge=2, le=4096, description="tokens that the model sees at once")


class Text(GptTask):
    """Next-token prediction on any text."""

    name = "text"
    summary = (
        "next-token prediction on a text (default: Python's standard library), small GPT with tied"
        " embeddings, bits per token"
    )
    metric_name = "bits_per_token"
    options_type: ClassVar[type[TextOptions]] = TextOptions
    options: TextOptions

    @property
    def vocabulary(self) -> int:
        """Number of tokens; with words, one of them stands for all rare ones."""
        return _NUM_BYTES if self.options.tokens == "bytes" else self.options.vocabulary

    @cached_property
    def windows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens to train on and held out, int32, shape (windows, window + 1) each."""
        text = np.frombuffer(read_text(self.options.path, self.options.max_bytes), dtype=np.uint8)
        held_out = held_out_blocks(len(text))
        length = self.options.window + 1
        parts: list[Tokens] = [text[~held_out], text[held_out]]
        if self.options.tokens == "words":
            parts = _words(*(part.tobytes() for part in parts), vocabulary=self.vocabulary)
        train, test = (cut(part, length) for part in parts)
        if len(train) == 0 or len(test) == 0:
            raise ConfigError(
                f"the text has {len(text)} bytes, too few for windows of {length} tokens; give a"
                " longer one or --set window=..."
            )
        spread = np.linspace(0, len(test) - 1, min(len(test), _EVALUATION_WINDOWS)).astype(np.int64)
        return (
            torch.from_numpy(train.astype(np.int32)),
            torch.from_numpy(test[spread].astype(np.int32)),
        )

    @property
    @override
    def num_samples(self) -> int:
        return len(self.windows[0])

    @override
    def model(self) -> nn.Module:
        return Gpt(self.vocabulary, *SHAPES[self.options.size], window=self.options.window)

    @override
    def batch(self, samples: NDArray[np.int64]) -> Batch:
        return _shifted(self.windows[0][torch.from_numpy(samples)])

    @override
    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        held_out = self.windows[1]

        def total(part: slice) -> float:
            return self.loss(model, _shifted(held_out[part])).item() * len(held_out[part])

        return mean_over_batches(len(held_out), _EVALUATION_BATCH, total) / math.log(2)


def _shifted(windows: torch.Tensor) -> Batch:
    numbers = windows.long()
    return numbers[:, :-1], numbers[:, 1:]


def _words(train: bytes, held_out: bytes, *, vocabulary: int) -> list[Tokens]:
    """Numbers of words, runs of white space and marks, the most frequent ones of `train` from 1 on,
    0 for all others.
    """
    found = [_WORD.findall(part) for part in (train, held_out)]
    # Equal counts are ordered by the word, so that every rank numbers alike.
    ranked = sorted(Counter(found[0]).items(), key=lambda item: (-item[1], item[0]))
    numbers = {word: number for number, (word, _) in enumerate(ranked[: vocabulary - 1], start=1)}
    return [np.array([numbers.get(word, 0) for word in part], dtype=np.uint16) for part in found]


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


class CharlmOptions(TextOptions):
    """Options of `charlm`."""

    lr: float = Field(0.003, gt=0, description="learning rate; try 1.0 with optimizer=sgd")
    model: Literal["lstm", "transformer"] = Field("lstm", description="network")
    optimizer: Optimizer = "adam"
    lr_schedule: LrSchedule = "constant"
    lr_warmup: LrWarmup = 0.0
    max_grad_norm: MaxGradNorm = None


class Charlm(Text):
    """Next-byte prediction on source code or any text."""

    name = "charlm"
    summary = (
        "next-character prediction on a text (default: Python's standard library), LSTM or"
        " transformer, bits per character"
    )
    metric_name = "bits_per_character"
    options_type = CharlmOptions
    options: CharlmOptions

    @override
    def model(self) -> nn.Module:
        options = self.options
        if options.model == "lstm":
            return LstmModel(self.vocabulary, *_LSTM[options.size])
        return TransformerModel(self.vocabulary, *_TRANSFORMER[options.size], window=options.window)


class LstmModel(nn.Module):
    """Embedding, LSTM, linear: tokens (batch, time) int64 to scores (batch, time, vocabulary)."""

    def __init__(self, vocabulary: int, embedding: int, hidden: int, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, num_layers, batch_first=True)
        self.scores = nn.Linear(hidden, vocabulary)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.embedding(inputs))
        scores: torch.Tensor = self.scores(states)
        return scores


class TransformerModel(nn.Module):
    """Pre-norm decoder without dropout: tokens (batch, time <= window) int64 to scores (batch,
    time, vocabulary).

    Args:
        vocabulary: number of tokens.
        width: of the residual stream; a multiple of `num_heads`.
        num_heads: of attention.
        num_layers: of the decoder.
        window: the longest input, in tokens.
    """

    def __init__(
        self, vocabulary: int, width: int, num_heads: int, num_layers: int, *, window: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(window, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, num_heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, num_layers, norm=nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.scores = nn.Linear(width, vocabulary)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time = inputs.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(time, device=inputs.device)
        states = self.layers(
            self.embedding(inputs) + self.position[:time], mask=mask, is_causal=True
        )
        scores: torch.Tensor = self.scores(states)
        return scores
