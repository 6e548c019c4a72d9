"""The part that turns a training step into a K-FAC step.

1. During the forward and backward passes `FactorScheduler` takes A and G and sends them, in an
   order that all ranks share with the buckets of gradients.
2. Before the update, when the gradients are final and good on all ranks, `FactorAccumulator` takes
   the sums into the running averages, one message after the other.
3. Every `inverse_interval` steps all factors are inverted, by their owners or by every rank, each
   as soon as what it needs has been taken in (`kfac.exchange.inverses`).
4. `Preconditioner` replaces each gradient by G^-1 (dL/dW) A^-1, and the optimizer steps with it.

When the step is bad, nothing of this happens, on any rank. Which factors share a message, and who
inverts and sends what, is the plan's (`kfac.planning.factor_plan`); everything else is the same for
all K-FAC strategies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import nn
from typing_extensions import override

from offbeat.callbacks.callback import Callback, CallbackState
from offbeat.callbacks.profile import FactorAssignment, StepProfile
from offbeat.errors import UnsupportedError
from offbeat.gradients.launch_order import LaunchOrder
from offbeat.gradients.reductions import launch_sums
from offbeat.kfac.blocks import Block, slots_of
from offbeat.kfac.eigen import StoredForm
from offbeat.kfac.exchange.accumulator import FactorAccumulator
from offbeat.kfac.exchange.preconditioner import Preconditioner
from offbeat.kfac.exchange.scheduler import FactorScheduler
from offbeat.kfac.exchange.spans import SpanRecorder
from offbeat.kfac.options import KFACSettings
from offbeat.kfac.plans.factor_plan import FactorPlan
from offbeat.kfac.plans.inverse_order import InverseBatch
from offbeat.transport.driver import Driver, Stream

_WHY_UNSEEN: Final = (
    "Hooks do not run where the model was compiled and called before attach(): attach first, or"
    " call torch.compiler.reset() after it. Nor do they where a layer's weight is used without"
    " calling the layer, as in F.linear(x, layer.weight)"
)
_MOST_NAMES: Final = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class KFACPlanner:
    """What a strategy decides, for `KFACCallback` to carry out.

    Attributes:
        plan: the first plan.
        replan: makes a new plan from when each factor is ready within a step, in seconds; None
            where plans do not depend on it.
        inversion_order: in which order a plan's factors are inverted and sent.
        predicted_s: for each factor, how long its inversion is expected to take; None where nothing
            was measured.
    """

    plan: FactorPlan
    replan: Callable[[Sequence[float]], FactorPlan] | None
    inversion_order: Callable[[FactorPlan], Sequence[InverseBatch]]
    predicted_s: Sequence[float] | None = None


class KFACCallback(Callback):
    """Takes, averages and inverts factors, and preconditions gradients. It comes after the exchange
    of gradients in the order of parts.

    Args:
        model: the root module.
        blocks: what is preconditioned; the same on all ranks.
        settings: what all K-FAC strategies do alike.
        form: what is kept of inverses.
        planner: what this strategy decides.
        first_parameters: for each block, the position of its first parameter in the model.
        bucket_firsts: for each bucket of gradients, in the order in which buckets are launched, the
            position of its first parameter.
        launch_order: the order that factors share with the buckets of gradients.
        optimizer: knows the learning rates.
        driver: carries everything out.
        stream: the channels of everything that is sent here.
        grad_scale: by what factor gradients are scaled at the moment (AMP).
        notify: puts a remark where the user will see it.
        warn: says what changes the meaning of the run.

    Attributes:
        blocks: as given.
        slots: the factors of the blocks.
        scheduler: takes and sends factors; listens to the exchange of gradients.
        accumulator: averages them.
        preconditioner: has the inverses and uses them.
        wait_s: seconds spent so far on waiting for factors behind the backward pass.
    """

    state_key: ClassVar[str] = "kfac"

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        *,
        settings: KFACSettings,
        form: StoredForm,
        planner: KFACPlanner,
        first_parameters: Sequence[int],
        bucket_firsts: Sequence[int],
        launch_order: LaunchOrder,
        optimizer: torch.optim.Optimizer,
        driver: Driver,
        stream: Stream,
        grad_scale: Callable[[], float],
        notify: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self._stream, self._warn, self._is_checked = stream, warn, False
        self._notify = notify
        self.blocks, self.slots = blocks, slots_of(blocks)
        self.wait_s = 0.0
        self._settings, self._planner, self._driver = settings, planner, driver
        self._spans, self._is_new_plan = SpanRecorder(), True
        self.scheduler = FactorScheduler(
            model,
            blocks,
            self.slots,
            settings=settings,
            plan=planner.plan,
            replan=planner.replan,
            first_parameters=first_parameters,
            bucket_firsts=bucket_firsts,
            launch_order=launch_order,
            driver=driver,
            stream=stream,
            spans=self._spans,
            grad_scale=grad_scale,
            notify=notify,
        )
        self.accumulator = FactorAccumulator(
            self.slots, settings=settings, plan=planner.plan, rank=driver.rank
        )
        self.preconditioner = Preconditioner(
            blocks,
            self.slots,
            form=form,
            settings=settings,
            plan=planner.plan,
            order=planner.inversion_order(planner.plan),
            optimizer=optimizer,
            driver=driver,
            stream=stream,
            spans=self._spans,
            notify=notify,
        )

    @property
    def num_bytes(self) -> int:
        """Memory on this rank that averages, inverses and messages take from the first steps on."""
        inverses = self.preconditioner.inverses.packed
        tensors = [
            *(factor.weighted_sum for factor in self.accumulator.factors.values()),
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
        self.accumulator.adopt(plan)
        self.preconditioner.adopt(plan, self._planner.inversion_order(plan))
        self._is_new_plan = True

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
            inverses.start(lambda slot: self.accumulator.inversion_task(slot, damping))
        if has_factors:
            self._take_in(inverts=inverts)
        if inverts:
            self.preconditioner.finish_inversions()
        if has_factors and (plan := self.scheduler.learn()) is not None:
            self._adopt(plan)
        self.preconditioner.precondition(self.scheduler.retired, step)

    def _check_what_was_seen(self) -> None:
        """Name the blocks whose weights got gradients while nobody saw their inputs and outputs.
        Collective, and all ranks conclude the same: when one raises, none is left waiting.
        """
        used, seen = self.scheduler.blocks_used(), self.scheduler.layers_seen()
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
        for pending in launch_sums(self._driver, self._stream, counts):
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
            self._warn(
                f"K-FAC has not seen {_listed(alone)} at work, although their weights have"
                f" gradients, so they get plain gradients. {_WHY_UNSEEN}"
            )
        for index, name in unseen:
            if self._is_tied(index):
                others = [other for at, other in layers if at == index and other != name]
                self._notify(
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
            self._spans.add("wait for factors", "", began_s)
            self._spans.arrived()
            num_retired += self.accumulator.add_message(message)
            if inverts:
                inverses.advance(number)
        for slot, increment in self.scheduler.pop_own_increments().items():
            self.accumulator.add_own(
                slot, increment, is_retired=self.scheduler.is_retired_here(slot)
            )
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
        nu = self.preconditioner.step_scale.last
        return {} if nu is None else {"kl_scale": float(nu)}

    @override
    def counters(self) -> dict[str, float]:
        """Seconds, beside what the exchange of gradients counts."""
        inverses = self.preconditioner.inverses
        return {
            "factor_wait_s": self.wait_s,
            "invert_s": inverses.times.invert_s,
            "inverse_wait_s": inverses.times.wait_s,
            "precondition_s": self.preconditioner.precondition_s,
        }

    @override
    def take_profile(self) -> StepProfile | None:
        spans = self._spans.take()
        if not spans:
            return None
        is_new, self._is_new_plan = self._is_new_plan, False
        return StepProfile(spans=spans, assignments=self._assignments() if is_new else ())

    def _assignments(self) -> list[FactorAssignment]:
        plan, predicted_s = self.plan, self._planner.predicted_s
        message_of = {slot: number for number, group in enumerate(plan.groups) for slot in group}
        sent = "preconditioned gradients" if plan.by_owner else "inverses"
        return [
            FactorAssignment(
                factor=slot.name,
                rows=slot.shape.dim,
                matrices=0 if slot.shape.is_diagonal else slot.shape.groups,
                message=message_of.get(slot.index),
                owner=plan.owners[slot.index],
                sends=None if plan.owners[slot.index] is None else sent,
                predicted_s=predicted_s[slot.index] if predicted_s else None,
            )
            for slot in self.slots
        ]

    # State

    @override
    def state_dict(self) -> CallbackState:
        """Factors and inverses: the same on all ranks, or the owner's own. What is under way in a
        step is not in it.
        """
        kept = self.accumulator.state_dict() | self.preconditioner.state_dict()
        replicated = self.scheduler.state_dict() | {"world_size": self._driver.world_size}
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
        ] == self._driver.world_size and self.scheduler.is_planned_by(replicated)
        if keeps_plan:
            self._adopt(self.scheduler.saved_plan(replicated))
        self.accumulator.load_state_dict(saved)
        self.preconditioner.load_state_dict(saved)
        self.scheduler.load_state_dict(replicated, keeps_plan=keeps_plan)
        if lacking := self.accumulator.lacking(saved):
            self._notify(
                f"the checkpoint has nothing of K-FAC's factors {_listed(lacking)}: their layers"
                " get plain gradients until the next inversions"
            )

    @override
    def close(self) -> None:
        """Take the hooks out."""
        self._spans.close()
        self.scheduler.close()


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    listed = ", ".join(map(repr, names[:_MOST_NAMES]))
    return f"{listed} and {more} more" if more > 0 else listed
