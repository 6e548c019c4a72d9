"""Notices are kept, logged, and warned of where they change what a run means."""

from __future__ import annotations

import copy
import logging
import threading
import warnings
from typing import Any

import pytest
import torch

import offbeat
from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import MAX_NOTICES, Context, Notices
from offbeat.errors import OffbeatWarning
from offbeat.session.attach import attach_through
from offbeat.strategies.base import Strategy


def test_each_notice_is_kept_and_logged_with_its_rank(caplog: pytest.LogCaptureFixture) -> None:
    notices = Notices(rank=3)
    with caplog.at_level(logging.INFO, logger="offbeat"):
        notices.inform("all ranks chose the ring")
        notices.notify("a step was skipped")
    assert notices.kept == ["all ranks chose the ring", "a step was skipped"]
    assert caplog.record_tuples == [
        ("offbeat", logging.INFO, "rank 3: all ranks chose the ring"),
        ("offbeat", logging.WARNING, "rank 3: a step was skipped"),
    ]


def test_what_changes_the_meaning_of_a_run_is_warned_of_once_and_on_the_trainers_thread() -> None:
    notices = Notices(rank=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        thread = threading.Thread(target=lambda: [notices.warn("alone") for _ in range(2)])
        thread.start()
        thread.join()
    with pytest.warns(OffbeatWarning, match="^alone$") as issued:
        notices.issue_warnings()
    assert len(issued) == 1
    notices.warn("alone")
    notices.issue_warnings()
    assert notices.kept == ["alone"]


def test_the_list_of_notices_is_bounded_and_the_log_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    notices = Notices(rank=0)
    for number in range(MAX_NOTICES + 5):
        notices.notify(f"number {number}")
    assert len(notices.kept) == MAX_NOTICES
    assert len(caplog.records) == MAX_NOTICES + 5


class WarningStrategy(Strategy):
    """Warns while it is built, as a thread of it might at any moment."""

    name = "warning"

    def build(self, context: Context) -> list[Callback]:
        context.notices.warn("half of the data is missing")
        return []


def test_a_warning_reaches_the_user_at_the_next_event() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.attach(model, optimizer, WarningStrategy()) as session:
        with pytest.warns(OffbeatWarning, match="half of the data is missing"):
            model(torch.ones(1, 2))
        model(torch.ones(1, 2))
        assert session.notices == ["half of the data is missing"]


def test_a_warning_that_no_event_has_issued_is_issued_at_the_end() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = offbeat.attach(model, optimizer, WarningStrategy())
    with pytest.warns(OffbeatWarning, match="half of the data is missing"):
        session.close()


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("drops", [True, False])
@pytest.mark.parametrize(
    "strategy",
    [
        offbeat.GTopK(density=0.5, collective="tree"),
        offbeat.PowerSGD(rank=1),
        offbeat.AllReduce(codec="sign"),
        offbeat.SPDKFAC(kl_clip=None),
    ],
)
def test_dropping_what_a_strategy_has_exchanged_and_needs_is_said_once(
    strategy: Strategy, drops: bool, to_none: bool
) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.attach(model, optimizer, strategy) as session:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            if drops:
                optimizer.zero_grad(set_to_none=to_none)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        assert sum("has dropped gradients" in notice for notice in session.notices) == drops


@pytest.mark.parametrize("strategy", [offbeat.PowerSGD(rank=1), offbeat.AllReduce(codec="sign")])
def test_what_a_loop_without_an_optimizer_has_used_is_not_called_dropped(
    strategy: Strategy,
) -> None:
    model = torch.nn.Linear(2, 1)
    with attach_through(lambda driver: driver, model, None, strategy) as session:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(parameter.grad, alpha=0.1)
            model.zero_grad()
        assert not any("has dropped gradients" in notice for notice in session.notices)


@pytest.mark.parametrize("habit", ["goes back", "evaluates another", "resumes", "resumes late"])
@pytest.mark.parametrize(
    ("strategy", "keeps_anchor"),
    [
        (offbeat.LocalSGD(outer="diloco"), True),
        (offbeat.LocalSGD(outer="diloco", exchange="2x1"), True),
        (offbeat.LocalSGD(period=1, codec=offbeat.WeightCodec(density=0.4)), True),
        (offbeat.LocalSGD(period=2, exchange="1x1x0.5"), True),
        (offbeat.LocalSGD(period=2, exchange="1x1"), False),
        (offbeat.Crossbow(), True),
        (offbeat.DEFSGD(), True),
        (offbeat.ZeroOneAdam(), False),
        (offbeat.LocalSGD(), False),
        (offbeat.WAGMA(), False),
    ],
)
def test_a_model_that_is_loaded_without_the_state_of_then_is_said(
    strategy: Strategy, keeps_anchor: bool, habit: str
) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    saved: list[Any] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with offbeat.attach(model, optimizer, strategy) as session:
            model.load_state_dict(torch.nn.Linear(2, 1).state_dict())  # before the first step
            for step in range(4):
                if step == 1:
                    saved = [copy.deepcopy(each.state_dict()) for each in (model, session)]
                if step == 3 and habit != "resumes late":
                    own = copy.deepcopy(model.state_dict())
                    model.load_state_dict(saved[0])
                    if habit == "evaluates another":
                        model.load_state_dict(own)
                if step == 3 and "resumes" in habit:
                    session.load_state_dict(saved[1])
                if step == 3 and habit == "resumes late":
                    model.load_state_dict(saved[0])
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    told = sum("a model was loaded between two steps" in str(each.message) for each in warned)
    assert told == (keeps_anchor and habit == "goes back")
