"""Training of which only the sizes and the times exist: a strategy's own callbacks, with tensors
without content, on a virtual cluster.

    build the strategy, as a session does
    for each step
        where ranks share samples out: the strategy's loader says how many this rank's batch has
        the forward pass takes its time
        gradients become ready, one after the other, as long after each other as a profile says
        the optimizer's step takes its time
    at each of these moments the callbacks get the event that a session would give them

What callbacks compute takes no time here. What they have computed by the moment at which they send
something is known by what they send: a dense operation has been copied into a vector, and is copied
out of it; entries have been selected; a vector has been published, and is added by its receiver.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import torch
from torch.distributed import HashStore
from typing_extensions import override

from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context, Notices, stream_counter
from offbeat.codec.topk_codec import TopKCodec, WeightCodec
from offbeat.codec.value_codecs import ValueCodec
from offbeat.codec.weightless import WeightlessCode, WeightlessVector, WeightlessWire
from offbeat.codec.wire import Wire
from offbeat.errors import ConfigError
from offbeat.megabatch.callback import MegaBatchCallback
from offbeat.megabatch.claims import ClaimLog
from offbeat.megabatch.fetching import Fetcher
from offbeat.megabatch.loader import DispatchLoader
from offbeat.membership.agreement import Generation, Member
from offbeat.membership.generations import GenerationHost
from offbeat.simulation.codec import WeightlessCodec
from offbeat.simulation.memory import kept_bytes
from offbeat.torch_private import WeightlessReads
from offbeat.transport.driver import Driver, Pending, Ticket
from offbeat.transport.operations import AllReduceTensor, Broadcast, Collective, Operation, Send
from offbeat.transport.virtual import VirtualCluster
from offbeat.transport.virtual_driver import Job, SleepUntil, VirtualThread

T = TypeVar("T")

REMEMBERED_STEPS: Final = 250
"""A run is simulated from its beginning to here at most. Of a later step only those that go just
before it are: what is chosen in the first steps has been chosen by then.
"""

LEAD_IN: Final = 3
"""Steps before one in the middle of a run, so that what is measured in steps has been."""

_MEGA_BATCHES_BEFORE: Final = 2
"""Of a late one, so that batch sizes follow speeds, and a merge is under way."""

_CHOICES_EVERY: Final = 500  # exchanges, by which numbers of measured exchanges are rounded
_COUNTS, _LEFT = frozenset({"num_steps", "num_averages", "exchanges"}), "num_left"


class Common:
    """What the ranks of a run share.

    Attributes:
        store: the run's.
        handed_out: how many batches of the usual size the loader of each rank has handed out, if
            ranks share samples out.
        before: those of all ranks before the simulation.
    """

    def __init__(self, world_size: int) -> None:
        self.store = HashStore()
        self.handed_out = [0.0] * world_size
        self.before = 0.0


class Machine(Protocol):
    """What a rank's device needs for what it does.

    Attributes:
        shared: which part of one rank's largest entries another rank has too, 0 to 1.
        common: the same on all ranks.
    """

    shared: float
    common: Common

    def batch_begins(self, done: float) -> None:
        """The rank is about to train, or to be handed a batch of its loader's, or has done with
        them. So many of the usual size have been handed out to all ranks; where shares are equal,
        to so many times the slowest.
        """
        ...

    def forward(self, step: int, size: float) -> Collective[None]:
        """The forward pass of a step, counted from 0, with a batch `size` times the usual one; and
        whatever delays it.
        """
        ...

    def asking(self) -> Collective[None]:
        """The way to the run's store, and back."""
        ...

    def begin(self, work: Collective[None]) -> Pending[None]:
        """Begin `work` beside training."""
        ...

    def computing(self, step: int, seconds: float) -> Collective[None]:
        """What takes so long on a device that is alone."""
        ...

    def copying_s(self, num_bytes: float) -> float:
        """Seconds to copy gradients or weights."""
        ...

    def selecting_s(self, num_elements: int, k: int, codec: TopKCodec) -> float:
        """Seconds to select `k` entries, and to code them."""
        ...

    def coding_s(self, num_elements: int, values: ValueCodec) -> float:
        """Seconds to code a whole vector, and to read it again."""
        ...

    def multiplying_s(self, num_elements: int, rank: int) -> float:
        """Seconds to multiply a matrix of so many elements by one of `rank` columns."""
        ...

    def publishing_s(self, num_bytes: float) -> float:
        """Seconds to bring a vector to where its messages leave from, and a result back."""
        ...

    def adding_s(self, num_bytes: float) -> float:
        """Seconds to add what a peer has sent of its vector."""
        ...

    def step_ended(self, step: int) -> None:
        """The rank has taken the step."""
        ...

    def lay_out(self, wire: Wire) -> WeightlessWire:
        """The arithmetic with numbers of entries in the place of `wire`."""
        ...


class Sized(Protocol):
    """A parameter of which the size is known."""

    @property
    def num_elements(self) -> int: ...

    @property
    def rows(self) -> int:
        """Length of its first dimension."""
        ...

    @property
    def ready(self) -> float:
        """When its gradient is there, as a share of the backward pass."""
        ...


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What is trained, and when its gradients are there.

    Attributes:
        tensors: parameters, in the order of the model.
        backward_s: the backward pass.
        optimizer_s: the optimizer's step.
        moments: what the optimizer keeps of each parameter, in tensors of its size.
        batch_size: of the usual batch, in samples.
    """

    tensors: Sequence[Sized]
    backward_s: float
    optimizer_s: float
    moments: int
    batch_size: int = 1


class Buildable(Protocol):
    """A strategy."""

    def build(self, context: Context) -> Sequence[Callback]: ...


class SimulatedRank(VirtualThread):
    """One rank of a run.

    Args:
        inner: its driver of a virtual cluster.
        machine: what computes.

    Attributes:
        machine: as given.
        step: that the rank is in, counted from 0.
        encode_s: computed because of the exchange, so far, in seconds of a device that is alone.
        kept_bytes: memory that callbacks hold after the last step.
    """

    def __init__(self, inner: Driver, machine: Machine) -> None:
        super().__init__(inner)
        self.encode_s = 0.0
        self.kept_bytes = 0
        self.machine = machine
        self.step = 0
        self._published = -1
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
        if isinstance(operation, AllReduceTensor | Broadcast):
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
        if self._is_awake:
            self._catch_up()

        def used(result: Any) -> None:
            if isinstance(result, WeightlessCode):  # which is only read
                self.encode(machine.coding_s(result.whole, result.values) / 2)
                return
            is_added = isinstance(result, WeightlessVector)
            self.encode(machine.adding_s(len(result)) if is_added else copying_s)

        return _UsedTicket(super().start(operation, channel), used)

    @override
    def now_s(self, channel: int) -> float:
        self._catch_up()
        return super().now_s(channel)

    @override
    def complete(self, pending: Pending[Any]) -> None:
        self._catch_up()
        super().complete(pending)

    @property
    def _is_awake(self) -> bool:
        """Whether code of this rank runs, and not a collective that it waits for."""
        return self.job is not None and self.job.is_awake

    def ask_store(self) -> None:
        """Wait for an answer of the run's store. One within a collective takes no time here."""
        if self._is_awake:
            self.run(self.machine.asking(), 0)

    def _catch_up(self) -> None:
        if seconds := self._owed_s.pop(self.job, 0.0):
            self.run(self.machine.computing(self.step, seconds), 0)

    def train(self, strategy: Buildable, timeline: Timeline, steps: range) -> Collective[None]:
        """Take `steps`, and those before them that they depend on.

        Args:
            strategy: whose callbacks get the events.
            timeline: of a step.
            steps: counted from 0. Where ranks share samples out, batches of all ranks together, of
                the usual size.
        """
        weightless = with_codecs(strategy, self._without_content)
        return self.carry(lambda: self._train(weightless, timeline, steps))

    def _without_content(self, codec: TopKCodec) -> TopKCodec:
        machine = self.machine

        def selected(num_elements: int, k: int) -> None:
            self.encode(machine.selecting_s(num_elements, k, codec))

        return WeightlessCodec(
            codec, selected=selected, shared=machine.shared, lay_out=machine.lay_out
        )

    def _train(self, strategy: Buildable, timeline: Timeline, steps: range) -> None:
        def multiplied(num_elements: int, rank: int) -> None:
            self.encode(self.machine.multiplying_s(num_elements, rank))

        with WeightlessReads(multiplied), torch.no_grad():
            parameters = {
                str(number): torch.nn.Parameter(_weightless(tensor))
                for number, tensor in enumerate(timeline.tensors)
            }
            optimizer = _Optimizer(parameters.values(), timeline.moments)
            context = Context(
                parameters=parameters,
                driver=self,
                grad_scale=lambda: 1.0,
                has_scaler=False,
                new_stream=stream_counter(),
                notices=_Unheard(self.rank),
                optimizer=optimizer,
                enter=self._enter,
                own_store=self._own_store,
                beside=self._beside,
            )
            callbacks = list(strategy.build(context))
            gradients = [parameter.detach() for parameter in parameters.values()]
            take_step = partial(
                self._take_step, callbacks, list(parameters.values()), gradients, timeline
            )
            policy = next((one for one in callbacks if isinstance(one, MegaBatchCallback)), None)
            if policy is not None:
                loader = self._loader(policy, timeline.batch_size, steps)
                callbacks.append(loader)
                self._share_out(
                    loader,
                    timeline.batch_size,
                    steps,
                    take_step,
                    is_equal=policy.shares_equally,
                )
            else:
                first = 0
                if steps.start > REMEMBERED_STEPS:
                    first = steps.start - LEAD_IN
                    _go_on_from(callbacks, first)
                for self.step in range(first, steps.stop):
                    take_step()
            self.kept_bytes = kept_bytes(callbacks, besides=parameters.values())

    def _take_step(
        self,
        callbacks: Sequence[Callback],
        parameters: Sequence[torch.nn.Parameter],
        gradients: Sequence[torch.Tensor],
        timeline: Timeline,
        size: float = 1.0,
    ) -> None:
        for callback in callbacks:
            callback.on_forward_begins(trains=True)
        self._catch_up()
        self.run(self.machine.forward(self.step, size), 0)
        for callback in callbacks:
            callback.on_backward_begins(synchronised=True)
        tensors, now, backward_s = timeline.tensors, 0.0, size * timeline.backward_s
        # Those of the last layers come first.
        for index in sorted(range(len(tensors)), key=lambda index: (tensors[index].ready, -index)):
            self.compute((tensors[index].ready - now) * backward_s)
            now = tensors[index].ready
            parameters[index].grad = gradients[index]
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
        self._catch_up()  # it matters what peers have done by then
        for callback in callbacks:
            callback.on_after_step()
        for parameter in parameters:
            parameter.grad = None
        self._catch_up()
        self.machine.step_ended(self.step)

    def _enter(self, host: GenerationHost) -> None:
        members = tuple(Member(rank=rank, ticket=0) for rank in range(self.world_size))
        alive = Generation(number=0, members=members, newcomers=frozenset(), tickets=0)
        host.begin(alive, self.rank, self)

    def _own_store(self) -> HashStore:
        return _AskedStore(self, self.machine.common.store)  # type: ignore[return-value]  # as one of torch

    def _beside(self, work: Callable[[], None]) -> Callable[[], None]:
        def weightless_work() -> None:
            with WeightlessReads(), torch.no_grad():
                work()

        begun = self.machine.begin(self.carry(weightless_work))

        def until_over() -> Collective[None]:
            yield SleepUntil(over=lambda: begun.over)

        return lambda: self.run(until_over(), 0)

    def _loader(self, policy: MegaBatchCallback, batch_size: int, steps: range) -> DispatchLoader:
        """Of batches without content, in a pass over the data that `steps` do not end."""
        policy.feed(batch_size, dict.fromkeys(range(self.world_size)))
        size = policy.samples_of_mega_batch
        loader = DispatchLoader(
            _NoData(size * (batch_size * steps.stop // size + 3)),
            log=ClaimLog(self._own_store()),
            policy=policy,
            seed=0,
            shuffles=False,
            rank=self.rank,
            notify=lambda remark: None,
            clock=lambda: self.now_s(0),
        )
        first = batch_size * steps.start // size - _MEGA_BATCHES_BEFORE
        if steps.start > REMEMBERED_STEPS * self.world_size and first > 0:
            place = {"epoch": 0, "mega_batch": first, "claims": (), "updates": 0, "busy_s": 0.0}
            loader.load_state_dict({"local": place})
            self.machine.common.before = first * size / batch_size
        return loader

    def _share_out(
        self,
        loader: DispatchLoader,
        batch_size: int,
        steps: range,
        take_step: Callable[[float], None],
        *,
        is_equal: bool,
    ) -> None:
        """Train until the mega-batch behind `steps` is merged."""
        common, machine = self.machine.common, self.machine

        def note() -> None:
            out = common.handed_out
            done = common.before + (len(out) * min(out) if is_equal else sum(out))
            machine.batch_begins(max(done, loader.num_samples_merged / batch_size))

        note()
        while loader.num_samples_merged <= batch_size * steps.stop:
            for num_samples in loader.one_mega_batch(goes_on=True):
                self._catch_up()
                note()
                common.handed_out[self.rank] += num_samples / batch_size
                take_step(num_samples / batch_size)
                self.step += 1
        loader.end_merge()
        note()


class _AskedStore:
    """The run's store, of which each answer takes its time."""

    def __init__(self, rank: SimulatedRank, store: HashStore) -> None:
        self._rank, self._store = rank, store

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def answer(*asked: Any) -> Any:
            self._rank.ask_store()
            return getattr(self._store, name)(*asked)

        return answer


class _NoData(Fetcher):
    """Gives the number of samples in the place of a batch."""

    batches_ahead = 0

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    @override
    def batches(self, numbers: Iterable[list[int]], *, epoch: int) -> Iterator[int]:
        return map(len, numbers)


class _UsedTicket:
    """A ticket that tells of its result, with which something is computed."""

    def __init__(self, ticket: Ticket, used: Callable[[Any], None]) -> None:
        self._ticket, self._used = ticket, used
        self.done = ticket.done

    def wait(self) -> Any:
        result = self._ticket.wait()
        self._used(result)
        return result


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
        super().__init__(parameters, {"lr": 1.0})
        names = ["exp_avg", "exp_avg_sq", *(f"moment_{number}" for number in range(2, moments))]
        names = ["momentum_buffer"] if moments == 1 else names[:moments]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {name: parameter.detach() for name in names}


def _weightless(tensor: Sized) -> torch.Tensor:
    shape = (tensor.rows, -1) if tensor.num_elements % tensor.rows == 0 else (-1,)
    return torch.empty(tensor.num_elements, device="meta").view(shape)


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
        changed["codec"] = WeightCodec(
            density=weights.density,
            decay=weights.decay,
            entries=change(weights.entries),
            clip_to_median=weights.clip_to_median,
        )
    try:
        return replace(strategy, **changed) if changed else strategy  # type: ignore[type-var]  # likewise
    except ConfigError:
        return strategy  # which sends no entries, whatever the codec


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
