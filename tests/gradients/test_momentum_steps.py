"""Momentum before selection, step by step: what comes to a parameter in the end is what SGD makes
of its gradients.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from offbeat.callbacks.context import Context, Notices, stream_counter
from offbeat.codec.selectors import Exact
from offbeat.codec.tally import Tally
from offbeat.gradients import optimizer_momentum
from offbeat.gradients.buckets import make_buckets
from offbeat.gradients.density import DensitySchedule
from offbeat.gradients.optimizer_momentum import OptimizerMomentum, mix_by_kernel, mix_by_torch
from offbeat.gradients.reductions import Reduction, WeightedGradient
from offbeat.transport.single_rank import SingleRank

N = 100
nesterov_or_not = pytest.mark.parametrize("nesterov", [False, True])


def integers(seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Whole numbers, whose sums are exact."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, (N,), generator=draw).to(dtype)


class Momentum:
    """The momentum of one bucket, of two parameters in two groups."""

    def __init__(
        self, groups: list[dict[str, Any]], dtype: torch.dtype = torch.float64, *, few: bool = False
    ) -> None:
        size = N // len(groups)
        self.parameters = [torch.nn.Parameter(torch.zeros(size, dtype=dtype)) for _ in groups]
        self.optimizer = torch.optim.SGD(
            [
                {"params": [one], **group}
                for one, group in zip(self.parameters, groups, strict=True)
            ],
            lr=1.0,
        )
        named = {str(number): each for number, each in enumerate(self.parameters)}
        (self.bucket,) = make_buckets(named, cap_bytes=None)
        context = Context(
            parameters=named,
            driver=SingleRank(),
            new_stream=stream_counter(),
            notices=Notices(0),
            optimizer=self.optimizer,
        )
        self.transform = OptimizerMomentum(context)
        self.transform.init(self.bucket, cast(Reduction, self))
        self.few = few
        self.transform.follow(cast(DensitySchedule, self))
        self.transform.take()

    def sends_few(self) -> bool:
        """As a schedule of densities says it."""
        return self.few

    def update(
        self, gradient: torch.Tensor, *, weight: float = 1.0, continues: bool = False
    ) -> tuple[torch.Tensor, float]:
        self.bucket.flat.copy_(gradient)
        # What is frozen has no gradient.
        used = np.array([each.requires_grad for each in self.bucket.parameters])
        self.tally = Tally(weight=weight, num_nonfinite=0, num_failed=0, used=used)
        given = WeightedGradient(self.bucket.flat, self.tally, weight, grad_scale=1.0)
        changed = self.transform.update(self.bucket, given, used & continues)
        return changed.gradient, changed.weight

    def step(self, gradient: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """What is exchanged, in a step that is good."""
        changed, weight = self.update(gradient, **kwargs)
        result = changed.clone() * weight
        self.transform.settle(good=True)
        return result

    @property
    def velocity(self) -> torch.Tensor:
        """Shape (n,)."""
        return torch.cat([*self.transform.state_dict()["additive"].values()])


@nesterov_or_not
@pytest.mark.parametrize("mix", [mix_by_kernel, mix_by_torch])
def test_steps_are_those_of_sgd(
    mix: object, nesterov: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_momentum, "mix_by_kernel", mix)
    options = {"momentum": 0.9, "nesterov": nesterov}
    momentum = Momentum([options])
    weights = torch.zeros(N, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weights], lr=1.0, **options)
    for step in range(5):
        before = weights.detach().clone()
        weights.grad = 0.5 * integers(step)
        optimizer.step()
        torch.testing.assert_close(
            momentum.step(integers(step), weight=0.5), before - weights.detach()
        )


@pytest.mark.parametrize("few", [False, True])
def test_the_momentum_of_a_frozen_parameter_rests(few: bool) -> None:
    momentum = Momentum([{"momentum": 0.5}, {"momentum": 0.5}])
    momentum.step(integers(0))
    before, last = momentum.velocity, slice(N // 2, N)  # a bucket begins with the last parameter
    momentum.few = few
    momentum.parameters[0].requires_grad_(False)
    for step in (1, 2):
        gradient = integers(step)
        gradient[last] = 0
        assert not momentum.step(gradient)[last].any()
    assert torch.equal(momentum.velocity[last], before[last])
    momentum.parameters[0].requires_grad_(True)
    assert torch.equal(momentum.step(torch.zeros(N))[last], 0.5 * before[last])


def test_a_batch_of_few_samples_makes_no_more_of_the_momentum_before_it() -> None:
    momentum = Momentum([{"momentum": 0.5}])
    momentum.step(integers(0), weight=32)
    expected = integers(1) + 0.5 * integers(0)
    assert torch.equal(momentum.step(integers(1), weight=1), expected)


@nesterov_or_not
def test_two_gradients_of_one_step_are_their_sum(nesterov: bool) -> None:
    in_two, in_one = (Momentum([{"momentum": 0.9, "nesterov": nesterov}]) for _ in range(2))
    for momentum in (in_two, in_one):
        momentum.step(integers(9))
    steps = in_two.step(integers(0)) + in_two.step(integers(1), continues=True)
    torch.testing.assert_close(steps, in_one.step(integers(0) + integers(1)))
    torch.testing.assert_close(in_two.velocity, in_one.velocity)


def test_each_group_has_its_own() -> None:
    # A bucket begins with the last parameter, whose gradient is the first one ready.
    momentum = Momentum([{"momentum": 0.25, "nesterov": True}, {"momentum": 0.5}])
    factor = torch.tensor([0.5, 0.25], dtype=torch.float64).repeat_interleave(N // 2)
    velocity = torch.zeros(N, dtype=torch.float64)
    for step in range(6):
        gradient = integers(step)
        velocity = factor * velocity + gradient
        expected = velocity.clone()
        expected[N // 2 :] = (gradient + factor * velocity)[N // 2 :]
        assert torch.equal(momentum.step(gradient, weight=0.25), 0.25 * expected)
        assert torch.equal(momentum.velocity, velocity)


@pytest.mark.parametrize("few", [False, True])
def test_a_step_that_is_dropped_leaves_no_trace(few: bool) -> None:
    momentum = Momentum([{"momentum": 0.5}])
    momentum.step(integers(0))
    momentum.few = few
    before = momentum.velocity.clone()
    momentum.update(integers(1))
    momentum.transform.settle(good=False)
    assert torch.equal(momentum.velocity, before)


@pytest.mark.parametrize("densities", [(4, 4, 4), (4, 5, 4), (5, 5, 4), (5, 4, 5)])
@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@nesterov_or_not
def test_momentum_at_once_comes_to_the_sum_of_steps(
    densities: tuple[int, ...], continues: bool, loads: bool, dtype: torch.dtype, nesterov: bool
) -> None:
    factor = 0.5
    momentum = Momentum([{"momentum": factor, "nesterov": nesterov}], dtype)
    owed = torch.zeros(N)
    sent, given, longer = torch.zeros(N), torch.zeros(N), 1.0
    for step, k in enumerate(densities):
        gradient = integers(step, dtype)
        given += gradient.float()
        goes_on = continues and step == 1
        momentum.few = k < 5
        # The optimizer's step is so many times as long, and what is owed keeps its unit. What
        # belongs to one step has one unit.
        before, longer = longer, longer if goes_on else 1 / (1 - factor) if k < 5 else 1.0
        owed.mul_(before / longer)
        changed, weight = momentum.update(gradient, continues=goes_on)
        left = changed.to(torch.float32, copy=True)
        selection = Exact().select(left, owed, k=k, weight=weight, state={})
        sent += longer * torch.from_numpy(selection.sparse.to_dense())
        owed = left
        momentum.transform.settle(good=True)
        if loads:
            momentum.transform.load_state_dict(momentum.transform.state_dict())
    velocity = momentum.velocity
    # What velocity is left has yet to move the parameters: 1/2 + 1/4 + ... of itself, and by one
    # term less where Nesterov's momentum has looked ahead.
    all_of_it = sent + longer * owed + velocity * (0.5 if nesterov else 1.0)
    torch.testing.assert_close(all_of_it, given / (1 - factor))
