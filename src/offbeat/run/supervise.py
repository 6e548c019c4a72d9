"""`offbeat run` on one host: starts the workers, and stays until the last of them has ended.

Where the strategy goes on without a worker, the others do, and a dead one is started again as often
as `restarts` allows. Elsewhere one death ends all, and all are started anew from whatever
checkpoint the script itself writes, as torchrun does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from offbeat.run.config import RunConfig
from offbeat.run.hosts import OwnHost
from offbeat.run.interrupts import interrupts
from offbeat.run.local_worker import WorkerProcess, WorkerProgram, WorkerStart, start_process
from offbeat.run.progress import Listener, NoticeListener, ignore_notice
from offbeat.run.recipes import SCRIPT_STRATEGIES
from offbeat.run.records import Summary, add_to_summary, begin_attempt, create, lock
from offbeat.run.supervisor import WorkerGroup

SCRIPT_WORKER = "offbeat.run.worker"


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
    host: OwnHost | None = None,
    on_progress: Listener,
    on_notice: NoticeListener = ignore_notice,
    say: Callable[[str], None],
) -> ScriptOutcome:
    """Run the script of `config` on workers of this host.

    Args:
        config: from `script_config`.
        out: directory of the record; None: the next free one below runs/.
        restarts: how often workers are started again, >= 0.
        start: as in `WorkerProgram`.
        host: this one's share of a run on several hosts.
        on_progress: hears of workers that die and come back.
        on_notice: is called with each notice that there is before the first step of an attempt.
        say: for what else the user should know meanwhile.

    Raises:
        RecordError: `out` is in use.
    """
    directory = create(out, config)
    num_here = config.workers if host is None else host.share.num_workers
    survives_death = SCRIPT_STRATEGIES[config.strategy].survives_death
    with lock(directory):
        attempt = 0
        while True:
            begin_attempt(directory, config, start_step=0)
            group = WorkerGroup(
                directory,
                config,
                survives_death=survives_death,
                program=script_program(
                    num_here,
                    start=start,
                    attempt=attempt,
                    shown=(0,),
                    environment={} if host is None else host.environment,
                ),
                restarts=restarts,
                share=None if host is None else host.share,
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
            if not restarts or interrupted.count or group.survives_death or host is not None:
                break
            restarts -= 1
            attempt += 1
            say(f"{problem}; all workers are started again ({restarts} restarts left)")
    if interrupted.count:
        return ScriptOutcome(
            directory=directory,
            status=128 + interrupted.number,
            problem="interrupted",
            summary=None,
        )
    code = worker.process.wait()
    status = code if code > 0 else 128 - code
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
        module, start, shown: as in `WorkerProgram`.
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
