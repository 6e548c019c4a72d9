"""Where the time of solo steps goes, from hooks on what trains.

A step ends when the optimizer's does. All of it before the backward pass counts as forward: data,
the loss, setting gradients to zero. All behind it counts as the optimizer's: clipping, schedules.
With accumulated gradients the passes of a step are added up; a gradient is ready in the last one.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from statistics import median, pstdev
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from typing_extensions import override

from offbeat.averaging.background.merge_rules import DeltaMerge
from offbeat.averaging.background.shared_model import SharedModel
from offbeat.codec.index_codecs import INDEX_CODECS, IndexCodec
from offbeat.codec.topk_codec import SELECTORS, VALUE_CODECS
from offbeat.codec.value_codecs import ValueCodec
from offbeat.session.attach import attach_through
from offbeat.simulation.training import TensorProfile
from offbeat.strategies.base import Strategy
from offbeat.strategies.gtopk import GTopK
from offbeat.strategies.powersgd import PowerSGD
from offbeat.weights.optimizer_state import OptimizerStates, names_of_merged
from offbeat_lab.plan.profile import (
    DTYPES,
    FLOAT_BYTES,
    SELECTED_CODECS,
    SELECTED_DENSITY,
    CodecCost,
    ModelProfile,
    SelectorCost,
    Source,
    TimedBatch,
)

WARM_UP_STEPS: Final = 3
"""Steps that are not timed."""

_PAUSE: Final = 5.0
"""A step that takes so many times as long as others has an evaluation, or a checkpoint, before it,
and says nothing of how much steps differ.
"""

_TIMED: Final = (
    "batches",
    "optimizer_s",
    "select_s_per_element",
    "selectors",
    "codecs",
    "copy_s_per_byte",
    "bucket_s_per_byte",
    "publish_s_per_byte",
    "mean_s_per_byte",
    "low_rank_s_per_element",
    "hook_s_per_element",
    "moments",
)
"""Fields of a profile that come from what is timed here."""

_WARM_UP_SELECTIONS: Final = 2
_MOST_ELEMENTS: Final = 1 << 25
"""That are timed: of a large model all would not fit beside it, and each takes as long."""

_MOST_LOW_RANK: Final = 1 << 28
"""Likewise, of the first tensors, since what launches kernels counts too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedStep:
    """One step.

    Attributes:
        batch_size: samples; 0: not seen.
        forward_s: until its first backward pass, and between two of them.
        backward_s: of its backward passes.
        optimizer_s: the rest.
        ready: of each parameter, when its gradient was there, as a share of `backward_s`; 1 where
            it had none.
    """

    batch_size: int
    forward_s: float
    backward_s: float
    optimizer_s: float
    ready: tuple[float, ...]

    @property
    def duration_s(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s


class StepTimer:
    """Times steps of one process. Its methods are called at the moments that they are named after.

    Args:
        num_steps: that are wanted, after `WARM_UP_STEPS`.
        now_s: the clock.

    Attributes:
        steps: that were timed.
        parameters: whose gradients are watched.
    """

    def __init__(self, num_steps: int, now_s: Callable[[], float] | None = None) -> None:
        self.steps: list[TimedStep] = []
        self.parameters: list[torch.nn.Parameter] = []
        self._num_steps = num_steps
        self._now_s = now_s or self._synchronized_s
        self._num_seen = 0
        self._mark_s: float | None = None
        self._ready_s: dict[int, float | torch.cuda.Event] = {}
        self._batch_size = 0
        self._forward_s = self._backward_s = self._begin_backward_s = 0.0
        self._ready: tuple[float, ...] = ()

    @property
    def is_done(self) -> bool:
        """Whether all steps that are wanted were timed."""
        return len(self.steps) >= self._num_steps

    def watch(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Note when their gradients are ready, from now on, but for empty ones."""
        for parameter in filter(torch.Tensor.numel, parameters):
            number = len(self.parameters)
            self.parameters.append(parameter)
            parameter.register_post_accumulate_grad_hook(
                lambda _, number=number: self._note_ready(number)
            )

    def step_begins(self) -> None:
        """What came since the last step does not count."""
        self._mark_s = self._now_s()
        self._begin_step()

    def samples_seen(self, num_samples: int) -> None:
        self._batch_size += num_samples

    def backward_begins(self) -> None:
        now_s = self._now_s()
        if self._mark_s is not None:
            self._forward_s += now_s - self._mark_s
        self._begin_backward_s = now_s
        self._ready_s.clear()
        if self._on_device:
            self._begin_event = torch.cuda.Event(enable_timing=True)
            self._begin_event.record()

    def backward_ended(self) -> None:
        now_s = self._now_s()
        duration_s = now_s - self._begin_backward_s
        whole_s = self._backward_s + duration_s
        self._ready = tuple(
            min(1.0, (self._backward_s + self._after_begin_s(number, duration_s)) / whole_s)
            if whole_s
            else 1.0
            for number in range(len(self.parameters))
        )
        self._backward_s = whole_s
        self._mark_s = now_s

    def step_ended(self) -> None:
        now_s = self._now_s()
        is_whole = self._mark_s is not None and len(self._ready) == len(self.parameters)
        if is_whole and self._backward_s and self.parameters:
            self._num_seen += 1
            if self._num_seen > WARM_UP_STEPS and not self.is_done:
                assert self._mark_s is not None
                self.steps.append(
                    TimedStep(
                        batch_size=self._batch_size,
                        forward_s=self._forward_s,
                        backward_s=self._backward_s,
                        optimizer_s=now_s - self._mark_s,
                        ready=self._ready,
                    )
                )
        self._mark_s = now_s
        self._begin_step()

    def _begin_step(self) -> None:
        self._batch_size = 0
        self._forward_s = self._backward_s = 0.0
        self._ready = ()

    @property
    def _on_device(self) -> bool:
        return any(parameter.is_cuda for parameter in self.parameters[:1])

    def _synchronized_s(self) -> float:
        if self._on_device:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _note_ready(self, number: int) -> None:
        if self._on_device:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._ready_s[number] = event
        else:
            self._ready_s[number] = self._now_s()

    def _after_begin_s(self, number: int, otherwise_s: float) -> float:
        """How long after the beginning of the pass a gradient was ready."""
        noted = self._ready_s.get(number)
        if noted is None:
            return otherwise_s
        if isinstance(noted, float):
            return noted - self._begin_backward_s
        return float(self._begin_event.elapsed_time(noted)) / 1e3


def profile_of(
    name: str,
    batches: Sequence[tuple[int, Sequence[TimedStep]]],
    parameters: Sequence[torch.nn.Parameter],
    *,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    frozen_bytes: float = 0.0,
    source: str,
) -> ModelProfile:
    """The profile that timed steps come to; what copies and selection cost is timed here.

    Args:
        name: for people.
        batches: sizes, ascending, with their steps; the last one is planned for.
        parameters: in the order of the model.
        optimizers: that have stepped with them.
        frozen_bytes: of weights of the model that are not trained.
        source: where the numbers come from.
    """
    steps = batches[-1][1]
    device = parameters[0].device
    num_elements = sum(parameter.numel() for parameter in parameters)
    mean_bytes = sum(parameter.nbytes for parameter in parameters) / num_elements
    usual_step_s = median(step.duration_s for step in steps)
    durations_s = [s for s in (step.duration_s for step in steps) if s <= _PAUSE * usual_step_s]
    few = min(num_elements, _MOST_ELEMENTS)
    before = accumulate((parameter.numel() for parameter in parameters), initial=0)
    first = [p for p, above in zip(parameters, before, strict=False) if above < _MOST_LOW_RANK]
    low_rank_s, further_s = time_low_rank(first, own_low_rank_s)
    hook_one_s, hook_further_s = time_low_rank(first, hook_s)
    ready = [median(shares) for shares in zip(*(step.ready for step in steps), strict=True)]
    return ModelProfile(
        name=name,
        device=device_name(device),
        on_gpu=device.type == "cuda",
        element_bytes=min(DTYPES, key=lambda each: abs(each - mean_bytes)),
        batches=tuple(
            TimedBatch(
                batch_size=size,
                forward_s=median(step.forward_s for step in some),
                backward_s=median(step.backward_s for step in some),
            )
            for size, some in batches
        ),
        optimizer_s=median(step.optimizer_s for step in steps),
        tensors=tuple(
            TensorProfile(
                num_elements=parameter.numel(),
                ready=share,
                rows=parameter.shape[0] if parameter.ndim > 1 else parameter.numel(),
            )
            for parameter, share in zip(parameters, ready, strict=True)
        ),
        select_s_per_element=_select_s_per_element(parameters, "exact"),
        selectors=tuple(
            SelectorCost(name=name, s_per_element=_select_s_per_element(parameters, name))
            for name in SELECTORS
            if name != "exact"
        ),
        codecs=time_codecs(),
        copy_s_per_byte=_copy_s(few, device) / (FLOAT_BYTES * few),
        bucket_s_per_byte=_bucket_s(few, device) / (FLOAT_BYTES * few),
        publish_s_per_byte=_publish_s(few, device) / (FLOAT_BYTES * few),
        mean_s_per_byte=_mean_s(few) / (FLOAT_BYTES * few),
        low_rank_s_per_element=low_rank_s,
        low_rank_s_per_element_and_rank=further_s,
        hook_s_per_element=hook_one_s,
        hook_s_per_element_and_rank=hook_further_s,
        spread=pstdev(durations_s) * len(durations_s) / sum(durations_s),
        moments=_kept_elements(optimizers, parameters) / num_elements,
        frozen_bytes=frozen_bytes,
        sources=Source.of(**dict.fromkeys(_TIMED, source)),
    )


def _kept_elements(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Sequence[torch.nn.Parameter]
) -> int:
    """Elements of the optimizers' states that an average of models may take along."""
    num_kept = 0
    for optimizer in optimizers:
        states = OptimizerStates(optimizer, parameters)
        presence = states.presence()
        num_kept += sum(
            tensor.numel()
            for name in names_of_merged(presence)
            for tensor, is_there in zip(states.tensors(name), presence[name], strict=True)
            if is_there
        )
    return num_kept


def device_name(device: torch.device) -> str:
    """For people: the GPU's name, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


class _Gradients(torch.nn.Module):
    """Parameters whose gradients are what its forward pass is given."""

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList([torch.zeros_like(one) for one in like])

    @override
    def forward(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        products = [(p * g).sum() for p, g in zip(self.parts, gradients, strict=True)]
        return torch.stack(products).sum()


def _select_s_per_element(parameters: Sequence[torch.nn.Parameter], selector: str) -> float:
    """What gTop-k computes in a step at `SELECTED_DENSITY`, in a world of one: momentum, residual,
    selection by `selector`, coding, and putting the result in place.
    """
    num_elements, device = sum(p.numel() for p in parameters), parameters[0].device
    like = [p.detach() for p in parameters]
    if num_elements > _MOST_ELEMENTS:
        like = [torch.empty(_MOST_ELEMENTS, device=device)]
        num_elements = _MOST_ELEMENTS
    strategy = GTopK(
        density=SELECTED_DENSITY,
        collective="all_gather",
        codec="+".join((selector, *SELECTED_CODECS)),
    )
    return _added_s(like, strategy) / num_elements


def _added_s(like: Sequence[torch.Tensor], strategy: Strategy) -> float:
    """What `strategy` adds to a step of parameters such as `like`, in a world of one."""
    device = like[0].device
    model = _Gradients(like)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    gradients = [torch.randn(one.shape, device=device) for one in like]

    def step() -> None:
        optimizer.zero_grad()
        model(gradients).backward()
        optimizer.step()

    step()
    without_s = usual_s(step, device)
    with attach_through(
        lambda driver: driver, model, optimizer, strategy, replica_check_interval=0
    ):
        for _ in range(_WARM_UP_SELECTIONS):
            step()
        with_it_s = usual_s(step, device)
    return max(0.0, with_it_s - without_s)


def _copy_s(num_elements: int, device: torch.device) -> float:
    """To where messages leave from: the host's memory."""
    on_gpu = device.type == "cuda"
    source = torch.zeros(num_elements, device=device)
    target = torch.empty(num_elements, pin_memory=on_gpu)
    return usual_s(lambda: target.copy_(source), device)


def _bucket_s(num_elements: int, device: torch.device) -> float:
    """From one place of the device's memory to another."""
    source, target = torch.zeros(2, num_elements, device=device)
    return usual_s(lambda: target.copy_(source), device)


def _mean_s(num_elements: int) -> float:
    """As averages of a few ranks are made: what has arrived, times its weight, added to a sum."""
    arrived = bytes(FLOAT_BYTES * num_elements)
    total = np.zeros(num_elements, dtype=np.float32)

    def add() -> None:
        nonlocal total
        total += np.frombuffer(arrived, dtype=np.float32) * 0.5

    return usual_s(add, torch.device("cpu"))


def _publish_s(num_elements: int, device: torch.device) -> float:
    """As WAGMA's trainer does: publish the model if it is finite, and write it."""
    model = torch.zeros(num_elements, device=device)
    counters = np.zeros(0, np.int64)
    trainer = SharedModel(partial(DeltaMerge, statistics=[]))
    trainer.begin(model.cpu().numpy().copy(), counters, step=0)

    def publish() -> None:
        values = model.cpu()
        trainer.advance([values.numpy()], counters)
        model.copy_(torch.from_numpy(trainer.take()[0]))

    return usual_s(publish, device)


_ENTRIES: Final = 1 << 16


def time_codecs() -> tuple[CodecCost, ...]:
    """Value codecs and index codecs by name, on entries at random places at `SELECTED_DENSITY`."""
    draws = np.random.default_rng(0)
    indices = np.cumsum(draws.geometric(SELECTED_DENSITY, _ENTRIES)).astype(np.int64)
    values = draws.standard_normal(_ENTRIES).astype(np.float32)
    num_elements = int(indices[-1]) + 1

    def code_indices(codec: IndexCodec) -> None:
        layout, coded = codec.encode(indices, num_elements)
        codec.decode(layout, coded.view(np.uint8), _ENTRIES, num_elements)

    def code_values(codec: ValueCodec) -> None:
        codec.decode(codec.encode(values).view(np.uint8), _ENTRIES)

    return (
        *(_cost(name, partial(code_values, codec)) for name, codec in VALUE_CODECS.items()),
        *(_cost(name, partial(code_indices, codec)) for name, codec in INDEX_CODECS.items()),
    )


def _cost(name: str, both: Callable[[], None]) -> CodecCost:
    both()  # the first call compiles
    return CodecCost(name=name, s_per_entry=usual_s(both, torch.device("cpu")) / _ENTRIES)


_RANKS: Final = (1, 4)


def time_low_rank(
    parameters: Sequence[torch.nn.Parameter],
    seconds: Callable[[Sequence[torch.nn.Parameter], int], float],
) -> tuple[float, float]:
    """Seconds for each element of the model: at rank 1, and what each further rank adds.

    Args:
        parameters: of the model.
        seconds: what an exchange of them takes at a rank: `own_low_rank_s` or `hook_s`.
    """
    num_elements = sum(parameter.numel() for parameter in parameters)
    at_one_s, at_four_s = (seconds(parameters, rank) for rank in _RANKS)
    further_s = max(0.0, at_four_s - at_one_s) / (_RANKS[1] - _RANKS[0])
    return at_one_s / num_elements, further_s / num_elements


def own_low_rank_s(parameters: Sequence[torch.nn.Parameter], rank: int) -> float:
    """What `PowerSGD` adds to a step: its products, and orthogonalising."""
    return _added_s([parameter.detach() for parameter in parameters], PowerSGD(rank=rank))


def hook_s(parameters: Sequence[torch.nn.Parameter], rank: int) -> float:
    """What torch's hook takes: the fastest of a few calls, all gradients in one bucket, as in
    `offbeat_lab.native`.
    """
    device = parameters[0].device
    bucket = _Bucket(parameters)
    state = powerSGD_hook.PowerSGDState(
        process_group=_GroupOfOne(), matrix_approximation_rank=rank, start_powerSGD_iter=2
    )
    gradient = torch.randn_like(bucket.flat)

    def call() -> None:
        bucket.flat.copy_(gradient)
        powerSGD_hook.powerSGD_hook(state, bucket).wait()  # type: ignore[arg-type]  # has what it asks for

    # Two calls come before the first approximation, which makes room for all others.
    for _ in range(3):
        call()
    copied_s = usual_s(lambda: bucket.flat.copy_(gradient), device)
    return max(0.0, usual_s(call, device) - copied_s)


class _Bucket:
    """What the hook asks a `torch.distributed.GradBucket` for."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        first = parameters[0]
        self.flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        self._gradients = [
            part.view(parameter.shape if parameter.ndim else (1,))
            for part, parameter in zip(self.flat.split(sizes), parameters, strict=True)
        ]

    def buffer(self) -> torch.Tensor:
        return self.flat

    def gradients(self) -> list[torch.Tensor]:
        return self._gradients

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


class _GroupOfOne(dist.ProcessGroup):
    """Its all-reduce leaves tensors as they are."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # torch's stubs lack what subclasses call

    @override
    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        return _Over(tensors)


class _Over(dist.Work):
    """What is done before it is asked for."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(tensors)

    @override
    def wait(self, timeout: Any = None) -> bool:
        return True

    @override
    def get_future(self) -> Any:
        return self._future


_REPEATS: Final = 5

_CACHE_ELEMENTS: Final = 1 << 22
"""As much float32 as a core's caches hold, and more."""


def usual_s(call: Callable[[], Any], device: torch.device) -> float:
    """The median of a few calls, in seconds. On a CPU it is the time of the processor, which other
    processes hardly lengthen. Between two calls other memory is written to, since a step finds
    little of what it needs in the caches.
    """
    on_gpu = device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.thread_time
    elsewhere = torch.empty(_CACHE_ELEMENTS, device=device)
    durations_s = []
    for _ in range(_REPEATS):
        elsewhere.zero_()
        if on_gpu:
            torch.cuda.synchronize(device)
        begun_s = clock()
        call()
        if on_gpu:
            torch.cuda.synchronize(device)
        durations_s.append(clock() - begun_s)
    return median(durations_s)
