"""A run whose workers claim what they claimed in another one: whether it can be, and what they are
to claim.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from offbeat.errors import ConfigError, RecordError
from offbeat.megabatch.loader import Recording
from offbeat.run.config import RunConfig
from offbeat.run.records import Record
from offbeat.run.step_recorder import Position
from offbeat_lab.config import recipe_of, task_of
from offbeat_lab.schedule import claimed_schedule
from offbeat_lab.tasks import Task

_ALIKE = ("task", "task_options", "strategy", "strategy_options", "workers", "seed")


def check_replay(config: RunConfig, path: Path) -> None:
    """Raise `ConfigError` unless the run in `path` can be repeated as `config`, and `RecordError`
    if there is none.
    """
    mega_batch = recipe_of(config).samples_between_merges
    if mega_batch is None:
        raise ConfigError(
            f"{config.strategy} claims nothing, so there is nothing to replay; leave --replay out"
        )
    record = Record(path)
    for name in _ALIKE:
        asked, recorded = getattr(config, name), getattr(record.config, name)
        if asked != recorded:
            raise ConfigError(
                f"--replay {path}: its {name.replace('_', ' ')} was {recorded}, here it is {asked};"
                " use the same"
            )
    done = record.mega_batches()
    if [each.number for each in done] != list(range(1, len(done) + 1)):
        raise RecordError(
            f"{path} lacks mega-batches, so it cannot be replayed; record another run"
        )
    target = claimed_schedule(
        config, task_of(config), Position(), mega_batch, config.workers
    ).target
    last = done[-1].step if done else 0
    if last < target:
        raise ConfigError(
            f"--replay {path}: it has {last} steps, here there are {target}; do as many, or fewer"
        )


def recording_of(record: Record, task: Task) -> Recording:
    """What the workers of `record` claimed."""
    by_epoch: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for mega_batch in record.mega_batches():
        shares = mega_batch.by_rank
        claims = [[[list(span) for span in claim] for claim in share.claims] for share in shares]
        by_epoch[mega_batch.epoch].append(
            {"batch_sizes": [share.batch_size for share in shares], "claims": claims}
        )
    places = {
        f"{epoch}/{place}": found
        for epoch, those in by_epoch.items()
        for place, found in enumerate(those)
    }
    config = record.config
    return Recording(
        num_samples=task.num_samples,
        seed=config.seed,
        world_size=config.workers,
        mega_batches=places,
    )
