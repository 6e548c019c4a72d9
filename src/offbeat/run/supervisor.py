"""Local workers: started, watched and ended together.

Each worker is a process in a session of its own, so that Ctrl-C reaches only the supervisor, which
decides what follows. A worker learns of the supervisor's end when its standard input is closed.
Where a strategy does not survive the death of a worker, one death ends all workers, and the error
names the worker that died first rather than those that noticed it. Where it does, a death after
training has begun is recorded in the store at once, so that the peers hear of it, and the run is
finished when one worker has finished.
"""

from __future__ import annotations

import math
import secrets
import selectors
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from offbeat.run.config import RunConfig
from offbeat.run.coordination import (
    ON_LOOPBACK,
    RunStore,
    only_returned_ranks_step,
    publish_step,
    record_death,
    serve_store,
    store_environment,
)
from offbeat.run.interrupts import Interrupts
from offbeat.run.local_worker import (
    LocalWorker,
    Placement,
    WorkerProgram,
    cause_of_end,
    description_of_end,
    start_worker,
)
from offbeat.run.progress import (
    ELAPSED_VARIABLE,
    Failure,
    Joined,
    Listener,
    MembershipChange,
    NoticeListener,
    Paused,
    Remark,
    WorkerProgress,
)
from offbeat.run.records import WorkerLoss, last_step
from offbeat.transport.connect import RETURN_VARIABLE, SECRET_VARIABLE

_POLL_S = 0.1
_LAST_REPORTS_S = 2.0  # after a death, how long its peers may take to report what they saw
_STOP_S = 60.0  # after a request to stop, how long a step and a checkpoint may take
# Where workers survive each other: once one has ended, how long the rest may take, since they may
# hang or have come back too late.
_END_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class HostShare:
    """The workers that one host has of a run that has more.

    Attributes:
        first_rank, num_workers: of those here.
        num_of_all_hosts: workers of the run.
        store: of the run.
        secret: the run's.
        environment: variables of the workers here.
    """

    first_rank: int
    num_workers: int
    num_of_all_hosts: int
    store: RunStore
    secret: str
    environment: Mapping[str, str]


class WorkerGroup:
    """The workers of one run. A context manager: none of them is left when it ends.

    Args:
        run_directory: a record with a config.json; workers write beside it.
        config: what it says.
        program: what workers run.
        restarts: how many times workers that die are started again, where their peers go on.
        share: which of the run's workers are here; None: all of them.
        on_progress: called for each report of a worker, and when one dies or comes back.
        on_notice: called with each notice that there is before the first step.

    Attributes:
        remarks: what else there is to say of workers.
        losses: workers that died while their peers went on, in order.
        restarts: how many are left.
    """

    def __init__(
        self,
        run_directory: Path,
        config: RunConfig,
        *,
        program: WorkerProgram,
        restarts: int = 0,
        share: HostShare | None = None,
        on_progress: Listener,
        on_notice: NoticeListener = lambda notice: None,
    ) -> None:
        self.run_directory = run_directory
        self._share = share
        self._first_rank = 0 if share is None else share.first_rank
        self._program = program
        self.restarts = restarts
        self.remarks: list[str] = []
        self.losses: list[WorkerLoss] = []
        self._config = config
        self._on_progress, self._on_notice = on_progress, on_notice
        self._workers: list[LocalWorker] = []
        self._selector = selectors.DefaultSelector()
        self._died: list[int] = []
        self._ended_by_us: set[int] = set()
        self._num_interrupts = 0
        self._stop_signal: int = signal.SIGTERM
        self._secret = secrets.token_hex(32) if share is None else share.secret
        self._stop_deadline_s = self._fail_deadline_s = self._end_deadline_s = math.inf
        self._only_returned_since_s: float | None = None

    def __enter__(self) -> Self:
        share = self._share
        self._store = self._serve_store() if share is None else share.store
        num_here = self._config.workers if share is None else share.num_workers
        try:
            for rank in range(self._first_rank, self._first_rank + num_here):
                worker = self._start(rank)
                self._workers.append(worker)
                self._watch(worker)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    @property
    def has_ended(self) -> bool:
        """Whether every worker has ended and everything it wrote has been read."""
        return not self._selector.get_map() and not any(worker.alive for worker in self._workers)

    @property
    def seconds(self) -> float:
        """Training time of the worker that has trained longest."""
        return max((worker.seconds for worker in self._workers), default=0.0)

    def poll(self, timeout_s: float) -> None:
        """Pass reports on for up to `timeout_s`, and do what is due: a stop, the end after a
        death.
        """
        for key, _ in self._selector.select(timeout_s):
            if not self._read(key.data):
                self._selector.unregister(key.fileobj)
        for worker in self._workers:
            if not worker.alive:  # a process that it has started may hold its pipe open for ever
                self._drain(worker)
        self._act()

    def run_to_end(self, interrupted: Interrupts) -> None:
        """Poll until all workers have ended, and pass on to them what `interrupted` counts."""
        told = 0
        while not self.has_ended:
            while told < interrupted.count:
                self.interrupt(interrupted.number)
                told += 1
            self.poll(_POLL_S)

    @property
    def peers_go_on(self) -> bool:
        """Whether its peers go on when a worker dies."""
        return any(worker.survives_death for worker in self._workers)

    def interrupt(self, number: int = signal.SIGTERM) -> None:
        """Ask the workers to write a checkpoint and stop, by the signal `number`; asked again, end
        them.
        """
        self._num_interrupts += 1
        self._stop_signal = number

    def root_cause(self) -> LocalWorker | None:
        """The worker whose end ended the run; None if it has ended well. For when all have ended.

        Of several failures the first one is the cause, unless it is a worker that only reported a
        peer's failure, or one that this group has ended itself.
        """
        self._find_deaths()
        workers = self._workers
        well = [worker for worker in workers if worker.ended_well]
        if len(well) == len(workers) or (well and self.peers_go_on):
            return None
        return min(
            (worker for worker in workers if not worker.ended_well),
            key=lambda worker: (
                worker.rank in self._ended_by_us,
                worker.is_secondary_failure,
                self._died.index(worker.rank),
            ),
        )

    def describe(self, worker: LocalWorker) -> str:
        """How `worker` has ended the run."""
        leaver = self._first_to_leave
        if worker.rank in self._ended_by_us and leaver is not None and not self._num_interrupts:
            return (
                f"worker {leaver.rank} came to its end before its first step, and the others waited"
                " for it; every rank has to make its DistributedDataParallel model"
            )
        return description_of_end(
            self.run_directory,
            worker.rank,
            worker.process.pid,
            worker.process.wait(),
            worker.failure,
            is_shown=worker.rank in self._program.shown,
        )

    @property
    def _first_to_leave(self) -> LocalWorker | None:
        """One that has ended well without a step, where others may be waiting for it."""
        leavers = (
            worker
            for worker in self._workers
            if self._program.ends_alone
            and worker.ended_well
            and not last_step(self.run_directory, worker.rank)
        )
        return next(leavers, None)

    def _start(self, rank: int, *, restart: int = 0) -> LocalWorker:
        """Start the process of `rank`; `restart` counts those that have had this rank before and
        died.
        """
        environment = {"OMP_NUM_THREADS": "1", **ON_LOOPBACK, SECRET_VARIABLE: self._secret}
        local_rank = rank - self._first_rank
        if restart:
            environment |= {RETURN_VARIABLE: str(restart), ELAPSED_VARIABLE: repr(self.seconds)}
        environment |= store_environment(self._store, rank, self._config.workers)
        environment |= {"LOCAL_RANK": str(local_rank), **self._program.environment}
        return start_worker(
            rank,
            self.run_directory,
            self._placement(local_rank),
            environment,
            program=self._program,
            restart=restart,
            seconds=self.seconds,
        )

    def _watch(self, worker: LocalWorker) -> None:
        self._selector.register(worker.pipe, selectors.EVENT_READ, worker)

    def _serve_store(self) -> RunStore:
        """Where the run's store listens."""
        return serve_store()

    def _placement(self, local_rank: int) -> Placement:
        """Where a worker is to run."""
        return Placement()

    def _read(self, worker: LocalWorker) -> bool:
        """Take what `worker` has written; returns False at its end."""
        reports, more = worker.read()
        for report in reports:
            match report:
                case Failure():
                    worker.failure = report
                case Joined():
                    worker.joined = True
                    self._record_return(report)
                case Remark(text=text):
                    self._on_notice(text)
                case Paused():
                    worker.paused_at, worker.met_s = report.step, report.met_s
                    worker.seconds, worker.survives_death = report.seconds, report.survives_death
                case WorkerProgress():
                    worker.seconds, worker.survives_death = report.seconds, report.survives_death
                    if self._program.ends_alone and report.survives_death:
                        publish_step(self._store, report.rank, report.step)
                    self._on_progress(report)
        return more

    def _act(self) -> None:
        """After an interrupt, ask workers to stop; end them when one that they need has died, or
        when ending takes too long.
        """
        now_s = time.monotonic()
        alive = [worker for worker in self._workers if worker.alive]
        if self._num_interrupts and self._stop_deadline_s == math.inf:
            self._stop_deadline_s = now_s + _STOP_S
            for worker in alive:
                # It asks for a checkpoint.
                worker.ask_to_stop(signal.Signals(self._stop_signal))
                # One that the script has stopped could not hear it.
                worker.process.send_signal(signal.SIGCONT)
        self._find_deaths()
        if all(worker.death_recorded for worker in self._dead):
            self._fail_deadline_s = math.inf
        elif self._fail_deadline_s == math.inf:
            self._fail_deadline_s = now_s + _LAST_REPORTS_S
        if (
            self.peers_go_on
            and self._end_deadline_s == math.inf
            and any(worker.ended_well for worker in self._workers)
            and not (self._program.ends_alone and any(not worker.restart for worker in alive))
        ):
            self._end_deadline_s = now_s + (_LAST_REPORTS_S if self._program.ends_alone else _END_S)
        returned = [worker for worker in alive if worker.restart]
        if self._program.ends_alone and returned and self._only_returned_step(now_s):
            self._end(returned)
        if self._end_deadline_s == math.inf and alive and self._first_to_leave is not None:
            self._end_deadline_s = now_s + _END_S
        first_s = min(self._stop_deadline_s, self._fail_deadline_s, self._end_deadline_s)
        if self._num_interrupts > 1 or now_s > first_s:
            self._end(alive)

    def _end(self, workers: Sequence[LocalWorker]) -> None:
        self._ended_by_us |= {worker.rank for worker in workers}
        for worker in workers:
            worker.kill()

    def _only_returned_step(self, now_s: float) -> bool:
        """Whether all workers that never died have taken their last step, long enough ago for one
        that has come back to do so too. They wait for it until it is dead.
        """
        if self._only_returned_since_s is None and only_returned_ranks_step(
            self._store, self._config.workers
        ):
            self._only_returned_since_s = now_s
        since_s = self._only_returned_since_s
        return since_s is not None and now_s > since_s + _LAST_REPORTS_S

    @property
    def _dead(self) -> list[LocalWorker]:
        return [each for each in self._workers if not each.alive and not each.ended_well]

    def _find_deaths(self) -> None:
        """Look for them, and record them once it is known that the others go on: their reports may
        come later.
        """
        for worker in self._dead:
            if worker.rank not in self._died:
                self._died.append(worker.rank)
            if not self.peers_go_on:
                self._read_rest(worker)  # its own last report may say so
            if self.peers_go_on and not worker.death_recorded:
                worker.death_recorded = True
                self._record_death(worker)
                self._restart_dead(worker)

    def _record_death(self, worker: LocalWorker) -> None:
        """Tell the peers of `worker`, and the listener, that it has died."""
        # Peers must hear of the death before anything else here takes time: they wait for this rank
        # until they do.
        record_death(self._store, worker.rank, deaths=worker.restart + 1)
        self._drain(worker)
        if self._num_interrupts and (
            worker.rank in self._ended_by_us or worker.process.returncode == -signal.SIGTERM
        ):
            return  # it was asked to stop
        why = self._cause(worker)
        if self._program.ends_alone and worker.rank in self._ended_by_us:
            text = f"worker {worker.rank}, which had come back, was ended once the others were done"
            if self._only_returned_since_s is not None:
                waited_s = time.monotonic() - self._only_returned_since_s
                text += f"; at their end they had waited {waited_s:.1f} s for it"
            self.remarks.append(text)
        elif worker.joined:
            loss = WorkerLoss(
                rank=worker.rank,
                step=last_step(self.run_directory, worker.rank),
                seconds=self.seconds,
                cause=why,
                num_left=self._config.workers
                - len(self._workers)  # on other hosts, of whose deaths this one does not hear
                + sum(
                    other.joined and (other.alive or other.ended_well) for other in self._workers
                ),
                num_workers=self._config.workers,
            )
            self.losses.append(loss)
            text = loss.sentence()
        else:
            text = f"worker {worker.rank} was started again and could not join: {why}"
            self.remarks.append(text)
        self._on_progress(MembershipChange(rank=worker.rank, departed=True, text=text))

    def _record_return(self, report: Joined) -> None:
        rank, step = report.rank, report.step
        last = max(place for place, loss in enumerate(self.losses) if loss.rank == rank)
        self.losses[last] = replace(self.losses[last], returned_step=step, returned_s=self.seconds)
        text = f"worker {rank} is back: it goes on from step {step}"
        if report.counts_anew:
            text += (
                ", and its script counts from 0 again, with the learning rates, the data and the"
                " names of checkpoints of a beginning: it has not asked offbeat.step()"
            )
            self.remarks.append(text)
        self._on_progress(MembershipChange(rank=rank, departed=False, text=text))

    def _cause(self, worker: LocalWorker) -> str:
        if worker.rank in self._ended_by_us:
            return "it did not come to the end and was ended"
        return cause_of_end(worker.process.wait(), worker.failure)

    def _may_return(self, worker: LocalWorker) -> bool:
        """Whether a worker that has died may be started again."""
        return worker.joined and worker.rank not in self._ended_by_us

    def _restart_dead(self, old: LocalWorker) -> None:
        """Start the process of a worker that has just died again, as often as may be."""
        peers = self._share is not None or any(worker.alive for worker in self._workers)
        if not (self.restarts and self._may_return(old) and peers) or self._num_interrupts:
            return
        self.restarts -= 1
        self._start_again(old)

    def _start_again(self, old: LocalWorker) -> None:
        self._drain(old)
        old.close()
        worker = self._start(old.rank, restart=old.restart + 1)
        self._workers[old.rank - self._first_rank] = worker
        worker.survives_death = old.survives_death  # the others go on if it dies again
        self._watch(worker)

    def _read_rest(self, worker: LocalWorker) -> None:
        """Read what a dead process has written. One that it has started may hold the pipe open, so
        nothing is waited for.
        """
        if worker.pipe not in self._selector.get_map():
            return
        with selectors.DefaultSelector() as ready:
            ready.register(worker.pipe, selectors.EVENT_READ)
            while ready.select(0) and self._read(worker):
                pass

    def _drain(self, worker: LocalWorker) -> None:
        """`_read_rest` of a process that nobody listens to any more."""
        self._read_rest(worker)
        if worker.pipe in self._selector.get_map():
            self._selector.unregister(worker.pipe)

    def _close(self) -> None:
        # All are killed before one is waited for: a worker may wait for its peers until they die.
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.close()
        self._selector.close()
        del self._store
