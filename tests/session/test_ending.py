"""How a session ends: in good order, after an exception, or more than once."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch

import offbeat
from offbeat import Session
from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.errors import ConfigError, UnsupportedError
from offbeat.strategies.base import Strategy
from thread_support.world import ThreadDriver, results_of, session_on


class Recording(Callback):
    """Notes what it hears of the end."""

    state_key = "recording"

    def __init__(self, heard: list[str]) -> None:
        self.heard = heard

    def on_finish(self) -> None:
        self.heard.append("finish")

    def on_abandon(self, reason: str) -> None:
        self.heard.append(reason)

    def close(self) -> None:
        self.heard.append("close")


class RecordingStrategy(Strategy):
    name = "recording"

    def __init__(self) -> None:
        object.__setattr__(self, "heard", [])

    def build(self, context: Context) -> list[Callback]:
        return [Recording(self.heard)]


def attached() -> tuple[Session, list[str]]:
    model = torch.nn.Linear(2, 1)
    strategy = RecordingStrategy()
    session = offbeat.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    return session, strategy.heard


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_session_is_not_for_copies(copied: Callable[[Session], object]) -> None:
    session, _ = attached()
    with session, pytest.raises(UnsupportedError, match=r"save session\.state_dict\(\)"):
        copied(session)


def test_a_session_is_closed_once() -> None:
    session, heard = attached()
    with session:
        session.finish()
        session.finish()
        session.close()
        session.close()
    assert heard == ["finish", "close"]


def test_a_block_that_is_entered_again_is_refused() -> None:
    """As in a loop over epochs with the block inside: each rank would go on alone."""
    session, _ = attached()
    with session:
        pass
    with pytest.raises(ConfigError, match="attach again, or leave the block once"), session:
        pass


def test_an_exception_in_the_block_abandons_the_run() -> None:
    session, heard = attached()

    def train() -> None:
        with session:
            raise ValueError("no data")

    with pytest.raises(ValueError, match="no data"):
        train()
    session.close()
    assert heard == ["ValueError: no data", "close"]


def test_a_rank_that_closes_within_an_except_clause_is_told_what_its_model_is() -> None:
    def job(driver: ThreadDriver) -> list[str]:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = session_on(driver, model, optimizer, offbeat.LocalSGD())
        try:
            next(iter(()))
        except StopIteration:
            session.close()
        return session.notices

    for notices in results_of(2, job):
        assert "closed while StopIteration is handled" in notices[-1]


def test_so_does_one_that_a_finally_clause_closes_on_the_way_out() -> None:
    session, heard = attached()

    def train() -> None:
        try:
            raise ValueError("no data")
        finally:
            session.close()

    with pytest.raises(ValueError, match="no data"):
        train()
    assert heard == ["ValueError: no data", "close"]


def test_an_exception_that_was_handled_before_attaching_is_none_of_its_business() -> None:
    try:
        raise MemoryError("try again with less")
    except MemoryError:
        session, heard = attached()
        session.close()
    assert heard == ["finish", "close"]


def test_other_ends_are_refused() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="finish must be .*average.*keep.*, got 'mean'"):
        offbeat.attach(model, optimizer, offbeat.LocalSGD(), finish="mean")


def test_a_script_that_exits_well_has_not_failed_where_a_finally_clause_closes() -> None:
    session, heard = attached()

    def train() -> None:
        try:
            raise SystemExit(0)
        finally:
            session.close()

    with pytest.raises(SystemExit):
        train()
    assert heard == ["finish", "close"]
