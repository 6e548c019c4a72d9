"""Relatives are raced at the learning rates that the page shows."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

import parity
import relatives
from _measure import figure_of
from _paired import Runs
from _results import DIRECTORY, ResultFile
from relatives import BASELINE, RELATIVES, rates_in_race


@pytest.mark.parametrize("task", ["images", "text"])
def test_a_race_is_run_at_the_rates_of_the_table_of_metrics(task: str) -> None:
    kept = ResultFile(DIRECTORY / "relatives.jsonl")
    shown = {
        result.figure.case: result.figure.value
        for result in kept.results
        if (result.figure.table, result.figure.column) == (task, "learning rate")
    }
    asked = Namespace(images=Path("photos.npz"), text=Path("text.txt"), mnist=None)
    (case,) = (case for case in parity.cases_of(asked) if case.name == task)

    found = rates_in_race(case, (BASELINE, *RELATIVES), Runs(kept, 0.0))

    rates = {one.label: lr for one, lr in found}
    assert BASELINE.label in rates
    assert rates == {label: shown[label] for label in rates}


def test_what_has_no_goal_has_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relatives, "predict_step", lambda *_: Namespace(step_s=1.0))

    rows = [figure_of(row) for row in relatives.dear_over_ddp(Namespace(), Path())]

    assert [(row.goal, row.holds) for row in rows] == [("", None), ("at least 1", True), ("", None)]
