"""What a rank of a plan does beside what any simulated one does: its callbacks look into layers,
multiply and invert what they see there, and share samples out.

    for each step
        where ranks share samples out: the strategy's loader says how many this rank's batch has
        who looks into layers sees one after the other in the forward pass
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Final, Protocol, TypeVar

import torch
from torch.distributed import HashStore
from typing_extensions import override

from offbeat.callbacks.callback import Callback
from offbeat.megabatch.callback import MegaBatchCallback
from offbeat.megabatch.claims import ClaimLog
from offbeat.megabatch.fetching import Fetcher
from offbeat.megabatch.loader import DispatchLoader
from offbeat.membership.agreement import Generation
from offbeat.membership.atomic_group import AtomicGroup
from offbeat.membership.generations import GenerationHost
from offbeat.simulation.training import (
    REMEMBERED_STEPS,
    Machine,
    SimulatedModel,
    SimulatedRank,
    Timeline,
)
from offbeat.transport.driver import Driver
from offbeat.transport.operations import Collective
from offbeat_lab.plan.profile import Layer

T = TypeVar("T")

_MEGA_BATCHES_BEFORE: Final = 2
"""Of a late one, so that batch sizes follow speeds, and a merge is under way."""


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


class PlannedMachine(Machine, Protocol):
    """What a rank's device needs for what it does.

    Attributes:
        common: the same on all ranks.
    """

    common: Common

    def batch_begins(self, done: float) -> None:
        """The rank is about to train, or to be handed a batch of its loader's, or has done with
        them. So many of the usual size have been handed out to all ranks; where shares are equal,
        to so many times the slowest. Of no consequence where ranks share no samples out.
        """
        return

    def asking(self) -> Collective[None]:
        """The way to the run's store, and back."""

    def preconditioning_s(self, num_products: float) -> float:
        """Seconds to multiply so many pairs of numbers, of gradients and of inverses."""

    def inverting_s(self, dim: int) -> float:
        """Seconds to invert a symmetric matrix of `dim` rows."""


@dataclass(frozen=True, kw_only=True)
class PlannedTimeline(Timeline):
    """What is trained, and what callbacks may see of it.

    Attributes:
        layers: whose inputs and outputs callbacks may look at, in the order of the forward pass.
        looks_s: what it takes to multiply all inputs and all outputs of layers by themselves.
        batch_size: of the usual batch, in samples.
    """

    layers: Sequence[Layer] = ()
    looks_s: float = 0.0
    batch_size: int = 1


class PlannedRank(SimulatedRank):
    """One rank of a run. Where ranks share samples out, the steps that it takes are batches of all
    ranks together, of the usual size.

    Attributes:
        kept_bytes: memory that callbacks hold after the last step, less gradients that lie in it
            and what the optimizer does not hold any more.
    """

    machine: PlannedMachine
    timeline: PlannedTimeline

    def __init__(self, inner: Driver, machine: PlannedMachine) -> None:
        super().__init__(inner, machine)
        self.kept_bytes = 0
        self._look_s: float | None = None

    # Layers

    def look(self, call: Callable[[], T], seconds: float) -> tuple[T, float]:
        """Let callbacks look at a layer. If they multiply what they see, that takes `seconds`.

        Returns:
            What `call` returns, and the seconds that were taken.
        """
        self._look_s, before_s = seconds, self.encode_s
        found = call()
        self._look_s = None
        return found, self.encode_s - before_s

    @override
    def computes(self) -> dict[str, Callable[..., None]]:
        return super().computes() | {
            "bmm": self._multiply,
            "linalg_solve_triangular": self._solve,
            "linalg_cholesky_ex": self._invert,
        }

    @override
    def multiply_thin(self, *operands: torch.Tensor) -> None:
        if self._look_s is None:  # else it is the layer's own product
            super().multiply_thin(*operands)

    def _multiply(self, one: torch.Tensor, other: torch.Tensor, *, share: float = 1.0) -> None:
        if self._look_s is None:
            self.encode(self.machine.preconditioning_s(share * one.numel() * other.shape[-1]))
        else:
            self.encode(self._look_s)
            self._look_s = 0.0  # however many products it is

    def _solve(self, triangle: torch.Tensor, matrices: torch.Tensor) -> None:
        self._multiply(matrices, triangle, share=0.5)

    def _invert(self, matrices: torch.Tensor) -> None:
        self.encode(len(matrices) * self.machine.inverting_s(matrices.shape[-1]))

    @override
    def model(self) -> SimulatedModel:
        return _LayeredModel(self.timeline, self)

    @override
    def look_back(
        self, callbacks: Sequence[Callback], parameters: Iterable[torch.Tensor], more_bytes: int
    ) -> None:
        self.kept_bytes = kept_bytes(callbacks, besides=parameters) + more_bytes

    # Samples that are shared out

    @override
    def enter(self, host: GenerationHost, parameters: Iterable[torch.Tensor]) -> None:
        if isinstance(host, AtomicGroup):  # which computes with what it sends
            host.begin(Generation.of_founders(self.world_size), self.rank, self)
        else:
            super().enter(host, parameters)

    @override
    def own_store(self) -> HashStore:
        return _AskedStore(self, self.machine.common.store)  # type: ignore[return-value]  # as one of torch

    def ask_store(self) -> None:
        """Wait for an answer of the run's store. One within a collective takes no time here."""
        if self.is_awake:
            self.run(self.machine.asking(), 0)

    @override
    def take_steps(
        self,
        callbacks: list[Callback],
        take_step: Callable[..., None],
        steps: Collection[int],
    ) -> float:
        policy = next((one for one in callbacks if isinstance(one, MegaBatchCallback)), None)
        if policy is None:
            return super().take_steps(callbacks, take_step, steps)
        batches, batch_size = range(min(steps), max(steps) + 1), self.timeline.batch_size
        loader = self._loader(policy, batch_size, batches)
        callbacks.append(loader)
        self._share_out(loader, batch_size, batches, take_step, is_equal=policy.shares_equally)
        return 0.0

    def _loader(self, policy: MegaBatchCallback, batch_size: int, steps: range) -> DispatchLoader:
        """Of batches without content, in a pass over the data that `steps` do not end."""
        policy.feed(batch_size, dict.fromkeys(range(self.world_size)))
        size = policy.samples_of_mega_batch
        loader = DispatchLoader(
            _NoData(size * (batch_size * steps.stop // size + 3)),
            log=ClaimLog(self.own_store()),
            policy=policy,
            seed=0,
            shuffles=False,
            rank=self.rank,
            notify=lambda remark: None,
            clock=lambda: self.now_s(0),
        )
        first = batch_size * steps.start // size - _MEGA_BATCHES_BEFORE
        if steps.start > REMEMBERED_STEPS * self.world_size and first > 0:
            state = loader.state_dict()
            loader.load_state_dict(state | {"local": state["local"] | {"mega_batch": first}})
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
                self.catch_up()
                note()
                common.handed_out[self.rank] += num_samples / batch_size
                take_step(num_samples / batch_size)
                self.step += 1
        loader.end_merge()
        note()


class _AskedStore:
    """The run's store, of which each answer takes its time."""

    def __init__(self, rank: PlannedRank, store: HashStore) -> None:
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


class _LayeredModel(SimulatedModel):
    """A model into whose layers callbacks may hook. Times are divided among layers by the numbers
    of multiplications.
    """

    timeline: PlannedTimeline
    rank: PlannedRank

    @override
    def register(self) -> None:
        layers = self.timeline.layers
        self._outputs: dict[int, tuple[torch.Tensor, float]] = {}
        self.linears = torch.nn.ModuleList()
        for layer in layers:
            linear = torch.nn.Linear(1, 1, bias=False, device="meta")
            linear.weight = self.tensors[layer.tensor]
            self.linears.append(linear)
        inside = {layer.tensor for layer in layers}
        for number, parameter in enumerate(self.tensors):
            if number not in inside:
                self.register_parameter(f"tensor_{number}", parameter)
        whole = sum(one.num_positions * one.a_dim * one.g_dim for one in layers)
        looks = sum(one.num_positions * (one.a_dim**2 + one.g_dim**2) for one in layers)
        pass_s = self.timeline.forward_s - self.timeline.earlier_s
        self._product_s = pass_s / (whole or 1)
        self._look_s = self.timeline.looks_s / (looks or 1)

    @override
    def forward(self, size: float, waiting: Sequence[Callback]) -> torch.Tensor | None:
        rank, timeline, self.coming_s = self.rank, self.timeline, 0.0
        output: torch.Tensor | None = None
        if timeline.layers:  # whose factors are complete with the last batch
            rank.compute(size * timeline.earlier_s)
        for layer, linear in zip(timeline.layers, self.linears, strict=True):
            shape = timeline.batch_size, layer.num_positions, layer.a_dim
            look_s = self._look_s * layer.num_positions
            with torch.enable_grad():
                inputs = torch.empty(shape, device="meta")
                output, looked_s = rank.look(partial(linear, inputs), look_s * layer.a_dim**2)
            if output is not None and looked_s:
                output_s = look_s * layer.g_dim**2
                self._outputs[layer.tensor] = output, output_s
                self.coming_s += output_s
            product_s = size * self._product_s * layer.num_positions
            rank.compute(product_s * layer.a_dim * layer.g_dim)
        return super().forward(size, waiting) if output is None else output

    @override
    def backward(self, tensor: int) -> None:
        if tensor in self._outputs:
            output, look_s = self._outputs.pop(tensor)
            one, weight = output.detach(), self.tensors[tensor]
            # Those who look see by it that it is a pass of training.
            self.rank.look(partial(torch.autograd.backward, output, one, inputs=weight), look_s)


def kept_bytes(owners: Iterable[object], *, besides: Iterable[torch.Tensor]) -> int:
    """Memory of the tensors that `owners`, and the objects in their attributes, hold.

    Args:
        owners: where to begin.
        besides: tensors whose memory does not count.
    """
    storages = {id(one): one for one in (tensor.untyped_storage() for tensor in besides)}
    num_others = sum(one.nbytes() for one in storages.values())
    waiting, seen = list(owners), dict[int, object]()
    while waiting:
        owner = waiting.pop()
        if id(owner) in seen:
            continue
        seen[id(owner)] = owner  # so that no other object gets its identifier
        if isinstance(owner, torch.Tensor):
            storage = owner.untyped_storage()
            storages[id(storage)] = storage
        else:
            waiting.extend(_parts(owner))
    return sum(one.nbytes() for one in storages.values()) - num_others


def _parts(owner: Any) -> Iterator[object]:
    if isinstance(owner, Mapping):
        yield from owner.values()
    elif isinstance(owner, list | tuple | deque | Set):
        yield from owner
    elif not isinstance(owner, Driver | ModuleType | type):
        yield from getattr(owner, "__dict__", {}).values()
        slots = (name for kind in type(owner).__mro__ for name in getattr(kind, "__slots__", ()))
        yield from (getattr(owner, name, None) for name in slots)
