"""A small GPT: a decoder with tied embeddings, as of Radford et al. (GPT-2)."""

from __future__ import annotations

from typing import Final

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional
from typing_extensions import override

from offbeat.errors import ConfigError
from offbeat_lab.tasks.base import AbsolutePath, Batch, Size, TaskOptions, dense
from offbeat_lab.tasks.training import (
    LrSchedule,
    LrWarmup,
    MaxGradNorm,
    Optimizer,
    TrainedTask,
    TrainingOptions,
)

SHAPES: Final[dict[Size, tuple[int, int, int]]] = {
    "tiny": (64, 4, 2),
    "small": (144, 4, 4),
    "medium": (256, 8, 6),
    "large": (512, 8, 8),
}
"""Width of the residual stream, attention heads, layers."""

_INITIAL_DEVIATION = 0.02


class GptOptions(TrainingOptions):
    """Options that the tasks of this network share: how it is trained, and on what text."""

    lr: float = Field(0.003, gt=0, description="learning rate; try 0.3 with optimizer=sgd")
    optimizer: Optimizer = "adamw"
    lr_schedule: LrSchedule = "cosine"
    lr_warmup: LrWarmup = 0.1
    max_grad_norm: MaxGradNorm = 1.0
    path: AbsolutePath | None = Field(
        None, description="text file or directory; default: the source of Python's standard library"
    )
    max_bytes: int = Field(2_000_000, ge=65_536, description="the text is cut here")


class GptTask(TrainedTask):
    """Next-token prediction on a text."""

    higher_is_better = False
    default_epochs = 1
    options: GptOptions

    def __init__(self, options: TaskOptions) -> None:
        super().__init__(options)
        path = self.options.path
        if path is not None and not path.exists():
            raise ConfigError(
                f"no text at {path}; give a file or a directory with --set path=..., or leave it"
                " out"
            )

    @override
    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        inputs, targets = dense(batch)
        return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


class Gpt(nn.Module):
    """Tokens (batch, time <= window) int64 to scores (batch, time, vocabulary).

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
        self.position = nn.Embedding(window, width)
        self.blocks = nn.ModuleList(GptBlock(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, vocabulary, bias=False)
        self.scores.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # Projections into the residual stream are smaller, so that it does not grow with
                # the number of layers.
                into_stream = name.endswith(("attention_out.weight", "mlp_out.weight"))
                scale = (2 * num_layers) ** -0.5 if into_stream else 1.0
                nn.init.normal_(parameter, std=_INITIAL_DEVIATION * scale)

    @override
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores of the next token at each place."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        states = self.embedding(tokens) + self.position(places)
        for block in self.blocks:
            states = block(states)
        scores: torch.Tensor = self.scores(self.norm(states))
        return scores


class GptBlock(nn.Module):
    """Causal attention and a two-layer perceptron, each behind a LayerNorm and beside a
    shortcut.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    @override
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Shape (batch, time, width), likewise returned."""
        batch, time, width = states.shape
        projected = self.attention_in(self.attention_norm(states))
        heads = projected.view(batch, time, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        states = states + self.attention_out(attended.transpose(1, 2).reshape(batch, time, width))
        output: torch.Tensor = states + self.mlp_out(
            functional.gelu(self.mlp_in(self.mlp_norm(states)))
        )
        return output
