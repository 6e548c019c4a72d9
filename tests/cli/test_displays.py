"""What `offbeat compare` prints."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from lab_support.made import comparison, contestant
from offbeat_lab.cli.common import working
from offbeat_lab.cli.comparing import ComparisonDisplay, comparison_display, print_comparison


def test_what_all_strategies_fail_of_is_said_once() -> None:
    output = io.StringIO()
    display = ComparisonDisplay(Console(file=output, width=60))
    display.begin(["ddp", "gtopk", "wagma"], num_workers=2, num_seeds=1, steps=3)
    display.failed("ddp", "worker 0 (pid 17) failed: no data (see runs/a/logs/rank-0.log)")
    display.failed("gtopk", "worker 1 (pid 23) failed: no data (see runs/b/logs/rank-1.log)")
    display.failed("wagma", "worker 1 (pid 29) failed: no memory (see runs/c/logs/rank-1.log)")
    assert output.getvalue().splitlines() == [
        "ddp is out: worker 0 (pid 17) failed: no data (see runs/a/logs/rank-0.log)",
        "gtopk is out: for the same reason",
        "wagma is out: worker 1 (pid 29) failed: no memory (see runs/c/logs/rank-1.log)",
    ]


def test_digits_of_a_table_stay_together_however_narrow_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    many = [
        contestant(f"gtopk {i}", {"step_s": [0.0511], "final_metric": [0.8694]}) for i in range(8)
    ]
    print_comparison(comparison(many, num_seeds=1), Path("runs/1"), None)
    table = capsys.readouterr().out
    assert table.count("51.1 ms") == table.count("0.8694") == 8


def test_long_work_is_announced_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with working("measuring"):
        assert capsys.readouterr().err == "measuring\n"
    with working("measuring", quiet=True), comparison_display(quiet=True):
        assert capsys.readouterr().err == ""
    with comparison_display():
        assert "starting workers" in capsys.readouterr().err
