"""Seconds of computing from a trace of torch.profiler (`export_chrome_trace`), as a GPU box wrote
it.

    autograd::engine::evaluate_function: ...            the backward pass, from the first of these
    ... torch::autograd::AccumulateGrad                 a gradient is ready
    Optimizer.step#SGD.step                             the optimizer; its end is the step's

Operations run on the host. Where they launched kernels, a pass ends when its last kernel does.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from offbeat.errors import ConfigError
from offbeat_lab.plan.profile import ModelProfile, Source, TimedBatch

_BACKWARD: Final = "autograd::engine::evaluate_function: "
_ACCUMULATE: Final = "AccumulateGrad"
_OPTIMIZER: Final = "Optimizer.step#"
_ON_DEVICE: Final = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_MOST_BYTES: Final = 1 << 31


@dataclass(frozen=True, kw_only=True, slots=True)
class _Event:
    """Seconds, on the trace's clock."""

    name: str
    category: str
    begin_s: float
    end_s: float
    correlation: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedStep:
    """One step of a trace.

    Attributes:
        forward_s, backward_s, optimizer_s: as in `ModelProfile`.
        ready: of each gradient in the order in which they came, as a share of the backward pass.
    """

    forward_s: float
    backward_s: float
    optimizer_s: float
    ready: tuple[float, ...]


def profile_from_trace(
    path: Path, like: ModelProfile, *, batch_size: int, device: str
) -> ModelProfile:
    """`like`, with the seconds of a trace of the same model on another device.

    Args:
        path: of the trace, .json or .json.gz.
        like: the model's profile, for its tensors and for what copies and selection cost.
        batch_size: of the traced steps.
        device: that was traced, for people.

    Raises:
        ConfigError: the file is no trace, has no whole step, or is of another model.
    """
    if batch_size < 1:
        raise ConfigError(f"--batch-size is {batch_size}; allowed is 1 or more")
    events = read_trace(path)
    steps = traced_steps(events, path)
    counts = {len(step.ready) for step in steps}
    tensors = like.tensors
    if counts == {len(tensors)}:
        # Gradients come in the reverse order of the model, as a rule.
        shares = [median(parts) for parts in zip(*(step.ready for step in steps), strict=True)]
        tensors = tuple(
            replace(tensor, ready=share)
            for tensor, share in zip(tensors, reversed(shares), strict=True)
        )
    elif counts != {0}:
        raise ConfigError(
            f"{path} has steps with {' or '.join(map(str, sorted(counts)))} gradients, and profile"
            f" {like.name!r} has {len(tensors)} parameters; give the profile of the traced model"
        )
    batch = TimedBatch(
        batch_size=batch_size,
        forward_s=median(step.forward_s for step in steps),
        backward_s=median(step.backward_s for step in steps),
    )
    source = f"{path.name}: {len(steps)} steps traced by torch.profiler on {device}"
    replaced = ("batches", "optimizer_s")
    return replace(
        like,
        device=device,
        on_gpu=any(event.category in _ON_DEVICE for event in events),
        batches=(batch,),
        optimizer_s=median(step.optimizer_s for step in steps),
        tensors=tensors,
        spread=0.0,
        checked=(),
        sources=(
            *(Source(field=field, source=source) for field in replaced),
            *(one for one in like.sources if one.field not in replaced),
        ),
    )


def read_trace(path: Path) -> list[_Event]:
    """The complete events of a trace, by their begin.

    Raises:
        ConfigError: the file cannot be read, or is no trace.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ConfigError(f"{path} is larger than 2 GiB; trace fewer steps")
        trace = json.loads(content)
        events = [_event(one) for one in trace["traceEvents"] if one.get("ph") == "X"]
    except OSError as error:
        raise ConfigError(f"cannot read trace {path}: {error.strerror or error}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ConfigError(
            f"{path} is no trace; torch.profiler's export_chrome_trace writes one"
        ) from None
    return sorted(events, key=lambda event: event.begin_s)


def _event(one: Mapping[str, Any]) -> _Event:
    begin_s = float(one["ts"]) / 1e6
    arguments = one.get("args", {})
    correlation = arguments.get("correlation")
    return _Event(
        name=str(one["name"]),
        category=str(one.get("cat", "")),
        begin_s=begin_s,
        end_s=begin_s + float(one["dur"]) / 1e6,
        correlation=correlation if isinstance(correlation, int) else None,
    )


def traced_steps(events: Sequence[_Event], path: Path) -> list[TracedStep]:
    """All steps but the first, whose beginning was not traced.

    Raises:
        ConfigError: there is none.
    """
    operations = [e for e in events if e.category == "cpu_op"]
    backward = [e for e in operations if e.name.startswith(_BACKWARD)]
    optimizers = [
        e for e in events if e.name.startswith(_OPTIMIZER) and e.category == "user_annotation"
    ]
    kernels = _Kernels(events)
    begins_s = [e.begin_s for e in operations[:1]] + [e.end_s for e in optimizers]
    ends_s = [e.end_s for e in optimizers]
    spans_s = list(zip(begins_s, ends_s, strict=False))
    steps = []
    for step_begin_s, step_end_s in spans_s[1:] or spans_s:
        passes = [e for e in backward if step_begin_s <= e.begin_s and e.end_s <= step_end_s]
        if not passes:
            continue
        begin_s = passes[0].begin_s
        forward_end_s = kernels.end_s(step_begin_s, begin_s)
        pass_end_s = max(event.end_s for event in passes)
        backward_end_s = max(forward_end_s, kernels.end_s(begin_s, pass_end_s))
        end_s = kernels.end_s(pass_end_s, step_end_s)
        # What the device still has to do of the step before is not of this one.
        started_s = max(step_begin_s, min(forward_end_s, kernels.busy_until_s(step_begin_s)))
        backward_s = backward_end_s - forward_end_s
        if backward_s <= 0 or forward_end_s <= started_s:
            continue
        ready = tuple(
            min(
                1.0,
                max(0.0, kernels.end_s(event.begin_s, event.end_s) - forward_end_s) / backward_s,
            )
            for event in passes
            if event.name.endswith(_ACCUMULATE)
        )
        steps.append(
            TracedStep(
                forward_s=forward_end_s - started_s,
                backward_s=backward_s,
                optimizer_s=max(0.0, end_s - backward_end_s),
                ready=ready,
            )
        )
    if not steps:
        raise ConfigError(
            f"{path} has no whole step: {len(backward)} operations of backward passes and"
            f" {len(optimizers)} steps of optimizers; trace several steps of training"
        )
    return steps


class _Kernels:
    """When what the host launched has ended on the device."""

    def __init__(self, events: Sequence[_Event]) -> None:
        ends: dict[int, float] = {}
        for event in events:
            if event.category in _ON_DEVICE and event.correlation is not None:
                ends[event.correlation] = max(event.end_s, ends.get(event.correlation, 0.0))
        launches = [
            (event.begin_s, ends[event.correlation])
            for event in events
            if event.category in ("cuda_runtime", "cuda_driver") and event.correlation in ends
        ]
        self._begins_s = [begin_s for begin_s, _ in launches]
        self._ends_s = [end_s for _, end_s in launches]

    def end_s(self, begin_s: float, end_s: float) -> float:
        """When everything launched from `begin_s` to `end_s` has ended, and the host has."""
        first, last = (bisect_right(self._begins_s, at_s) for at_s in (begin_s, end_s))
        return max([end_s, *self._ends_s[first:last]])

    def busy_until_s(self, at_s: float) -> float:
        """When everything launched before `at_s` has ended."""
        return max(self._ends_s[: bisect_right(self._begins_s, at_s)], default=at_s)
