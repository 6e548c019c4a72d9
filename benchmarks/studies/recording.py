"""What writing a record costs: training steps of gTop-k with an event written for each, against the
same steps less the time that went into the event. It is spent in the training thread, so it adds to
the step.

python benchmarks/studies/recording.py [--json]
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

import _benchmarks  # noqa: F401
import offbeat
from _measure import Ratio, main, ratio
from _ranks import run_ranks
from offbeat.run import records
from offbeat.run.step_recorder import RankRun, StepRecorder
from offbeat_lab.attaching import TaskModel
from offbeat_lab.config import Request, recipe_of, resolve, task_of

WORLD_SIZE = 2
NUM_STEPS = 1_000
BLOCK = 50
GOAL = 1.01
SIZES = {"tiny": 32, "small": 32}
"""Model size of the digits task: samples in a batch."""


def pairs(rank: int, world_size: int, size: str) -> list[tuple[float, float]]:
    """(with its record, without) seconds of the same steps, in blocks, since several events are
    written at once.
    """
    settings = (f"size={size}", f"batch_size={SIZES[size]}")
    config = resolve(
        Request(
            task="digits",
            strategy="gtopk",
            settings=(*settings, "collective=reduce_scatter"),
            workers=1,
        )
    )
    task = task_of(config)
    model = task.build_model(0)
    optimizer = task.optimizer(model)
    batch = next(task.batches(seed=0, epoch=0, rank=rank, world_size=world_size))
    with (
        tempfile.TemporaryDirectory() as directory,
        offbeat.attach(model, optimizer, cast(Any, recipe_of(config))) as session,
    ):
        path = records.create(Path(directory) / "run", config)
        records.begin_attempt(path, config, start_step=0)
        attached = TaskModel(model=model, module=model, optimizer=optimizer, session=session)
        schedule = SimpleNamespace(position=SimpleNamespace(step=0), target=10 * NUM_STEPS)
        run = RankRun(
            record=records.RunDirectory(path),
            coordinator=cast(Any, SimpleNamespace(rank=rank, restart=0)),
            attached=attached,
            schedule=cast(Any, schedule),
        )
        recorder = StepRecorder(run, lambda report: None)

        measured = []
        for _ in range(NUM_STEPS + 10):
            begin_s = time.perf_counter()
            loss = task.loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.position.step += 1
            value = loss.item()
            trained_s = time.perf_counter()
            recorder.step_done(loss=value, batch_size=len(batch[0]))
            recorded_s = time.perf_counter()
            measured.append((recorded_s - begin_s, trained_s - begin_s))
        recorder.close()
    blocks = np.array(measured[10:]).reshape(-1, BLOCK, 2).sum(axis=1)
    return [(with_s, without_s) for with_s, without_s in blocks.tolist()]


def cases(size: str) -> list[Ratio]:
    torch.set_num_threads(1)
    return [
        ratio(
            f"a step with its record against one without, digits {size}, {WORLD_SIZE} workers",
            run_ranks(pairs, WORLD_SIZE, size),
            at_most=GOAL,
            bound=1.0,
        )
    ]


if __name__ == "__main__":
    main({size: partial(cases, size) for size in SIZES})
