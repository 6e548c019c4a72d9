"""Strategies that average weights, against their papers' steps on simulated ranks, with what
training loops do: see `thread_support.habits`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from typing_extensions import override

import offbeat
from offbeat.strategies.base import Strategy
from thread_support.habits import NUM_STEPS, STOP, SimulatedRanks, trained
from thread_support.nets import make_model, step_of
from thread_support.world import ThreadDriver, results_of, session_on

LocalSGD = offbeat.LocalSGD


class Paper:
    """A method, one step of all ranks after the other."""

    def __init__(self, ranks: SimulatedRanks) -> None:
        self.ranks = ranks

    def restart(self, num_ranks: int) -> None:
        self.ranks.restart(num_ranks)

    def step(self, step: int) -> None:
        raise NotImplementedError


class DPSGD(Paper):
    """x_i = sum of W_ij x_j - the step from x_i."""

    @override
    def step(self, step: int) -> None:
        before, size = self.ranks.x, len(self.ranks)
        mixing = torch.zeros(size, size, dtype=torch.float64)
        for rank in range(size):
            near = {rank, (rank - 1) % size, (rank + 1) % size}
            mixing[rank, list(near)] = 1 / len(near)
        self.ranks.step_apart(step)
        self.ranks.x = mixing @ before + self.ranks.x - before


class SGP(Paper):
    def __init__(self, ranks: SimulatedRanks, out_degree: int) -> None:
        super().__init__(ranks)
        self.out_degree = out_degree

    @override
    def step(self, step: int) -> None:
        self.ranks.step_apart(step)
        x, size, share = self.ranks.x, len(self.ranks), 1 / (1 + self.out_degree)
        hops = [1 << power for power in range(4) if 1 << power < size]
        kept, w = share * x, torch.full((size,), share, dtype=torch.float64)
        for place in range(self.out_degree):
            hop = hops[(step * self.out_degree + place) % len(hops)]
            kept += share * x.roll(hop, 0)
            w += share
        self.ranks.x = kept / w[:, None]


class Crossbow(Paper):
    def __init__(self, ranks: SimulatedRanks, period: int, alpha: float) -> None:
        super().__init__(ranks)
        self.period, self.alpha, self.z = period, alpha, ranks.x[0]

    @override
    def step(self, step: int) -> None:
        correction = self.alpha * (self.ranks.x - self.z)
        self.ranks.step_apart(step)
        if (step + 1) % self.period == 0:
            self.ranks.x = self.ranks.x - correction
            self.z = self.z + correction.sum(0)


class Outer:
    """SlowMo's and DiLoCo's step of an anchor."""

    def __init__(self, lr: float, momentum: float, *, nesterov: bool) -> None:
        self.lr, self.momentum, self.nesterov = lr, momentum, nesterov

    def __call__(
        self, anchor: torch.Tensor, velocity: torch.Tensor, change: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        velocity = self.momentum * velocity + change
        move = change + self.momentum * velocity if self.nesterov else velocity
        return anchor - self.lr * move, velocity


PLAIN, SLOWMO = Outer(1.0, 0.0, nesterov=False), Outer(1.0, 0.5, nesterov=False)
DILOCO = Outer(0.7, 0.9, nesterov=True)


class Local(Paper):
    """Local steps and an average with everyone or in pairs, each rank with an anchor of its own."""

    def __init__(
        self, ranks: SimulatedRanks, period: int, outer: Outer, *, in_pairs: bool = False
    ) -> None:
        super().__init__(ranks)
        self.period, self.outer, self.in_pairs = period, outer, in_pairs
        self.anchor, self.velocity = ranks.x, torch.zeros_like(ranks.x)

    @override
    def restart(self, num_ranks: int) -> None:
        old = [rank % len(self.ranks) for rank in range(num_ranks)]
        self.anchor, self.velocity = self.anchor[old], self.velocity[old]
        super().restart(num_ranks)

    @override
    def step(self, step: int) -> None:
        self.ranks.step_apart(step)
        number, rest = divmod(step + 1, self.period)
        if rest:
            return
        mean = self.means(number - 1)
        self.anchor, self.velocity = self.outer(self.anchor, self.velocity, self.anchor - mean)
        self.ranks.x = self.anchor

    def means(self, number: int) -> torch.Tensor:
        x, size = self.ranks.x, len(self.ranks)
        if not self.in_pairs:
            return x.mean(0).expand_as(x)
        order = np.random.default_rng([0, number]).permutation(size).tolist()
        for one, other in zip(order[::2], order[1::2], strict=False):
            x[[one, other]] = (x[one] + x[other]) / 2
        return x


class WithStates(Local):
    """States of the optimizer are averaged, each at its own interval: DES-LOC."""

    def __init__(self, ranks: SimulatedRanks, period: int, intervals: dict[str, int]) -> None:
        super().__init__(ranks, period, PLAIN)
        self.intervals = intervals

    @override
    def step(self, step: int) -> None:
        super().step(step)
        number, rest = divmod(step + 1, self.period)
        due = [name for name, each in self.intervals.items() if not rest and number % each == 0]
        for parameters in zip(*(net.parameters() for net in self.ranks.nets), strict=True):
            states = [
                optimizer.state[parameter]
                for optimizer, parameter in zip(self.ranks.optimizers, parameters, strict=True)
            ]
            # Numbers of steps go with the moments that they correct.
            for name in [*due, "step"] if due and "step" in states[0] else due:
                mean = torch.stack([state[name] for state in states]).mean(0)
                for state in states:
                    state[name].copy_(mean)


class Streaming(Paper):
    """Streaming DiLoCo; with one fragment and the mean as it is, DaSGD."""

    def __init__(
        self,
        ranks: SimulatedRanks,
        outer: Outer,
        *,
        interval: int,
        fragments: Sequence[Sequence[int]],
        delay: int,
        mix: float | None,
    ) -> None:
        super().__init__(ranks)
        self.outer, self.interval, self.delay, self.mix = outer, interval, delay, mix
        sizes = [parameter.numel() for parameter in ranks.nets[0].parameters()]
        places = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        self.fragments = [torch.isin(places, torch.tensor(each)) for each in fragments]
        self.anchor, self.velocity = ranks.x[0], torch.zeros_like(ranks.x[0])
        self.arrives_at, self.begun = -1, ranks.x

    @override
    def restart(self, num_ranks: int) -> None:
        if num_ranks != len(self.ranks):  # as of the averaged model
            self.begun = self.begun.mean(0).expand(num_ranks, -1)
        super().restart(num_ranks)

    @override
    def step(self, step: int) -> None:
        self.ranks.step_apart(step)
        number, rest = divmod(step + 1, self.interval)
        if not rest:
            self.here = self.fragments[(number - 1) % len(self.fragments)]
            self.arrives_at, self.begun = step + self.delay, self.ranks.x
        if step != self.arrives_at:
            return
        change = self.anchor - self.begun.mean(0)
        moved, velocity = self.outer(self.anchor, self.velocity, change)
        self.anchor = torch.where(self.here, moved, self.anchor)
        self.velocity = torch.where(self.here, velocity, self.velocity)
        x = self.ranks.x
        merged = (
            x + self.anchor - self.begun
            if self.mix is None
            else self.mix * x + (1 - self.mix) * self.anchor
        )
        self.ranks.x = torch.where(self.here, merged, x)


METHODS: dict[str, tuple[Strategy, Callable[[SimulatedRanks], Paper]]] = {
    "D-PSGD": (offbeat.DPSGD(), DPSGD),
    "SGP": (offbeat.SGP(), lambda ranks: SGP(ranks, 1)),
    "CROSSBOW": (
        offbeat.Crossbow(period=3, alpha=0.4),
        lambda ranks: Crossbow(ranks, 3, 0.4),
    ),
    "local SGD": (
        LocalSGD(period=3, warmup=0, optimizer_state="local"),
        lambda ranks: Local(ranks, 3, PLAIN),
    ),
    "SlowMo": (LocalSGD(period=3, outer="slowmo"), lambda ranks: Local(ranks, 3, SLOWMO)),
    "DiLoCo": (LocalSGD(period=3, outer="diloco"), lambda ranks: Local(ranks, 3, DILOCO)),
    "pairs": (
        LocalSGD(period=2, exchange="pairs"),
        lambda ranks: Local(ranks, 2, PLAIN, in_pairs=True),
    ),
    "NoLoCo": (
        LocalSGD(period=2, exchange="pairs", outer="diloco"),
        lambda ranks: Local(ranks, 2, DILOCO, in_pairs=True),
    ),
    "DaSGD": (
        LocalSGD(period=3, exchange="1x2"),
        lambda ranks: Streaming(ranks, PLAIN, interval=3, fragments=[range(6)], delay=2, mix=None),
    ),
    "Streaming DiLoCo": (
        LocalSGD(period=4, exchange="2x1x0.5", outer="diloco"),
        lambda ranks: Streaming(
            ranks, DILOCO, interval=2, fragments=[(0, 1), (2, 3, 4, 5)], delay=1, mix=0.5
        ),
    ),
}


def compare(
    strategy: Strategy, paper: Callable[[SimulatedRanks], Paper], kind: str, num: int, then: int
) -> None:
    method = paper(SimulatedRanks(kind, num))
    for step in range(NUM_STEPS):
        if step == STOP:
            method.restart(then)
        method.step(step)
    found = trained(strategy, kind, num, then)
    torch.testing.assert_close(found, method.ranks.x, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    ("kind", "num_ranks", "then"), [("SGD", 3, 3), ("AdamW", 3, 2), ("SGD", 2, 4)]
)
def test_steps_are_those_of_the_paper(name: str, kind: str, num_ranks: int, then: int) -> None:
    compare(*METHODS[name], kind, num_ranks, then)


@pytest.mark.parametrize(
    ("kind", "intervals"),
    [("Nesterov", {"momentum_buffer": 1}), ("Adam", {"exp_avg": 1, "exp_avg_sq": 2})],
)
@pytest.mark.parametrize(("num_ranks", "then"), [(3, 3), (2, 3)])
def test_states_are_averaged_as_in_the_paper(
    kind: str, intervals: dict[str, Any], num_ranks: int, then: int
) -> None:
    strategy = LocalSGD(period=2, warmup=0, optimizer_state=intervals)
    compare(strategy, lambda ranks: WithStates(ranks, 2, intervals), kind, num_ranks, then)


OWING: dict[str, Strategy] = {
    "DEF-SGD": offbeat.DEFSGD(ratio=4),
    "DEF-SGD, each rank by itself": offbeat.DEFSGD(ratio=4, ahead=1.0),
    "few changes": LocalSGD(period=2, warmup=0, codec=offbeat.WeightCodec(density=0.1)),
    "few changes of fragments": LocalSGD(
        period=2, exchange="2x0", codec=offbeat.WeightCodec(density=0.1)
    ),
}


@pytest.mark.parametrize("name", OWING)
def test_what_is_owed_of_weights_leads_to_the_same_model_however_many_ranks_go_on(
    name: str,
) -> None:
    """Who learns nothing more ends where the mean of all anchors and what is owed leads."""

    def go_on(driver: ThreadDriver, steps: range, lr: float, states: Sequence[Any]) -> Any:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        with session_on(driver, model, optimizer, OWING[name]) as session:
            if states:
                model.load_state_dict(states[0][0])
                of_sessions = [each[1] for each in states]
                session.load_state_dict(
                    offbeat.reshard(of_sessions, driver.world_size, driver.rank)
                )
            for step in steps:
                step_of(model, optimizer, driver.rank, step)
            return session.averaged_state_dict(), session.state_dict()

    states = results_of(3, lambda driver: go_on(driver, range(10), 0.05, []))
    three, one, five = (
        results_of(num, lambda driver: go_on(driver, range(10, 40), 0.0, states))[0][0]
        for num in (3, 1, 5)
    )
    torch.testing.assert_close(one, three, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(five, three, rtol=1e-9, atol=1e-9)
    moved = [float((three[key] - begun).abs().max()) for key, begun in states[0][0].items()]
    assert (max(moved) > 1e-3) != (name == "DEF-SGD, each rank by itself")
