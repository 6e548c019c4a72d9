"""What a run of the paired benchmarks is measured by."""

from __future__ import annotations

from pathlib import Path

import pytest

import _paired
from lab_support.made import write_run
from offbeat_lab.config import Request
from offbeat_lab.records import Record
from offbeat_lab.train import RunPlan, plan


def test_each_measurement_of_a_run_in_processes_counts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last one is in the summary besides."""
    measured = [(0, 0.1), (10, 0.5), (20, 0.9)]

    def train(planned: RunPlan, listener: object) -> object:
        assert isinstance(planned.out, Path)
        return Record(write_run(planned.out, step_s=[0.1] * 20, metrics=measured)).summary()

    monkeypatch.setattr(_paired, "train", train)
    planned = plan(Request(task="digits", strategy="allreduce", steps=20))

    assert _paired.in_processes(planned) == [metric for _, metric in measured]
