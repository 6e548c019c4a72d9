"""Profiles of language models, against parameters that were counted and seconds that were measured
by others.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from offbeat.errors import ConfigError
from offbeat_lab.cluster import from_flags
from offbeat_lab.plan.language_models import (
    DEVICES,
    Shape,
    device_named,
    language_model,
    read_shape,
)
from offbeat_lab.plan.plans import PlanRequest, make_plan
from offbeat_lab.plan.predictions import predict_step
from offbeat_lab.plan.profile import CodecCost, ModelProfile, SelectorCost
from offbeat_lab.plan.shipped import LOW_RANK_S
from offbeat_lab.plan.simulation import Setting

LLAMA = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
MISTRAL = LLAMA | {"model_type": "mistral", "intermediate_size": 14336, "num_key_value_heads": 8}
QWEN = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
GPT2 = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
GEMMA_2 = {
    "model_type": "gemma2",
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "vocab_size": 256000,
}
STARCODER = {
    "model_type": "gpt_bigcode",
    "activation_function": "gelu_pytorch_tanh",
    "multi_query": True,
    "n_embd": 2048,
    "n_head": 16,
    "n_inner": 8192,
    "n_layer": 24,
    "n_positions": 8192,
    "vocab_size": 49152,
}
STARCODER_2 = {
    "model_type": "starcoder2",
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "num_attention_heads": 24,
    "num_hidden_layers": 30,
    "num_key_value_heads": 2,
    "vocab_size": 49152,
}
FALCON = {
    "model_type": "falcon",
    "hidden_size": 4544,
    "multi_query": True,
    "num_attention_heads": 71,
    "num_hidden_layers": 32,
    "vocab_size": 65024,
}
BLOOM = {
    "model_type": "bloom",
    "hidden_size": 1024,
    "n_head": 16,
    "n_layer": 24,
    "vocab_size": 250880,
}


def written(directory: Path, config: dict[str, object]) -> str:
    path = directory / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def profile_of(shape: Shape, device: str = "a100", batch_size: int = 1) -> ModelProfile:
    return language_model(shape, DEVICES[device], batch_size=batch_size, element_bytes=2)


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (LLAMA, 6_738_415_616),
        (MISTRAL, 7_241_732_096),
        (QWEN, 7_615_616_512),
        (GPT2, 124_439_808),
    ],
)
def test_a_configuration_has_as_many_parameters_as_the_model(
    config: dict[str, object], parameters: int, tmp_path: Path
) -> None:
    assert profile_of(read_shape(written(tmp_path, config))).num_elements == parameters


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (GEMMA_2, 2_614_341_888),
        (STARCODER, 1_137_207_296),
        (STARCODER_2, 3_030_371_328),
        (FALCON, 6_921_720_704),
        (BLOOM, 559_214_592),
    ],
)
def test_what_a_configuration_leaves_out_is_known_of_its_kind(
    config: dict[str, object], parameters: int, tmp_path: Path
) -> None:
    """But for norms in unusual places."""
    found = profile_of(read_shape(written(tmp_path, config))).num_elements
    assert found == pytest.approx(parameters, rel=1e-3)


def test_attention_is_as_wide_as_its_heads() -> None:
    wide, narrow = (
        Shape(layers=1, hidden=64, heads=4, head_dim=size, sequence=4096) for size in (32, 16)
    )
    assert wide.flops(0) - narrow.flops(0) == 12 * 64 * 4096**2


def test_attention_looks_back_on_a_window(tmp_path: Path) -> None:
    shape = read_shape(written(tmp_path, MISTRAL | {"sliding_window": 4096}), sequence=16_384)
    whole = replace(shape, window=0)
    assert whole.flops(0) - shape.flops(0) == 12 * 32 * 4096 * (16_384 - 4096) ** 2
    assert replace(shape, sequence=2048).flops(0) == replace(whole, sequence=2048).flops(0)


MPT_7B = Shape(layers=32, hidden=4096, heads=32, vocabulary=50368, gated=False, tied=True)


@pytest.mark.parametrize(
    ("device", "shape", "tokens_per_s"),
    [
        ("h100", MPT_7B, 10_643),
        ("a100", MPT_7B, 4_641),
        ("a100", Shape(layers=40, hidden=5120, heads=40, vocabulary=50368, gated=False), 2_262),
    ],
)
def test_tokens_a_second_are_those_that_mpt_was_trained_with_on_one_node(
    device: str, shape: Shape, tokens_per_s: float
) -> None:
    """As llm-foundry's table has them, of a device at 2,048 tokens."""
    batch = profile_of(shape, device).batch
    assert 2048 / (batch.forward_s + batch.backward_s) == pytest.approx(tokens_per_s, rel=0.15)


def test_words_give_a_shape_and_what_they_leave_out_is_said() -> None:
    shape = read_shape("layers=2,hidden=64,heads=4", sequence=128)
    assert (shape.layers, shape.hidden, shape.sequence) == (2, 64, 128)
    for words, said in (
        ("layers=2,hidden=64", "says no heads"),
        ("layers=2,hiden=64,heads=4", "hidden"),
        ("layers=two,hidden=64,heads=4", "a whole number"),
        ("layers=2,hidden=64,heads=5", "heads that divide hidden"),
        ("none.json", "cannot read"),
    ):
        with pytest.raises(ConfigError, match=said):
            read_shape(words)
    with pytest.raises(ConfigError, match="known are"):
        device_named("h1000")


@pytest.mark.parametrize(
    "of_experts",
    [
        {"num_local_experts": 8},
        {"moe_num_experts": 64},
        {"ffn_config": {"moe_num_experts": 16}},
        {"kv_lora_rank": 256},
    ],
)
def test_a_mixture_of_experts_and_latent_attention_are_refused(
    of_experts: dict[str, object], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="mixture of experts"):
        read_shape(written(tmp_path, LLAMA | of_experts))


def test_a_configuration_with_a_size_for_each_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="option intermediate of Shape: got"):
        read_shape(written(tmp_path, LLAMA | {"intermediate_size": [11_008] * 32}))


def test_a_gate_keeps_twice_as_many_activations_of_feed_forward_layers() -> None:
    plain, gated = (
        Shape(layers=2, hidden=64, heads=4, intermediate=512, vocabulary=0, gated=gated)
        for gated in (False, True)
    )
    per_token = plain.activation_bytes() / plain.sequence
    assert per_token == 2 * (18 * 64 + 4 * 512)
    assert gated.activation_bytes() / gated.sequence - per_token == 2 * 4 * 512


@pytest.mark.parametrize("changed", [{"model_type": "roberta"}, {"vocab_size": None}])
def test_an_encoder_and_a_model_of_images_are_refused(
    changed: dict[str, object], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="only decoders"):
        read_shape(written(tmp_path, LLAMA | changed))


SMALL = Shape(layers=4, hidden=256, heads=4, vocabulary=1000, sequence=256)


def test_an_island_divides_memory_and_multiplies_samples() -> None:
    one = profile_of(SMALL)
    node = one.on_island(8, 300e9)
    cluster = from_flags(workers=2, link="10gbit")
    alone, together = (
        predict_step("allreduce", Setting(profile=profile, cluster=cluster))
        for profile in (one, node)
    )
    states = (2 + one.moments) * one.num_bytes
    largest = max(tensor.num_elements for tensor in one.tensors)
    assert alone.memory_bytes == pytest.approx(states + one.activation_bytes, rel=0.01)
    assert together.memory_bytes == pytest.approx(
        states / 8 + one.activation_bytes + 2 * 2 * largest, rel=0.01
    )
    assert together.samples_per_s > 4 * alone.samples_per_s
    with pytest.raises(ConfigError, match="--island"):
        predict_step("dpsgd", Setting(profile=node, cluster=cluster))


def test_an_island_divides_whatever_is_computed_of_each_element() -> None:
    one = replace(
        profile_of(SMALL),
        selectors=(SelectorCost(name="random", s_per_element=1e-9),),
        codecs=tuple(CodecCost(name=name, s_per_entry=1e-8) for name in ("float32", "gaps")),
    )
    node = one.on_island(8, 300e9)

    def costs(profile: ModelProfile) -> list[float]:
        return [
            profile.selection_s(1000, "random"),
            profile.selection_s(1000, "exact"),
            profile.coding_s(1000, 100, ("float32", "gaps")),
            profile.value_coding_s(1000, "float32"),
            profile.value_coding_s(1000, "linear8"),
        ]

    assert costs(node) == pytest.approx([seconds / 8 for seconds in costs(one)])


def test_an_island_launches_as_many_kernels_as_one_device() -> None:
    one = profile_of(SMALL)
    node = one.on_island(8, 300e9)
    launches_s = LOW_RANK_S * len(one.tensors)  # as was measured for each tensor
    assert launches_s < node.low_rank_s(one.num_elements, 1) < one.low_rank_s(one.num_elements, 1)


def test_accumulated_batches_are_exchanged_once() -> None:
    one = profile_of(SMALL)
    four = one.accumulated(4)
    cluster = from_flags(workers=2, link="1gbit")
    once, fewer = (
        predict_step("allreduce", Setting(profile=profile, cluster=cluster))
        for profile in (one, four)
    )
    assert fewer.bytes_per_step == once.bytes_per_step == pytest.approx(one.num_bytes, rel=1e-3)
    assert four.batch.batch_size == 4
    assert fewer.samples_per_s > 2 * once.samples_per_s


def test_gradients_in_bfloat16_are_half_as_many_bytes() -> None:
    cluster = from_flags(workers=2, link="1gbit")
    whole = language_model(SMALL, DEVICES["a100"], batch_size=1, element_bytes=4)
    setting, halved = (Setting(profile=p, cluster=cluster) for p in (whole, profile_of(SMALL)))
    assert predict_step("allreduce", halved).bytes_per_step == pytest.approx(
        predict_step("allreduce", setting).bytes_per_step / 2, rel=1e-3
    )
    with pytest.raises(ConfigError, match="already|halve"):
        predict_step("ddp-fp16", halved)


def test_what_does_not_fit_is_not_recommended_and_refused_where_nothing_does() -> None:
    clusters = [from_flags(workers=2, link="10gbit")]
    tight = profile_of(SMALL)
    needs = predict_step("ddp", Setting(profile=tight, cluster=clusters[0])).memory_bytes
    for share, fitting in ((1.2, {"ddp": True, "gtopk": False}), (1.0, {})):
        device = ModelProfile(
            **{
                name: getattr(tight, name)
                for name in tight.__dataclass_fields__
                if name != "device_bytes"
            },
            device_bytes=share * needs,
        )
        request = PlanRequest(profile=device, clusters=clusters, strategies=("gtopk", "ddp"))
        if not fitting:
            with pytest.raises(ConfigError, match="no strategy fits.*--island"):
                make_plan(request)
            continue
        plan = make_plan(request)
        assert {one.strategy: one.fits for one in plan.predictions} == fitting
        assert plan.best(2, 1e10).strategy == "ddp"
        assert any(remark.startswith("gtopk: does not fit") for remark in plan.remarks)


def test_seven_billion_parameters_are_told_from_what_was_measured() -> None:
    setting = Setting(profile=profile_of(MPT_7B), cluster=from_flags(workers=4, link="100gbit"))
    found = predict_step("allreduce", setting)
    assert "computing is derived from the device's arithmetic" in found.how_sure
    assert found.fits
    whole = language_model(MPT_7B, DEVICES["a100"], batch_size=1, element_bytes=4)
    assert not predict_step("allreduce", replace(setting, profile=whole)).fits
