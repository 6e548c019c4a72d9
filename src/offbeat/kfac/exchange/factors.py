"""Kronecker factors: captured, averaged over ranks while computation goes on, inverted, and put to
use before each step.

1. `Capture` adds to A in the forward pass and to G in the backward pass.
2. A group of factors leaves when all of it has been seen as often as in earlier steps, in an order
   that all ranks share with the buckets of gradients; what is not complete by the end of the
   backward pass leaves then. Nothing is counted that is added to a factor after it left.
3. When the exchange of gradients turns out well, before the step: running averages take the sums
   in, one message after the other; every `inverse_interval` steps all factors are inverted, by
   owners or by everyone, each as soon as what it needs has been taken in
   (`kfac.exchange.inverses`); gradients become directions.
4. When it does not, all ranks drop the step's factors together.

The plan says who does what and when (`kfac.planning.factor_plan`); everything else is the same for
all strategies.

Every decision is taken from what all ranks know: sums, broadcasts, verdicts and counts of steps. A
layer that changed its shape on one rank is given up by all, since who was retired travels with the
sums.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from typing_extensions import override

from offbeat.errors import CheckpointError
from offbeat.kfac.averages import RunningFactor, damping_of
from offbeat.kfac.blocks import SIDES, Block, Side
from offbeat.kfac.capture import Capture, Increment
from offbeat.kfac.eigen import Eigen, form_of, make_inverter
from offbeat.kfac.exchange.costs import slowest_ready_s
from offbeat.kfac.exchange.directions import precondition_by_owners_
from offbeat.kfac.exchange.inverses import InversePhase
from offbeat.kfac.exchange.launch_order import Turns
from offbeat.kfac.exchange.messages import FactorMessage
from offbeat.kfac.exchange.spans import Spans, is_round
from offbeat.kfac.inverses import Job, dtype_of
from offbeat.kfac.options import FactorOptions
from offbeat.kfac.planning.factor_plan import FactorPlan, turns
from offbeat.kfac.planning.inverse_order import InverseBatch
from offbeat.kfac.precondition import Curvature, Eigens, Inverses, precondition_
from offbeat.parts.part import Part
from offbeat.parts.profile import FactorAssignment, StepProfile
from offbeat.transport.driver import Driver, Stream

PROFILED_STEPS = range(1, 4)
"""Steps with factors whose times are measured where the plan depends on them; the first one is
slower than all others.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class FactorSettings:
    """How factors are averaged, damped and used.

    Attributes:
        damping: as of `kfac.averages.damping_of`, > 0.
        pi: the same.
        eigen: whether factors are decomposed instead of inverted. With `pi` their product is damped
            then, without it each.
        bfloat16: whether inverses are kept in bfloat16.
        decay: how much of the running averages to keep in each step with factors, in [0, 1).
        kl_clip: limit of a step's predicted change, > 0; None: no limit.
        factor_interval: steps from one with factors to the next, >= 1.
        inverse_interval: steps from one with inversions to the next, >= 1.
        ramp: whether the first steps, as many as an interval has, are denser.
        options: how factors are counted.
    """

    damping: float
    pi: bool
    eigen: bool
    bfloat16: bool
    decay: float
    kl_clip: float | None
    factor_interval: int
    inverse_interval: int
    ramp: bool
    options: FactorOptions

    def has_factors(self, step: int) -> bool:
        """Whether factors are averaged in `step`."""
        return step % self.factor_interval == 0 or (self.ramp and step < self.factor_interval)

    def num_with_factors(self, step: int) -> int:
        """How many steps before `step`, which has factors, had them too."""
        if self.ramp:
            return min(step, self.factor_interval - 1 + step // self.factor_interval)
        return step // self.factor_interval

    def has_inversions(self, step: int) -> bool:
        """Whether factors are inverted in `step`. On the ramp that is in steps 0, 1, 2,
        4, 8, ...
        """
        return step % self.inverse_interval == 0 or (
            self.ramp and step < self.inverse_interval and not step & (step - 1)
        )


@dataclass(slots=True)
class FactorTimes:
    """Seconds so far.

    Attributes:
        wait_s: waiting for factors behind the backward pass.
        precondition_s: from gradients to directions.
    """

    wait_s: float = 0.0
    precondition_s: float = 0.0


class FactorExchange(Part):
    """The part that does it. Comes after the exchange of gradients in the order of parts, and is
    told of it as its `Rounds`.

    Args:
        model: the root module.
        blocks: what is preconditioned; the same on all ranks.
        settings: as above.
        plan: made anew of measured times after `PROFILED_STEPS` if `replan` is given.
        replan: a plan of when each slot is ready, or None.
        order: in which order a plan's factors are inverted (`kfac.planning.inverse_order`).
        first_parameters: for each block, the position of its first parameter in the model.
        parameter_bucket_firsts: for each bucket of gradients, in order, the position of its first
            parameter.
        turns: the order shared with the gradients.
        optimizer: knows the learning rates.
        driver: carries everything out.
        stream: of everything that is sent here.
        grad_scale: the AMP scale at the moment.
        notify: for remarks.
        predicted_s: for each slot, how long its inversion is expected to take; None where nothing
            was measured.
    """

    state_key: ClassVar[str] = "kfac"

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        *,
        settings: FactorSettings,
        plan: FactorPlan,
        replan: Callable[[Sequence[float]], FactorPlan] | None,
        order: Callable[[FactorPlan], Sequence[InverseBatch]],
        first_parameters: Sequence[int],
        bucket_firsts: Sequence[int],
        turns: Turns,
        optimizer: torch.optim.Optimizer,
        driver: Driver,
        stream: Stream,
        grad_scale: Callable[[], float],
        notify: Callable[[str], None],
        predicted_s: Sequence[float] | None = None,
    ) -> None:
        self.times = FactorTimes()
        self._spans, self._predicted_s, self._is_new_plan = Spans(), predicted_s, True
        self._blocks, self._settings, self._replan, self._inversion_order = (
            list(blocks),
            settings,
            replan,
            order,
        )
        self._first_parameters = [first for first in first_parameters for _ in SIDES]
        self._bucket_firsts, self._turns = bucket_firsts, turns
        self._optimizer, self._driver, self._stream, self._notify = (
            optimizer,
            driver,
            stream,
            notify,
        )
        self._names = [block.name.replace("_orig_mod.", "") for block in blocks]
        self._shapes = [block.shape(side) for block in blocks for side in SIDES]
        self._likes = [_like(block) for block in blocks for _ in SIDES]
        self._form = form_of(
            self._likes[0].device,
            settings.inverse_interval,
            eigen=settings.eigen,
            bfloat16=settings.bfloat16,
        )
        self._inverter = make_inverter(self._form, notify)
        self._factors: dict[int, RunningFactor] = {}
        self._retired: set[int] = set()
        self._expected = [0] * len(self._shapes)
        self._learned = False
        self._profile: list[list[float]] = []
        self._num_profiled = 0
        self._step = 0
        self._good = True
        self._is_stale = False
        self._open = self._sent = self._streams = False
        self._increments: dict[int, Increment] = {}
        self._plan = plan
        watched = [index for index in range(len(blocks)) if plan.groups or self._keeps(2 * index)]
        self._watched = {index: place for place, index in enumerate(watched)}
        self._capture = Capture(
            model,
            [blocks[index] for index in watched],
            settings.options,
            warn=notify,
            grad_scale=grad_scale,
            added=lambda place, side, began_s: self._added(watched[place], side, began_s),
        )
        self._inverses = self._make_inverses(plan)
        self._adopt(plan)
        self._begin_step()

    # The plan

    @property
    def plan(self) -> FactorPlan:
        """The plan in force."""
        return self._plan

    def _adopt(self, plan: FactorPlan) -> None:
        self._plan, self._is_new_plan = plan, True
        groups = [
            (group, [self._shapes[slot] for slot in group], self._likes[group[0]])
            for group in plan.groups
        ]
        self._messages = [FactorMessage(*group) for group in groups]
        self._group_of = {
            slot: number for number, group in enumerate(plan.groups) for slot in group
        }
        self._order = turns(plan, self._first_parameters, self._bucket_firsts)
        self._factors = {
            slot: (
                self._factors.get(slot)
                or RunningFactor(shape, dtype=like.dtype, device=like.device)
            )
            for slot, (shape, like) in enumerate(zip(self._shapes, self._likes, strict=True))
            if self._keeps(slot)
        }
        before, self._inverses = self._inverses, self._make_inverses(plan)
        self._inverses.times = before.times
        for old, new in zip(before.packed, self._inverses.packed, strict=True):
            if old is not None and new is not None:
                new.copy_(old)

    def _make_inverses(self, plan: FactorPlan) -> InversePhase:
        return InversePhase(
            self._inversion_order(plan),
            self._shapes,
            [like.to(dtype_of(self._form, like.dtype)) for like in self._likes],
            travels=not plan.by_owner,
            driver=self._driver,
            stream=self._stream,
            inverter=self._inverter,
            spans=self._spans,
        )

    def _keeps(self, slot: int) -> bool:
        """Whether this rank averages the factor of `slot` over time: where directions travel, it is
        its owner's business.
        """
        return not self._plan.by_owner or self._plan.owners[slot] == self._driver.rank

    # One step's factors

    def _begin_step(self) -> None:
        """Look at what is to come, if this is a step with factors, and let nothing be sent out of
        turn.
        """
        self._capture.stop()
        self._drop()
        self._spans.begin(on=self._is_looked_at(), keep=self._good)
        self._open = self._settings.has_factors(self._step)
        self._turns.set(self._order if self._open else ())
        if not self._open:
            return
        self._seen = [0] * len(self._shapes)
        self._missing = [
            sum(not self._is_complete(slot) for slot in group) for group in self._plan.groups
        ]
        self._offered = [False] * len(self._plan.groups)
        self._begin_s: float | None = None
        self._ready_s = [0.0] * len(self._shapes)
        self._capture.start(self._settings.num_with_factors(self._step))

    def _is_looked_at(self) -> bool:
        """Whether what happens in this step is noted: steps with inversions, and some with factors,
        ever more rarely.
        """
        for interval, digits in (
            (self._settings.inverse_interval, 3),
            (self._settings.factor_interval, 2),
        ):
            if self._step % interval == 0 and is_round(self._step // interval, digits):
                return True
        return False

    def _drop(self) -> None:
        """Forget what was sent and not taken in. It must arrive first: the next factors use the
        same buffers.
        """
        if self._sent:
            for message in self._messages:
                message.wait()
        self._sent = False
        self._increments = {}

    def _is_complete(self, slot: int) -> bool:
        """Whether as much has been added to a factor as ever was in one step."""
        return self._learned and self._seen[slot] >= self._expected[slot]

    def _added(self, index: int, side: Side, began_s: float) -> None:
        slot = 2 * index + (side == "output")
        if not self._open:
            return
        if self._spans.on:
            self._spans.add("factor", self._name_of(slot), began_s)
        now_s = time.perf_counter()
        self._begin_s = now_s if self._begin_s is None else self._begin_s
        self._ready_s[slot] = now_s - self._begin_s
        was_complete = self._is_complete(slot)
        self._seen[slot] += 1
        number = self._group_of.get(slot)
        if number is None or was_complete or not self._is_complete(slot):
            return
        self._missing[number] -= 1
        if self._plan.streamed and self._streams:
            self._offer_complete()

    def _offer_complete(self) -> None:
        for number, missing in enumerate(self._missing):
            if not missing and not self._offered[number]:
                self._offer(number, failed=False)

    def _offer(self, number: int, *, failed: bool) -> None:
        self._offered[number] = True

        def begin() -> None:
            with torch.no_grad():
                take, began_s = self._nothing if failed else self._take, time.monotonic()
                pending = self._messages[number].launch(
                    self._driver, self._stream, take, self._is_retired
                )
                self._spans.launched("sum", f"message {number}", began_s, pending)

        self._turns.take(("factors", number), begin)

    def _take(self, slot: int) -> Increment:
        return self._capture.take(self._watched[slot // 2], SIDES[slot % 2])

    def _nothing(self, slot: int) -> Increment:
        like = self._likes[slot]
        return Increment(
            torch.zeros(self._shapes[slot].packed, dtype=like.dtype, device=like.device), 0.0
        )

    def _is_retired(self, slot: int) -> bool:
        return self._blocks[slot // 2].name in self._capture.retired

    # Rounds: what the exchange of gradients says

    def flush(self, *, failed: bool) -> None:
        if not self._open:
            return
        self._open, self._sent = False, True
        for number, offered in enumerate(self._offered):
            if not offered:
                self._offer(number, failed=failed)
        if not self._plan.groups:
            self._increments = {
                slot: self._take(slot) for slot in range(len(self._shapes)) if self._keeps(slot)
            }
        self._flushed_s = time.monotonic()

    def verdict(self, *, good: bool) -> None:
        self._good = good
        if good:
            if self._sent:
                self._spans.add("wait for gradients", "", self._flushed_s)
            self._capture.stop()
            return
        self._begin_step()

    # Events

    @override
    def on_forward_begins(self, *, trains: bool) -> None:
        """Factors leave early in passes for training only."""
        self._streams = trains

    @override
    def on_before_update(self) -> None:
        """Gradients become directions, once what this step brought has been taken in."""
        if not self._good:
            return
        inverts = self._settings.has_inversions(self._step) or self._is_stale
        if inverts:
            self._inverses.start(self._job)
        has_news, self._sent = self._sent, False
        if has_news:
            self._take_in(inverts=inverts)
        if inverts:
            self._inverses.finish()
            self._is_stale = False
        if has_news:
            self._learn_times()
        begin_s = time.perf_counter()
        with self._spans.timed("precondition"):
            self._precondition()
        self.times.precondition_s += time.perf_counter() - begin_s

    @override
    def on_after_step(self) -> None:
        if not self._good:
            return
        self._step += 1
        self._begin_step()

    def _take_in(self, *, inverts: bool) -> None:
        """Wait for the sums and average them over time. What can be inverted by then is, before the
        next wait.
        """
        retired: list[tuple[int, torch.Tensor]] = []
        for number, message in enumerate(self._messages, start=1):
            if inverts:
                self._inverses.fill(message.is_there)
            begin_s = time.monotonic()
            message.wait()
            self.times.wait_s += time.monotonic() - begin_s
            self._spans.add("wait for factors", "", begin_s)
            self._spans.arrived()
            for slot, mean, total, num_retired in message.read():
                if slot in self._factors:
                    self._factors[slot].update_(mean, weight=total, decay=self._settings.decay)
                retired.append((slot // 2, num_retired))
            if inverts:
                self._inverses.advance(number)
        for slot, (packed, weight) in self._increments.items():
            self._factors[slot].update_(packed, weight=weight, decay=self._settings.decay)
            if self._is_retired(slot):
                self._factors[
                    slot
                    # without an average there is no inverse, which the owner's message says
                ].mass.zero_()
        self._increments = {}
        if retired:
            counts = torch.stack(
                [num_retired.to(self._likes[0]) for _, num_retired in retired]
            ).tolist()
            self._retire(
                {index for (index, _), count in zip(retired, counts, strict=True) if count}
            )
        self._expected = [max(pair) for pair in zip(self._expected, self._seen, strict=True)]
        self._learned = True

    def _learn_times(self) -> None:
        """When factors are ready is measured a few times; the median of the slowest rank's times
        makes the plan.
        """
        self._num_profiled += 1
        if self._replan is None or self._num_profiled > PROFILED_STEPS.stop:
            return
        if self._num_profiled - 1 in PROFILED_STEPS:
            self._profile.append(self._ready_s)
        if self._num_profiled == PROFILED_STEPS.stop:
            mine = [sorted(times)[len(times) // 2] for times in zip(*self._profile, strict=True)]
            self._adopt(self._replan(slowest_ready_s(self._driver, self._stream, mine)))

    def _retire(self, indices: set[int]) -> None:
        for index in sorted(indices - self._retired):
            self._retired.add(index)
            if index in self._watched:
                self._capture.retire(self._watched[index], "its shape has changed on another rank")

    def _job(self, slot: int) -> Job:
        index = slot // 2
        packed = self._factors[slot].average()
        damping = packed.new_full((), self._settings.damping)
        if self._settings.pi:
            average = {slot: packed, slot ^ 1: self._factors[slot ^ 1].average()}
            pair = [
                (average[either], self._shapes[either]) for either in (2 * index, 2 * index + 1)
            ]
            damping = damping_of(pair[0], pair[1], damping=self._settings.damping, pi=True)[
                slot % 2
            ]
        return Job(
            name=self._name_of(slot),
            packed=packed,
            shape=self._shapes[slot],
            damping=damping,
            valid=self._factors[slot].mass > 0,
        )

    def _name_of(self, slot: int) -> str:
        return f"{'AG'[slot % 2]} of {self._names[slot // 2]!r}"

    def _precondition(self) -> None:
        lr_of = {
            id(p): float(group["lr"])
            for group in self._optimizer.param_groups
            for p in group["params"]
        }
        live = [index for index in range(len(self._blocks)) if index not in self._retired]
        blocks = [self._blocks[index] for index in live]
        lrs = [lr_of.get(id(block.weight), 0.0) for block in blocks]
        inverses = [self._inverses_of(index) for index in live]
        kl_clip = self._settings.kl_clip
        if self._plan.by_owner:
            owners = [
                owner for index in live if (owner := self._plan.owners[2 * index]) is not None
            ]
            precondition_by_owners_(
                blocks,
                inverses,
                owners,
                driver=self._driver,
                stream=self._stream,
                lrs=lrs,
                kl_clip=kl_clip,
                spans=self._spans,
            )
        else:
            precondition_(
                blocks,
                [inverse for inverse in inverses if inverse is not None],
                lrs=lrs,
                kl_clip=kl_clip,
            )

    def _inverses_of(self, index: int) -> Curvature | None:
        inputs, outputs = self._inverses.packed[2 * index : 2 * index + 2]
        if inputs is None or outputs is None:
            return None
        if self._form != "eigen":
            return Inverses(inputs, outputs, self._form)
        a, g = (
            Eigen.of(inputs, self._shapes[2 * index]),
            Eigen.of(outputs, self._shapes[2 * index + 1]),
        )
        return Eigens(a, g, self._settings.damping, damps_each=not self._settings.pi)

    @override
    def counters(self) -> dict[str, float]:
        """Seconds, beside what the exchange of gradients counts."""
        return {
            "factor_wait_s": self.times.wait_s,
            "invert_s": self._inverses.times.invert_s,
            "inverse_wait_s": self._inverses.times.wait_s,
            "precondition_s": self.times.precondition_s,
        }

    @override
    def take_profile(self) -> StepProfile | None:
        """What this step brought, if it is one that was looked at."""
        spans = self._spans.take()
        if not spans:
            return None
        is_new, self._is_new_plan = self._is_new_plan, False
        return StepProfile(spans=spans, duties=self._duties() if is_new else ())

    def _duties(self) -> list[FactorAssignment]:
        return [
            FactorAssignment(
                factor=self._name_of(slot),
                rows=shape.dim,
                matrices=0 if shape.is_diagonal else shape.groups,
                message=self._group_of.get(slot),
                owner=self._plan.owners[slot],
                sends=(
                    None
                    if self._plan.owners[slot] is None
                    else "directions"
                    if self._plan.by_owner
                    else "inverses"
                ),
                predicted_s=self._predicted_s[slot] if self._predicted_s else None,
            )
            for slot, shape in enumerate(self._shapes)
        ]

    # State

    @override
    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Factors and inverses: the same on all ranks, or the owner's own. What is under way in a
        step is not in it.
        """
        kept: dict[str, Any] = {}
        for slot, factor in self._factors.items():
            kept |= {
                f"{self._key(slot)}/{name}": tensor for name, tensor in factor.state_dict().items()
            }
        kept |= {
            f"{self._key(slot)}/inverse": t
            for slot, t in enumerate(self._inverses.packed)
            if t is not None
        }
        kept["form"] = self._form
        local, replicated = (kept, {}) if self._plan.by_owner else ({}, kept)
        replicated |= {
            "step": self._step,
            "retired": [self._names[index] for index in sorted(self._retired)],
            "world_size": self._driver.world_size,
            "groups": [list(group) for group in self._plan.groups],
            "owners": list(self._plan.owners),
            "by_owner": self._plan.by_owner,
            "num_profiled": self._num_profiled,
        }
        return {"replicated": replicated, "local": local}

    @override
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """In a world of another size owners change: an inverse that is missing here is made in the
        next step that inverts.

        Where another form of inverses is kept by now, all are made in the next step.
        """
        replicated, saved = state["replicated"], {**state["replicated"], **state["local"]}
        self._check(saved)
        if replicated["world_size"] == self._driver.world_size:
            groups = tuple(tuple(group) for group in replicated["groups"])
            owners, by_owner = tuple(replicated["owners"]), bool(replicated["by_owner"])
            self._adopt(
                FactorPlan(
                    groups=groups, streamed=self._plan.streamed, owners=owners, by_owner=by_owner
                )
            )
            self._num_profiled = int(replicated["num_profiled"])
        self._is_stale = saved["form"] != self._form
        for slot, factor in self._factors.items():
            if f"{self._key(slot)}/sum" in saved:
                factor.load_state_dict(
                    {name: saved[f"{self._key(slot)}/{name}"] for name in ("sum", "mass")}
                )
        for slot, inverse in enumerate(self._inverses.packed):
            if inverse is not None:
                none = torch.zeros_like(inverse)
                inverse.copy_(
                    none if self._is_stale else saved.get(f"{self._key(slot)}/inverse", none)
                )
        self._step = int(replicated["step"])
        self._retired = set()
        self._retire(
            {index for index, name in enumerate(self._names) if name in replicated["retired"]}
        )
        self._good = True
        self._begin_step()

    def _check(self, saved: Mapping[str, Any]) -> None:
        """Before anything is changed."""
        known = {f"{self._key(slot)}/sum": shape.packed for slot, shape in enumerate(self._shapes)}
        if is_same_form := saved["form"] == self._form:
            known |= {
                f"{self._key(slot)}/inverse": self._inverter.kept(shape)
                for slot, shape in enumerate(self._shapes)
            }
        for name, value in saved.items():
            key, _, what = name.rpartition("/")
            if (what == "sum" or (what == "inverse" and is_same_form)) and tuple(
                value.shape
            ) != known.get(name):
                here = known.get(name, "no such factor")
                raise CheckpointError(
                    f"{what} of {key!r} was saved with shape {tuple(value.shape)}, here there is"
                    f" {here}"
                )

    def _key(self, slot: int) -> str:
        return f"{self._names[slot // 2]}/{SIDES[slot % 2]}"

    @override
    def close(self) -> None:
        """Take the hooks out."""
        self._spans.close()
        self._capture.remove()


def _like(block: Block) -> torch.Tensor:
    """A tensor of the block's factors' dtype and device."""
    weight = block.weight
    return torch.empty(
        0, dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device
    )
