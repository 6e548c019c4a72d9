"""The strategies whose ranks are answered for beside training, on real processes and
real sockets.
"""

from __future__ import annotations

import json
from pathlib import Path

import beside_jobs as jobs
import numpy as np
import pytest

from ranks_support.launch import RunRanks

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_nothing_is_lost_on_a_random_schedule(run_ranks: RunRanks, world_size: int) -> None:
    """With steps of the same size wherever a model stands, the mean is where all steps together
    lead.
    """
    results = run_ranks(jobs.random_schedule, world_size, seed=world_size, timeout_s=60)
    for label in results[0]:
        ranks = [result[label] for result in results]
        pushed = (
            sum(rank["pushed"] - rank["owed"] - rank["to_apply"] for rank in ranks) / world_size
        )
        assert all(rank["steps"] == jobs.NUM_STEPS for rank in ranks)
        assert all(rank["exchanges"] > 0 for rank in ranks), label
        for rank in ranks:
            np.testing.assert_allclose(rank["mean"], -jobs.LR * pushed, atol=1e-3, err_msg=label)


def test_a_strict_meeting_leaves_everyone_with_the_same_bits(run_ranks: RunRanks) -> None:
    by_rank = run_ranks(jobs.equal_after_meeting, 3)
    assert by_rank[0] == by_rank[1] == by_rank[2]
    assert len(set(by_rank[0])) == len(by_rank[0])


@pytest.mark.parametrize(
    ("label", "world_size", "victims"),
    [
        ("wagma", 4, [2]),
        ("wagma, waiting", 3, [0]),
        ("wagma", 4, [1, 2, 3]),
        ("adpsgd", 3, [0]),
        ("eagersgd", 4, [1]),
    ],
)
def test_the_others_go_on_when_some_are_killed(
    run_ranks: RunRanks, label: str, world_size: int, victims: list[int]
) -> None:
    results = run_ranks(
        jobs.killed, world_size, label=label, victims=victims, may_die=victims, timeout_s=90
    )
    for rank, result in enumerate(results):
        if rank in victims:
            continue
        assert result["steps"] == 60
        assert result["finite"]
        if (
            2 * len(victims) < world_size
        ):  # else the survivors first wait until the others have been silent for long
            assert any("without worker" in notice for notice in result["notices"]), result[
                "notices"
            ]


def test_a_worker_that_returns_is_equal_to_the_others_after_the_next_meeting(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    until = tmp_path / "returned.json"
    first, second, _ = run_ranks(jobs.returns, 3, until=str(until), may_die=[2], timeout_s=90)
    newcomer = json.loads(until.read_text())
    assert newcomer["start_step"] > 5
    assert newcomer["taken"] in [*first["prints"], *second["prints"]]
    together = set(first["prints"]) & set(second["prints"])
    assert set(newcomer["prints"][1:-1]) <= together
    assert any("with worker 2 come in" in notice for notice in first["notices"])


def test_the_others_go_on_when_one_raises(run_ranks: RunRanks) -> None:
    results = run_ranks(jobs.fails_in_its_loop, 3)
    assert results == [{"steps": 30}, {"raised": "rank 1 had enough"}, {"steps": 30}]


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("group too large", "ConfigError", "group_size is 4, allowed is 2 to 3"),
        ("options", "MismatchError", "period=5"),
        ("model", "MismatchError", "model parameters"),
    ],
)
def test_what_cannot_work_is_refused_on_every_rank(
    run_ranks: RunRanks, fault: str, kind: str, words: str
) -> None:
    for result in run_ranks(jobs.refused, 3, fault=fault):
        assert result["kind"] == kind
        assert words in result["message"]
        assert result["touched"] == "False"
