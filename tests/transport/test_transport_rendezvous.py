"""Who has come and who will not, seen in the store alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from offbeat.errors import ConfigError, MismatchError, OffbeatError, PeerError
from offbeat.transport import rendezvous
from offbeat.transport.rendezvous import await_all, naming_failed_rank


def outcomes(*calls: Callable[[], None]) -> list[OffbeatError | None]:
    """What each of `calls` raised, all of them run at the same time."""
    raised: list[OffbeatError | None] = [None] * len(calls)

    def carry_out(number: int) -> None:
        try:
            calls[number]()
        except OffbeatError as error:
            raised[number] = error

    threads = [threading.Thread(target=carry_out, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_all_come() -> None:
    store = HashStore()
    calls = [
        lambda position=position: await_all(store, position, [4, 7, 9], lost={5})
        for position in range(3)
    ]
    assert outcomes(*calls) == [None] * 3


def test_a_refusal_is_heard_by_all() -> None:
    store = HashStore()
    refusal = ConfigError("no address")
    first, second = outcomes(
        lambda: await_all(store, 0, [0, 1], lost=set()),
        lambda: await_all(store, 1, [0, 1], lost=set(), refusal=refusal),
    )
    assert second is refusal
    assert isinstance(first, MismatchError)
    assert str(first) == "rank 1 refused: no address"


def test_a_lost_rank_is_named_to_those_too_who_did_not_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "GRACE_S", 0.05)
    store, ranks = HashStore(), [0, 3, 5]
    raised = outcomes(
        lambda: await_all(store, 0, ranks, lost=set()), lambda: await_all(store, 2, ranks, lost={3})
    )
    for error in raised:
        assert isinstance(error, PeerError)
        assert error.rank == 3
        assert "rank 3 was lost in an earlier session" in str(error)
        assert "new_group([0, 5]" in str(error)


def test_a_rank_that_was_lost_and_comes_all_the_same_is_there() -> None:
    store = HashStore()
    raised = outcomes(
        lambda: await_all(store, 0, [0, 1], lost={1}), lambda: await_all(store, 1, [0, 1], lost={0})
    )
    assert raised == [None, None]


def test_who_was_held_lost_and_comes_late_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "GRACE_S", 0.0)
    store = HashStore()
    for position, lost in ((0, {1}), (1, set())):
        with pytest.raises(PeerError, match="rank 1 was lost"):
            await_all(store, position, [0, 1], lost=lost)


def test_who_never_comes_is_named_when_the_time_is_over() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.05))
    with pytest.raises(PeerError, match="rank 1 has not come to attach"):
        await_all(store, 0, [0, 1], lost=set())


def test_who_is_silent_while_the_others_fail_has_ended() -> None:
    store = HashStore()

    def fails(position: int) -> None:
        with naming_failed_rank(store, position, 4, limit_s=0.1):
            raise RuntimeError("connection reset\nat some line")

    def comes_through() -> None:
        with naming_failed_rank(store, 2, 4, limit_s=0.1):
            pass

    def refuses() -> None:
        with naming_failed_rank(store, 3, 4, limit_s=0.1):
            raise ConfigError("a bad address")

    first, through, refusing = outcomes(lambda: fails(0), comes_through, refuses)
    assert isinstance(first, PeerError)
    assert first.rank == 1
    assert str(first).startswith("rank 1 ended while the ranks connected (connection reset)")
    assert through is None
    assert isinstance(refusing, ConfigError)
    with pytest.raises(PeerError, match="could not be connected"):
        fails(1)
