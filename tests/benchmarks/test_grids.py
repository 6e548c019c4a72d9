"""Benchmarks that may be stopped, and whose lines others read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import prediction
import run_deaths


def test_a_comparison_that_was_stopped_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured: list[Path] = []

    def stop(out: Path, *_: object, **__: object) -> None:
        out.mkdir()
        measured.append(out)
        raise KeyboardInterrupt

    monkeypatch.setattr(prediction, "plan_comparison", lambda request, out: out)
    monkeypatch.setattr(prediction, "run_comparison", stop)
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
