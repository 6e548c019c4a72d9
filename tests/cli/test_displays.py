"""What `offbeat compare` prints. `offbeat watch` says of a record under way how far each worker is,
and ends with the run.
"""

from __future__ import annotations

import io
import os
import socket
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from lab_support.made import comparison, strategy
from offbeat.errors import RecordError
from offbeat.run.progress import WorkerProgress
from offbeat.run.records import EventWriter, create
from offbeat_lab.cli.common import working
from offbeat_lab.cli.comparing import ComparisonDisplay, comparison_display, print_comparison
from offbeat_lab.cli.display import progress_display
from offbeat_lab.cli.watching import View, view_of, views, watch
from offbeat_lab.records import Record
from report_support.synthetic import Made, config_of, write_comparison_of, write_run


def test_a_rank_that_is_not_the_first_shows_nothing_on_a_terminal_either(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under torchrun each rank has the terminal, and tells of its own steps."""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    said = WorkerProgress(
        rank=1,
        pid=1,
        step=1,
        seconds=1.0,
        target=2,
        loss=0.5,
        wait_share=0.0,
        bytes_per_step=1.0,
        survives_death=False,
    )
    with progress_display("digits", 1, quiet=True) as shown:
        shown(said)
    assert capsys.readouterr().err == ""


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
        strategy(f"gtopk {i}", {"step_s": [0.0511], "final_metric": [0.8694]}) for i in range(8)
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


MADE = Made(workers=3, steps=80, late_s={1: 0.3})


def text_of(view: View, width: int = 140) -> str:
    console = Console(width=width, record=True, file=None, quiet=False)
    with console.capture() as captured:
        console.print(view.table())
    return captured.get()


def test_a_run_under_way_shows_each_worker_and_who_is_late(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", MADE, finished=False)
    view = view_of(path, now_s=0.0)
    assert not view.ended  # its processes are this one
    assert view.step.tolist() == [80.0] * 3
    assert view.late_s[1] == pytest.approx(0.3, abs=0.1)
    assert view.late_s[0] < 0.1
    assert (view.bytes_sent > 0).all()
    shown = text_of(view)
    assert "80/80" in shown
    (late,) = [line for line in shown.splitlines() if "the others wait for it" in line]
    assert "worker 1" in late
    assert "…" not in text_of(view, width=80)


def test_of_a_long_run_the_first_steps_are_not_looked_at(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", Made(workers=2, steps=5000), finished=False)
    for file in path.glob("events-*"):
        head, *lines = file.read_text().splitlines(keepends=True)
        assert file.stat().st_size > 1 << 20
        file.write_text("".join([head, "torn\n", *lines[1:]]))
    view = view_of(path, now_s=0.0)
    assert view.step.tolist() == [5000.0] * 2
    assert np.isfinite(view.step_s).all()


def test_a_worker_that_is_silent_is_shown_so(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", MADE, finished=False)
    now_s = -float(view_of(path, now_s=0.0).silent_s.max())  # the time of the last step
    assert "silent" not in text_of(view_of(path, now_s))
    assert text_of(view_of(path, now_s + 60)).count("silent for") == 3


def test_it_ends_with_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path / "run", MADE, finished=False)
    seen = []

    def finish(seconds: float) -> None:
        assert seconds >= 1.0
        write_run(tmp_path / "done", MADE)
        os.replace(tmp_path / "done" / "summary.json", path / "summary.json")

    for view in views(path, sleep=finish):
        seen.append(view)
    assert [view.ended for view in seen] == [False, True]
    watch(path)
    assert "finished after 80 steps" in capsys.readouterr().out


def test_before_the_first_step_it_says_that_workers_start(tmp_path: Path) -> None:
    create(tmp_path / "run", config_of(MADE))
    view = view_of(tmp_path / "run", now_s=0.0)
    assert np.isnan(view.step).all()
    assert "workers start" in text_of(view)


def test_a_run_whose_processes_are_gone_has_ended(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", MADE, finished=False)
    gone = 2**22 + 1  # above the largest number of a process on Linux
    for file in path.glob("events-*"):
        file.write_text(file.read_text().replace(f'"pid": {os.getpid()}', f'"pid": {gone}'))
    assert "the run was killed" in text_of(view_of(path, now_s=0.0))
    other = f'"host": "not-{socket.gethostname()}"'
    for file in path.glob("events-*"):
        file.write_text(file.read_text().replace(f'"host": "{socket.gethostname()}"', other))
    assert not view_of(path, now_s=0.0).ended  # nothing is known of another host's processes


def test_a_comparison_is_refused_with_the_way_out(tmp_path: Path) -> None:
    write_comparison_of(tmp_path, [Made(steps=20, workers=2)], seeds=[0])
    with pytest.raises(RecordError, match="watch one of its runs"):
        view_of(tmp_path, now_s=0.0)


def test_a_run_that_is_killed_before_all_workers_have_begun_has_ended(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", MADE, finished=False)
    first, second, third = sorted(path.glob("events-*"))
    first.write_text(first.read_text().replace(f'"pid": {os.getpid()}', f'"pid": {2**22 + 1}'))
    second.write_text("")
    assert not view_of(path, now_s=0.0).ended  # the third one is this process
    third.unlink()
    view = view_of(path, now_s=0.0)
    assert view.ended
    assert "the run was killed" in text_of(view)


def test_a_worker_says_which_process_it_is_before_its_first_step(tmp_path: Path) -> None:
    path = create(tmp_path / "run", config_of(MADE))
    with closing(EventWriter(path, rank=0, attempt=0)):
        assert [head.pid for head in Record(path).heads(0)] == [os.getpid()]
