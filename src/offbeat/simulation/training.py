"""Training of which only the sizes and the times exist: a strategy's own callbacks, with tensors
without content, on a virtual cluster.

    build the strategy, as a session does
    for each step
        the forward pass takes its time
        gradients become ready, one after the other, as long after each other as a profile says
        the optimizer's step takes its time
    at each of these moments the callbacks get the event that a session would give them

What callbacks compute takes no time here. What they have computed by the moment at which they send
something is known by what they send: a dense operation has been copied into a vector, and is copied
out of it; entries have been selected; a vector has been published, and is added by its receiver.
Products of matrices take their time when a callback makes them. What else a plan wants of a rank,
such as layers to look into, a subclass of `SimulatedRank` gives.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Final, Protocol, TypeVar, cast

import numpy as np
import torch
from torch.distributed import HashStore
from typing_extensions import override

from offbeat.callbacks.callback import Callback, listens
from offbeat.callbacks.context import Context, Notices, stream_counter
from offbeat.codec.model_wire import bytes_at_scale
from offbeat.codec.selectors import Memory, Selection, Selector
from offbeat.codec.sparse import Sparse
from offbeat.codec.topk_codec import TopKCodec
from offbeat.codec.value_codecs import ValueCodec
from offbeat.codec.weightless import (
    WeightlessCode,
    WeightlessMessage,
    WeightlessSparse,
    WeightlessVector,
    WeightlessWire,
    weightless,
)
from offbeat.codec.wire import Wire
from offbeat.errors import ConfigError
from offbeat.membership.agreement import Generation
from offbeat.membership.generations import GenerationHost
from offbeat.simulation.virtual import VirtualCluster
from offbeat.simulation.virtual_driver import Job, VirtualThread, VirtualTicket
from offbeat.torch_private import WeightlessReads
from offbeat.transport.driver import Driver, Pending, Ticket, Wrapper
from offbeat.transport.operations import (
    AllGatherTensor,
    AllReduceTensor,
    Broadcast,
    Collective,
    Operation,
    RecvAny,
    ReduceScatterTensor,
    Send,
    Sleep,
)

T = TypeVar("T")

REMEMBERED_STEPS: Final = 250
"""A run is simulated from its beginning to here at most. Of a later step only those that go just
before it are: what is chosen in the first steps has been chosen by then.
"""

LEAD_IN: Final = 3
"""Steps before one in the middle of a run, so that what is measured in steps has been."""

_CHOICES_EVERY: Final = 500  # exchanges, by which numbers of measured exchanges are rounded
_COUNTS, _LEFT = frozenset({"num_steps", "num_averages", "exchanges", "step"}), "num_left"


class Machine(Protocol):
    """What a rank's device needs for what it does. Whoever describes one derives from it.

    Attributes:
        shared: which part of one rank's largest entries another rank has too, 0 to 1.
    """

    shared: float

    def step_begins(self, step: int) -> Collective[None]:
        """The rank begins a step, counted from 0, once it is not delayed any longer."""

    def forward_ended(self, step: int, size: float, coming_s: float) -> Collective[None]:
        """Whatever comes between the passes of a batch `size` times the usual one, where callbacks
        are going to compute for `coming_s` in the backward pass. Nothing by default.
        """
        yield Sleep(0.0)

    def computing(self, step: int, seconds: float) -> Collective[None]:
        """What takes so long on a device that is alone."""

    def copying_s(self, num_bytes: float) -> float:
        """Seconds to copy gradients or weights."""

    def selecting_s(self, num_elements: int, k: int, codec: TopKCodec) -> float:
        """Seconds to select `k` entries, and to code them."""

    def coding_s(self, num_elements: int, values: ValueCodec) -> float:
        """Seconds to code a whole vector, and to read it again."""

    def multiplying_s(self, num_elements: int, rank: int) -> float:
        """Seconds to multiply a matrix of so many elements by one of `rank` columns."""

    def publishing_s(self, num_bytes: float) -> float:
        """Seconds to bring a vector to where its messages leave from, and a result back: by
        default those of two copies.
        """
        return 2 * self.copying_s(num_bytes)

    def adding_s(self, num_bytes: float) -> float:
        """Seconds to add what a peer has sent of its vector: by default those of two copies."""
        return 2 * self.copying_s(num_bytes)

    def work_beside(self, seconds: float) -> None:
        """A thread beside the one that trains computes what takes so long. By default a core is
        there for it.
        """
        return

    def step_ended(self, step: int) -> None:
        """The rank has taken the step."""

    def lay_out(self, wire: Wire) -> WeightlessWire:
        """The arithmetic with numbers of entries in the place of `wire`."""
        return WeightlessWire(wire=wire, num_places=wire.num_elements)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorProfile:
    """One parameter.

    Attributes:
        num_elements: >= 1.
        ready: when its gradient is there, as a share of the backward pass, 0 to 1.
        rows: length of its first dimension, for what approximates it as a matrix, >= 1.
    """

    num_elements: int
    ready: float
    rows: int = 1

    @property
    def is_matrix(self) -> bool:
        """Whether it has several rows and several columns."""
        return 1 < self.rows < self.num_elements and self.num_elements % self.rows == 0


def fused(tensors: Sequence[TensorProfile], most: int) -> Sequence[TensorProfile]:
    """At most about `most` tensors in the place of `tensors`, each of some that follow each
    other: what is simulated of many ranks takes as long as there are tensors.

    Matrices become one whose factors have as many elements as theirs. What is no matrix, and what
    such a one lacks to theirs, is in the first tensor.
    """
    if len(tensors) <= most:
        return tensors
    size = sum(tensor.num_elements for tensor in tensors) / most
    groups: list[list[TensorProfile]] = [[]]
    for tensor in tensors:
        groups[-1].append(tensor)
        if sum(each.num_elements for each in groups[-1]) >= size:
            groups.append([])
    rest, found = 0, list[TensorProfile]()
    for group in filter(None, groups):
        num_elements = sum(each.num_elements for each in group)
        ready = max(each.ready for each in group)
        matrices = [each for each in group if each.is_matrix]
        if not matrices:
            found.append(TensorProfile(num_elements=num_elements, ready=ready))
            continue
        # The shorter side of the matrix with as many elements, and as many rows and columns.
        inside = sum(each.num_elements for each in matrices)
        lines = sum(each.rows + each.num_elements // each.rows for each in matrices)
        rows = round((lines - math.sqrt(lines**2 - 4 * inside)) / 2)
        whole = inside // rows * rows
        found.append(TensorProfile(num_elements=whole, ready=ready, rows=rows))
        rest += num_elements - whole
    first = [TensorProfile(num_elements=rest, ready=found[0].ready)] if rest else []
    return [*first, *found]


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What is trained, and when its gradients are there.

    Attributes:
        tensors: parameters, in the order of the model.
        forward_s: the forward pass.
        earlier_s: the part of it in which gradients of earlier batches are accumulated.
        backward_s: the backward pass.
        optimizer_s: the optimizer's step.
        moments: what the optimizer keeps of each parameter, in tensors of its size.
        dtype: of parameters and gradients.
    """

    tensors: Sequence[TensorProfile]
    forward_s: float
    backward_s: float
    optimizer_s: float
    moments: int
    dtype: torch.dtype = torch.float32
    earlier_s: float = 0.0


class Buildable(Protocol):
    """A strategy."""

    @property
    def replicas_differ(self) -> bool: ...

    @property
    def shares_samples(self) -> bool: ...

    def build(self, context: Context) -> Sequence[Callback]: ...


class SimulatedRank(VirtualThread):
    """One rank of a run. A subclass may have it do more.

    Args:
        inner: its driver of a virtual cluster.
        machine: what computes.

    Attributes:
        machine: as given.
        timeline: of a step, from `train` on.
        step: that the rank is in, counted from 0.
        encode_s: computed because of the exchange, so far, in seconds of a device that is alone.
        exchanges: those that have ended in a step, in the mean.
    """

    timeline: Timeline

    def __init__(self, inner: Driver, machine: Machine) -> None:
        super().__init__(inner)
        self.encode_s = 0.0
        self.exchanges = 0.0
        self.machine = machine
        self.step = 0
        self._published = -1
        self._moved_bytes = 0
        self._coded: WeightlessCode | None = None
        self._owed_s: defaultdict[Job | None, float] = defaultdict(float)

    def compute(self, seconds: float) -> None:
        """The clock goes on when this rank does something that others see."""
        self._owed_s[self.job] += seconds

    def encode(self, seconds: float) -> None:
        """Compute for the exchange."""
        self.encode_s += seconds
        self.compute(seconds)

    @override
    def start(self, operation: Operation, channel: int) -> Ticket:
        machine, copying_s = self.machine, 0.0
        if isinstance(
            operation, AllReduceTensor | ReduceScatterTensor | AllGatherTensor | Broadcast
        ):
            copying_s = machine.copying_s(operation.num_bytes)
        if isinstance(operation, Send) and isinstance(operation.payload, WeightlessCode):
            if operation.payload is not self._coded:  # else it is the same, for another peer
                self.encode(machine.coding_s(operation.payload.whole, operation.payload.values))
            self._coded = operation.payload
        elif isinstance(operation, Send) and isinstance(operation.payload, WeightlessVector):
            if self._published != channel:  # else it is the same, for another peer
                self.encode(machine.publishing_s(operation.payload.whole))
            self._published = channel
        self.encode(copying_s)
        self.catch_up()

        def used(result: Any) -> Any:
            if isinstance(result, WeightlessCode):  # which is only read
                self.encode(machine.coding_s(result.whole, result.values) / 2)
            else:
                is_added = isinstance(result, WeightlessVector)
                self.encode(machine.adding_s(len(result)) if is_added else copying_s)
            return result

        ticket = super().start(operation, channel)
        return VirtualTicket(ticket.done, lambda: used(ticket.wait()))

    @override
    def now_s(self, channel: int) -> float:
        self.catch_up()
        return super().now_s(channel)

    @override
    def complete(self, pending: Pending[Any]) -> None:
        self.catch_up()
        super().complete(pending)

    def computes(self) -> dict[str, Callable[..., None]]:
        """What takes time when callbacks compute it, by PyTorch's name of it."""
        return {"mm": self.multiply_thin, "addmm_": self.multiply_thin}

    def multiply_thin(self, *operands: torch.Tensor) -> None:
        """The last two of `operands` are multiplied, one of which is thin."""
        left, right = operands[-2:]
        # Of the three the product's matrix is the largest, whichever it is.
        sizes = left.numel(), right.numel(), left.shape[0] * right.shape[1]
        self.encode(self.machine.multiplying_s(max(sizes), min(*left.shape, *right.shape)))

    def _publish(self, num_bytes: int) -> None:
        self.encode(self.machine.publishing_s(num_bytes))

    @override
    def catch_up(self) -> None:
        if self.is_awake and (seconds := self._owed_s.pop(self.job, 0.0)):
            self.run(self.machine.computing(self.step, seconds), 0)

    def train(
        self, strategy: Buildable, timeline: Timeline, steps: Collection[int]
    ) -> Collective[None]:
        """Take `steps`, and no others.

        Args:
            strategy: whose callbacks get the events.
            timeline: of a step.
            steps: counted from 0, ascending; see `with_lead_in`.
        """
        self.timeline = timeline
        weightless = with_codecs(strategy, lambda codec: _WeightlessCodec(codec, self))
        return self.carry(lambda: self._train(weightless, steps))

    def _train(self, strategy: Buildable, steps: Collection[int]) -> None:
        with WeightlessReads(self.computes(), self._publish), torch.no_grad():
            model = self.model()
            parameters = {str(number): each for number, each in enumerate(model.tensors)}
            optimizer = _Optimizer(parameters.values(), self.timeline.moments)
            context = Context(
                parameters=parameters,
                driver=self,
                new_stream=stream_counter(),
                notices=_Unheard(self.rank),
                optimizer=optimizer,
                model=model,
                enter=lambda host: self.enter(host, parameters.values()),
                own_store=self.own_store,
            )
            states_bytes = optimizer.num_bytes
            callbacks = list(strategy.build(context))
            gradients = [parameter.detach() for parameter in model.tensors]
            take_step = partial(self._take_step, callbacks, model, gradients)
            before = self.take_steps(callbacks, take_step, steps)
            # Gradients that callbacks have taken into their buckets are in memory once.
            more_bytes = optimizer.num_bytes - states_bytes - self._moved_bytes
            self.look_back(callbacks, parameters.values(), more_bytes)
            self.exchanges = (_num_exchanges(callbacks) - before) / len(steps)
            if strategy.replicas_differ and not strategy.shares_samples:
                for callback in callbacks:  # of ranks that go on, none must wait for this one
                    callback.on_finish()

    def look_back(
        self, callbacks: Sequence[Callback], parameters: Iterable[torch.Tensor], more_bytes: int
    ) -> None:
        """All steps have been taken. `more_bytes`: that the optimizer and gradients take
        beyond what they did at first.
        """

    def model(self) -> SimulatedModel:
        """What is trained."""
        return SimulatedModel(self.timeline, self)

    def take_steps(
        self,
        callbacks: list[Callback],
        take_step: Callable[..., None],
        steps: Collection[int],
    ) -> float:
        """Take the steps of a run, and nothing between them.

        Args:
            callbacks: that get the events; what is added to them does too.
            take_step: takes one, with a batch so many times the usual one; 1 by default.
            steps: as of `train`.

        Returns:
            How many exchanges had ended where steps were last left out.
        """
        before, taken = 0.0, 0
        for self.step in steps:
            if self.step != taken:
                _go_on_from(callbacks, self.step)
                before = _num_exchanges(callbacks)
            taken = self.step + 1
            take_step()
        return before

    def _take_step(
        self,
        callbacks: Sequence[Callback],
        model: SimulatedModel,
        gradients: Sequence[torch.Tensor],
        size: float = 1.0,
    ) -> None:
        for callback in callbacks:
            callback.on_forward_begins(trains=True)
        self.catch_up()
        self.run(self.machine.step_begins(self.step), 0)
        model(size, [one for one in callbacks if listens(one, "on_parameters_needed")])
        self.catch_up()
        self.run(self.machine.forward_ended(self.step, size, model.coming_s), 0)
        for callback in callbacks:
            callback.on_backward_begins(synchronised=True)
        timeline = self.timeline
        tensors, now, backward_s = timeline.tensors, 0.0, size * timeline.backward_s
        # Those of the last layers come first.
        for index in sorted(range(len(tensors)), key=lambda index: (tensors[index].ready, -index)):
            self.compute((tensors[index].ready - now) * backward_s)
            now = tensors[index].ready
            model.backward(index)
            model.tensors[index].grad = gradients[index]
            for callback in callbacks:
                callback.on_gradient_ready(index, synchronised=True)
        self.compute((1 - now) * backward_s)
        for callback in callbacks:
            callback.on_backward_done(synchronised=True)
        for callback in callbacks:
            callback.on_before_step()
        for callback in callbacks:
            callback.on_before_update()
        self.compute(timeline.optimizer_s)
        self.catch_up()  # it matters what peers have done by then
        for callback in callbacks:
            callback.on_after_step()
        moved = [p for p, one in zip(model.tensors, gradients, strict=True) if p.grad is not one]
        self._moved_bytes = sum(parameter.nbytes for parameter in moved)
        for parameter in model.tensors:
            parameter.grad = None
        self.catch_up()
        self.machine.step_ended(self.step)

    def enter(self, host: GenerationHost, parameters: Iterable[torch.Tensor]) -> None:
        """Make `host` a member of the only generation."""
        driver = _Miniatures(self, sum(parameter.numel() for parameter in parameters))
        host.begin(Generation.of_founders(self.world_size), self.rank, driver)

    def own_store(self) -> HashStore:
        """This rank's alone; where a strategy's members share one, a subclass has it."""
        return HashStore()

    @override
    def beside(
        self, job: Callable[[], None], *, name: str, levels: int = 0
    ) -> Callable[[], object]:
        def weightless_job() -> None:
            with WeightlessReads(), torch.no_grad():
                job()

        return super().beside(weightless_job, name=name, levels=levels)


class SimulatedModel(torch.nn.Module):
    """A model of which nobody sees more than the parameters.

    Attributes:
        tensors: its parameters, in order.
        timeline, rank: as given.
        coming_s: how long callbacks are going to compute in the backward pass.
    """

    def __init__(self, timeline: Timeline, rank: SimulatedRank) -> None:
        super().__init__()
        self.tensors = [
            torch.nn.Parameter(_weightless(each, timeline.dtype)) for each in timeline.tensors
        ]
        self.timeline, self.rank, self.coming_s = timeline, rank, 0.0
        self.register()

    def register(self) -> None:
        """Put the parameters into modules."""
        for number, parameter in enumerate(self.tensors):
            self.register_parameter(f"tensor_{number}", parameter)

    @override
    def forward(self, size: float, waiting: Sequence[Callback]) -> torch.Tensor | None:
        """With a batch `size` times the usual one, where `waiting` are told of each parameter
        before it is needed: as long after the begin of the first pass as its gradient is ready
        before the end of the last one.
        """
        rank, timeline, now = self.rank, self.timeline, 0.0
        pass_s = timeline.forward_s - timeline.earlier_s
        tensors = timeline.tensors if waiting else ()
        for index in sorted(range(len(tensors)), key=lambda index: -tensors[index].ready):
            needed = 1 - tensors[index].ready
            rank.compute(size * (needed - now) * pass_s)
            now = needed
            for callback in waiting:
                callback.on_parameters_needed([index])
        rank.compute(size * (timeline.forward_s - now * pass_s))
        return None

    def backward(self, tensor: int) -> None:
        """The gradient of a parameter is about to be ready."""


class _Miniatures(Wrapper):
    """Messages of a model of few elements weigh what those of `num_elements` do. They are added up
    beside training.
    """

    inner: SimulatedRank

    def __init__(self, inner: SimulatedRank, num_elements: int) -> None:
        super().__init__(inner)
        self._num_elements = num_elements

    @override
    def start(self, operation: Operation, channel: int) -> Ticket:
        if isinstance(operation, Send):
            num_bytes = bytes_at_scale(operation.payload, self._num_elements)
            machine = self.inner.machine
            machine.work_beside(machine.adding_s(num_bytes))
            operation = Send(operation.peer, weightless(num_bytes, operation.payload))
        ticket = super().start(operation, channel)
        if not isinstance(operation, RecvAny):
            return ticket

        def unpacked() -> Any:
            sender, message = ticket.wait()
            return sender, message.content if isinstance(message, WeightlessMessage) else message

        return VirtualTicket(ticket.done, unpacked)


class _WeightlessCodec(TopKCodec):
    """Selects and writes numbers of entries where `codec` does entries, on `rank`."""

    def __init__(self, codec: TopKCodec, rank: SimulatedRank) -> None:
        selector = _NumberSelector(codec, rank)
        super().__init__(selector=selector, values=codec.values, indices=codec.indices)
        self.rank = rank

    @override
    def wire(self, num_elements: int, *, num_parameters: int, dtype: np.dtype[np.floating]) -> Wire:
        real = super().wire(num_elements, num_parameters=num_parameters, dtype=dtype)
        return cast(Wire, self.rank.machine.lay_out(real))  # collectives know either as arithmetic


class _NumberSelector(Selector):
    """The largest entries of vectors without content."""

    def __init__(self, codec: TopKCodec, rank: SimulatedRank) -> None:
        self.codec, self.rank = codec, rank

    @override
    def select(
        self, flat: torch.Tensor, residual: torch.Tensor, *, k: int, weight: float, state: Memory
    ) -> Selection:
        num_elements, rank = flat.numel(), self.rank
        rank.encode(rank.machine.selecting_s(num_elements, k, self.codec))
        # Two ranks have the part `shared` in common, or as much as they have by chance.
        num_places = min(num_elements, k / max(rank.machine.shared, k / num_elements))
        return Selection(sparse=cast(Sparse, WeightlessSparse(k, num_places)), finite=True)


def with_lead_in(steps: range) -> range:
    """`steps`, counted from 0, and those before them that they depend on."""
    return range(steps.start - LEAD_IN if steps.start > REMEMBERED_STEPS else 0, steps.stop)


def carry_out(cluster: VirtualCluster, programs: Sequence[Collective[None]]) -> None:
    """Let every rank of `cluster` train, as `SimulatedRank.train` says."""
    try:
        with WeightlessReads(), torch.no_grad():
            cluster.run(programs)
    finally:
        for program in programs:
            program.close()


class _Unheard(Notices):
    """Of a run that never was nobody need hear."""

    @override
    def inform(self, remark: str) -> None:
        pass

    notify = warn = inform


class _Optimizer(torch.optim.Optimizer):
    """Has states of the parameters' sizes, called as SGD's or Adam's, and leaves gradients to
    whoever works on them.
    """

    def __init__(self, parameters: Any, moments: int) -> None:
        rates = {"lr": 1.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        flags = {"maximize": False, "decoupled_weight_decay": False}
        super().__init__(parameters, rates | flags)
        names = ["exp_avg", "exp_avg_sq", *(f"moment_{number}" for number in range(2, moments))]
        names = ["momentum_buffer"] if moments == 1 else names[:moments]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {name: parameter.detach() for name in names}

    @property
    def num_bytes(self) -> int:
        """Of the states."""
        return sum(each.nbytes for kept in self.state.values() for each in kept.values())


def _weightless(tensor: TensorProfile, dtype: torch.dtype) -> torch.Tensor:
    shape = (tensor.rows, -1) if tensor.num_elements % tensor.rows == 0 else (-1,)
    return torch.empty(tensor.num_elements, dtype=dtype, device="meta").view(shape)


def with_codecs(strategy: T, change: Callable[[TopKCodec], TopKCodec]) -> T:
    """`strategy`, and those in its options, with other codecs of entries; as it is where nothing of
    it sends entries.
    """
    changed: dict[str, Any] = {
        field.name: with_codecs(value, change)
        for field in fields(strategy)  # type: ignore[arg-type]  # strategies are dataclasses
        if hasattr(value := getattr(strategy, field.name), "build")
    }
    if (entries := getattr(strategy, "entries", None)) is not None:
        changed["codec"] = change(entries())
    if (weights := getattr(strategy, "weight_codec", None)) is not None:
        changed["codec"] = copied = copy(weights)
        copied.entries = change(weights.entries)
    try:
        return replace(strategy, **changed) if changed else strategy  # type: ignore[type-var]  # likewise
    except ConfigError:
        return strategy  # which sends no entries, whatever the codec


def _num_exchanges(callbacks: Sequence[Callback]) -> float:
    return sum(callback.counters().get("exchanges", 0.0) for callback in callbacks)


def _go_on_from(callbacks: Sequence[Callback], step: int) -> None:
    """Resume at `step`: what counts steps or exchanges is where it would be by then."""
    for callback in callbacks:
        state = callback.state_dict()
        replicated: Mapping[str, Any] = state.get("replicated", {})
        moved = dict.fromkeys(_COUNTS & replicated.keys(), step)
        if "num_exchanges" in replicated:
            moved["num_exchanges"] = -(-step // _CHOICES_EVERY) * _CHOICES_EVERY - LEAD_IN
        if _LEFT in replicated:
            moved[_LEFT] = max(0, replicated[_LEFT] - step)
        if moved:
            moved = {**replicated, **moved}
            moved.pop("averaged_at_step", None)  # which follows from the schedule
            callback.load_state_dict({"additive": {}, "local": {}, **state, "replicated": moved})
