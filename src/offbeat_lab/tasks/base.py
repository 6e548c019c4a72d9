"""What a task is: a model, data that every rank reads in step, and a figure that says how good the
model has become.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from torch import nn

from offbeat.errors import ConfigError
from offbeat.xmc.rows import SparseBatch

Size: TypeAlias = Literal["tiny", "small", "medium", "large"]
AbsolutePath = Annotated[Path, AfterValidator(Path.absolute)]
"""A path that still holds when the run is resumed from another working directory."""

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor] | tuple[SparseBatch, SparseBatch]
"""Inputs and targets of the same samples."""


def num_samples_of(batch: Batch) -> int:
    inputs = batch[0]
    return inputs.num_rows if isinstance(inputs, SparseBatch) else len(inputs)


def dense(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The same batch, for a task whose batches are dense."""
    inputs, targets = batch
    assert isinstance(inputs, torch.Tensor)
    assert isinstance(targets, torch.Tensor)
    return inputs, targets


class TaskOptions(BaseModel):
    """Options that all tasks share."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    batch_size: int = Field(32, ge=1, description="samples in one worker's batch")
    lr: float = Field(
        0.05,
        gt=0,
        description="learning rate; gradients are averaged, so it holds for any number of workers",
    )


class Task(ABC):
    """One model and one data set. Constructing it checks the options and touches no data yet.

    Attributes:
        name: on the command line.
        summary: one line for people.
        metric_name: what `evaluate` measures.
        higher_is_better: whether a larger metric is the better one.
        default_epochs: passes over the data when the user does not say how many.
        options_type: the pydantic model of its options.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    metric_name: ClassVar[str]
    higher_is_better: ClassVar[bool]
    default_epochs: ClassVar[int]
    options_type: ClassVar[type[TaskOptions]]

    options: TaskOptions

    def __init__(self, options: TaskOptions) -> None:
        """Take options of type `options_type`."""
        assert isinstance(options, self.options_type)
        self.options = options

    @property
    @abstractmethod
    def num_samples(self) -> int:
        """Training samples in one epoch over all workers."""

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model, drawn from torch's default generator."""

    @abstractmethod
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer this task is trained with."""

    @abstractmethod
    def batch(self, samples: NDArray[np.int64]) -> Batch:
        """Inputs and targets of the training samples with these numbers."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean loss of one batch, a scalar with a gradient."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> float:
        """The metric on data that was held out of training."""

    def metrics(self, model: nn.Module) -> dict[str, float]:
        """The metric by its name, and whatever else is told of `model` beside it."""
        return {self.metric_name: self.evaluate(model)}

    def build_model(self, seed: int) -> nn.Module:
        """The model that `seed` determines, the same on every rank."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.model()

    def num_parameters(self) -> int:
        """Of the model, without making it."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.model().parameters())

    def steps_per_epoch(self, world_size: int) -> int:
        """Full batches each of `world_size` workers gets in one epoch, the same number for all.

        Raises:
            ConfigError: not even one.
        """
        steps = self.num_samples // (world_size * self.options.batch_size)
        if steps == 0:
            raise ConfigError(
                f"{world_size} workers with batches of {self.options.batch_size} need"
                f" {world_size * self.options.batch_size} samples a step, but task {self.name!r}"
                f" has {self.num_samples}; use fewer workers or --set batch_size=..."
            )
        return steps

    def lr_at(self, progress: float) -> float:
        """The learning rate of the step that begins at `progress`, a share of the run in [0, 1)."""
        return self.options.lr

    @property
    def deals_unequally(self) -> bool:
        """Whether `samples` gives ranks data of different distributions."""
        return False

    @property
    def max_grad_norm(self) -> float | None:
        """The largest norm of a gradient; a larger one is scaled down. None: any."""
        return None

    def training_batch(self, samples: NDArray[np.int64], *, seed: int, epoch: int) -> Batch:
        """The batch as it is trained on. A task that changes samples at random (flips, crops) draws
        the changes from (seed, epoch, first sample), so they depend on neither rank nor world size.

        Args:
            samples: numbers of training samples, at least one.
            seed: of the run, >= 0.
            epoch: passes over the data completed before this one.
        """
        return self.batch(samples)

    def samples(self, *, seed: int, epoch: int, world_size: int) -> NDArray[np.int64]:
        """Which samples each rank trains on in one epoch, shape (steps, world_size, batch_size).

        Every epoch is a fresh permutation drawn from (seed, epoch); step s takes the next
        `world_size * batch_size` samples of it and deals each rank its share. So the samples of a
        step depend on neither the rank nor what came before.

        Args:
            seed: of the run, >= 0.
            epoch: passes over the data completed before this one.
            world_size: number of ranks.
        """
        steps, size = self.steps_per_epoch(world_size), self.options.batch_size
        order = np.random.default_rng((seed, epoch)).permutation(self.num_samples)
        return order[: steps * world_size * size].reshape(steps, world_size, size)

    def batches(
        self,
        *,
        seed: int,
        epoch: int,
        rank: int,
        world_size: int,
        start_step: int = 0,
        batch_sizes: Sequence[int] | None = None,
    ) -> Iterator[Batch]:
        """This rank's batches of one epoch, from its step `start_step` on: those that `samples`
        deals to it, or as large a part of each step's samples as `batch_sizes` says.

        Args:
            seed: of the run, >= 0.
            epoch: passes over the data completed before this one.
            rank, world_size: this rank's place.
            start_step: steps of this epoch to leave out.
            batch_sizes: by rank, each >= 1, `world_size * batch_size` altogether; None: all the
                same.
        """
        dealt = self.samples(seed=seed, epoch=epoch, world_size=world_size)[start_step:]
        if batch_sizes is None:
            mine = dealt[:, rank]
        else:
            begin = sum(batch_sizes[:rank])
            mine = dealt.reshape(len(dealt), -1)[:, begin : begin + batch_sizes[rank]]
        for samples in mine:
            yield self.training_batch(samples, seed=seed, epoch=epoch)


def mean_over_batches(num_samples: int, batch_size: int, total: Callable[[slice], float]) -> float:
    """Add `total` up over consecutive slices of at most `batch_size` samples, and divide by
    `num_samples`.
    """
    slices = [
        slice(start, min(start + batch_size, num_samples))
        for start in range(0, num_samples, batch_size)
    ]
    return sum(total(part) for part in slices) / num_samples
