"""From gradients to preconditioned gradients: P = G^-1 (dL/dW) A^-1 for every layer, how every rank
gets the inverses for it, and how long a step along P may be.

Each inverse is made by its owner as soon as its factors have arrived, and is broadcast while the
owner makes the next one; or every rank makes it:

1. `start` is called when gradients are final.
2. `advance` is called whenever another message of factors has been taken in. What that completes is
   inverted by its owners and sent, in the order that was planned (`kfac.plans`).
   Messages are launched in this order on every rank.
3. `fill` is called while the next message is still under way, and makes some of what every rank
   inverts.
4. `finish` makes the rest of it, and waits for the peers' inverses.

No thread inverts beside the backward pass: on a CPU it would take its cores from that pass. What
could be gained by it is what remains exposed of broadcasts.

Either every rank has all inverses and multiplies by them itself, or each layer has an owner, which
alone has its inverses and broadcasts P. In the second case nobody multiplies what others have
multiplied, so all ranks get the same bits on any mixture of devices.

P is the direction of steepest descent per unit of change in what the model predicts, rather than
per unit of change in its parameters. Its length is limited by KL clipping (arXiv 1708.05509,
section 5): the step lr * P changes predictions by about lr^2 <P, grad>, summed over layers, and is
shortened where that exceeds a limit:

    nu = min(1, sqrt(kl_clip / |sum of lr^2 <P, grad>|))

Grafting gives a layer's P the length of its gradient (Agarwal et al., arXiv 2002.11803), because a
learning rate that was chosen without K-FAC is one for such lengths:

    "layer": P |grad| / |P|, and no limit
    "floor": P max(1, |grad| / |P|), times nu; nu is that of P as it was

A layer's P takes the place of its gradient as soon as it is made, and is multiplied by nu when all
are. Layers without an inverse keep their plain gradient, unclipped, and do not count.

Cost for a layer of d_out x d_in: 2 d_out d_in (d_out + d_in) operations, 2 d_out d_in more for <P,
grad>, and 4 d_out d_in more for grafting. Memory while it lasts: two
or three times the largest gradient, and the largest inverse, unpacked.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import torch

from offbeat.collectives.dense import dense_broadcast
from offbeat.errors import CheckpointError
from offbeat.gradients.parameter_groups import rates_of
from offbeat.kfac.blocks import Block, BlockGradient, FactorSlot, JoinedGradients, KFACContext
from offbeat.kfac.curvature import Grafting
from offbeat.kfac.factors import (
    FactorShape,
    multiply_columns,
    multiply_rows,
    padded,
    unpack,
    unpack_triangles,
)
from offbeat.kfac.inverses import (
    MOST_AT_ONCE,
    InverseForm,
    InversionTask,
    Inverter,
    form_for,
    is_asynchronous,
)
from offbeat.kfac.placement import Owner
from offbeat.kfac.plans import FactorPlan, InverseBatch
from offbeat.torch_private import for_each
from offbeat.transport.driver import Driver, Pending, Stream


class Preconditioner:
    """Holds the inverses that this rank has, and multiplies gradients by them.

    Args:
        kfac: what all parts know.
        form: what is kept of inverses.

    Attributes:
        inverses: where the inverses are kept, and how they get there.
        is_stale: whether the inverses, of a checkpoint with another form, must be made anew.
        precondition_s: seconds spent so far on turning gradients into preconditioned gradients.
        last_nu: by what the last step was shortened (`kl_scale`), a scalar tensor in (0, 1]; None
            where nothing limits steps.
    """

    def __init__(self, kfac: KFACContext, form: InverseForm) -> None:
        assert kfac.session.optimizer is not None
        self.is_stale = False
        self.precondition_s = 0.0
        self.last_nu: torch.Tensor | None = None
        self._blocks, self._slots, self._settings = kfac.blocks, kfac.slots, kfac.settings
        self._optimizer, self._driver = kfac.session.optimizer, kfac.session.driver
        self._stream, self._form = kfac.stream, form
        self._inverter = Inverter(kfac.session.notices.notify, form)
        self.inverses = InverseExchange(
            self._slots, self._inverter, driver=self._driver, stream=self._stream
        )

    def adopt(self, plan: FactorPlan, order: Sequence[InverseBatch]) -> None:
        """Have what `plan` says, inverted and sent in `order`. Inverses that this rank has already
        and keeps stay as they are.
        """
        self._plan = plan
        self.inverses.adopt(order, travels=not plan.by_owner)
        self._pair_inverses()

    def finish_inversions(self) -> None:
        """Until all inverses are there."""
        self.inverses.finish()
        self.is_stale = False
        self._pair_inverses()

    def precondition(self, retired: Collection[int]) -> None:
        """Replace the gradients of all blocks but the `retired` ones by preconditioned
        gradients. Collective where owners send them.
        """
        began_s = time.perf_counter()
        groups = zip(self._optimizer.param_groups, rates_of(self._optimizer), strict=True)
        lr_of = {id(parameter): lr for group, lr in groups for parameter in group["params"]}
        live = [
            InvertedBlock(block, pair, lr_of[id(block.weight)], index)
            for index, (block, pair) in enumerate(zip(self._blocks, self._pairs, strict=True))
            # How far another optimizer steps is not known, so that nothing could limit its steps.
            if index not in retired and id(block.weight) in lr_of
        ]
        if self._plan.by_owner:
            self.last_nu = self._precondition_by_owners(live)
        else:
            settings = self._settings
            self.last_nu = precondition_(live, kl_clip=settings.kl_clip, grafting=settings.grafting)
        self.precondition_s += time.perf_counter() - began_s

    @torch.no_grad()
    def _precondition_by_owners(self, live: Sequence[InvertedBlock]) -> torch.Tensor | None:
        """Replace the gradients of blocks, the same on all ranks, by preconditioned gradients.
        Collective.

        Each owner's message holds the preconditioned gradients of its blocks, for each block
        whether there is one, and what they would change together. The last number is why the limit
        of a step, which is one for all layers, needs no message of its own.

        Args:
            live: the blocks. Those without gradient are passed over.

        Returns:
            As of `precondition_`.
        """
        rank, of_owner = self._driver.rank, dict[Owner, list[InvertedBlock]]()
        for each in live:
            # All ranks see the same gradients, so all of them leave the same blocks out.
            if each.block.has_gradient():
                of_owner.setdefault(self._plan.owners[2 * each.place], []).append(each)
        messages = [
            _GradientMessage(of_owner[owner], owner)
            for owner in range(self._driver.world_size)
            if owner in of_owner
        ]
        pending = []
        for message in messages:
            if message.owner == rank:
                message.fill(self._settings.grafting)
            broadcast = dense_broadcast(message.flat, message.owner)
            pending.append(self._driver.launch(broadcast, self._stream.next()))
        for sent in pending:
            sent.wait()
        nu, kl_clip = None, self._settings.kl_clip
        if kl_clip is not None and messages:
            changes = (message.change.to("cpu", torch.float64) for message in messages)
            nu = kl_scale(sum(changes, torch.zeros((), dtype=torch.float64)), kl_clip)
        for message in messages:
            message.show(1.0 if nu is None else float(nu))
        return nu

    def _pair_inverses(self) -> None:
        """There are other inverses. By block, what this rank has of them; None where only its owner
        has them.
        """
        packed = self.inverses.packed
        self._pairs = [
            None if inputs is None or outputs is None else InversePair(inputs, outputs, self._form)
            for inputs, outputs in zip(packed[::2], packed[1::2], strict=True)
        ]

    # State

    def state_dict(self) -> dict[str, Any]:
        kept: dict[str, Any] = {
            f"{slot.key}/inverse": inverse
            for slot, inverse in zip(self._slots, self.inverses.packed, strict=True)
            if inverse is not None
        }
        return kept | {"form": self._form}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`. An inverse that is not in `saved` is none, and so is each of
        another form.
        """
        self.is_stale = saved["form"] != self._form
        self._pair_inverses()
        for slot, inverse in zip(self._slots, self.inverses.packed, strict=True):
            if inverse is not None:
                none = torch.zeros_like(inverse)
                inverse.copy_(none if self.is_stale else saved.get(f"{slot.key}/inverse", none))

    def check_state(self, saved: Mapping[str, Any]) -> None:
        """Raise `CheckpointError` unless every average and inverse in `saved` is of this model."""
        known = {f"{slot.key}/sum": slot.shape.packed for slot in self._slots}
        if saved["form"] == self._form:
            known |= {
                f"{slot.key}/inverse": self._inverter.stored_shape(slot.shape)
                for slot in self._slots
            }
        for name, value in saved.items():
            key, _, what = name.rpartition("/")
            is_known = what == "sum" or (what == "inverse" and saved["form"] == self._form)
            if is_known and tuple(value.shape) != known.get(name):
                here = known.get(name, "no such factor")
                raise CheckpointError(
                    f"{what} of {key!r} was saved with shape {tuple(value.shape)}, here there is"
                    f" {here}; is it the same model, with the same max_dim?"
                )


class InvertedBlock(NamedTuple):
    """A block that no rank has given up: with its inverses, if this rank has them, its learning
    rate and its number.
    """

    block: Block
    inverse: InversePair | None
    lr: float
    place: int


class _GradientMessage:
    """One owner's preconditioned gradients."""

    def __init__(self, members: Sequence[InvertedBlock], owner: int) -> None:
        self.owner, self._members = owner, members
        blocks = [each.block for each in members]
        sizes = [*(block.num_parameters for block in blocks), len(blocks), 1]
        dtypes = (block.weight.dtype for block in blocks)
        dtype = reduce(torch.promote_types, dtypes, torch.float32)
        self.flat = torch.zeros(sum(sizes), dtype=dtype, device=blocks[0].weight.device)
        *parts, self._exists, change = self.flat.split(sizes)
        self._preconditioned = [
            part.view(block.matrix_shape) for part, block in zip(parts, blocks, strict=True)
        ]
        self.change = change[0]

    def fill(self, grafting: Grafting) -> None:
        look_up(self._members)
        for number, (block, inverse, lr, _) in enumerate(self._members):
            assert inverse is not None, "the owner has them"
            if not inverse.exists:
                continue
            self._exists[number] = 1.0
            gradient, preconditioned = block.gradient(), self._preconditioned[number]
            matrix, fixes_bias = gradient.matrix(), gradient.fixes_bias
            found = inverse.apply(matrix, block.inputs, block.outputs, fixes_bias=fixes_bias)
            self.change.add_(torch.dot(found.flatten(), matrix.flatten()) * lr**2)
            preconditioned.copy_(found)
            graft_(preconditioned, matrix, grafting)

    def show(self, scale: float) -> None:
        for number, (block, *_) in enumerate(self._members):
            gradient, scaled = block.gradient(), self._preconditioned[number] * scale
            gradient.write_(torch.where(self._exists[number] > 0, scaled, gradient.matrix()))


class InverseExchange:
    """Where all inverses that this rank has are kept, and how they get there.

    Args:
        slots: all factors of the model.
        inverter: inverts.
        driver: carries broadcasts out.
        stream: of the broadcasts.

    Attributes:
        packed: what stands for the inverse of each slot; zeros stand for none. None where this rank
            needs none.
        invert_s: seconds spent so far on computing inverses.
        wait_s: seconds spent so far on waiting for the other ranks' inverses.
    """

    def __init__(
        self,
        slots: Sequence[FactorSlot],
        inverter: Inverter,
        *,
        driver: Driver,
        stream: Stream,
    ) -> None:
        self.invert_s = self.wait_s = 0.0
        self._slots, self._inverter, self._driver, self._stream = slots, inverter, driver, stream
        self.packed: list[torch.Tensor | None] = [None] * len(slots)

    def adopt(self, order: Sequence[InverseBatch], *, travels: bool) -> None:
        """Invert in `order` from now on. Inverses that are there already go on, side by side in
        that order.

        Args:
            order: who inverts what, and when.
            travels: whether owners send inverses. False: a rank has what it owns, and what every
                rank inverts.
        """
        before, self.packed = self.packed, [None] * len(self._slots)
        self._travels = travels
        # What an owner inverts in one go, and where these inverses lie side by side.
        self._messages: list[tuple[InverseBatch, int, torch.Tensor]] = []
        self._by_all = [batch for batch in order if batch.owner is None]
        for batch in order:
            if batch.owner is None or travels or batch.owner == self._driver.rank:
                flat = self._make_room([self._slots[slot] for slot in batch.slots])
                if batch.owner is not None:
                    self._messages.append((batch, batch.owner, flat))
        for old, new in zip(before, self.packed, strict=True):
            if old is not None and new is not None:
                new.copy_(old)

    def _make_room(self, slots: Sequence[FactorSlot]) -> torch.Tensor:
        """For the inverses of `slots`, one after the other in one tensor."""
        kept = [self._inverter.stored_shape(slot.shape) for slot in slots]
        sizes = [rows * columns for rows, columns in kept]
        dtype = self._inverter.stored_dtype(slots[0].dtype)
        flat = torch.zeros(sum(sizes), dtype=dtype, device=slots[0].device)
        for slot, part, shape_kept in zip(slots, flat.split(sizes), kept, strict=True):
            self.packed[slot.index] = part.view(shape_kept)
        return flat

    def start(self, tasks_of: Callable[[Sequence[int]], Sequence[InversionTask]]) -> None:
        """From now on every inverse is brought up to date. `tasks_of` says what to invert for slots
        that this rank inverts, all of one dtype and device.
        """
        self._tasks_of, self._num_messages = tasks_of, 0.0
        self._to_send, self._to_fill = deque(self._messages), deque(self._by_all)
        self._pending: list[Pending[torch.Tensor]] = []

    def advance(self, num_messages: float) -> None:
        """The first `num_messages` messages of factors have been taken in: owners invert and send
        what needs no more.
        """
        self._num_messages = num_messages
        while self._to_send and self._to_send[0][0].num_messages <= num_messages:
            batch, owner, flat = self._to_send.popleft()
            if owner == self._driver.rank:
                self._invert(batch.slots)
            if self._travels:
                # Every rank launches every broadcast here, in the planned order: one that inverts
                # nothing waits for its peers' inverses already while they are being made.
                broadcast = dense_broadcast(flat, owner)
                self._pending.append(self._driver.launch(broadcast, self._stream.next()))

    def fill(self, is_over: Callable[[], bool]) -> None:
        """Until `is_over`, invert of what every rank inverts whatever has arrived.

        Ranks may get differently far here: that changes neither what is inverted together nor the
        order of messages.
        """
        while (
            self._to_fill and self._to_fill[0].num_messages <= self._num_messages and not is_over()
        ):
            self._invert(self._to_fill.popleft().slots)

    def finish(self) -> None:
        """Until all inverses are there."""
        self.advance(math.inf)
        self.fill(lambda: False)
        begin_s = time.perf_counter()
        for broadcast in self._pending:
            broadcast.wait()
        self.wait_s += time.perf_counter() - begin_s
        self._pending = []

    def _invert(self, slots: Sequence[int]) -> None:
        begin_s = time.monotonic()
        for some in self._portions(slots):
            rooms = [room for slot in some if (room := self.packed[slot]) is not None]
            inverses = self._inverter.invert(self._tasks_of(some), rooms=rooms)
            for_each("copy_", rooms, inverses)
        self.invert_s += time.monotonic() - begin_s

    def _portions(self, slots: Sequence[int]) -> Iterator[list[int]]:
        """`slots`, as many at a time as are inverted in one call."""
        portion: list[int] = []
        num_elements = 0
        for slot in slots:
            shape = self._slots[slot].shape
            num_elements += shape.groups * (1 if shape.is_diagonal else shape.dim**2)
            # A CPU gains nothing by further ones in one call, and needs memory for all of them.
            is_too_much = num_elements > MOST_AT_ONCE
            if portion and is_too_much and not is_asynchronous(self._slots[slot].device):
                yield portion
                portion, num_elements = [], shape.groups * shape.dim**2
            portion.append(slot)
        yield portion


@dataclass
class InversePair:
    """Damped inverses of one block's factors, A's and G's, or the triangles that stand for them, as
    `form` keeps them. Once they change in place, another pair must be made.

    Attributes:
        exists: whether there are inverses; None as long as nobody has asked (`look_up`).
    """

    inputs: torch.Tensor
    outputs: torch.Tensor
    form: InverseForm
    exists: bool | None = None

    def apply(
        self,
        gradient: torch.Tensor,
        inputs: FactorShape,
        outputs: FactorShape,
        *,
        fixes_bias: bool = False,
    ) -> torch.Tensor:
        """Precondition `gradient`, of the `matrix_shape` of a block of such factors. The result
        means nothing where there is no inverse.

        With `fixes_bias` its last column is of zeros, and A is what is left of it without its last
        row and column: the inverse of that is X - b b^T / c, for A^-1 with blocks X, b and c.
        """
        _, num_outputs, num_inputs = gradient.shape
        matrices = padded(gradient.to(self.inputs.dtype), outputs, inputs)
        half = self._times_inputs(matrices, inputs)
        if fixes_bias:
            last = slice(num_inputs - 1, num_inputs)
            unit = torch.zeros_like(matrices[:, :1])
            unit[..., last] = 1
            row = self._times_inputs(unit, inputs)
            half = half - half[..., last] * (row / row[..., last])
        if outputs.is_diagonal:
            whole = half * self.outputs[:, :, None]
        else:
            squares, form = self._squares(self.outputs, outputs)
            whole = multiply_rows(half, outputs, lambda some: _from_left(squares, some, form))
        return whole[:, :num_outputs, :num_inputs].to(gradient.dtype)

    def _times_inputs(self, matrices: torch.Tensor, inputs: FactorShape) -> torch.Tensor:
        """`matrices`, with columns as `padded` makes them, times A^-1."""
        if inputs.is_diagonal:
            return matrices * self.inputs[:, None, :]
        squares, form = self._squares(self.inputs, inputs)
        return multiply_columns(matrices, inputs, lambda some: _from_right(some, squares, form))

    def _squares(self, kept: torch.Tensor, shape: FactorShape) -> tuple[torch.Tensor, InverseForm]:
        dim, form = shape.dim, form_for(self.form, shape)
        if self.form == "bfloat16":
            return kept.unflatten(1, (dim, dim)), form
        return (unpack_triangles if form == "triangle" else unpack)(kept, dim), form


def look_up(members: Sequence[InvertedBlock]) -> None:
    """Ask for which blocks there are inverses, unless that is known. The host waits once."""
    pairs = [each.inverse for each in members if each.inverse is not None]
    unknown = [each for each in pairs if each.exists is None]
    if not unknown:
        return
    device = unknown[0].inputs.device
    firsts = [kept[:, 0].to(device) for each in unknown for kept in (each.inputs, each.outputs)]
    lacks = iter((~(torch.cat(firsts) > 0)).tolist())
    for each in unknown:
        each.exists = not any(list(islice(lacks, len(each.inputs) + len(each.outputs))))


def _from_right(matrices: torch.Tensor, symmetric: torch.Tensor, form: InverseForm) -> torch.Tensor:
    """`matrices`, shape (groups, n, d), times the inverses: `symmetric` itself, or those of U^T U
    for the triangles U in `symmetric`.
    """
    if form == "triangle":
        half = torch.linalg.solve_triangular(symmetric, matrices, upper=True, left=False)
        whole: torch.Tensor = torch.linalg.solve_triangular(
            symmetric.mT, half, upper=False, left=False
        )
        return whole
    if matrices.shape[1] == 1 and symmetric.shape[2] <= 2:
        # The channels of a norm: as many products of tiny matrices, one by one, take far longer.
        return (matrices.mT * symmetric).sum(dim=1, keepdim=True)
    return torch.bmm(matrices, symmetric)


def _from_left(symmetric: torch.Tensor, matrices: torch.Tensor, form: InverseForm) -> torch.Tensor:
    """The inverses times `matrices`, shape (groups, d, n)."""
    if form == "triangle":
        return _from_right(matrices.mT, symmetric, form).mT
    return symmetric * matrices if symmetric.shape[1] == 1 else torch.bmm(symmetric, matrices)


def kl_scale(change: torch.Tensor, kl_clip: float) -> torch.Tensor:
    """nu: by what to multiply preconditioned gradients P, a scalar tensor in (0, 1].

    Args:
        change: the sum of lr^2 <P, gradient> over layers, a scalar tensor.
        kl_clip: the limit, > 0.
    """
    return (kl_clip / change.abs()).sqrt().clamp(max=1)


def graft_(preconditioned: torch.Tensor, plain: torch.Tensor, grafting: Grafting) -> None:
    """Give a layer's `preconditioned` gradient the length that `grafting` says. One that is all
    zeros stays so.
    """
    if grafting == "none":
        return
    # How long it is over the plain one; 1 where both are zeros.
    share = (preconditioned.norm() / plain.norm()).nan_to_num(nan=1.0, posinf=1.0)
    divisor = share.masked_fill(~(share > 0), 1.0)
    preconditioned.div_(divisor.clamp(max=1) if grafting == "floor" else divisor)


@torch.no_grad()
def precondition_(
    members: Sequence[InvertedBlock], *, kl_clip: float | None, grafting: Grafting = "none"
) -> torch.Tensor | None:
    """Replace the gradients of blocks by preconditioned gradients. Blocks without gradient, or of
    another shape by now, are passed over.

    Args:
        members: those whose inverses another rank has are passed over, too.
        kl_clip: the limit, > 0; None: no limit.
        grafting: whose length a layer's preconditioned gradient has. With "layer" give no limit.

    Returns:
        nu, a scalar tensor in (0, 1]; None without a limit, or without a preconditioned gradient.
    """
    look_up(members)
    products: dict[float, list[torch.Tensor]] = {}
    written: list[torch.Tensor] = []
    # Where a gradient's type is too short for it, a preconditioned gradient waits for nu apart.
    apart: list[tuple[BlockGradient | JoinedGradients, torch.Tensor]] = []
    for lr, gradient, matrix, preconditioned in _apply_each(members, joins=grafting == "none"):
        if kl_clip is not None:
            product = torch.linalg.vecdot(preconditioned.flatten(), matrix.flatten())
            products.setdefault(lr, []).append(product)
        graft_(preconditioned, matrix, grafting)
        if kl_clip is not None and gradient.parts[0].itemsize < preconditioned.itemsize:
            apart.append((gradient, preconditioned))
        else:
            gradient.write_(preconditioned)
            written += gradient.parts
    if kl_clip is None or not products:
        return None
    nu = kl_scale(_change(products), kl_clip)
    for gradient, preconditioned in apart:
        gradient.write_(preconditioned * nu.to(preconditioned.device))
    if is_asynchronous(nu.device) or bool(nu < 1):
        _multiply_(written, nu)
    return nu


def _change(products: Mapping[float, Sequence[torch.Tensor]]) -> torch.Tensor:
    """The sum of lr^2 times `products`, which are scalar tensors, by lr: in float64."""
    device = next(iter(products.values()))[0].device
    sums = [
        torch.stack([each.to(device) for each in some]).double().sum() * lr**2
        for lr, some in products.items()
    ]
    return torch.stack(sums).sum()


def _multiply_(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply all by a scalar tensor, those of one kind in one call."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for kind, some in kinds.items():
        for_each("mul_", some, factor.to(*kind))


_Applied: TypeAlias = tuple[float, BlockGradient | JoinedGradients, torch.Tensor, torch.Tensor]
"""A learning rate, a gradient, that as a matrix, and the preconditioned gradient."""


def _apply_each(members: Sequence[InvertedBlock], *, joins: bool) -> Iterator[_Applied]:
    """The preconditioned gradients of all blocks that have any. Those of norms, each of which has a
    tiny matrix for each channel, are made together: handling each norm costs more than its
    arithmetic. They stay together if `joins`.
    """
    norms: dict[object, list[tuple[Block, BlockGradient, InversePair, float]]] = {}
    for block, inverse, lr, _ in members:
        if inverse is None or not inverse.exists or not block.has_gradient():
            continue
        gradient = block.gradient()
        if block.inputs.is_tiny and block.outputs.is_tiny and not gradient.fixes_bias:
            kind = block.matrix_shape[1:], block.has_bias, block.weight.dtype, block.weight.device
            norms.setdefault((*kind, lr), []).append((block, gradient, inverse, lr))
            continue
        matrix = gradient.matrix()
        found = inverse.apply(matrix, block.inputs, block.outputs, fixes_bias=gradient.fixes_bias)
        yield lr, gradient, matrix, found
    for some in norms.values():
        first, _, inverse, lr = some[0]
        gradients = JoinedGradients([gradient for _, gradient, _, _ in some])
        matrix = gradients.matrix()
        found = InversePair(
            torch.cat([pair.inputs for _, _, pair, _ in some]),
            torch.cat([pair.outputs for _, _, pair, _ in some]),
            inverse.form,
        ).apply(
            matrix,
            replace(first.inputs, groups=len(matrix)),
            replace(first.outputs, groups=len(matrix)),
        )
        if joins:
            yield lr, gradients, matrix, found
        else:
            sizes = gradients.sizes
            parts = zip(gradients.members, matrix.split(sizes), found.split(sizes), strict=True)
            yield from ((lr, *part) for part in parts)
