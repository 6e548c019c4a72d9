"""torch's own strategies as the command line sees them: named, listed, checked, and resumed only
where torch allows it.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offbeat.errors import ConfigError
from offbeat.run.recipes import SCRIPT_STRATEGIES, NoExchange
from offbeat.strategies import REGISTRY
from offbeat.strategies.by_name import strategy_values
from offbeat.strategies.docstrings import first_sentence
from offbeat_lab.attaching import attach_recipe
from offbeat_lab.config import Request, resolve, resolve_resume
from offbeat_lab.native import NATIVE, Native
from offbeat_lab.native.ddp import PostLocalSGD, PowerSGDHook
from offbeat_lab.options import RECIPES, build_strategy, strategy_options
from offbeat_lab.tasks import TASKS

HERE = [
    name for name in NATIVE if not name.startswith("torchft")
]  # the others need what may not be installed


def test_they_stand_beside_offbeats_own_and_not_in_their_place() -> None:
    assert not NATIVE.keys() & REGISTRY.keys()
    assert RECIPES.keys() == NATIVE.keys() | SCRIPT_STRATEGIES.keys()
    assert all(kind.name == name for name, kind in NATIVE.items())


@pytest.mark.parametrize("name", NATIVE)
def test_each_can_be_listed_and_built_from_its_own_values(name: str) -> None:
    built = build_strategy(name, {})
    assert isinstance(built, Native)
    assert build_strategy(name, strategy_values(built)) == built
    assert len(first_sentence(type(built))) > 20
    for option in strategy_options(name):
        assert option.help, f"option {option.name} is not documented"


def test_no_option_of_a_strategy_hides_behind_one_of_a_task() -> None:
    """`--set` gives options to the task first."""
    of_tasks = {option for task in TASKS.values() for option in task.options_type.model_fields}
    for name in RECIPES:
        assert not of_tasks & set(strategy_values(build_strategy(name, {})))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ddp-powersgd", {"rank": "0"}, "rank is 0; allowed is 1 or more"),
        ("ddp-powersgd", {"start_step": "1"}, "start_step is 1; allowed is 2 or more"),
        ("ddp-powersgd", {"rank": "low"}, "got 'low'; allowed is whole number"),
        ("ddp-powersgd", {"ranks": "1"}, "no option 'ranks'.*did you mean 'rank'"),
        ("post-localsgd", {"period": "0"}, "period is 0, allowed is 1 or more"),
        ("post-localsgd", {"start_step": "-1"}, "start_step is -1, allowed is 0 or more"),
        ("ddpp", {}, "no strategy 'ddpp'.*did you mean 'ddp'"),
    ],
)
def test_bad_options_are_refused(name: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_strategy(name, options)


@pytest.mark.parametrize("name", HERE)
def test_what_torch_does_not_let_anybody_save_is_not_resumed(name: str) -> None:
    stored = resolve(Request(task="digits", strategy=name, workers=2, steps=4))
    if NATIVE[name].resumable:
        assert resolve_resume(stored, Request(steps=8), steps_done=4, epochs_done=0).steps == 8
    else:
        with pytest.raises(
            ConfigError,
            match=f"{name} keeps state that torch does not let anybody save; start a new run",
        ):
            resolve_resume(stored, Request(steps=8), steps_done=4, epochs_done=0)


def test_state_that_would_be_lost_is_known() -> None:
    """Error feedback and the averager's count are the hooks' own; plain reductions keep nothing."""
    assert not PowerSGDHook.resumable
    assert not PostLocalSGD.resumable
    assert [name for name in HERE if NATIVE[name].resumable] == [
        "ddp",
        "ddp-fp16",
        "ddp-bf16",
    ]


def test_alone_leaves_the_model_and_the_network_alone() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attached = attach_recipe(NoExchange(), model, optimizer, rank=0, world_size=1)
    with attached.session as session:
        assert attached.module is attached.averaged_model() is model
        attached.backward(attached.module(torch.ones(1, 2)).sum())
        attached.optimizer.step()
        assert (session.stats.bytes_sent, session.stats.messages_sent, session.stats.wait_s) == (
            0,
            0,
            0.0,
        )
        assert session.take_ready_at_s() is None
        assert session.take_arrivals() == []
