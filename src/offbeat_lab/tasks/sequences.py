"""`sequences`: predict the next byte of sequences of many lengths, so that steps take unequal times
by the data alone.

A sequence is a paragraph of a text: what stands between two empty lines. A batch is as long as its
longest sequence. Batches hold sequences of similar lengths, as in machine translation, so a worker
with short ones waits for another with long ones: the second motivation of WAGMA-SGD (arXiv
2005.00124, section I).

Parameters: tiny 149,248, small 1,113,696, medium 4,935,680, large 25,613,312.
"""

from __future__ import annotations

import math
import re
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import nn
from typing_extensions import override

from offbeat.errors import ConfigError
from offbeat_lab.tasks.base import Batch, TaskOptions
from offbeat_lab.tasks.corpus import read_text
from offbeat_lab.tasks.gpt import SHAPES, Gpt, GptOptions, GptTask

_NUM_BYTES = 256
_HELD_OUT_EVERY = 20
_PADDING = -100
"""Target of a place behind a sequence's end, which no loss counts; what `cross_entropy` ignores."""

_EVALUATION_BATCH = 32
_EVALUATION_SEQUENCES = 512
_STEPS_SORTED = 16
"""Sequences of so many steps are sorted by length before they are cut into batches."""


class SequencesOptions(GptOptions):
    """Options of `sequences`."""

    shortest: int = Field(16, ge=2, description="bytes; shorter sequences are left out")
    longest: int = Field(512, ge=16, le=4096, description="bytes; longer sequences are cut")
    bucketed: bool = Field(True, description="whether batches hold sequences of similar lengths")


class Sequences(GptTask):
    """Next-byte prediction on paragraphs."""

    name = "sequences"
    summary = (
        "next-byte prediction on paragraphs of many lengths (default: Python's standard library),"
        " small GPT, steps uneven by the data, bits per byte"
    )
    metric_name = "bits_per_byte"
    options_type = SequencesOptions
    options: SequencesOptions

    def __init__(self, options: TaskOptions) -> None:
        super().__init__(options)
        if self.options.shortest >= self.options.longest:
            raise ConfigError(
                f"shortest={self.options.shortest} and longest={self.options.longest}; shortest"
                " must be less"
            )

    @cached_property
    def sequences(self) -> tuple[list[bytes], list[bytes]]:
        """To train on and held out."""
        text = read_text(self.options.path, self.options.max_bytes)
        found = [
            part[: self.options.longest + 1]
            for part in re.split(rb"\r?\n[ \t]*\r?\n", text)
            if len(part) > self.options.shortest
        ]
        train = [part for number, part in enumerate(found) if (number + 1) % _HELD_OUT_EVERY]
        test = found[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]
        if not test:
            raise ConfigError(
                f"the text has {len(found)} paragraphs of more than {self.options.shortest} bytes,"
                f" at least {_HELD_OUT_EVERY} are needed; give a longer one, or --set shortest=..."
            )
        spread = np.linspace(0, len(test) - 1, min(len(test), _EVALUATION_SEQUENCES))
        return train, [test[number] for number in spread.astype(np.int64)]

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Bytes of each sequence to train on."""
        return np.array([len(part) for part in self.sequences[0]], dtype=np.int64)

    @property
    @override
    def num_samples(self) -> int:
        return len(self.sequences[0])

    @override
    def model(self) -> nn.Module:
        return Gpt(_NUM_BYTES, *SHAPES[self.options.size], window=self.options.longest)

    @override
    def samples(self, *, seed: int, epoch: int, world_size: int) -> NDArray[np.int64]:
        dealt = super().samples(seed=seed, epoch=epoch, world_size=world_size)
        if not self.options.bucketed:
            return dealt
        batches = dealt.reshape(-1, self.options.batch_size)
        draw = np.random.default_rng((seed, epoch, 1))
        chunk = _STEPS_SORTED * world_size
        for first in range(0, len(batches), chunk):
            numbers = batches[first : first + chunk].ravel()
            by_length = numbers[np.argsort(self.lengths[numbers], kind="stable")]
            sorted_batches = by_length.reshape(-1, self.options.batch_size)
            batches[first : first + chunk] = draw.permutation(sorted_batches)
        return batches.reshape(dealt.shape)

    @override
    def batch(self, samples: NDArray[np.int64]) -> Batch:
        return _padded([self.sequences[0][number] for number in samples])

    @override
    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        held_out = sorted(self.sequences[1], key=len)
        nats, num_bytes = 0.0, 0
        for first in range(0, len(held_out), _EVALUATION_BATCH):
            part = held_out[first : first + _EVALUATION_BATCH]
            predicted = sum(len(sequence) - 1 for sequence in part)
            nats += self.loss(model, _padded(part)).item() * predicted
            num_bytes += predicted
        return nats / num_bytes / math.log(2)


def _padded(sequences: list[bytes]) -> Batch:
    """Inputs and targets, int64, shape (sequences, bytes of the longest - 1)."""
    longest = max(map(len, sequences))
    inputs = np.zeros((len(sequences), longest - 1), dtype=np.int64)
    targets = np.full((len(sequences), longest - 1), _PADDING, dtype=np.int64)
    for row, sequence in enumerate(sequences):
        numbers = np.frombuffer(sequence, dtype=np.uint8)
        inputs[row, : len(numbers) - 1] = numbers[:-1]
        targets[row, : len(numbers) - 1] = numbers[1:]
    return torch.from_numpy(inputs), torch.from_numpy(targets)
