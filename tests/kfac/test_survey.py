"""What is covered, and what is named because it is not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offbeat.errors import ConfigError
from offbeat.kfac.options import FactorOptions
from offbeat.kfac.survey import survey


def names(model: nn.Module, **options: object) -> tuple[list[str], dict[str, str]]:
    found = survey(model, FactorOptions(**options))  # type: ignore[arg-type]
    return [block.name for block in found.blocks], found.plain


class Own(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def test_layers_are_found_by_name_and_the_others_listed_with_reasons() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.Conv1d(4, 4, 3),
        Own(3, 3),
        nn.Embedding(5, 3, scale_grad_by_freq=True),
    )
    found, plain = names(model)
    assert found == ["0"]
    assert list(plain) == ["1", "2", "3", "4"]
    assert plain["2"] == "Conv1d is not supported"
    assert "overrides" in plain["3"]
    notice = survey(model, FactorOptions()).notice()
    assert notice is not None
    assert notice.startswith("plain gradients for 1 (BatchNorm2d is not supported); 2 ")


def test_nothing_is_said_where_all_is_covered() -> None:
    assert survey(nn.Linear(2, 2), FactorOptions()).notice() is None


def test_frozen_layers_are_left_alone_and_frozen_biases_left_out() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 5))
    model[0].requires_grad_(False)
    model[1].bias.requires_grad_(False)
    model[2].weight.requires_grad_(False)
    found, plain = names(model)
    assert found == ["1"]
    assert plain == {"2": "only its bias is trained"}
    (block,) = survey(model, FactorOptions()).blocks
    assert block.matrix_shape == (1, 4, 3)


def test_tied_weights_are_not_preconditioned_twice() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False))
    model[2].weight = model[0].weight
    found, plain = names(model)
    assert found == ["1"]
    assert set(plain) == {"0", "2"}
    assert "shares" in plain["0"]


def test_weights_that_are_computed_are_not_covered() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)))
    found, plain = names(model)
    assert found == ["0"]
    assert "1" in plain


def test_a_factor_may_be_too_large() -> None:
    model = nn.Sequential(nn.Embedding(1000, 3), nn.Linear(3, 1000))
    found, plain = names(model, max_dim=100)
    assert found == ["0"]
    assert plain == {"1": "a factor of more than 100 rows"}


def test_attention_is_found_in_parts() -> None:
    layer = nn.TransformerDecoderLayer(8, 2, 16)
    found, plain = names(layer)
    assert found == [
        "self_attn.in_proj",
        "self_attn.out_proj",
        "multihead_attn.q_proj",
        "multihead_attn.k_proj",
        "multihead_attn.v_proj",
        "multihead_attn.out_proj",
        "linear1",
        "linear2",
    ]
    assert set(plain) == {"norm1", "norm2", "norm3"}
    shapes = {block.name: block.matrix_shape for block in survey(layer, FactorOptions()).blocks}
    assert shapes["self_attn.in_proj"] == (3, 8, 9)
    assert shapes["multihead_attn.k_proj"] == (1, 8, 9)


def test_attention_with_other_widths_and_extra_biases() -> None:
    model = nn.MultiheadAttention(8, 2, kdim=4, vdim=6, add_bias_kv=True)
    found, plain = names(model)
    shapes = {block.name: block.matrix_shape for block in survey(model, FactorOptions()).blocks}
    assert found == list(shapes)
    assert [shapes[f"{which}_proj"] for which in ("q", "k", "v", "out")] == [
        (1, 8, 9),
        (1, 8, 5),
        (1, 8, 7),
        (1, 8, 9),
    ]
    assert set(plain) == {"bias_k", "bias_v"}


def test_a_model_without_a_covered_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match="finds no layer.*LayerNorm is not supported"):
        survey(nn.LayerNorm(3), FactorOptions())
    with pytest.raises(ConfigError, match="no parameter is trainable"):
        survey(nn.Linear(3, 3).requires_grad_(False), FactorOptions())


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'attention'"):
        survey(
            nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2)}),
            FactorOptions(cross_attention=("atention",)),
        )
    for wrong in (
        {"loss": "average"},
        {"sharing": "shrink"},
        {"loss_terms": "token"},
        {"batch_dim": -1},
        {"sample_stride": 0},
        {"max_dim": 0},
        {"sharing": "reduce", "loss_terms": "position"},
    ):
        with pytest.raises(ConfigError):
            FactorOptions(**wrong)  # type: ignore[arg-type]


def test_parameters_outside_of_layers_are_named_themselves() -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    model.register_parameter("position", nn.Parameter(torch.zeros(3)))
    assert survey(model, FactorOptions()).plain == {"position": "a parameter outside of layers"}
