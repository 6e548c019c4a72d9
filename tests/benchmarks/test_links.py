"""What is told of steps whose computing is a pause."""

from __future__ import annotations

import pytest

from _ranks import run_ranks
from rank_jobs.paused import with_a_slow_rank


@pytest.mark.ranks
def test_a_step_takes_as_long_as_on_its_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as `run_ranks` sets it
    seconds = run_ranks(with_a_slow_rank, 2, 0.3)

    assert len(seconds) == 2
    assert min(seconds) > 0.25
