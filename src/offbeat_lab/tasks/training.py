"""How a task's model is trained: the optimizer, the course of its learning rate, clipping."""

from __future__ import annotations

import math
from typing import Annotated, Literal, TypeAlias

import torch
from pydantic import Field, model_validator
from torch import nn
from typing_extensions import override

from offbeat_lab.tasks.base import Size, Task, TaskOptions

Optimizer: TypeAlias = Annotated[Literal["sgd", "adam", "adamw"], Field(description="optimizer")]
LrSchedule: TypeAlias = Annotated[
    Literal["constant", "linear", "cosine"],
    Field(description="how the learning rate goes down to 0 after the warm-up"),
]
LrWarmup: TypeAlias = Annotated[
    float,
    Field(ge=0, lt=1, description="share of the run in which the learning rate rises from 0"),
]
MaxGradNorm: TypeAlias = Annotated[
    float | None, Field(gt=0, description="gradients are scaled down to at most this norm")
]


class TrainingOptions(TaskOptions):
    """What users set in a training loop of their own, and the size of the model."""

    size: Size = Field("tiny", description="model size: about 0.1, 1, 5 or 25 million parameters")
    optimizer: Optimizer = "sgd"
    momentum: float = Field(
        0.9,
        ge=0,
        lt=1,
        description="of sgd; 0 where the strategy's momentum_correction takes its place",
    )
    nesterov: bool = Field(False, description="whether sgd looks ahead along its momentum")
    weight_decay: float = Field(0.0, ge=0, description="of the optimizer; decoupled with adamw")
    lr_schedule: LrSchedule = "constant"
    lr_warmup: LrWarmup = 0.0
    max_grad_norm: MaxGradNorm = None

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> TrainingOptions:
        if self.nesterov and not (self.optimizer == "sgd" and self.momentum > 0):
            raise ValueError("nesterov=true needs optimizer=sgd and momentum above 0")
        return self

    def lr_at(self, progress: float) -> float:
        """The learning rate of the step that begins at `progress`, a share of the run in [0, 1)."""
        return self.lr * self._factor(min(max(progress, 0.0), 1.0))

    def _factor(self, progress: float) -> float:
        if progress < self.lr_warmup:
            return progress / self.lr_warmup
        rest = (progress - self.lr_warmup) / (1 - self.lr_warmup)
        if self.lr_schedule == "linear":
            return 1 - rest
        if self.lr_schedule == "cosine":
            return (1 + math.cos(math.pi * rest)) / 2
        return 1.0


class TrainedTask(Task):
    """A task that is trained as `TrainingOptions` say."""

    options: TrainingOptions

    @override
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Weight decay leaves vectors alone (biases, scales of normalization layers)."""
        options = self.options
        decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
        if options.weight_decay:
            groups = [
                {"params": decayed, "weight_decay": options.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ]
        else:  # one group, in the order of the model
            groups = [{"params": list(model.parameters()), "weight_decay": 0.0}]
        if options.optimizer == "sgd":
            return torch.optim.SGD(
                groups, lr=options.lr, momentum=options.momentum, nesterov=options.nesterov
            )
        kind = torch.optim.Adam if options.optimizer == "adam" else torch.optim.AdamW
        return kind(groups, lr=options.lr)

    @override
    def lr_at(self, progress: float) -> float:
        return self.options.lr_at(progress)

    @property
    @override
    def max_grad_norm(self) -> float | None:
        return self.options.max_grad_norm
