"""Runs one cell of the matrix: starts its processes, undoes what is undone, and judges what each of
them has written down.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from chaos_support.matrix import FAULTS, STEP_S, Cell, Promise
from chaos_support.worker import serve, train
from offbeat.errors import OffbeatError
from offbeat.session.checkpoint import load
from offbeat.transport.connect import RETURN_VARIABLE, SECRET_VARIABLE
from offbeat_lab.cluster import Cluster, LinkSpec
from offbeat_lab.emulation import Emulation, emulate
from offbeat_lab.emulation.leftovers import known_names
from offbeat_lab.emulation.plan import EmulationName
from offbeat_lab.forking import ForkedProcess
from ranks_support import references
from ranks_support.rank import LOOPBACK, Orders
from ranks_support.templates import Templates

SILENCE_VARIABLE: Final = "OFFBEAT_SILENCE_S"
START_S: Final = 30.0
"""How long the processes may take until all have attached."""
END_S: Final = 5.0
"""How long after its last step, or after its error, a process may take to end."""
LOOK_S: Final = 0.01
DISK_BYTES: Final = 1 << 17
CLUSTER: Final = {"link": LinkSpec(latency_s=1e-4)}


@dataclass(kw_only=True, eq=False)
class Player:
    """A process of a cell, and its journal."""

    rank: int
    process: ForkedProcess
    journal: Path
    log: Path
    ended_s: float | None = None
    hung: bool = False
    heard_s: float = 0.0
    entries: list[dict[str, Any]] = field(default_factory=list)
    _read: int = 0

    def look(self) -> list[dict[str, Any]]:
        """Read what is new in the journal, and see whether the process has ended."""
        if self.ended_s is None and self.process.poll() is not None:
            self.ended_s = time.monotonic()
        fresh = []
        with suppress(FileNotFoundError), self.journal.open() as file:
            file.seek(self._read)
            text = file.read()
            whole = text[: text.rfind("\n") + 1]
            self._read += len(whole)
            fresh = [json.loads(line) for line in whole.splitlines()]
        self.entries += fresh
        self.heard_s = max([self.heard_s, *(entry["at_s"] for entry in fresh)])
        return fresh

    def first(self, what: str) -> dict[str, Any] | None:
        return next((entry for entry in self.entries if entry["what"] == what), None)

    def times_s(self, what: str) -> list[float]:
        return [entry["at_s"] for entry in self.entries if entry["what"] == what]

    def end(self) -> None:
        if self.ended_s is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a cell has shown.

    Attributes:
        errors_s: after what time the last of those who were not hit had raised; None: not all did.
        stall_s: the longest that a step of theirs was late; None where nobody took all steps.
        wrong: what differs from the promise; empty: nothing.
    """

    promise: Promise
    errors_s: float | None
    stall_s: float | None
    wrong: tuple[str, ...]

    def __str__(self) -> str:
        if self.wrong:
            return f"**{'; '.join(self.wrong)}**"
        if self.errors_s is not None:
            return f"error, {self.errors_s:.1f} s"
        return f"goes on, {self.stall_s:.1f} s"


class Stage:
    """Where cells are played: templates of processes, and emulated clusters, of which each serves
    one cell at a time. A context manager that leaves nothing behind.
    """

    def __init__(self, directory: Path, templates: Templates | None = None) -> None:
        self._directory = directory
        self._templates = Templates() if templates is None else templates
        self._is_owner = templates is None
        self._stack = ExitStack()
        self._free: dict[int, list[Emulation]] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Stage:
        if self._is_owner:
            self._stack.callback(self._templates.close)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        left = [str(name) for name in known_names() if name.pid == os.getpid()]
        assert not left, f"left behind: {', '.join(left)}"

    def play(self, cell: Cell) -> Outcome:
        """Run `cell` to its end and judge it. Several threads may do so. Raises
        `MissingMeansError` where links cannot be emulated.
        """
        if not cell.links:
            return self._play(cell, None)
        with self._lock:
            free = self._free.setdefault(cell.ranks, [])
            cluster = Cluster(workers=cell.ranks, **CLUSTER)
            emulation = (
                free.pop()
                if free
                else self._stack.enter_context(emulate(cluster, mode="namespaces"))
            )
        try:
            return self._play(cell, emulation)
        finally:
            free.append(emulation)

    def _play(self, cell: Cell, emulation: Emulation | None) -> Outcome:
        directory = self._directory / cell.name.replace("/", "-").replace(" ", "-")
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        shared_before = _shared_memory()
        with ExitStack() as stack:
            disks = [
                stack.enter_context(_disk(directory / f"disk-{rank}", small=_is_small(cell, rank)))
                for rank in range(cell.ranks)
            ]
            play = _Play(cell, self._templates, directory, emulation, disks)
            try:
                play.run()
            finally:
                play.close()
            wrong = play.judge()
            pids = {str(player.process.pid) for player in play.all_players}
            left = _shared_memory() - shared_before
            mine = sorted(name for name in left if any(pid in name for pid in pids))
            wrong += [f"left {name} in shared memory" for name in mine]
        return Outcome(
            promise=cell.promise, errors_s=play.errors_s, stall_s=play.stall_s, wrong=tuple(wrong)
        )


class _Play:
    def __init__(
        self,
        cell: Cell,
        templates: Templates,
        directory: Path,
        emulation: Emulation | None,
        disks: Sequence[Path],
    ) -> None:
        self.cell = cell
        self.fault = FAULTS[cell.fault]
        self.drawn = cell.drawn()
        self.lost = cell.islands_of(self.drawn.hit)
        self.promise = cell.promise
        self.errors_s: float | None = None
        self.stall_s: float | None = None
        self._templates = templates
        self._directory = directory
        self._emulation = emulation
        self._disks = disks
        self._results: list[int] = []
        self._due: list[tuple[float, Any]] = []
        self._cut: set[int] = set()
        self._never = threading.Event()
        self._newcomers: list[Player] = []
        self.players: list[Player] = []
        self._store = self._start_store()

    @property
    def all_players(self) -> list[Player]:
        return [self._store, *self.players, *self._newcomers]

    @property
    def spared(self) -> list[Player]:
        """The processes that were not hit, nor any of their island."""
        return [player for player in self.players if player.rank not in self.lost]

    @property
    def fault_s(self) -> float | None:
        """When the fault came; None: not yet."""
        if self.fault.moment == "before attach":
            begun = [player.times_s("attach") for player in self.players]
            return max(times_s[0] for times_s in begun) if all(begun) else None
        what = "trained" if self.fault.action == "fewer steps" else "fault"
        times_s = [self.players[rank].times_s(what) for rank in self.drawn.hit]
        return max(times[0] for times in times_s) if all(times_s) else None

    def run(self) -> None:
        place = self._wait_for_store()
        self.players = [self._start(rank, place) for rank in range(self.cell.ranks)]
        begin_s = time.monotonic()
        handled: set[int] = set()
        while True:
            now_s = time.monotonic()
            for player in self.all_players:
                player.look()
            for rank in self.drawn.hit:
                if rank not in handled and self.players[rank].times_s("fault"):
                    handled.add(rank)
                    self._answer(rank, place)
            for at_s, act in [due for due in self._due if due[0] <= now_s]:
                self._due.remove((at_s, act))
                act()
            awaited = [player for player in self._awaited() if player.ended_s is None]
            if not awaited and not self._due:
                return
            fault_s = self.fault_s
            if fault_s is None:
                stuck = awaited if now_s > begin_s + START_S else []
            else:
                # A slow machine is no hang: who writes in its journal goes on.
                stuck = [
                    player
                    for player in awaited
                    if now_s > max(fault_s, player.heard_s) + self._time_s + END_S
                ]
            if stuck:
                for player in stuck:
                    player.hung = True
                    player.process.send_signal(signal.SIGCONT)
                    player.process.send_signal(signal.SIGABRT)  # it prints its stacks
                self._never.wait(0.5)
                return
            self._never.wait(LOOK_S)

    def close(self) -> None:
        for player in self.all_players:
            player.end()
            player.look()
        for descriptor in self._results:
            os.close(descriptor)
        for rank in self._cut:
            assert self._emulation is not None
            self._emulation.set_link(rank, up=True)

    def judge(self) -> list[str]:
        """What differs from what was promised."""
        hung = [player.rank for player in self._awaited() if player.hung]
        fault_s = self.fault_s
        if fault_s is None:
            raised = {e["kind"] for p in self.players if (e := p.first("raised"))}
            return [f"the fault did not come ({', '.join(sorted(raised)) or 'nothing was raised'})"]
        if hung:
            return [f"hung: {_ranks(hung)}"]
        wrong = [*self._judge_spared(fault_s), *self._judge_hit(), *self._judge_disks()]
        for newcomer in self._newcomers:
            wrong += self._judge_newcomer(newcomer)
        return wrong

    def _judge_spared(self, fault_s: float) -> Iterator[str]:
        spared = self.players if self.fault.moment == "before attach" else self.spared
        raised = {p.rank: e for p in spared if (e := p.first("raised"))}
        closed = [player for player in spared if player.first("closed")]
        silent = [p.rank for p in spared if p.rank not in raised and p not in closed]
        if silent:
            yield f"died without a word: {_ranks(silent)}"
        foreign = {e["kind"] for e in raised.values() if not e["ours"]}
        if foreign:
            yield f"raised {', '.join(sorted(foreign))}"
        if raised and self.promise.kind == "goes on":
            yield f"raised {_kinds(raised)}: {_ranks(raised)}"
        if closed and self.promise.kind == "error":
            yield f"went on: {_ranks(player.rank for player in closed)}"
        if raised and self.promise.kind != "goes on":
            self.errors_s = max(entry["at_s"] for entry in raised.values()) - fault_s
            if self.errors_s > self.promise.within_s:
                yield f"error after {self.errors_s:.1f} s"
            # Nobody was hit where ranks disagree or the store has died.
            is_named = self.fault.moment != "before attach" and self.fault.action != "kill store"
            nameless = [r for r, e in raised.items() if not e["named"]] if is_named else []
            if nameless:
                yield f"error without the rank's name: {_ranks(nameless)}"
        if closed and self.promise.kind != "error":
            self.stall_s = max(_longest_stall_s(player, fault_s) for player in closed)
            if self.stall_s > self.promise.stall_s:
                yield f"stalled {self.stall_s:.1f} s"
            notices = {p.rank: (p.first("trained") or {}).get("notices", []) for p in closed}
            if self.fault.action == "nan":
                if not all((p.first("trained") or {}).get("finite") for p in self.players):
                    yield "weights that are not finite"
            elif self._loses_for_good and self.promise.kind == "goes on":
                unsaid = [
                    rank
                    for rank, said in notices.items()
                    if not any(f"worker {hit}" in n for hit in self.lost for n in said)
                ]
                if unsaid:
                    yield f"no notice of the loss: {_ranks(unsaid)}"

    def _judge_hit(self) -> Iterator[str]:
        """Whoever can still say something is to say it in words of offbeat."""
        for rank in sorted(self.lost):
            player = self.players[rank]
            raised = player.first("raised")
            if raised and not raised["ours"] and self.fault.action != "raise":
                yield f"raised {raised['kind']}: rank {rank}"
            if self.fault.action == "fill disk" and not raised:
                yield "nothing was said of the full disk"

    def _judge_disks(self) -> Iterator[str]:
        """What is on a disk under a file's own name is whole."""
        if self.fault.moment != "saving":
            return
        for rank, disk in enumerate(self._disks):
            try:
                load(disk, f"rank-{rank}")
            except OffbeatError:
                if (self.players[rank].first("fault")) is not None:
                    yield f"the file of rank {rank} is damaged"
            partial = [path.name for path in disk.glob(".*")]
            # Nobody is left to remove the file of a killed writer; its next save does.
            if partial and not (rank in self.drawn.hit and self.fault.action == "kill"):
                yield f"left {', '.join(partial)}"

    def _judge_newcomer(self, newcomer: Player) -> Iterator[str]:
        raised = newcomer.first("raised")
        if newcomer.hung:
            yield "the one that returned hung"
        elif self.promise.kind == "error" and not (raised and raised["ours"]):
            yield "the one that returned was not refused"
        elif self.promise.kind != "error" and not newcomer.first("attached"):
            yield f"could not return: {raised['kind'] if raised else 'no error'}"

    @property
    def _loses_for_good(self) -> bool:
        return self.fault.action in ("kill", "stop", "cut") and (
            self.fault.lasts is None and not self.fault.returns
        )

    @property
    def _time_s(self) -> float:
        return max(self.promise.within_s, self.promise.stall_s)

    def _awaited(self) -> list[Player]:
        """Whose end is waited for: of all but those that are gone for good."""
        fault = self.fault
        # Where its peers go on, one that is cut off for good tries for a minute to come back.
        goes_on = self.promise.kind == "goes on"
        for_good = ("kill", "stop", "cut") if goes_on else ("kill", "stop")
        gone = fault.action in for_good and fault.lasts is None
        hit = self.drawn.hit if gone else ()
        players = [player for player in self.players if player.rank not in hit]
        return players + self._newcomers

    def _answer(self, rank: int, place: tuple[str, int]) -> None:
        """What the machine does once `rank` has been hit."""
        now_s, fault = time.monotonic(), self.fault
        undone_s = None if fault.lasts is None else now_s + fault.lasts * self.cell.limit_s
        if fault.action == "kill store":
            self._store.process.kill()
        if fault.action == "cut":
            assert self._emulation is not None
            self._emulation.set_link(rank, up=False)
            self._cut.add(rank)
        if undone_s is not None:
            undo = self._mend if fault.action == "cut" else self._continue
            self._due.append((undone_s, lambda: undo(rank)))
        if fault.returns:
            self._due.append((now_s + 1.5, lambda: self._start_newcomer(rank, place)))

    def _mend(self, rank: int) -> None:
        assert self._emulation is not None
        self._emulation.set_link(rank, up=True)
        self._cut.discard(rank)

    def _continue(self, rank: int) -> None:
        self.players[rank].process.send_signal(signal.SIGCONT)

    def _start_newcomer(self, rank: int, place: tuple[str, int]) -> None:
        self._newcomers.append(self._start(rank, place, returned=True))

    def _start_store(self) -> Player:
        address, namespace = LOOPBACK, None
        if self._emulation is not None:
            address = self._emulation.store_address
            inside = self._emulation.placement(0).namespace
            assert inside is not None
            name = EmulationName.parse(inside.name)
            assert name is not None
            namespace = str(inside.with_name(name.hub))
        journal = self._directory / "store.jsonl"
        arguments = {"journal": str(journal), "address": address, "namespace": namespace}
        return self._fork(self.cell.ranks, serve, arguments, {}, "store")

    def _wait_for_store(self) -> tuple[str, int]:
        deadline_s = time.monotonic() + START_S
        while (entry := self._store.first("listens")) is None:
            assert time.monotonic() < deadline_s, "the store did not start"
            assert self._store.ended_s is None, os.read(self._results[0], 1 << 16).decode()
            self._never.wait(LOOK_S)
            self._store.look()
        address = LOOPBACK if self._emulation is None else self._emulation.store_address
        return address, entry["port"]

    def _start(self, rank: int, place: tuple[str, int], *, returned: bool = False) -> Player:
        address, port = place
        name = f"rank-{rank}-returned" if returned else f"rank-{rank}"
        arguments = {
            "cell": self.cell,
            "drawn": self.drawn,
            "journal": str(self._directory / f"{name}.jsonl"),
            "disk": str(self._disks[rank]),
            "namespace": self._namespace(rank),
            "returned": returned,
        }
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.cell.ranks),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            SECRET_VARIABLE: "the secret of this cell alone",
            SILENCE_VARIABLE: f"{self.cell.limit_s:g}",
            "OFFBEAT_INTERFACE": LOOPBACK,
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        }
        if self._emulation is not None:
            environment |= self._emulation.placement(rank).environment
        if returned:
            environment[RETURN_VARIABLE] = "1"
        return self._fork(rank, train, arguments, environment, name)

    def _fork(
        self,
        rank: int,
        function: Any,
        arguments: dict[str, Any],
        environment: Mapping[str, str],
        name: str,
    ) -> Player:
        reading, writing = os.pipe()
        self._results.append(reading)
        orders = Orders(
            rank=rank,
            world_size=self.cell.ranks,
            store_port=0,
            result_fd=writing,
            limit_s=300.0,
            job=references.dumps({"function": function, "arguments": arguments}),
        )
        log = self._directory / f"{name}.log"
        known = ("PATH", "HOME", "TMPDIR")
        inherited = {key: os.environ[key] for key in known if key in os.environ}
        paths = os.pathsep.join(filter(None, sys.path))
        try:
            process = self._templates.fork(
                orders,
                {**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **environment},
                log,
            )
        finally:
            os.close(writing)
        return Player(
            rank=rank, process=process, journal=self._directory / f"{name}.jsonl", log=log
        )

    def _namespace(self, rank: int) -> str | None:
        if self._emulation is None:
            return None
        return str(self._emulation.placement(rank).namespace)


def _longest_stall_s(player: Player, fault_s: float) -> float:
    """By how much the longest step that ended after the fault exceeds a usual one."""
    times_s = player.times_s("step")
    pairs = pairwise(times_s)
    late_s = [after - before - STEP_S for before, after in pairs if after > fault_s]
    return max(late_s, default=0.0)


def _is_small(cell: Cell, rank: int) -> bool:
    return FAULTS[cell.fault].action == "fill disk" and rank in cell.drawn().hit


@contextmanager
def _disk(path: Path, *, small: bool) -> Iterator[Path]:
    """A directory; if `small` a file system of its own, which can be filled."""
    path.mkdir()
    if not small:
        yield path
        return
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "offbeat-chaos", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True, capture_output=True)


def _shared_memory() -> set[str]:
    place = Path("/dev/shm")
    return {path.name for path in place.iterdir()} if place.is_dir() else set()


def _ranks(ranks: Any) -> str:
    numbers = sorted(ranks)
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _kinds(raised: Mapping[int, Mapping[str, Any]]) -> str:
    return ", ".join(sorted({entry["kind"] for entry in raised.values()}))
