"""Predictions held against records that are made up."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from lab_support.made import comparison, strategy, write_run
from offbeat.errors import ConfigError
from offbeat.simulation.training import TensorProfile
from offbeat.strategies.kfac import DKFAC
from offbeat_lab.cli.main import app
from offbeat_lab.cluster import Cluster, from_flags
from offbeat_lab.comparison import read_comparison, write_comparison
from offbeat_lab.plan.check import check_comparison
from offbeat_lab.plan.plans import PlanRequest, make_plan
from offbeat_lab.plan.predictions import predict_step
from offbeat_lab.plan.profile import (
    ModelProfile,
    TimedBatch,
    read_profile,
)
from offbeat_lab.plan.shipped import shipped_profile
from offbeat_lab.plan.simulation import Setting
from offbeat_lab.records import LinkCheck, MegaBatch, add_mega_batch
from offbeat_lab.tasks import build_task

STEPS = 40
CLUSTER = from_flags(workers=2, link="100mbit")
MODEL = ModelProfile(
    name="digits",
    device="none",
    batches=(TimedBatch(batch_size=8, forward_s=0.1, backward_s=0.2),),
    optimizer_s=0.0,
    tensors=(TensorProfile(num_elements=1_000_000, ready=1.0),),
    select_s_per_element=0.0,
    copy_s_per_byte=0.0,
)


@cache  # where a test asks for it, and not in each process that collects tests
def predicted_s(strategy: str) -> float:
    return predict_step(strategy, Setting(profile=MODEL, cluster=CLUSTER)).step_s


def recorded(
    directory: Path,
    step_s: Mapping[str, list[float]],
    *,
    cluster: Cluster = CLUSTER,
    num_parameters: int = 1_000_000,
) -> Path:
    for label, durations_s in step_s.items():
        path = directory / f"runs/{label}-seed-0"
        write_run(path, step_s=durations_s, strategy=label.split()[0])
    entries = [strategy(label, num_seeds=1) for label in step_s if label != "alone"]
    made = comparison(entries, num_seeds=1)
    known = {"status": "finished", "cluster": cluster, "num_parameters": num_parameters}
    made = made.model_copy(update=known)
    write_comparison(directory, made)
    return directory


HALF = STEPS // 2


@pytest.mark.parametrize(
    ("takes", "halves", "judged", "within", "misplaced"),
    [
        ("crossbow", (1, 1), 2, 1.0, 0),
        ("ddp", (2, 2), 2, 0.5, 1),
        ("crossbow", (1, 1.5), 1, 1.0, 0),  # which differ too much
    ],
)
def test_misses_come_first_and_the_wrong_order_is_counted(
    takes: str,
    halves: tuple[float, float],
    judged: int,
    within: float,
    misplaced: int,
    tmp_path: Path,
) -> None:
    crossbow = [times * predicted_s(takes) for times in halves for _ in range(HALF)]
    steps_s = {"ddp": [predicted_s("ddp")] * STEPS, "crossbow": crossbow}
    found = check_comparison(recorded(tmp_path, steps_s), MODEL)
    assert (len(found.judged), len(found.misplaced)) == (judged, misplaced)
    assert found.share_within == within
    errors = [one.error for one in found.judged]
    assert errors == sorted(errors, reverse=True)
    assert found.judged[-1].error == pytest.approx(0.0, abs=1e-6)


def test_a_strategy_of_which_nothing_was_repeated_is_not_judged(tmp_path: Path) -> None:
    """15 steps have one period of LocalSGD."""
    (one,) = check_comparison(recorded(tmp_path, {"localsgd": [0.5] * 15}), MODEL).steps
    assert one.predicted_s is not None
    assert (one.repeats_differ, one.is_judged) == (None, False)


def test_long_links_that_the_lab_made_carry_their_rate(tmp_path: Path) -> None:
    """Hosts as they come would let a connection carry half of it."""
    long = from_flags(workers=2, link="1gbit", latency="25ms")
    recorded(tmp_path, {"ddp": [0.5] * STEPS}, cluster=long)
    (one,) = check_comparison(tmp_path, MODEL).steps
    whole = Setting(profile=MODEL, cluster=long)
    assert one.predicted_s == pytest.approx(predict_step("ddp", whole).step_s)


SLOWER = MODEL.with_step(batch_size=8, forward_backward_s=0.6, device="none")


@pytest.mark.parametrize(
    ("truth", "alone_s", "share"),
    [
        # The machine was twice as slow as when the profile was made: computing is, bytes are not.
        (Setting(profile=SLOWER, cluster=CLUSTER), 0.6, None),
        # Links carry half of what was asked for, as the lab saw.
        (Setting(profile=MODEL, cluster=CLUSTER, payload_share=0.5), None, 0.5),
    ],
)
def test_the_machine_that_a_comparison_ran_on_is_not_held_against_predictions(
    truth: Setting, alone_s: float | None, share: float | None, tmp_path: Path
) -> None:
    steps_s = {"ddp": [predict_step("ddp", truth).step_s] * STEPS}
    directory = recorded(
        tmp_path, steps_s if alone_s is None else {**steps_s, "alone": [alone_s] * STEPS}
    )
    if share is not None:
        saw = LinkCheck(
            worker=0,
            peer=1,
            asked_bit_per_s=1e8,
            sent_bit_per_s=share * 1e8,
            received_bit_per_s=share * 1e8,
            share=share,
            round_trip_s=0.0,
        )
        made = read_comparison(directory)
        emulation = replace(made.emulation, checks=[saw])
        write_comparison(directory, made.model_copy(update={"emulation": emulation}))
    assert check_comparison(directory, MODEL).median_error == pytest.approx(0.0, abs=1e-6)


def test_what_a_comparison_trained_is_profiled_with_all_its_options(tmp_path: Path) -> None:
    task = build_task("digits", {"size": "small", "batch_size": 8})
    directory = recorded(
        tmp_path, {"ddp": [predicted_s("ddp")] * STEPS}, num_parameters=task.num_parameters()
    )
    path = directory / "runs/ddp-seed-0/config.json"
    config = json.loads(path.read_text())
    # An option that is None is one that no text says.
    config["config"]["task_options"] = task.options.model_dump(mode="json")
    assert None in config["config"]["task_options"].values()
    path.write_text(json.dumps(config))
    assert check_comparison(directory).profile.num_elements == task.num_parameters()


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    directory = recorded(tmp_path, {"ddp": [predicted_s("ddp")] * STEPS}, num_parameters=7)
    with pytest.raises(ConfigError, match="1000000 parameters, and .* trained a model of 7"):
        check_comparison(directory, MODEL)


def test_a_comparison_whose_links_had_no_rate_is_refused(tmp_path: Path) -> None:
    directory = recorded(tmp_path, {"ddp": [0.5] * STEPS}, cluster=Cluster(workers=2))
    with pytest.raises(ConfigError, match="offbeat compare --link"):
        check_comparison(directory)


def test_what_was_checked_is_kept_in_the_profile_and_limits_what_is_said(tmp_path: Path) -> None:
    profile, checked_profile = tmp_path / "in.json", tmp_path / "out.json"
    profile.write_text(MODEL.to_json())
    directory = recorded(tmp_path / "compare", {"ddp": [predicted_s("ddp")] * STEPS})
    arguments = ["plan", "--check", str(directory), "--profile", str(profile)]
    result = CliRunner().invoke(app, [*arguments, "--out", str(checked_profile)])
    assert result.exit_code == 0, result.exception
    assert "100% of 1 strategies within 15%" in result.output
    model = read_profile(checked_profile)
    clusters = [from_flags(workers=n, link="100mbit") for n in (2, 4)]
    request = PlanRequest(profile=model, clusters=clusters, strategies=("ddp", "dpsgd"))
    found = {(one.strategy, one.workers): one for one in make_plan(request).predictions}
    assert found["ddp", 2].how_sure == "checked on 1 cell like yours, within 0%"
    assert found["ddp", 2].checked_cells == 1
    # The lab's have others, with other models.
    assert "cells like yours with other models" in found["ddp", 4].how_sure
    unseen = PlanRequest(profile=model, clusters=clusters, strategies=("crossbow",))
    assert make_plan(unseen).predictions[0].how_sure == "nothing like this was ever measured"
    assert make_plan(unseen).predictions[0].checked_within is None


def test_of_a_strategy_that_was_checked_on_some_clusters_it_is_said_on_how_many() -> None:
    """Else one line says that it was checked, and the next that nothing like it was measured."""
    clusters = [from_flags(workers=8, link=rate) for rate in ("1gbit", "10gbit", "1tbit")]
    request = PlanRequest(
        profile=shipped_profile("resnet50"), clusters=clusters, strategies=("ddp", "localsgd")
    )
    made = make_plan(request)
    of_ddp = [one.how_sure for one in made.predictions if one.strategy == "ddp"]
    assert len(set(of_ddp)) > 1
    said = [line for line in made.remarks if line.startswith("How sure: ")]
    for words in set(of_ddp):
        (line,) = [line for line in said if line.endswith(f": {words}.")]
        assert f"ddp on {of_ddp.count(words)} of 3 clusters" in line
    assert not any("localsgd on" in line for line in said)


def test_a_comparison_that_was_stopped_is_refused(tmp_path: Path) -> None:
    """Of its later seeds there are no runs."""
    directory = recorded(tmp_path, {"ddp": [predicted_s("ddp")] * STEPS})
    stopped = read_comparison(directory).model_copy(update={"status": "stopped", "seeds": [0, 1]})
    ddp = stopped.strategies[0]
    ddp = ddp.model_copy(update={"runs": [*ddp.runs, "runs/ddp-seed-1"]})
    write_comparison(directory, stopped.model_copy(update={"strategies": [ddp]}))
    with pytest.raises(ConfigError, match="has not finished .*'stopped'"):
        check_comparison(directory, MODEL)


def test_a_strategy_that_was_compared_with_other_options_too_counts_as_checked(
    tmp_path: Path,
) -> None:
    directory = recorded(
        tmp_path / "compare", {"crossbow tau=2": [predicted_s("crossbow")] * STEPS}
    )
    found = check_comparison(directory, MODEL).profile
    rate = CLUSTER.limited_rates[0]
    assert found.checked_like(workers=2, rate_bit_per_s=rate, latency_s=0.0, strategy="crossbow")


def test_halves_of_shared_samples_go_from_merge_to_merge(tmp_path: Path) -> None:
    """Merges come after 4 to 9 steps, and one half of the steps has more of them."""
    merges = (12, 18, 25, 29, 38)
    durations_s = [0.3 + 0.3 * (step in merges) for step in range(1, STEPS + 1)]
    directory = recorded(tmp_path, {"adaptive": durations_s})
    for number, step in enumerate(merges):
        made = MegaBatch(
            number=number + 1,
            epoch=0,
            step=step,
            seconds=0.3 * step,
            at_s=50 + 0.3 * step,
            duration_s=1.0,
            merge_s=0.1,
            by_rank=[],
        )
        add_mega_batch(directory / "runs/adaptive-seed-0", made)
    (one,) = check_comparison(directory, MODEL).steps
    assert one.repeats_differ == pytest.approx(0.0, abs=1e-6)


def test_halves_with_other_kinds_of_steps_are_compared_kind_by_kind(tmp_path: Path) -> None:
    """K-FAC's steps with factors and inversions are more in the first half of a run."""
    model = shipped_profile("resnet50")
    settings = DKFAC().settings()
    kinds = [(settings.has_factors(s), settings.has_inversions(s)) for s in range(STEPS)]
    durations_s = [0.5 + 0.5 * factors + 0.5 * inversions for factors, inversions in kinds]
    assert np.mean(durations_s[4:HALF]) > 1.2 * np.mean(durations_s[HALF:])
    directory = recorded(tmp_path, {"dkfac": durations_s}, num_parameters=model.num_elements)
    (one,) = check_comparison(directory, model).steps
    assert one.repeats_differ == pytest.approx(0.0, abs=1e-6)
    assert one.is_judged


def test_a_check_of_the_same_record_replaces_the_one_before(tmp_path: Path) -> None:
    directory = recorded(tmp_path, {"ddp": [predicted_s("ddp")] * STEPS})
    once = check_comparison(directory, MODEL).profile
    again = check_comparison(directory, once).profile
    assert len(once.checked) == len(again.checked) == 1
    assert replace(again, checked=()) == MODEL
