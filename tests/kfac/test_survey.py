"""Which layers are covered, and what becomes of the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offbeat
from offbeat import Curvature
from offbeat.errors import ConfigError, OffbeatWarning, UnsupportedError
from offbeat.kfac.factors import FactorShape
from offbeat.kfac.survey import survey
from offbeat.strategies.kfac import KFACStrategy
from thread_support.world import ThreadDriver, in_threads, session_on

# What is covered, and what is named because it is not.


def names(model: nn.Module, **options: object) -> tuple[list[str], Mapping[str, str]]:
    found = survey(model, Curvature(**options))  # type: ignore[arg-type]
    return [block.name for block in found.blocks], found.plain


class Own(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def test_layers_are_found_by_name_and_the_others_listed_with_reasons() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.PReLU(),
        nn.ConvTranspose2d(4, 4, 3),
        Own(3, 3),
        nn.Embedding(5, 3, scale_grad_by_freq=True),
    )
    found, plain = names(model)
    assert found == ["0"]
    assert list(plain) == ["1", "2", "3", "4"]
    assert plain["2"] == "ConvTranspose2d is not supported"
    assert "overrides" in plain["3"]
    assert (
        survey(model, Curvature())
        .notice()
        .startswith(
            "K-FAC covers 38.9% of 288 parameters; plain gradients for 1 (PReLU is not "
            "supported); 2 "
        )
    )


def test_where_all_is_covered_no_layer_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2))
    assert survey(model, Curvature()).notice() == "K-FAC covers 100% of 16 parameters"


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.LSTMCell])
def test_why_recurrent_layers_are_not_covered_is_said_in_one_line(kind: Any) -> None:
    found, plain = names(nn.Sequential(nn.Linear(2, 3), kind(3, 3)))
    assert found == ["0"]
    assert plain["1"] == (
        f"the gates of {kind.__name__} are computed in one fused call, into which K-FAC cannot see"
    )


def test_frozen_layers_are_left_alone_and_frozen_biases_left_out() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 5))
    model[0].requires_grad_(False)
    model[1].bias.requires_grad_(False)
    model[2].weight.requires_grad_(False)
    found, plain = names(model)
    assert (found, plain) == (["1", "2"], {})
    without_bias, of_bias = survey(model, Curvature()).blocks
    assert without_bias.matrix_shape == (1, 4, 3)
    assert of_bias.matrix_shape == (1, 5, 1)


def tied(*layers: nn.Module) -> nn.Sequential:
    """Layers of which the last one has the weight of the first one."""
    model = nn.Sequential(*layers)
    model[-1].weight = model[0].weight
    return model


def test_a_tied_weight_is_one_block_and_counts_once() -> None:
    model = tied(nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5))
    found = survey(model, Curvature())
    assert [block.name for block in found.blocks] == ["0", "2.bias", "1"]
    assert found.notice() == "K-FAC covers 100% of 32 parameters"
    users = [[list(use.names), use.is_flipped] for use in found.blocks[0].uses]
    assert users == [[["0"], False], [["2"], True]]


def test_a_weight_shared_with_what_is_not_covered_gets_plain_gradients() -> None:
    found, plain = names(tied(nn.Linear(3, 3), nn.Linear(3, 3), Own(3, 3, bias=False)))
    assert found == ["1"]
    assert list(plain) == ["0.weight", "0.bias", "2.weight"]
    assert plain["0.weight"] == (
        "shared with '2', which K-FAC does not cover: Own overrides Linear.forward"
    )


def test_a_container_that_shows_a_layers_parameter_does_not_use_it() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    model.bias = model[0].bias
    found, plain = names(model)
    assert (found, plain) == (["0"], {})


def test_a_shared_bias_goes_with_a_weight_that_all_its_layers_share() -> None:
    model = tied(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].bias = model[0].bias
    (block,) = survey(model, Curvature()).blocks
    assert block.matrix_shape == (1, 3, 4)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].bias = model[0].bias
    found, plain = names(model)
    assert found == ["0", "1"]
    assert plain == {
        "0.bias": "it is shared with another layer",
        "1.bias": "it is shared with another layer",
    }


def test_weights_that_are_computed_are_not_covered() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)))
    found, plain = names(model)
    assert found == ["0"]
    assert "1" in plain


def test_a_large_factor_is_cut_and_a_very_large_one_is_a_diagonal() -> None:
    model = nn.Sequential(nn.Embedding(5000, 3), nn.Linear(200, 250), nn.Linear(100, 1000))
    found = survey(model, Curvature(max_dim=100))
    shapes = [(block.inputs, block.outputs) for block in found.blocks]
    assert shapes[1:] == [
        # the bias makes 201 rows
        (
            FactorShape(groups=3, dim=67),
            FactorShape(groups=5, dim=50),
        ),
        (FactorShape(groups=1, dim=101), FactorShape(groups=1, dim=1000, is_diagonal=True)),
    ]
    assert found.num_covered == found.num_parameters


def test_layers_may_be_left_out_by_name_or_by_class() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2))
    found, plain = names(model, plain=("LayerNorm", "2"))
    assert (found, plain) == (
        ["0"],
        {"1": "as option plain says", "2": "as option plain says"},
    )
    with pytest.raises(ConfigError, match=r"plain names 'LayerNorms'.*did you mean 'LayerNorm'"):
        names(model, plain=("LayerNorms",))


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
        "norm1",
        "norm2",
        "norm3",
    ]
    assert not plain
    shapes = {block.name: block.matrix_shape for block in survey(layer, Curvature()).blocks}
    assert shapes["self_attn.in_proj"] == (3, 8, 9)
    assert shapes["multihead_attn.k_proj"] == (1, 8, 9)


def test_attention_with_other_widths_and_extra_biases() -> None:
    model = nn.MultiheadAttention(8, 2, kdim=4, vdim=6, add_bias_kv=True)
    found, plain = names(model)
    shapes = {block.name: block.matrix_shape for block in survey(model, Curvature()).blocks}
    assert found == list(shapes)
    assert [shapes[f"{which}_proj"] for which in ("q", "k", "v", "out")] == [
        (1, 8, 9),
        (1, 8, 5),
        (1, 8, 7),
        (1, 8, 9),
    ]
    assert set(plain) == {"bias_k", "bias_v"}


def test_a_complex_layer_gets_plain_gradients() -> None:
    found, plain = names(nn.Sequential(nn.Linear(2, 2, dtype=torch.complex64), nn.Linear(2, 2)))
    assert found == ["1"]
    assert plain["0"] == "its weight is complex"


def test_a_model_without_a_covered_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match="finds no layer.*LSTM"):
        survey(nn.LSTM(3, 3), Curvature())
    with pytest.raises(ConfigError, match="no parameter is trainable"):
        survey(nn.Linear(3, 3).requires_grad_(False), Curvature())


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'attention'"):
        survey(
            nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2)}),
            Curvature(cross_attention=("atention",)),
        )
    for wrong in (
        {"inverse_dtype": "float16"},
        {"loss_terms": "token"},
        {"batch_dim": -1},
        {"sample_stride": 0},
        {"max_dim": 0},
        {"sample_stride": "aut"},
        {"decay": 1.0},
        {"plain": "head"},
    ):
        with pytest.raises(ConfigError):
            Curvature(**wrong)  # type: ignore[arg-type]


def test_parameters_outside_of_layers_are_named_themselves() -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    model.register_parameter("position", nn.Parameter(torch.zeros(3)))
    assert survey(model, Curvature()).plain == {"position": "a parameter outside of layers"}


# Layers whose weights get gradients while K-FAC sees nothing of them.


KINDS = [offbeat.DKFAC, offbeat.SPDKFAC, offbeat.DPKFAC]


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    yield
    torch.compiler.reset()


class Net(nn.Module):
    """Its middle layer's weight is used without calling the layer; the last one is not used."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.first, self.middle = nn.Linear(4, 6), nn.Linear(6, 6, bias=False)
        self.last, self.spare = nn.Linear(6, 2), nn.Linear(6, 2)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(torch.tanh(F.linear(hidden, self.middle.weight)))  # type: ignore[no-any-return]


def x(rank: int = 0) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(rank))


def step(net: nn.Module, optimizer: torch.optim.Optimizer, rank: int = 0) -> list[torch.Tensor]:
    """The gradients of a step, which was taken with a learning rate of 0."""
    net(x(rank)).square().mean().backward()
    optimizer.step()
    gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    optimizer.zero_grad()
    return gradients


def compiled(net: nn.Module) -> nn.Module:
    """Compiled and called, so that hooks which are added from now on are passed over."""
    made = torch.compile(net, backend="eager")
    made(x()).sum().backward()
    net.zero_grad()
    return made  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_is_not_called_is_named_and_the_others_are_preconditioned(
    kind: type[KFACStrategy],
) -> None:
    net, plain = Net(), Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with offbeat.attach(net, optimizer, kind(kl_clip=None)) as session:
        with pytest.warns(OffbeatWarning, match=r"not seen 'middle' at work.*F\.linear"):
            found = step(net, optimizer)
        step(net, optimizer)
        assert sum("at work" in notice for notice in session.notices) == 1
    expected = step(plain, torch.optim.SGD(plain.parameters(), lr=0.0))
    first, middle = 0, 2
    assert torch.equal(found[middle], expected[middle])
    assert not torch.allclose(found[first], expected[first])


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at it
@pytest.mark.parametrize("attached_to", ["compiled", "inner"])
def test_a_model_that_was_compiled_and_called_before_is_refused_until_it_is_compiled_anew(
    attached_to: str,
) -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    called = compiled(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = [p.clone() for p in net.parameters()]
    model = called if attached_to == "compiled" else net
    with (
        pytest.raises(UnsupportedError, match=r"compiled and called before attach"),
        offbeat.attach(model, optimizer, offbeat.SPDKFAC()),
    ):
        step(called, optimizer)
    for parameter, old in zip(net.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
    optimizer.zero_grad()
    with offbeat.attach(model, optimizer, offbeat.SPDKFAC()):
        torch.compiler.reset()
        step(called, optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_raises_the_same_and_none_hangs(kind: type[KFACStrategy]) -> None:
    def job(driver: ThreadDriver) -> None:
        net = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with session_on(driver, net, optimizer, kind()):
            F.linear(x(driver.rank), net.weight, net.bias).sum().backward()
            optimizer.step()

    outcomes = in_threads(2, job)
    assert [type(outcome) for outcome in outcomes] == [UnsupportedError] * 2
    assert len({str(outcome) for outcome in outcomes}) == 1


def test_without_a_batch_in_the_first_step_the_next_one_is_looked_at() -> None:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with offbeat.attach(net, optimizer, offbeat.DKFAC()):
        optimizer.step()
        F.linear(x(), net.weight).sum().backward()
        with pytest.raises(UnsupportedError, match="seen no layer"):
            optimizer.step()
