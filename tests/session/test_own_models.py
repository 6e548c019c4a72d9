"""Models and loops that a session must take as they come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch.nn.utils import prune

import offbeat
from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.session.agreement import adopt_state_of_rank_0
from offbeat.strategies.base import Strategy
from offbeat.transport.driver import Stream
from thread_support.world import ThreadDriver, results_of, session_on


class Keeps(torch.nn.Module):
    """Keeps its last activations, as models that show them do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = [self.layer(x)]
        return self.kept[0]


def test_a_model_that_keeps_activations_can_be_averaged() -> None:
    model = Keeps()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.attach(model, optimizer, offbeat.LocalSGD()) as session:
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
        averaged = session.averaged_model()
    assert model.kept[0].requires_grad
    assert torch.equal(averaged(torch.ones(3, 2)), model(torch.ones(3, 2)))
    assert not any(p is q for p, q in zip(averaged.parameters(), model.parameters(), strict=True))


def test_a_model_that_is_pruned_meanwhile_can_be_averaged() -> None:
    """Its weight has another name then."""

    def job(driver: ThreadDriver) -> torch.Tensor:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with session_on(driver, model, optimizer, offbeat.LocalSGD()) as session:
            prune.random_unstructured(model, "weight", amount=2)
            model.get_parameter("weight_orig").detach().fill_(driver.rank)
            return session.averaged_model().get_parameter("weight_orig").detach()

    for averaged in results_of(2, job):
        assert torch.equal(averaged, torch.full((2, 2), 0.5))


def test_the_state_of_an_optimizer_is_that_of_rank_0_whichever_parameters_a_rank_has_used() -> None:
    """Auto hands it out when it leaves a strategy whose ranks differ."""

    def job(driver: ThreadDriver) -> dict[str, Any]:
        layers = torch.nn.ModuleDict({name: torch.nn.Linear(2, 1, bias=False) for name in "abc"})
        optimizer = torch.optim.Adam(layers.parameters(), lr=0.1)
        for name in ("ab", "bc")[driver.rank]:
            for _ in range(driver.rank + 1):
                layers[name](torch.ones(1, 2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        parameters = dict(layers.named_parameters())
        adopt_state_of_rank_0(driver, Stream(7), optimizer, parameters)
        layers["c"](torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return {name: optimizer.state[p] for name, p in parameters.items() if name != "c.weight"}

    first, second = results_of(2, job)
    assert first["a.weight"]["step"] == first["b.weight"]["step"] == 1
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_a_module_that_has_two_names_is_averaged_under_both() -> None:
    def job(driver: ThreadDriver) -> list[list[float]]:
        norm = torch.nn.BatchNorm1d(2)
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), norm, torch.nn.Linear(2, 2), norm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with session_on(driver, model, optimizer, offbeat.LocalSGD()) as session:
            assert norm.running_mean is not None
            norm.running_mean.fill_(driver.rank)
            averaged = session.averaged_state_dict()
            return [averaged[f"{name}.running_mean"].tolist() for name in (1, 3)]

    assert results_of(2, job) == [[[0.5, 0.5]] * 2] * 2


class Asks(Callback):
    """Notes whether it is being compiled."""

    state_key = "asks"

    def __init__(self, heard: list[bool]) -> None:
        self.heard = heard

    def on_before_step(self) -> None:
        self.heard.append(torch.compiler.is_compiling())

    def on_after_step(self) -> None:
        self.heard.append(torch.compiler.is_compiling())


@dataclass(frozen=True, kw_only=True)
class Asking(Strategy):
    name: ClassVar[str] = "asking"
    heard: list[bool] = field(default_factory=list)

    def build(self, context: Context) -> list[Callback]:
        return [Asks(self.heard)]


class Still(torch.optim.Optimizer):
    """Moves nothing, so that there is little to compile."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), {})

    def step(self, closure: Any = None) -> None:
        """Nothing."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in the compiler
def test_a_compiled_step_does_not_compile_the_parts() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = Still(model)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    strategy = Asking()
    with offbeat.attach(model, optimizer, strategy):
        model(torch.ones(3, 2)).sum().backward()
        step()
    assert strategy.heard == [False, False]


def test_numbers_that_an_optimizer_keeps_in_its_groups_are_those_of_rank_0() -> None:
    """Such as Prodigy's estimate of how far it is to go."""

    def job(driver: ThreadDriver) -> list[Any]:
        layer = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        (group,) = optimizer.param_groups
        group["d"] = 1.0 + driver.rank
        adopt_state_of_rank_0(driver, Stream(7), optimizer, dict(layer.named_parameters()))
        return [group["d"], group["lr"], group["nesterov"]]

    assert results_of(2, job) == [[1.0, 0.1, False]] * 2
