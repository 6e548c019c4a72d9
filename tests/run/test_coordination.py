"""How ranks, hosts and signals are coordinated."""

from __future__ import annotations

import os
import pty
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import ConfigError
from offbeat.run import coordination, supervise
from offbeat.run.coordination import (
    LOOPBACK,
    ON_LOOPBACK,
    PATIENCE,
    Coordinator,
    only_returned_ranks_step,
    publish_step,
    record_death,
    serve_store,
)
from offbeat.run.interrupts import exit_at_stop_signals, interrupts
from offbeat.run.supervise import Meeting, meet
from offbeat.transport.connect import SECRET_VARIABLE
from offbeat.transport.interface import ADDRESS_VARIABLE, listen_address, reachable_address
from transport_support.ports import free_ports

# Ranks of which some are dead agree: every living one gets the same answer, and none hangs.


DEADLINE_S = 60.0


def coordinators(world_size: int) -> tuple[dist.Store, list[Coordinator]]:
    store = dist.HashStore()
    return store, [
        Coordinator(store, rank, world_size, supervised=True) for rank in range(world_size)
    ]


@contextmanager
def together(num_threads: int) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(num_threads) as pool:
        yield pool


def all_of(ranks: list[Coordinator], call: Callable[[Coordinator], object]) -> list[object]:
    """What `call` returns on each of `ranks` at once."""
    with together(len(ranks)) as pool:
        return [future.result(DEADLINE_S) for future in [pool.submit(call, rank) for rank in ranks]]


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 5).flatmap(
        lambda size: st.tuples(st.just(size), st.sets(st.integers(0, size - 1), max_size=size - 1))
    )
)
def test_the_living_gather_without_the_dead(case: tuple[int, set[int]]) -> None:
    world_size, dead = case
    store, ranks = coordinators(world_size)
    for rank in dead:
        record_death(store, rank, deaths=1)
    living = [coordinator for coordinator in ranks if coordinator.rank not in dead]
    answers = all_of(
        living, lambda coordinator: coordinator.gather_living("point", f"from {coordinator.rank}")
    )
    assert answers == [
        {coordinator.rank: f"from {coordinator.rank}" for coordinator in living}
    ] * len(living)
    assert {coordinator.leader for coordinator in living} == {living[0].rank}


def test_what_one_said_before_it_died_counts() -> None:
    store, (first, second) = coordinators(2)
    store.set("offbeat-run/point/0", "my last words")
    record_death(store, first.rank, deaths=1)
    assert second.gather_living("point", "mine") == {0: "my last words", 1: "mine"}


def test_who_waits_goes_on_when_the_other_one_dies() -> None:
    store, (first, second) = coordinators(2)
    with together(1) as pool:
        waiting = pool.submit(first.gather_living, "point", "here")
        assert not waiting.done()
        record_death(store, 1, deaths=1)
        assert waiting.result(DEADLINE_S) == {0: "here"}
    assert second.gather_living("point", "too late") == {0: "here"}


def test_a_late_one_is_left_out_once_patience_ends_and_hears_so() -> None:
    _, (first, second) = coordinators(2)
    assert first.gather_living("point", "here", patience_s=0.0) == {0: "here"}
    assert second.gather_living("point", "late", patience_s=0.0) == {0: "here"}


def test_one_that_came_back_counts_from_its_first_step() -> None:
    store, (first, _) = coordinators(2)
    record_death(store, 1, deaths=1)
    again = Coordinator(store, 1, 2, restart=1, supervised=True)
    assert first.gather_living("before it is back", "") == {0: ""}
    again.rejoin_at(8)
    assert first.gather_living("step 7", "", step=7) == {0: ""}
    assert (
        all_of([first, again], lambda coordinator: coordinator.gather_living("step 8", "", step=8))
        == [{0: "", 1: ""}] * 2
    )
    assert (
        all_of([first, again], lambda coordinator: coordinator.gather_living("end", ""))
        == [{0: "", 1: ""}] * 2
    )
    record_death(store, 1, deaths=2)
    assert first.gather_living("step 9", "", step=9) == {0: ""}


def test_a_leader_that_came_back_does_not_take_over() -> None:
    store, (_, second) = coordinators(2)
    record_death(store, 0, deaths=1)
    again = Coordinator(store, 0, 2, restart=1, supervised=True)
    again.rejoin_at(3)
    assert (second.leader, again.leader) == (1, 1)
    record_death(store, 1, deaths=1)
    assert again.leader == 0


def test_what_a_dead_leader_did_not_do_the_next_one_does() -> None:
    store, (_, second, third) = coordinators(3)
    with together(2) as pool:
        answers = [pool.submit(one.must_perform, "summary", range(3)) for one in (second, third)]
        record_death(store, 0, deaths=1)
        assert answers[0].result(DEADLINE_S)
        second.publish("summary", "written")
        assert not answers[1].result(DEADLINE_S)


def test_what_a_leader_did_before_it_died_is_done() -> None:
    _, (first, second) = coordinators(2)
    assert first.must_perform("summary", range(2))
    first.publish("summary", "written")
    assert not second.must_perform("summary", range(2))
    assert second.published("something else") is None


def test_where_nobody_notes_deaths_all_wait_for_all_and_rank_0_leads() -> None:
    store = dist.HashStore()
    ranks = [Coordinator(store, rank, 2) for rank in range(2)]
    assert (
        all_of(
            ranks,
            lambda coordinator: coordinator.gather_living("point", str(coordinator.rank)),
        )
        == [{0: "0", 1: "1"}] * 2
    )
    assert (
        all_of(ranks, lambda coordinator: coordinator.all_gather("all", str(coordinator.rank)))
        == [["0", "1"]] * 2
    )
    assert [coordinator.must_perform("summary", range(2)) for coordinator in ranks] == [True, False]


def test_a_rank_that_comes_back_is_told_how_far_the_others_are() -> None:
    store, (first, second) = coordinators(2)
    assert (first.step, second.step) == (0, 0)
    publish_step(store, 0, 34)
    publish_step(store, 1, 31)
    record_death(store, 1, deaths=1)
    assert Coordinator(store, 1, 2, restart=1, supervised=True).step == 34


def test_ranks_that_never_died_are_done_without_those_that_came_back() -> None:
    store, (first, second, third) = coordinators(3)
    record_death(store, 1, deaths=1)
    second.take_no_more_steps()
    first.take_no_more_steps()
    assert not only_returned_ranks_step(store, 3)
    third.take_no_more_steps()
    assert only_returned_ranks_step(store, 3)


def test_where_all_ranks_have_come_back_none_is_ended_for_the_others_sake() -> None:
    store, _ = coordinators(2)
    for rank in range(2):
        record_death(store, rank, deaths=1)
    assert not only_returned_ranks_step(store, 2)


# Signals that ask a process to stop, and a terminal that is closed.


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


def test_a_second_request_does_not_end_what_the_first_one_has_begun() -> None:
    """As where Slurm asks a worker to stop, and then its supervisor, which Slurm has asked too."""
    exit_at_stop_signals()
    with pytest.raises(SystemExit):
        signal.raise_signal(signal.SIGTERM)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.raise_signal(number)


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


# The hosts of a run meet at a store that anybody on their network can read.


CHOSEN = "a secret that the user chose"
IN_STORE = "offbeat-hosts/secret"


@pytest.mark.parametrize("chosen", [CHOSEN, None])
def test_a_secret_that_the_user_chose_stays_out_of_the_store(
    chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", LOOPBACK)
    monkeypatch.setenv(SECRET_VARIABLE, chosen or "")
    (port,) = free_ports(1)
    own = meet(Meeting(host=LOOPBACK, port=port, num_nodes=1, node_rank=0), workers=2)
    stored = own.store.get(IN_STORE).decode()
    assert stored == ("" if chosen else own.secret)
    assert own.secret == (chosen or stored)
    assert len(own.secret) >= 16


def test_a_host_without_the_secret_of_the_first_one_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", LOOPBACK)
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    server = serve_store()
    for key, value in ((IN_STORE, ""), ("offbeat-hosts/0", "2")):
        server.set(key, value)
    where = Meeting(host=LOOPBACK, port=server.port, num_nodes=2, node_rank=1)
    with pytest.raises(ConfigError, match=f"{SECRET_VARIABLE} is set on the first host"):
        meet(where, workers=2)


def test_the_first_host_waits_as_long_as_the_others_and_names_the_one_that_has_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert serve_store().timeout == PATIENCE  # type: ignore[attr-defined]
    monkeypatch.setattr(coordination, "PATIENCE", timedelta(milliseconds=100))
    monkeypatch.setenv("MASTER_ADDR", LOOPBACK)
    (port,) = free_ports(1)
    with pytest.raises(ConfigError, match="host 1 of 2 has not come .*--node-rank 1 there, too"):
        meet(Meeting(host=LOOPBACK, port=port, num_nodes=2, node_rank=0), workers=2)


@pytest.mark.parametrize("named", ["eth7", ""])
def test_of_an_address_without_a_known_interface_workers_have_the_one_that_the_user_names(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of IPv6, where loopback's would keep the hosts apart."""
    monkeypatch.setattr(supervise, "interface_of", lambda address: None)
    monkeypatch.setenv("MASTER_ADDR", LOOPBACK)
    monkeypatch.setenv("OFFBEAT_INTERFACE", LOOPBACK)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
    (port,) = free_ports(1)
    own = meet(Meeting(host=LOOPBACK, port=port, num_nodes=1, node_rank=0), workers=2)
    assert own.environment["GLOO_SOCKET_IFNAME"] == named


def test_only_workers_of_several_hosts_are_reached_by_the_address_that_the_user_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named = "203.0.113.7"
    for name in ("MASTER_ADDR", "OFFBEAT_INTERFACE"):
        monkeypatch.setenv(name, LOOPBACK)
    monkeypatch.setenv(ADDRESS_VARIABLE, named)
    (port,) = free_ports(1)
    own = meet(Meeting(host=LOOPBACK, port=port, num_nodes=1, node_rank=0), workers=2)
    for environment, reached_at in ((ON_LOOPBACK, LOOPBACK), (own.environment, named)):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert reachable_address(listen_address()) == reached_at
