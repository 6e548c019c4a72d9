"""`offbeat profile --task`: solo steps of a task of the lab, timed on this machine at two batch
sizes, and what its Kronecker factors cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import fsum
from typing import Any

import torch

from offbeat.errors import ConfigError
from offbeat.kfac.blocks import Block, slots_of
from offbeat.kfac.exchange.costs import equivalent_dim, time_inversions
from offbeat.kfac.planning.iteration import Layer
from offbeat.kfac.survey import survey
from offbeat.lab.options import route
from offbeat.lab.tasks import Task, build_task
from offbeat.plan.profile import ModelProfile, Source
from offbeat.plan.timing import StepTimer, TimedStep, profile_of
from offbeat.session.attach import attach_through
from offbeat.strategies.spdkfac import SPDKFAC

_FACTOR_STEPS = 3


def measure_task(task: str, settings: Sequence[str], *, steps: int) -> ModelProfile:
    """Time `steps` steps of a task at half of its batch size and at its batch size, on one thread,
    as workers of the lab have.

    Args:
        task: its name.
        settings: options as key=value.
        steps: at each batch size, 1 or more.

    Raises:
        ConfigError: no such task or option, or a number of steps that is not allowed.
    """
    if steps < 1:
        raise ConfigError(f"--steps is {steps}; allowed is 1 or more")
    options, _ = route(task, "allreduce", settings)
    whole = build_task(task, options)
    parameters = list(whole.build_model(0).parameters())
    if not all(parameter.requires_grad for parameter in parameters):
        raise ConfigError(f"task {task!r} has frozen parameters, which no profile can hold")
    size = whole.options.batch_size
    with one_thread():
        batches = [
            (some, _time_steps(build_task(task, {**options, "batch_size": str(some)}), steps))
            for some in ([size] if size == 1 else [size // 2, size])
        ]
        source = f"measured on this machine, {steps} steps, one process, one thread"
        profile = profile_of(task, batches, parameters, source=source)
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


def _time_steps(task: Task, steps: int) -> list[TimedStep]:
    model = task.build_model(0)
    optimizer = task.optimizer(model)
    timer = StepTimer(steps)
    timer.watch(list(model.parameters()))
    samples = task.samples(seed=0, epoch=0, world_size=1)[:, 0]
    number = 0
    while not timer.is_done:
        timer.step_begins()
        batch = task.training_batch(samples[number % len(samples)], seed=0, epoch=0)
        optimizer.zero_grad()
        loss: Any = task.loss(model, batch)
        timer.backward_begins()
        loss.backward()
        timer.backward_ended()
        optimizer.step()
        timer.step_ended()
        number += 1
    return timer.steps


def _with_factors(profile: ModelProfile, task: Task, source: str) -> ModelProfile:
    """`profile` with what K-FAC costs; as it is where K-FAC covers nothing of the model."""
    model = task.build_model(0)
    optimizer = task.optimizer(model)
    # Every step has factors, and of these few none but the first inverts.
    strategy = SPDKFAC(factor_interval=1, ramp=False)
    try:
        blocks = survey(model, strategy.options()).blocks
    except ConfigError:
        return profile
    factors_s: list[float] = []
    precondition_s: list[float] = []
    positions: dict[str, int] = {}
    for block in blocks:
        block.module.register_forward_hook(partial(_note_positions, positions, block))
    with attach_through(lambda driver: driver, model, optimizer, strategy) as session:
        samples = task.samples(seed=0, epoch=0, world_size=1)[:, 0]
        for number in range(1 + _FACTOR_STEPS):
            batch = task.training_batch(samples[number % len(samples)], seed=0, epoch=0)
            optimizer.zero_grad()
            loss: Any = task.loss(model, batch)
            loss.backward()
            optimizer.step()
            if number and (noted := session.take_profile()) is not None:
                for kind, found in (("factor", factors_s), ("precondition", precondition_s)):
                    spent = (s.ended_s - s.began_s for s in noted.spans if s.kind == kind)
                    found.append(fsum(spent))
    if not factors_s:
        return profile
    return replace(
        profile,
        layers=tuple(
            Layer(
                a_dim=equivalent_dim(block.inputs),
                g_dim=equivalent_dim(block.outputs),
                num_positions=positions.get(block.name, 1),
            )
            for block in blocks
        ),
        factors_s=min(factors_s),
        precondition_s=min(precondition_s),
        inversion=time_inversions(slots_of(blocks), SPDKFAC().settings()),
        sources=(
            *profile.sources,
            *(
                Source(field=field, source=source)
                for field in ("factors_s", "precondition_s", "inversion")
            ),
        ),
    )


def _note_positions(
    positions: dict[str, int], block: Block, _: torch.nn.Module, inputs: Any, output: Any
) -> None:
    """How many outputs each of a layer's output channels has for a sample."""
    if isinstance(output, torch.Tensor) and inputs and isinstance(inputs[0], torch.Tensor):
        channels = block.matrix_shape[0] * block.matrix_shape[1]
        positions[block.name] = max(1, output.numel() // (channels * max(1, len(inputs[0]))))
