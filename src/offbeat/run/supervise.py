"""`offbeat run` on a host: starts its workers, and stays until the last of them has ended.

Where the strategy goes on without a worker, the others do, and a dead one is started again as often
as `restarts` allows. Elsewhere one death ends all, and all are started anew from whatever
checkpoint the script itself writes, as torchrun does.

A run may have several hosts, each with a supervisor for its share of the workers:

    offbeat run --rendezvous head:29500 --nodes 2 --node-rank 0 --workers 4 train.py  # on head
    offbeat run --rendezvous head:29500 --nodes 2 --node-rank 1 --workers 4 train.py

Starting these commands is the business of whoever places jobs. The first host serves the store, so
the run ends with its supervisor; any other host, and any worker, may die where the strategy goes on
without them.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from offbeat.codec import jit
from offbeat.errors import ConfigError
from offbeat.run.config import RunConfig
from offbeat.run.coordination import serve_store, store_client, text_in_time
from offbeat.run.interrupts import interrupts
from offbeat.run.local_worker import WorkerProcess, WorkerProgram, WorkerStart, start_process
from offbeat.run.progress import Listener, NoticeListener
from offbeat.run.recipes import SCRIPT_STRATEGIES
from offbeat.run.records import Summary, add_to_summary, begin_attempt, create, lock
from offbeat.run.supervisor import HostShare, WorkerGroup
from offbeat.strategies.by_name import build_strategy
from offbeat.transport.connect import SECRET_VARIABLE
from offbeat.transport.interface import ADDRESS_VARIABLE, interface_of, listen_address

SCRIPT_WORKER = "offbeat.run.worker"
_HOSTS = "offbeat-hosts"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptOutcome:
    """How a run of a script has ended.

    Attributes:
        directory: of its record.
        status: exit status: 0, or that of the worker that ended the run.
        problem: what ended it; None if all is well.
        summary: None where the run did not come to its end.
    """

    directory: Path
    status: int
    problem: str | None
    summary: Summary | None


def run_script(
    config: RunConfig,
    *,
    out: Path | None,
    restarts: int = 0,
    start: Callable[[WorkerStart], WorkerProcess] = start_process,
    host: HostShare | None = None,
    on_progress: Listener,
    on_notice: NoticeListener = lambda notice: None,
    say: Callable[[str], None],
) -> ScriptOutcome:
    """Run the script of `config` on workers of this host.

    Args:
        config: from `script_config`.
        out: directory of the record; None: the next free one below runs/.
        restarts: how often workers are started again, >= 0.
        start: makes a worker's process; see `WorkerProgram`.
        host: this one's share of a run on several hosts.
        on_progress: hears of workers that die and come back.
        on_notice: is called with each notice that there is before the first step of an attempt.
        say: for what else the user should know meanwhile.

    Raises:
        RecordError: `out` is in use.
    """
    directory = create(out, config)
    num_here = config.workers if host is None else host.num_workers
    strategy = build_strategy(config.strategy, config.strategy_options, SCRIPT_STRATEGIES)
    with lock(directory):
        who = "one worker trains" if num_here == 1 else f"{num_here} workers train"
        say(f"offbeat: {who} with {config.strategy}")
        if strategy.runs_compiled and not jit.is_compiled():
            say("offbeat: compiling, once on this machine: some 10 seconds")
            jit.warm()
        attempt = 0
        while True:
            begin_attempt(directory, config, start_step=0)
            group = WorkerGroup(
                directory,
                config,
                program=script_program(
                    num_here,
                    start=start,
                    attempt=attempt,
                    shown=(0,),
                    environment={} if host is None else host.environment,
                ),
                restarts=restarts,
                share=host,
                on_progress=on_progress,
                on_notice=on_notice,
            )
            with interrupts() as interrupted, group:
                group.run_to_end(interrupted)
                worker = group.root_cause()
            summary = add_to_summary(directory, group.remarks, group.losses)
            if worker is None:
                return ScriptOutcome(directory=directory, status=0, problem=None, summary=summary)
            problem = group.describe(worker)
            # On several hosts the keys of the store are used up, and the others would have to know.
            restarts = group.restarts
            if not restarts or interrupted.count or host is not None:
                break
            restarts -= 1
            attempt += 1
            say(f"{problem}; all workers are started again ({restarts} restarts left)")
    code = worker.process.wait()
    status = code if code > 0 else 128 - code
    if interrupted.count:
        status, problem = 128 + interrupted.number, "interrupted"
    return ScriptOutcome(directory=directory, status=status, problem=problem, summary=None)


def script_program(
    workers: int,
    *,
    module: str = SCRIPT_WORKER,
    start: Callable[[WorkerStart], WorkerProcess] = start_process,
    attempt: int = 0,
    shown: Collection[int] = (),
    environment: Mapping[str, str] | None = None,
) -> WorkerProgram:
    """What the workers of a script run.

    Args:
        workers: number of them on this host.
        module, start, shown: are handed to `WorkerProgram`.
        attempt: how often all of them were started before.
        environment: further variables.
    """
    return WorkerProgram(
        module=module,
        start=start,
        shown=shown,
        ends_alone=True,
        environment={
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "LOCAL_WORLD_SIZE": str(workers),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            # So that `init_process_group` uses the supervisor's store, which outlives rank 0.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_RUN_ID": "offbeat",
            **(environment or {}),
        },
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """Where the hosts of a run meet.

    Attributes:
        host, port: of the store, on the first of them.
        num_nodes: how many hosts there are.
        node_rank: which one this is, 0 <= node_rank < num_nodes.
    """

    host: str
    port: int
    num_nodes: int
    node_rank: int


def meeting(rendezvous: str | None, nodes: int | None, node_rank: int | None) -> Meeting | None:
    """What the flags of these names say; None where there is one host only. Raises
    `ConfigError`.
    """
    given = {"--rendezvous": rendezvous, "--nodes": nodes, "--node-rank": node_rank}
    missing = [flag for flag, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if rendezvous is None or nodes is None or node_rank is None:
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigError(
            f"{' and '.join(missing)} {verb} missing; a run on several hosts needs --rendezvous"
            " HOST:PORT of the first of them, --nodes and --node-rank"
        )
    host, colon, port = rendezvous.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"--rendezvous is {rendezvous!r}; allowed is HOST:PORT, as head:29500")
    if not 0 <= node_rank < nodes:
        raise ConfigError(f"--node-rank is {node_rank}; allowed is 0 to {nodes - 1}")
    return Meeting(host=host.strip("[]"), port=int(port), num_nodes=nodes, node_rank=node_rank)


def meet(where: Meeting, workers: int) -> HostShare:
    """Wait for the other hosts, and divide ranks among all. Collective over hosts.

    Args:
        where: they meet.
        workers: of this host.

    Raises:
        ConfigError: no address of this host leads there, the port is taken, the first host has a
            secret that this one lacks, or a host does not come.
    """
    os.environ["MASTER_ADDR"] = where.host
    address, secret = listen_address(), os.environ.get(SECRET_VARIABLE, "")
    if where.node_rank == 0:
        store = serve_store(address, where.port)
        # Anybody on this network can read the store, so a secret that the user chose stays out.
        drawn = "" if secret else secrets.token_hex(32)
        store.set(f"{_HOSTS}/secret", drawn)
        secret = secret or drawn
    else:
        try:
            store = store_client(where.host, where.port)
        except RuntimeError as error:
            raise ConfigError(
                f"no supervisor serves a store at {where.host} port {where.port} ({error}); start"
                " offbeat run --node-rank 0 there"
            ) from None
    store.set(f"{_HOSTS}/{where.node_rank}", str(workers))
    counts = []
    for node in range(where.num_nodes):
        said = text_in_time(store, f"{_HOSTS}/{node}")
        if said is None:
            raise ConfigError(
                f"host {node} of {where.num_nodes} has not come to {where.host} port {where.port};"
                f" start offbeat run --node-rank {node} there, too"
            )
        counts.append(int(said))
    secret = secret or store.get(f"{_HOSTS}/secret").decode()
    if not secret:
        raise ConfigError(
            f"{SECRET_VARIABLE} is set on the first host, and not on this one; set the same on all"
        )
    return HostShare(
        first_rank=sum(counts[: where.node_rank]),
        num_workers=workers,
        num_of_all_hosts=sum(counts),
        store=store,
        secret=secret,
        environment={
            "OFFBEAT_INTERFACE": address,
            ADDRESS_VARIABLE: os.environ.get(ADDRESS_VARIABLE, ""),
            # Of an address that is not the first of its interface, or of IPv6, no interface is
            # known. An empty name is none to gloo, while that of loopback would keep hosts apart.
            "GLOO_SOCKET_IFNAME": (
                interface_of(address) or os.environ.get("GLOO_SOCKET_IFNAME", "")
            ),
            "GROUP_RANK": str(where.node_rank),
            "GROUP_WORLD_SIZE": str(where.num_nodes),
        },
    )
