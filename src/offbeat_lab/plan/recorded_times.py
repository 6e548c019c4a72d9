"""Stragglers from a record: how the computing times of a run differ from its median.

    of each rank and step    compute_s / median over all ranks and steps
    for each planned step    a step of the record, drawn from (seed, step), for every R workers, who
                             take as long as the record's R ranks took in it

So what ranks share stays shared: one that is always slow, and steps in which several are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ConfigError
from offbeat_lab.breakdown import read_steps
from offbeat_lab.comparison import is_comparison
from offbeat_lab.records import Record

_FEWEST_STEPS: Final = 10


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RecordedTimes:
    """Computing times of a run.

    Attributes:
        relative: to their median, shape (steps, ranks).
    """

    relative: NDArray[np.float64]

    def drawn(self, seed: int, step: int, workers: int) -> NDArray[np.float64]:
        """What computing takes each worker in a step, over what is usual, shape (workers,).

        Args:
            seed: of the cluster.
            step: of the run that is planned, >= 0.
            workers: how many, >= 1.
        """
        num_steps, num_ranks = self.relative.shape
        # The 2 keeps these draws apart from those of delays, which have a 1 there.
        draws = np.random.default_rng((seed, 0, 2, step))
        rows = draws.integers(num_steps, size=-(-workers // num_ranks))
        drawn: NDArray[np.float64] = self.relative[rows].ravel()[:workers]
        return drawn


@lru_cache(maxsize=1)
def recorded_times(directory: str) -> RecordedTimes:
    """The times of the run that is recorded in `directory`, without its first steps.

    Raises:
        RecordError: there is no record, or it is damaged.
        ConfigError: it is a comparison's, its batches differ in size, or it is too short.
    """
    path = Path(directory)
    if is_comparison(path):
        raise ConfigError(
            f"straggling_record {directory} is a comparison; name one of the runs in it, such as"
            f" {path / 'runs'}/alone-seed-0"
        )
    steps = read_steps(Record(path)).settled()
    if steps.merged.size:
        raise ConfigError(
            f"straggling_record {directory} is of a run whose workers claimed batches of different"
            " sizes; name one whose batches are equal"
        )
    whole = steps.compute_s[:, steps.done.all(axis=0)].T
    if len(whole) < _FEWEST_STEPS or not np.median(whole) > 0:
        raise ConfigError(
            f"straggling_record {directory} has {len(whole)} steps that all ranks did after the"
            f" first ones; needed are {_FEWEST_STEPS} or more in which they computed"
        )
    return RecordedTimes(relative=whole / np.median(whole))
