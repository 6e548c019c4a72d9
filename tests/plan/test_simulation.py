"""Workers that share cores, against arithmetic that is done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

import offbeat
from offbeat.simulation.training import TensorProfile
from offbeat.simulation.virtual import VirtualCluster
from offbeat.transport.operations import Collective, Sleep
from offbeat_lab.cluster import Cluster, RackSpec, from_flags
from offbeat_lab.plan.methods.of_strategies import method_of
from offbeat_lab.plan.plans import PlanRequest, make_plan
from offbeat_lab.plan.predictions import predict_step, setting_of
from offbeat_lab.plan.profile import ModelProfile, TimedBatch
from offbeat_lab.plan.simulation import SLICE_S, Cores, Run

MODEL = ModelProfile(
    name="toy",
    device="none",
    batches=(TimedBatch(batch_size=1, forward_s=0.1, backward_s=0.2),),
    optimizer_s=0.0,
    tensors=(TensorProfile(num_elements=1000, ready=1.0),),
    select_s_per_element=0.0,
    copy_s_per_byte=0.0,
)


def shared(workers: int, cores: int | None, **more: object) -> Cluster:
    fast = from_flags(workers=workers, link="1000gbit")
    return Cluster(**{**dict(fast), "cores": cores, "gloo_ns_per_byte": 0.0, **more})


def ends_s(cores: int, works: list[tuple[float, float]]) -> list[float]:
    """When each rank has done its work, (begin, seconds)."""
    cluster = VirtualCluster(len(works))
    some = Cores(cluster, cores)
    ended = [0.0] * len(works)

    def work(rank: int, begin_s: float, work_s: float) -> Collective[None]:
        yield Sleep(begin_s)
        yield from some.compute(rank, work_s, work_s)
        ended[rank] = cluster.now_s

    cluster.run([work(rank, *one) for rank, one in enumerate(works)])
    return ended


@pytest.mark.parametrize(
    ("cores", "works", "ended"),
    [
        (2, [(0, 1), (0, 1)], [1, 1]),
        (1, [(0, 1), (0, 1)], [2, 2]),
        (2, [(0, 1), (0, 1), (0, 1)], [1.5, 1.5, 1.5]),
        # The second begins when half of the first is done, and goes on alone when that has ended.
        (1, [(0, 2), (1, 2)], [3, 4]),
        (1, [(0, 1), (5, 1)], [1, 6]),
    ],
)
def test_whoever_computes_gets_an_equal_share(
    cores: int, works: list[tuple[float, float]], ended: list[float]
) -> None:
    assert ends_s(cores, works) == pytest.approx(ended, abs=len(works) * SLICE_S)


def test_whoever_needs_less_than_a_slice_is_not_interrupted() -> None:
    short_s = SLICE_S / 4
    works = [(0.0, short_s), (0.0, short_s), (0.0, short_s)]
    assert sorted(ends_s(1, works)) == pytest.approx([short_s, 2 * short_s, 3 * short_s])


def test_whoever_goes_on_at_once_keeps_its_core_until_the_slice_is_over() -> None:
    cluster = VirtualCluster(2)
    cores = Cores(cluster, 1)
    ended = [0.0, 0.0]

    def work(rank: int, parts_s: list[float]) -> Collective[None]:
        for part_s in parts_s:
            yield from cores.compute(rank, part_s, part_s)
        ended[rank] = cluster.now_s

    quarter_s = SLICE_S / 4
    cluster.run([work(0, [quarter_s] * 3), work(1, [quarter_s] * 3)])
    assert sorted(ended) == pytest.approx([3 * quarter_s, 6 * quarter_s])


@pytest.mark.parametrize("strategy", ["alone", "ddp", "localsgd", "wagma", "adpsgd", "dpsgd"])
def test_eight_workers_on_two_cores_compute_four_times_as_long(strategy: str) -> None:
    step_s = predict_step(strategy, setting_of(MODEL, shared(8, 2))).step_s
    assert step_s == pytest.approx(4 * 0.3, rel=0.05)


def test_padded_passes_leave_cores_to_others() -> None:
    """0.3 s of computing within 3 s: two cores serve eight workers."""
    setting = setting_of(MODEL, shared(8, 2, step_s=3.0))
    assert predict_step("ddp", setting).step_s == pytest.approx(3.0, rel=0.25)
    assert predict_step("alone", setting).step_s < 3.0 + 8 * 0.2 / 2


@pytest.mark.parametrize(
    ("strategy", "work_s"),
    [("allreduce", 0.32), ("elasticsgd:mega_batch=4", 2.6)],
    ids=["gloo", "encrypted messages"],
)
def test_bytes_take_cores_as_well(strategy: str, work_s: float) -> None:
    """A gigabyte behind a link without limit: four ranks work for so long on what each sends."""
    model = ModelProfile(
        name="large",
        device="none",
        batches=(TimedBatch(batch_size=1, forward_s=1e-3, backward_s=1e-3),),
        optimizer_s=0.0,
        tensors=(TensorProfile(num_elements=250_000_000, ready=1.0),),
        select_s_per_element=0.0,
        copy_s_per_byte=0.0,
    )
    one, enough = (
        predict_step(strategy, setting_of(model, shared(4, cores))).step_s for cores in (1, None)
    )
    assert one - enough == pytest.approx(4 * 1.5 * work_s, rel=0.1)


@pytest.mark.parametrize("strategy", ["localsgd:period=1", "dpsgd", "gtopk:density=0.1"])
def test_messages_that_take_no_time_take_no_cores_either(strategy: str) -> None:
    large = replace(MODEL, tensors=(TensorProfile(num_elements=25_000_000, ready=1.0),))
    setting = setting_of(large, shared(8, 8)).without_network()
    assert predict_step(strategy, setting).step_s == pytest.approx(0.3, abs=1e-3)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"cores": 4},
        {"racks": RackSpec(size=2, rate_bit_per_s=1e8, latency_s=0.02)},
        {"speeds": (1.0, 0.5)},
    ],
)
def test_a_closed_form_takes_as_long_as_it_says(more: dict[str, object]) -> None:
    cluster = Cluster(**{**dict(from_flags(workers=4, link="1gbit/1ms")), **more})
    run = Run(setting_of(MODEL, cluster), method_of("alone", offbeat.AllReduce()), 4)
    run.cluster.run([run.closed_form(0.5, 0.0) for _ in range(4)])
    assert run.cluster.now_s == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize("strategy", ["allreduce", "gtopk:density=0.5:collective=all_gather"])
def test_the_connection_of_a_rack_of_one_worker_carries_as_much_as_a_link(strategy: str) -> None:
    large = replace(MODEL, tensors=(TensorProfile(num_elements=25_000_000, ready=1.0),))
    on_links = from_flags(workers=2, link="1gbit").changed(gloo_ns_per_byte=0.0)
    fast = on_links.link.model_copy(update={"rate_bit_per_s": 1e10})
    on_racks = on_links.changed(link=fast, racks=RackSpec(size=1, rate_bit_per_s=1e9))
    steps_s = [
        predict_step(strategy, setting_of(large, cluster)).step_s
        for cluster in (on_links, on_racks)
    ]
    assert steps_s[1] == pytest.approx(steps_s[0], rel=0.01)
    costs = [setting_of(large, cluster).network for cluster in (on_links, on_racks)]
    assert costs[0].messages.beta_s_per_byte == pytest.approx(costs[1].messages.beta_s_per_byte)
    assert costs[0].dense.beta_s_per_byte == pytest.approx(costs[1].dense.beta_s_per_byte)


@pytest.mark.parametrize(
    ("speeds", "cores"), [((1.0, 0.5), 1), ((1.0, 0.5), 2), ((0.25,), 1), ((1.0, 0.1), 1)]
)
def test_slow_workers_take_a_part_of_a_core(speeds: tuple[float, ...], cores: int) -> None:
    """What is taken for a step without exchange is what such a step is simulated to take."""
    setting = setting_of(MODEL, shared(4, cores, speeds=speeds))
    assert predict_step("alone", setting).step_s == pytest.approx(setting.ideal_s, rel=0.1)


def test_a_plan_says_where_cores_are_what_binds() -> None:
    request = PlanRequest(profile=MODEL, clusters=[shared(8, 2)], strategies=("ddp",))
    made = make_plan(request)
    assert made.predictions[0].binds == "cores"
    assert any("8 workers share 2 cores" in remark for remark in made.remarks)
