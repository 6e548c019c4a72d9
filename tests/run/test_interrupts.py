"""Signals that ask a process to stop, and a terminal that is closed."""

from __future__ import annotations

import os
import pty
import signal
import sys
from collections.abc import Iterator

import pytest

from offbeat.run.interrupts import exit_at_stop_signals, interrupts

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handled_as_by_default() -> Iterator[None]:
    """Whoever started the tests may have had signals ignored, as nohup and batch systems do."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_each_of_these_signals_counts_as_a_request_to_stop(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with interrupts() as interrupted:
        signal.raise_signal(number)
        assert interrupted.count == 1
    assert signal.getsignal(number) is before


def test_the_first_request_says_once_what_a_second_one_does(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with interrupts() as interrupted:
        assert capfd.readouterr().err == ""
        signal.raise_signal(signal.SIGINT)
        assert "asked once more, they are ended at once" in capfd.readouterr().err
        signal.raise_signal(signal.SIGINT)
        assert capfd.readouterr().err == ""
        assert interrupted.count == 2


def test_a_hangup_that_is_ignored_stays_so() -> None:
    """As under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    exit_at_stop_signals()
    with interrupts() as interrupted:
        signal.raise_signal(signal.SIGHUP)
        assert interrupted.count == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_where_nobody_counts_them_a_process_ends_as_by_an_exit(number: signal.Signals) -> None:
    exit_at_stop_signals()
    with pytest.raises(SystemExit) as ended:
        signal.raise_signal(number)
    assert ended.value.code == 128 + number


def test_who_prints_after_its_terminal_was_closed_goes_on() -> None:
    """A write to a terminal that is gone would raise, while workers write their checkpoint."""
    program = """
import time
from offbeat.run.interrupts import interrupts
with interrupts() as interrupted:
    print("ready", flush=True)
    while not interrupted.count:
        time.sleep(0.01)
    print("the checkpoint is written", flush=True)
"""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", program])
    assert b"ready" in os.read(terminal, 1000)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
