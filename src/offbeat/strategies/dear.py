"""DeAR: all-reduce in two halves (Zhang et al., arXiv 2302.12445), each hidden behind another pass.

    backward:  for each bucket that is complete: reduce-scatter, so each rank has the mean of a part
    step:      the optimizer steps with this rank's part of parameters, gradients and state
    forward:   before a module computes: its parameters, gathered from all ranks since the step

A bucket has as many equal parts as there are ranks. The optimizer is shown this rank's part of each
parameter while it steps, and nothing else. Between steps it has the model's parameters, and no
state: each rank's part of that is here.

Cost per step: 2(P-1)/P n elements sent by each rank, half of them during backward and half during
forward; the optimizer's state takes 1/P of its memory. While parameters are gathered a copy of them
is in memory.

Differences from the paper: it gathers gradients, and every rank steps with all of them while the
next forward pass runs, by an SGD of its own. Here parts are stepped with and weights gathered, so
the user's optimizer steps when it is told to and gradients can be clipped before. All gathers begin
at once. Buckets have a size that is given, and is not searched for.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Final, TypeAlias

import safetensors.torch
import torch
from typing_extensions import override

from offbeat.callbacks.callback import Callback, CallbackState
from offbeat.callbacks.context import Context
from offbeat.codec.tally import NUM_COUNTERS
from offbeat.codec.tensor_bytes import to_bytes
from offbeat.collectives.dense import (
    dense_all_gather,
    dense_reduce_scatter,
    gather_bytes,
    gather_values,
)
from offbeat.errors import CheckpointError, UnsupportedError
from offbeat.gradients.buckets import Bucket, is_dense
from offbeat.gradients.exchange import ExchangeCounts, GradientTransform
from offbeat.gradients.gradient_watch import GradientWatch
from offbeat.gradients.reductions import Reduction, WeightedGradient, launch_sums
from offbeat.strategies.gradient import GradientStrategy, Reductions
from offbeat.torch_private import version_of
from offbeat.transport.driver import Driver, Pending, Stream

ELEMENTWISE: Final = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
"""Optimizers that step with each element by itself, so with a part of a parameter as with all."""


@dataclass(frozen=True, kw_only=True)
class DeAR(GradientStrategy):
    """Gradients reduced during backward, weights gathered during forward, and steps shared out.

    Each rank steps with an equal part of each bucket.
    """

    against_scaler: ClassVar[str] = (
        "DeAR gives each rank a part of the mean, so a GradScaler would find other gradients on"
        " each"
    )
    against_kfac: ClassVar[str] = (
        "K-FAC changes the mean of gradients on every rank, and DeAR gives each rank a part of it"
    )

    @override
    def check(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().check(model, optimizer)
        if type(optimizer) not in ELEMENTWISE:
            raise UnsupportedError(
                f"DeAR steps with a part of each parameter, and {type(optimizer).__name__} is not"
                " known to step with each element by itself; use SGD or Adam of torch.optim, or"
                " offbeat.AllReduce() with any optimizer"
            )
        for name, parameter in model.named_parameters():
            if not is_dense(parameter):
                raise UnsupportedError(
                    f"the memory of parameter {name!r} has gaps or overlaps, so it cannot be"
                    " divided; make it contiguous, or use offbeat.AllReduce()"
                )

    @override
    def reductions(self, context: Context, transform: GradientTransform) -> Reductions:
        buckets = self.buckets(context)
        pairs = [
            (bucket, ScatterReduction(bucket, context.driver, context.new_stream()))
            for bucket in buckets
        ]
        steps = ShardedSteps(buckets, transform.counts, context)
        return Reductions(
            pairs, [steps], norm_over_ranks=steps.norm_over_ranks, arrive=steps.arrive
        )


class ScatterReduction(Reduction):
    """Weighted mean by reduce-scatter: of this rank's part, and zeros in the place of the others,
    so that the sum over all ranks is the mean. The tally is summed by itself.
    """

    only_queues: ClassVar[bool] = True
    gives_whole: ClassVar[bool] = False

    def __init__(self, bucket: Bucket, driver: Driver, stream: Stream) -> None:
        super().__init__(bucket, driver, stream)
        self._message = bucket.flat.new_zeros(padded_size(bucket.num_elements, driver.world_size))
        self._begin, self._end = part_of(bucket, driver)
        self._tail = bucket.flat.new_zeros(NUM_COUNTERS + len(bucket.indices), dtype=torch.float64)
        bucket.flat = self._message[: bucket.num_elements]

    def launch(self, given: WeightedGradient) -> None:
        self._begin_sum(given)
        scattering = dense_reduce_scatter(self._message)
        self._sums = [
            self._driver.launch(scattering, self._stream.next()),
            *launch_sums(self._driver, self._stream, self._tail),
        ]

    def commit(self) -> torch.Tensor:
        if self.tally.weight not in (0, self._driver.world_size):
            mine = self._message[self._begin : self._end]
            mine.mul_(self._driver.world_size / self.tally.weight)
        self._message[: self._begin] = 0
        self._message[self._end :] = 0
        return self._bucket.flat


class _Piece:
    """This rank's part of a parameter: elements `begin` to `end` of its memory.

    Attributes:
        parameter: what the optimizer sees: of the whole one's shape where the part is all of it.
        state: the optimizer's, between steps.
    """

    def __init__(self, bucket: Bucket, position: int, begin: int, end: int) -> None:
        self.whole, self.name = bucket.parameters[position], bucket.names[position]
        self.begin, self.end = begin, end
        self.offset = bucket.offsets[position]
        self.state: dict[str, Any] = {}
        self._bucket, self._position = bucket, position
        self.parameter = torch.nn.Parameter(self._part_of(self.whole.detach()))

    def _part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of a tensor that is laid out as the whole parameter."""
        is_whole = self.end - self.begin == tensor.numel()
        return tensor if is_whole else in_memory_order(tensor)[self.begin : self.end]

    def show(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer have the piece, its gradient and its state."""
        memory = self._part_of(self.whole.detach())
        if memory.data_ptr() != self.parameter.data_ptr():
            self.parameter.data = memory
        self.state = self.current(optimizer)
        optimizer.state.pop(self.whole, None)
        if self.state:
            optimizer.state[self.parameter] = self.state
        if self.whole.grad is not None:
            self._bucket.copy_in({self._position: self.whole.grad})
            self.parameter.grad = self._part_of(self._bucket.views[self._position])

    def hide(self, optimizer: torch.optim.Optimizer) -> None:
        """Take back what the optimizer has made of it."""
        self.state = optimizer.state.pop(self.parameter, {})
        self.parameter.grad = None

    def current(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state between steps: of the whole parameter where that was loaded into the optimizer,
        or made before it was attached.
        """
        whole = optimizer.state.get(self.whole)
        if not whole:
            return self.state
        return {key: self._part_of_state(value) for key, value in whole.items()}

    def _part_of_state(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim():
            return value
        laid_out = torch.empty_like(self.whole, dtype=value.dtype).copy_(value)
        return self._part_of(laid_out).clone()


class ShardedSteps(Callback):
    """The optimizer's step with this rank's part of each bucket, and the gathering of parameters.

    Args:
        buckets: whose gradients a `ScatterReduction` leaves, in the order of backward.
        counts: of their exchange.
        context: lent by the session.
    """

    state_key: ClassVar[str] = "sharded_steps"
    holds_state = True

    def __init__(self, buckets: Sequence[Bucket], counts: ExchangeCounts, context: Context) -> None:
        assert context.optimizer is not None
        self._buckets, self._optimizer = buckets, context.optimizer
        self._parameters = context.parameters
        self._watch = GradientWatch(counts, compares_norms=False)
        self._watch.buckets.extend(buckets)
        self._driver, self._notify = context.driver, context.notices.notify
        self._gathers, self._norms = context.new_stream(), context.new_stream()
        self._bucket_of = {i: b for b, bucket in enumerate(buckets) for i in bucket.indices}
        self._pieces = [self._pieces_of(bucket) for bucket in buckets]
        # What the optimizer is shown of a parameter; None: other ranks have all of it.
        self._shown = dict.fromkeys(map(id, context.parameters.values()))
        self._shown |= {id(piece.whole): piece.parameter for piece in self._all_pieces()}
        self._arriving: dict[int, tuple[Pending[torch.Tensor], list[int]]] = {}
        self._groups: list[list[torch.nn.Parameter]] | None = None  # None: between steps
        # By name, the versions of those that the optimizer does not have, after the last backward.
        self._others = dict[str, int]()
        self._has_warned = False
        self._unhook = self._optimizer.register_state_dict_post_hook(self._warn).remove

    def _pieces_of(self, bucket: Bucket) -> list[_Piece]:
        begin, end = part_of(bucket, self._driver)
        return [
            _Piece(bucket, position, max(p.start, begin) - p.start, min(p.stop, end) - p.start)
            for position, p in enumerate(bucket.places)
            if max(p.start, begin) < min(p.stop, end)
        ]

    def _all_pieces(self) -> Iterator[_Piece]:
        return chain.from_iterable(self._pieces)

    # A step

    @override
    def on_backward_done(self, *, synchronised: bool) -> None:
        self._watch.look()
        self.arrive()  # what this pass has not needed
        stepped = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        self._others = {
            name: version_of(p) for name, p in self._parameters.items() if id(p) not in stepped
        }

    def norm_over_ranks(self, norm: float) -> float:
        """The norm of the mean, of whose parts each rank knows one's, to clip it by. Collective."""
        self._watch.forget()  # clipping is about to change gradients
        return math.hypot(*self._driver.run(gather_values(norm), self._norms.next()))

    @override
    def on_before_update(self) -> None:
        for name, version in self._others.items():
            if version_of(self._parameters[name]) != version:
                raise UnsupportedError(
                    f"parameter {name!r} was changed between backward() and optimizer.step(), as by"
                    " another optimizer, which finds this rank's part of its gradient alone; put"
                    " all parameters into groups of one optimizer, or use offbeat.AllReduce()"
                )
        self._watch.look_if_new()  # it may have joined its peers' exchange just now
        if self._watch.compare():
            raise UnsupportedError(
                "gradients were changed between backward() and optimizer.step(), and each rank has"
                " its part of them alone; clip them by session.clip_grad_norm_(), or use"
                " offbeat.AllReduce(), which gives every rank the whole mean"
            )
        self.arrive()
        self._put_back()
        groups = self._optimizer.param_groups
        self._groups = [group["params"] for group in groups]
        for piece in self._all_pieces():
            piece.show(self._optimizer)
        for group in groups:
            shown = (self._shown.get(id(p), p) for p in group["params"])
            group["params"] = [p for p in shown if p is not None]

    @override
    def on_after_step(self) -> None:
        self._watch.step_ended()
        self._put_back()
        self._others.clear()
        # The next forward pass needs those first that backward has reached last.
        for b in reversed(range(len(self._buckets))):
            self._launch(b)

    def _put_back(self) -> None:
        if self._groups is None:
            return
        for group, parameters in zip(self._optimizer.param_groups, self._groups, strict=True):
            group["params"] = parameters
        self._groups = None
        for piece in self._all_pieces():
            piece.hide(self._optimizer)
        for parameter in self._parameters.values():
            if parameter.numel():  # other ranks have its state
                self._optimizer.state.pop(parameter, None)

    def _launch(self, b: int) -> None:
        """Begin to bring what each rank has of a bucket's parameters."""
        bucket = self._buckets[b]
        size = padded_size(bucket.num_elements, self._driver.world_size)
        message = bucket.flat.new_empty(size)
        for piece in self._pieces[b]:
            place = slice(piece.offset + piece.begin, piece.offset + piece.end)
            message[place].copy_(in_memory_order(piece.parameter.detach()))
        pending = self._driver.launch(dense_all_gather(message), self._gathers.next())
        self._arriving[b] = pending, [version_of(parameter) for parameter in bucket.parameters]

    @override
    def on_parameters_needed(self, indices: Sequence[int]) -> None:
        for b in dict.fromkeys(self._bucket_of[index] for index in indices):
            self._arrive(b)

    def arrive(self) -> None:
        """Wait for all parameters."""
        for b in tuple(self._arriving):
            self._arrive(b)

    def _arrive(self, b: int) -> None:
        if b not in self._arriving:
            return
        pending, versions = self._arriving.pop(b)
        bucket, views = self._buckets[b], self._buckets[b].views_of(pending.wait())
        for name, parameter, view, version in zip(
            bucket.names, bucket.parameters, views, versions, strict=True
        ):
            if version_of(parameter) != version:
                raise UnsupportedError(
                    f"parameter {name!r} was changed between optimizer.step() and the next forward"
                    " pass, while it was being gathered, so the change would be lost; call"
                    " model.state_dict() before, which waits for all parameters, or use"
                    " offbeat.AllReduce()"
                )
            parameter.detach().copy_(view)

    # State

    def _warn(self, optimizer: torch.optim.Optimizer, saved: object) -> None:
        if not self._has_warned and any(piece.state for piece in self._all_pieces()):
            self._has_warned = True
            self._notify(
                "optimizer.state_dict() has no state, of which each rank has a part; it is in"
                " session.state_dict(), and whole in the optimizer after session.finish()"
            )

    @override
    def on_finish(self) -> None:
        """Parameters and the optimizer's state are whole on every rank afterwards."""
        self.arrive()
        for bucket, pieces in zip(self._buckets, self._pieces, strict=True):
            saved = dict[str, torch.Tensor]()
            gathering = gather_bytes(to_bytes(self._owned(pieces)))
            for payload in self._driver.run(gathering, self._gathers.next()):
                saved |= safetensors.torch.load(bytes(payload))
            by_name = _by_parameter(saved)
            for name, parameter in zip(bucket.names, bucket.parameters, strict=True):
                if found := _assembled(by_name.get(name, {}), 0, parameter.numel()):
                    self._optimizer.state[parameter] = self._laid_out(found, parameter, parameter)
        self._has_warned = True

    def _owned(self, pieces: Iterable[_Piece]) -> dict[str, torch.Tensor]:
        """The optimizer's state, by its key, the parameter's name and where the piece begins."""
        return {
            f"{key}/{piece.name}/{piece.begin}": in_memory_order(value) if value.dim() else value
            for piece in pieces
            for key, value in piece.current(self._optimizer).items()
        }

    @override
    def state_dict(self) -> CallbackState:
        return {"owned": self._owned(self._all_pieces())}

    @override
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        by_name = _by_parameter(state["owned"])
        for piece in self._all_pieces():
            found = _assembled(by_name.get(piece.name, {}), piece.begin, piece.end)
            piece.state = self._laid_out(found, piece.parameter, piece.whole)
            self._optimizer.state.pop(piece.whole, None)  # which Adagrad has from the beginning

    def _laid_out(
        self, found: Mapping[str, torch.Tensor], like: torch.Tensor, whole: torch.nn.Parameter
    ) -> dict[str, Any]:
        """Flat state in the layout of `like`, and where the optimizer's kernels want it."""
        options = next(
            (g for g in self._optimizer.param_groups if any(p is whole for p in g["params"])), {}
        )
        state: dict[str, Any] = {}
        for key, value in found.items():
            if value.dim():
                state[key] = torch.empty_like(like, dtype=value.dtype, requires_grad=False)
                in_memory_order(state[key]).copy_(value)
            else:
                on_device = key != "step" or options.get("capturable") or options.get("fused")
                state[key] = value.to(like.device if on_device else value.device, copy=True)
        return state

    @override
    def close(self) -> None:
        self._put_back()
        self._unhook()


def padded_size(num_elements: int, world_size: int) -> int:
    """Of a message of `num_elements` that has equal parts."""
    return -(-num_elements // world_size) * world_size


def part_of(bucket: Bucket, driver: Driver) -> tuple[int, int]:
    """Where this rank's part begins and ends."""
    size = padded_size(bucket.num_elements, driver.world_size) // driver.world_size
    return driver.rank * size, (driver.rank + 1) * size


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor, shape (n,), in its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


_Saved: TypeAlias = dict[str, dict[int, torch.Tensor]]
"""State of one parameter by key, and by where its piece begins."""


def _by_parameter(saved: Mapping[str, torch.Tensor]) -> dict[str, _Saved]:
    found: defaultdict[str, _Saved] = defaultdict(dict)
    for path, value in saved.items():
        key, _, place = path.partition("/")
        name, _, begin = place.rpartition("/")  # a module's name may hold slashes
        found[name].setdefault(key, {})[int(begin)] = value
    return found


def _assembled(saved: _Saved, begin: int, end: int) -> dict[str, torch.Tensor]:
    """Elements `begin` to `end` of a parameter's state, of whatever pieces it was saved in."""
    found = {}
    for key, pieces in saved.items():
        starts = sorted(pieces)
        flat = pieces[starts[0]]
        if flat.dim():
            ends = [start + pieces[start].numel() for start in starts]
            if starts[0] > begin or ends[-1] < end or starts[1:] != ends[:-1]:
                raise CheckpointError(
                    f"the optimizer's {key!r} lacks elements, which other ranks have saved: with as"
                    " many ranks as then resume with the same bucket_mib and model, by which parts"
                    " are shared out, with others share out the states of all ranks by"
                    " offbeat.reshard"
                )
            flat = torch.cat([pieces[start] for start in starts])
            flat = flat[begin - starts[0] : end - starts[0]]
        found[key] = flat
    return found
