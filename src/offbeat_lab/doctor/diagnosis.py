"""Everything that `offbeat doctor` found out, put together; and a cluster description of it for
`offbeat plan` and the lab.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import IO, Final

from pydantic import TypeAdapter

from offbeat.arithmetic.costs import MESSAGE_S, LinkCost
from offbeat.errors import ConfigError, OffbeatError
from offbeat.run.coordination import ON_LOOPBACK, serve_store, store_environment
from offbeat.transport.connect import launched
from offbeat_lab.cluster import Cluster, LinkSpec
from offbeat_lab.cluster.parts import PAYLOAD_SHARE
from offbeat_lab.cluster.quantities import display_duration, display_rate, rounded
from offbeat_lab.doctor.facts import Finding, find_all
from offbeat_lab.doctor.measure import Measurement, measure
from offbeat_lab.doctor.pairs import PairLink, slow_workers

ALONE = (
    "Nothing was measured, since this command was started alone. Start it as you start training, on"
    " every host: torchrun --nnodes 2 --node-rank 0 --nproc-per-node 1 --master-addr HOST"
    " --master-port 29500 -m offbeat_lab.cli doctor, or srun python -m offbeat_lab.cli doctor. With"
    " --workers 4 it measures among four workers of this machine."
)
MEASURED = (
    "The links are measured. Which strategy suits them depends on the model: give --profile, or"
    " --write cluster.toml and then offbeat plan --cluster cluster.toml --script train.py."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What rank 0 prints.

    Attributes:
        findings: what is there on rank 0's host.
        measurement: between the workers; None when started alone.
        verdict: what follows, in a sentence.
        advice: what else should be known.
    """

    findings: list[Finding]
    measurement: Measurement | None
    verdict: str
    advice: list[str]


def diagnose(*, workers: int | None = None) -> Diagnosis | None:
    """Look, measure and judge. Collective where torchrun or srun started this process; None on
    ranks other than 0.

    Args:
        workers: how many to start on this machine, when started alone; None measures nothing then.

    Raises:
        ConfigError: an argument that is not allowed.
        OffbeatError: the workers cannot reach each other.
    """
    launch = launched()
    measurement = None
    if workers is not None:
        require_measurable(workers)
        measurement = measure_locally(workers)
    elif launch is not None and launch.world_size > 1:
        measurement = measure()
        if launch.rank != 0:
            return None
    return analyse(find_all(), measurement)


def analyse(findings: list[Finding], measurement: Measurement | None) -> Diagnosis:
    """What the findings about this machine and the measurement, if there is one, mean in words.
    Pure.
    """
    if measurement is None:
        return Diagnosis(findings=findings, measurement=None, verdict=ALONE, advice=[])
    return Diagnosis(
        findings=findings,
        measurement=measurement,
        verdict=f"{within(measurement)}{MEASURED}",
        advice=_remarks(measurement),
    )


def within(measurement: Measurement) -> str:
    """What a verdict begins with where it says nothing of a network."""
    return "Within this host: " if measurement.on_one_host else ""


def _remarks(measurement: Measurement) -> list[str]:
    remarks = []
    if measurement.on_one_host:
        remarks.append(
            "All workers are on one host: unless its network is an emulated one, this is what its"
            " memory and cores do, and no measure of a network."
        )
    remarks += [
        f"Worker {rank} ({measurement.hosts[rank].name}) has slow links to all others, and"
        " everybody waits for the slowest: look at its cable, its switch port and what else runs"
        " there."
        for rank in slow_workers(measurement.pairs, measurement.world_size)
    ]
    if len(versions := {host.torch for host in measurement.hosts}) > 1:
        remarks.append(
            f"The workers have different versions of torch ({', '.join(sorted(versions))}): install"
            " the same one."
        )
    open_to_all = [socket for socket in measurement.listening if socket.is_open_to_all]
    for owner in sorted({socket.owner for socket in open_to_all}):
        ports = ", ".join(
            sorted(
                {
                    f"{socket.address} port {socket.port}"
                    for socket in open_to_all
                    if socket.owner == owner
                }
            )
        )
        remarks.append(
            f"Open to every network: {owner}, {ports}. Keep strangers out with a firewall or a"
            " private network."
        )
    return remarks


MAX_WORKERS = 64
_TIMEOUT_S = 120.0


def require_measurable(workers: int) -> None:
    """Raise `ConfigError` where `--workers` cannot be measured between here."""
    if (launch := launched()) is not None:
        raise ConfigError(
            f"--workers is {workers}, but torchrun or srun has started {launch.world_size}; leave"
            " it out"
        )
    if not 2 <= workers <= MAX_WORKERS:
        raise ConfigError(f"--workers is {workers}; a measurement takes 2 to {MAX_WORKERS}")


def measure_locally(workers: int) -> Measurement:
    """Start `workers` processes, let them measure over loopback what offbeat itself costs, and end
    them.

    Raises:
        OffbeatError: one of them failed; the message is its last line.
    """
    with ExitStack() as stack:
        store = serve_store()
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="offbeat-doctor-")))
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, processes)
        for rank in range(workers):
            said = stack.enter_context((directory / f"said-{rank}").open("wb"))
            complained = stack.enter_context((directory / f"complained-{rank}").open("wb"))
            processes.append(
                start_measurement_worker(store_environment(store, rank, workers), said, complained)
            )
        failed = _wait(processes)
        if failed is not None:
            lines = (
                (directory / f"complained-{failed}")
                .read_text(errors="replace")
                .strip()
                .splitlines()
            )
            raise OffbeatError(
                f"worker {failed} of the measurement failed:"
                f" {lines[-1] if lines else 'it said nothing'}"
            )
        return TypeAdapter(Measurement).validate_json((directory / "said-0").read_bytes())


def start_measurement_worker(
    place: dict[str, str], said: IO[bytes], complained: IO[bytes]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "offbeat_lab.doctor.worker"],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | ON_LOOPBACK | place,
        stdin=subprocess.DEVNULL,
        stdout=said,
        stderr=complained,
    )


def _wait(processes: list[subprocess.Popen[bytes]]) -> int | None:
    """Wait for all, or for the first that fails; returns its rank."""
    with ThreadPoolExecutor(len(processes)) as pool:
        ends = {pool.submit(_status, process): rank for rank, process in enumerate(processes)}
        wait(ends, return_when=FIRST_EXCEPTION)
        failed = [rank for end, rank in ends.items() if end.done() and end.exception() is not None]
        if failed:
            _end(processes)  # the pool waits for its threads, and those for the processes
    return failed[0] if failed else None


def _status(process: subprocess.Popen[bytes]) -> None:
    if process.wait(_TIMEOUT_S) != 0:
        raise OffbeatError(f"exit status {process.returncode}")


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def display_link(link: LinkCost) -> str:
    """`52 us a message, 940 Mbit/s`."""
    return (
        f"{display_seconds(link.alpha_s)} a message,"
        f" {display_rate(rounded(8 / link.beta_s_per_byte))}"
    )


def display_seconds(duration_s: float) -> str:
    """Three digits in a fitting unit."""
    return display_duration(rounded(duration_s))


_APART: Final = 1.5
"""A worker whose rate is so many times lower or higher than most workers' has a link of its own."""

_LATE_S: Final = 1e-3
"""So has one whose messages take so much longer than most workers'."""

_LEAST_S_PER_BYTE: Final = 8e-13
"""No link of a cluster is faster."""


def cluster_of(measurement: Measurement) -> Cluster:
    """The cluster that was measured.

    A worker's rate is what the best of its links carried while both ends computed: a rate that a
    busy worker cannot use is none. Where an all-reduce is faster than messages, links carry as much
    more. What gloo's takes longer is what its processors add; with NCCL, and among workers that
    share cores, the rate is no more than the all-reduce reached. Latencies are those of workers
    that compute nothing, since else they say how busy a processor is. Messages were timed by what
    they carry, and a link's rate includes their headers.

    Raises:
        ConfigError: nothing was measured between workers.
    """
    pairs = measurement.busy_pairs or measurement.pairs
    if not pairs:
        raise ConfigError(
            "nothing was measured between workers; start this command on every host as you start"
            " training, or give --workers"
        )
    workers = range(measurement.world_size)
    dense_s_per_byte = measurement.network.dense.beta_s_per_byte
    computes_on_shared_cores = measurement.on_one_host and measurement.device == "cpu"
    is_gloo = measurement.device == "cpu" and not computes_on_shared_cores
    idle_rates, rates = (
        [1 / min(cost.beta_s_per_byte for cost in _costs(some, rank)) for rank in workers]
        for some in (measurement.pairs, pairs)
    )
    dense_rate = 1 / max(dense_s_per_byte, _LEAST_S_PER_BYTE)
    # One processor encrypts messages, and NCCL may go another way, where none has to be idle.
    as_fast = min(rates if measurement.device == "cuda" else idle_rates)
    faster = max(1.0, dense_rate / as_fast)
    rates = [min(rate * faster, PAYLOAD_SHARE / _LEAST_S_PER_BYTE) for rate in rates]
    # The all-reduce waits for the slowest worker, so it says something of that one alone.
    slowest = min(range(len(rates)), key=lambda rank: rates[rank])
    gloo_s_per_byte = max(0.0, dense_s_per_byte - 1 / rates[slowest])
    if not is_gloo:  # what its processors add is no property of the links
        rates = [
            min(rate, dense_rate) if rank == slowest or rate < _APART * rates[slowest] else rate
            for rank, rate in enumerate(rates)
        ]
    usual = median_low(rates)
    latencies_s = [
        max(0.0, median_low(cost.alpha_s for cost in _costs(measurement.pairs, rank)) - MESSAGE_S)
        for rank in workers
    ]
    usual_s = median_low(latencies_s)
    common, *links = (
        LinkSpec(
            rate_bit_per_s=rounded(
                8 * (usual if usual / _APART < rate < usual * _APART else rate) / PAYLOAD_SHARE
            ),
            latency_s=rounded(usual_s if latency_s < usual_s + _LATE_S else latency_s, digits=2),
            window_bytes=measurement.window_bytes,
        )
        for rate, latency_s in [(usual, usual_s), *zip(rates, latencies_s, strict=True)]
    )
    return Cluster(
        name="probed",
        workers=measurement.world_size,
        link=common,
        links={rank: link for rank, link in enumerate(links) if link != common},
        gloo_ns_per_byte=rounded(1e9 * gloo_s_per_byte) if is_gloo else None,
        cores=measurement.hosts[0].num_cores if computes_on_shared_cores else None,
    )


def _costs(pairs: Sequence[PairLink], rank: int) -> list[LinkCost]:
    return [pair.cost for pair in pairs if rank in (pair.first, pair.second)]
