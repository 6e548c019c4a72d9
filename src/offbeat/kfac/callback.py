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

The exponential average of factors over steps is kept free of damping: damping is added to what is
inverted, never to what is averaged, so that it does not build up. It starts from nothing and not
from the identity, and is divided by the sum of its weights:

    sum  <- decay * sum  + (1 - decay) * F
    mass <- decay * mass + (1 - decay)
    average = sum / mass

so early averages are means of what was seen. An increment with an infinity or a NaN in it, or of
weight 0, leaves no trace. All of it happens on the factor's device, on a GPU without asking for a
value.

Where preconditioned gradients travel, a rank keeps the averages of the factors that it owns;
elsewhere every rank keeps all of them. What is averaged is a step's mean over all ranks, out of a
message, or, where no factors are sent, what this rank has seen itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final, NamedTuple

import torch
from typing_extensions import override

from offbeat.callbacks.callback import Callback, CallbackState
from offbeat.errors import UnsupportedError
from offbeat.gradients.buckets import Bucket
from offbeat.gradients.exchange import LaunchOrder
from offbeat.gradients.reductions import launch_sums
from offbeat.kfac.blocks import KFACContext
from offbeat.kfac.capture import Increment
from offbeat.kfac.factors import FactorShape, diagonal_of
from offbeat.kfac.inverses import InversionTask, form_of
from offbeat.kfac.plans import FactorPlan, KFACPlanner, PlanInputs, inversion_order
from offbeat.kfac.preconditioner import Preconditioner
from offbeat.kfac.scheduler import FactorScheduler, SummedFactor
from offbeat.torch_private import for_each

_WHY_UNSEEN: Final = (
    "Hooks do not run where the model was compiled and called before attach(): attach first, or"
    " call torch.compiler.reset() after it. Nor do they where a layer's weight is used without"
    " calling the layer, as in F.linear(x, layer.weight), or inside a transform of torch.func"
)
_MOST_NAMES: Final = 8


class KFACCallback(Callback):
    """Takes, averages and inverts factors, and preconditions gradients. It comes after the exchange
    of gradients in the order of callbacks.

    Args:
        kfac: what all parts know.
        planner: what tells this one from the others.
        inputs: what it plans from.
        buckets: of gradients, in the order in which they are launched.
        launch_order: the order that factors share with the buckets of gradients.

    Attributes:
        blocks, slots: as in `kfac`.
        form: what is kept of inverses.
        scheduler: takes and sends factors; listens to the exchange of gradients.
        averages: of the factors over steps.
        preconditioner: has the inverses and uses them.
        wait_s: seconds spent so far on waiting for factors behind the backward pass.
    """

    state_key: ClassVar[str] = "kfac"

    def __init__(
        self,
        kfac: KFACContext,
        *,
        planner: KFACPlanner,
        inputs: PlanInputs,
        buckets: Sequence[Bucket],
        launch_order: LaunchOrder,
    ) -> None:
        self._context, self._settings, self._stream = kfac.session, kfac.settings, kfac.stream
        self._planner, self._inputs, self._is_checked = planner, inputs, False
        self._with_gradient: set[int] = set()  # positions of parameters, until they are checked
        self.blocks, self.slots = kfac.blocks, kfac.slots
        self.form = form_of(self.slots, kfac.settings, same_devices=inputs.same_devices)
        self.wait_s = 0.0
        measures = inputs.costs is not None
        self.scheduler = FactorScheduler(
            kfac, measures=measures, buckets=buckets, launch_order=launch_order
        )
        self.averages = FactorAverages(kfac)
        self.preconditioner = Preconditioner(kfac, self.form)
        self._adopt(planner.plan(inputs))
        self.scheduler.begin_step()

    @property
    def num_bytes(self) -> int:
        """Memory on this rank that averages, inverses and messages take from the first steps on."""
        kept = [factor.weighted_sum for factor in self.averages.factors.values()]
        kept += [each for each in self.preconditioner.inverses.packed if each is not None]
        num_sent = sum(message.num_bytes for message in self.scheduler.messages)
        return sum(tensor.nbytes for tensor in kept) + num_sent

    @property
    def plan(self) -> FactorPlan:
        """The plan in force."""
        return self.scheduler.plan

    def _adopt(self, plan: FactorPlan) -> None:
        self.scheduler.adopt(plan)
        self.averages.adopt(plan)
        # With the damping divided between A and G, inverting either of them needs the traces of
        # both; so does joining two uses of a weight.
        joins = any(slot.shape.uses > 1 for slot in self.slots)
        pairs = joins or self._settings.curvature.pi
        self.preconditioner.adopt(plan, inversion_order(plan, self._inputs, pairs=pairs))

    # Events

    @override
    def on_forward_begins(self, *, trains: bool) -> None:
        self.scheduler.is_training_pass = trains

    @override
    def on_backward_begins(self, *, synchronised: bool) -> None:
        # Where a loop calls parts of the model, as Lightning does, nobody hears of forward passes.
        self.scheduler.is_training_pass = synchronised

    @override
    def on_backward_done(self, *, synchronised: bool) -> None:
        self.scheduler.is_training_pass = False

    @override
    def on_gradient_ready(self, index: int, *, synchronised: bool) -> None:
        if not self._is_checked:
            self._with_gradient.add(index)

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
            inverses.start(self.averages.inversion_tasks)
        if has_factors:
            self._take_in(inverts=inverts)
        if inverts:
            self.preconditioner.finish_inversions()
        if has_factors and (ready_s := self.scheduler.learn()) is not None:
            self._adopt(self._planner.plan(replace(self._inputs, ready_s=ready_s)))
        self.preconditioner.precondition(self.scheduler.retired)

    def _check_what_was_seen(self) -> None:
        """Name the blocks whose weights got gradients while nobody saw their inputs and outputs.
        Collective, and all ranks conclude the same: when one raises, none is left waiting.
        """
        capture, seen = self.scheduler.capture, self.scheduler.capture.pop_layers_seen()
        parameters = list(self._context.parameters.values())
        with_gradient = {id(parameters[position]) for position in self._with_gradient}
        used = {
            index
            for index, block in enumerate(self.blocks)
            if id(block.weight) in with_gradient and not capture.is_retired(index)
        }
        layers = [
            (index, name)
            for index, block in enumerate(self.blocks)
            for use in block.uses
            for name in use.names
        ]
        flags = [[index in used, index in used and name in seen] for index, name in layers]
        counts = torch.tensor(flags, dtype=torch.float64).T.contiguous()
        for pending in launch_sums(self._context.driver, self._stream, counts):
            pending.wait()
        in_use, is_seen = (counts > 0).tolist()
        if not any(in_use):
            return  # no rank had a batch: look again in the next step with factors
        self._is_checked = True
        told = zip(layers, in_use, is_seen, strict=True)
        unseen = [layer for layer, is_used, was_seen in told if is_used and not was_seen]
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
            sums = message.read()
            for each in sums:
                self._complete_(each.slot, each.mean)
            self.averages.add(sums)
            num_retired += [(each.slot // 2, each.num_retired) for each in sums]
            if inverts:
                inverses.advance(number)
        own, self.scheduler.own_increments = self.scheduler.own_increments, {}
        for slot, increment in own.items():
            self._complete_(slot, increment.packed)
            self.averages.add_own(slot, increment, is_retired=self.scheduler.is_retired_here(slot))
        if num_retired:
            # One transfer for all numbers: on a GPU the host waits for each value that it asks for.
            like = self.slots[0].zeros()
            counts = torch.stack([count.to(like) for _, count in num_retired]).tolist()
            self.scheduler.retire(
                index for (index, _), count in zip(num_retired, counts, strict=True) if count
            )

    def _complete_(self, slot: int, packed: torch.Tensor) -> None:
        """Turn a factor of the passes before the step's first exchange into one of the whole step:
        each of n exchanges has brought as many terms of the loss, of n times as many in all, so
        that each term's own gradient is n times what those passes took it for.
        """
        if self.scheduler.num_exchanges > 1:
            uses = self.blocks[slot // 2].uses
            for use, part in zip(uses, packed.chunk(len(uses)), strict=True):
                if (self.slots[slot].side == "output") != use.is_flipped:
                    part.mul_(self.scheduler.num_exchanges**2)

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
        plan = None
        if replicated["world_size"] == self._context.driver.world_size:
            plan = self.scheduler.saved_plan(replicated)
        if plan is not None:
            self._adopt(plan)
        self.averages.load_state_dict(saved)
        self.preconditioner.load_state_dict(saved)
        self.scheduler.load_state_dict(replicated, keeps_plan=plan is not None)
        if lacking := self.averages.lacking(saved):
            self._context.notices.notify(
                f"the checkpoint has nothing of K-FAC's factors {_listed(lacking)}: their layers"
                " get plain gradients until the next inversions"
            )

    @override
    def close(self) -> None:
        """Take the hooks out."""
        self.scheduler.capture.remove()


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    listed = ", ".join(map(repr, names[:_MOST_NAMES]))
    return f"{listed} and {more} more" if more > 0 else listed


class RunningFactor(NamedTuple):
    """One factor's average over steps, packed.

    Attributes:
        weighted_sum: sum of the steps' factors, each times its weight.
        mass: sum of the weights, a scalar tensor; 0 as long as nothing was averaged.
    """

    weighted_sum: torch.Tensor
    mass: torch.Tensor

    def average(self) -> torch.Tensor:
        """The average, packed; zeros as long as there is none."""
        return self.weighted_sum / _or_one(self.mass)


def update_(
    factors: Sequence[RunningFactor],
    increments: Sequence[torch.Tensor],
    weights: torch.Tensor,
    *,
    decay: float,
) -> None:
    """Take in one step's factors, without asking for values, for which the host would wait on a
    GPU. It overwrites `increments`.

    Args:
        factors: all of one dtype and device.
        increments: the step's mean over all ranks for each of them, of its packed shape.
        weights: the ranks' weights together, shape (factors,); only whether they are 0 matters.
        decay: how much of the past to keep, in [0, 1).
    """
    largest = torch.stack(for_each("norm", list(increments), ord=math.inf))
    counts = torch.isfinite(largest) & (weights > 0)
    masses = torch.stack([factor.mass for factor in factors])
    masses.lerp_(masses.masked_fill(counts, 1.0), 1 - decay)
    for_each("copy_", [factor.mass for factor in factors], list(masses.unbind()))
    sums = [factor.weighted_sum for factor in factors]
    for increment, sum_, is_counted in zip(increments, sums, counts.unbind(), strict=True):
        torch.where(is_counted, increment, sum_, out=increment)
    for_each("lerp_", sums, list(increments), 1 - decay)


def _or_one(values: torch.Tensor) -> torch.Tensor:
    """`values`, with 1 in place of what is not positive. `torch.where` with a number would make the
    host wait on a GPU, to which it copies the number.
    """
    return values.masked_fill(~(values > 0), 1.0)


def mean_eigenvalue(packed: torch.Tensor, shape: FactorShape) -> torch.Tensor:
    """The factor's trace by its dimension, a mean over groups: a scalar tensor."""
    values = diagonal_of(packed, shape)
    return values.sum() / (values.numel() - shape.padding)


def damping_of(
    inputs: torch.Tensor, outputs: torch.Tensor, *, damping: float, pi: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What to add to the diagonals of A and G.

    Without `pi`, the damping itself to each. With it, sqrt(damping) * pi to A and sqrt(damping) /
    pi to G, where pi^2 = (tr A / d_A) / (tr G / d_G): the damping of their Kronecker product is
    then shared by the factors in proportion to their sizes (arXiv 1503.05671, section 6.3). Where a
    trace is not positive, pi is 1.

    Args:
        inputs, outputs: the mean eigenvalues of the averages of A and G, of one block or several.
        damping: > 0.
        pi: whether to correct.

    Returns:
        Two tensors of as many numbers.
    """
    if not pi:
        return torch.full_like(inputs, damping), torch.full_like(outputs, damping)
    are_positive = (inputs > 0) & (outputs > 0)
    ratio = (inputs / outputs).masked_fill(~are_positive, 1.0).sqrt()
    return ratio * damping**0.5, damping**0.5 / ratio


class FactorAverages:
    """Averages factors over steps, and says what is to be inverted of them.

    Args:
        kfac: what all parts know.

    Attributes:
        factors: the averages that this rank keeps, by slot.
    """

    def __init__(self, kfac: KFACContext) -> None:
        self._slots, self._settings = kfac.slots, kfac.settings
        self._rank = kfac.session.driver.rank
        self.factors: dict[int, RunningFactor] = {}

    def adopt(self, plan: FactorPlan) -> None:
        """Keep what `plan` says. Averages that this rank has already stay as they are."""
        self.factors = {
            slot.index: self.factors.get(slot.index)
            or RunningFactor(zeros := slot.zeros(), zeros.new_zeros(()))
            for slot in self._slots
            if plan.is_kept_by(self._rank, slot.index)
        }

    def add(self, sums: Sequence[SummedFactor]) -> None:
        """Take in what all ranks have seen of the factors of a message that this rank keeps."""
        kept = [each for each in sums if each.slot in self.factors]
        if kept:
            update_(
                [self.factors[each.slot] for each in kept],
                [each.mean for each in kept],
                torch.stack([each.weight for each in kept]),
                decay=self._settings.curvature.decay,
            )

    def add_own(self, slot: int, increment: Increment, *, is_retired: bool) -> None:
        """Take in what this rank has seen itself of a factor that it keeps."""
        # What has no weight is known here already.
        if increment.weight > 0:
            packed = increment.packed
            self.add([SummedFactor(slot, packed, packed.new_ones(()), packed.new_zeros(()))])
        if is_retired:
            # Without an average there is no inverse, which is what the owner's message then says.
            self.factors[slot].mass.zero_()

    def inversion_tasks(self, slots: Sequence[int]) -> list[InversionTask]:
        """What is to be inverted of factors that this rank keeps, all of one dtype and device."""
        pairs = list(dict.fromkeys((slot & ~1, slot | 1) for slot in slots))
        both = [slot for pair in pairs for slot in pair]
        masses = torch.stack([self.factors[slot].mass for slot in both])
        are_valid = dict(zip(both, (masses > 0).unbind(), strict=True))
        divisors = dict(zip(both, _or_one(masses).unbind(), strict=True))
        sums = {slot: self.factors[slot].weighted_sum for slot in both}
        shapes = {slot: self._slots[slot].shape.joined for slot in both}
        for pair in pairs:
            if self._slots[pair[0]].shape.uses > 1:
                averages = [(self.factors[at].average(), self._slots[at].shape) for at in pair]
                for slot, joined in zip(pair, joined_factors(*averages), strict=True):
                    sums[slot], divisors[slot] = joined, torch.ones_like(divisors[slot])
        # Without pi the partner may not have arrived yet, and does not matter.
        means = torch.stack([mean_eigenvalue(sums[slot], shapes[slot]) for slot in both])
        of_sides = damping_of(
            *(means / torch.stack([divisors[slot] for slot in both])).view(-1, 2).unbind(1),
            damping=self._settings.damping,
            pi=self._settings.curvature.pi,
        )
        damping = dict(zip(both, torch.stack(of_sides, dim=1).flatten().unbind(), strict=True))
        return [
            InversionTask(
                name=self._slots[slot].name,
                packed=sums[slot] / divisors[slot],
                shape=shapes[slot],
                damping=damping[slot],
                valid=are_valid[slot],
            )
            for slot in slots
        ]

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {
            f"{self._slots[slot].key}/{name}": tensor
            for slot, factor in self.factors.items()
            for name, tensor in (("sum", factor.weighted_sum), ("mass", factor.mass))
        }

    def lacking(self, saved: Mapping[str, Any]) -> list[str]:
        """Names of the factors that this rank keeps and `saved` has no average of."""
        kept = (self._slots[number] for number in self.factors)
        return [slot.name for slot in kept if f"{slot.key}/sum" not in saved]

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`. An average that is not in `saved` stays as it is."""
        for slot, factor in self.factors.items():
            key = self._slots[slot].key
            if f"{key}/sum" in saved:
                factor.weighted_sum.copy_(saved[f"{key}/sum"])
                factor.mass.copy_(saved[f"{key}/mass"])


def joined_factors(
    inputs: tuple[torch.Tensor, FactorShape], outputs: tuple[torch.Tensor, FactorShape]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What stands for the sum of both uses' Fisher matrices.

    A tied weight that is used both ways round, as by an Embedding and a Linear, has the factors of
    two uses. Of the sum of their Fisher matrices, U_1 x W_1 + U_2 x W_2, one Kronecker product is
    made, of the same trace, in which each use counts by the root s of its own trace:

        s_i^2 = tr U_i tr W_i
        U = c (s_1 U_1 / tr U_1 + s_2 U_2 / tr U_2)
        W = c (s_1 W_1 / tr W_1 + s_2 W_2 / tr W_2)
        c^2 = (s_1^2 + s_2^2) / (s_1 + s_2)^2

    Up to c these are U_1 + pi U_2 and W_1 + W_2 / pi with the pi that makes the traces of what is
    added by that, pi U_2 x W_1 and U_1 x W_2 / pi, smallest together, as in arXiv 1503.05671,
    section 6.3. So the factors of both uses are averaged over ranks and steps apart, and joined
    before they are inverted.

    Args:
        inputs, outputs: averages of the factors of both uses, packed, with their shapes.

    Returns:
        The factors, packed as the shapes that are `joined` say.
    """
    num_uses = inputs[1].uses
    sides = [packed.unflatten(0, (num_uses, shape.groups)) for packed, shape in (inputs, outputs)]
    traces = [diagonal_of(*side).view(num_uses, -1).sum(dim=1) for side in (inputs, outputs)]
    traces_of_products = traces[0] * traces[1]
    weights = traces_of_products.sqrt()
    # c, which is 0 / 0 where no use has been seen
    total = weights.sum()
    scale = (traces_of_products.sum().sqrt() / total).masked_fill(~(total > 0), 0.0)
    found = [
        torch.einsum("u,ugn->gn", scale * weights / _or_one(trace), each)
        for each, trace in zip(sides, traces, strict=True)
    ]
    return found[0], found[1]
