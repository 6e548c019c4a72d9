"""Real ranks: results come back by rank, and every way to fail is told apart and leaves
no process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import frame_jobs
import pytest

from ranks_support import launch
from ranks_support.launch import RanksError, RunRanks

pytestmark = pytest.mark.ranks


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 0.5)


def test_every_rank_joins_the_group_and_returns(run_ranks: RunRanks) -> None:
    results = run_ranks(frame_jobs.add, 3, offset=10)
    assert results == [
        {"total": 33, "rank": rank, "threads": 1, "interface": "127.0.0.1"} for rank in range(3)
    ]


def test_a_rank_that_raises_is_named_with_its_traceback(run_ranks: RunRanks) -> None:
    with pytest.raises(RanksError, match=r"\Arank 1 raised ValueError: no such luck\n") as raised:
        run_ranks(frame_jobs.raise_on_one, 2, victim=1)
    assert "in raise_on_one" in str(raised.value)
    assert "rank 0" not in str(raised.value)


def test_a_warning_is_an_error(run_ranks: RunRanks) -> None:
    with pytest.raises(RanksError, match="rank 0 raised DeprecationWarning: this is getting old"):
        run_ranks(frame_jobs.warn, 1)


@pytest.mark.usefixtures("impatient")
def test_ranks_that_wait_for_a_failed_one_are_ended_and_say_where_they_were(
    run_ranks: RunRanks,
) -> None:
    with pytest.raises(RanksError, match=r"\Arank 0 raised ValueError") as raised:
        run_ranks(frame_jobs.leave_the_others_waiting, 2, victim=0)
    _, _, rest = str(raised.value).partition(
        "rank 1 was ended because another one had failed, stack:"
    )
    assert "in wait_forever" in rest


def test_a_rank_that_dies_is_named_with_its_signal(run_ranks: RunRanks) -> None:
    with pytest.raises(RanksError, match=r"\Arank 1 killed by SIGKILL"):
        run_ranks(frame_jobs.die_on_one, 2, victim=1)


def test_a_rank_may_die_where_that_is_what_the_test_is_about(run_ranks: RunRanks) -> None:
    assert run_ranks(frame_jobs.die_on_one, 2, may_die=[1], victim=1) == [0, None]


@pytest.mark.parametrize("job", [frame_jobs.hang_on_one, frame_jobs.stop_on_one])
def test_a_rank_that_hangs_or_stops_is_named_with_its_stack(
    run_ranks: RunRanks, job: Callable[..., None]
) -> None:
    with pytest.raises(RanksError, match="rank 1 hung, stack:") as raised:
        run_ranks(job, 2, timeout_s=1.0, victim=1)
    assert f"in {job.__name__}" in str(raised.value)


def test_a_rank_that_returns_but_does_not_end_fails(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "END_S", 0.5)
    with pytest.raises(RanksError, match="rank 0 returned but did not end, stack:") as raised:
        run_ranks(frame_jobs.never_end, 1)
    assert "in wait_forever" in str(raised.value)


def test_a_rank_that_exits_fails(run_ranks: RunRanks) -> None:
    with pytest.raises(RanksError, match="rank 0 ended with status 3"):
        run_ranks(frame_jobs.exit_early, 1)


def test_a_result_must_be_json(run_ranks: RunRanks) -> None:
    with pytest.raises(
        RanksError, match="rank 0 raised TypeError: Object of type object is not JSON serializable"
    ):
        run_ranks(frame_jobs.return_what_is_no_json, 1)


@pytest.mark.usefixtures("impatient")
def test_no_process_is_left(run_ranks: RunRanks, tmp_path: Path) -> None:
    with pytest.raises(RanksError):
        run_ranks(
            frame_jobs.note_pid_and_leave_the_others_waiting, 2, victim=0, directory=str(tmp_path)
        )
    pids = [path.name for path in tmp_path.glob("pid-*")]
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.removeprefix("pid-")), 0)
