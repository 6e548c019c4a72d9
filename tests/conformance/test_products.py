"""What is exchanged times how it is encoded: each product, on some number of ranks.

Every codec of the registry and every strategy that takes one meet here, so that a new one of either
kind joins without a line.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import pytest
import torch

import offbeat
from conformance_support.lent import lent
from offbeat.codec.topk_codec import SELECTORS, VALUE_CODECS
from offbeat.errors import PeerError
from offbeat.strategies.base import Strategy
from offbeat.strategies.registry import WEIGHT_CODECS
from thread_support.world import ThreadDriver, in_threads, results_of, session_on

LR = 0.125
STEPS, STOPS_AT = 6, 3
WORLD_SIZES = (1, 2, 3, 5)

_TAKE_CODECS: dict[str, Callable[[str], Strategy]] = {
    "allreduce": lambda codec: lent(offbeat.AllReduce(codec=codec), replica_check_interval=1),
    "topk": lambda codec: offbeat.TopK(density=0.25, codec=codec, momentum_correction=None),
    **{
        f"gtopk by {collective}": lambda codec, collective=collective: offbeat.GTopK(
            density=0.25, codec=codec, collective=collective, momentum_correction=None
        )
        for collective in ("reduce_scatter", "all_gather")
    },
}
PRODUCTS: dict[str, Strategy] = {
    f"{name} in {codec}": make(codec)
    for name, make in _TAKE_CODECS.items()
    for codec in VALUE_CODECS
}
PRODUCTS |= {
    f"topk by {name}": offbeat.TopK(density=0.25, codec=name, momentum_correction=None)
    for name in SELECTORS
}
PRODUCTS |= {
    "powersgd": offbeat.PowerSGD(rank=1),
    "powersgd of rank 2": offbeat.PowerSGD(rank=2),
}
WEIGHT_PRODUCTS: dict[str, Strategy] = {
    f"localsgd over {codec}": offbeat.LocalSGD(period=2, warmup=0, codec=codec)
    for codec in WEIGHT_CODECS
}
WEIGHT_PRODUCTS |= {"defsgd": offbeat.DEFSGD(ratio=5, ahead=0.0)}
_GRID = [f"{name} in {codec}" for name in _TAKE_CODECS for codec in VALUE_CODECS]
NUM_RANKS = dict.fromkeys(PRODUCTS | WEIGHT_PRODUCTS, max(WORLD_SIZES)) | {
    name: WORLD_SIZES[sum(divmod(number, len(VALUE_CODECS))) % len(WORLD_SIZES)]
    for number, name in enumerate(_GRID)
}
"""By product, such that every number of ranks meets every codec and every way of exchanging."""
FORGETS = frozenset({"localsgd over sparseloco"})
"""Whose residual decays, so that what is owed is not all that was not sent."""


@dataclass
class Ran:
    """What one rank has after its steps.

    Attributes:
        model: its parameters by name, as they are now.
        asked: the sum of -lr times its gradients.
        states: of model and session.
        halfway: the same before step `STOPS_AT`.
    """

    model: dict[str, torch.Tensor]
    asked: dict[str, torch.Tensor]
    states: dict[str, Any]
    halfway: dict[str, Any]


def net() -> torch.nn.Module:
    """A model with a matrix that low rank cannot hold, one that it can, and vectors."""
    draw = torch.Generator().manual_seed(1)
    made = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) / 3)
    return made


def train(
    driver: ThreadDriver,
    strategy: Strategy,
    steps: range,
    start: Mapping[str, Any] | None = None,
    *,
    fails_at: int | None = None,
) -> Ran:
    """`steps` on this rank, from `start`."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    halfway: dict[str, Any] = {}
    with session_on(driver, model, optimizer, strategy) as session:
        if start is not None:
            model.load_state_dict(start["model"])
            session.load_state_dict(start["session"])
        asked = {name: torch.zeros_like(each) for name, each in model.named_parameters()}
        for step in steps:
            if step == fails_at:
                raise MemoryError
            if step == STOPS_AT:
                halfway = states_of(model, session)
            draw = torch.Generator().manual_seed(100 * step + driver.rank)
            inputs, wanted = torch.randn((4, 6), generator=draw), torch.randn(4, generator=draw)
            alone = copy.deepcopy(model)  # whose gradients no session sees
            (alone(inputs)[:, 0] - wanted).square().mean().backward()
            for name, each in alone.named_parameters():
                asked[name] -= LR * each.grad
            (model(inputs)[:, 0] - wanted).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        states = states_of(model, session)
        return Ran(model=states["model"], asked=asked, states=states, halfway=halfway)


def states_of(model: torch.nn.Module, session: offbeat.Session) -> dict[str, Any]:
    return {"model": copy.deepcopy(model.state_dict()), "session": session.state_dict()}


def on_ranks(world_size: int, strategy: Strategy, steps: range, starts: Any = None) -> list[Ran]:
    def job(driver: ThreadDriver) -> Ran:
        return train(driver, strategy, steps, None if starts is None else starts[driver.rank])

    return results_of(world_size, job)


def owed(ran: Ran, unit: float) -> dict[str, torch.Tensor]:
    """What a rank has not sent yet, by parameter."""
    found = {name: torch.zeros_like(each) for name, each in ran.asked.items()}
    for callback in ran.states["session"]["callbacks"].values():
        for key, value in callback.get("additive", {}).items():
            found[key.removeprefix("residual/")] += unit * value
    return found


def assert_replicas(ranks: list[Ran]) -> None:
    for ran in ranks[1:]:
        for name, each in ran.model.items():
            assert torch.equal(each, ranks[0].model[name]), name


def assert_nothing_is_lost(ranks: list[Ran], unit: float) -> None:
    """What ranks have moved and what they owe is what their gradients asked for."""
    first = dict(net().named_parameters())
    for name, each in first.items():
        moved = sum(ran.model[name] - each.detach() for ran in ranks)
        left = sum(owed(ran, unit)[name] for ran in ranks)
        asked = sum(ran.asked[name] for ran in ranks)
        torch.testing.assert_close(moved + left, asked, rtol=1e-4, atol=1e-5, msg=name)


def assert_same_run(ranks: list[Ran], others: list[Ran]) -> None:
    for one, other in zip(ranks, others, strict=True):
        for name, each in one.model.items():
            assert torch.equal(each, other.model[name]), name


@pytest.mark.parametrize("name", [*PRODUCTS, *WEIGHT_PRODUCTS])
def test_each_product(name: str) -> None:
    strategy, world_size = (PRODUCTS | WEIGHT_PRODUCTS)[name], NUM_RANKS[name]
    unit = -LR if name in PRODUCTS else 1.0
    straight = on_ranks(world_size, strategy, range(STEPS))
    assert_replicas(straight)
    starts = [ran.halfway for ran in straight]
    resumed = on_ranks(world_size, strategy, range(STOPS_AT, STEPS), starts)
    assert_same_run(straight, resumed)
    if name not in FORGETS:
        assert_nothing_is_lost(straight, unit)


ONCE = [
    f"{name} in {codec}" for name, codec in zip(cycle(_TAKE_CODECS), VALUE_CODECS, strict=False)
]
"""Each codec, and each way of exchanging, in as few products as there can be."""


@pytest.mark.parametrize(
    "name", [*ONCE, *(name for name in PRODUCTS if name not in _GRID), *WEIGHT_PRODUCTS]
)
def test_another_world_size_goes_on_with_what_is_owed(name: str) -> None:
    strategy = (PRODUCTS | WEIGHT_PRODUCTS)[name]
    unit = -LR if name in PRODUCTS else 1.0
    # Of gradients the sum of what is owed is kept, of weights the mean.
    kept = 1.0 if name in PRODUCTS else 2 / 3
    before = on_ranks(3, strategy, range(STEPS))
    sessions = [ran.states["session"] for ran in before]
    starts = [
        {"model": before[0].model, "session": offbeat.reshard(sessions, 2, rank)}
        for rank in range(2)
    ]
    after = on_ranks(2, strategy, range(STEPS, 2 * STEPS), starts)
    assert_replicas(after)
    if name in FORGETS:
        return
    for parameter in before[0].asked:
        owed_before = sum(owed(ran, unit)[parameter] for ran in before)
        moved = sum(ran.model[parameter] - before[0].model[parameter] for ran in after)
        asked = sum(ran.asked[parameter] for ran in after)
        left = sum(owed(ran, unit)[parameter] for ran in after)
        torch.testing.assert_close(
            moved + left, asked + kept * owed_before, rtol=1e-4, atol=1e-5, msg=parameter
        )


@pytest.mark.parametrize("name", [name for name in PRODUCTS | WEIGHT_PRODUCTS if "8" in name])
def test_a_death_ends_the_others_too(name: str) -> None:
    strategy = (PRODUCTS | WEIGHT_PRODUCTS)[name]

    def job(driver: ThreadDriver) -> Ran:
        return train(
            driver, strategy, range(STEPS), fails_at=STOPS_AT if driver.rank == 1 else None
        )

    outcomes = in_threads(3, job)
    assert isinstance(outcomes[1], MemoryError)
    assert all(isinstance(outcomes[rank], PeerError) for rank in (0, 2)), outcomes
