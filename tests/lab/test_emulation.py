"""Emulated clusters: plans hold what they promise, the kernel does what was planned, and nothing is
left of it.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab_support.links import sent_bytes
from offbeat.errors import ConfigError
from offbeat_lab.cluster import Cluster, ClusterFault, LinkSpec, SpeedChange
from offbeat_lab.emulation import Emulation, clean, emulate, leftovers, namespaces
from offbeat_lab.emulation.check import neighbours
from offbeat_lab.emulation.commands import NAMESPACES, MissingMeansError, call_in, run_batch
from offbeat_lab.emulation.plan import EmulationName, choose_mtu, shape
from offbeat_lab.emulation.quotas import (
    USED_SHARE,
    find_hierarchies,
    needs_quotas,
    quota,
    share_out,
)

LINK = LinkSpec(rate_bit_per_s=50e6)  # which a busy machine can emulate too
rates = st.floats(1e6, 1e11)


@given(rate=rates)
def test_payload_gets_the_same_share_of_every_rate(rate: float) -> None:
    link = LinkSpec(rate_bit_per_s=rate)
    mtu = choose_mtu(Cluster(link=link))
    bucket = shape(link, mtu)
    assert bucket
    payload = bucket.rate_bit_per_s * (mtu - 52) / (mtu + 14)
    assert payload / rate == pytest.approx(1448 / 1514)


@given(rate=rates)
def test_packets_fit_into_bucket_and_queues(rate: float) -> None:
    link = LinkSpec(rate_bit_per_s=rate)
    mtu = choose_mtu(Cluster(link=link))
    bucket = shape(link, mtu)
    assert bucket
    assert 1500 <= mtu <= 60_000
    assert mtu + 14 <= bucket.burst_bytes
    assert 2 * mtu <= bucket.queue_bytes


def test_all_links_have_packets_for_the_slowest() -> None:
    assert (
        choose_mtu(
            Cluster(link=LinkSpec(rate_bit_per_s=1e10), links={1: LinkSpec(rate_bit_per_s=1e6)})
        )
        == 1500
    )


@given(cores=st.floats(1e-3, 1.0))
def test_a_quota_is_the_share_asked_for(cores: float) -> None:
    quota_us, period_us = quota(cores)
    assert quota_us >= 1000
    assert 10_000 <= period_us <= 1_000_000
    assert quota_us / period_us == pytest.approx(cores, rel=0.01)


@given(
    speeds=st.lists(st.floats(0.001, 1.0), min_size=1, max_size=16),
    later=st.floats(0.001, 1.0),
    cores=st.integers(1, 64),
)
def test_quotas_leave_the_machine_some_room(speeds: list[float], later: float, cores: int) -> None:
    change = SpeedChange(at_s=1.0, worker=0, speed=later)
    cluster = Cluster(workers=len(speeds), speeds=tuple(speeds), changes=(change,))
    unit = share_out(cluster, cores)
    for elapsed_s in (0.0, 2.0):
        shares = [unit * cluster.speed_at(worker, elapsed_s) for worker in range(cluster.workers)]
        assert sum(shares) <= USED_SHARE * cores * (1 + 1e-9)
        assert max(shares) <= 1 + 1e-9


@pytest.mark.parametrize(
    ("cluster", "needs"),
    [
        (Cluster(), False),
        (Cluster(speeds=(1.0, 0.5)), True),
        (Cluster(speeds=(0.5,)), False),
        (Cluster(speeds=(1.0, 0.5), step_s=0.2), False),
        (Cluster(changes=(SpeedChange(at_s=1.0, worker=0, speed=0.5),)), True),
    ],
)
def test_only_speeds_that_differ_need_quotas(cluster: Cluster, needs: bool) -> None:
    assert needs_quotas(cluster) is needs


@given(slow=st.sets(st.integers(0, 6)), workers=st.integers(2, 7))
def test_every_worker_sends_to_one_and_hears_from_one(slow: set[int], workers: int) -> None:
    links = {worker: LinkSpec(rate_bit_per_s=1e7) for worker in slow if worker < workers}
    flows = neighbours(Cluster(workers=workers, link=LINK, links=links))
    assert (
        sorted(flow.sender for flow in flows)
        == sorted(flow.receiver for flow in flows)
        == list(range(workers))
    )
    assert all(flow.sender != flow.receiver for flow in flows)
    held_up = [flow for flow in flows if flow.allowed_bit_per_s == 1e7 and flow.sender not in links]
    assert len(held_up) <= 1


@pytest.mark.parametrize("part", ["", "-hub", "-w12"])
def test_names_tell_whose_they_are(part: str) -> None:
    name = EmulationName(pid=123, number=4)
    assert EmulationName.parse(f"{name}{part}") == name


@pytest.mark.parametrize(
    "text",
    [
        "offbeat-doctor-12",
        "offbeat-1",
        "offbeat-1-2-",
        "offbeat-1-2-w",
        "other-1-2-hub",
        "xoffbeat-1-2",
    ],
)
def test_names_of_others_are_not_taken_for_ours(text: str) -> None:
    assert EmulationName.parse(text) is None


def test_a_plain_cluster_is_not_emulated() -> None:
    with emulate(Cluster()) as emulation:
        assert emulation.report.kind == "none"
        assert emulation.report.notices == []
        assert emulation.placement(0).prefix == ()
        assert (
            emulation.placement(0).environment["OFFBEAT_INTERFACE"]
            == emulation.store_address
            == "127.0.0.1"
        )
        assert emulation.call_inside(lambda: 3) == 3
        assert not emulation.set_link(0, up=False)


def test_what_was_not_to_be_emulated_is_named() -> None:
    cluster = Cluster(
        link=LINK, speeds=(1.0, 0.5), faults=(ClusterFault(at_s=1.0, worker=0, action="cut"),)
    )
    with emulate(cluster, mode="none") as emulation:
        said = " ".join(emulation.report.notices)
    assert emulation.report.kind == "none"
    for word in ("network", "speeds", "cut"):
        assert word in said


def test_without_root_workers_delay_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    with emulate(Cluster(link=LINK)) as emulation:
        assert emulation.report.kind == "delaying"
        assert "root" in emulation.report.notices[0]
    with pytest.raises(ConfigError, match=r"need root.*sudo"):
        emulate(Cluster(link=LINK), mode="namespaces")


def test_a_missing_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 0)
    monkeypatch.setattr("offbeat_lab.emulation.commands.shutil.which", lambda program, path: None)
    with pytest.raises(ConfigError, match="'ip' is not installed.*iproute2"):
        emulate(Cluster(link=LINK), mode="namespaces")


def traces() -> set[str]:
    """Everything on this machine that this process's emulations could have left."""
    places = [NAMESPACES, leftovers.REGISTER, *(hierarchy.root for hierarchy in find_hierarchies())]
    return {
        str(path)
        for place in places
        if place.is_dir()
        for path in place.glob(f"offbeat-{os.getpid()}-*")
    }


@pytest.fixture(scope="module")
def able() -> None:
    """Skips where the kernel or the user cannot emulate a network."""
    try:
        emulate(Cluster(workers=1, link=LINK), mode="namespaces").close()
    except MissingMeansError as error:
        pytest.skip(str(error))


@pytest.fixture
def three(able: None) -> Iterator[Emulation]:
    with emulate(Cluster(workers=3, link=LINK)) as emulation:
        yield emulation


def run_in(
    emulation: Emulation, worker: int, code: str, *words: object
) -> subprocess.CompletedProcess[str]:
    placement = emulation.placement(worker)
    command = [*placement.prefix, sys.executable, "-S", "-c", code, *map(str, words)]
    return subprocess.run(
        command,
        env=os.environ | dict(placement.environment),
        text=True,
        capture_output=True,
        check=False,
    )


def address(emulation: Emulation, worker: int) -> str:
    return emulation.placement(worker).environment["OFFBEAT_INTERFACE"]


CONNECT = """
import socket, sys
address, port, timeout_s = sys.argv[1:]
socket.create_connection((address, int(port)), timeout=float(timeout_s)).sendall(bytes(100_000))
"""


def listener(emulation: Emulation, worker: int) -> socket.socket:
    """A server in the worker's namespace, opened from this process."""
    namespace = Path(emulation.placement(worker).prefix[1].removeprefix("--net=")).name
    return call_in(namespace, lambda: socket.create_server((address(emulation, worker), 0)))


def test_links_are_checked_and_carry(three: Emulation) -> None:
    assert three.report.kind == "namespaces"
    assert [check.worker for check in three.report.checks] == [0, 1, 2]
    for check in three.report.checks:
        assert check.asked_bit_per_s == LINK.rate_bit_per_s
        assert check.share
        assert check.share > 0.3 or not check.together
    before = sent_bytes(three, 0)
    with listener(three, 1) as server:
        done = run_in(three, 0, CONNECT, *server.getsockname(), 30)
        assert done.returncode == 0, done.stderr
        connection, _ = server.accept()
        with connection:
            while connection.recv(1 << 16):  # until all of it has arrived
                pass
    after = sent_bytes(three, 0)
    assert after - before > 100_000


def test_a_worker_sees_its_own_link_only(three: Emulation) -> None:
    seen = run_in(
        three, 2, "import socket; print(*sorted(name for _, name in socket.if_nameindex()))"
    ).stdout.split()
    assert set(seen) >= {"ctl0", "eth0", "lo"}
    assert not any(re.fullmatch(r"w\d+", name) for name in seen)


def test_the_command_turns_into_the_worker(three: Emulation) -> None:
    placement = three.placement(0)
    process = subprocess.Popen(
        [*placement.prefix, sys.executable, "-S", "-c", "import os; print(os.getpid())"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert int(process.communicate()[0]) == process.pid


def test_servers_for_all_workers_listen_in_the_hub(three: Emulation) -> None:
    with three.call_inside(lambda: socket.create_server((three.store_address, 0))) as server:
        for worker in range(3):
            before = sent_bytes(three, worker)
            done = run_in(three, worker, CONNECT, *server.getsockname(), 30)
            assert done.returncode == 0, done.stderr
            # What the check left behind may still be on its way.
            assert sent_bytes(three, worker) - before < 50_000
    with pytest.raises(ZeroDivisionError):
        three.call_inside(lambda: 1 // 0)


def test_a_cut_link_carries_nothing_until_it_is_mended(three: Emulation) -> None:
    with listener(three, 1) as server:
        assert three.set_link(1, up=False)
        assert "timed out" in run_in(three, 0, CONNECT, *server.getsockname(), 0.3).stderr
        assert three.set_link(1, up=True)
        assert run_in(three, 0, CONNECT, *server.getsockname(), 30).returncode == 0


def test_latency_is_there_and_survives_a_cut(able: None) -> None:
    with emulate(
        Cluster(workers=2, link=LinkSpec(rate_bit_per_s=LINK.rate_bit_per_s, latency_s=5e-3))
    ) as emulation:
        if any("not emulated" in notice for notice in emulation.report.notices):
            pytest.skip(emulation.report.notices[0])
        assert all(check.round_trip_s > 9e-3 for check in emulation.report.checks)
        with listener(emulation, 1) as server:
            emulation.set_link(1, up=False)
            assert "timed out" in run_in(emulation, 0, CONNECT, *server.getsockname(), 0.3).stderr
            emulation.set_link(1, up=True)
            assert run_in(emulation, 0, CONNECT, *server.getsockname(), 30).returncode == 0


def shares_of(worker: int) -> float:
    """Share of a core that the kernel lets the worker of this process's only emulation have."""
    hierarchy = find_hierarchies()[0]
    (group,) = hierarchy.root.glob(f"offbeat-{os.getpid()}-*/w{worker}")
    if hierarchy.version == 2:
        quota_us, period_us = (group / "cpu.max").read_text().split()
        return int(quota_us) / int(period_us)
    return int((group / "cpu.cfs_quota_us").read_text()) / int(
        (group / "cpu.cfs_period_us").read_text()
    )


def test_speeds_become_quotas(able: None) -> None:
    cluster = Cluster(workers=3, speeds=(1.0, 1.0, 0.25))
    with emulate(cluster) as emulation:
        if emulation.report.notices:
            pytest.skip(emulation.report.notices[0])
        assert emulation.report.kind == "none"
        shares = [shares_of(worker) for worker in range(3)]
        assert shares[0] == shares[1] == pytest.approx(4 * shares[2], rel=0.01)
        assert sum(shares) <= USED_SHARE * len(os.sched_getaffinity(0)) + 1e-3
        emulation.set_speed(0, 0.5)
        assert shares_of(0) == pytest.approx(shares[0] / 2, rel=0.01)
        process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        emulation.admit(2, process.pid)
        assert f"{cluster_group()}/w2" in Path(f"/proc/{process.pid}/cgroup").read_text()
        process.communicate()
        emulation.admit(2, process.pid)  # has ended: nothing to do
    assert traces() == set()


def cluster_group() -> str:
    (group,) = find_hierarchies()[0].root.glob(f"offbeat-{os.getpid()}-*")
    return group.name


def test_nothing_is_left_however_it_ends(able: None, monkeypatch: pytest.MonkeyPatch) -> None:
    before = traces()
    cluster = Cluster(workers=2, link=LINK, speeds=(1.0, 0.5))
    emulation = emulate(cluster)
    assert traces() > before
    emulation.close()
    emulation.close()
    assert traces() == before

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(namespaces, "check_links", interrupt)
    with pytest.raises(KeyboardInterrupt):
        emulate(cluster)
    assert traces() == before


def test_a_link_that_falls_short_is_refused(able: None, monkeypatch: pytest.MonkeyPatch) -> None:
    before = traces()
    monkeypatch.setattr(
        namespaces,
        "hub_queues",
        lambda worker, bucket, latency: [
            f"qdisc add dev w{worker} root tbf rate 100mbit burst 128kb limit 512kb"
        ],
    )
    with pytest.raises(
        ConfigError,
        match=r"worker \d is to carry 1 Gbit/s to worker \d and carries .*Ask for a lower rate",
    ):
        emulate(Cluster(workers=2, link=LinkSpec(rate_bit_per_s=1e9)), mode="auto")
    assert traces() == before


def test_two_emulations_do_not_disturb_each_other(three: Emulation) -> None:
    with emulate(Cluster(workers=2, link=LINK)) as other, listener(other, 1) as server:
        assert address(other, 1) == address(three, 1)
        assert "refused" in run_in(three, 0, CONNECT, *server.getsockname(), 30).stderr
        assert run_in(other, 0, CONNECT, *server.getsockname(), 30).returncode == 0


def test_what_is_left_of_the_same_name_blocks_nobody(able: None) -> None:
    foreign = EmulationName(pid=os.getpid(), number=0)
    run_batch("ip", [f"netns add {foreign.worker(0)}"])
    try:
        with emulate(Cluster(workers=1, link=LINK), mode="namespaces"):
            assert (NAMESPACES / foreign.worker(0)).exists()
    finally:
        leftovers.remove(foreign)
    assert traces() == set()


HOLD = """
import subprocess, sys
from offbeat_lab.cluster import Cluster, LinkSpec
from offbeat_lab.emulation import emulate
emulation = emulate(Cluster(workers=2, link=LinkSpec(rate_bit_per_s=2e7), speeds=(1.0, 0.5)))
inside = subprocess.Popen([*emulation.placement(0).prefix, "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
emulation.admit(0, inside.pid)
print(inside.pid, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_run_left_is_removed_and_only_that(able: None) -> None:
    with emulate(Cluster(workers=1, link=LINK), mode="namespaces"):
        mine = traces()
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert holder.stdout
        inside = int(holder.stdout.readline())
        theirs = {name for name in leftovers.known_names() if name.pid == holder.pid}
        assert len(theirs) == 1
        assert not [path for path in clean() if f"-{holder.pid}-" in path]
        # The one inside must outlive its parent, as a worker that hangs would.
        with open(f"/proc/{inside}/fd/0", "w"):
            holder.send_signal(signal.SIGKILL)
            holder.communicate()
            removed = clean()
        assert len([path for path in removed if f"-{holder.pid}-" in path]) >= 3
        assert not {name for name in leftovers.known_names() if name.pid == holder.pid}
        assert traces() == mine
        with suppress(FileNotFoundError):
            assert Path(f"/proc/{inside}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_number_that_was_given_out_again_protects_nothing(able: None) -> None:
    name = EmulationName(pid=os.getpid(), number=99)
    run_batch("ip", [f"netns add {name.hub}"])
    leftovers.REGISTER.mkdir(exist_ok=True)
    (leftovers.REGISTER / str(name)).write_text("another start")
    try:
        assert not leftovers.is_held(name)
    finally:
        assert leftovers.remove(name) == [name.hub]
    assert traces() == set()
