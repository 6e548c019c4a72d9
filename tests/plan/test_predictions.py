"""Predictions against arithmetic that is done by hand, and against what was published."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from conformance_support.lent import lent
from offbeat.codec.json_objects import build
from offbeat.codec.topk_codec import SELECTORS
from offbeat.errors import ConfigError
from offbeat.simulation.training import TensorProfile
from offbeat.strategies.allreduce import AllReduce
from offbeat.strategies.dear import DeAR
from offbeat.strategies.kfac import KFACStrategy
from offbeat.strategies.registry import REGISTRY, SCHEDULES, WEIGHT_CODECS
from offbeat_lab.cli.main import app
from offbeat_lab.cluster import Cluster, LinkSpec, RackSpec, Straggling, from_flags
from offbeat_lab.options import build_strategy, parse_spec, strategy_type
from offbeat_lab.plan.bands import Band
from offbeat_lab.plan.plans import PlanRequest, make_plan, plan_as_json
from offbeat_lab.plan.predictions import (
    StepPrediction,
    predict_recipe,
    predict_step,
    setting_of,
)
from offbeat_lab.plan.profile import ModelProfile, TimedBatch, read_profile
from offbeat_lab.plan.shipped import (
    PUBLISHED,
    factors_of,
    named_profile,
    resnet,
    shipped_profile,
    tensors_of,
    with_low_rank,
)
from offbeat_lab.plan.simulation import Setting
from offbeat_lab.plan.tables import plan_tables
from offbeat_lab.tasks import build_task
from thread_support.world import ThreadDriver, results_of, session_on

MODEL = ModelProfile(
    name="toy",
    device="none",
    batches=(TimedBatch(batch_size=10, forward_s=0.1, backward_s=0.2),),
    optimizer_s=0.0,
    tensors=tuple(TensorProfile(num_elements=250_000, ready=1 - n / 4) for n in range(4)),
    select_s_per_element=1e-8,
    copy_s_per_byte=0.0,
)


def setting(link: str = "8mbit", workers: int = 4, **flags: str) -> Setting:
    cluster = from_flags(workers=workers, link=link, **flags)
    return Setting(
        profile=MODEL,
        cluster=cluster.model_copy(update={"gloo_ns_per_byte": 0.0}),
        message_s=0.0,
        payload_share=1.0,
    )


def few_layers(number: int = 9) -> ModelProfile:
    """The last two stages of ResNet-50, with one block each: its largest factors and a sixth of its
    layers. Or the last `number` of them.
    """
    network = resnet((1, 1, 1, 1))[-number:]
    return replace(
        shipped_profile("resnet50"), tensors=tensors_of(network), layers=factors_of(network)
    )


WITH_TALLIES = 1e-4
"""Tallies, and agreements on what is averaged, travel beside gradients and weights."""


def in_mebibytes(where: Setting) -> StepPrediction:
    """An all-reduce in buckets of 1 MiB."""
    return predict_recipe("allreduce", "allreduce", lent(AllReduce(), bucket_mib=1.0), where)


def test_an_all_reduce_behind_a_slow_link_takes_forward_first_bucket_and_ring() -> None:
    # A megabyte each in four tensors, one bucket each at 1 MiB: 4 MB at 1 MB/s.
    step_s = in_mebibytes(setting()).step_s
    assert step_s == pytest.approx(0.1 + 0.05 + 2 * 3 / 4 * 4.0, rel=WITH_TALLIES)


def test_an_exchange_that_fits_behind_the_backward_pass_costs_its_last_bucket_only() -> None:
    step_s = in_mebibytes(setting("8gbit")).step_s
    assert step_s == pytest.approx(0.3 + 2 * 3 / 4 * 1e-3)


def test_halves_of_an_all_reduce_hide_behind_both_passes_and_divide_the_optimizers_state() -> None:
    where = setting("160mbit")  # .0375 s for half a bucket of four
    whole, halves = (
        predict_recipe(one.name, one.name, lent(one, bucket_mib=1.0), where)
        for one in (AllReduce(), DeAR())
    )
    assert whole.step_s == pytest.approx(0.1 + 0.05 + 0.3, rel=WITH_TALLIES)
    # The last reduce-scatter is behind backward, and the last layer computes behind four gathers.
    forward_s, backward_s = 4 * 0.0375 + 0.1 / 4, 0.2 + 0.0375
    assert halves.step_s == pytest.approx(forward_s + backward_s, rel=WITH_TALLIES)
    assert halves.bytes_per_step == pytest.approx(whole.bytes_per_step, rel=WITH_TALLIES)
    assert whole.memory_bytes - halves.memory_bytes == pytest.approx(3 / 4 * 4e6, rel=1e-3)


def test_the_first_of_accumulated_passes_waits_for_parameters() -> None:
    where = setting("160mbit")  # .0375 s for half a bucket of four
    four = replace(where, profile=MODEL.accumulated(4))
    found = predict_recipe("dear", "dear", lent(DeAR(), bucket_mib=1.0), four)
    # The last layer computes behind four gathers. What follows hides all but the last scatter.
    first_s, others_s = 4 * 0.0375 + 0.1 / 4 + 0.2, 3 * 0.3
    assert found.step_s == pytest.approx(first_s + others_s + 0.0375, rel=WITH_TALLIES)


LOCAL = "localsgd:warmup=0:optimizer_state=local"


def test_local_steps_divide_the_exchange_by_their_period() -> None:
    assert predict_step(f"{LOCAL}:period=5", setting()).step_s == pytest.approx(
        0.3 + 6.0 / 5, rel=WITH_TALLIES
    )


def test_a_rank_of_a_pair_sends_its_weights_once() -> None:
    step_s = predict_step("localsgd:exchange=pairs:period=5:outer=diloco", setting()).step_s
    assert step_s == pytest.approx(0.3 + 4.0 / 5, rel=WITH_TALLIES)


@pytest.mark.parametrize("period", SCHEDULES)
def test_every_named_schedule_is_predicted(period: str) -> None:
    step_s = predict_step(f"localsgd:optimizer_state=local:period={period}", setting()).step_s
    assert 0.3 < step_s < 0.3 + 6.0


def test_an_adam_of_signs_is_predicted_to_send_less_in_each_of_its_phases() -> None:
    def bytes_per_step(spec: str, first: int) -> float:
        where = replace(setting(), steps=range(first, first + 32))
        return predict_step(spec, where).bytes_per_step

    dense = bytes_per_step("allreduce", 0)
    second_moments, signs, local = (
        bytes_per_step("zerooneadam:freeze_step=1000", first) for first in (0, 200, 20000)
    )
    assert dense / 4 < second_moments < dense
    assert dense / 32 < signs < second_moments / 2
    assert 0 < local < dense / 32 / 8


def test_momentum_travels_as_signs_once_second_moments_are_frozen() -> None:
    def bytes_per_step(spec: str, steps: range | None = None) -> float:
        return predict_step(spec, replace(setting(), steps=steps)).bytes_per_step

    dense, signs = bytes_per_step("allreduce"), bytes_per_step("onebitadam")
    assert dense / 32 < signs < dense / 30  # with a scale for 1,024 of them
    both = bytes_per_step("onebitadam:freeze_step=6", range(12))
    assert both == pytest.approx((dense + signs) / 2, rel=1e-3)


@cache
def planned_bytes(spec: str) -> float:
    return predict_step(spec, setting()).bytes_per_step


@pytest.mark.parametrize("spec", [f"{LOCAL}:period=5", "adaptive:warmup=0:optimizer_state=local"])
@pytest.mark.parametrize("codec", WEIGHT_CODECS)
def test_every_named_codec_of_weights_is_predicted_to_send_less(codec: str, spec: str) -> None:
    whole, coded = planned_bytes(spec), planned_bytes(f"{spec}:codec={codec}")
    assert 0 < coded < whole / 2


def test_the_first_steps_of_a_run_are_predicted_as_they_are() -> None:
    """The period grows from 1, gradients are all-reduced at first, factors are denser at first."""
    first, later = range(12), range(1000, 1012)

    def step_s(spec: str, steps: range) -> float:
        return predict_step(spec, replace(setting(), steps=steps)).step_s

    assert step_s("localsgd:period=4:warmup=6:optimizer_state=local", later) == pytest.approx(
        0.3 + 6.0 / 4, rel=WITH_TALLIES
    )
    # Averages after steps 1 to 11; then two steps pass.
    assert step_s("localsgd:period=4:warmup=6:optimizer_state=local", first) == pytest.approx(
        0.3 + 11 / 12 * 6.0, rel=WITH_TALLIES
    )
    both = step_s("localsgd:period=4:start_step=6", first)
    several = (6 * step_s("ddp", first) + 6 * 0.3 + 6.0) / 12
    assert both == pytest.approx(several, rel=WITH_TALLIES)
    kfac = replace(few_layers(2), precondition_s=0.0)
    cluster = from_flags(workers=4, link="1gbit")

    def simulated_s(spec: str, steps: range) -> float:
        return predict_step(
            spec, Setting(profile=kfac, cluster=cluster, steps=steps), Band()
        ).step_s

    one_s, all_s, factors_s = (
        simulated_s("dkfac", steps) for steps in (range(11, 12), range(1), range(10, 11))
    )
    # Factors in steps 0 to 10, inversions in 0, 1, 2, 4 and 8.
    expected_s = 5 * all_s + 6 * factors_s + one_s
    assert 12 * simulated_s("dkfac", first) == pytest.approx(expected_s, rel=1e-3)


@pytest.mark.parametrize(
    "spec", ["localsgd:period=4:start_step=", "onebitadam:freeze_step=", "topk:warmup=1.0x"]
)
def test_a_plan_shows_the_steps_behind_a_long_warm_up(spec: str) -> None:
    short, long = (predict_step(f"{spec}{steps}", setting()).step_s for steps in (10, 50_000))
    assert long == pytest.approx(short)
    assert long < predict_step("allreduce", setting()).step_s / 2


def test_factors_that_a_strategy_cuts_are_cheaper() -> None:
    where = Setting(profile=few_layers(), cluster=from_flags(workers=4, link="1gbit"))
    whole, cut = (
        predict_step(f"dkfac:max_dim={rows}", where).bytes_per_step for rows in (8192, 1024)
    )
    no_factors = predict_step("allreduce", where).bytes_per_step
    # Triangles of 4,608 and 2,304 rows are most of all factors.
    assert 0.2 < (cut - no_factors) / (whole - no_factors) < 0.5
    named = predict_step("dkfac:max_dim=1024:plain=fc", where).bytes_per_step
    assert named == cut, "a profile knows no names of layers"


WITH_PROPOSALS = 2e-3
"""A merge begins with what each rank tells of its claims, and ends with a commit."""


def test_merges_of_the_first_steps_are_as_many_as_the_run_makes() -> None:
    """Mega-batches are of 25 steps of four ranks; a merge takes as long as an all-reduce."""
    spec = "adaptive:optimizer_state=local:overlap=false:warmup="

    def step_s(warmup: int, steps: range, option: str = "") -> float:
        return predict_step(f"{spec}{warmup}{option}", replace(setting(), steps=steps)).step_s

    # Gradients before each of 12 steps, then models after every third one.
    assert step_s(6, range(12)) == pytest.approx(0.3 + 6.0, rel=WITH_PROPOSALS)
    assert step_s(6, range(12, 18)) == pytest.approx(0.3 + 6.0 * 2 / 6, rel=WITH_PROPOSALS)
    # Models after each of 6 steps, then after every second one.
    published = step_s(6, range(12), ":rule=published")
    assert published == pytest.approx(0.3 + 6.0 * 9 / 12, rel=WITH_PROPOSALS)
    assert step_s(6, range(1000, 1025)) == pytest.approx(0.3 + 6.0 / 25, rel=WITH_PROPOSALS)
    assert step_s(0, range(12)) == pytest.approx(0.3, rel=WITH_PROPOSALS)
    assert predict_step(f"{spec}6", setting()).step_s == pytest.approx(
        0.3 + 6.0 / 25, rel=WITH_PROPOSALS
    )


def test_merges_beside_training_take_what_training_leaves_of_them() -> None:
    """By default those of whole mega-batches, of 25 steps, but not those of the first steps."""
    spec = "adaptive:optimizer_state=local:warmup=6"
    first, later = range(12), range(1000, 1025)

    def step_s(option: str, steps: range) -> float:
        return predict_step(spec + option, replace(setting(), steps=steps)).step_s

    def close(step_s: float) -> float:
        return pytest.approx(step_s, rel=WITH_PROPOSALS)  # type: ignore[return-value]

    assert step_s("", first) == step_s(":overlap=false", first)
    assert step_s("", later) == step_s(":overlap=true", later) == close(0.3)
    assert step_s(":rule=published", later) == close(0.3 + 6.0 / 25)
    # A step of 0.3 s, and then one beside each of 8 merges of 6 s; the ninth goes on behind them.
    assert step_s(":rule=published:overlap=true", first) == close((0.3 + 8 * 6.0) / 12)


@pytest.mark.parametrize("moments", [0, 1, 2])
@pytest.mark.parametrize("name", ["adaptive", "localsgd"])
def test_an_averaged_state_is_sent_with_the_model(name: str, moments: int) -> None:
    where = replace(setting(), profile=replace(MODEL, moments=float(moments)))
    averaged, local = (
        predict_step(f"{name}:optimizer_state={state}", where).bytes_per_step
        for state in ("averaged", "local")
    )
    assert averaged == pytest.approx((1 + moments) * local, rel=WITH_PROPOSALS)


@pytest.mark.parametrize(
    ("spec", "copies"),
    [
        ("alone", 0),
        ("ddp", 1),  # gradients are copied to buckets
        ("allreduce", 0),  # they lie in them
        ("topk", 1),  # what is owed
        ("ef21", 2),
        (f"{LOCAL}:outer=diloco", 3),  # anchor, momentum, and what is averaged
        (f"{LOCAL}:codec=sparseloco", 4),  # anchor, buckets, what is owed and what is sent
    ],
)
def test_memory_is_what_callbacks_hold(spec: str, copies: int) -> None:
    held = predict_step(spec, setting()).memory_bytes / MODEL.num_bytes - 2 - MODEL.moments
    assert held == pytest.approx(copies, rel=0.01, abs=0.01)


@pytest.mark.parametrize("flags", [{"speeds": "1,0.5"}, {"delay": "1x320ms"}])
def test_one_worker_stands_for_those_that_wait_for_the_slowest_in_each_step(
    flags: dict[str, str],
) -> None:
    class Apart(AllReduce):
        name = "apart"
        replicas_differ = True  # so that all workers are simulated

    where = setting("100mbit", 4, **flags)
    one = in_mebibytes(where).step_s
    all_of_them = predict_recipe("apart", "apart", lent(Apart(), bucket_mib=1.0), where).step_s
    assert one == pytest.approx(all_of_them)


@pytest.mark.parametrize("steps", [range(12), None])
def test_states_at_intervals_of_their_own_are_sent_as_often(steps: range | None) -> None:
    adam = replace(setting(), profile=replace(MODEL, moments=2.0), steps=steps)
    intervals, local = (
        predict_step(f"localsgd:warmup=0:period=1:optimizer_state={state}", adam).bytes_per_step
        for state in ("exp_avg=3+exp_avg_sq=6", "local")
    )
    assert intervals == pytest.approx((1 + 1 / 3 + 1 / 6) * local, rel=WITH_TALLIES)


def test_averages_of_groups_are_planned_however_seldom_they_are() -> None:
    often, seldom = (
        predict_step(f"wagma:period={2 * steps}:interval={steps}", setting("1gbit")).bytes_per_step
        for steps in (5, 50)
    )
    assert seldom == pytest.approx(often / 10, rel=0.01)


def test_a_step_of_a_graph_is_the_mean_over_all_of_its_distances() -> None:
    cluster = setting(workers=8).cluster.changed(racks=RackSpec(size=4, rate_bit_per_s=8e6))
    where = replace(setting(), cluster=cluster)
    whole, of_any, *each = (
        predict_step("sgp", replace(where, steps=steps), Band()).step_s
        for steps in (range(300, 312), None, *(range(n, n + 1) for n in (300, 301, 302)))
    )
    assert of_any == pytest.approx(whole, rel=0.01)
    assert 1.2 * min(each) < whole < max(each) / 1.2


def test_how_a_bucket_travels_depends_on_no_other_one() -> None:
    """Four small tensors together are as large as the other one."""

    def bytes_per_step(num_elements: int) -> float:
        small = (TensorProfile(num_elements=512, ready=1.0),) * 4
        tensors = (TensorProfile(num_elements=num_elements, ready=1.0), *small)
        where = replace(setting(), profile=replace(MODEL, tensors=tensors))
        spec = "gtopk:density=0.01:collective=tree"
        return predict_step(spec, where).bytes_per_step

    assert bytes_per_step(4 * 512) == pytest.approx(bytes_per_step(4 * 512 + 1), rel=0.01)


@pytest.mark.parametrize("first", ["allreduce", "spdkfac"])
def test_local_sgd_begins_with_what_it_is_told_to(first: str) -> None:
    profile = replace(few_layers(2), precondition_s=0.01)
    where = Setting(profile=profile, cluster=from_flags(workers=4, link="1gbit"))
    spec = f"localsgd:period=4:start_step=10:start={first}"

    def step_s(name: str, steps: range) -> float:
        return predict_step(name, replace(where, steps=steps)).step_s

    alone, later = step_s(first, range(10)), step_s(f"{LOCAL}:period=4", range(12))
    # Of steps that are alike a few are predicted where there is nothing else.
    assert step_s(spec, range(22)) == pytest.approx((10 * alone + 12 * later) / 22, rel=0.02)
    assert predict_step(spec, where).step_s == pytest.approx(later)


MANY_SMALL = [(200, 300), (200,), (50, 200), (50,), (10, 50), (10,)]


@pytest.mark.parametrize(
    "strategy",
    [
        "gtopk:density=0.05:collective=tree",
        "gtopk:density=0.1:collective=reduce_scatter",
        "gtopk:density=0.05:collective=all_gather",
        "gtopk:density=0.05:collective=dense",
        "gtopk:density=0.05:collective=all_gather:warmup=1.0x1+0.2x2",
        "topk:density=0.05",
        "allreduce",
        "localsgd:period=2",
        "dpsgd",
        "dpsgd:codec=linear4",
        "crossbow:codec=linear4",
        "sgp:codec=linear4",
        "defsgd",
    ],
)
def test_as_many_bytes_are_planned_as_a_session_sends(strategy: str) -> None:
    workers, num_steps = 3, 4
    name, options = parse_spec(strategy)
    recipe = build_strategy(name, options)

    def job(driver: ThreadDriver) -> int:
        weights = torch.nn.ParameterList([torch.zeros(shape) for shape in MANY_SMALL])
        draw = torch.Generator().manual_seed(driver.rank)
        optimizer = torch.optim.SGD(weights.parameters(), lr=0.1)
        with session_on(driver, weights, optimizer, recipe) as session:
            for _ in range(num_steps):
                parts = [(w * torch.randn(w.shape, generator=draw)).sum() for w in weights]
                torch.stack(parts).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return session.stats.bytes_sent

    sent = sum(results_of(workers, job)) / workers / num_steps
    tensors = tuple(
        TensorProfile(num_elements=math.prod(shape), ready=1.0, rows=shape[0])
        for shape in MANY_SMALL
    )
    where = replace(setting(workers=workers), profile=replace(MODEL, tensors=tensors), shared=0.0)
    if any(each in strategy for each in ("warmup", "dpsgd:codec", "sgp:codec")):  # exact at first
        where = replace(where, steps=range(num_steps))
    # Of counters of magnitudes only an expected number is planned.
    tolerance = 0.1 if "reduce_scatter" in strategy else 0.03
    assert predict_step(strategy, where).bytes_per_step == pytest.approx(sent, rel=tolerance)


def test_neighbours_exchange_while_gradients_are_computed() -> None:
    assert predict_step("dpsgd", setting("800mbit")).step_s == pytest.approx(0.3, rel=0.01)
    assert predict_step("dpsgd", setting()).step_s == pytest.approx(0.1 + 8.0, rel=0.01)


def test_without_overlap_wagma_waits_for_its_averages() -> None:
    # 4 MB at 20 MB/s.
    there = setting("160mbit", workers=2)
    beside, behind = (
        predict_step(f"wagma:values=float32:overlap={overlap}", there).step_s
        for overlap in ("true", "false")
    )
    assert (beside, behind) == pytest.approx((0.3, 0.3 + 0.2), rel=0.05)


@pytest.mark.parametrize(("values", "bits"), [("e3m0", 4), ("linear8", 8)])
def test_wagma_is_planned_to_send_groups_as_few_bits_as_its_codec(values: str, bits: int) -> None:
    """Four workers in pairs: a vector in each step, and 1.5 in bfloat16 in every tenth."""
    planned = predict_step(f"wagma:values={values}", setting("10gbit")).bytes_per_step
    expected = 1_000_000 * (0.9 * bits / 8 + 0.1 * 1.5 * 2)
    assert planned == pytest.approx(expected, rel=0.1)


def test_factors_in_fewer_bits_are_planned_to_take_fewer_bytes() -> None:
    cluster = from_flags(workers=4, link="1gbit")
    where = Setting(
        profile=few_layers(), cluster=cluster, steps=range(10, 11)
    )  # with factors, and without inversions
    gradients = predict_step("allreduce", where).bytes_per_step
    whole, halved, quartered = (
        predict_step(f"dkfac:factor_codec={codec}", where).bytes_per_step - gradients
        for codec in ("float32", "bfloat16", "linear8")
    )
    assert 0 < halved == pytest.approx(whole / 2, rel=1e-3)
    assert 0 < quartered == pytest.approx(whole / 4, rel=0.02)  # with scales and diagonals


def test_a_lower_limit_is_marked_and_not_recommended() -> None:
    clusters = [from_flags(workers=4, link=rate) for rate in ("2mbit", "200mbit")]
    plan = make_plan(PlanRequest(profile=MODEL, clusters=clusters, strategies=["ddp", "wagma"]))
    slow, fast = plan_tables(plan)
    assert (slow.rows[1][1][0], slow.best) == (">", 0)
    assert (fast.rows[1][1][0] == ">", fast.best) == (False, 1)
    assert plan.crossovers == ("4 workers: below 20 Mbit/s ddp, above 20 Mbit/s wagma.",)


@pytest.mark.parametrize("strategy", ["wagma", "adpsgd"])
def test_averages_that_take_many_steps_are_said_to_look_too_fast(strategy: str) -> None:
    # 4 MB or half of it, at 25 MB/s and at 0.25 MB/s, beside steps of 0.3 s.
    fast, slow = (predict_step(strategy, setting(link)) for link in ("200mbit", "2mbit"))
    assert (fast.is_lower_limit, fast.note) == (False, "")
    assert slow.is_lower_limit
    assert "its step is a lower limit" in slow.note


def test_of_many_workers_that_all_differ_in_speed_some_are_simulated() -> None:
    """One of 32 is slow, so the pattern of speeds is as long as the cluster."""
    where = setting("100mbit", 32, speeds=",".join(["1"] * 31 + ["0.5"]))
    found = predict_step("wagma", where)
    assert where.ideal_s <= found.step_s < 1.5 * where.ideal_s


def test_unequal_workers_share_samples_by_speed() -> None:
    uneven = setting("8gbit", speeds="1,0.5")
    shared, equal = (predict_step(name, uneven) for name in ("adaptive", "elasticsgd"))
    assert shared.samples_per_s == pytest.approx(2 * 10 / 0.3 + 2 * 10 / 0.6, rel=0.03)
    assert equal.samples_per_s == pytest.approx(4 * 10 / 0.6, rel=0.03)


def test_samples_a_second_are_those_of_all_ranks_each_at_its_own_pace() -> None:
    """A step takes 0.3 s on fast workers, and 1.2 s on the slow one."""
    where = setting("100gbit", speeds="1,1,1,0.25")
    found = {
        strategy: predict_step(strategy, where)
        for strategy in ("alone", "allreduce", "wagma", "adaptive")
    }
    alone = 3 * 10 / 0.3 + 10 / 1.2
    assert found["alone"].samples_per_s == pytest.approx(alone)
    assert found["allreduce"].share_of_ideal == pytest.approx(4 * 10 / 1.2 / alone, rel=0.05)
    for strategy, one in found.items():
        assert one.share_of_ideal == pytest.approx(one.samples_per_s / alone)
        assert one.share_of_ideal <= 1.02, strategy
    # One of four is late by chance in each step.
    late = predict_step("alone", setting(delay="1x300ms"))
    assert late.samples_per_s == pytest.approx(4 * 10 / (0.3 + 0.3 / 4))


@pytest.mark.parametrize("who", [8, tuple(range(16, 64))])
def test_as_large_a_share_of_many_workers_is_late_as_of_the_few_that_are_simulated(
    who: int | tuple[int, ...],
) -> None:
    where = setting("8gbit", 64)
    straggling = (Straggling(workers=who, delay_s=0.32),)
    late = replace(where, cluster=where.cluster.changed(straggling=straggling))
    found = predict_step("adaptive:warmup=0:optimizer_state=local", late)
    assert found.step_s < 1.1 * late.ideal_s
    assert 0.9 < found.share_of_ideal < 1.02


def test_all_wait_for_one_of_many_workers_that_is_named() -> None:
    late = setting("8gbit", 64, delay="rank40x2s")
    assert predict_step("elasticsgd", late).step_s > 2.0


@pytest.mark.parametrize(
    "spec", ["adaptive:warmup=0:optimizer_state=local:overlap=false", "wagma:overlap=false"]
)
def test_many_workers_in_two_racks_share_their_connections(spec: str) -> None:
    """32 share 40 MB/s between racks, and have 1 GB/s each within them."""
    where = setting("8gbit", 64)
    racks = RackSpec(size=32, rate_bit_per_s=3.2e8)
    apart = replace(where, cluster=where.cluster.changed(racks=racks))
    assert predict_step(spec, apart).step_s > 1.3 * predict_step(spec, where).step_s


def test_all_wait_for_the_slow_link_of_one_of_many_workers() -> None:
    where = setting("8gbit", 64)
    cluster = where.cluster.changed(links={40: LinkSpec(rate_bit_per_s=8e6)})
    slow = predict_step("elasticsgd", replace(where, cluster=cluster))
    assert slow.step_s > 1.5 * predict_step("elasticsgd", where).step_s


@pytest.mark.parametrize("delay", ["1x2s:1%", "1x2s:30%", "rank1x1s:5%,rank2x1s:5%", "1x10s:0.2%"])
def test_a_delay_that_is_rare_is_in_the_mean_step_of_those_who_wait(delay: str) -> None:
    where = setting("8gbit", delay=delay)
    mean_s = {"1x2s:1%": 0.02, "1x2s:30%": 0.6, "1x10s:0.2%": 0.02}.get(delay, 0.1)
    undisturbed_s = predict_step("allreduce", setting("8gbit")).step_s
    assert predict_step("allreduce", where).step_s == pytest.approx(undisturbed_s + mean_s)


def test_a_straggler_holds_up_all_but_those_who_wait_for_nobody() -> None:
    late = setting("8gbit", workers=8, delay="1x320ms")
    synchronous, waiting_for_nobody = (predict_step(s, late) for s in ("ddp", "adpsgd"))
    assert synchronous.step_s > 0.62 - 0.02
    assert synchronous.binds == "waiting"
    assert waiting_for_nobody.step_s < 0.3 + 0.32 / 8 + 0.02


@pytest.mark.parametrize("name", ["adaptive", "eagersgd", "localsgd", "wagma"])
def test_a_worker_without_peers_waits_for_none(name: str) -> None:
    alone = setting(workers=1, delay="1x100ms")
    assert predict_step(name, alone).step_s == pytest.approx(0.4)


@pytest.mark.parametrize("spec", sorted({*REGISTRY} - {"auto"}))
def test_every_strategy_is_predicted(spec: str) -> None:
    # Of an odd number of elements, so that ranks' parts of a vector differ in length.
    tensors = (TensorProfile(num_elements=249_999, ready=1.0), *MODEL.tensors[1:])
    where = replace(setting("1gbit/0.1ms"), profile=replace(MODEL, tensors=tensors))
    if issubclass(strategy_type(spec), KFACStrategy):  # which has to know the layers
        where = replace(where, profile=few_layers(2))
    prediction = predict_step(spec, where)
    assert prediction.step_s >= where.profile.compute_s
    assert prediction.low_s <= prediction.step_s <= prediction.high_s
    assert strategy_type(spec).name == spec


def test_what_chooses_while_it_trains_is_not() -> None:
    with pytest.raises(ConfigError, match="plan for those that it chooses among"):
        predict_step("auto", setting())


def test_a_strategy_of_ones_own_is_predicted() -> None:
    class Own(AllReduce):
        name = "own"

    found = predict_recipe("own", "own", lent(Own(), bucket_mib=1.0), setting())
    assert found.step_s == in_mebibytes(setting()).step_s


@pytest.mark.parametrize("collective", ["tree", "reduce_scatter", "all_gather"])
def test_a_closed_form_goes_on_where_events_end(collective: str) -> None:
    """65 workers take the closed form, 64 every message: nothing jumps."""
    spec = f"gtopk:density=0.01:collective={collective}"
    few, more = (predict_step(spec, setting("1gbit/0.1ms", workers=n)).step_s for n in (64, 65))
    tolerance = 0.35 if collective == "tree" else 0.05  # the tree has one round more
    assert more - 0.3 == pytest.approx(few - 0.3, rel=tolerance)


def test_words_name_the_rate_at_which_the_best_strategy_changes() -> None:
    clusters = [from_flags(workers=4, link=link) for link in ("8mbit", "100gbit")]
    strategies = ("ddp", "gtopk:density=0.001")
    plan = make_plan(PlanRequest(profile=MODEL, clusters=clusters, strategies=strategies))
    assert len(plan.crossovers) == 1
    assert "gtopk:density=0.001, above" in plan.crossovers[0]
    assert plan.crossovers[0].endswith("ddp.")


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_shipped_profile_survives_its_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(shipped_profile(name).to_json())
    assert read_profile(path) == shipped_profile(name)
    assert all(source.source for source in shipped_profile(name).sources)


def test_networks_have_the_parameters_that_they_are_known_for() -> None:
    known = {"resnet50": 25_557_032, "resnet152": 60_192_808, "densenet201": 20_013_928}
    known |= {"alexnet": 61_100_840, "gpt2": 124_439_808}
    assert {name: shipped_profile(name).num_elements for name in known} == known
    assert len(factors_of(resnet((3, 4, 6, 3)))) == 54


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "is no profile"),
        ("[]", "is no profile"),
        (json.dumps({"name": "x"}), "is no profile"),
        (MODEL.to_json().replace('"format": 2', '"format": 9'), "format 9"),
        (MODEL.to_json().replace("0.2", "-1"), "backward_s: -1"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_in_a_sentence(
    text: str, complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        named_profile(str(path))


@pytest.mark.parametrize(
    ("cluster", "spec", "complaint"),
    [
        (Cluster(workers=4), "ddp", "says no rate"),
        (from_flags(workers=4, link="1gbit"), "wagma:group_size=8", "group_size is 8"),
        (from_flags(workers=4, link="1gbit"), "spdkfac", "no layers with Kronecker factors"),
    ],
)
def test_what_cannot_be_predicted_is_refused_in_a_sentence(
    cluster: Cluster, spec: str, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make_plan(PlanRequest(profile=MODEL, clusters=[cluster], strategies=[spec]))


@pytest.mark.parametrize("workers", ["0", "8..4", "many", "4,0"])
def test_workers_that_cannot_be_are_refused(workers: str) -> None:
    result = CliRunner().invoke(
        app, ["plan", "--profile", "vgg16", "--link", "1gbit", "--workers", workers]
    )
    assert isinstance(result.exception, ConfigError)
    assert "--workers" in str(result.exception)


def test_the_command_prints_json() -> None:
    arguments = ["plan", "--profile", "vgg16.json", "--link", "1gbit,10gbit", "--workers", "2..4"]
    arguments += ["--strategies", "ddp,localsgd", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    made = json.loads(result.output)
    assert len(made["predictions"]) == 2 * 2 * 2
    assert [one["strategy"] for one in made["recommended"]] == ["localsgd"] * 4
    assert all(one["how_sure"] for one in made["predictions"])
    assert made["profile"]["not_measured"] == []


def test_where_each_worker_has_a_link_of_its_own_the_plan_has_their_rate() -> None:
    links = {worker: LinkSpec(rate_bit_per_s=1e9) for worker in range(2)}
    clusters = [Cluster(workers=2, links=links)]
    plan = make_plan(PlanRequest(profile=MODEL, clusters=clusters, strategies=("ddp",)))
    text = json.dumps(plan_as_json(plan), allow_nan=False)
    assert [one["rate_bit_per_s"] for one in json.loads(text)["recommended"]] == [1e9]
    assert plan.crossovers == ("2 workers: ddp at 1 Gbit/s.",)


def test_what_exchanges_nothing_is_no_recommendation() -> None:
    cluster = from_flags(workers=4, link="8mbit")
    for strategies, best in ((("alone", "ddp"), "ddp"), (("alone",), "alone")):
        plan = make_plan(PlanRequest(profile=MODEL, clusters=[cluster], strategies=strategies))
        assert plan.best(4, 8e6).strategy == best


def test_a_row_of_the_table_is_one_line_of_80_columns(tmp_path: Path) -> None:
    file = tmp_path / "office.toml"
    file.write_text('workers = 1024\nlink = "1gbit"\ndeaths_per_hour = 0.01')
    arguments = ["plan", "--profile", "resnet20", "--cluster", str(file)]
    arguments += ["--strategies", "ddp,ddp-powersgd,localsgd"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    title, heads, _, *rows = result.output.partition("\nStep:")[0].splitlines()
    assert title.split() == ["1024", "workers,", "1", "Gbit/s"]
    assert [row.split()[0] for row in rows] == ["ddp", "ddp-powersgd", "localsgd"]
    # "84 ms" and "70 to 90" are two and three words, "MB sent" is two.
    assert [len(row.split()) for row in rows] == [len(heads.split()) + 3] * 3


def test_a_task_is_profiled_as_it_trains() -> None:
    result = CliRunner().invoke(app, ["profile", "--task", "digits", "--steps", "2"])
    assert result.exit_code == 0, result.output
    profile = build(ModelProfile, json.loads(result.output))
    task = build_task("digits", {})
    assert profile.num_elements == task.num_parameters()
    assert [batch.batch_size for batch in profile.batches] == [16, 32]
    assert {one.name for one in profile.selectors} == SELECTORS.keys() - {"exact"}
    # The last layer's gradients are ready before the first one's.
    assert profile.tensors[-1].ready < profile.tensors[0].ready <= 1


def test_accumulated_batches_have_factors_each() -> None:
    """ResNet-50's take 211 ms of 32 images."""
    fast = from_flags(workers=1, link="1000gbit")
    seconds = [
        predict_step("spdkfac:factor_interval=1", Setting(profile=each, cluster=fast)).step_s
        - predict_step("alone", Setting(profile=each, cluster=fast)).step_s
        for each in (few_layers(), few_layers().accumulated(4))
    ]
    assert seconds[1] - seconds[0] == pytest.approx(3 * 0.211)


def test_each_of_accumulated_batches_is_padded() -> None:
    cluster = from_flags(workers=1, link="1gbit", step_time="400ms")
    steps_s = [
        predict_step("alone", setting_of(MODEL.accumulated(batches), cluster)).step_s
        for batches in (1, 4)
    ]
    assert steps_s == pytest.approx([0.4, 1.6])


def test_another_batch_size_lies_on_the_line_through_those_that_were_timed() -> None:
    twice = replace(
        MODEL, batches=(TimedBatch(batch_size=5, forward_s=0.06, backward_s=0.12), *MODEL.batches)
    )
    assert twice.at_batch_size(20).batch.forward_s == pytest.approx(0.18)
    assert MODEL.at_batch_size(20).batch.backward_s == pytest.approx(0.4)


@pytest.mark.parametrize(("size", "forward_s", "backward_s"), [(1, 0.01, 0.2), (100, 1.475, 0.19)])
def test_no_batch_takes_no_time_however_the_timed_ones_lie(
    size: int, forward_s: float, backward_s: float
) -> None:
    """The larger one's forward pass took more than twice as long, its backward pass less."""
    small = TimedBatch(batch_size=5, forward_s=0.05, backward_s=0.2)
    large = TimedBatch(batch_size=10, forward_s=0.125, backward_s=0.19)
    batch = replace(MODEL, batches=(small, large)).at_batch_size(size).batch
    assert (batch.forward_s, batch.backward_s) == pytest.approx((forward_s, backward_s))


def test_time_and_money_are_those_of_what_is_asked_for_with_what_deaths_cost() -> None:
    arguments = ["plan", "--profile", "gpt2", "--link", "10gbit", "--workers", "4"]
    arguments += ["--strategies", "ddp,localsgd", "--json", "--price", "2.10/h", "--tokens", "1e9"]
    result = CliRunner().invoke(app, [*arguments, "--deaths", "0.5"])
    assert result.exit_code == 0, result.output
    for one in json.loads(result.output)["predictions"]:
        samples_per_s = one["samples_per_s"] * (1 - one["lost_to_deaths"])
        assert one["lost_to_deaths"] > 0
        assert one["goodput_per_s"] == pytest.approx(samples_per_s)
        assert one["time_s"] == pytest.approx(1e9 / 1024 / samples_per_s)
        assert one["cost"] == pytest.approx(2.10 * 4 * one["time_s"] / 3600)
    table = CliRunner().invoke(app, [word for word in arguments if word != "--json"]).output
    assert "cost" in table
    assert "Time and cost: to 1e+09 tokens" in " ".join(table.split())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(100, "100 s"), (150, "2.5 min"), (9_000, "2.5 h"), (216_000, "2.5 d"), (3e8, "3,472 d")],
)
def test_long_times_are_written_in_a_fitting_unit(seconds: float, text: str) -> None:
    clusters = [from_flags(workers=4, link="1gbit")]
    request = PlanRequest(profile=MODEL, clusters=clusters, strategies=("ddp",), samples=1.0)
    made = make_plan(request)
    timed = tuple(replace(one, time_s=seconds) for one in made.predictions)
    (table,) = plan_tables(replace(made, predictions=timed))
    assert table.rows[0][table.heads.index("time")] == text


def test_what_deaths_cost_counts_in_the_recommendation() -> None:
    """A death ends a run with DDP, and not with WAGMA, whose steps take longer here."""
    cluster = from_flags(workers=4, link="100gbit")
    for deaths, best in ((0.0, "ddp"), (12.0, "wagma")):
        clusters = [cluster.changed(deaths_per_hour=deaths)]
        strategies = ("ddp", "wagma")
        profile = shipped_profile("resnet50")
        plan = make_plan(PlanRequest(profile=profile, clusters=clusters, strategies=strategies))
        assert plan.best(4, 100e9).strategy == best
        assert best in plan.crossovers[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--price", "cheap"], "2.10/h"),
        (["--tokens", "1e9", "--samples", "1e9"], "give one of them"),
        (["--samples", "1e9", "--steps-from", "runs"], "give one of them"),
        (["--device", "h100"], "of --config"),
        (["--check", "runs", "--strategies", "ddp"], "leave --link, --strategies, --workers out"),
        (["--tokens", "1e9"], "how many a sample has"),
        (["--samples", "0"], "--samples is 0; allowed are finite numbers above 0"),
        (["--samples", "nan"], "--samples is nan"),
        (["--dtype", "float8"], "bfloat16 and float32"),
        (["--accumulate", "0"], "1 or more"),
        (["--sequence", "128"], "of --config"),
        (["--config", "layers=1,hidden=8,heads=1"], "give one of them"),
        (["--deaths", "61"], "0 to 60"),
        (["--dtype", "bfloat16", "--strategies", "ddp-fp16"], "would halve them"),
        (["--island", "4", "--strategies", "dpsgd"], "--island"),
    ],
)
def test_questions_that_have_no_answer_are_refused(words: list[str], said: str) -> None:
    arguments = ["plan", "--profile", "vgg16", "--link", "1gbit", "--workers", "4", *words]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)


@pytest.mark.parametrize(
    ("network", "rank", "hook_ms", "own_ms"),
    [("resnet50", 1, (6.6, 10.4), (9.6, 21.6)), ("resnet20", 4, (5.9, 10.5), (6.6, 8.6))],
)
def test_powersgd_computes_on_a_gpu_what_was_measured(
    network: str, rank: int, hook_ms: tuple[float, float], own_ms: tuple[float, float]
) -> None:
    """Least and most of three runs of `benchmarks/gpu.py` on an H200, within a quarter."""
    profile = with_low_rank(shipped_profile(network), 0.7 * 4.8e12)
    for seconds, (least, most) in (
        (profile.hook_s(profile.num_elements, rank), hook_ms),
        (profile.low_rank_s(profile.num_elements, rank), own_ms),
    ):
        assert 0.75e-3 * least < seconds < 1.25e-3 * most


def test_a_link_that_is_hardly_slower_makes_powersgd_send_no_more() -> None:
    """All workers are simulated then, of a model with fewer tensors."""
    even = from_flags(workers=4, link="1gbit")
    link = even.link.model_copy(update={"rate_bit_per_s": 0.95e9})
    uneven = even.model_copy(update={"links": {3: link}})
    profile = shipped_profile("resnet50")
    alike, slower = (
        predict_step("powersgd", Setting(profile=profile, cluster=cluster))
        for cluster in (even, uneven)
    )
    assert slower.bytes_per_step == pytest.approx(alike.bytes_per_step, rel=0.05)
    assert slower.step_s == pytest.approx(alike.step_s, rel=0.05)


def test_a_thousand_gpus_take_trees_where_a_ring_has_two_thousand_hops() -> None:
    """604 ms with 40 us a hop, of which computing is 132 ms."""
    cluster = from_flags(workers=1024, link="25gbit")
    where = Setting(profile=shipped_profile("resnet50"), cluster=cluster)
    assert predict_step("ddp", where, Band()).step_s < 0.175


def test_a_cluster_of_nodes_is_like_those_whose_nodes_have_such_links() -> None:
    for rate, is_checked in ((1e10, False), (1e11, True)):
        nodes = RackSpec(size=8, rate_bit_per_s=rate)
        link = LinkSpec(rate_bit_per_s=1.04e12)
        cluster = Cluster(name="nodes", workers=32, link=link, racks=nodes)
        where = Setting(profile=shipped_profile("resnet50"), cluster=cluster)
        assert bool(predict_step("ddp", where).checked_cells) == is_checked


def test_a_long_fat_link_carries_a_window_in_a_round_trip() -> None:
    cluster = from_flags(workers=2, link="1gbit", latency="25ms")
    plan = make_plan(PlanRequest(profile=MODEL, clusters=[cluster], strategies=("ddp",)))
    (said,) = [remark for remark in plan.remarks if "window" in remark]
    assert "which is assumed here, lets a connection carry 503 Mbit/s of 1 Gbit/s" in said


def test_headers_take_nothing_of_a_window() -> None:
    """4 MB each in a round trip of 20 ms, which is less than links carry."""
    link = LinkSpec(rate_bit_per_s=10e9, latency_s=0.01, window_bytes=4_000_000)
    where = replace(setting(workers=2), cluster=Cluster(workers=2, link=link))
    without, with_headers = (
        predict_step("allreduce", replace(where, payload_share=share)).step_s
        for share in (1.0, 0.95)
    )
    assert with_headers == without


def test_a_noisy_profile_is_said_to_be_planned_as_late_workers() -> None:
    cluster = from_flags(workers=2, link="1gbit")
    for spread, is_said in ((0.2, True), (0.01, False)):
        request = PlanRequest(
            profile=replace(MODEL, spread=spread), clusters=[cluster], strategies=("ddp",)
        )
        said = any("differ by 20%" in remark for remark in make_plan(request).remarks)
        assert said == is_said


def test_gloos_processors_add_to_each_byte_where_nothing_was_measured() -> None:
    """4 MB, of which a rank of two sends as much: 0.6 ns a byte beside 0.8 ns of the link."""
    cluster = from_flags(workers=2, link="10gbit")
    usual, measured = (
        predict_step(
            "allreduce",
            Setting(profile=MODEL, cluster=cluster.model_copy(update={"gloo_ns_per_byte": ns})),
            Band(),
        ).step_s
        for ns in (None, 0.0)
    )
    # The last part of the last round is on its way while the one before is copied.
    assert 0.7 * 0.6e-9 * 4e6 < usual - measured <= 0.6e-9 * 4e6


@pytest.mark.parametrize("strategy", ["allreduce", LOCAL])
def test_weights_of_float64_take_twice_the_bytes_of_float32(strategy: str) -> None:
    single, double = (
        predict_step(strategy, replace(setting(), profile=replace(MODEL, element_bytes=size)))
        for size in (4, 8)
    )
    assert double.bytes_per_step == pytest.approx(2 * single.bytes_per_step, rel=1e-3)
    assert double.memory_bytes == pytest.approx(2 * single.memory_bytes, rel=1e-3)


def test_frozen_weights_are_in_memory() -> None:
    trained, lora = (
        predict_step("ddp", replace(setting(), profile=profile)).memory_bytes
        for profile in (MODEL, replace(MODEL, frozen_bytes=1e9))
    )
    assert lora - trained == pytest.approx(1e9)


def test_vectors_on_the_host_take_no_memory_of_a_gpu() -> None:
    on_cpu, on_gpu = (
        predict_step("wagma", replace(setting(), profile=profile)).memory_bytes
        for profile in (MODEL, replace(MODEL, on_gpu=True))
    )
    assert (on_cpu - on_gpu) / MODEL.num_bytes == pytest.approx(3)


def test_a_run_whose_workers_die_sooner_than_it_comes_back_never_ends() -> None:
    cluster = from_flags(workers=4, link="1gbit").changed(deaths_per_hour=60.0)
    plan = make_plan(
        PlanRequest(profile=MODEL, clusters=[cluster], strategies=("ddp", "wagma"), samples=1e8)
    )
    ddp, wagma = plan.predictions
    assert ddp.time_s is None
    assert wagma.time_s is not None
    assert plan.best(4, 1e9) == wagma
    (table,) = plan_tables(plan)
    assert table.rows[0][table.heads.index("time")] == "never"
    assert any(remark.startswith("ddp: such a run never ends") for remark in plan.remarks)
