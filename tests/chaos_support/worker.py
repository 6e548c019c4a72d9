"""What the processes of a cell do: train as a user's script would, keep a journal, and be struck.

Time is that of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from chaos_support.matrix import FAULTS, STEP_S, STRATEGIES, Cell, Drawn
from offbeat import Session, island_mesh
from offbeat.errors import OffbeatError
from offbeat.session.attach import attach_through
from offbeat.session.checkpoint import save
from offbeat.transport import connect as connecting
from offbeat.transport.driver import Driver, Ticket, Wrapper
from offbeat.transport.interface import bound_socket
from offbeat.transport.operations import DenseOperation, Operation, Send
from offbeat_lab.network_namespace import enter
from rank_jobs import megabatch, regression

EPOCH_S = 0.4
"""What two ranks need for the samples of an epoch, with strategies that share samples."""


class Journal:
    """One line of JSON for each thing that happens to a process, written at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def note(self, what: str, **more: Any) -> None:
        line = json.dumps({"at_s": time.monotonic(), "what": what, **more})
        self._file.write(f"{line}\n")


class Striker:
    """Brings about the fault on this rank, at its moment."""

    def __init__(self, cell: Cell, drawn: Drawn, journal: Journal, *, is_hit: bool) -> None:
        self.fault = FAULTS[cell.fault]
        self._drawn = drawn
        self._journal = journal
        self._is_hit = is_hit
        self._has_struck = False
        self._is_armed = False
        self._operations = 0
        if self._comes("attach") and drawn.at_start != "agreement":
            name = {"gloo": "new_gloo_backend", "mesh": "Peers"}[drawn.at_start]
            setattr(connecting, name, self._die)

    def wrap(self, driver: Driver) -> Driver:
        if self._comes("attach"):
            self._is_armed = True
        return _Watched(driver, self.operation)

    def begin_step(self, step: int) -> None:
        """Before the forward pass of `step`."""
        if step == self._drawn.at_step:
            self._is_armed = True
            if self._comes("step"):
                self._strike()

    def operation(self) -> None:
        """Before an operation of any driver."""
        if self._is_armed and (self._comes("exchange") or self._comes("attach")):
            self._operations += 1
            first = self._drawn.at_operation
            if self._operations == (first if self._comes("exchange") else 1 + first // 4):
                self._strike()

    def end(self) -> None:
        """After the last step."""
        if self._comes("end"):
            self._strike()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around the second save of a file."""
        if not self._comes("saving"):
            yield
            return
        self._journal.note("fault")
        if self.fault.action != "kill":
            yield
            return
        before, os.fsync = os.fsync, lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
        try:
            yield
        finally:
            os.fsync = before

    def spoiled(self, loss: torch.Tensor, step: int) -> torch.Tensor:
        if self._is_hit and self.fault.action == "nan" and step == self._drawn.at_step:
            return loss * math.nan
        return loss

    def _comes(self, moment: str) -> bool:
        return self._is_hit and self.fault.moment == moment and not self._has_struck

    def _strike(self) -> None:
        self._has_struck = True
        self._journal.note("fault")
        match self.fault.action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise ValueError("the data set has no more samples")

    def _die(self, *_: Any, **__: Any) -> NoReturn:
        self._strike()
        raise AssertionError("it lives")


class _Watched(Wrapper):
    def __init__(self, inner: Driver, tell: Callable[[], None]) -> None:
        super().__init__(inner)
        self._tell = tell

    def start(self, operation: Operation, channel: int) -> Ticket:
        if isinstance(operation, Send | DenseOperation):
            self._tell()
        return self.inner.start(operation, channel)


def train(
    rank: int,
    world_size: int,
    *,
    cell: Cell,
    drawn: Drawn,
    journal: str,
    disk: str,
    namespace: str | None,
    returned: bool,
) -> None:
    """Train; what goes wrong is written down.

    Args:
        rank, world_size: of this process.
        cell: which one of the matrix.
        drawn: what was drawn for it.
        journal: a file.
        disk: a directory to save in.
        namespace: file of the network namespace to enter; None: none.
        returned: whether this process takes the place of one that was killed.
    """
    if namespace is not None:
        enter(Path(namespace))
    book = Journal(Path(journal))
    is_hit = rank in drawn.hit and not returned
    striker = Striker(cell, drawn, book, is_hit=is_hit)
    try:
        _train(rank, cell, drawn, striker, book, Path(disk), is_hit=is_hit)
    except BaseException as error:
        named = [hit for hit in drawn.hit if _names(error, hit)]
        kind, ours = type(error).__name__, isinstance(error, OffbeatError)
        book.note("raised", kind=kind, ours=ours, named=named, message=str(error))
        raise


def _names(error: BaseException, rank: int) -> bool:
    if getattr(error, "rank", None) == rank:
        return True
    return any(f"{word} {rank}" in str(error) for word in ("rank", "worker"))


def _train(
    rank: int,
    cell: Cell,
    drawn: Drawn,
    striker: Striker,
    journal: Journal,
    disk: Path,
    *,
    is_hit: bool,
) -> None:
    faulty, action = STRATEGIES[cell.strategy], striker.fault.action
    strategy = faulty.strategy
    model = megabatch.make_net() if strategy.shares_samples else regression.make_net()
    if is_hit and action == "model":
        model = torch.nn.Sequential(model, torch.nn.Tanh(), torch.nn.Linear(*_tail(model)))
    if is_hit and action == "dtype":
        model = model.double()
    if is_hit and action == "option":
        strategy = faulty.differing
    mesh = None
    if cell.shards > 1:
        both = island_mesh("cpu", cell.shards)
        fully_shard(model, mesh=both["shard"])
        mesh = both["replicate"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    journal.note("attach")
    with attach_through(striker.wrap, model, optimizer, strategy, mesh=mesh) as session:
        journal.note("attached", start_step=session.start_step)
        steps = drawn.at_step + 1 + math.ceil(cell.after_s / STEP_S)
        for step, loss_of in _batches(session, model, rank, steps):
            if is_hit and action == "fewer steps" and step == drawn.at_step:
                break
            threading.Event().wait(STEP_S)
            striker.begin_step(step)
            striker.spoiled(loss_of(), step).backward()
            optimizer.step()
            optimizer.zero_grad()
            journal.note("step")
            if step == drawn.at_step and striker.fault.moment == "saving":
                tree = {"model": model.state_dict(), "session": session.state_dict()}
                save(disk, f"rank-{rank}", {**tree, "time": 1})
                if is_hit and action == "fill disk":
                    _fill(disk)
                with striker.saving():
                    save(disk, f"rank-{rank}", {**tree, "time": 2})
        striker.end()
        journal.note(
            "trained",
            notices=session.notices,
            skipped=session.stats.skipped_steps,
            finite=all(bool(p.isfinite().all()) for p in model.parameters()),
        )
    journal.note("closed")


def _tail(model: torch.nn.Sequential) -> tuple[int, int]:
    last = model[-1].out_features
    return last, last


def _batches(
    session: Session, model: torch.nn.Module, rank: int, steps: int
) -> Iterator[tuple[int, Callable[[], torch.Tensor]]]:
    """The steps of a run, each with what computes its loss."""
    if not session.strategy.shares_samples:
        for step in range(steps):
            yield step, lambda step=step: regression.loss_of(model, rank, step)
        return
    loader = session.loader(megabatch.Numbers(), batch_size=4, seed=3)
    epochs, step = 1 + math.ceil(steps * STEP_S / EPOCH_S), 0
    while loader.epoch < epochs:
        for x, y, _ in loader:
            yield step, lambda x=x, y=y: torch.nn.functional.mse_loss(model(x), y)
            step += 1


def _fill(disk: Path) -> None:
    """Leave no room on the disk of `disk`."""
    try:
        with (disk / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(512))
    except OSError:
        pass


def serve(rank: int, world_size: int, *, journal: str, address: str, namespace: str | None) -> None:
    """Serve the store, as the agent of a launcher does, until killed."""
    if namespace is not None:
        enter(Path(namespace))
    with bound_socket(address) as listener:
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=os.dup(listener.fileno()),
        )
        Journal(Path(journal)).note("listens", port=port)
        signal.pause()
        del store
