"""A wait that ends when the rank that is waited for is known to be dead."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest

from offbeat.errors import ConfigError, PeerError
from offbeat.transport.silence import DEFAULT_S, SILENCE_VARIABLE, silence_s
from offbeat.transport.watch import LOOK_S, Watch


class Dense:
    """Waits, for as long as it is told."""

    rank = 0

    def __init__(self, waits_for_s: float) -> None:
        self._waits_for_s = waits_for_s
        self.cause: PeerError | None = None
        self.was_cut = threading.Event()

    def waits_for_s(self) -> float:
        return self._waits_for_s

    def cut(self, cause: PeerError) -> None:
        self.cause = cause
        self.was_cut.set()


def test_a_wait_for_a_dead_rank_is_ended_by_its_name() -> None:
    dense = Dense(10 * LOOK_S)
    with closing(Watch(dense, lambda: {2: "is dead", 1: "aborted"})):
        assert dense.was_cut.wait(60)
    assert dense.cause is not None
    assert dense.cause.rank == 2
    assert str(dense.cause).startswith("rank 2 is dead (rank 0 waited for it")


def test_who_waits_too_long_where_nobody_may_is_ended_without_a_name() -> None:
    dense = Dense(10.0)
    with closing(Watch(dense, dict, limit_s=5.0)):
        assert dense.was_cut.wait(60)
    assert dense.cause is not None
    assert dense.cause.rank is None


def test_a_rank_that_does_not_wait_asks_nobody_and_slowness_is_no_death() -> None:
    asked = threading.Event()

    def nobody() -> dict[int, str]:
        asked.set()
        return {}

    slow = Dense(1000.0)
    with closing(Watch(slow, nobody)):
        assert asked.wait(60)
    assert not slow.was_cut.is_set()


@pytest.mark.parametrize("value", ["abc", "0", "-1", "inf", "nan"])
def test_a_silence_that_is_no_time_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(SILENCE_VARIABLE, value)
    with pytest.raises(ConfigError, match=SILENCE_VARIABLE):
        silence_s()


def test_silence_is_tolerated_for_as_long_as_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SILENCE_VARIABLE, raising=False)
    assert silence_s() == DEFAULT_S
    monkeypatch.setenv(SILENCE_VARIABLE, "2.5")
    assert silence_s() == 2.5
