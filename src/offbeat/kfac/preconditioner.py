"""From gradients to preconditioned gradients: P = G^-1 (dL/dW) A^-1 for every layer.

Either every rank has all inverses and multiplies by them itself, or each layer has an owner, which
alone has its inverses and broadcasts P. In the second case nobody multiplies what others have
multiplied, so all ranks get the same bits on any mixture of devices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import reduce
from math import inf
from statistics import median_high
from typing import Any, Final, NamedTuple

import torch

from offbeat.callbacks.context import Context
from offbeat.collectives.dense import dense_broadcast
from offbeat.errors import CheckpointError
from offbeat.kfac.blocks import Block, FactorSlot
from offbeat.kfac.curvature import Grafting, KFACSettings
from offbeat.kfac.inverse_exchange import InverseExchange
from offbeat.kfac.inverses import InverseForm, Inverter, dtype_of
from offbeat.kfac.placement import Owner
from offbeat.kfac.plans import FactorPlan, InverseBatch
from offbeat.kfac.precondition import InversePair, graft_, kl_scale, precondition_, share_of
from offbeat.transport.driver import Stream

_WINDOW: Final = 50
_SHORT: Final = 0.2
_SHORTER: Final = 0.5


class Preconditioner:
    """Holds the inverses that this rank has, and multiplies gradients by them.

    Args:
        context: of the session; its optimizer is there.
        blocks: what is preconditioned; the same on all ranks.
        slots: the factors of `blocks`.
        form: what is kept of inverses.
        settings: the damping and the limit of a step.
        plan: which inverses this rank has, and whether owners send preconditioned gradients.
        order: in which order inverses are made and sent.
        stream: the channels of the broadcasts.

    Attributes:
        inverses: where the inverses are kept, and how they get there.
        is_stale: whether the inverses, of a checkpoint with another form, must be made anew.
        precondition_s: seconds spent so far on turning gradients into preconditioned gradients.
        step_scale: by what steps were shortened.
    """

    def __init__(
        self,
        context: Context,
        blocks: Sequence[Block],
        slots: Sequence[FactorSlot],
        *,
        form: InverseForm,
        settings: KFACSettings,
        plan: FactorPlan,
        order: Sequence[InverseBatch],
        stream: Stream,
    ) -> None:
        assert context.optimizer is not None
        optimizer, notify = context.optimizer, context.notices.notify
        self.is_stale = False
        self.precondition_s = 0.0
        self._blocks, self._slots, self._form, self._settings = blocks, slots, form, settings
        self._optimizer, self._driver = optimizer, context.driver
        self._stream = stream
        self._inverter = Inverter(notify, form)
        self.step_scale = StepScale(optimizer, notify)
        self._short_layers = ShortLayers(optimizer, settings.grafting, notify)
        self._plan = plan
        self.inverses = self._room_for(plan, order)
        self._pairs: dict[int, InversePair | None] = {}

    def adopt(self, plan: FactorPlan, order: Sequence[InverseBatch]) -> None:
        """Have what `plan` says, inverted in `order`. Inverses that this rank has already and keeps
        stay as they are.
        """
        inverses = self._room_for(plan, order)
        inverses.take_over(self.inverses)
        self._plan, self.inverses = plan, inverses
        self._pairs.clear()

    def finish_inversions(self) -> None:
        """Until all inverses are there."""
        self.inverses.finish()
        self.is_stale = False
        self._pairs.clear()

    def _room_for(self, plan: FactorPlan, order: Sequence[InverseBatch]) -> InverseExchange:
        return InverseExchange(
            order,
            self._slots,
            [dtype_of(self._form, slot.dtype) for slot in self._slots],
            travels=not plan.by_owner,
            driver=self._driver,
            stream=self._stream,
            inverter=self._inverter,
        )

    def precondition(self, retired: Collection[int], step: int) -> None:
        """In `step`, replace the gradients of all blocks but the `retired` ones by preconditioned
        gradients. Collective where owners send them.
        """
        began_s = time.perf_counter()
        self._precondition(retired, step)
        self.precondition_s += time.perf_counter() - began_s

    def _precondition(self, retired: Collection[int], step: int) -> None:
        kl_clip = self._settings.kl_clip_at(step)
        lr_of = {
            id(parameter): float(group["lr"])
            for group in self._optimizer.param_groups
            for parameter in group["params"]
        }
        live = [
            _Member(block, self._pair_of(index), lr_of.get(id(block.weight), 0.0), index)
            for index, block in enumerate(self._blocks)
            if index not in retired
        ]
        shares: dict[str, torch.Tensor] | None = {} if self._short_layers.is_watching else None
        if self._plan.by_owner:
            nu = self._precondition_by_owners(live, kl_clip=kl_clip, shares=shares)
        else:
            nu = precondition_(
                [each.block for each in live],
                [each.inverse for each in live if each.inverse is not None],
                lrs=[each.lr for each in live],
                kl_clip=kl_clip,
                grafting=self._settings.grafting,
                shares=shares,
            )
        self.step_scale.add(nu, kl_clip)
        if shares is not None:
            self._short_layers.add(shares)

    @torch.no_grad()
    def _precondition_by_owners(
        self,
        live: Sequence[_Member],
        *,
        kl_clip: float | None,
        shares: dict[str, torch.Tensor] | None,
    ) -> torch.Tensor | None:
        """Replace the gradients of blocks, the same on all ranks, by preconditioned gradients.
        Collective.

        Each owner's message holds the preconditioned gradients of its blocks, for each block
        whether there is one and how long it is, and what they would change together. The last
        number is why the limit of a step, which is one for all layers, needs no message of its own.

        Args:
            live: the blocks. Those without gradient are passed over.
            kl_clip, shares: as of `kfac.precondition.precondition_`.

        Returns:
            As of `kfac.precondition.precondition_`.
        """
        rank, of_owner = self._driver.rank, dict[Owner, list[_Member]]()
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
                message.fill(self._settings.grafting, is_measured=shares is not None)
            broadcast = dense_broadcast(message.flat, message.owner)
            pending.append(self._driver.launch(broadcast, self._stream.next()))
        for sent in pending:
            sent.wait()
        nu = None
        if kl_clip is not None and messages:
            changes = (message.change.to("cpu", torch.float64) for message in messages)
            nu = kl_scale(sum(changes, torch.zeros((), dtype=torch.float64)), kl_clip)
        for message in messages:
            message.show(1.0 if nu is None else float(nu))
            if shares is not None:
                shares |= message.shares()
        return nu

    def _pair_of(self, block_index: int) -> InversePair | None:
        """What this rank has of a block's inverses; None where only its owner has them. It is the
        same object until there are other inverses.
        """
        if block_index not in self._pairs:
            inputs, outputs = self.inverses.packed[2 * block_index : 2 * block_index + 2]
            self._pairs[block_index] = (
                None
                if inputs is None or outputs is None
                else InversePair(inputs, outputs, self._form)
            )
        return self._pairs[block_index]

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
        self._pairs.clear()
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


class _Member(NamedTuple):
    """A block that no rank has given up: with its inverses, if this rank has them, its learning
    rate and its number.
    """

    block: Block
    inverse: InversePair | None
    lr: float
    place: int


class _GradientMessage:
    """One owner's preconditioned gradients."""

    def __init__(self, members: Sequence[_Member], owner: int) -> None:
        self.owner, self._members = owner, members
        blocks = [each.block for each in members]
        dtypes = (block.weight.dtype for block in blocks)
        sizes = [block.num_parameters for block in blocks]
        self.flat = torch.zeros(
            sum(sizes) + 2 * len(blocks) + 1,
            dtype=reduce(torch.promote_types, dtypes, torch.float32),
            device=blocks[0].weight.device,
        )
        *parts, self._exists, self._shares, change = self.flat.split(
            [*sizes, len(blocks), len(blocks), 1]
        )
        self._preconditioned = [
            part.view(block.matrix_shape) for part, block in zip(parts, blocks, strict=True)
        ]
        self.change = change[0]

    def fill(self, grafting: Grafting, *, is_measured: bool) -> None:
        for number, (block, inverse, lr, _) in enumerate(self._members):
            assert inverse is not None, "the owner has them"
            preconditioned, gradient = self._preconditioned[number], block.gradient_matrix()
            found = inverse.apply(gradient, block.inputs, block.outputs)
            self._exists[number] = inverse.exists
            preconditioned.copy_(torch.where(inverse.exists, found, 0.0))
            self.change.add_(torch.dot(preconditioned.flatten(), gradient.flatten()) * lr**2)
            if is_measured or grafting != "none":
                self._shares[number] = share = share_of(preconditioned, gradient)
                graft_(preconditioned, share, grafting)

    def shares(self) -> dict[str, torch.Tensor]:
        """How long each block's preconditioned gradient is over the plain one; 1 for none."""
        known = torch.where(self._exists > 0, self._shares, 1.0)
        return {each.block.name: known[number] for number, each in enumerate(self._members)}

    def show(self, scale: float) -> None:
        for number, (block, *_) in enumerate(self._members):
            scaled, plain = self._preconditioned[number] * scale, block.gradient_matrix()
            block.write_gradient_(torch.where(self._exists[number] > 0, scaled, plain))


class StepScale:
    """Keeps nu of `kfac.precondition` over some steps. All ranks have the same nu, so all say the
    same. Nothing of it is in checkpoints: a resumed run counts anew.

    Args:
        optimizer: takes the steps. Momentum makes up for some of what is lost. Adam and its like
            take steps of the same length whatever nu is, so nothing is said of any but SGD.
        notify: is told, once, of 50 steps of which more than half were shortened below a fifth, or
            below what momentum makes a fifth.

    Attributes:
        last: nu of the last step, a scalar tensor in (0, 1]; None where nothing limits steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, notify: Callable[[str], None]) -> None:
        self.last: torch.Tensor | None = None
        self._optimizer, self._notify = optimizer, notify
        self._window: list[torch.Tensor] = []
        self._is_said = False

    def add(self, nu: torch.Tensor | None, kl_clip: float | None) -> None:
        """Of a step whose limit was `kl_clip`."""
        self.last = nu
        if nu is None or kl_clip is None or self._is_said:
            return
        self._window.append(nu)
        if len(self._window) == _WINDOW:
            # One transfer for all: on a GPU the host waits for each value that it asks for.
            scales = torch.stack(self._window).tolist()
            self._window.clear()
            middle = median_high(scales)
            self._is_said = middle * _gain_of(self._optimizer) < _SHORT
            if self._is_said:
                self._say(scales, middle, kl_clip)

    def _say(self, scales: list[float], middle: float, kl_clip: float) -> None:
        shortened = sum(scale < 1 for scale in scales)
        self._notify(
            f"kl_clip={kl_clip:g} shortened {shortened} of {_WINDOW} steps, more than half of them"
            f" to {middle:.2g} of their length or less, so that the learning rate does not decide"
            " how long they are. Where the loss hardly falls, set a larger kl_clip (ten times as"
            " much makes such steps 3.2 times as long), or more momentum in the optimizer;"
            " kl_clip=None sets no limit, and then the learning rate or the damping may have to"
            " change"
        )


class ShortLayers:
    """Compares preconditioned gradients with plain ones during the first steps. All ranks have the
    same ones, so all say the same.

    Args:
        optimizer: takes the steps. As in `StepScale` nothing is said of any but SGD.
        grafting: only with "none" may steps be shorter.
        notify: is told, once, of layers whose preconditioned gradients were less than half as long
            as the plain ones in more than half of 50 steps.

    Attributes:
        is_watching: whether `add` wants to know of the next step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        grafting: Grafting,
        notify: Callable[[str], None],
    ) -> None:
        self.is_watching = grafting == "none" and isinstance(optimizer, torch.optim.SGD)
        self._notify = notify
        self._shares: dict[str, list[torch.Tensor]] = {}
        self._num_steps = 0

    def add(self, shares: Mapping[str, torch.Tensor]) -> None:
        """Of a step: how long layers' preconditioned gradients are over plain ones."""
        for name, share in shares.items():
            self._shares.setdefault(name, []).append(share)
        self._num_steps += 1
        if self._num_steps == _WINDOW:
            self.is_watching = False
            middles = {
                name: median_high(torch.stack(each).tolist()) for name, each in self._shares.items()
            }
            self._shares.clear()
            short = sorted((middle, name) for name, middle in middles.items() if middle < _SHORTER)
            if short:
                self._say(short, len(middles))

    def _say(self, short: list[tuple[float, str]], num_layers: int) -> None:
        share, name = short[0]
        self._notify(
            f"the preconditioned gradients of {len(short)} of K-FAC's {num_layers} layers are"
            f" shorter than plain ones, that of {name!r} {share:.2g} times as long in half of"
            f" {_WINDOW} steps: at a learning rate that was chosen for plain gradients these layers"
            ' are trained slowly. Set grafting="floor", which makes them as long as plain ones, or'
            " a larger learning rate"
        )


def _gain_of(optimizer: torch.optim.Optimizer) -> float:
    """By how much momentum lengthens what a gradient moves in all; inf where that does not depend
    on the gradient's length.
    """

    def gain(momentum: float, dampening: float) -> float:
        if not momentum:
            return 1.0
        return (1 - dampening) / (1 - momentum) if momentum < 1 else inf

    if not isinstance(optimizer, torch.optim.SGD):
        return inf
    return min(gain(group["momentum"], group["dampening"]) for group in optimizer.param_groups)
