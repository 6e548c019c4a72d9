"""Where the leader averages alone, models are kept in a comparison and measured at the end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offbeat.lab.measuring import evaluate, hand_over, keeps_models, mean_of, measure_kept
from offbeat.lab.records import Evaluation


class Recorder:
    """Stamps evaluations with the step, and shows those that were written."""

    def __init__(self) -> None:
        self.step = 0
        self.written: list[Evaluation] = []

    def evaluation(self, metric: float, others: dict[str, float]) -> Evaluation:
        return Evaluation(
            step=self.step, seconds=1.0, bytes_sent=0, metric=metric, at_s=0.0, others=others
        )

    def write_evaluation(self, evaluation: Evaluation) -> None:
        self.written.append(evaluation)

    def restart_clock(self) -> None: ...


class Sum:
    """A task whose metric is the sum of the first layer's weights."""

    metric_name = "sum"

    def metrics(self, model: torch.nn.Module) -> dict[str, float]:
        (weights, *_) = model.parameters()
        return {"sum": float(weights.detach().sum()), "also": 1.0}


def rank_of(rank: int, directory: Path) -> Any:
    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(10.0 * rank)
    return SimpleNamespace(
        attached=SimpleNamespace(model=model, session=SimpleNamespace(averages_alone=True)),
        coordinator=SimpleNamespace(rank=rank, leader=0, world_size=2),
        schedule=SimpleNamespace(position=SimpleNamespace(step=0)),
        record=SimpleNamespace(path=directory),
        task=Sum(),
        keeps_models=True,
        kept=[],
    )


def train_and_keep(run: Any, recorder: Recorder, *, steps: int) -> None:
    """Each step adds 1 to each of two weights, and is measured."""
    for step in range(1, steps + 1):
        with torch.no_grad():
            run.attached.model.weight.add_(1.0)
        recorder.step = run.schedule.position.step = step
        evaluate(run, recorder)  # type: ignore[arg-type]


def test_what_is_measured_is_the_mean_after_as_many_steps_of_each_rank(tmp_path: Path) -> None:
    """And not the mean at that time: the first rank has made all of its steps before the other
    one's first.
    """
    runs, recorders = [rank_of(rank, tmp_path) for rank in (0, 1)], [Recorder(), Recorder()]
    for run, recorder in zip(runs, recorders, strict=True):
        train_and_keep(run, recorder, steps=3)
        hand_over(run)

    measure_kept(runs[0], recorders[0], torch.nn.Linear(2, 1))  # type: ignore[arg-type]

    found = [(one.step, one.metric, one.others, one.without) for one in recorders[0].written]
    assert found == [(step, 2 * (5.0 + step), {"also": 1.0}, []) for step in (1, 2, 3)]
    assert recorders[1].written == []
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_has_handed_over_nothing_is_said_to_be_missing(tmp_path: Path) -> None:
    run, recorder = rank_of(0, tmp_path), Recorder()
    train_and_keep(run, recorder, steps=1)
    hand_over(run)

    measure_kept(run, recorder, torch.nn.Linear(2, 1))  # type: ignore[arg-type]

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
