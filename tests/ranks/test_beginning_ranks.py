"""Workers that die while a run begins, and what the next session of those who live is told, as real
processes.
"""

from __future__ import annotations

import beginning_jobs as jobs
import pytest
from dispatch_jobs import NUM_SAMPLES
from test_survival_ranks import samples

from ranks_support.launch import RunRanks

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("doing", ["connecting", "comparing"])
def test_before_a_run_is_founded_a_death_is_named_to_all(run_ranks: RunRanks, doing: str) -> None:
    results = run_ranks(jobs.in_attach, 3, victim=1, doing=doing, may_die=[1], timeout_s=25)
    for heard in (results[0], results[2]):
        assert (heard["kind"], heard["rank"]) == ("PeerError", 1)
        assert heard["message"].startswith("rank 1 ")


@pytest.mark.parametrize(
    ("strategy", "deaths"),
    [
        (
            "AdaptiveSGD",
            {
                "1": "about to make its loader",
                "2": "agreeing where to begin, in the middle",
                "3": "founding",
            },
        ),
        ("ElasticSGD", {"1": "about to begin", "2": "making its loader, in the middle"}),
    ],
)
def test_once_it_is_founded_those_who_live_share_all_samples(
    run_ranks: RunRanks, strategy: str, deaths: dict[str, str]
) -> None:
    victims = list(map(int, deaths))
    survivor = run_ranks(
        jobs.founded,
        1 + len(victims),
        strategy=strategy,
        deaths=deaths,
        may_die=victims,
        timeout_s=25,
    )[0]
    assert samples(survivor["merges"]) == list(range(NUM_SAMPLES))
    assert {rank for merge in survivor["merges"] for rank, _ in merge["works"]} == {0}


@pytest.mark.parametrize("strategy", ["AdaptiveSGD", "WAGMA"])
def test_who_attaches_anew_after_a_death_hears_of_it_at_once(
    run_ranks: RunRanks, strategy: str
) -> None:
    results = run_ranks(jobs.second_session, 3, strategy=strategy, may_die=[2], timeout_s=25)[:2]
    for heard in results:
        assert heard["heard"].startswith("PeerError: rank 2 was lost in an earlier session")
        assert "new_group([0, 1], use_local_synchronization=True)" in heard["heard"]
        assert heard["world_size"] == 2
    assert results[0]["mean"] == results[1]["mean"]
