"""What coding messages costs in a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offbeat.codec.index_codecs import INDEX_CODECS
from offbeat.codec.json_objects import build
from offbeat.codec.topk_codec import VALUE_CODECS
from offbeat.simulation.training import TensorProfile
from offbeat_lab.cluster import from_flags
from offbeat_lab.plan.predictions import predict_step
from offbeat_lab.plan.profile import (
    CodecCost,
    ModelProfile,
    SelectorCost,
    TimedBatch,
    profile_from_json,
)
from offbeat_lab.plan.simulation import Setting
from offbeat_lab.plan.timing import time_codecs

COSTS = {"float32": 0.0, "bfloat16": 1e-5, "float8": 3e-5, "gaps": 2e-5}
MODEL = ModelProfile(
    name="toy",
    device="none",
    batches=(TimedBatch(batch_size=10, forward_s=0.1, backward_s=0.2),),
    optimizer_s=0.0,
    tensors=(TensorProfile(num_elements=1_000_000, ready=1.0),),
    select_s_per_element=1e-8,
    copy_s_per_byte=0.0,
)
CODED = replace(
    MODEL, codecs=tuple(CodecCost(name=name, s_per_entry=s) for name, s in COSTS.items())
)


@pytest.mark.parametrize("values", ["float32", "bfloat16", "float8"])
def test_the_codec_that_a_strategy_names_is_planned_for(values: str) -> None:
    """Selection was timed with 1,000 of these entries, as float32 and gaps."""
    cluster = from_flags(workers=2, link="10gbit")
    spec = f"gtopk:density=0.01:collective=all_gather:codec={values}"
    without_s, with_it_s = (
        predict_step(spec, Setting(profile=profile, cluster=cluster)).step_s
        for profile in (MODEL, CODED)
    )
    coding_s = 10_000 * (COSTS[values] + COSTS["gaps"]) - 1_000 * COSTS["gaps"]
    assert with_it_s - without_s == pytest.approx(coding_s)


@pytest.mark.parametrize(("selector", "selection_s"), [("sidco", 0.05), ("exact", 0.01)])
def test_the_selector_that_a_strategy_names_is_planned_for(
    selector: str, selection_s: float
) -> None:
    profile = replace(MODEL, selectors=(SelectorCost(name="sidco", s_per_element=5e-8),))
    where = Setting(profile=profile, cluster=from_flags(workers=2, link="10gbit"))
    named, usual = (
        predict_step(f"topk:density=0.01{option}", where).step_s
        for option in (f":codec={selector}", "")
    )
    assert named - usual == pytest.approx(selection_s - 0.01)
    wrong = replace(MODEL, selectors=(SelectorCost(name="sidco", s_per_element=-1.0),))
    with pytest.raises(TypeError, match=r"selectors\.s_per_element: -1\.0 is no number in"):
        profile_from_json(wrong.to_json())


def test_what_is_usual_costs_nothing_besides_and_what_was_not_timed_neither() -> None:
    assert CODED.coding_s(1_000_000, 1_000, ["float32", "gaps"]) == 0.0
    assert CODED.coding_s(1_000_000, 500_000, ["", "gaps"]) == 0.0
    assert MODEL.coding_s(1_000_000, 500_000, ["float8", "gaps"]) == 0.0
    wrong = replace(MODEL, codecs=(CodecCost(name="gaps", s_per_entry=-1.0),))
    with pytest.raises(TypeError, match=r"codecs\.s_per_entry: -1\.0 is no number in"):
        profile_from_json(wrong.to_json())


def test_every_codec_with_a_name_is_timed() -> None:
    costs = time_codecs()
    assert {one.name for one in costs} == {*VALUE_CODECS, *INDEX_CODECS}
    assert build(
        tuple[CodecCost, ...], [{"name": o.name, "s_per_entry": o.s_per_entry} for o in costs]
    )
    assert replace(MODEL, codecs=costs).coding_s(10, 10, ["float8", "gaps"]) > 0
