"""How soon a rank that trains answers a peer: by a thread beside training, or by a process with the
model in shared memory.

Each rank trains the CNN of the digits task (5 million parameters, batch 64, nothing padded) without
pause and lays a copy of its model down after every step, in one of two buffers. One that trains
nothing asks the ranks at random times for a part of the latest copy, as a group average does, and
takes the time until it has the answer. Both ways run by turns, in blocks.

The thread serves where its 99th percentile is no longer than the process's and the process does not
make steps shorter. Percentiles in seconds go to standard error.

    python benchmarks/studies/answering.py [--json] [--quick]
"""

from __future__ import annotations

import argparse
import multiprocessing
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import bootstrap

import _benchmarks  # noqa: F401
from _measure import Ratio, Row, add_output_options, present
from _results import Figure
from offbeat.transport.operations import Recv, Send
from offbeat.transport.peers import Peers
from offbeat_lab.tasks import build_task

Kind = Literal["thread", "process"]

TASK = {"size": "medium", "batch_size": "64"}
NUM_RANKS = (2, 4)
ANSWER_NAMES = {64: "64 bytes", 1_000_000: "1 MB"}
ANSWER_BYTES = tuple(ANSWER_NAMES)
REQUESTS_A_BLOCK = 250
NUM_BLOCKS = 4
MEAN_PAUSE_S = 0.01
WARM_UP_STEPS, WARM_UP_REQUESTS = 5, 5
_SPAWN = multiprocessing.get_context("spawn")
_HEAD_BYTES = 8


class Flag(Protocol):
    """An event, of threads or of processes."""

    def is_set(self) -> bool: ...
    def set(self) -> None: ...


@dataclass(kw_only=True)
class Samples:
    """What one way of answering has measured: seconds from request to answer, and of each training
    step.
    """

    answer_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)


class Snapshot:
    """Two copies of a model in shared memory, and which of them is the latest."""

    def __init__(self, name: str, num_elements: int) -> None:
        self._memory = SharedMemory(name)
        self._latest = np.ndarray(1, np.int64, self._memory.buf)
        self._copies = np.ndarray((2, num_elements), np.float32, self._memory.buf, _HEAD_BYTES)

    def write(self, model: torch.nn.Module) -> None:
        spare = 1 - int(self._latest[0])
        copy, begin = torch.from_numpy(self._copies[spare]), 0
        for parameter in model.parameters():
            copy[begin : begin + parameter.numel()].copy_(parameter.detach().view(-1))
            begin += parameter.numel()
        self._latest[0] = spare

    def part(self, num_bytes: int) -> bytes:
        latest = int(self._latest[0])
        return bytes(self._copies[latest].view(np.uint8)[:num_bytes])

    def close(self) -> None:
        del self._latest, self._copies  # the memory cannot be given back while arrays look at it
        self._memory.close()


def answer(peers: Peers, asker: int, snapshot: Snapshot, done: Flag) -> None:
    """Send as many bytes of the snapshot as each message of `asker` asks for; zero ends it."""
    while num_bytes := int.from_bytes(peers.start(Recv(asker), 0).wait(), "little"):
        peers.start(Send(asker, snapshot.part(num_bytes)), 0)
    done.set()


def answer_beside(
    rank: int,
    asker: int,
    secret: bytes,
    memory: str,
    num_elements: int,
    pipe: Connection,
    done: Flag,
) -> None:
    """The process that answers for `rank`."""
    snapshot, peers = Snapshot(memory, num_elements), _introduce(rank, asker, secret, pipe)
    answer(peers, asker, snapshot, done)
    peers.close()
    snapshot.close()


def train(
    rank: int,
    asker: int,
    secret: bytes,
    memory: str,
    num_elements: int,
    pipe: Connection,
    done: Flag,
    answers: bool,
) -> None:
    """Train until `done`, and answer too where that is the thread's business; then tell how long
    each step took.
    """
    torch.set_num_threads(1)
    task = build_task("digits", TASK)
    model = task.build_model(0)
    optimizer = task.optimizer(model)
    batch = next(task.batches(seed=0, epoch=0, rank=rank, world_size=asker))
    snapshot = Snapshot(memory, num_elements)
    with ExitStack() as stack:
        stack.callback(snapshot.close)
        if answers:
            peers = _introduce(rank, asker, secret, pipe)
            stack.callback(peers.close)
            thread = threading.Thread(target=answer, args=(peers, asker, snapshot, done))
            thread.start()
            stack.callback(thread.join)
        seconds: list[float] = []
        while not done.is_set():
            if len(seconds) == WARM_UP_STEPS:
                pipe.send("trains")
            begin_s = time.perf_counter()
            task.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            snapshot.write(model)
            seconds.append(time.perf_counter() - begin_s)
    pipe.send(seconds[WARM_UP_STEPS:])


def _introduce(rank: int, asker: int, secret: bytes, pipe: Connection) -> Peers:
    """A driver that is connected to everybody: its address goes through `pipe`, and all addresses
    come back.
    """
    peers = Peers(rank, asker + 1, address="127.0.0.1", secret=secret)
    pipe.send(peers.endpoint)
    peers.connect(pipe.recv())
    return peers


def block(kind: Kind, num_ranks: int, samples: dict[int, Samples], num_requests: int) -> None:
    """Start the ranks, ask them `num_requests` times for each size of answer, and note into
    `samples`, by size.
    """
    num_elements = build_task("digits", TASK).num_parameters()
    secret = secrets.token_bytes(32)
    with ExitStack() as stack:
        trainers, answerers, dones, processes = [], [], [], []
        for rank in range(num_ranks):
            memory = SharedMemory(create=True, size=_HEAD_BYTES + 2 * 4 * num_elements)
            stack.callback(memory.unlink)
            stack.callback(memory.close)
            done = _SPAWN.Event()
            here, there = _SPAWN.Pipe()
            common = (rank, num_ranks, secret, memory.name, num_elements)
            processes.append(
                _SPAWN.Process(target=train, args=(*common, there, done, kind == "thread"))
            )
            trainers.append(here)
            if kind == "process":
                here, there = _SPAWN.Pipe()
                processes.append(_SPAWN.Process(target=answer_beside, args=(*common, there, done)))
            answerers.append(here)
            dones.append(done)
        for process in processes:
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
        asker = Peers(num_ranks, num_ranks + 1, address="127.0.0.1", secret=secret)
        stack.callback(asker.close)
        endpoints = [*(pipe.recv() for pipe in answerers), asker.endpoint]
        for pipe in answerers:
            pipe.send(endpoints)
        asker.connect(endpoints)
        for pipe in trainers:
            assert pipe.recv() == "trains"
        _ask(asker, num_ranks, samples, num_requests)
        for rank in range(num_ranks):
            asker.start(Send(rank, (0).to_bytes(8, "little")), 0)
        steps_s = [s for pipe in trainers for s in pipe.recv()]
        for process in processes:
            process.join()
    for part in samples.values():
        part.step_s += steps_s


def _ask(asker: Peers, num_ranks: int, samples: dict[int, Samples], num_requests: int) -> None:
    draws = np.random.default_rng(0)
    for number in range(-WARM_UP_REQUESTS, num_requests):
        for num_bytes, found in samples.items():
            rank = int(draws.integers(num_ranks))
            time.sleep(draws.exponential(MEAN_PAUSE_S))
            begin_s = time.perf_counter()
            asker.start(Send(rank, num_bytes.to_bytes(8, "little")), 0)
            asker.start(Recv(rank), 0).wait()
            if number >= 0:
                found.answer_s.append(time.perf_counter() - begin_s)


def cases(num_ranks: int, *, num_blocks: int, num_requests: int) -> Iterator[Row]:
    measured: dict[Kind, dict[int, Samples]] = {
        kind: {size: Samples() for size in ANSWER_BYTES} for kind in ("thread", "process")
    }
    order: list[Kind] = ["thread", "process"]
    for _ in range(num_blocks):
        for kind in order:
            block(kind, num_ranks, measured[kind], num_requests)
        order.reverse()
    thread, process = measured["thread"], measured["process"]
    for size in ANSWER_BYTES:
        yield from figures(num_ranks, size, measured)
        what = f"99th percentile answer of {size:,} bytes, thread over process, {num_ranks} ranks"
        yield _no_worse(what, thread[size].answer_s, process[size].answer_s, late)
    steps = thread[ANSWER_BYTES[0]].step_s, process[ANSWER_BYTES[0]].step_s
    yield _no_worse(f"mean training step, thread over process, {num_ranks} ranks", *steps, np.mean)


def late(answer_s: NDArray[np.float64], axis: int = -1) -> NDArray[np.float64]:
    return np.quantile(answer_s, 0.99, axis=axis)


def _no_worse(
    case: str,
    first: list[float],
    second: list[float],
    statistic: Callable[..., NDArray[np.float64]],
) -> Ratio:
    def ratio(
        a: NDArray[np.float64], b: NDArray[np.float64], axis: int = -1
    ) -> NDArray[np.float64]:
        return statistic(a, axis=axis) / statistic(b, axis=axis)

    interval = bootstrap(
        (first, second), ratio, method="percentile", n_resamples=1000, rng=0, batch=100
    ).confidence_interval
    low, high = float(interval.low), float(interval.high)
    value = float(ratio(np.array(first), np.array(second)))
    holds: bool | Literal["undecided"] = "undecided" if low < 1 < high else high <= 1
    return Ratio(
        case=case,
        value=value,
        unit="x",
        goal="at most 1",
        holds=holds,
        bound=0.0,
        interval=(low, high),
    )


def figures(
    num_ranks: int, size: int, measured: dict[Kind, dict[int, Samples]]
) -> Iterator[Figure]:
    """Milliseconds of answers of `size` bytes, and of the training steps beside them."""
    of_answers = f"{ANSWER_NAMES[size]}: median, 99th percentile"
    for kind, by_size in measured.items():
        answer_ms = tuple(map(float, 1e3 * np.quantile(by_size[size].answer_s, [0.5, 0.99])))
        step_ms = 1e3 * float(np.mean(by_size[size].step_s))
        table, case = "answers and steps, ms", f"{num_ranks} ranks, {kind}"
        yield Figure(table=table, case=case, column=of_answers, value=answer_ms)
        if size == ANSWER_BYTES[-1]:
            yield Figure(table=table, case=case, column="a training step", value=step_ms)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_output_options(parser)
    parser.add_argument("--quick", action="store_true", help="only to see that it runs")
    arguments = parser.parse_args()
    num_blocks, num_requests = (1, 40) if arguments.quick else (NUM_BLOCKS, REQUESTS_A_BLOCK)
    times = {"num_blocks": num_blocks, "num_requests": num_requests}
    present({f"{n} ranks": partial(cases, n, **times) for n in NUM_RANKS}, arguments)
