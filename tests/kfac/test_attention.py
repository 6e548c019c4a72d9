"""nn.MultiheadAttention, watched from inside, against the same attention made of Linear layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfac_maths_support.reference import capture_all, square
from offbeat.kfac.blocks import Block
from offbeat.kfac.capture import Capture
from offbeat.kfac.curvature import Curvature
from offbeat.kfac.survey import survey

WIDTH, HEADS, BATCH = 8, 2, 3


@pytest.fixture(autouse=True)
def float64() -> Any:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(2)
    yield
    torch.set_default_dtype(torch.float32)


class Spelled(nn.Module):
    """Attention of four Linear layers with the weights of `source`. Batch first."""

    def __init__(self, source: nn.MultiheadAttention) -> None:
        super().__init__()
        weights = (
            source.in_proj_weight.chunk(3)
            if source.in_proj_weight is not None
            else (source.q_proj_weight, source.k_proj_weight, source.v_proj_weight)
        )
        biases = [None] * 3 if source.in_proj_bias is None else source.in_proj_bias.chunk(3)
        pairs = zip("qkv", weights, biases, strict=True)
        self.layers = nn.ModuleDict({name: linear_of(weight, bias) for name, weight, bias in pairs})
        self.layers["out"] = linear_of(source.out_proj.weight, source.out_proj.bias)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        def heads(name: str, x: torch.Tensor) -> torch.Tensor:
            return self.layers[name](x).unflatten(-1, (HEADS, -1)).transpose(1, 2)  # type: ignore[no-any-return]

        mixed = F.scaled_dot_product_attention(
            heads("q", query), heads("k", key), heads("v", value)
        )
        return self.layers["out"](mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight.data.copy_(weight)
    if bias is not None:
        layer.bias.data.copy_(bias)
    return layer


def factors(
    model: nn.Module, run: Any, options: Curvature
) -> dict[str, tuple[Block, torch.Tensor, torch.Tensor]]:
    blocks, capture = capture_all(model, options)
    run()
    found = {}
    for index, block in enumerate(blocks):
        a, g = capture.take(index, "input"), capture.take(index, "output")
        assert a.weight > 0
        found[block.name] = (
            block,
            square(block, "input", a.packed),
            square(block, "output", g.packed),
        )
    capture.remove()
    return found


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", ["self", "self without bias", "cross", "memory", "widths"])
def test_projections_have_the_factors_of_linear_layers(kind: str, batch_first: bool) -> None:
    widths = {"kdim": 4, "vdim": 6} if kind == "widths" else {}
    model = nn.MultiheadAttention(
        WIDTH, HEADS, bias="without" not in kind, batch_first=batch_first, **widths
    )  # type: ignore[arg-type]
    spelled = Spelled(model)
    query = torch.randn(BATCH, 5, WIDTH)
    key = query if "self" in kind else torch.randn(BATCH, 4, widths.get("kdim", WIDTH))
    value = (
        key
        if kind in ("memory", "self", "self without bias")
        else torch.randn(BATCH, key.shape[1], widths.get("vdim", WIDTH))
    )
    options = Curvature(cross_attention=("",) if kind in ("cross", "memory") else ())

    def theirs() -> torch.Tensor:
        if batch_first:
            return model(query, key, value, need_weights=False)[0]  # type: ignore[no-any-return]
        q = query.transpose(0, 1)
        k = q if key is query else key.transpose(0, 1)
        v = k if value is key else value.transpose(0, 1)
        return model(q, k, v, need_weights=True)[0].transpose(0, 1)  # type: ignore[no-any-return]

    def loss(output: torch.Tensor) -> torch.Tensor:
        return output.square().mul(torch.arange(5.0).view(1, 5, 1)).sum((1, 2)).mean()

    found = factors(model, lambda: loss(theirs()).backward(), options)
    expected = factors(spelled, lambda: loss(spelled(query, key, value)).backward(), Curvature())
    for slot, name in enumerate("qkv"):
        layer = expected[f"layers.{name}"]
        if "self" in kind:
            block, a, g = found["in_proj"]
            torch.testing.assert_close(g[slot : slot + 1], layer[2])
        else:
            block, a, g = found[f"{name}_proj"]
            torch.testing.assert_close(g, layer[2])
        torch.testing.assert_close(a, layer[1])
        matrix = block.gradient().matrix()
        wanted = layer[0].gradient().matrix()
        torch.testing.assert_close(matrix[slot : slot + 1] if "self" in kind else matrix, wanted)
    for side in (1, 2):
        torch.testing.assert_close(found["out_proj"][side], expected["layers.out"][side])


@pytest.mark.parametrize("frozen", ["in_proj_weight", "q_proj_weight"])
def test_projections_beside_frozen_ones_have_the_same_factors(frozen: str) -> None:
    width = 4 if frozen == "q_proj_weight" else WIDTH
    model = nn.MultiheadAttention(WIDTH, HEADS, kdim=width, vdim=width, batch_first=True)
    query = torch.randn(BATCH, 5, WIDTH)
    key = query if width == WIDTH else torch.randn(BATCH, 4, width)

    def found() -> dict[str, tuple[Block, torch.Tensor, torch.Tensor]]:
        return factors(
            model, lambda: model(query, key, key)[0].square().sum().backward(), Curvature()
        )

    expected = found()
    model.get_parameter(frozen).requires_grad_(False)
    left = found()
    assert 0 < len(left) < len(expected)
    for name, (_, a, g) in left.items():
        torch.testing.assert_close((a, g), expected[name][1:])


def test_being_watched_changes_nothing() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.3, batch_first=True)
    x, mask = torch.randn(2, 5, WIDTH), torch.ones(5, 5).triu(1).bool()
    torch.manual_seed(0)
    expected = layer(x, src_mask=mask)
    _, capture = capture_all(layer)
    torch.manual_seed(0)
    assert torch.equal(layer(x, src_mask=mask), expected)
    assert repr(layer.self_attn).startswith("MultiheadAttention(")
    copied = copy.deepcopy(layer)
    torch.manual_seed(0)
    assert torch.equal(copied(x, src_mask=mask), expected)
    layer.eval()
    with torch.no_grad():
        layer(x)
    capture.remove()
    assert type(layer.self_attn) is nn.MultiheadAttention
    torch.manual_seed(0)
    assert torch.equal(layer.train()(x, src_mask=mask), expected)


class Named(nn.MultiheadAttention):
    """An attention of somebody's own, which leaves the forward pass as it is."""

    def name(self) -> str:
        return f"attention with {self.num_heads} heads"


def test_an_attention_of_a_class_of_its_own_keeps_it() -> None:
    layer = Named(WIDTH, HEADS)
    _, capture = capture_all(layer)
    assert isinstance(layer, Named)
    assert layer.name() == f"attention with {HEADS} heads"
    assert repr(layer).startswith("Named(")
    assert type(copy.deepcopy(layer)) is Named
    capture.remove()
    assert type(layer) is Named


def test_a_decoder_and_an_unbatched_attention_are_seen() -> None:
    decoder = nn.TransformerDecoderLayer(WIDTH, HEADS, 16, batch_first=True)
    target, memory = torch.randn(2, 3, WIDTH), torch.randn(2, 5, WIDTH)
    options = Curvature(loss_terms="position")
    blocks, capture = capture_all(decoder, options)
    decoder(target, memory).sum().backward()
    weights = {
        block.name: capture.take(index, "output").weight for index, block in enumerate(blocks)
    }
    assert set(weights.values()) == {
        6
    }  # terms of the loss belong to the target, those of the memory's projections too
    capture.remove()
    alone = nn.MultiheadAttention(WIDTH, HEADS)
    x = torch.randn(5, WIDTH)
    found = factors(
        alone, lambda: alone(x, x, x)[0].sum().backward(), Curvature(cross_attention=("",))
    )
    assert len(found) == 4


def test_checkpointed_attention_is_counted_once() -> None:
    model = nn.MultiheadAttention(WIDTH, HEADS)
    x = torch.randn(5, 2, WIDTH, requires_grad=True)

    def checkpointed(use_reentrant: bool) -> None:
        torch.utils.checkpoint.checkpoint(
            lambda y: model(y, y, y)[0], x, use_reentrant=use_reentrant
        ).sum().backward()

    expected = factors(model, lambda: model(x, x, x)[0].sum().backward(), Curvature())
    for use_reentrant in (True, False):
        found = factors(model, lambda mode=use_reentrant: checkpointed(mode), Curvature())  # type: ignore[misc]
        for name, (_, a, g) in found.items():
            torch.testing.assert_close(a, expected[name][1])
            torch.testing.assert_close(g, expected[name][2])


def test_a_batch_without_examples_adds_nothing() -> None:
    model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    none, some = torch.randn(0, 5, WIDTH), torch.randn(2, 5, WIDTH)

    def train(*batches: torch.Tensor) -> None:
        for x in batches:
            model(x, x, x)[0].sum().backward()

    expected = factors(model, lambda: train(some), Curvature())
    for name, (_, a, g) in factors(model, lambda: train(none, some), Curvature()).items():
        torch.testing.assert_close((a, g), expected[name][1:])


def watch_with_warnings(model: nn.Module) -> tuple[Capture, list[str]]:
    options, warnings = Curvature(), list[str]()
    capture = Capture(model, survey(model, options).blocks, options, warn=warnings.append)
    capture.start(0)
    return capture, warnings


def test_cross_attention_that_was_not_named_gets_plain_gradients_and_a_warning() -> None:
    model = nn.MultiheadAttention(WIDTH, HEADS)
    capture, warnings = watch_with_warnings(model)
    query, memory = torch.randn(5, 2, WIDTH), torch.randn(4, 2, WIDTH)
    for _ in range(2):
        model(query, memory, memory)[0].sum().backward()
    assert len(warnings) == 1
    assert "cross_attention" in warnings[0]
    assert capture.retired == {"in_proj"}
    assert capture.take(0, "input").weight == 0
    assert capture.take(1, "input").weight > 0
    capture.remove()


def test_a_pytorch_that_cannot_be_seen_into_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.MultiheadAttention(WIDTH, HEADS)
    monkeypatch.setattr("offbeat.kfac.capture.rebound", lambda function, names: function)
    capture, warnings = watch_with_warnings(model)
    x = torch.randn(5, 2, WIDTH)
    model(x, x, x)[0].sum().backward()
    assert len(warnings) == 2
    assert all("cannot be observed" in warning for warning in warnings)
    capture.remove()


def test_an_attention_that_is_frozen_and_evaluates_at_first_is_watched_later() -> None:
    """PyTorch computes it in one operation then, which shows no projection."""
    model, x = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), torch.randn(2, 5, WIDTH)
    capture, warnings = watch_with_warnings(model)
    model.requires_grad_(False).eval()
    model(x, x, x)
    model.requires_grad_(True).train()
    model(x, x, x)[0].sum().backward()
    assert not warnings
    assert all(capture.take(index, "output").weight > 0 for index in range(2))
    capture.remove()
