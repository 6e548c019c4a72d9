"""What a script leaves open is closed at its end: no thread lives on into the interpreter's end,
which would be the end by SIGABRT now and then.
"""

from __future__ import annotations

import os
import sys
import threading

import pytest
import torch

import offbeat
from offbeat.errors import ConfigError
from offbeat.session.metrics import close_open_sessions


def attached() -> offbeat.Session:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return offbeat.attach(model, optimizer, offbeat.WAGMA())


def test_a_session_that_was_left_open_is_closed_with_its_threads() -> None:
    before = set(threading.enumerate())
    session = attached()
    assert set(threading.enumerate()) - before

    close_open_sessions()

    assert not [thread for thread in set(threading.enumerate()) - before if thread.is_alive()]
    with pytest.raises(ConfigError, match="closed"):
        session.averaged_model()


def test_after_an_exception_it_is_closed_as_a_with_block_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = attached()
    monkeypatch.setattr(sys, "last_value", ValueError("no more samples"), raising=False)

    close_open_sessions()

    with pytest.raises(ConfigError, match="closed"):
        session.averaged_model()


def test_a_forked_child_leaves_its_parents_session_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = os.getpid()
    with attached() as session:
        with monkeypatch.context() as in_child:
            in_child.setattr(os, "getpid", lambda: parent + 1)
            close_open_sessions()
        session.averaged_model()
