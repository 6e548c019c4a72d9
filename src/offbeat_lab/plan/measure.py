"""`offbeat profile --task`: solo steps of a task of the lab, timed on this machine at two batch
sizes, and what its Kronecker factors cost.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import torch

from offbeat.errors import ConfigError
from offbeat.session.attach import attach_through
from offbeat_lab.plan.factors import STRATEGY, FactorTimer
from offbeat_lab.plan.profile import ModelProfile
from offbeat_lab.plan.timing import StepTimer, profile_of
from offbeat_lab.tasks import Task, build_task


def measure_task(task: str, options: Mapping[str, object], *, steps: int) -> ModelProfile:
    """Time `steps` steps of a task at half of its batch size and at its batch size, on one thread,
    as workers of the lab have.

    Args:
        task: its name.
        options: values by name; strings are converted.
        steps: at each batch size, 1 or more.

    Raises:
        ConfigError: no such task or option, or a number of steps that is not allowed.
    """
    if steps < 1:
        raise ConfigError(f"--steps is {steps}; allowed is 1 or more")
    whole = build_task(task, options)
    if not all(parameter.requires_grad for parameter in whole.build_model(0).parameters()):
        raise ConfigError(f"task {task!r} has frozen parameters, which no profile can hold")
    size = whole.options.batch_size
    sizes = [size] if size == 1 else [size // 2, size]
    with one_thread():
        timed = [
            _time_steps(build_task(task, {**options, "batch_size": some}), steps) for some in sizes
        ]
        timer, optimizer = timed[-1]
        source = f"measured on this machine, {steps} steps, one process, one thread"
        profile = profile_of(
            task,
            [(some, one.steps) for some, (one, _) in zip(sizes, timed, strict=True)],
            timer.parameters,
            optimizers=[optimizer],
            source=source,
        )
        return _with_factors(profile, whole, source)


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes on one thread while the block runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _time_steps(task: Task, steps: int) -> tuple[StepTimer, torch.optim.Optimizer]:
    """The timer, and the optimizer that has stepped."""
    model = task.build_model(0)
    optimizer = task.optimizer(model)
    # On one thread computing is what the processor does, whoever else has it meanwhile.
    timer = StepTimer(steps, time.thread_time)
    timer.watch(list(model.parameters()))
    timer.step_begins()
    for loss in _losses(task, model, optimizer):
        timer.backward_begins()
        loss.backward()
        timer.backward_ended()
        optimizer.step()
        timer.step_ended()
        if timer.is_done:
            break
    return timer, optimizer


def _losses(task: Task, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """Of one batch after the other, over and over; gradients are zero before each."""
    for samples in cycle(task.samples(seed=0, epoch=0, world_size=1)[:, 0]):
        batch = task.training_batch(samples, seed=0, epoch=0)
        optimizer.zero_grad()
        yield task.loss(model, batch)


def _with_factors(profile: ModelProfile, task: Task, source: str) -> ModelProfile:
    """`profile` with what K-FAC costs; as it is where K-FAC covers nothing of the model."""
    model = task.build_model(0)
    optimizer = task.optimizer(model)
    try:
        timer = FactorTimer(model)
    except ConfigError:
        return profile
    with attach_through(lambda driver: driver, model, optimizer, STRATEGY) as session:
        for loss in _losses(task, model, optimizer):
            loss.backward()
            optimizer.step()
            timer.step_ended(session)
            if timer.is_done:
                break
    return timer.complete(profile, source)
