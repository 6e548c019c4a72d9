"""`charlm`: `text` with an LSTM, or a transformer whose embeddings are not tied, and a constant
learning rate.

Parameters with bytes, LSTM: tiny 125,056, small 1,048,064, medium 5,007,632, large 24,787,328;
transformer: tiny 137,216, small 1,029,256, medium 4,886,784, large 25,515,264.
"""

from __future__ import annotations

from typing import Final, Literal

import torch
from pydantic import Field
from torch import nn
from typing_extensions import override

from offbeat_lab.tasks.base import Size
from offbeat_lab.tasks.text import Text, TextOptions

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
    optimizer: Literal["sgd", "adam", "adamw"] = Field("adam", description="optimizer")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="how the learning rate goes down to 0 after the warm-up"
    )
    lr_warmup: float = Field(
        0.0, ge=0, lt=1, description="share of the run in which the learning rate rises from 0"
    )
    max_grad_norm: float | None = Field(
        None, gt=0, description="gradients are scaled down to at most this norm"
    )


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
