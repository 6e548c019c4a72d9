"""Islands: models that `fully_shard` has divided inside a node, trained between nodes, on real
processes.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import offbeat
from conformance_support.lent import lent
from offbeat.run.plan import script_command, script_config
from offbeat.run.supervise import run_script
from offbeat.strategies.base import Strategy
from offbeat.transport.link import DEFAULT_S
from offbeat_lab.emulated_workers import forking
from rank_jobs.islands import (
    Training,
    against_whole,
    averaged,
    comes_back,
    ends_badly,
    example,
    for_each,
    in_turn,
    mixed,
    poisoned,
    rebound,
    refused,
    resumed,
    returned,
    saved,
    struck,
    survived,
    trained,
)
from ranks_support.launch import RunRanks, launch
from ranks_support.process import ExpectNewcomer, expect_newcomer
from ranks_support.templates import Templates

__all__ = ["expect_newcomer"]
pytestmark = pytest.mark.ranks

CHECKED = {"replica_check_interval": 1}
ALLREDUCE = lent(offbeat.AllReduce(), bucket_mib=1e-3, **CHECKED)
ADAM: dict[str, Any] = {"optimizer": "AdamW", "options": {"lr": 0.01, "weight_decay": 0.1}}
LOCALSGD = offbeat.LocalSGD(period=2, warmup=0)
EQUAL: dict[str, Training] = {
    "allreduce, accumulated by FSDP, not resharded, clipped": Training(
        strategy=ALLREDUCE, num_passes=2, by_fsdp=True, reshard=False, clip="session"
    ),
    "allreduce, AdamW, offloaded, clipped by torch": Training(
        strategy=ALLREDUCE, offload=True, clip="torch", **ADAM
    ),
    "topk of everything, clipped": Training(
        strategy=lent(offbeat.TopK(density=1.0, clip_norm=0.5), **CHECKED), clip="session"
    ),
    "gtopk of everything, accumulated": Training(
        strategy=lent(offbeat.GTopK(density=1.0, collective="reduce_scatter"), **CHECKED),
        num_passes=3,
    ),
    "ef21 of everything": Training(strategy=lent(offbeat.EF21(density=1.0), **CHECKED)),
    "localsgd after allreduce, accumulated, AdamW, clipped by torch": Training(
        strategy=offbeat.LocalSGD(period=2, warmup=0, start_step=2),
        num_passes=2,
        clip="torch",
        **ADAM,
    ),
    "diloco": Training(strategy=offbeat.LocalSGD(period=2, outer="diloco"), **ADAM),
    "localsgd, by drift": Training(strategy=offbeat.LocalSGD(period="adaptive"), num_steps=8),
    "streaming": Training(strategy=offbeat.LocalSGD(period=4, exchange="2x1"), num_steps=8),
    "pairs, not resharded, clipped": Training(
        strategy=offbeat.LocalSGD(period=2, exchange="pairs"), reshard=False, clip="session"
    ),
}
"""What concerns an optimizer, its gradients or shards, each with gradients and with weights."""
SLOW: dict[str, Any] = {"options": {"lr": 0.002, "momentum": 0.9}}
SAME: dict[str, Training] = {
    "allreduce, in bfloat16": Training(**SLOW, strategy=ALLREDUCE, half=True),
    "topk, Adam": Training(strategy=lent(offbeat.TopK(density=0.1), **CHECKED), **ADAM),
    "gtopk": Training(
        **SLOW, strategy=lent(offbeat.GTopK(density=0.1, collective="reduce_scatter"), **CHECKED)
    ),
    "gtopk, as it comes": Training(**SLOW, strategy=lent(offbeat.GTopK(), **CHECKED), num_steps=22),
    "ef21": Training(**SLOW, strategy=lent(offbeat.EF21(density=0.1), **CHECKED)),
    "powersgd": Training(**SLOW, strategy=lent(offbeat.PowerSGD(rank=1), **CHECKED)),
    "diloco": Training(**SLOW, strategy=offbeat.LocalSGD(period=2, outer="diloco")),
    "changes": Training(**SLOW, strategy=offbeat.LocalSGD(period=2, codec="sparseloco")),
}
POISONED: dict[str, Training] = {
    "allreduce, clipped": Training(strategy=ALLREDUCE, clip="session"),
    "topk, clipped": Training(
        strategy=lent(offbeat.TopK(density=0.1, clip_norm=0.5), **CHECKED), clip="session"
    ),
    "gtopk": Training(
        strategy=lent(offbeat.GTopK(density=0.1, collective="all_gather"), **CHECKED)
    ),
    "ef21": Training(strategy=lent(offbeat.EF21(density=0.1), **CHECKED)),
    "localsgd": Training(strategy=LOCALSGD, options={"lr": 0.02}),
}
MIXED: dict[str, Training] = {
    label: Training(strategy=strategy, options={"lr": 0.01, "momentum": 0.9}, num_steps=12)
    for label, strategy in {
        "wagma": offbeat.WAGMA(period=4),
        "wagma, by the paper": offbeat.WAGMA(period=4, merge="paper"),
        "wagma, in 8 bits": offbeat.WAGMA(period=4, values="float8"),
        "adpsgd": offbeat.ADPSGD(),
        "eagersgd": offbeat.EagerSGD(mode="solo", period=5),
        "members": offbeat.LocalSGD(period=2, warmup=0, exchange="members"),
    }.items()
}


def with_each(job: Callable[..., Any], trainings: dict[str, Training], **options: Any) -> list[Any]:
    return [for_each, {"job": job, "trainings": trainings, **options}]


JOBS: tuple[dict[str, list[Any]], ...] = (
    {
        "equal": with_each(against_whole, EQUAL),
        "same": with_each(trained, SAME),
        "poisoned": with_each(poisoned, POISONED),
    },
    {
        "mixed": with_each(mixed, MIXED),
        "refused": [refused, {}],
        "rebound": [rebound, {}],
        "averaged, sharded": [averaged, {"sharded": True}],
        "averaged, whole": [averaged, {"sharded": False}],
        "ends badly": [ends_badly, {}],
    },
)
"""The same ranks do those of a group in turn: what PyTorch finds out of sharded tensors in a new
process takes as long as some trainings.
"""
Outcomes = Callable[[str], list[Any]]


@pytest.fixture(scope="module")
def outcomes(templates: Templates, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """What each of four ranks says of a job."""

    @cache
    def done(group: int) -> list[dict[str, Any]]:
        return launch(
            in_turn,
            4,
            templates=templates,
            directory=tmp_path_factory.mktemp("islands"),
            timeout_s=240.0,
            may_die=(),
            arguments={"jobs": JOBS[group]},
        )

    def of(job: str) -> list[Any]:
        (group,) = [number for number, jobs in enumerate(JOBS) if job in jobs]
        return [outcome[job] for outcome in done(group)]

    return of


def test_islands_train_as_whole_replicas_do(outcomes: Outcomes) -> None:
    for result in outcomes("equal"):
        for label, value in result.items():
            assert value["apart"] < 1e-9, label
            assert value["moved"] > 1e-2, label


def test_islands_agree_by_one_message_a_step_and_stay_identical(outcomes: Outcomes) -> None:
    results = outcomes("same")
    for label in SAME:
        ranks = [result[label] for result in results]
        assert len({result["bits"] for result in ranks}) == 1, label
        assert ranks[0]["losses"][1] < ranks[0]["losses"][0], (label, ranks[0]["losses"])
        assert len({result["decided"] for result in ranks}) == 1, label
        assert [result["seen"] for result in ranks] == [[r, 4, [0, 1, 2, 3]] for r in range(4)]
        looks = 2 if "as it comes" in label else 0  # at the measured density
        assert {result["messages"] for result in ranks} == {SAME[label].num_steps + looks}, label


def test_a_shard_that_is_not_finite_skips_the_step_on_every_rank(outcomes: Outcomes) -> None:
    results = outcomes("poisoned")
    for label in POISONED:
        ranks = [result[label] for result in results]
        assert len({result["bits"] for result in ranks}) == 1, label
        struck = range(2, 4) if label == "localsgd" else range(4)
        assert [result["skipped"] for result in ranks] == [int(r in struck) for r in range(4)]
        for rank, result in enumerate(ranks):
            still = [step for step, moved in enumerate(result["moved"]) if moved == 0]
            assert still == ([2] if rank in struck else []), label


def test_all_shards_of_an_island_are_of_the_same_average(outcomes: Outcomes) -> None:
    results = outcomes("mixed")
    for label in MIXED:
        ranks = [result[label] for result in results]
        for result in ranks:
            assert {len(values) for values in result["seen"]} == {1}, label
            assert len(result["mean"]) == 1, label
        for one, other in (ranks[:2], ranks[2:]):
            assert one["seen"] == other["seen"], label
            assert one["exchanges"] == other["exchanges"], label
        # With eager gradients islands that are in step by chance have one model.
        assert label == "eagersgd" or ranks[0]["seen"] != ranks[2]["seen"], label
        assert len({repr(result["end"]) for result in ranks}) == 1, label


WHY: dict[str, str] = {
    **dict.fromkeys(("dpsgd", "spdkfac", "adaptive"), "does not train models"),
    "no mesh": r"pass mesh=mesh\['replicate'\]",
    "whole": "leave mesh out",
    "blocks": r"call fully_shard\(\) on the model itself",
    "tensors": r"call fully_shard\(\) on the model itself",
    "natively": "native HSDP",
    "both dimensions": r"pass mesh\['replicate'\]",
    "the other dimension": "no place in a grid",
    "one rank": "dpsgd|rank 2 refused: dpsgd",
    "scaler": "bfloat16",
    "rate": "rank [123] differs from rank [0123] in its optimizer",
    "strategy": "rank [13] differs from rank [02] in its strategy",
}


def test_what_cannot_be_trained_is_refused_on_every_rank(outcomes: Outcomes) -> None:
    results = outcomes("refused")
    for said in results:
        assert sorted(said) == sorted(WHY)
        for label, text in said.items():
            assert re.search(WHY[label], text), f"{label}: {said}"


def test_shards_whose_memory_changes_are_followed_or_refused(outcomes: Outcomes) -> None:
    results = outcomes("rebound")
    assert len({result["bits"] for result in results}) == 1
    for result in results:
        assert result["moved"] > 0
        assert "load with assign=False" in result["said"]


@pytest.mark.parametrize(
    ("strategy", "at"),
    [
        (ALLREDUCE, "backward"),
        (ALLREDUCE, "raise"),
        (lent(offbeat.GTopK(density=0.1), **CHECKED), "step"),
        (LOCALSGD, "step"),
        (ALLREDUCE, "stopped in a step"),
        (LOCALSGD, "stopped in backward"),
    ],
)
def test_a_death_is_named_on_every_rank_of_every_island(
    run_ranks: RunRanks, strategy: Strategy, at: str
) -> None:
    *results, dead = run_ranks(struck, 4, may_die=(3,), strategy=strategy, at=at)
    assert not dead
    for heard in results:
        assert "rank 3" in heard["message"], results
        # Rank 2 tells its column why it gives up, and rank 1 its island.
        assert heard["rank"] in (1, 2, 3)
        # By the limit that was set, and not the default one. A busy machine may add seconds.
        assert heard["after_s"] < DEFAULT_S


@pytest.mark.parametrize(
    ("strategy", "hit", "how"),
    [
        (offbeat.WAGMA(period=4), 2, signal.SIGSTOP),
        (offbeat.ADPSGD(), 3, signal.SIGSTOP),
        (offbeat.LocalSGD(period=2, warmup=0, exchange="members"), 3, signal.SIGKILL),
    ],
)
def test_an_island_dies_as_one_and_the_others_go_on(
    run_ranks: RunRanks, strategy: Strategy, hit: int, how: signal.Signals
) -> None:
    results = run_ranks(survived, 4, may_die=(hit,), strategy=strategy, hit=hit, how=int(how))
    for rank in (0, 1):
        assert results[rank]["said"] == "", results
        assert results[rank]["longest_s"] < DEFAULT_S
    assert any("without worker 2" in notice for notice in results[0]["notices"])
    (mate,) = {2, 3} - {hit}
    assert f"rank {hit} " in results[mate]["said"]
    assert results[mate]["after_s"] < DEFAULT_S


@pytest.mark.parametrize(
    "strategy",
    [offbeat.WAGMA(period=4), offbeat.LocalSGD(period=2, warmup=0, exchange="members")],
)
def test_an_island_comes_back_once_all_of_its_ranks_are_there(
    run_ranks: RunRanks, expect_newcomer: ExpectNewcomer, strategy: Strategy
) -> None:
    expected = [expect_newcomer(comes_back, strategy=strategy) for _ in range(2)]
    wanted = [str(each.wanted) for each in expected]
    stayed = run_ranks(returned, 4, may_die=(2, 3), strategy=strategy, wanted=wanted)[:2]
    came = [each.value() for each in expected]
    for result in stayed:
        assert not any("with worker" in notice for notice in result["before"])
    assert [result["seen"] for result in came] == [[2, 4], [3, 4]]
    for result in came:
        assert result["moved"] > 0.1
        assert result["end"] == stayed[0]["end"]


STEADY: dict[str, Any] = {"options": {"lr": 0.002}}
RESUMED: dict[str, Training] = {
    "gtopk": Training(
        strategy=lent(offbeat.GTopK(density=0.1, collective="all_gather"), **CHECKED), **ADAM
    ),
    "diloco": Training(strategy=offbeat.LocalSGD(period=2, warmup=0, outer="diloco"), **ADAM),
    "ef21": Training(strategy=lent(offbeat.EF21(density=0.1), **CHECKED), **STEADY),
}


def test_a_run_is_resumed_by_other_islands(run_ranks: RunRanks, tmp_path: Path) -> None:
    """By the ranks that have saved it, divided as before and otherwise, and by fewer new ones."""

    def with_some(job: Callable[..., Any], labels: str, **options: Any) -> list[Any]:
        trainings = {label: replace(RESUMED[label], num_steps=8) for label in labels.split()}
        return with_each(job, trainings, directory=str(tmp_path / "checkpoint"), **options)

    jobs = {
        "saved": with_some(saved, "gtopk diloco ef21"),
        "same": with_some(resumed, "gtopk diloco ef21", num_shards=2),
        "one island": with_some(resumed, "gtopk diloco", num_shards=4),
    }
    found = run_ranks(in_turn, 4, jobs=jobs, timeout_s=120.0)
    for each in found:
        for label, new in each["same"].items():
            old = each["saved"][label]
            assert "this rank needs that of" in old["said"]
            assert new == {key: old[key] for key in new}
    others = [each["one island"] for each in found]
    for world_size, labels in ((3, "gtopk diloco"), (2, "ef21")):
        fewer = run_ranks(in_turn, world_size, jobs={"": with_some(resumed, labels, num_shards=1)})
        others += [each[""] for each in fewer]
    for result in others:
        for label, other in result.items():
            first = found[0]["saved"][label]
            assert other["half"] == first["half"]
            if label != "ef21":
                assert other["owed"] == pytest.approx(first["owed"], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("models", ["sharded", "whole"])
def test_the_mean_is_had_without_a_copy_of_the_model(outcomes: Outcomes, models: str) -> None:
    for result in outcomes(f"averaged, {models}"):
        assert result["apart"] > 1e-3
        assert result["kept"]
        for what in ("state", "within", "loss", "closed"):
            assert result[what] < 1e-12, what


def test_no_column_ends_with_a_mean_that_another_one_cannot_have(outcomes: Outcomes) -> None:
    said = outcomes("ends badly")
    assert all("rank" in each and "no longer finite" in each for each in said), said


@pytest.fixture(scope="module")
def natively(
    templates: Templates, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], float]:
    """The held-out loss of the script with native HSDP, after so many steps."""

    @cache
    def loss(steps: int) -> float:
        found = launch(
            example,
            4,
            templates=templates,
            directory=tmp_path_factory.mktemp("natively"),
            timeout_s=60.0,
            may_die=(),
            arguments={"arguments": {"shards": 2, "steps": steps, "hsdp": True}},
        )
        return float(found[0])

    return loss


@pytest.mark.parametrize(
    ("strategy", "steps", "tolerance", "flags"),
    [
        ("allreduce", 3, 1e-3, []),
        ("allreduce", 3, 1e-3, ["--hsdp"]),
        pytest.param("localsgd", 60, 1e-2, [], marks=pytest.mark.slow),
    ],
)
def test_a_sharded_script_trains_as_with_native_hsdp(
    natively: Callable[[int], float],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    strategy: str,
    steps: int,
    tolerance: float,
    flags: list[str],
) -> None:
    script = Path(__file__).parents[2] / "examples" / "sharded_gpt.py"
    command = script_command([str(script), "--shards", "2", "--steps", str(steps), *flags])
    outcome = run_script(
        script_config(command, strategy, workers=4),
        out=tmp_path / "record",
        start=forking(),
        on_progress=lambda progress: None,
        say=print,
    )
    said = capfd.readouterr().out
    loss = float(said.partition("held-out loss ")[2].split()[0])
    assert loss == pytest.approx(natively(steps), rel=tolerance)
    assert outcome.summary is not None
    assert outcome.summary.replicas_identical
