"""When factors are taken, and when each message of factors is launched.

1. In a step with factors, `Capture` adds to A in the forward pass and to G in the backward pass.
2. A message is complete when all of its factors have been added to as often as in earlier steps. It
   is then handed to the launch order, which all ranks share with the buckets of gradients. In the
   first step with factors nobody knows how often a layer will be called, so nothing is complete.
3. What is not complete when this rank seals its last bucket of gradients is handed over then. What
   is added to a factor after it was launched is not counted. So where a step has several exchanges
   the passes before the first one stand for all of them.
4. When the exchange of gradients is settled and the step is bad, all ranks drop the step's factors
   together and begin the step anew.

Every decision that concerns the messages is taken from what all ranks know: the plan, the count of
steps, and how the exchange was settled. A layer whose shape changed on one rank is given up by all
ranks, because each message says which layers its sender has retired.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Any, NamedTuple

import torch

from offbeat.codec.dense_wire import DenseWire
from offbeat.codec.device_copies import numpy_dtype, put
from offbeat.codec.tally import Tally, is_finite
from offbeat.codec.topk_codec import VALUE_CODECS
from offbeat.collectives.coded_sum import coded_sum
from offbeat.collectives.dense import dense_all_reduce, gather_values
from offbeat.gradients.buckets import Bucket
from offbeat.gradients.exchange import ExchangeListener, LaunchOrder
from offbeat.gradients.reductions import launch_sums
from offbeat.kfac.blocks import FactorSlot, KFACContext, Side
from offbeat.kfac.capture import Capture, Increment
from offbeat.kfac.factors import diagonal_of, products_of_roots
from offbeat.kfac.plans import FactorPlan, launch_sequence
from offbeat.torch_private import for_each
from offbeat.transport.driver import Driver, Pending, Stream
from offbeat.transport.operations import Collective

PROFILED_STEPS = range(1, 4)
"""Steps with factors in which is measured when each factor is ready, where the plan depends on it.
The first step with factors is left out, since it is slower than all others.
"""


@dataclass(kw_only=True, slots=True)
class _StepProgress:
    """What the passes of one step have brought so far.

    Attributes:
        num_added: for each slot, how often its factor has been added to.
        num_missing: for each message, how many of its factors are not complete.
        is_handed_over: for each message, whether the launch order has it.
        ready_s: for each slot, when its factor was added to last, in seconds since the first one.
        first_added_s: when the first factor was added to; None: none has been.
    """

    num_added: list[int]
    num_missing: list[int]
    is_handed_over: list[bool]
    ready_s: list[float]
    first_added_s: float | None = None


class FactorScheduler(ExchangeListener):
    """Takes factors out of the model's passes and sends them.

    Args:
        kfac: what all parts know.
        measures: whether the plan depends on when each factor is ready.
        buckets: of gradients, in the order in which they are launched.
        launch_order: the order that factors share with the buckets of gradients.

    Attributes:
        step: how many optimizer steps have been taken.
        plan: the plan in force: which factors share a message, and whether messages leave during
            the passes.
        is_good: whether the last exchange of gradients was settled as good.
        num_exchanges: exchanges of gradients in this step so far.
        is_training_pass: whether the pass that began last, forward or backward, is one for
            training. In other passes no message leaves early.
        messages: the messages of the plan, in the order in which they are launched.
        own_increments: where no factors are sent, this step's of those that this rank averages by
            itself, by slot. Whoever takes them in takes them away.
        retired: indices of the blocks that all ranks have given up.
        capture: the hooks on the model.
    """

    def __init__(
        self,
        kfac: KFACContext,
        *,
        measures: bool,
        buckets: Sequence[Bucket],
        launch_order: LaunchOrder,
    ) -> None:
        context = kfac.session
        assert context.model is not None
        self.step = 0
        self.is_good = True
        self.num_exchanges = 0
        self.is_training_pass = False
        self.own_increments: dict[int, Increment] = {}
        self.retired: set[int] = set()
        self._blocks, self._slots = kfac.blocks, kfac.slots
        self._settings, self._measures = kfac.settings, measures
        positions = {id(weight): at for at, weight in enumerate(context.parameters.values())}
        self._first_parameters = [
            positions[id(self._blocks[slot.block_index].weight)] for slot in self._slots
        ]
        self._bucket_firsts = [min(bucket.indices) for bucket in buckets]
        self._launch_order = launch_order
        self._driver, self._stream = context.driver, kfac.stream
        self._expected = [0] * len(self._slots)
        self._knows_expected = False
        self._trains: list[bool] = []  # by block, as those steps had it
        self._ready_s_of_steps: list[list[float]] = []
        self._num_profiled = 0
        self._is_open = self._has_sent = False
        self.capture = Capture(
            context.model,
            kfac.blocks,
            kfac.settings.curvature,
            warn=context.notices.notify,
            grad_scale=context.grad_scale,
            added=self._on_added,
            room=self._room,
            is_kept=self._is_summed_here,
        )

    def adopt(self, plan: FactorPlan) -> None:
        """Act on `plan` from the next step on."""
        self._drop()  # messages under way belong to the plan before
        self.plan = plan
        codec = self._settings.curvature.factor_codec
        self.messages = [
            FactorMessage([self._slots[slot] for slot in group], codec=codec)
            for group in plan.groups
        ]
        self._message_of = {
            slot: number for number, group in enumerate(plan.groups) for slot in group
        }
        self._sequence = launch_sequence(plan, self._first_parameters, self._bucket_firsts)

    # One step

    def begin_step(self) -> None:
        """Take and send factors in this step if it is one with factors."""
        self.capture.stop()
        self._drop()
        self.num_exchanges = 0
        self._progress = self._no_progress()
        self._is_open = self._settings.has_factors(self.step)
        # Without factors there is nothing that a bucket of gradients would have to wait for.
        self._launch_order.follow(self._sequence if self._is_open else ())
        if self._is_open:
            self.capture.start(self._settings.num_with_factors(self.step))

    def _no_progress(self) -> _StepProgress:
        """At the beginning of a step. A factor that no earlier step has added to is complete."""
        is_missing = [not self._knows_expected or num > 0 for num in self._expected]
        return _StepProgress(
            num_added=[0] * len(self._slots),
            num_missing=[sum(is_missing[slot] for slot in group) for group in self.plan.groups],
            is_handed_over=[False] * len(self.plan.groups),
            ready_s=[0.0] * len(self._slots),
        )

    def _drop(self) -> None:
        """Forget what was sent and never used. It must arrive first, because the next step's
        messages use the same buffers.
        """
        if self._has_sent:
            for message in self.messages:
                message.wait()
        self._has_sent = False
        self.own_increments = {}

    def _is_complete(self, slot: int) -> bool:
        """Whether a factor has been added to as often as it ever was in one step."""
        return self._knows_expected and self._progress.num_added[slot] >= self._expected[slot]

    def _on_added(self, block_index: int, side: Side) -> None:
        """`capture` has just added to a factor."""
        slot, progress = 2 * block_index + (side == "output"), self._progress
        if not self._is_open:
            return
        now_s = self._driver.now_s(0)
        if progress.first_added_s is None:
            progress.first_added_s = now_s
            self._look_what_trains()
        progress.ready_s[slot] = now_s - progress.first_added_s
        was_complete = self._is_complete(slot)
        progress.num_added[slot] += 1
        message = self._message_of.get(slot)
        if message is None or was_complete or not self._is_complete(slot):
            return
        progress.num_missing[message] -= 1
        if self.plan.streamed and self.is_training_pass:
            # All that are complete, and not this one alone: others may have become so in a pass
            # that was not one for training.
            for number, num_missing in enumerate(progress.num_missing):
                if not num_missing and not progress.is_handed_over[number]:
                    self._hand_over(number, failed=False)

    def _look_what_trains(self) -> None:
        """Where layers were frozen or unfrozen, what earlier steps have added says nothing."""
        trains = [block.weight.requires_grad for block in self._blocks]
        if trains != self._trains:
            self._trains, self._knows_expected = trains, False
            self._expected = [0] * len(self._slots)
            self._progress.num_missing = self._no_progress().num_missing

    def _is_summed_here(self, block_index: int) -> bool:
        rank = self._driver.rank
        return bool(self.plan.groups) or self.plan.is_kept_by(rank, 2 * block_index)

    def _room(self, block_index: int, side: Side) -> torch.Tensor | None:
        slot = 2 * block_index + (side == "output")
        message = self._message_of.get(slot)
        return None if message is None else self.messages[message].room(slot)

    def _hand_over(self, number: int, *, failed: bool) -> None:
        """Let message `number` be launched when its place in the order has come."""
        self._progress.is_handed_over[number] = True

        def begin() -> None:
            with torch.no_grad():
                take = self._nothing if failed else self._take
                message = self.messages[number]
                message.launch(self._driver, self._stream, take, self.is_retired_here)

        self._launch_order.launch(("factors", number), begin)

    def _take(self, slot: int) -> Increment:
        return self.capture.take(slot // 2, self._slots[slot].side)

    def _nothing(self, slot: int) -> Increment:
        return Increment(self._slots[slot].zeros(), 0.0)

    # What the exchange of gradients says

    def on_bucket_sealed(self, number: int, *, is_last: bool, failed: bool) -> None:
        if not (is_last and self._is_open):
            return
        # A second exchange in the same step finds nothing open: factors are sent once a step.
        self._is_open, self._has_sent = False, True
        for message, is_handed_over in enumerate(self._progress.is_handed_over):
            if not is_handed_over:
                self._hand_over(message, failed=failed)
        if not self.plan.groups:
            self.own_increments = {
                slot: self._take(slot)
                for slot in range(len(self._slots))
                if self.plan.is_kept_by(self._driver.rank, slot)
            }

    def on_exchange_settled(self, *, good: bool) -> None:
        self.is_good = good
        if not good:
            self.begin_step()
            return
        self.num_exchanges += 1
        self.capture.stop()

    def on_gradients_dropped(self) -> None:
        self.num_exchanges = 0

    # What the callback says and asks for, before and after the optimizer's step

    def pop_has_sent(self) -> bool:
        """Whether this step's factors were sent and nobody has taken them in yet. The caller does
        so now.
        """
        has_sent, self._has_sent = self._has_sent, False
        return has_sent

    def learn(self) -> Sequence[float] | None:
        """Remember what this step's passes added, once its factors have been taken in. Collective.

        Returns:
            When each factor is ready, in seconds, once enough is known for a new plan.
        """
        self._expected = [
            max(pair) for pair in zip(self._expected, self._progress.num_added, strict=True)
        ]
        self._knows_expected = True
        self._num_profiled += 1
        if not self._measures or self._num_profiled > PROFILED_STEPS.stop:
            return None
        if self._num_profiled - 1 in PROFILED_STEPS:
            self._ready_s_of_steps.append(self._progress.ready_s)
        if self._num_profiled < PROFILED_STEPS.stop:
            return None
        # The median of the steps withstands one disturbed step; the slowest rank's time counts,
        # since a sum cannot be there before the last rank has begun it.
        mine = [
            sorted(times)[len(times) // 2] for times in zip(*self._ready_s_of_steps, strict=True)
        ]
        answers = self._driver.run(gather_values(mine), self._stream.next())
        return [max(times) for times in zip(*answers, strict=True)]

    def is_retired_here(self, slot: int) -> bool:
        """Whether this rank has given up the layer of a factor."""
        return self.capture.is_retired(slot // 2)

    def retire(self, block_indices: Iterable[int]) -> None:
        """Give blocks up, because some rank has given them up."""
        for index in sorted(set(block_indices) - self.retired):
            self.retired.add(index)
            self.capture.retire(index, "its shape has changed on another rank")

    def end_step(self) -> None:
        """The optimizer's step has been taken: begin the next one."""
        self.step += 1
        self.begin_step()

    # State

    def state_dict(self) -> dict[str, Any]:
        """The same on all ranks. What is under way within a step is not in it."""
        return {
            "step": self.step,
            "retired": [self._slots[2 * index].block_name for index in sorted(self.retired)],
            "groups": [list(group) for group in self.plan.groups],
            "owners": list(self.plan.owners),
            "by_owner": self.plan.by_owner,
            "num_profiled": self._num_profiled,
        }

    def saved_plan(self, state: Mapping[str, Any]) -> FactorPlan | None:
        """The plan that `state` holds; None if it is not of as many factors, since other layers are
        covered by now. Where ranks look at what they own alone, it must have the same owners, too.
        """
        owners = tuple(state["owners"])
        if len(owners) != len(self._slots) or (self.plan.by_owner and owners != self.plan.owners):
            return None
        groups = tuple(map(tuple, state["groups"]))
        return replace(self.plan, groups=groups, owners=owners, by_owner=bool(state["by_owner"]))

    def load_state_dict(self, state: Mapping[str, Any], *, keeps_plan: bool) -> None:
        """Inverse of `state_dict`, with the plan adopted already.

        Args:
            state: as of `state_dict`.
            keeps_plan: whether the saved plan goes on, and with it the count of profiled steps.
        """
        if keeps_plan:
            self._num_profiled = int(state["num_profiled"])
        self.step = int(state["step"])
        self.retired = set()
        self.retire(slot.block_index for slot in self._slots if slot.block_name in state["retired"])
        self.is_good = True
        self.begin_step()


class SummedFactor(NamedTuple):
    """What all ranks together have seen of a factor in a step.

    Attributes:
        slot: which factor.
        mean: weighted by ranks' weights, packed; zeros, or not a number, if the weight is 0.
        weight: of all ranks, a scalar tensor.
        num_retired: ranks that cannot watch the layer any more, a scalar tensor.
    """

    slot: int
    mean: torch.Tensor
    weight: torch.Tensor
    num_retired: torch.Tensor


class FactorMessage:
    """The factors of one group: each times its weight, then the weights, then who was retired.

    Args:
        slots: which factors, all of one dtype and device.
        codec: how factors, and not what follows them, travel: "bfloat16" is summed as it is, other
            names of `VALUE_CODECS` by owners.
    """

    def __init__(self, slots: Sequence[FactorSlot], *, codec: str) -> None:
        self.slots, self._codec = slots, codec
        sizes = [*(slot.shape.num_elements for slot in slots), 2 * len(slots)]
        self._flat = torch.zeros(sum(sizes), dtype=slots[0].dtype, device=slots[0].device)
        *parts, self._tail = self._flat.split(sizes)
        self._views = [
            part.view(slot.shape.packed) for part, slot in zip(parts, slots, strict=True)
        ]
        self._places = {slot.index: place for place, slot in enumerate(slots)}
        self._pending: Sequence[Pending[Any]] = ()
        self._rounded: torch.Tensor | None = None  # while it travels

    @property
    def num_bytes(self) -> int:
        return sum(slot.size_bytes for slot in self.slots)

    @property
    def _factors(self) -> torch.Tensor:
        return self._flat[: -self._tail.numel()]

    def room(self, slot: int) -> torch.Tensor:
        """Where the factor of `slot` leaves from: this rank's part may be made there."""
        view: torch.Tensor = self._views[self._places[slot]]
        return view

    def launch(
        self,
        driver: Driver,
        stream: Stream,
        take: Callable[[int], Increment],
        is_retired: Callable[[int], bool],
    ) -> None:
        """Begin to sum over all ranks.

        Args:
            driver: carries the sum out.
            stream: its channels.
            take: this rank's part of a slot.
            is_retired: whether this rank has given up the layer of a slot.
        """
        # A mean weighted by each rank's examples needs the sum of the weights too, which travels in
        # the same message, as do the numbers of ranks that retired a layer.
        numbers = []
        for slot, view in zip(self.slots, self._views, strict=True):
            packed, weight = take(slot.index)
            torch.mul(packed, weight, out=view)
            numbers += [weight, float(is_retired(slot.index))]
        put(torch.tensor(numbers, dtype=self._tail.dtype), self._tail)
        # Weights and numbers of ranks would no longer be exact in fewer bits.
        if self._codec == "float32":
            self._pending = launch_sums(driver, stream, self._flat)
        elif self._codec == "bfloat16":
            self._rounded = self._factors.bfloat16()
            self._pending = launch_sums(driver, stream, self._rounded, self._tail)
        else:
            coded = driver.launch(self._sum_coded(driver.rank, driver.world_size), stream.next())
            self._pending = [*launch_sums(driver, stream, self._tail), coded]

    def _sum_coded(self, rank: int, world_size: int) -> Collective[None]:
        """Sum diagonals as they are, and the factors in codes that stand for shares of the roots of
        these sums: no number in a row and a column is larger than theirs multiplied. Whatever the
        magnitudes in a factor, a code then errs by as much as it would for correlations. What
        rounding loses is owed to nobody: the running averages forget it, too.
        """
        mine, shapes = self._factors, [slot.shape for slot in self.slots]
        own = [diagonal_of(*each) for each in zip(self._views, shapes, strict=True)]
        sums = yield from dense_all_reduce(torch.cat([each.flatten() for each in own]))
        if not is_finite(sums):
            mine.fill_(nan)
            return
        parts = sums.split([each.numel() for each in own])
        diagonals = [part.view_as(each) for part, each in zip(parts, own, strict=True)]
        bounds = [products_of_roots(*each) for each in zip(diagonals, shapes, strict=True)]
        for view, bound, exact, shape in zip(self._views, bounds, diagonals, shapes, strict=True):
            view.div_(bound.masked_fill(~(bound > 0), 1))
            diagonal_of(view, shape, becomes=torch.zeros_like(exact))  # codes are finer without
        values = VALUE_CODECS[self._codec].suited_to(numpy_dtype(mine.dtype))
        wire, nobody = DenseWire(num_parameters=0, values=values), Tally.of_nobody(0)
        kept = torch.empty_like(mine)
        mine.copy_((yield from coded_sum(rank, world_size, mine, nobody, wire, kept=kept)).kept)
        for view, bound, exact, shape in zip(self._views, bounds, diagonals, shapes, strict=True):
            view.mul_(bound)
            diagonal_of(view, shape, becomes=exact)

    def has_arrived(self) -> bool:
        """Whether `wait` would return at once. Never blocks."""
        return all(pending.poll() for pending in self._pending)

    def wait(self) -> None:
        """Until the sums are there."""
        for pending in self._pending:
            pending.wait()
        self._pending = ()
        if self._rounded is not None:
            self._factors.copy_(self._rounded)
            self._rounded = None

    def read(self) -> list[SummedFactor]:
        """The sums of each slot, which must have been waited for. May be called once: means are
        made in place of the sums.
        """
        weights, nums_retired = self._tail.view(-1, 2).unbind(1)
        divisors = weights.masked_fill(~(weights > 0), 1.0)
        for_each("div_", self._views, list(divisors.unbind()))
        sums = zip(self.slots, self._views, weights.unbind(), nums_retired.unbind(), strict=True)
        return [SummedFactor(slot.index, *rest) for slot, *rest in sums]
