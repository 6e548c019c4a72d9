"""`text`: predict the next byte or word of a text with a small GPT.

Parameters with bytes: tiny 120,576, small 1,049,184, medium 4,820,992, large 25,383,936; words add
width x (vocabulary - 256) to that.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import nn
from torch.nn import functional
from typing_extensions import override

from offbeat.errors import ConfigError
from offbeat_lab.tasks.base import Batch, TaskOptions, dense, mean_over_batches
from offbeat_lab.tasks.corpus import check_path, cut, held_out_blocks, read_text
from offbeat_lab.tasks.gpt import SHAPES, Gpt, GptOptions
from offbeat_lab.tasks.training import TrainedTask

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


class Text(TrainedTask):
    """Next-token prediction on any text."""

    name = "text"
    summary = (
        "next-token prediction on a text (default: Python's standard library), small GPT with tied"
        " embeddings, bits per token"
    )
    metric_name = "bits_per_token"
    higher_is_better = False
    default_epochs = 1
    options_type: ClassVar[type[TextOptions]] = TextOptions
    options: TextOptions

    def __init__(self, options: TaskOptions) -> None:
        super().__init__(options)
        check_path(self.options.path)

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
    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        inputs, targets = dense(batch)
        return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

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
