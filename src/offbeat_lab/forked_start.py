"""Workers that are forked from one process which has imported torch: they begin at once, where a
fresh interpreter takes seconds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from offbeat.run.local_worker import WorkerProcess, WorkerProgram, WorkerStart, start_process
from offbeat_lab.forked_workers import WORKER_FORKS
from offbeat_lab.forking import ForkServerError


def forking(imports: Sequence[str] = ()) -> Callable[[WorkerStart], WorkerProcess]:
    """Starts workers by forking, or as fresh interpreters where that cannot be done. Both behave
    alike, but what a forked worker sets before it imports torch it sets too late.

    Args:
        imports: what the process from which workers are forked imports for all of them.
    """

    def start(wanted: WorkerStart) -> WorkerProcess:
        output = sys.stdout.fileno() if wanted.log is None else wanted.log.fileno()
        try:
            return WORKER_FORKS.fork(
                [wanted.module, *wanted.arguments],
                environment=wanted.environment,
                stdin=wanted.stdin,
                output=output,
                pipe=wanted.pipe,
                namespace=wanted.placement.namespace,
                imports=imports,
            )
        except ForkServerError as error:
            with suppress(OSError):  # a full disk takes no log
                os.write(output, f"not forked: {error}\n".encode())
        return start_process(wanted)

    return start


TASK_WORKER: Final = WorkerProgram(module="offbeat_lab.worker", start=forking())
"""Trains one of the lab's tasks."""
