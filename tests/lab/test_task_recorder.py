"""Where the leader averages alone, ranks keep their models, and it measures what all have kept."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from offbeat.run.coordination import Coordinator, record_death
from offbeat.run.records import Evaluation
from offbeat_lab.task_recorder import (
    evaluate,
    keeps_models,
    mean_of,
    measure_complete,
    measure_rest,
)


class Recorder:
    """Stamps evaluations with the step, of which each took `step_s`, and shows those that were
    written.
    """

    def __init__(self, step_s: float = 1.0) -> None:
        self.step = 0
        self.step_s = step_s
        self.written: list[Evaluation] = []
        self.told: list[dict[str, float]] = []

    def evaluation(self, metric: float, others: dict[str, float]) -> Evaluation:
        return Evaluation(
            step=self.step,
            seconds=self.step * self.step_s,
            bytes_sent=0,
            metric=metric,
            at_s=0.0,
            others=others,
        )

    def write_evaluation(self, evaluation: Evaluation) -> None:
        self.written.append(evaluation)

    def restart_clock(self) -> None: ...

    def logged(self, values: dict[str, float]) -> None:
        self.told.append(values)


class Sum:
    """A task whose metric is the sum of the first layer's weights."""

    metric_name = "sum"

    def metrics(self, model: torch.nn.Module) -> dict[str, float]:
        (weights, *_) = model.parameters()
        return {"sum": float(weights.detach().sum()), "also": 1.0}


@pytest.fixture
def store() -> Any:
    return dist.HashStore()


def rank_of(rank: int, directory: Path, store: Any) -> Any:
    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(10.0 * rank)
    return SimpleNamespace(
        attached=SimpleNamespace(
            model=model,
            session=SimpleNamespace(averages_alone=True, resting=nullcontext),
        ),
        coordinator=Coordinator(store, rank, 2, supervised=True),
        schedule=SimpleNamespace(position=SimpleNamespace(step=0)),
        record=SimpleNamespace(path=directory, attempts=[None]),
        task=Sum(),
        keeps_models=True,
        kept=[],
    )


def train(run: Any, recorder: Any, *, steps: int) -> None:
    """Each step adds 1 to each of two weights, and is measured."""
    for _ in range(steps):
        with torch.no_grad():
            run.attached.model.weight.add_(1.0)
        recorder.step = run.schedule.position.step = recorder.step + 1
        evaluate(run, recorder)


def measured(recorder: Any) -> list[tuple[int, float, float]]:
    return [(one.step, one.metric, one.seconds) for one in recorder.written]


def test_what_is_measured_is_the_mean_after_as_many_steps_of_each_rank(
    tmp_path: Path, store: Any
) -> None:
    """And not the mean at that time: the first rank has made all of its steps before the other
    one's first. The time is that of the slower one.
    """
    runs = [rank_of(rank, tmp_path, store) for rank in (0, 1)]
    recorders: list[Any] = [Recorder(1.0), Recorder(3.0)]
    for run, recorder in zip(runs, recorders, strict=True):
        train(run, recorder, steps=3)

    measure_rest(runs[0], recorders[0])

    assert measured(recorders[0]) == [(n, 2 * (5.0 + n), 3.0 * n) for n in (1, 2, 3)]
    assert [(one.others, one.without) for one in recorders[0].written] == [({"also": 1.0}, [])] * 3
    assert [one["sum"] for one in recorders[0].told] == [12.0, 14.0, 16.0]
    assert recorders[1].written == []
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_watched_is_measured_as_soon_as_all_ranks_have_come(
    tmp_path: Path, store: Any
) -> None:
    runs = [rank_of(rank, tmp_path, store) for rank in (0, 1)]
    recorders: list[Any] = [Recorder(), Recorder()]
    train(runs[0], recorders[0], steps=3)
    train(runs[1], recorders[1], steps=2)
    for run, recorder in reversed(list(zip(runs, recorders, strict=True))):
        measure_complete(run, recorder)
    assert measured(recorders[0]) == [(n, 2 * (5.0 + n), n) for n in (1, 2)]
    assert recorders[1].written == []

    train(runs[1], recorders[1], steps=1)
    measure_rest(runs[0], recorders[0])
    assert [one.step for one in recorders[0].written] == [1, 2, 3]


def test_what_a_leader_that_has_died_had_measured_is_not_measured_again(
    tmp_path: Path, store: Any
) -> None:
    runs = [rank_of(rank, tmp_path, store) for rank in (0, 1)]
    recorders: list[Any] = [Recorder(), Recorder()]
    for run, recorder in zip(runs, recorders, strict=True):
        train(run, recorder, steps=2)
    measure_complete(runs[0], recorders[0])
    record_death(store, 0, deaths=1)
    train(runs[1], recorders[1], steps=1)

    measure_complete(runs[1], recorders[1])

    # What the dead rank did not come to is the survivor's alone.
    assert [(one.step, one.metric, one.without) for one in recorders[1].written] == [(3, 26.0, [])]


def test_a_living_rank_that_has_kept_nothing_is_said_to_be_missing(
    tmp_path: Path, store: Any
) -> None:
    run = rank_of(0, tmp_path, store)
    recorder: Any = Recorder()
    train(run, recorder, steps=1)
    measure_complete(run, recorder)
    assert recorder.written == []

    measure_rest(run, recorder)

    assert [(one.metric, one.without) for one in recorder.written] == [(2.0, [1])]


def test_counters_are_maxima() -> None:
    states = [{"mean": torch.tensor([float(n)]), "count": torch.tensor(n)} for n in (1, 3)]
    found = mean_of(states)
    assert found["mean"].tolist() == [2.0]
    assert found["count"].item() == 3


@pytest.mark.parametrize(
    ("num_parameters", "steps", "eval_every", "kept"),
    [
        (1_000_000, 140, 5, True),
        (25_000_000, 140, 5, False),
        (25_000_000, 140, 70, True),
        (1000, 140, None, False),
    ],
)
def test_models_are_kept_where_they_are_small_or_few(
    num_parameters: int, steps: int, eval_every: int | None, kept: bool
) -> None:
    assert keeps_models(num_parameters, steps, eval_every) == kept
