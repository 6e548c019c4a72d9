"""Every task and every strategy, planned, trained and measured as in a comparison: by turns, and
each rank keeps its model where the leader averages alone. One rank, in this process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from lab_support.data import write_rows
from offbeat.errors import ConfigError, UnsupportedError
from offbeat.run.coordination import Coordinator
from offbeat.run.records import begin_attempt, create
from offbeat.strategies.by_name import strategy_values
from offbeat.strategies.registry import ALONE
from offbeat_lab.cluster import Cluster
from offbeat_lab.compare import CompareRequest, plan_comparison
from offbeat_lab.options import RECIPES, build_strategy
from offbeat_lab.pauses import StepLimit
from offbeat_lab.records import Record
from offbeat_lab.tasks import TASKS
from offbeat_lab.training import train_rank

STEPS = 2
SMALL = {
    "digits": ["hidden=8", "batch_size=4"],
    "images": ["width=4", "batch_size=4"],
    "mnist": ["hidden=8", "batch_size=4"],
    "text": ["max_bytes=65536", "window=8", "batch_size=4"],
    "charlm": ["max_bytes=65536", "window=8", "batch_size=4"],
    "sequences": ["max_bytes=65536", "longest=32", "batch_size=4"],
    "xmc": ["hidden=4", "batch_size=4"],
}
KFAC = ("dkfac", "mpdkfac", "spdkfac", "dpkfac")


def refusal(task: str, strategy: str) -> str | None:
    """What the error says where this strategy cannot train this task; None where it can."""
    if task == "xmc" and strategy in KFAC:
        return "finds no layer that it can precondition"
    if task == "xmc" and strategy == "dear":
        return "is not known to step with each element by itself"
    if strategy in ("onebitadam", "zerooneadam") and task in ("digits", "images", "mnist", "xmc"):
        return "freezes the second moments of torch.optim.Adam"
    return None


ALIKE = (("digits", "images", "mnist"), ("text", "charlm", "sequences"), ("xmc",))
"""Tasks with networks, data and optimizers of one kind. Each strategy trains one of one kind, the
next strategy one of the next; tests/conformance/ has each with all kinds of gradients.
"""


def pairs() -> Iterator[tuple[str, str]]:
    for number, strategy in enumerate(name for name in RECIPES if name != ALONE):
        kind = ALIKE[number % len(ALIKE)]
        task = kind[number // len(ALIKE) % len(kind)]
        yield task, strategy
        if refusal(task, strategy) is not None:
            yield "text", strategy  # which all of them train
    yield from (("xmc", "dkfac"), ("xmc", "dear"), ("mnist", "onebitadam"))


PAIRS = sorted(set(pairs()))
assert {task for task, _ in PAIRS} == set(TASKS)


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """A process group, which torch's own strategies look for."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:Grad strides do not match:UserWarning")  # torch's DDP
@pytest.mark.parametrize(("task", "strategy"), PAIRS)
def test_a_strategy_trains_a_task_and_is_measured(
    task: str, strategy: str, npz: Path, tmp_path: Path
) -> None:
    data = {}
    if task in ("images", "mnist"):
        data = {"path": str(npz)}
    elif task == "xmc":
        data = write_rows(tmp_path, num_train=40, num_test=10)
    shares_samples = "mega_batch" in strategy_values(build_strategy(strategy, {}))
    request = CompareRequest(
        task=task,
        strategies=[strategy + (":mega_batch=4" if shares_samples else "")],
        settings=[*SMALL[task], *(f"{name}={value}" for name, value in data.items())],
        cluster=Cluster(workers=1),
        emulation="none",
        seeds=(0,),
        steps=STEPS,
        eval_every=1,
    )
    refused = refusal(task, strategy)
    if refused is not None:
        with pytest.raises((ConfigError, UnsupportedError), match=refused):
            compare(request, tmp_path / "run")
        return
    record = compare(request, tmp_path / "run")
    summary = record.summary()
    assert summary is not None
    assert summary.status == "finished"
    assert summary.steps >= STEPS  # the first merge may come later
    measured = list(record.evaluations())
    assert {0, summary.steps} <= {evaluation.step for evaluation in measured}
    assert all(math.isfinite(evaluation.metric) for evaluation in measured)


def compare(request: CompareRequest, path: Path) -> Record:
    """The record of the only run of a comparison."""
    (config,) = plan_comparison(request).configs
    create(path, config)
    begin_attempt(path, config, start_step=0)
    coordinator = Coordinator(dist.HashStore(), 0, 1, supervised=True)
    train_rank(path, coordinator, lambda report: None, limit=StepLimit(100 * STEPS))
    return Record(path)
