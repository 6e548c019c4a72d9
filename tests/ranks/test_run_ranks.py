"""Real ranks: results come back by rank, and every way to fail is told apart and leaves
no process.
"""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks_support import launch
from ranks_support.launch import RanksError, RunRanks

pytestmark = pytest.mark.ranks


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 0.5)


def add(rank: int, world_size: int, *, offset: int) -> dict[str, int | str]:
    total = torch.tensor([rank + offset])
    dist.all_reduce(total)
    return {
        "total": int(total),
        "rank": rank,
        "threads": torch.get_num_threads(),
        "interface": os.environ["OFFBEAT_INTERFACE"],
    }


def test_every_rank_joins_the_group_and_returns(run_ranks: RunRanks) -> None:
    results = run_ranks(add, 3, offset=10)
    assert results == [
        {"total": 33, "rank": rank, "threads": 1, "interface": "127.0.0.1"} for rank in range(3)
    ]


@dataclass(frozen=True, kw_only=True)
class Term:
    weight: float
    inner: Term | None = None


def call(rank: int, world_size: int, *, job: Callable[..., Any], term: Term) -> list[Any]:
    assert term.inner is not None
    return [job(rank, world_size, offset=0)["total"], term.weight, term.inner.weight]


def test_arguments_may_be_functions_and_dataclasses(run_ranks: RunRanks) -> None:
    term = Term(weight=0.5, inner=Term(weight=0.25))
    assert run_ranks(call, 2, job=add, term=term) == [[1, 0.5, 0.25]] * 2


def test_a_function_that_another_process_cannot_find_is_refused(run_ranks: RunRanks) -> None:
    def job(rank: int, world_size: int) -> None: ...

    with pytest.raises(TypeError, match="define it at the top level of its module"):
        run_ranks(job, 1)


def raise_on_one(rank: int, world_size: int, *, victim: int) -> None:
    if rank == victim:
        raise ValueError("no such luck")


def test_a_rank_that_raises_is_named_with_its_traceback(run_ranks: RunRanks) -> None:
    with pytest.raises(RanksError, match=r"\Arank 1 raised ValueError: no such luck\n") as raised:
        run_ranks(raise_on_one, 2, victim=1)
    assert "in raise_on_one" in str(raised.value)
    assert "rank 0" not in str(raised.value)


def warn(rank: int, world_size: int) -> None:
    warnings.warn("this is getting old", DeprecationWarning, stacklevel=1)


def test_a_warning_is_an_error(run_ranks: RunRanks) -> None:
    with pytest.raises(RanksError, match="rank 0 raised DeprecationWarning: this is getting old"):
        run_ranks(warn, 1)


def wait_forever() -> None:
    threading.Event().wait()


def leave_the_others_waiting(rank: int, world_size: int, *, victim: int) -> None:
    if rank == victim:
        raise ValueError("no such luck")
    wait_forever()


@pytest.mark.usefixtures("impatient")
def test_ranks_that_wait_for_a_failed_one_are_ended_and_say_where_they_were(
    run_ranks: RunRanks,
) -> None:
    with pytest.raises(RanksError, match=r"\Arank 0 raised ValueError") as raised:
        run_ranks(leave_the_others_waiting, 2, victim=0)
    _, _, rest = str(raised.value).partition(
        "rank 1 was ended because another one had failed, stack:"
    )
    assert "in wait_forever" in rest


def die_on_one(rank: int, world_size: int, *, victim: int) -> int:
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def test_a_rank_that_dies_is_named_with_its_signal(run_ranks: RunRanks) -> None:
    with pytest.raises(RanksError, match=r"\Arank 1 killed by SIGKILL"):
        run_ranks(die_on_one, 2, victim=1)


def test_a_rank_may_die_where_that_is_what_the_test_is_about(run_ranks: RunRanks) -> None:
    assert run_ranks(die_on_one, 2, may_die=[1], victim=1) == [0, None]


def hang_on_one(rank: int, world_size: int, *, victim: int) -> None:
    if rank == victim:
        wait_forever()


def stop_on_one(rank: int, world_size: int, *, victim: int) -> None:
    if rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
        wait_forever()


@pytest.mark.parametrize("job", [hang_on_one, stop_on_one])
def test_a_rank_that_hangs_or_stops_is_named_with_its_stack(
    run_ranks: RunRanks, job: Callable[..., None]
) -> None:
    with pytest.raises(RanksError, match="rank 1 hung, stack:") as raised:
        run_ranks(job, 2, timeout_s=1.0, victim=1)
    assert f"in {job.__name__}" in str(raised.value)


def never_end(rank: int, world_size: int) -> int:
    threading.Thread(target=wait_forever).start()
    return rank


def test_a_rank_that_returns_but_does_not_end_fails(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "END_S", 0.5)
    with pytest.raises(RanksError, match="rank 0 returned but did not end, stack:") as raised:
        run_ranks(never_end, 1)
    assert "in wait_forever" in str(raised.value)


def exit_early(rank: int, world_size: int) -> None:
    os._exit(3)


def test_a_rank_that_exits_fails(run_ranks: RunRanks) -> None:
    with pytest.raises(RanksError, match="rank 0 ended with status 3"):
        run_ranks(exit_early, 1)


def return_what_is_no_json(rank: int, world_size: int) -> object:
    return object()


def test_a_result_must_be_json(run_ranks: RunRanks) -> None:
    with pytest.raises(
        RanksError, match="rank 0 raised TypeError: Object of type object is not JSON serializable"
    ):
        run_ranks(return_what_is_no_json, 1)


def note_pid_and_leave_the_others_waiting(
    rank: int, world_size: int, *, victim: int, directory: str
) -> None:
    Path(directory, f"pid-{os.getpid()}").touch()
    dist.barrier()
    leave_the_others_waiting(rank, world_size, victim=victim)


@pytest.mark.usefixtures("impatient")
def test_no_process_is_left(run_ranks: RunRanks, tmp_path: Path) -> None:
    with pytest.raises(RanksError):
        run_ranks(note_pid_and_leave_the_others_waiting, 2, victim=0, directory=str(tmp_path))
    pids = [path.name for path in tmp_path.glob("pid-*")]
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.removeprefix("pid-")), 0)
