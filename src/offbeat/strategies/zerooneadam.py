"""0/1 Adam: momentum as signs from the first step on, second moments updated ever more rarely, and
at last local steps (arXiv 2202.06009, algorithm 1).

    in each step:
        m = beta1 m + (1 - beta1) gradient;  u += lr m                         on each rank
        parameter = anchor - u / d;  d = sqrt(v) + eps
    in some of them, ever further apart, until `freeze_step`:
        gradient = mean of all ranks';  v = beta2 v + (1 - beta2) gradient^2   before that
    after the others, and after `freeze_step` at ever longer intervals up to `period`:
        U = mean of all ranks' u / d, as signs with a scale     by owners (`collectives.coded_sum`)
        m = d U / (sum of lr);  anchor -= U;  u = 0
    where lr rises, m is multiplied by the last lr / lr

What signs lose of u / d is owed. m and v are those of `optimizer.state`; the step is written here,
and the optimizer then finds no gradient.

Cost per step: 2(P-1)/P n bits sent by each rank and a float32 for 1,024 of them, a `period`-th of
it in the end; and what AllReduce sends in the steps in which v is updated. Four buffers of the
model's size: anchor, u, and two for what is owed.

Differences from the paper: signs are those of u / d and not of u, as with 1-bit Adam here; where lr
rises, momentum falls by as much. What is owed makes m large once lr has fallen, and a warm restart
would apply it at the full rate: without this it destroys the model, and a text model behind a
warm-up and a cosine ends with 4 to 5% more bits (400 steps, two seeds). In a step that updates v
momentum takes the mean gradient, which is there already; Adam's bias corrections are made, v's by
the number of its updates; local steps become rarer after a number of them, and not as the learning
rate falls; scales are those of 1-bit Adam here; decoupled weight decay moves the anchor. What a
loop writes into parameters is kept where all ranks are alike; local steps undo it, which is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from typing_extensions import override

from offbeat.averaging.periodic import (
    AveragingSchedule,
    Everyone,
    MeanOfAll,
    PeriodicAverage,
    TakeMean,
    coded_changes,
)
from offbeat.callbacks.callback import Callback, CallbackState
from offbeat.callbacks.context import Context
from offbeat.codec.described_options import OneOrMore
from offbeat.codec.device_copies import read_numbers
from offbeat.gradients.exchange import HiddenGradients
from offbeat.strategies.averaging import AveragingStrategy
from offbeat.strategies.onebitadam import divisor_of, regrow_, remark_of_freeze, require_adam
from offbeat.strategies.options import require_real
from offbeat.strategies.registry import WEIGHT_CODECS
from offbeat.torch_private import version_of
from offbeat.weights.model_weights import ModelWeights, average_, wide
from offbeat.weights.optimizer_state import new_number

MOMENTS: Final = ("exp_avg", "exp_avg_sq")

_LOOKED_AT: Final = 11
"""Once in so many steps a rank looks whether parameters are still where its local steps have led,
also if autograd knows of no change in place. That takes a pass over them, and on a GPU the host
waits for it.
"""

_UNDONE: Final = (
    "parameters were written to between two averages of ZeroOneAdam, and its steps go on from where"
    " all ranks were last alike: what was written is undone, as is clipping of weights; use"
    " period=1, with which it is kept, or offbeat.OneBitAdam()"
)


@dataclass(frozen=True, kw_only=True)
class ZeroOneAdam(AveragingStrategy):
    """Adam of which signs travel from the first step on, and ever more rarely.

    Args:
        freeze_step: second moments stay after so many steps, and steps begin to be local, >= 1: a
            sixth to a quarter of all steps is usual.
        period: the most local steps between two averages, >= 1.
    """

    written_as: ClassVar[str] = "sign"
    """How sums of momenta travel: a name of `WEIGHT_CODECS`."""
    updates: ClassVar[int] = 16
    """Second moments are updated so many times before the distance of updates doubles."""
    growth: ClassVar[int] = 1000
    """The number of local steps after which the distance of averages doubles."""

    freeze_step: OneOrMore = 1000
    period: OneOrMore = 16

    @override
    def check(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        require_real(model)
        require_adam(optimizer, type(self).__name__)

    @override
    def callbacks(self, context: Context, weights: ModelWeights) -> list[Callback]:
        peers, schedule = Everyone(context.driver, context.new_stream()), RarerSteps(self)
        steps = LocalAdam(context, schedule, peers)
        changes = coded_changes(context.parameters, WEIGHT_CODECS[self.written_as], peers)
        exchange = MeanOfAll(weights, peers, changes=changes, rule=steps)
        return [steps, PeriodicAverage(exchange, schedule)]


class RarerSteps(AveragingSchedule):
    """Which steps update second moments, and after which the others' momenta are averaged.

    Args:
        strategy: its options.

    Attributes:
        freeze_step: as of the strategy.
        updates: the steps that update second moments, counted from 0.
    """

    def __init__(self, strategy: ZeroOneAdam) -> None:
        self._strategy, self.freeze_step = strategy, strategy.freeze_step
        self.updates: list[int] = []
        step = 0
        while step < self.freeze_step:
            self.updates.append(step)
            step += 2 ** (len(self.updates) // strategy.updates)

    @override
    def period(self, num_steps: int, state: Mapping[str, float]) -> int:
        if num_steps - 1 in self.updates:
            return num_steps + 1  # all ranks have made the same step already
        doublings = max(0, num_steps - self.freeze_step) // self._strategy.growth
        return int(min(self._strategy.period, 2 ** min(doublings, 30)))


class LocalAdam(Callback, TakeMean):
    """Adam's steps of this rank, from where all ranks were last alike; and the rule by which they
    go on from the mean of what they have summed up.

    Args:
        context: lent by the session; its optimizer is an Adam.
        schedule: says which steps update second moments.
        peers: all ranks.

    Attributes:
        anchor: where all ranks were last alike, by name: float32 or float64.
        sums: of momenta since then, each times its learning rate, by name.
    """

    state_key: ClassVar[str] = "local_adam"

    def __init__(self, context: Context, schedule: RarerSteps, peers: Everyone) -> None:
        assert context.optimizer is not None
        self._schedule, self._peers, self._optimizer = schedule, peers, context.optimizer
        self._parameters, self._num_steps = context.parameters, 0
        self._notices, self._is_loaded = context.notices, False
        self.anchor = {name: wide(p).clone() for name, p in context.parameters.items()}
        self.sums = {name: torch.zeros_like(each) for name, each in self.anchor.items()}
        kinds = ("rate", "last_rate", "steps", "updates")
        self._numbers = {kind: dict.fromkeys(self.anchor, 0.0) for kind in kinds}
        self._rates = self._numbers["rate"]  # of what is summed up
        self._last_rates = self._numbers["last_rate"]  # 0 before the first step
        # Steps that Adam has gathered moments in, and those of them that updated v: they begin when
        # a parameter is in the optimizer and trains.
        self._steps_of, self._updates_of = self._numbers["steps"], self._numbers["updates"]
        self._versions = list[int]()  # of parameters, after the last step
        self._is_own = True  # whether what is summed up is what this rank has
        self._exact: dict[str, torch.Tensor] = {}  # moments of a loaded state, until they are used
        self._hidden = HiddenGradients()

    def _groups(self) -> Mapping[str, dict[str, Any]]:
        of = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
        return {name: of[id(p)] for name, p in self._parameters.items() if id(p) in of}

    def _state(self, name: str, group: Mapping[str, Any]) -> Mapping[str, Any]:
        parameter, summed = self._parameters[name], self.sums[name]
        state: dict[str, Any] = self._optimizer.state[parameter]
        if "step" not in state:
            state["step"] = new_number("step", 0.0, parameter, group)
            state |= {key: torch.zeros_like(summed) for key in MOMENTS}
        for key in MOMENTS:  # a loaded state has the parameter's type
            held, exact = state[key], self._exact.pop(f"{key}/{name}", None)
            state[key] = held.to(summed.dtype)
            if exact is not None:
                exact = exact.to(held.device)  # what was read of a file is on the host
                state[key] = torch.where(exact.to(held.dtype) == held, exact, state[key])
        return state

    def _begin(self) -> None:
        """Where ranks are alike, whatever has been written into parameters is the same on all."""
        groups = self._groups()
        for name, parameter in self._parameters.items():
            anchor = self.anchor[name]
            if not self._rates[name]:
                is_same = anchor.to(parameter.dtype) == parameter
                anchor.copy_(torch.where(is_same, anchor, parameter))
            elif not self._is_own and name in groups:
                divisor = self._divisor(name, groups[name])
                moved = anchor - parameter
                self.sums[name].copy_(moved.mul_(divisor).masked_fill_(divisor.isinf(), 0))
            if not self._num_steps:
                taken = float(self._optimizer.state.get(parameter, {}).get("step", 0))
                self._steps_of[name] = self._updates_of[name] = taken
        # A script may have loaded another rank's parameters with a state.
        is_due = self._num_steps % _LOOKED_AT == 0 or self._versions != self._versions_now()
        if is_due and not self._is_loaded:
            self._look_for_written()
        self._is_own, self._is_loaded = True, False

    def _versions_now(self) -> list[int]:
        return [version_of(parameter) for parameter in self._parameters.values()]

    def _look_for_written(self) -> None:
        """Say so if parameters are not where local steps have led."""
        are_left = [
            (self._point(name, group).to(parameter.dtype) == parameter).all()
            for name, group in self._groups().items()
            if self._rates[name] and (parameter := self._parameters[name]).requires_grad
        ]
        if not all(read_numbers(are_left)):
            self._notices.warn(_UNDONE)

    def _point(self, name: str, group: Mapping[str, Any]) -> torch.Tensor:
        """Where this rank's steps have led since all ranks were alike."""
        return self.anchor[name] - self.sums[name] / self._divisor(name, group)

    @override
    @torch.no_grad()
    def on_before_update(self) -> None:
        """Take the step; the optimizer then finds no gradient."""
        self._begin()
        # What was frozen meanwhile stays, as it does where an optimizer finds no gradient.
        groups = {k: v for k, v in self._groups().items() if self._parameters[k].requires_grad}
        gradients = {name: self._gradient(name, group) for name, group in groups.items()}
        updates = self._num_steps in self._schedule.updates
        self._num_steps += 1
        if updates:
            tensors, peers = [*gradients.values(), *self.whole()], self._peers
            average_(tensors, tensors, driver=peers.driver, stream=peers.stream, weight=1.0)
        for name, group in groups.items():
            self._step(name, gradients[name], group, updates=updates)
            self._hidden.hide(self._parameters[name])
        if updates:
            self.merge_([*self.changes()])
        if self._num_steps == self._schedule.freeze_step:
            self._notices.inform(remark_of_freeze(self._optimizer, self._num_steps))

    def _gradient(self, name: str, group: Mapping[str, Any]) -> torch.Tensor:
        """Of this rank; nothing where there is none, or where it was not finite."""
        parameter, gradient = self._parameters[name], torch.zeros_like(self.sums[name])
        if parameter.grad is not None:
            gradient.copy_(parameter.grad).mul_(-1 if group["maximize"] else 1)
            if not group["decoupled_weight_decay"]:
                gradient.add_(parameter.to(gradient.dtype), alpha=group["weight_decay"])
        return gradient

    def _step(
        self, name: str, gradient: torch.Tensor, group: Mapping[str, Any], *, updates: bool
    ) -> None:
        state, (beta1, beta2) = self._state(name, group), group["betas"]
        # A rate of 0 would leave nothing in the sum of which to make momentum again.
        rate = float(group["lr"]) or 1e-12
        self._steps_of[name] += 1
        if updates:
            self._updates_of[name] += 1
            state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if group["decoupled_weight_decay"]:
            # As under Adam, one that no rank has used does not fade. All ranks know v.
            anchor = self.anchor[name]
            left = 1 - rate * group["weight_decay"]
            anchor.mul_(torch.where(state["exp_avg_sq"].any(), left, anchor.new_ones(())))
        state["step"].fill_(self._steps_of[name])
        last_rate = self._last_rates[name] or rate
        self._last_rates[name] = rate
        state["exp_avg"].mul_(beta1 * min(1.0, last_rate / rate)).add_(gradient, alpha=1 - beta1)
        rate /= 1 - beta1 ** self._steps_of[name]
        self._rates[name] += rate
        self.sums[name].add_(state["exp_avg"], alpha=rate)
        self._parameters[name].copy_(self._point(name, group))

    def _divisor(self, name: str, group: Mapping[str, Any]) -> torch.Tensor:
        square = self._state(name, group)["exp_avg_sq"]
        # Where there was no update yet all of it is 0, whatever its number.
        return divisor_of(square, max(1, self._updates_of[name]), group)

    @override
    def whole(self) -> list[torch.Tensor]:
        """What the optimizer does not have: another one may step it, on each rank for itself."""
        groups = self._groups()
        return [p for name, p in self._parameters.items() if name not in groups and p.requires_grad]

    @override
    def changes(self) -> Iterator[torch.Tensor]:
        """How far each parameter has moved back from the anchor."""
        groups = self._groups()
        for name, summed in self.sums.items():
            yield summed / self._divisor(name, groups[name]) if self._rates[name] else summed

    @override
    @torch.no_grad()
    def merge_(self, changes: Sequence[torch.Tensor] | None) -> None:
        assert changes is not None, "momenta travel by a codec"
        groups = self._groups()
        for name, moved in zip(self.sums, changes, strict=True):
            if name in groups and (rate := self._rates[name]):
                divisor = self._divisor(name, groups[name])
                divisor.masked_fill_(divisor.isinf(), 0)  # what has no second moment stays
                self.anchor[name].sub_(moved.masked_fill(divisor == 0, 0))
                self._parameters[name].copy_(self.anchor[name])
                self._state(name, groups[name])["exp_avg"].copy_(moved * divisor / rate)
            self.sums[name].zero_()
            self._rates[name] = 0.0

    @override
    def on_after_step(self) -> None:
        self._hidden.show()
        self._versions = self._versions_now()

    @override
    def close(self) -> None:
        """Adam goes on from where its state is."""
        self._hidden.show()
        for name, group in self._groups().items():
            parameter = self._parameters[name]
            if self._num_steps and (state := self._optimizer.state.get(parameter)):
                if not self._updates_of[name]:
                    state.clear()  # without a second moment Adam has to begin
                    continue
                regrow_(state, group, self._updates_of[name], state["step"])
                state |= {key: state[key].to(parameter.dtype) for key in MOMENTS}
        self._num_steps = 0

    @override
    def state_dict(self) -> CallbackState:
        numbers = {
            f"{kind}/{name}": number
            for kind, by_name in self._numbers.items()
            for name, number in by_name.items()
        }
        anchors = {f"anchor/{name}": each for name, each in self.anchor.items()}
        sums = {f"sum/{name}": each for name, each in self.sums.items()}
        # To half precision an optimizer's state is rounded when it is loaded.
        exact = {
            f"{key}/{name}": state[key]
            for name, parameter in self._parameters.items()
            if (state := self._optimizer.state.get(parameter))
            for key in MOMENTS
            if key in state and state[key].dtype != parameter.dtype
        }
        driver = self._peers.driver
        counts = {"num_steps": self._num_steps, "world_size": driver.world_size}
        replicated = {**anchors, **numbers, **counts}
        return {"replicated": replicated, "local": {**sums, **exact, "rank": driver.rank}}

    @override
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """A rank that finds another one's state, or one of another number of ranks, has made what
        leads from the anchor to the model that it goes on from.
        """
        saved, driver = state["replicated"], self._peers.driver
        saved_by = state["local"]["rank"], saved["world_size"]
        self._is_own = saved_by == (driver.rank, driver.world_size)
        self._num_steps, self._is_loaded = int(saved["num_steps"]), True
        self._exact = {
            key: value.clone()
            for key, value in state["local"].items()
            if key.startswith(tuple(f"{each}/" for each in MOMENTS))
        }
        for name, anchor in self.anchor.items():
            anchor.copy_(saved[f"anchor/{name}"])
            self.sums[name].copy_(state["local"][f"sum/{name}"])
            for kind, by_name in self._numbers.items():
                by_name[name] = float(saved[f"{kind}/{name}"])
