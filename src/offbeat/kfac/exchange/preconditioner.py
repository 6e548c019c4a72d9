"""From gradients to preconditioned gradients: P = G^-1 (dL/dW) A^-1 for every layer.

Either every rank has all inverses and multiplies by them itself, or each layer has an owner, which
alone has its inverses and broadcasts P. In the second case nobody multiplies what others have
multiplied, so all ranks get the same bits on any mixture of devices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch

from offbeat.collectives.dense import dense_broadcast
from offbeat.errors import CheckpointError
from offbeat.kfac.blocks import Block, FactorSlot
from offbeat.kfac.eigen import Eigendecomposition, StoredForm, make_inverter
from offbeat.kfac.exchange.inverses import InverseExchange
from offbeat.kfac.exchange.spans import SpanRecorder
from offbeat.kfac.inverses import dtype_of
from offbeat.kfac.options import Grafting, KFACSettings
from offbeat.kfac.pieces import is_whole
from offbeat.kfac.plans.factor_plan import FactorPlan
from offbeat.kfac.plans.inverse_order import InverseBatch
from offbeat.kfac.precondition import (
    Curvature,
    EigenPair,
    InversePair,
    graft_,
    kl_scale,
    precondition_,
    share_of,
)
from offbeat.kfac.step_scale import ShortLayers, StepScale
from offbeat.transport.driver import Driver, Stream


class Preconditioner:
    """Holds the inverses that this rank has, and multiplies gradients by them.

    Args:
        blocks: what is preconditioned; the same on all ranks.
        slots: the factors of `blocks`.
        form: what is kept of inverses.
        settings: the damping and the limit of a step.
        plan: which inverses this rank has, and whether owners send preconditioned gradients.
        order: in which order inverses are made and sent.
        optimizer: knows the learning rates.
        driver: carries the broadcasts out.
        stream: the channels of the broadcasts.
        spans: notes what is done when.
        notify: is told of factors that have no inverse, of those that a checkpoint has whole, and
            where steps are next to nothing.

    Attributes:
        inverses: where the inverses are kept, and how they get there.
        is_stale: whether the inverses, of a checkpoint with another form, must be made anew.
        precondition_s: seconds spent so far on turning gradients into preconditioned gradients.
        step_scale: by what steps were shortened.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        slots: Sequence[FactorSlot],
        *,
        form: StoredForm,
        settings: KFACSettings,
        plan: FactorPlan,
        order: Sequence[InverseBatch],
        optimizer: torch.optim.Optimizer,
        driver: Driver,
        stream: Stream,
        spans: SpanRecorder,
        notify: Callable[[str], None],
    ) -> None:
        self.is_stale = False
        self.precondition_s = 0.0
        self._blocks, self._slots, self._form, self._settings = blocks, slots, form, settings
        self._optimizer, self._driver, self._stream = optimizer, driver, stream
        self._spans = spans
        self._has_tiny = any(slot.shape.is_tiny for slot in slots)
        self._inverter, self._notify = make_inverter(form, notify), notify
        self.step_scale = StepScale(optimizer, notify)
        self._short_layers = ShortLayers(optimizer, settings.grafting, notify)
        self._plan = plan
        self.inverses = self._room_for(plan, order)
        self._curvatures: dict[int, Curvature | None] = {}

    def adopt(self, plan: FactorPlan, order: Sequence[InverseBatch]) -> None:
        """Have what `plan` says, inverted in `order`. Inverses that this rank has already and keeps
        stay as they are.
        """
        inverses = self._room_for(plan, order)
        inverses.take_over(self.inverses)
        self._plan, self.inverses = plan, inverses
        self._curvatures.clear()

    def finish_inversions(self) -> None:
        """Until all inverses are there."""
        self.inverses.finish()
        self.is_stale = False
        self._curvatures.clear()

    def _room_for(self, plan: FactorPlan, order: Sequence[InverseBatch]) -> InverseExchange:
        return InverseExchange(
            order,
            self._slots,
            [dtype_of(self._form, slot.dtype) for slot in self._slots],
            travels=not plan.by_owner,
            driver=self._driver,
            stream=self._stream,
            inverter=self._inverter,
            spans=self._spans,
        )

    def precondition(self, retired: Collection[int], step: int) -> None:
        """In `step`, replace the gradients of all blocks but the `retired` ones by preconditioned
        gradients. Collective where owners send them.
        """
        began_s = time.perf_counter()
        with self._spans.timed("precondition"):
            self._precondition(retired, step)
        self.precondition_s += time.perf_counter() - began_s

    def _precondition(self, retired: Collection[int], step: int) -> None:
        kl_clip, damping = self._settings.kl_clip_at(step), self._settings.damping_at(step)
        lr_of = {
            id(parameter): float(group["lr"])
            for group in self._optimizer.param_groups
            for parameter in group["params"]
        }
        live = [index for index in range(len(self._blocks)) if index not in retired]
        blocks = [self._blocks[index] for index in live]
        lrs = [lr_of.get(id(block.weight), 0.0) for block in blocks]
        curvatures = [self._curvature_of(index, damping) for index in live]
        shares: dict[str, torch.Tensor] | None = {} if self._short_layers.is_watching else None
        if not self._plan.by_owner:
            nu = precondition_(
                blocks,
                [curvature for curvature in curvatures if curvature is not None],
                lrs=lrs,
                kl_clip=kl_clip,
                grafting=self._settings.grafting,
                shares=shares,
            )
        else:
            owners = [
                owner for index in live if (owner := self._plan.owners[2 * index]) is not None
            ]
            nu = precondition_by_owners_(
                blocks,
                curvatures,
                owners,
                driver=self._driver,
                stream=self._stream,
                lrs=lrs,
                kl_clip=kl_clip,
                grafting=self._settings.grafting,
                shares=shares,
                spans=self._spans,
            )
        self.step_scale.add(nu, kl_clip)
        if shares is not None:
            self._short_layers.add(shares)

    def _curvature_of(self, block_index: int, damping: float) -> Curvature | None:
        """What this rank has of a block's inverses; None where only its owner has them. It is the
        same object until there are other inverses.
        """
        if block_index not in self._curvatures:
            self._curvatures[block_index] = self._new_curvature(block_index, damping)
        found = self._curvatures[block_index]
        if isinstance(found, EigenPair) and found.damping != damping:
            found = self._curvatures[block_index] = replace(found, damping=damping)
        return found

    def _new_curvature(self, block_index: int, damping: float) -> Curvature | None:
        a_slot, g_slot = self._slots[2 * block_index : 2 * block_index + 2]
        inputs, outputs = self.inverses.packed[a_slot.index], self.inverses.packed[g_slot.index]
        if inputs is None or outputs is None:
            return None
        if self._form != "eigen":
            return InversePair(inputs, outputs, self._form)
        return EigenPair(
            Eigendecomposition.of(inputs, a_slot.shape),
            Eigendecomposition.of(outputs, g_slot.shape),
            damping,
            damps_each=not self._settings.pi,
        )

    # State

    def state_dict(self) -> dict[str, Any]:
        kept: dict[str, Any] = {
            f"{slot.key}/inverse": inverse
            for slot, inverse in zip(self._slots, self.inverses.packed, strict=True)
            if inverse is not None
        }
        kept |= {"form": self._form}
        return kept | ({"has_tiny_inverses": True} if self._has_tiny else {})

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`. An inverse that is not in `saved` is none, and so is each of
        another form.
        """
        self.is_stale = self._is_of_another_form(saved)
        self._curvatures.clear()
        if whole := self._whole_here_cut(saved):
            self._notify(
                f"the checkpoint has {len(whole)} factors whole that have more rows than max_dim,"
                f" such as {whole[0].name}: they are cut, and all inverses are made anew in the"
                " next step"
            )
        for slot, inverse in zip(self._slots, self.inverses.packed, strict=True):
            if inverse is not None:
                none = torch.zeros_like(inverse)
                inverse.copy_(none if self.is_stale else saved.get(f"{slot.key}/inverse", none))

    def _is_of_another_form(self, saved: Mapping[str, Any]) -> bool:
        """Whether what `saved` has of inverses means something else here. Version 0.1 had triangles
        of matrices of any size.
        """
        return bool(
            saved["form"] != self._form
            or self._whole_here_cut(saved)
            or (self._form == "triangle" and self._has_tiny and "has_tiny_inverses" not in saved)
        )

    def _whole_here_cut(self, saved: Mapping[str, Any]) -> list[FactorSlot]:
        """The factors that `saved` has whole and that are cut here. Version 0.1 cut none."""
        return [
            slot
            for slot in self._slots
            if (total := saved.get(f"{slot.key}/sum")) is not None
            and total.shape != slot.shape.packed
            and total.ndim == 2
            and is_whole(total.shape, slot.shape)
        ]

    def check_state(self, saved: Mapping[str, Any]) -> None:
        """Raise `CheckpointError` unless every average and inverse in `saved` is of this model."""
        known = {f"{slot.key}/sum": slot.shape.packed for slot in self._slots}
        known |= {
            f"{slot.key}/sum": tuple(saved[f"{slot.key}/sum"].shape)
            for slot in self._whole_here_cut(saved)
        }
        is_same_form = not self._is_of_another_form(saved)
        if is_same_form:
            known |= {
                f"{slot.key}/inverse": self._inverter.stored_shape(slot.shape)
                for slot in self._slots
            }
        for name, value in saved.items():
            key, _, what = name.rpartition("/")
            if (what == "sum" or (what == "inverse" and is_same_form)) and tuple(
                value.shape
            ) != known.get(name):
                here = known.get(name, "no such factor")
                raise CheckpointError(
                    f"{what} of {key!r} was saved with shape {tuple(value.shape)}, here there is"
                    f" {here}; is it the same model, with the same max_dim?"
                )


@torch.no_grad()
def precondition_by_owners_(
    blocks: Sequence[Block],
    inverses: Sequence[Curvature | None],
    owners: Sequence[int],
    *,
    driver: Driver,
    stream: Stream,
    lrs: Sequence[float],
    kl_clip: float | None,
    spans: SpanRecorder,
    grafting: Grafting = "none",
    shares: dict[str, torch.Tensor] | None = None,
) -> torch.Tensor | None:
    """Replace the gradients of `blocks`, the same on all ranks, by preconditioned gradients.
    Collective.

    Each owner's message holds the preconditioned gradients of its blocks, for each block whether
    there is one and how long it is, and what they would change together. The last number is why the
    limit of a step, which is one for all layers, needs no message of its own.

    Args:
        blocks: the same on all ranks. Those without gradient are passed over.
        inverses: of the blocks that this rank owns.
        owners: a rank for each block.
        driver, stream: carry the broadcasts out.
        lrs: learning rates, one for each block.
        kl_clip, grafting, shares: as of `kfac.precondition.precondition_`.
        spans: notes what is done when.

    Returns:
        As of `kfac.precondition.precondition_`.
    """
    # All ranks see the same gradients, so all of them leave the same blocks out.
    live = [number for number, block in enumerate(blocks) if block.has_gradient()]
    messages = [
        _GradientMessage([blocks[number] for number in live if owners[number] == rank], rank)
        for rank in range(driver.world_size)
    ]
    pending = []
    for message in messages:
        if not message.blocks:
            continue
        if message.owner == driver.rank:
            own = [number for number in live if owners[number] == driver.rank]
            found = [inverse for number in own if (inverse := inverses[number]) is not None]
            message.fill(
                found,
                [lrs[number] for number in own],
                grafting=grafting,
                is_measured=shares is not None,
            )
        launched_s = time.monotonic()
        pending.append(driver.launch(dense_broadcast(message.flat, message.owner), stream.next()))
        spans.launched(
            "broadcast", f"gradients of worker {message.owner}", launched_s, pending[-1:]
        )
    for broadcast in pending:
        with spans.timed("wait for inverses"):
            broadcast.wait()
        spans.arrived()
    changes = [
        message.change.to(device="cpu", dtype=torch.float64)
        for message in messages
        if message.blocks
    ]
    nu = None
    if kl_clip is not None and changes:
        nu = kl_scale(sum(changes, torch.zeros((), dtype=torch.float64)), kl_clip)
    for message in messages:
        message.show(1.0 if nu is None else float(nu))
        if shares is not None:
            shares |= message.shares()
    return nu


class _GradientMessage:
    """One owner's preconditioned gradients."""

    def __init__(self, blocks: Sequence[Block], owner: int) -> None:
        self.blocks, self.owner = blocks, owner
        weights = [block.weight for block in blocks]
        dtype = reduce(torch.promote_types, (weight.dtype for weight in weights), torch.float32)
        sizes = [torch.Size(block.matrix_shape).numel() for block in blocks]
        device = weights[0].device if weights else None
        self.flat = torch.zeros(sum(sizes) + 2 * len(blocks) + 1, dtype=dtype, device=device)
        *parts, self._exists, self._shares, change = self.flat.split(
            [*sizes, len(blocks), len(blocks), 1]
        )
        self._preconditioned = [
            part.view(block.matrix_shape) for part, block in zip(parts, blocks, strict=True)
        ]
        self.change = change[0]

    def fill(
        self,
        inverses: Sequence[Curvature],
        lrs: Sequence[float],
        *,
        grafting: Grafting,
        is_measured: bool,
    ) -> None:
        for number, (block, inverse, lr) in enumerate(zip(self.blocks, inverses, lrs, strict=True)):
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
        return {block.name: known[number] for number, block in enumerate(self.blocks)}

    def show(self, scale: float) -> None:
        for number, (block, preconditioned) in enumerate(
            zip(self.blocks, self._preconditioned, strict=True)
        ):
            block.write_gradient_(
                torch.where(
                    self._exists[number] > 0, preconditioned * scale, block.gradient_matrix()
                )
            )
