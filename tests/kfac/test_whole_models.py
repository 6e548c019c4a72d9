"""Whole models under K-FAC, as people write and run them: vision transformers, checkpoints,
accumulation, compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import offbeat
from offbeat import Curvature
from offbeat.kfac.survey import survey

OPTIONS: dict[str, Any] = {"factor_interval": 1, "inverse_interval": 2, "damping": 0.05}
WIDTH, SIDE = 8, 4

Step = Callable[[nn.Module, torch.Tensor], None]


@pytest.fixture(autouse=True)
def compiled_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")  # inductor leaves it behind
    torch.manual_seed(3)
    yield
    torch.compiler.reset()


class FusedAttention(nn.Module):
    """One projection for query, key and value, and PyTorch's kernel for attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).unflatten(2, (3, 2, -1)).movedim(2, 0).transpose(2, 3)
        found = F.scaled_dot_product_attention(query, key, value)
        return self.proj(found.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class OwnAttention(nn.Module):
    """As torchvision's vision transformer calls PyTorch's module."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    """Patches by a convolution, a class token, position embeddings, one encoder block, a head."""

    def __init__(self, attention: type[nn.Module]) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, SIDE, stride=SIDE)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 5, WIDTH) / 10)
        self.first, self.attention = nn.LayerNorm(WIDTH), attention()
        self.second = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        x = x + self.attention(self.first(x))
        x = x + self.mlp(self.second(x))
        return self.head(self.last(x)[:, 0])  # type: ignore[no-any-return]


@pytest.mark.parametrize("attention", [OwnAttention, FusedAttention])
def test_a_vision_transformer_is_covered_but_for_what_stands_outside_of_layers(
    attention: type[nn.Module],
) -> None:
    model = VisionTransformer(attention)
    found = survey(model, Curvature())
    assert set(found.plain) == {"token", "positions"}
    images, labels = torch.randn(12, 3, 8, 8), torch.arange(12) % 3
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    with offbeat.attach(model, optimizer, offbeat.SPDKFAC(kl_clip=0.1, **OPTIONS)) as session:
        for _ in range(15):
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert not [notice for notice in session.notices if "seen" in notice or "sees" in notice]
    assert losses[-1] < 0.5 * losses[0]
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


class Net(nn.Module):
    """Layers of all kinds, in two parts of which one may be run again for its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.reentrant: bool | None = None
        self.embed = nn.Linear(4, WIDTH)
        self.body = nn.Sequential(nn.LayerNorm(WIDTH), FusedAttention(), OwnAttention(), nn.Tanh())
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        if self.reentrant is None:
            return self.head(self.body(x))  # type: ignore[no-any-return]
        return self.head(checkpoint(self.body, x, use_reentrant=self.reentrant))  # type: ignore[no-any-return]


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum((1, 2)).mean()  # type: ignore[no-any-return]


def trained(
    run: Callable[[offbeat.Session, nn.Module, torch.Tensor], None],
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model,
    **options: Any,
) -> list[torch.Tensor]:
    """Parameters after four steps, each of whose passes are made by `run`."""
    torch.manual_seed(1)
    net = Net().double()
    model = prepare(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5)
    strategy = offbeat.SPDKFAC(**(OPTIONS | options))
    with offbeat.attach(model, optimizer, strategy) as session:
        for step in range(4):
            x = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(step)).double()
            run(session, model, x)
            optimizer.step()
            optimizer.zero_grad()
        assert not [notice for notice in session.notices if "seen" in notice or "sees" in notice]
    return [p.detach() for p in net.parameters()]


def at_once(session: offbeat.Session, model: nn.Module, x: torch.Tensor) -> None:
    loss_of(model, x).backward()


def in_pieces(session: offbeat.Session, model: nn.Module, x: torch.Tensor) -> None:
    first, *others = x.split(2)
    with session.no_sync():
        for some in others:
            (loss_of(model, some) / 3).backward()
    (loss_of(model, first) / 3).backward()


def assert_same(some: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    for one, other in zip(some, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


def reentrantly(model: nn.Module) -> nn.Module:
    model.reentrant = True  # type: ignore[assignment]
    return model


def with_a_checkpoint(model: nn.Module) -> nn.Module:
    model.reentrant = False  # type: ignore[assignment]
    return model


@pytest.mark.parametrize("prepare", [reentrantly, with_a_checkpoint])
@pytest.mark.parametrize("run", [at_once, in_pieces])
def test_steps_with_checkpoints_and_accumulation_are_those_without(
    run: Any, prepare: Callable[[nn.Module], nn.Module]
) -> None:
    expected = trained(at_once)
    assert_same(trained(run), expected)
    assert_same(trained(run, prepare), expected)


def compiled_by(backend: str, *, before: bool) -> list[torch.Tensor]:
    """Trained with the model compiled before attach, or after it in the first step."""
    if before:
        return trained(at_once, lambda model: torch.compile(model, backend=backend))  # type: ignore[return-value]
    made: list[nn.Module] = []

    def run(session: offbeat.Session, model: nn.Module, x: torch.Tensor) -> None:
        if not made:
            made.append(torch.compile(model, backend=backend))  # type: ignore[arg-type]
        loss_of(made[0], x).backward()

    return trained(run)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at it
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method")  # inductor imports it
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_model_takes_the_steps_of_the_same_model(backend: str, before: bool) -> None:
    assert_same(compiled_by(backend, before=before), trained(at_once))


@pytest.mark.parametrize(("frozen", "left"), [("embed", ["head", "mix"]), ("head", ["mix"])])
def test_a_tied_weight_that_is_frozen_in_one_place_is_frozen_in_both(
    frozen: str, left: list[str]
) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(7, WIDTH), "head": nn.Linear(WIDTH, 7)})
    model["head"].weight = model["embed"].weight
    model[frozen].requires_grad_(False)
    model["mix"] = nn.Linear(WIDTH, WIDTH)
    found = survey(model, Curvature())
    assert [block.name for block in found.blocks] == left


def test_a_gpt_of_transformers_is_used_as_it_is() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=13, n_positions=8, n_embd=WIDTH, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    words = torch.randint(13, (6, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    strategy = offbeat.SPDKFAC(curvature=offbeat.Curvature(loss_terms="position"), **OPTIONS)
    losses = []
    with offbeat.attach(model, optimizer, strategy) as session:
        for _ in range(12):
            loss = model(words, labels=words).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert session.notices[0].startswith("K-FAC covers 100% of")
        assert not [notice for notice in session.notices if "seen" in notice or "sees" in notice]
    assert all(later < earlier for earlier, later in pairwise(losses[::4]))
