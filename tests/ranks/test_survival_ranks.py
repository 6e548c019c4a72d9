"""Workers that die, stop and come back while mega-batches are computed and merged, as real
processes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import survival_jobs as jobs
from dispatch_jobs import NUM_SAMPLES

from ranks_support.launch import RunRanks

pytestmark = pytest.mark.ranks


def samples(merges: list[dict[str, Any]]) -> list[int]:
    """Positions in the epoch's order that were merged, whoever computed them."""
    spans = [span for merge in merges for _, spans in merge["works"] for span in spans]
    return sorted(position for begin, end in spans for position in range(begin, end))


@pytest.mark.parametrize(
    ("label", "deaths"),
    [
        ("adaptive", {"1": ("computing", 2), "2": ("merging", 9), "3": ("claiming", 6)}),
        ("elastic", {"1": ("merging", 3), "2": ("merging", 9), "3": ("computing", 4)}),
    ],
)
def test_every_sample_counts_once_whoever_dies_where(
    run_ranks: RunRanks, label: str, deaths: dict[str, list[Any]]
) -> None:
    """All but one die: while computing, in the middle of a merge, with a claim that nobody has
    heard of.
    """
    survivor = run_ranks(
        jobs.killed, 4, label=label, deaths=deaths, may_die=[1, 2, 3], timeout_s=25
    )[0]
    merges = survivor["merges"]
    assert [merge["place"] for merge in merges] == [[0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [2, 0]]
    assert samples(merges[:3]) == samples(merges[3:]) == list(range(NUM_SAMPLES))
    assert [rank for rank, _ in merges[-1]["works"]] == [0]
    assert any("are given out again" in notice for notice in survivor["notices"])
    assert survivor["mean"] == merges[-1]["print"]


def test_those_who_live_hold_the_same_after_each_merge(run_ranks: RunRanks) -> None:
    """Two of four die, one of them at the end of a merge that the others have made."""
    deaths = {"1": ("merging", 29), "3": ("computing", 9)}
    results = run_ranks(
        jobs.killed, 4, label="momentum", deaths=deaths, may_die=[1, 3], timeout_s=25
    )
    assert results[0]["merges"] == results[2]["merges"]
    assert samples(results[0]["merges"][:3]) == list(range(NUM_SAMPLES))
    assert len({merge["print"] for merge in results[0]["merges"]}) == 6


def test_a_worker_that_was_stopped_comes_back_with_the_others_model(run_ranks: RunRanks) -> None:
    first, second, back = run_ranks(jobs.stopped, 3, label="elastic")
    assert first["merges"] == second["merges"]
    assert any("was away for so long" in notice for notice in back["notices"])
    assert back["merges"][-1] == first["merges"][-1]


def test_a_worker_that_returns_joins_at_the_next_mega_batch(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    until = tmp_path / "returned.json"
    first, second, _ = run_ranks(jobs.returns, 3, label="momentum", until=str(until), may_die=[2])
    assert first["merges"] == second["merges"]
    newcomer = json.loads(until.read_text())
    assert newcomer["taken"] == first["merges"][-1 - len(newcomer["merges"])]["print"]
    assert newcomer["merges"] == first["merges"][-len(newcomer["merges"]) :]
    assert [rank for rank, _ in newcomer["merges"][-1]["works"]] == [0, 1, 2]


def test_merges_send_the_rows_that_changed(run_ranks: RunRanks) -> None:
    """The first sends all, since nobody knows yet who has changed what, and so does the last, which
    changes all.
    """
    ranks = run_ranks(jobs.rows, 2)
    assert [merge["print"] for merge in ranks[0]["merges"]] == [
        merge["print"] for merge in ranks[1]["merges"]
    ]
    whole = 4 * (jobs.NUM_ROWS * jobs.ROW + jobs.ROW + 1)
    touched = 4 * (2 * 20 * jobs.ROW + jobs.ROW + 1)
    talk = 2500
    for rank in ranks:
        sent = [merge["bytes"] for merge in rank["merges"]]
        assert whole <= sent[0] <= whole + talk
        assert whole <= sent[4] <= whole + talk
        assert touched <= sent[1] <= touched + talk
        assert all(2 * touched > sent_then >= touched for sent_then in sent[2:4])
