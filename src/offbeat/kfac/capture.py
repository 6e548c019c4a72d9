"""Watches a model train, and sums up its factors.

For each layer K-FAC covers, the forward pass adds its inputs to A and the backward pass its output
gradients to G. What has been summed is taken away as an `Increment`: a mean with its weight, ready
to be averaged over ranks.

What is counted, and what is not:
- Everything between two `take`s belongs together: batches whose gradients are accumulated make one
  increment.
- A module called several times in one forward pass of the root sees further positions of the same
  examples. Where a loop calls parts of the model and not the root, as Lightning does, a pass ends
  with its backward pass.
- Under activation checkpointing the forward pass runs again while backward is running. What was
  recorded the first time is not recorded again; what was not, since re-entrant checkpoints run
  without gradients at first, is recorded when its gradient comes.
- Gradients are taken at the output itself, before any operation changes it in place, and are
  unscaled under AMP.
- A pass has as many terms as reach the loss, for all of its blocks: a layer's own inputs may have
  no batch dimension, as those of position embeddings, or fold something else into it. They are
  counted where gradients enter the model's output. A model that returns the loss itself has them
  counted at the block whose gradient comes first. Where each position is a term, one whose
  gradient is all zeros, such as padding, is none.
- Layers that were not used get an increment of weight 0.
- A weight that is also used without calling its layer, as in `F.linear(x, embedding.weight)`, has
  the factors of the calls alone.
- Where examples are sub-sampled, both factors look at the same ones, every n-th of each batch; the
  next step with factors begins at the next one. Means and weights are of what was looked at, so
  factors keep their scale.
- A layer whose shape has changed, or whose inputs are sparse or nested, is retired: a warning names
  it, and its increments have weight 0 from then on.
- Passes without gradients are not seen, nor those inside transforms of `torch.func`, nor those in
  which all that is covered is frozen. Of one that no backward pass follows, as of an evaluation
  that leaves gradients on, inputs count, and no terms of the loss. So it is with
  `torch.autograd.grad`, which adds to no weight's gradient. Second passes through a retained graph
  cannot be told from training and are counted.

`nn.MultiheadAttention` calls its projections as functions and not as modules. PyTorch's own forward
pass runs, to the bit: its code is executed with the name `linear` bound to an observer that calls
the real one and shows what went in and came out. While watched, a module has a subclass as its
class; copies of it, such as averaged models, are not watched, and `unwatch` gives the class back.

Private parts of PyTorch that this file relies on: `_current_graph_task_id` (-1 unless a backward
pass is running here), and that in torch.nn.functional `multi_head_attention_forward`,
`_in_projection_packed` and `_in_projection` project through the global `linear`. A version where
they do not shows nothing, which the observer must notice (`Projections.finished`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn

from offbeat.callbacks.module_hook import ModuleHook
from offbeat.callbacks.plain_arithmetic import plain_arithmetic
from offbeat.kfac.blocks import Block, LayerBlock, Moment, Side, Use
from offbeat.kfac.curvature import Curvature
from offbeat.torch_private import (
    NO_BACKWARD_PASS,
    accumulates,
    attention_functions,
    current_backward_pass,
    inside_transform,
    tensors_in,
)


class Increment(NamedTuple):
    """One step's factor on this rank.

    Attributes:
        packed: the mean, of the factor's packed shape; zeros if the weight is 0.
        weight: how much it counts in a mean over ranks: input rows for A, terms of the loss for G,
            as far as looked at.
    """

    packed: torch.Tensor
    weight: float


@dataclass(slots=True)
class _Sums:
    """What one use of a block's weight has seen since the last `take`.

    Attributes:
        inputs, outputs: sums of a a^T and g g^T.
        terms: by forward pass of the root, how many terms of the loss the block's inputs seem to
            belong to, and how many of them were looked at, in the widest of its calls.
    """

    inputs: Moment | None = None
    outputs: Moment | None = None
    terms: dict[int, tuple[int, int]] = field(default_factory=dict)


class Capture:
    """Hooks on a model's layers. `remove` takes all of them out again.

    It sees nothing until `start` is called, and nothing more after `stop`: factors need not be
    computed in every step.

    Args:
        model: the root module, whose forward passes separate batches where it is called.
        blocks: what to watch.
        curvature: how to count.
        warn: is told of layers that cannot be watched any more.
        grad_scale: by what factor gradients are scaled at the moment (AMP).
        added: is called with a block's index and a side whenever something was added to that
            factor.
        room: for a block's index and a side, where to sum that factor until it is taken: the
            message that it leaves in. None: in memory of its own.
        is_kept: whether this rank sums the factors of the block of an index. Of others it counts
            terms of the loss alone, which belong to the whole pass.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        curvature: Curvature,
        *,
        warn: Callable[[str], None],
        grad_scale: Callable[[], float] = lambda: 1.0,
        added: Callable[[int, Side], None] = lambda index, side: None,
        room: Callable[[int, Side], torch.Tensor | None] = lambda index, side: None,
        is_kept: Callable[[int], bool] = lambda index: True,
    ) -> None:
        self.retired: set[str] = set()
        """Names of blocks whose layers have changed their shape."""
        self.spent_s = 0.0
        """Seconds spent so far on computing factors."""
        self.phase: int | None = None
        """How many steps with factors came before this one; None: nothing is summed now."""
        self._blocks = list(blocks)
        self._curvature = curvature
        self._warn, self._grad_scale, self._added = warn, grad_scale, added
        self._room, self._is_kept, self._taken = room, is_kept, set[tuple[int, Side]]()
        self._uses: list[Use] = []
        self._block_of: list[int] = []  # by the number of a use
        self._uses_of: list[list[int]] = []
        for index, block in enumerate(blocks):
            self._uses_of.append([len(self._uses) + number for number in range(len(block.uses))])
            self._block_of += [index] * len(block.uses)
            self._uses += block.uses
        self._sums = [_Sums() for _ in self._uses]
        self._layers_seen: set[str] = set()
        self._pass = 0
        self._is_in_root = self._has_gradient = False  # the latter: since the pass began
        # By forward pass of the root: terms that the gradient of its output shows, and terms of
        # passes of which a block has got a gradient.
        self._terms_at_output: dict[int, float | torch.Tensor] = {}
        self._terms_in_loss: dict[int, float | torch.Tensor] = {}
        self._handles: list[Any] = self._hook_root(model)
        self._watched: list[nn.MultiheadAttention] = []
        for module in model.modules():
            if isinstance(module, nn.MultiheadAttention):
                self._watch(module)
        inside = {id(module.out_proj) for module in self._watched}
        for place, use in enumerate(self._uses):
            for module, name in zip(use.modules, use.names, strict=True):
                if not isinstance(module, nn.MultiheadAttention) and id(module) not in inside:
                    self._handles += self._hook(module, place, name)

    def remove(self) -> None:
        """Take every hook out. Idempotent."""
        self.stop()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module in self._watched:
            unwatch(module)
        self._watched.clear()

    def start(self, phase: int) -> None:
        """Sum from now on. `phase` counts such steps; where examples are sub-sampled it says which
        are looked at.
        """
        self.phase = phase

    def stop(self) -> None:
        """See nothing more, and forget what was not taken."""
        self.phase = None
        self._sums = [_Sums() for _ in self._uses]
        self._taken.clear()
        self._terms_at_output, self._terms_in_loss = {}, {}

    def take(self, index: int, side: Side) -> Increment:
        """What was added to a factor of block `index` since the last time. Take "input" first:
        "output" ends the step.
        """
        found = [self._take_use(place, side) for place in self._uses_of[index]]
        self._taken.add((index, side))
        sums = [self._sums[place] for place in self._uses_of[index]]
        increment = found[0]
        if len(found) > 1:
            # One weight counts for both uses, and it is that of the terms of the loss, of which
            # both see the same.
            weight = max(self._count_terms(each)[1] for each in sums)
            increment = Increment(torch.cat([packed for packed, _ in found]), weight)
        if side == "output":
            for each in sums:
                each.terms = {}
        return increment

    def _take_use(self, place: int, side: Side) -> Increment:
        use, sums = self._uses[place], self._sums[place]
        block, own_side = use.block, _whole_side(use, side)
        num_terms, num_seen = self._count_terms(sums)
        if own_side == "input":
            moment, sums.inputs = sums.inputs, None
        else:
            moment, sums.outputs = sums.outputs, None
        if (
            moment is None
            or self.is_retired(self._block_of[place])
            or not (moment.num_rows and (own_side == "input" or num_seen))
        ):
            weight = block.weight
            dtype = torch.promote_types(weight.dtype, torch.float32)
            zeros = torch.zeros(block.shape(own_side).packed, dtype=dtype, device=weight.device)
            return Increment(zeros, 0.0)
        if own_side == "input":
            return Increment(moment.packed.div_(moment.num_rows), float(moment.num_rows))
        # The backward pass delivers the gradient of a mean over all terms: each term's own gradient
        # is that times the number of terms, and G is a product of two of them.
        return Increment(moment.packed.mul_(num_terms**2 / num_seen), num_seen)

    def pop_layers_seen(self) -> set[str]:
        """Names of the layers, or of the blocks of attentions, whose output gradients have been
        added since the last call.
        """
        seen, self._layers_seen = self._layers_seen, set()
        return seen

    def _count_terms(self, sums: _Sums) -> tuple[float, float]:
        """Terms of the loss in the passes that a block took part in and that gradients have come
        of, and how many of them it looked at. While no loss is known the block's own inputs are
        counted.
        """
        num_terms = num_seen = 0.0
        for number, (own, own_seen) in sums.terms.items():
            # The host waits for a pass's count once, and not for every factor.
            if number in self._terms_in_loss:
                self._terms_in_loss[number] = float(self._terms_in_loss[number])
            elif self._terms_in_loss:
                continue
            in_loss = float(self._terms_in_loss.get(number, own))
            num_terms += in_loss
            num_seen += in_loss * own_seen / max(own, 1)
        return num_terms, num_seen

    # Called while the model runs

    def saw_inputs(self, place: int, inputs: torch.Tensor, *, num_terms: int | None = None) -> None:
        """Use `place` is about to be called with `inputs`, which belong to `num_terms` terms of
        the loss; None: the block counts them.
        """
        listens = self._listens(place) and _is_dense(inputs)
        if listens and self._uses[place].block.fits(inputs) and not _inside_backward():
            if self._has_gradient and not self._is_in_root:
                self._begin_pass()
            self._add_inputs(place, inputs, num_terms)

    def saw_output(
        self,
        place: int,
        inputs: torch.Tensor,
        output: torch.Tensor,
        *,
        num_terms: int | None = None,
        select: Callable[[torch.Tensor], torch.Tensor] = lambda gradient: gradient,
        layer: str | None = None,
    ) -> None:
        """Use `place` was called.

        Args:
            place: of the use.
            inputs: what it was called with.
            output: what it returned; its gradient is what is looked at.
            num_terms: terms of the loss that the inputs belong to; None: the block counts them.
            select: picks the block's part of the output's gradient.
            layer: the name of the layer that was called; None: the block's.
        """
        if not self._listens(place) or not output.requires_grad:
            return
        if not _is_dense(inputs):
            self.retire_use(place, "its inputs are a sparse or nested tensor")
            return
        block = self._uses[place].block
        if not block.fits(inputs):  # and yet the layer has not raised
            _, rows, columns = block.matrix_shape
            self.retire_use(
                place,
                f"its shape has changed to inputs of {tuple(inputs.shape)} and a weight of"
                f" {tuple(block.weight.shape)}, from a matrix of {rows} x {columns}",
            )
            return
        # A checkpointed forward pass runs again inside the backward pass. What its hooks recorded
        # the first time must not be recorded twice; a re-entrant checkpoint ran without gradients
        # then, so its inputs are recorded when the gradient comes.
        recomputing = _inside_backward()
        # Inputs are kept only where they are needed: keeping them would undo what checkpoints save.
        kept = inputs.detach() if recomputing or block.masks_outputs else None
        dim, number = block.example_dim(inputs), self._pass
        stride = self._stride(block, inputs, dim)

        def saw_gradient(gradient: torch.Tensor) -> None:
            weight = block.weight
            if self.phase is not None and (not weight.requires_grad or accumulates(weight)):
                self._has_gradient = True
                if recomputing and kept is not None:
                    self._add_inputs(place, kept, num_terms)
                gradient = select(gradient)
                self._saw_first_gradient(number, place, gradient)
                self._add_gradient(place, gradient, kept, dim, stride)
                self._layers_seen.add(layer or block.name)

        output.register_hook(saw_gradient)

    def retire(self, index: int, what: str) -> None:
        """Watch block `index` no longer, for the reason `what`."""
        name = self._blocks[index].name
        if name not in self.retired:
            self.retired.add(name)
            self._warn(
                f"K-FAC no longer preconditions {name!r}: {what}; it gets plain gradients from"
                " now on"
            )

    def retire_use(self, place: int, what: str) -> None:
        """Watch the block of use `place` no longer, for the reason `what`."""
        self.retire(self._block_of[place], what)

    def is_retired(self, index: int) -> bool:
        """Whether block `index` is watched no longer."""
        return self._blocks[index].name in self.retired

    def _listens(self, place: int) -> bool:
        return (
            self.phase is not None
            and torch.is_grad_enabled()
            and not inside_transform()
            and not self.is_retired(self._block_of[place])
            # Else the pass is for another model's sake, as a generator's through its critic is.
            and any(each.weight.requires_grad for each in self._blocks)
        )

    def _watch_loss(self, output: Any) -> None:
        """Count the terms of this pass when the gradient of the model's output comes. Of several
        outputs the first one with terms is the one that counts.
        """
        number = self._pass
        for tensor in tensors_in(output):
            has_terms = _is_dense(tensor) and tensor.ndim > 1
            if has_terms and tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(lambda gradient: self._saw_loss_gradient(number, gradient))
                return

    def _saw_loss_gradient(self, number: int, gradient: torch.Tensor) -> None:
        """Where the model's output is laid out as no block's inputs are, it says nothing."""
        if self._curvature.loss_terms == "position":
            num_terms = gradient.shape[:-1].numel()
        else:
            num_terms = gradient.shape[min(self._curvature.batch_dim, gradient.ndim - 2)]
        own = [sums.terms[number][0] for sums in self._sums if number in sums.terms]
        if self.phase is not None and num_terms in own:
            self._terms_at_output[number] = self._without_padding(num_terms, gradient)

    def _saw_first_gradient(self, number: int, place: int, gradient: torch.Tensor) -> None:
        """Of all blocks, the one whose gradient comes first in a pass is nearest to the loss."""
        terms = self._sums[place].terms
        if number in terms and number not in self._terms_in_loss:
            at_output = self._terms_at_output.get(number)
            if at_output is None:
                at_output = self._without_padding(terms[number][0], gradient)
            self._terms_in_loss[number] = at_output

    def _without_padding(self, num_terms: int, gradient: torch.Tensor) -> int | torch.Tensor:
        """How many of the terms get a gradient, if each position is one; a tensor, so that nobody
        waits for it yet.
        """
        if self._curvature.loss_terms == "example" or gradient.shape[:-1].numel() != num_terms:
            return num_terms
        return gradient.any(dim=-1).count_nonzero()

    def _add_inputs(self, place: int, inputs: torch.Tensor, num_terms: int | None) -> None:
        began_s, sums = time.monotonic(), self._sums[place]
        use, index = self._uses[place], self._block_of[place]
        block = use.block
        if num_terms is None:
            num_terms = block.num_terms(inputs)
        dim = block.example_dim(inputs)
        seen = self._sampled(inputs.detach(), dim, self._stride(block, inputs, dim))
        # Of each example that is looked at, all terms are.
        num_seen = (
            num_terms if dim is None else num_terms // max(inputs.shape[dim], 1) * seen.shape[dim]
        )
        # A pass has as many terms as the widest of its calls.
        sums.terms[self._pass] = max(sums.terms.get(self._pass, (0, 0)), (num_terms, num_seen))
        if not self._is_kept(index):
            return
        with plain_arithmetic(inputs.device.type):
            moment = block.input_moment(seen if block.samples_inputs else inputs.detach())
            sums.inputs = self._plus(place, "input", sums.inputs, moment)
        self.spent_s += time.monotonic() - began_s
        self._added(index, _whole_side(use, "input"))

    def _add_gradient(
        self,
        place: int,
        gradient: torch.Tensor,
        inputs: torch.Tensor | None,
        dim: int | None,
        stride: int,
    ) -> None:
        began_s, sums = time.monotonic(), self._sums[place]
        use, index = self._uses[place], self._block_of[place]
        if not self._is_kept(index):
            return
        inputs = None if inputs is None else self._sampled(inputs, dim, stride)
        with plain_arithmetic(gradient.device.type):
            moment = use.block.output_moment(self._sampled(gradient, dim, stride), inputs)
            if (scale := self._grad_scale()) != 1:
                # G is a product of two gradients, each scaled by AMP.
                moment.packed.div_(scale**2)
            sums.outputs = self._plus(place, "output", sums.outputs, moment)
        self.spent_s += time.monotonic() - began_s
        self._added(index, _whole_side(use, "output"))

    def _plus(self, place: int, own_side: Side, sum_: Moment | None, moment: Moment) -> Moment:
        """`moment` added to what use `place` has summed. The first one is copied to where it will
        leave from, so that no factor is in memory twice.
        """
        if sum_ is not None:
            return Moment(sum_.packed.add_(moment.packed), sum_.num_rows + moment.num_rows)
        index, side = self._block_of[place], _whole_side(self._uses[place], own_side)
        # What was taken is on its way; what comes after it counts for nothing.
        room = None if (index, side) in self._taken else self._room(index, side)
        if room is None:
            return moment
        number = self._uses_of[index].index(place)
        part = room.chunk(len(self._uses_of[index]))[number]
        return Moment(part.copy_(moment.packed), moment.num_rows)

    def _stride(self, block: LayerBlock, inputs: torch.Tensor, dim: int | None) -> int:
        """Every how-manieth example of `inputs`, which `dim` counts, and of what comes of them, is
        looked at.
        """
        if dim is None:
            return 1
        return self._curvature.stride(inputs.shape[dim], block.num_positions(inputs))

    def _sampled(self, tensor: torch.Tensor, dim: int | None, stride: int) -> torch.Tensor:
        """The examples that are looked at: a view."""
        assert self.phase is not None
        if dim is None or stride == 1:
            return tensor
        return tensor[(*[slice(None)] * dim, slice(self.phase % stride, None, stride))]

    def _begin_pass(self) -> None:
        self._pass += 1
        self._has_gradient = False

    def _hook_root(self, model: nn.Module) -> list[Any]:
        def begins(module: nn.Module, args: Any) -> None:
            if not (_inside_backward() or inside_transform()):
                self._is_in_root = True
                self._begin_pass()

        def ends(module: nn.Module, args: Any, output: Any) -> None:
            if self._is_in_root:
                self._is_in_root = False
                if self.phase is not None:
                    self._watch_loss(output)

        return [
            model.register_forward_pre_hook(ModuleHook(model, begins)),
            model.register_forward_hook(ModuleHook(model, ends), always_call=True),
        ]

    def _watch(self, module: nn.MultiheadAttention) -> None:
        inside = {
            place: use.block
            for place, use in enumerate(self._uses)
            if use.block.module in (module, module.out_proj)
        }
        if inside:
            watch(module, Projections(self, module, inside))
            self._watched.append(module)

    def _hook(self, module: nn.Module, place: int, name: str) -> list[Any]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.saw_inputs(place, _first_argument(args, kwargs))

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.saw_output(place, _first_argument(args, kwargs), output, layer=name)

        return [
            module.register_forward_pre_hook(ModuleHook(module, before), with_kwargs=True),
            module.register_forward_hook(ModuleHook(module, after), with_kwargs=True),
        ]


def _whole_side(use: Use, side: Side) -> Side:
    """Which factor of the whole block a use's own factor `side` adds to, and the reverse."""
    if not use.is_flipped:
        return side
    return "output" if side == "input" else "input"


def _first_argument(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """What a layer was called with. Models call layers of their own with names of their own."""
    found: torch.Tensor = args[0] if args else kwargs.get("input", next(iter(kwargs.values())))
    return found


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _inside_backward() -> bool:
    return current_backward_pass() != NO_BACKWARD_PASS


_NOT_SELF_ATTENTION = (
    "it was called with query, key and value that are not one and the same tensor, or without a"
    " batch dimension; name its module in cross_attention"
)


_watched: WeakKeyDictionary[nn.Module, tuple[FunctionType, Projections]] = WeakKeyDictionary()


class _WatchedAttention(nn.MultiheadAttention):
    """The class of an attention while it is watched, with the class that it had as further base."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        watched = _watched.get(self)
        if watched is None or not torch.is_grad_enabled() or inside_transform():
            return super().forward(*args, **kwargs)
        forward, observer = watched
        output = forward(self, *args, **kwargs)
        # Without a gradient PyTorch may have taken its fast path, which shows nothing.
        if output[0].requires_grad:
            observer.finished()
        return output

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        # Copies, and what is pickled, are not watched.
        return object.__new__, (type(self).__bases__[1],), vars(self).copy()


_watched_kinds: dict[type[nn.MultiheadAttention], type[nn.MultiheadAttention]] = {}
"""By the class that an attention has while it is not watched."""


def watch(module: nn.MultiheadAttention, observer: Projections) -> None:
    """Show each projection in forward passes with gradients to `observer`, in the order
    they happen.
    """

    def linear(
        inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        output = F.linear(inputs, weight, bias)
        observer.projected(inputs, weight, output)
        return output

    # PyTorch's functions are copied with other globals rather than patched, so that no other module
    # and no other thread sees the change.
    functional = {**vars(F), "linear": linear}
    for name, function in attention_functions().items():
        functional[name] = rebound(function, functional)
    forward = nn.MultiheadAttention.forward
    _watched[module] = (
        rebound(forward, {**forward.__globals__, "F": SimpleNamespace(**functional)}),
        observer,
    )
    kind = type(module)
    if kind not in _watched_kinds:
        # torch.compile does not get along with functions whose global names are others.
        own = {"forward": torch.compiler.disable(_WatchedAttention.forward)}
        _watched_kinds[kind] = type(kind.__name__, (_WatchedAttention, kind), own)
    module.__class__ = _watched_kinds[kind]


def unwatch(module: nn.MultiheadAttention) -> None:
    """The inverse of `watch`."""
    del _watched[module]
    module.__class__ = type(module).__bases__[1]


def rebound(function: Any, names: dict[str, Any]) -> FunctionType:
    """`function` with its global names looked up in `names`."""
    bound = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    bound.__kwdefaults__ = function.__kwdefaults__
    return bound


class Projections:
    """Is shown what the projections of an attention get and return, and knows which block each of
    them belongs to.

    Args:
        capture: is told of inputs and outputs of blocks.
        module: the attention.
        blocks: its blocks, by the number of the use that `capture` knows them by.
    """

    def __init__(
        self, capture: Capture, module: nn.MultiheadAttention, blocks: Mapping[int, LayerBlock]
    ) -> None:
        self._capture, self._blocks = capture, blocks
        self._module = module
        self._num_examples = self._num_terms = 1
        self._seen = False

    def projected(self, inputs: torch.Tensor, weight: torch.Tensor, output: torch.Tensor) -> None:
        """`output` is `inputs` times `weight`, transposed, plus a bias."""
        self._seen = True
        if inputs.ndim == 2:  # the output projection gets positions and examples in one dimension
            num_positions = len(inputs) // max(self._num_examples, 1)
            inputs = inputs.unflatten(0, (num_positions, self._num_examples))
        self._num_examples = inputs.shape[1]
        if self._is_query(weight):  # which may be frozen and no block's
            self._num_terms = next(iter(self._blocks.values())).num_terms(inputs)
        for index, block in self._blocks.items():
            wanted = block.weight.detach()[block.rows]
            if wanted.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr():
                continue
            first = (wanted.storage_offset() - weight.storage_offset()) // weight.shape[1]
            if first == 0 and len(wanted) > len(weight):
                self._capture.retire_use(index, _NOT_SELF_ATTENTION)
            elif 0 <= first < len(weight):
                self._show(index, inputs, output, slice(first, first + len(wanted)))

    def finished(self) -> None:
        """A forward pass is over."""
        if not self._seen:
            for index in self._blocks:
                self._capture.retire_use(
                    index,
                    "this version of PyTorch computes attention in a way that cannot be observed",
                )

    def _is_query(self, weight: torch.Tensor) -> bool:
        module = self._module
        query = module.q_proj_weight if module.in_proj_weight is None else module.in_proj_weight
        return query.data_ptr() == weight.data_ptr()

    def _show(self, index: int, inputs: torch.Tensor, output: torch.Tensor, columns: slice) -> None:
        shape = *inputs.shape[:-1], columns.stop - columns.start

        def select(gradient: torch.Tensor) -> torch.Tensor:
            return gradient[..., columns].reshape(shape)

        self._capture.saw_inputs(index, inputs, num_terms=self._num_terms)
        self._capture.saw_output(index, inputs, output, num_terms=self._num_terms, select=select)
