"""The callback that turns a training step into a K-FAC step.

1. During the forward and backward passes `FactorScheduler` takes A and G and sends them, in an
   order that all ranks share with the buckets of gradients.
2. Before the update, when the gradients are final and good on all ranks, `FactorAverages` takes
   the sums into the running averages, one message after the other.
3. Every `inverse_interval` steps all factors are inverted, by their owners or by every rank, each
   as soon as what it needs has been taken in (`kfac.preconditioner`).
4. `Preconditioner` replaces each gradient by G^-1 (dL/dW) A^-1, and the optimizer steps with it.

When the step is bad, nothing of this happens, on any rank. Which factors share a message, and who
inverts and sends what, is the plan's (`kfac.plans`); everything else is the same for
all K-FAC strategies.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

import torch
from typing_extensions import override

from offbeat.callbacks.callback import Callback, CallbackState
from offbeat.callbacks.context import Context
from offbeat.errors import UnsupportedError
from offbeat.gradients.buckets import Bucket
from offbeat.gradients.exchange import LaunchOrder
from offbeat.gradients.reductions import launch_sums
from offbeat.kfac.averages import FactorAverages
from offbeat.kfac.blocks import Block, slots_of
from offbeat.kfac.curvature import KFACSettings
from offbeat.kfac.inverses import form_of
from offbeat.kfac.plans import FactorPlan, InverseBatch, KFACPlanner, PlanInputs, inversion_order
from offbeat.kfac.preconditioner import Preconditioner
from offbeat.kfac.scheduler import FactorScheduler

_WHY_UNSEEN: Final = (
    "Hooks do not run where the model was compiled and called before attach(): attach first, or"
    " call torch.compiler.reset() after it. Nor do they where a layer's weight is used without"
    " calling the layer, as in F.linear(x, layer.weight)"
)
_MOST_NAMES: Final = 8


class KFACCallback(Callback):
    """Takes, averages and inverts factors, and preconditions gradients. It comes after the exchange
    of gradients in the order of callbacks.

    Args:
        context: of the session; its model and optimizer are there.
        blocks: what is preconditioned; the same on all ranks.
        settings: what all K-FAC strategies do alike.
        planner: what tells this one from the others.
        inputs: what it plans from.
        buckets: of gradients, in the order in which they are launched.
        launch_order: the order that factors share with the buckets of gradients.

    Attributes:
        blocks: as given.
        slots: the factors of the blocks.
        form: what is kept of inverses.
        scheduler: takes and sends factors; listens to the exchange of gradients.
        averages: of the factors over steps.
        preconditioner: has the inverses and uses them.
        wait_s: seconds spent so far on waiting for factors behind the backward pass.
    """

    state_key: ClassVar[str] = "kfac"

    def __init__(
        self,
        context: Context,
        blocks: Sequence[Block],
        *,
        settings: KFACSettings,
        planner: KFACPlanner,
        inputs: PlanInputs,
        buckets: Sequence[Bucket],
        launch_order: LaunchOrder,
    ) -> None:
        self._context, self._settings = context, settings
        self._planner, self._inputs = planner, inputs
        self._stream, self._is_checked = context.new_stream(), False
        self.blocks, self.slots = blocks, slots_of(blocks)
        self.form = form_of(self.slots, settings, same_devices=inputs.same_devices)
        self.wait_s = 0.0
        plan = planner.plan(inputs)
        self.scheduler = FactorScheduler(
            context,
            blocks,
            self.slots,
            settings=settings,
            plan=plan,
            measures=inputs.costs is not None,
            buckets=buckets,
            launch_order=launch_order,
            stream=self._stream,
        )
        self.averages = FactorAverages(
            self.slots, settings=settings, plan=plan, rank=context.driver.rank
        )
        self.preconditioner = Preconditioner(
            context,
            blocks,
            self.slots,
            form=self.form,
            settings=settings,
            plan=plan,
            order=self._order(plan),
            stream=self._stream,
        )

    def _order(self, plan: FactorPlan) -> Sequence[InverseBatch]:
        # With the damping divided between A and G, inverting either of them needs the traces of
        # both; so does joining two uses of a weight.
        joins = any(slot.shape.uses > 1 for slot in self.slots)
        return inversion_order(plan, self._inputs, pairs=joins or self._settings.curvature.pi)

    @property
    def num_bytes(self) -> int:
        """Memory on this rank that averages, inverses and messages take from the first steps on."""
        inverses = self.preconditioner.inverses.packed
        tensors = [
            *(factor.weighted_sum for factor in self.averages.factors.values()),
            *(inverse for inverse in inverses if inverse is not None),
        ]
        return sum(tensor.nbytes for tensor in tensors) + sum(
            message.num_bytes for message in self.scheduler.messages
        )

    @property
    def plan(self) -> FactorPlan:
        """The plan in force."""
        return self.scheduler.plan

    def _adopt(self, plan: FactorPlan) -> None:
        self.scheduler.adopt(plan)
        self.averages.adopt(plan)
        self.preconditioner.adopt(plan, self._order(plan))

    # Events

    @override
    def on_forward_begins(self, *, trains: bool) -> None:
        self.scheduler.is_training_pass = trains

    @override
    def on_gradient_ready(self, index: int, *, synchronised: bool) -> None:
        if not self._is_checked:
            self.scheduler.saw_gradient(index)

    @override
    def on_before_update(self) -> None:
        """Precondition the gradients, once what this step brought has been taken in."""
        if not self.scheduler.is_good:
            return
        inverses, step = self.preconditioner.inverses, self.scheduler.step
        inverts = self._settings.has_inversions(step) or self.preconditioner.is_stale
        has_factors = self.scheduler.pop_has_sent()
        if has_factors and not self._is_checked:
            self._check_what_was_seen()
        if inverts:
            damping = self._settings.damping_at(step)
            inverses.start(lambda slot: self.averages.inversion_task(slot, damping))
        if has_factors:
            self._take_in(inverts=inverts)
        if inverts:
            self.preconditioner.finish_inversions()
        if has_factors and (ready_s := self.scheduler.learn()) is not None:
            self._adopt(self._planner.plan(replace(self._inputs, ready_s=ready_s)))
        self.preconditioner.precondition(self.scheduler.retired, step)

    def _check_what_was_seen(self) -> None:
        """Name the blocks whose weights got gradients while nobody saw their inputs and outputs.
        Collective, and all ranks conclude the same: when one raises, none is left waiting.
        """
        used, seen = self.scheduler.blocks_used(), self.scheduler.capture.pop_layers_seen()
        layers = [
            (index, name)
            for index, block in enumerate(self.blocks)
            for use in block.uses
            for name in use.names
        ]
        counts = torch.tensor(
            [
                [index in used for index, _ in layers],
                [index in used and name in seen for index, name in layers],
            ],
            dtype=torch.float64,
        )
        for pending in launch_sums(self._context.driver, self._stream, counts):
            pending.wait()
        in_use, is_seen = (counts > 0).tolist()
        if not any(in_use):
            return  # no rank had a batch: look again in the next step with factors
        self._is_checked = True
        unseen = [
            layer
            for layer, flag, seen_ in zip(layers, in_use, is_seen, strict=True)
            if flag and not seen_
        ]
        if len(unseen) == sum(in_use):
            raise UnsupportedError(
                f"K-FAC has seen no layer of this model at work, although their weights have"
                f" gradients: {_listed([name for _, name in unseen])}. {_WHY_UNSEEN}"
            )
        if alone := [name for index, name in unseen if not self._is_tied(index)]:
            self._context.notices.warn(
                f"K-FAC has not seen {_listed(alone)} at work, although their weights have"
                f" gradients, so they get plain gradients. {_WHY_UNSEEN}"
            )
        for index, name in unseen:
            if self._is_tied(index):
                others = [other for at, other in layers if at == index and other != name]
                self._context.notices.notify(
                    f"K-FAC has not seen {name!r} at work, which shares its weight with"
                    f" {_listed(others)}: this weight is preconditioned as if only the others used"
                    " it, which is right if no gradient flows through that layer"
                )

    def _is_tied(self, index: int) -> bool:
        return sum(len(use.names) for use in self.blocks[index].uses) > 1

    def _take_in(self, *, inverts: bool) -> None:
        """Wait for the sums and average them over time. What can be inverted by then is inverted
        before the next wait, so that inversions and broadcasts hide behind messages under way.
        """
        inverses = self.preconditioner.inverses
        num_retired: list[tuple[int, torch.Tensor]] = []
        for number, message in enumerate(self.scheduler.messages, start=1):
            if inverts:
                inverses.fill(message.has_arrived)
            began_s = time.monotonic()
            message.wait()
            self.wait_s += time.monotonic() - began_s
            for slot, mean, weight, num_retired_ranks in message.read():
                self.averages.add(slot, mean, weight)
                num_retired.append((slot // 2, num_retired_ranks))
            if inverts:
                inverses.advance(number)
        for slot, increment in self.scheduler.pop_own_increments().items():
            self.averages.add_own(slot, increment, is_retired=self.scheduler.is_retired_here(slot))
        if num_retired:
            # One transfer for all numbers: on a GPU the host waits for each value that it asks for.
            like = self.slots[0].zeros()
            counts = torch.stack([count.to(like) for _, count in num_retired]).tolist()
            self.scheduler.retire(
                index for (index, _), count in zip(num_retired, counts, strict=True) if count
            )

    @override
    def on_after_step(self) -> None:
        # After a bad exchange the scheduler has begun this step anew, which does not count.
        if self.scheduler.is_good:
            self.scheduler.end_step()

    # Answers

    @override
    def gauges(self) -> dict[str, float]:
        """By what the last step was shortened; nothing without `kl_clip`."""
        nu = self.preconditioner.last_nu
        return {} if nu is None else {"kl_scale": float(nu)}

    @override
    def counters(self) -> dict[str, float]:
        """Seconds, beside what the exchange of gradients counts."""
        inverses = self.preconditioner.inverses
        return {
            "factor_s": self.scheduler.capture.spent_s,
            "factor_wait_s": self.wait_s,
            "invert_s": inverses.invert_s,
            "inverse_wait_s": inverses.wait_s,
            "precondition_s": self.preconditioner.precondition_s,
        }

    # State

    @override
    def state_dict(self) -> CallbackState:
        """Factors and inverses: the same on all ranks, or the owner's own. What is under way in a
        step is not in it.
        """
        kept = self.averages.state_dict() | self.preconditioner.state_dict()
        replicated = self.scheduler.state_dict() | {"world_size": self._context.driver.world_size}
        if self.plan.by_owner:
            return {"replicated": replicated, "owned": kept}
        return {"replicated": replicated | kept}

    @override
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """In a world of another size owners change, and where other layers are covered by now there
        are further factors: an inverse that is missing here is made in the next step that inverts.

        Where another form of inverses is kept by now, all are made in the next step.
        """
        replicated = state["replicated"]
        saved = {**replicated, **state.get("owned", {})}
        self.preconditioner.check_state(saved)  # before anything is changed
        keeps_plan = replicated[
            "world_size"
        ] == self._context.driver.world_size and self.scheduler.is_planned_by(replicated)
        if keeps_plan:
            self._adopt(self.scheduler.saved_plan(replicated))
        self.averages.load_state_dict(saved)
        self.preconditioner.load_state_dict(saved)
        self.scheduler.load_state_dict(replicated, keeps_plan=keeps_plan)
        if lacking := self.averages.lacking(saved):
            self._context.notices.notify(
                f"the checkpoint has nothing of K-FAC's factors {_listed(lacking)}: their layers"
                " get plain gradients until the next inversions"
            )

    @override
    def close(self) -> None:
        """Take the hooks out."""
        self.scheduler.close()


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    listed = ", ".join(map(repr, names[:_MOST_NAMES]))
    return f"{listed} and {more} more" if more > 0 else listed
