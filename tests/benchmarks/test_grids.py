"""Benchmarks that may be stopped, and whose lines others read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import prediction
import run_deaths
import stragglers
from _results import Figure, Origin, ResultFile


def test_a_comparison_that_was_stopped_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured: list[Path] = []

    def stop(out: Path, *_: object, **__: object) -> None:
        out.mkdir()
        measured.append(out)
        raise KeyboardInterrupt

    monkeypatch.setattr(prediction, "plan_comparison", lambda request, out: out)
    monkeypatch.setattr(prediction, "watched", stop)
    record = tmp_path / "cell"
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            list(
                prediction.run(
                    2,
                    "1gbit",
                    "none",
                    "100ms",
                    specs=["ddp"],
                    steps=8,
                    settings=(),
                    speeds=None,
                    record=record,
                )
            )
    assert len(measured) == 2
    assert not record.exists()


def test_records_of_another_number_of_steps_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def note(cells: Iterable[str], _: object) -> None:
        found.extend(cells)

    monkeypatch.setattr(prediction, "present", note)
    for steps in ("48", "96"):
        words = ["--workers", "2", "--links", "1gbit", "--steps", steps]
        monkeypatch.setattr(sys, "argv", ["prediction.py", *words])
        prediction.main()
    assert found == ["2 1gbit none 100ms small", "2 1gbit none 100ms small 96 steps"]


def test_remarks_do_not_come_between_the_lines_of_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def remark(*_: object, say: Callable[[str], None], **__: Any) -> None:
        say("worker 2 has died")
        raise KeyboardInterrupt

    monkeypatch.setattr(run_deaths, "run_script", remark)
    with pytest.raises(KeyboardInterrupt):
        run_deaths.measure(seed=0, steps=16)
    assert capsys.readouterr() == ("", "worker 2 has died\n")


def test_seconds_to_later_accuracies_are_read_off_what_a_race_has_kept(tmp_path: Path) -> None:
    kept = ResultFile(tmp_path / "stragglers.jsonl")
    races = {
        "wagma": ((0.0, 10.0, 20.0), (0.0, 0.95, 1.0)),
        stragglers.LOCAL: ((0.0, 20.0, 40.0), (0.0, 0.95, 0.97)),
    }
    table = "to the target, size=small, all runs"
    rows = [
        Figure(case=f"{spec}, seed 0", table=table, column=column, value=value)
        for spec, (seconds, accuracies) in races.items()
        for column, value in (
            ("of the ideal", 0.9),
            ("s to the target", seconds[1]),
            ("measured after, s", seconds),
            ("accuracies", accuracies),
        )
    ]
    kept.replace(
        f"to the target, size=small, seed 0, {', '.join(races)}", rows, Origin(recorded="")
    )

    cells = stragglers.Races(list(races), 1, 40, tmp_path, kept).cells(["size=small"])

    (measure,) = cells.values()  # nothing is run again
    found = list(measure())
    shown = {(row.case, row.column): row.value for row in found if isinstance(row, Figure)}
    seconds = {
        column: [shown[spec, column] for spec in races]
        for column in ("s to 0.95", "s to 0.98", "s to the best that all reach")
    }
    assert seconds == {
        "s to 0.95": [10, 20],
        "s to 0.98": [pytest.approx(16), "not by all seeds"],
        "s to the best that all reach": [pytest.approx(14), 40],
    }
    ratios = {
        row.case.partition("localsgd")[2]: row.value for row in found if row.case not in shown
    }
    assert ratios[" to 0.95"] == pytest.approx(0.5)
    assert ratios[" to the best that all reach"] == pytest.approx(0.35)
    assert " to 0.98" not in ratios
