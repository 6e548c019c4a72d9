"""A record whose ranks nobody supervises: rank 0 makes the directory, and the others find it."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from offbeat.errors import OffbeatError, RecordError
from offbeat.run.config import RunConfig
from offbeat.run.recording import OpenRecord
from offbeat.run.records import Record, begin_attempt, create
from offbeat.run.rendezvous import group_coordinator

LOGGER = logging.getLogger("offbeat")


def shared_record(config: RunConfig, out: Path | None) -> OpenRecord | None:
    """The record of a run whose ranks meet through torch.distributed. Collective.

    Args:
        config: of the run; the number of workers is the group's.
        out: its directory; None: the next free one below runs/.

    Returns:
        None on a host that does not see the directory: its ranks are not recorded.

    Raises:
        RecordError: rank 0 cannot write there; on every rank.
    """
    coordinator = group_coordinator()
    problem, directory = "", Path()
    if coordinator.rank == 0:
        config = replace(config, workers=coordinator.world_size)
        try:
            directory = create(out, config).resolve()
            begin_attempt(directory, config, start_step=0)
        except (OffbeatError, OSError) as error:  # told to all ranks, or they would wait for ever
            problem = str(error)
    problem = coordinator.all_gather("problem", problem)[0]
    directory = Path(coordinator.all_gather("directory", str(directory))[0])
    if problem:
        raise RecordError(problem)
    if not (directory / "config.json").exists():
        LOGGER.warning(
            "rank %d does not see %s, so it is not recorded; give an --out on a file system that"
            " all hosts share",
            coordinator.rank,
            directory,
        )
        return None
    return OpenRecord(record=Record(directory), coordinator=coordinator)
