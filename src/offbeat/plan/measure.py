"""`offbeat profile`: solo steps of a task of the lab, timed on this machine at two batch sizes."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from statistics import median, pstdev
from typing import Any, NamedTuple

import torch

from offbeat.codec.residual import ErrorFeedback
from offbeat.codec.selectors import Exact
from offbeat.errors import ConfigError
from offbeat.lab.options import route
from offbeat.lab.tasks import Task, build_task
from offbeat.plan.profile import FLOAT_BYTES, ModelProfile, Source, TensorProfile, TimedBatch

_WARM_UP = 3
_REPEATS = 5


class _Steps(NamedTuple):
    """Seconds of each timed step."""

    forward_s: list[float]
    backward_s: list[float]
    optimizer_s: list[float]
    ready_s: list[list[float]]  # of each tensor, within its backward pass


def measure_task(task: str, settings: Sequence[str], *, steps: int) -> ModelProfile:
    """Time `steps` steps of a task at half of its batch size and at its batch size.

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
    size = whole.options.batch_size
    sizes = [size] if size == 1 else [size // 2, size]
    timed, last = [], None
    for batch_size in sizes:
        smaller = build_task(task, {**options, "batch_size": str(batch_size)})
        last = _time_steps(smaller, steps)
        timed.append(
            TimedBatch(
                batch_size=batch_size,
                forward_s=median(last.forward_s),
                backward_s=median(last.backward_s),
            )
        )
    assert last is not None
    parameters = list(whole.build_model(0).parameters())
    ready = [
        min(1.0, median(shares))
        for shares in (
            [ready / backward for ready, backward in zip(times, last.backward_s, strict=True)]
            for times in zip(*last.ready_s, strict=True)
        )
    ]
    num_elements = sum(parameter.numel() for parameter in parameters)
    whole_s = [
        sum(parts) for parts in zip(last.forward_s, last.backward_s, last.optimizer_s, strict=True)
    ]
    here = f"measured on this machine, {steps} steps, one process"
    return ModelProfile(
        name=task,
        device=platform.processor() or platform.machine(),
        batches=tuple(timed),
        optimizer_s=median(last.optimizer_s),
        tensors=tuple(
            TensorProfile(
                num_elements=parameter.numel(),
                ready=share,
                rows=parameter.shape[0] if parameter.ndim > 1 else parameter.numel(),
            )
            for parameter, share in zip(parameters, ready, strict=True)
        ),
        select_s_per_element=_select_s(num_elements) / num_elements,
        copy_s_per_byte=_copy_s(num_elements) / (FLOAT_BYTES * num_elements),
        spread=pstdev(whole_s) / (sum(whole_s) / len(whole_s)),
        sources=tuple(
            Source(field=field, source=here)
            for field in ("batches", "optimizer_s", "select_s_per_element", "copy_s_per_byte")
        ),
    )


def _time_steps(task: Task, steps: int) -> _Steps:
    model = task.build_model(0)
    optimizer = task.optimizer(model)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if len(parameters) != len(list(model.parameters())):
        raise ConfigError(f"task {task.name!r} has frozen parameters, which no profile can hold")
    ready: dict[int, float] = {}
    hooks = [
        parameter.register_post_accumulate_grad_hook(
            lambda _, number=number: ready.__setitem__(number, time.perf_counter())
        )
        for number, parameter in enumerate(parameters)
    ]
    samples = task.samples(seed=0, epoch=0, world_size=1)[:, 0]
    found = _Steps([], [], [], [])
    for number in range(_WARM_UP + steps):
        batch = task.training_batch(samples[number % len(samples)], seed=0, epoch=0)
        optimizer.zero_grad()
        ready.clear()
        begun_s = time.perf_counter()
        loss: Any = task.loss(model, batch)
        passed_s = time.perf_counter()
        loss.backward()
        returned_s = time.perf_counter()
        optimizer.step()
        stepped_s = time.perf_counter()
        if number >= _WARM_UP:
            found.forward_s.append(passed_s - begun_s)
            found.backward_s.append(returned_s - passed_s)
            found.optimizer_s.append(stepped_s - returned_s)
            found.ready_s.append(
                [ready.get(place, returned_s) - passed_s for place in range(len(parameters))]
            )
    for hook in hooks:
        hook.remove()
    return found


def _select_s(num_elements: int) -> float:
    """Residual and selection at density 0.001."""
    feedback = ErrorFeedback(
        num_elements, dtype=torch.float32, device=torch.device("cpu"), selector=Exact()
    )
    gradient = torch.randn(num_elements, generator=torch.Generator().manual_seed(0))
    durations_s = []
    for _ in range(_REPEATS):
        begun_s = time.perf_counter()
        feedback.stage(gradient.clone(), max(1, num_elements // 1000))
        durations_s.append(time.perf_counter() - begun_s)
        feedback.discard()
    return min(durations_s)


def _copy_s(num_elements: int) -> float:
    source, target = torch.zeros(num_elements), torch.empty(num_elements)
    durations_s = []
    for _ in range(_REPEATS):
        begun_s = time.perf_counter()
        target.copy_(source)
        durations_s.append(time.perf_counter() - begun_s)
    return min(durations_s)
