"""Strategies that change gradients or steps, against their papers' steps on simulated ranks, with
what training loops do: see `thread_support.habits`. What bits lose is left out here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import scipy.fft
import torch
from typing_extensions import override

import offbeat
from offbeat.codec.topk_codec import VALUE_CODECS
from offbeat.codec.value_codecs import ValueCodec
from offbeat.strategies.base import Strategy
from thread_support.habits import NUM_STEPS, STOP, SimulatedRanks, trained

Tensors = list[torch.Tensor]
FREEZE, PERIOD, KEPT, DECAY = 4, 3, 0.3, 0.9


@dataclass(frozen=True, kw_only=True)
class LosslessOneBitAdam(offbeat.OneBitAdam):
    values: ClassVar[ValueCodec] = VALUE_CODECS["float32"]


@dataclass(frozen=True, kw_only=True)
class LosslessZeroOneAdam(offbeat.ZeroOneAdam):
    written_as: ClassVar[str] = "whole"
    updates: ClassVar[int] = 2
    growth: ClassVar[int] = 1


@pytest.fixture(autouse=True)
def _codec_without_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = offbeat.WeightCodec(density=1.0, entries="float32")
    monkeypatch.setattr("offbeat.strategies.zerooneadam.WEIGHT_CODECS", {"whole": whole})


class Paper:
    """A method, one step of all ranks after the other. A parameter that no rank uses rests, and one
    that some do not has a gradient of zero there.
    """

    def __init__(self, ranks: SimulatedRanks) -> None:
        self.ranks = ranks
        self.parameters = [list(net.parameters()) for net in ranks.nets]

    def restart(self, num_ranks: int) -> None:
        self.ranks.restart(num_ranks)
        self.parameters = [list(net.parameters()) for net in self.ranks.nets]

    def backward(self, step: int) -> tuple[list[Tensors], list[bool]]:
        """The gradients of each rank, and which parameters any rank has used."""
        found = self.ranks.backward(step)
        self.uses = [[gradient is not None for gradient in of_rank] for of_rank in found]
        filled = [
            [
                torch.zeros_like(parameter) if gradient is None else gradient
                for gradient, parameter in zip(of_rank, self.parameters[0], strict=True)
            ]
            for of_rank in found
        ]
        return filled, [any(each) for each in zip(*self.uses, strict=True)]

    def split(self, vector: torch.Tensor) -> Tensors:
        pieces = vector.split([each.numel() for each in self.parameters[0]])
        return [piece.view_as(each) for piece, each in zip(pieces, self.parameters[0], strict=True)]

    def step_all(self, gradients: Tensors, used: Sequence[bool]) -> None:
        shown = [each if there else None for each, there in zip(gradients, used, strict=True)]
        for rank in range(len(self.ranks)):
            self.ranks.step_with(rank, shown)

    def step(self, step: int) -> None:
        raise NotImplementedError

    def groups(self) -> list[dict[str, Any]]:
        """Of each parameter."""
        groups = self.ranks.optimizers[0].param_groups
        of = {id(each): group for group in groups for each in group["params"]}
        return [of[id(each)] for each in self.parameters[0]]


def mean_of(gradients: list[Tensors]) -> Tensors:
    return [torch.stack(each).mean(0) for each in zip(*gradients, strict=True)]


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.flatten() for each in tensors])


def largest(values: torch.Tensor, share: float) -> torch.Tensor:
    """The largest of them, and zeros."""
    kept = torch.zeros_like(values)
    places = values.abs().topk(max(1, round(share * values.numel()))).indices
    kept[places] = values[places]
    return kept


def shared_out(owed: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """With the same sum over ranks."""
    parts = [owed[rank::num_ranks].sum(0) for rank in range(num_ranks)]
    return torch.stack(parts)


class A2SGD(Paper):
    @override
    def step(self, step: int) -> None:
        gradients, used = self.backward(step)
        flat = [joined(each) for each in gradients]
        p = [each[each >= 0].mean() for each in flat]
        q = [-each[each < 0].mean() for each in flat]
        of_all_p, of_all_q = torch.stack(p).mean(), torch.stack(q).mean()
        for rank, each in enumerate(flat):
            moved = torch.where(each >= 0, each - p[rank] + of_all_p, each + q[rank] - of_all_q)
            shown = zip(self.split(moved), used, strict=True)
            self.ranks.step_with(rank, [part if there else None for part, there in shown])
        if (step + 1) % PERIOD == 0:
            self.ranks.x = self.ranks.x.mean(0).expand_as(self.ranks.x)


class QGenX(Paper):
    begun: torch.Tensor | None = None

    @override
    def restart(self, num_ranks: int) -> None:
        super().restart(num_ranks)
        if self.begun is not None:
            self.begun = self.begun[:1].expand(num_ranks, -1)

    @override
    def step(self, step: int) -> None:
        gradients, used = self.backward(step)
        if self.begun is None:
            self.begun = self.ranks.x
        else:
            self.ranks.x, self.begun = self.begun, None
        self.step_all(mean_of(gradients), used)


class DeMo(Paper):
    def __init__(self, ranks: SimulatedRanks) -> None:
        super().__init__(ranks)
        self.owed = [torch.zeros(len(ranks), *each.shape).double() for each in self.parameters[0]]

    @override
    def restart(self, num_ranks: int) -> None:
        super().restart(num_ranks)
        self.owed = [shared_out(each, num_ranks) for each in self.owed]

    @override
    def step(self, step: int) -> None:
        gradients, used = self.backward(step)
        sent = [
            [self.fast(rank, place, each) for place, each in enumerate(of_rank)]
            for rank, of_rank in enumerate(gradients)
        ]
        means = mean_of(sent)
        # What is owed travels whether or not a rank uses the parameter.
        travels = [bool(each.any()) for each in means]
        self.step_all(means, [one or other for one, other in zip(used, travels, strict=True)])

    def fast(self, rank: int, place: int, gradient: torch.Tensor) -> torch.Tensor:
        momentum = DECAY * self.owed[place][rank] + gradient
        cosines = torch.from_numpy(scipy.fft.dctn(momentum.numpy(), norm="ortho"))
        kept = largest(cosines.flatten(), KEPT).view_as(cosines)
        sent = torch.from_numpy(scipy.fft.idctn(kept.numpy(), norm="ortho"))
        self.owed[place][rank] = momentum - sent
        return sent


class EF21(Paper):
    """SGD's momentum and weight decay come before changes are looked for. A rank adds the decay of
    what it uses, and that of what others alone have used to the coming step.
    """

    def __init__(self, ranks: SimulatedRanks) -> None:
        super().__init__(ranks)
        self.velocity, self.own = torch.zeros_like(ranks.x), torch.zeros_like(ranks.x)
        self.total = torch.zeros_like(ranks.x[0])
        self.takes_momentum = isinstance(ranks.optimizers[0], torch.optim.SGD)

    @override
    def restart(self, num_ranks: int) -> None:
        before = len(self.ranks)
        super().restart(num_ranks)
        if num_ranks != before:
            self.velocity = shared_out(self.velocity, num_ranks) * num_ranks / before
            self.own = self.total.expand(num_ranks, -1) / num_ranks

    def decays(self, of: Sequence[bool]) -> list[torch.Tensor]:
        """The decay of these parameters, and zeros for the others. All ranks have the same."""
        return [
            group["weight_decay"] * there * parameter.detach()
            for group, there, parameter in zip(self.groups(), of, self.parameters[0], strict=True)
        ]

    @override
    def step(self, step: int) -> None:
        gradients, used = self.backward(step)
        groups = self.groups()
        for rank, of_rank in enumerate(gradients):
            gradient = joined(of_rank)
            if self.takes_momentum:
                decays = self.decays(self.uses[rank])
                factors = [
                    torch.full_like(parameter, group["momentum"])
                    for group, parameter in zip(groups, self.parameters[rank], strict=True)
                ]
                self.velocity[rank] = joined(factors) * self.velocity[rank] + (
                    gradient + joined(decays)
                )
                gradient = self.velocity[rank]
            change = largest(gradient / len(self.ranks) - self.own[rank], KEPT)
            self.own[rank] = self.own[rank] + change
            self.total = self.total + change
        if self.takes_momentum:
            for rank, uses in enumerate(self.uses):
                left = [by_any and not there for by_any, there in zip(used, uses, strict=True)]
                late = [
                    decay / group["momentum"]
                    for decay, group in zip(self.decays(left), groups, strict=True)
                ]
                self.velocity[rank] = self.velocity[rank] + joined(late)
            rates = [
                torch.full_like(parameter, group["lr"])
                for parameter, group in zip(self.parameters[0], groups, strict=True)
            ]
            self.ranks.x = self.ranks.x - joined(rates) * self.total
        else:
            shown = self.split(self.total)
            some = [bool(each.abs().max() > 1e-12) for each in shown]
            self.step_all(shown, [one or other for one, other in zip(used, some, strict=True)])


class OneBitAdam(Paper):
    """From the freeze on each element has the step of the mean momentum, divided by what it was
    divided by then.
    """

    squares: list[torch.Tensor | None] | None = None

    @override
    def step(self, step: int) -> None:
        gradients, used = self.backward(step)
        means = mean_of(gradients)
        if step < FREEZE:
            self.step_all(means, used)
            return
        groups, states = self.groups(), self.ranks.optimizers[0].state
        moving = [states[each] for each in self.parameters[0]]
        if self.squares is None:
            self.squares = [
                state["exp_avg_sq"] / (1 - group["betas"][1] ** float(state["step"]))
                for state, group in zip(moving, groups, strict=True)
            ]
        for place, (state, group) in enumerate(zip(moving, groups, strict=True)):
            if not used[place]:
                continue
            parameter, (beta1, _) = self.parameters[0][place].detach(), group["betas"]
            if group["decoupled_weight_decay"]:
                parameter *= 1 - group["lr"] * group["weight_decay"]
            else:
                means[place] += group["weight_decay"] * parameter
            state["step"] += 1
            rate = group["lr"] / (1 - beta1 ** float(state["step"]))
            state["exp_avg"].lerp_(means[place], 1 - beta1)
            divisor = self.squares[place].sqrt() + group["eps"]
            parameter -= rate * state["exp_avg"] / divisor
        self.ranks.x = self.ranks.x[:1].expand_as(self.ranks.x)


class ZeroOneAdam(Paper):
    """With second moments in steps 0, 1 and 3, and averages after steps 2, 4 and 8."""

    def __init__(self, ranks: SimulatedRanks) -> None:
        super().__init__(ranks)
        self.anchor = [each.detach().clone() for each in self.parameters[0]]
        self.v = [torch.zeros_like(each) for each in self.anchor]
        self.m = [torch.zeros(len(ranks), *each.shape).double() for each in self.anchor]
        self.u = [torch.zeros_like(each) for each in self.m]
        self.rates, self.last, self.num_updates = [0.0] * 6, [0.0] * 6, 0

    @override
    def restart(self, num_ranks: int) -> None:
        before = len(self.ranks)
        super().restart(num_ranks)
        self.m = [each[[rank % before for rank in range(num_ranks)]] for each in self.m]
        if num_ranks != before:  # as of the averaged model
            self.u = [each.mean(0).expand(num_ranks, *each.shape[1:]) for each in self.u]

    def divisor(self, place: int) -> torch.Tensor:
        group = self.groups()[place]
        return (self.v[place] / (1 - group["betas"][1] ** self.num_updates)).sqrt() + group["eps"]

    @override
    def step(self, step: int) -> None:
        gradients, _ = self.backward(step)
        for rank, of_rank in enumerate(gradients):
            for place, group in enumerate(self.groups()):
                if self.uses[rank][place] and not group["decoupled_weight_decay"]:
                    decayed = self.parameters[rank][place].detach()
                    of_rank[place] = of_rank[place] + group["weight_decay"] * decayed
        updates = step in (0, 1, 3)
        self.num_updates += updates
        for place, group in enumerate(self.groups()):
            each = torch.stack([of_rank[place] for of_rank in gradients])
            (beta1, beta2), rate = group["betas"], group["lr"]
            if updates:
                each = each.mean(0).expand_as(each)
                self.v[place] = beta2 * self.v[place] + (1 - beta2) * each[0] ** 2
            if group["decoupled_weight_decay"]:
                self.anchor[place] = self.anchor[place] * (1 - rate * group["weight_decay"])
            kept = beta1 * min(1.0, (self.last[place] or rate) / rate)
            self.last[place] = rate
            rate /= 1 - beta1 ** (step + 1)
            self.rates[place] += rate
            self.m[place] = kept * self.m[place] + (1 - beta1) * each
            self.u[place] = self.u[place] + rate * self.m[place]
            if updates or step in (2, 4, 8, 12):
                mean = self.u[place].mean(0)
                self.anchor[place] = self.anchor[place] - mean / self.divisor(place)
                self.m[place] = (mean / self.rates[place]).expand_as(each)
                self.u[place], self.rates[place] = torch.zeros_like(each), 0.0
            for rank, parameters in enumerate(self.parameters):
                moved = self.u[place][rank] / self.divisor(place)
                parameters[place].detach().copy_(self.anchor[place] - moved)


METHODS: dict[str, tuple[Strategy, Callable[[SimulatedRanks], Paper]]] = {
    "A2SGD": (offbeat.A2SGD(period=PERIOD), A2SGD),
    "Q-GenX": (offbeat.QGenX(codec="float32"), QGenX),
    "DeMo": (offbeat.DeMo(density=KEPT, decay=DECAY, sign=False), DeMo),
    "EF21": (offbeat.EF21(density=KEPT), EF21),
    "1-bit Adam": (LosslessOneBitAdam(freeze_step=FREEZE), OneBitAdam),
    "0/1 Adam": (LosslessZeroOneAdam(freeze_step=FREEZE, period=4), ZeroOneAdam),
}
WORLDS = ((3, 3), (3, 2), (2, 4))
"""How many ranks there are until `STOP`, and how many go on then."""
CASES = [
    (name, (("Adam", "AdamW") if name.endswith("Adam") else ("SGD", "AdamW"))[place % 2], *world)
    for name in METHODS
    for place, world in enumerate(WORLDS)
]


@pytest.mark.parametrize(("name", "kind", "num_ranks", "then"), CASES)
def test_steps_are_those_of_the_paper(name: str, kind: str, num_ranks: int, then: int) -> None:
    strategy, paper = METHODS[name]
    method = paper(SimulatedRanks(kind, num_ranks))
    for step in range(NUM_STEPS):
        if step == STOP:
            method.restart(then)
        method.step(step)
    found = trained(strategy, kind, num_ranks, then)
    torch.testing.assert_close(found, method.ranks.x, rtol=1e-9, atol=1e-9)
