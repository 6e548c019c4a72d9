"""Averages of random pairs of ranks, against the same in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import offbeat
from offbeat.arithmetic.topologies import random_partner
from offbeat.averaging.gossip import Pairs
from offbeat.errors import ConfigError
from thread_support.nets import make_model, parameters_of, step_of, trained

PERIOD, LR = 2, 0.05
NESTEROV = offbeat.Outer(lr=0.7, momentum=0.8)
Parameters = list[torch.Tensor]


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR)


def run(
    num_ranks: int, num_steps: int, *, stop: int | None = None, **options: Any
) -> list[Parameters]:
    strategy = offbeat.LocalSGD(period=PERIOD, **{"exchange": "pairs", **options})
    return trained(num_ranks, strategy, num_steps, optimizer_of=sgd, held=parameters_of, stop=stop)


def reference(
    num_ranks: int, num_steps: int, *, seed: int, outer: offbeat.Outer | None
) -> list[Parameters]:
    models = [make_model() for _ in range(num_ranks)]
    optimizers = [sgd(model) for model in models]
    anchors = [list(make_model().parameters()) for _ in range(num_ranks)]
    outers = [None if outer is None else outer(anchor) for anchor in anchors]
    for step in range(1, num_steps + 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            step_of(model, optimizer, rank, step - 1)
        if step % PERIOD:
            continue
        before = [copy.deepcopy(list(model.parameters())) for model in models]
        for rank, model in enumerate(models):
            number = step // PERIOD - 1
            partner = random_partner(rank, num_ranks, seed=seed, round_number=number)
            places = zip(
                model.parameters(), anchors[rank], before[rank], before[partner], strict=True
            )
            for parameter, anchor, mine, theirs in places:
                mean = (mine.detach() + theirs.detach()) / 2
                anchor.grad = anchor.detach() - mean
                parameter.detach().copy_(mean)
            optimizer_of_anchor = outers[rank]
            if optimizer_of_anchor is not None:
                optimizer_of_anchor.step()
                for parameter, anchor in zip(model.parameters(), anchors[rank], strict=True):
                    parameter.detach().copy_(anchor.detach())
    return [[parameter.detach() for parameter in model.parameters()] for model in models]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("outer", [None, NESTEROV])
def test_models_are_those_of_the_algorithm(num_ranks: int, outer: offbeat.Outer | None) -> None:
    found = run(num_ranks, 9, outer=outer, exchange=Pairs(seed=4))
    expected = reference(num_ranks, 9, seed=4, outer=outer)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("num_ranks", [4, 5])
def test_the_mean_over_ranks_is_what_diloco_makes_of_the_same_models(num_ranks: int) -> None:
    """Ranks part for one period only, so that both start it from the same weights."""
    pairs, everyone = (
        run(num_ranks, PERIOD, outer=NESTEROV, exchange=exchange) for exchange in ("pairs", None)
    )
    for place, of_all in enumerate(everyone[0]):
        mean = torch.stack([rank[place] for rank in pairs]).mean(0)
        torch.testing.assert_close(mean, of_all, rtol=1e-12, atol=1e-12)
    assert not torch.equal(pairs[0][0], everyone[0][0])


def test_both_of_a_pair_hold_the_same_bits_without_an_outer_optimizer() -> None:
    found = run(5, PERIOD)
    for rank, parameters in enumerate(found):
        partner = random_partner(rank, 5, seed=0, round_number=0)
        assert all(map(torch.equal, parameters, found[partner]))


@pytest.mark.parametrize("world_size", [1, 2, 5, 8])
def test_partners_are_each_others_and_change(world_size: int) -> None:
    rounds = [
        [random_partner(r, world_size, seed=0, round_number=number) for r in range(world_size)]
        for number in range(40)
    ]
    for partners in rounds:
        assert [partners[partner] for partner in partners] == list(range(world_size))
        assert sum(partner == r for r, partner in enumerate(partners)) == world_size % 2
    met = {partners[0] for partners in rounds}
    # Everyone is met, and in odd worlds a rank rests now and then.
    assert met == {*range(1 - world_size % 2, world_size)}


def test_a_run_goes_on_from_a_saved_state() -> None:
    resumed = run(3, 11, stop=5, outer=NESTEROV)
    for mine, straight in zip(resumed, run(3, 11, outer=NESTEROV), strict=True):
        assert all(map(torch.equal, mine, straight))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"codec": "sparseloco"}, "would do nothing"),
        ({"optimizer_state": "averaged"}, "would do nothing"),
        ({"period": "adaptive"}, "how far all ranks are apart"),
        ({"exchange": "pair"}, "or 'pairs'"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        offbeat.LocalSGD(**{"exchange": "pairs", **options})


def test_a_seed_is_no_negative_number() -> None:
    with pytest.raises(ConfigError, match="at least 0, got -1"):
        Pairs(seed=-1)
