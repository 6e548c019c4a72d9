"""The doctor sees what is there, finds the link it measures, draws the right conclusion, and leaves
nothing behind.
"""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from rich.console import Console

from offbeat.arithmetic.costs import LinkCost, NetworkCosts
from offbeat.errors import ConfigError, OffbeatError
from offbeat.run.coordination import serve_store, store_environment
from offbeat.simulation.virtual import VirtualCluster, VirtualLink
from offbeat_lab.cli import doctor as doctor_command
from offbeat_lab.cluster.parts import PAYLOAD_SHARE
from offbeat_lab.cluster.quantities import rounded
from offbeat_lab.cluster.reading import load, parse_cluster
from offbeat_lab.doctor import Diagnosis, diagnose
from offbeat_lab.doctor import diagnosis as whole
from offbeat_lab.doctor import measure as measuring
from offbeat_lab.doctor.diagnosis import ALONE, analyse, cluster_of, display_link
from offbeat_lab.doctor.facts import Finding, find_all
from offbeat_lab.doctor.measure import HostFacts, Listening, Measurement, own_sockets, sockets_at
from offbeat_lab.doctor.pairs import PairLink, measure_pairs, num_rounds, partner, slow_workers
from offbeat_lab.plan.plans import USUAL, PlanRequest, make_plan
from offbeat_lab.plan.predictions import setting_of
from offbeat_lab.plan.shipped import named_profile
from rank_jobs.module import run_module
from ranks_support.process import StartProcess, start_process

__all__ = ["start_process"]


def network(rate_bit_per_s: float, *, latency_s: float = 1e-4) -> NetworkCosts:
    link = LinkCost(alpha_s=latency_s, beta_s_per_byte=8 / rate_bit_per_s)
    return NetworkCosts(messages=link, dense=link, select_s_per_element=1e-9)


def measurement(**changes: object) -> Measurement:
    usual = Measurement(
        world_size=4,
        device="cpu",
        hosts=[HostFacts(name=f"node{rank}", torch="2.13.0", num_threads=1) for rank in range(4)],
        network=network(1e9),
        pairs=[pair(first, second) for second in range(4) for first in range(second)],
        listening=[Listening(address="10.0.0.7", port=4000, owner="offbeat")],
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


def pair(first: int, second: int, *, rate_bit_per_s: float = 1e9) -> PairLink:
    return PairLink(
        first=first, second=second, cost=LinkCost(alpha_s=1e-4, beta_s_per_byte=8 / rate_bit_per_s)
    )


def that_carries(bit_per_s: float) -> float:
    """The rate of a link whose messages carry so much, as the file has it: in three digits."""
    return rounded(bit_per_s / PAYLOAD_SHARE)


def analysed(found: Measurement | None) -> Diagnosis:
    return analyse([], found)


@given(world_size=st.integers(1, 40))
def test_everybody_meets_everybody_once_and_partners_are_mutual(world_size: int) -> None:
    met = []
    for round_ in range(num_rounds(world_size)):
        for rank in range(world_size):
            peer = partner(rank, world_size, round_)
            if peer is not None:
                assert partner(peer, world_size, round_) == rank
                met.append((rank, peer))
    assert sorted(met) == [(a, b) for a in range(world_size) for b in range(world_size) if a != b]


@pytest.mark.parametrize(
    ("world_size", "latency_s", "bytes_per_s"),
    [(1, 1e-4, 125e6), (2, 1e-4, 125e6), (3, 1e-4, 125e6), (6, 1e-4, 125e6), (3, 0.04, 1.25e9)],
)
def test_pairs_find_the_link_and_all_ranks_agree(
    world_size: int, latency_s: float, bytes_per_s: float
) -> None:
    link = VirtualLink(latency_s=latency_s, bytes_per_s=bytes_per_s)
    cluster = VirtualCluster(world_size, link=link)
    lists = cluster.run([measure_pairs(rank, world_size) for rank in range(world_size)])
    assert all(pairs == lists[0] for pairs in lists)
    assert [(found.first, found.second) for found in lists[0]] == sorted(
        (first, second) for second in range(world_size) for first in range(second)
    )
    for found in lists[0]:
        assert found.cost.alpha_s == pytest.approx(latency_s, rel=0.05)
        assert found.cost.beta_s_per_byte == pytest.approx(1 / bytes_per_s, rel=0.05)


def test_the_worker_with_the_bad_cable_is_found() -> None:
    pairs = [
        pair(a, b, rate_bit_per_s=1e8 if 2 in (a, b) else 1e9) for b in range(4) for a in range(b)
    ]
    assert slow_workers(pairs, 4) == [2]
    assert slow_workers(measurement().pairs, 4) == []
    assert slow_workers([pair(0, 1, rate_bit_per_s=1e6)], 2) == []
    assert any(
        "Worker 2 (node2) has slow links" in sentence
        for sentence in analysed(measurement(pairs=pairs)).advice
    )


def test_what_else_should_be_known_is_said() -> None:
    local = [
        HostFacts(name="here", torch=version, num_threads=1)
        for version in ("2.13.0", "2.13.0", "2.12.0", "2.13.0")
    ]
    listening = [
        Listening(address="::", port=29500, owner="rendezvous store"),
        Listening(address="10.0.0.7", port=4000),
    ]
    diagnosis = analysed(measurement(hosts=local, listening=listening))
    text = "\n".join(diagnosis.advice)
    assert "All workers are on one host" in text
    assert "different versions of torch (2.12.0, 2.13.0)" in text
    assert "Open to every network: rendezvous store, :: port 29500." in text
    assert "4000" not in text
    assert diagnosis.verdict.startswith("Within this host: ")


def test_alone_it_says_how_to_start_it() -> None:
    assert analysed(None).verdict == ALONE
    assert "torchrun" in ALONE


def test_what_was_measured_leads_to_a_plan() -> None:
    assert "offbeat plan --cluster" in analysed(measurement()).verdict


def test_a_link_reads_like_one() -> None:
    assert (
        display_link(LinkCost(alpha_s=52.34e-6, beta_s_per_byte=8 / 941.23e6))
        == "52.3 us a message, 941 Mbit/s"
    )


@pytest.mark.parametrize(
    ("address", "is_open"),
    [
        ("0.0.0.0", True),  # noqa: S104 - looked at, not bound
        ("::", True),
        ("127.0.0.1", False),
        ("::1", False),
    ],
)
def test_a_socket_is_open_to_all_where_its_address_names_no_interface(
    address: str, is_open: bool
) -> None:
    assert Listening(address=address, port=1).is_open_to_all == is_open


def test_a_socket_of_this_process_is_seen_while_it_listens() -> None:
    before = own_sockets()
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert own_sockets() - before == {server.getsockname()}
        assert server.getsockname() in sockets_at(server.getsockname()[1])
    assert own_sockets() == before


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6")
def test_a_socket_of_ipv6_is_seen_too() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        assert server.getsockname()[:2] in own_sockets()


def test_a_connection_is_no_socket_that_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        before = own_sockets()
        with socket.create_connection(server.getsockname()):
            assert own_sockets() == before


def test_everything_is_found_or_said_to_be_missing_with_what_follows() -> None:
    findings = {finding.name: finding for finding in find_all()}
    assert {"torch", "gloo", "NCCL", "CUDA", "Triton", "cores", "memory"} <= findings.keys()
    assert all(finding.means for finding in findings.values())
    assert findings["cores"].value == str(len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": 1}, "--workers is 1; a measurement takes 2 to 64"),
        ({"workers": 65}, "--workers is 65; a measurement takes 2 to 64"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        diagnose(**arguments)  # type: ignore[arg-type]


def test_local_workers_are_refused_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ConfigError, match="--workers is 4, but torchrun or srun has started 2; leave it out"
    ):
        diagnose(workers=4)


def test_what_is_refused_is_not_said_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--workers is 0; a measurement takes 2 to 64"):
        doctor_command.run(workers=0)
    assert capsys.readouterr().err == ""


def test_the_page_shows_all_and_ends_with_the_verdict() -> None:
    found = analyse(
        [
            Finding(
                name="tbf",
                state="missing",
                value="not [there]",
                means="so be it",
                remedy="try",
            )
        ],
        measurement(world_size=6, pairs=[pair(a, b) for b in range(6) for a in range(b)]),
    )
    out = io.StringIO()
    doctor_command.print_diagnosis(Console(file=out, width=120), found)
    text = out.getvalue()
    for expected in (
        "not [there]: so be it; to get it: try",
        "10.0.0.7:4000",
        "and 5 faster pairs",
        "1 Gbit/s",
    ):
        assert expected in text
    assert text.rstrip().endswith(found.verdict)


def test_json_holds_everything(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = analysed(measurement())
    monkeypatch.setattr(doctor_command, "diagnose", lambda **_: found)
    assert doctor_command.run(as_json=True) == 0
    assert TypeAdapter(Diagnosis).validate_json(capsys.readouterr().out) == found


def test_with_a_profile_the_advice_is_the_plan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured = measurement()

    monkeypatch.setattr(doctor_command, "diagnose", lambda **_: analyse([], measured))
    cluster = tmp_path / "cluster.toml"
    arguments = {"profile": "resnet50", "write": cluster}
    assert doctor_command.run(**arguments, as_json=True) == 0  # type: ignore[arg-type]
    found = TypeAdapter(Diagnosis).validate_json(capsys.readouterr().out)
    request = PlanRequest(
        profile=named_profile("resnet50"), clusters=[load(cluster)], strategies=USUAL
    )
    best = make_plan(request).best(4, load(cluster).link.rate_bit_per_s or 0.0)
    assert found.verdict.startswith(f"Plan for resnet50: {best.strategy}, ")


def test_of_weights_in_16_bits_nothing_is_planned_that_would_halve_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor_command, "diagnose", lambda **_: analyse([], measurement()))
    profile = tmp_path / "half.json"
    profile.write_text(replace(named_profile("resnet20"), element_bytes=2).to_json())
    assert doctor_command.run(profile=str(profile)) == 0
    assert "Plan for resnet20" in capsys.readouterr().out


@pytest.mark.parametrize("far", [0, 3])
def test_a_worker_far_away_has_a_latency_of_its_own_and_the_others_have_theirs(far: int) -> None:
    links = [pair(first, second) for second in range(4) for first in range(second)]
    slow = LinkCost(alpha_s=0.02, beta_s_per_byte=8e-9)
    pairs = [
        replace(link, cost=slow) if far in (link.first, link.second) else link for link in links
    ]
    cluster = cluster_of(measurement(pairs=pairs))
    assert cluster.link.latency_s == pytest.approx(6e-5)
    assert {rank: link.latency_s for rank, link in cluster.links.items()} == {far: 0.02}


def test_without_gloo_the_status_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lacking = Finding(name="gloo", state="missing", value="", means="no")
    monkeypatch.setattr(doctor_command, "diagnose", lambda **_: analyse([lacking], None))
    assert doctor_command.run() == 1
    assert "gloo" in capsys.readouterr().out


@pytest.mark.ranks
def test_real_workers_measure_each_other_and_listen_on_loopback_only(
    start_process: StartProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which are forked here."""

    def fork(command: list[str], *, env: dict[str, str], stdout: IO[bytes], **_: Any) -> Any:
        asked = {"command": command, "environment": env, "stdout": stdout.name}
        forked = start_process(run_module, int(env["RANK"]), 2, **asked)
        return SimpleNamespace(wait=lambda *_: forked.wait(), kill=forked.kill)

    own = SimpleNamespace(Popen=fork, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(whole, "subprocess", own)
    found = whole.measure_locally(2)
    assert found.world_size == len(found.hosts) == 2
    assert found.on_one_host
    assert [(link.first, link.second) for link in found.pairs] == [(0, 1)]
    for link in (found.network.messages, found.network.dense, found.pairs[0].cost):
        assert link.beta_s_per_byte > 0
    assert {one.owner for one in found.listening} == {
        "offbeat",
        "process group",
        "rendezvous store",
    }
    assert {one.address for one in found.listening} == {"127.0.0.1"}
    assert {one.rank for one in found.listening if one.owner == "offbeat"} == {0, 1}


def test_where_there_are_gpus_each_rank_measures_nccl_on_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of what needs a GPU, what is asked for."""
    asked: list[object] = []

    class StoppedError(Exception):
        pass

    def connect(*, device: torch.device) -> None:
        asked.append(device)
        raise StoppedError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", asked.append)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: asked.append(backend))
    monkeypatch.setattr(measuring, "connect", connect)
    store = serve_store()
    for name, value in (store_environment(store, 0, 1) | {"LOCAL_RANK": "1"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoppedError):
        measuring.measure()
    gpu = torch.device("cuda", 1)
    assert asked == ["cpu:gloo,cuda:nccl", gpu, gpu]


@pytest.mark.ranks
def test_a_worker_that_fails_ends_all_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(
        place: dict[str, str], said: IO[bytes], complained: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        """The first waits for the second, which fails."""
        program = "import signal; signal.pause()" if place["RANK"] == "0" else "raise OSError('no')"
        command = [sys.executable, "-S", "-c", program]
        started.append(subprocess.Popen(command, stdout=said, stderr=complained))
        return started[-1]

    monkeypatch.setattr(whole, "start_measurement_worker", start)
    with pytest.raises(OffbeatError, match="worker 1 of the measurement failed: OSError: no"):
        whole.measure_locally(2)
    assert [process.returncode is not None for process in started] == [True, True]


def test_json_of_a_finding_is_plain() -> None:
    finding = Finding(name="a", state="ok", value="b", means="c")
    assert json.loads(TypeAdapter(Finding).dump_json(finding)) == {
        "name": "a",
        "state": "ok",
        "value": "b",
        "means": "c",
        "remedy": "",
    }


def test_the_probed_cluster_has_rates_under_load_and_reads_back_as_the_same() -> None:
    host = {"torch": "2.13.0", "num_threads": 1, "window_bytes": 1 << 20}
    hosts = [HostFacts(name=f"node{rank}", **host) for rank in range(4)]  # type: ignore[arg-type]
    busy = [
        pair(first, second, rate_bit_per_s=1e8 if 3 in (first, second) else 8e8)
        for second in range(4)
        for first in range(second)
    ]
    found = cluster_of(measurement(hosts=hosts, busy_pairs=busy, network=network(1e8)))
    assert found.workers == 4
    assert found.link.rate_bit_per_s == pytest.approx(that_carries(8e8))
    assert found.link.latency_s == pytest.approx(6e-5)
    assert found.link.window_bytes == 1 << 20
    slow = {rank: link.rate_bit_per_s for rank, link in found.links.items()}
    assert slow == {3: that_carries(1e8)}
    assert found.cores is None
    assert parse_cluster(found.to_toml(), "probed") == found


def test_a_plan_on_the_probed_cluster_takes_bytes_to_last_as_long_as_they_were_measured_to() -> (
    None
):
    """The probe times what messages carry, and a plan knows that headers take a part of a rate."""
    found = cluster_of(measurement(network=network(4e8)))
    model = replace(named_profile("resnet20"), on_gpu=False)  # over gloo, as it was probed
    planned = setting_of(model, found).network
    assert planned.messages.beta_s_per_byte == pytest.approx(8 / 1e9, rel=5e-3)
    assert planned.dense.beta_s_per_byte == pytest.approx(8 / 4e8, rel=5e-3)


def test_what_an_all_reduce_on_gpus_reaches_limits_the_rate() -> None:
    found = cluster_of(measurement(network=network(6e8), device="cuda"))
    assert found.link.rate_bit_per_s == pytest.approx(that_carries(6e8))
    assert not found.links


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_where_an_all_reduce_is_faster_than_messages_links_carry_as_much(device: str) -> None:
    busy = [
        pair(first, second, rate_bit_per_s=5e8) for second in range(4) for first in range(second)
    ]
    fast = network(2e11)
    found = cluster_of(measurement(network=fast, device=device))
    assert found.link.rate_bit_per_s == pytest.approx(that_carries(2e11))
    assert not found.gloo_ns_per_byte
    # A busy processor takes half of that away, unless it carries nothing.
    found = cluster_of(measurement(network=fast, device=device, busy_pairs=busy))
    expected = 1e11 if device == "cpu" else 2e11
    assert found.link.rate_bit_per_s == pytest.approx(that_carries(expected))


def test_what_gloo_takes_longer_than_the_slowest_link_is_what_its_processors_add() -> None:
    busy = [
        pair(first, second, rate_bit_per_s=8e8) for second in range(4) for first in range(second)
    ]
    found = cluster_of(measurement(busy_pairs=busy, network=network(4e8)))
    assert found.link.rate_bit_per_s == pytest.approx(that_carries(8e8))
    assert found.gloo_ns_per_byte == pytest.approx(10.0)


def test_workers_of_one_host_share_its_cores() -> None:
    hosts = [HostFacts(name="node", torch="2.13.0", num_threads=1, num_cores=2)] * 4
    assert cluster_of(measurement(hosts=hosts)).cores == 2


def test_no_cluster_follows_from_no_measurement() -> None:
    with pytest.raises(ConfigError, match="nothing was measured between workers"):
        cluster_of(measurement(pairs=[]))
