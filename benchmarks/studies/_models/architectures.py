"""Ten public architectures, from their published configurations: which layers they have, of which
sizes, and which weights they tie. They compute what the originals do, but for dropout and caches.

`ARCHITECTURES` has each in its published size, and small enough to be trained in a moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Conv1D(nn.Module):
    """`transformers`' linear layer with a row of its weight for each input."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = (
            nn.Parameter(0.02 * torch.randn(nx, nf)),
            nn.Parameter(torch.zeros(nf)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return rows.view(*x.shape[:-1], self.nf)


class LlamaRMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(dim)), eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        mean = hidden_states.square().mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(mean + self.variance_epsilon)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    *,
    causal: bool = False,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of tensors of shape (N, T, d)."""
    q, k, v = (each.unflatten(2, (heads, -1)).transpose(1, 2) for each in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal)
    return mixed.transpose(1, 2).flatten(2)


class GPT2(nn.Module):
    class Layer(nn.Module):
        def __init__(self, dim: int, heads: int) -> None:
            super().__init__()
            self.heads = heads
            self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
            self.c_attn, self.c_proj = Conv1D(3 * dim, dim), Conv1D(dim, dim)
            self.c_fc, self.c_out = Conv1D(4 * dim, dim), Conv1D(dim, 4 * dim)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.c_attn(self.ln_1(x)).chunk(3, dim=2)
            x = x + self.c_proj(attend(q, k, v, self.heads, causal=True))
            return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))  # type: ignore[no-any-return]

    def __init__(self, *, words: int, positions: int, dim: int, layers: int, heads: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, dim), nn.Embedding(positions, dim)
        self.h = nn.ModuleList(self.Layer(dim, heads) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(dim), nn.Linear(dim, words, bias=False)
        nn.init.normal_(self.wte.weight, std=0.02)
        self.lm_head.weight = self.wte.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.wte(words) + self.wpe(torch.arange(words.shape[1], device=words.device)[None])
        for layer in self.h:
            x = layer(x)
        return self.lm_head(self.ln_f(x))  # type: ignore[no-any-return]


class Llama(nn.Module):
    class Layer(nn.Module):
        def __init__(self, dim: int, hidden: int, heads: int) -> None:
            super().__init__()
            self.heads = heads
            self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
                nn.Linear(dim, dim, bias=False) for _ in range(4)
            )
            self.gate_proj, self.up_proj = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
            self.down_proj = nn.Linear(hidden, dim, bias=False)
            self.input_norm, self.post_norm = LlamaRMSNorm(dim), LlamaRMSNorm(dim)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.input_norm(x)
            q, k = (self.turned(each) for each in (self.q_proj(h), self.k_proj(h)))
            x = x + self.o_proj(attend(q, k, self.v_proj(h), self.heads, causal=True))
            h = self.post_norm(x)
            return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))  # type: ignore[no-any-return]

        def turned(self, x: torch.Tensor) -> torch.Tensor:
            """Rotary positions."""
            half = x.shape[2] // self.heads // 2
            angles = torch.arange(x.shape[1], device=x.device)[:, None, None] * 1e4 ** (
                -torch.arange(half, device=x.device) / half
            )
            a, b = x.unflatten(2, (self.heads, 2, half)).unbind(3)
            cos, sin = angles.cos(), angles.sin()
            return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=3).flatten(2)

    def __init__(self, *, words: int, dim: int, hidden: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(words, dim)
        self.layers = nn.ModuleList(self.Layer(dim, hidden, heads) for _ in range(layers))
        self.norm, self.lm_head = LlamaRMSNorm(dim), nn.Linear(dim, words, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(words)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))  # type: ignore[no-any-return]


class Bert(nn.Module):
    """With its head for masked words, whose bias is its own and whose weight is the embedding's."""

    class Layer(nn.Module):
        def __init__(self, dim: int, heads: int) -> None:
            super().__init__()
            self.heads = heads
            self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
            self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
            self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mixed = attend(self.query(x), self.key(x), self.value(x), self.heads)
            x = self.norm_1(x + self.out(mixed))
            return self.norm_2(x + self.down(F.gelu(self.up(x))))  # type: ignore[no-any-return]

    def __init__(self, *, words: int, positions: int, dim: int, layers: int, heads: int) -> None:
        super().__init__()
        self.words, self.places = (
            nn.Embedding(words, dim, padding_idx=0),
            nn.Embedding(positions, dim),
        )
        self.segments, self.norm = nn.Embedding(2, dim), nn.LayerNorm(dim)
        self.layers = nn.ModuleList(self.Layer(dim, heads) for _ in range(layers))
        self.transform, self.head_norm = nn.Linear(dim, dim), nn.LayerNorm(dim)
        self.decoder = nn.Linear(dim, words)
        nn.init.normal_(self.words.weight, std=0.02)
        self.decoder.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        places = torch.arange(words.shape[1], device=words.device)[None]
        x = self.words(words) + self.places(places) + self.segments(torch.zeros_like(words))
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x)
        return self.decoder(self.head_norm(F.gelu(self.transform(x))))  # type: ignore[no-any-return]


class T5(nn.Module):
    """Encoder, decoder and head share one table of words."""

    class Attention(nn.Module):
        def __init__(self, dim: int, heads: int, *, has_bias: bool) -> None:
            super().__init__()
            self.heads = heads
            self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
            if has_bias:
                self.relative_attention_bias = nn.Embedding(32, heads)

        def forward(
            self, x: torch.Tensor, memory: torch.Tensor, bias: torch.Tensor | None
        ) -> torch.Tensor:
            mixed = attend(self.q(x), self.k(memory), self.v(memory), self.heads, bias=bias)
            return self.o(mixed)  # type: ignore[no-any-return]

        def bias(self, length: int, *, causal: bool) -> torch.Tensor:
            at = torch.arange(length, device=self.q.weight.device)
            places = (at[None] - at[:, None]).clamp(-16, 15) + 16
            bias = self.relative_attention_bias(places).movedim(2, 0)
            return bias.masked_fill(at[None] > at[:, None], -1e9) if causal else bias  # type: ignore[no-any-return]

    class Layer(nn.Module):
        def __init__(
            self, dim: int, hidden: int, heads: int, *, first: bool, decodes: bool
        ) -> None:
            super().__init__()
            self.own, self.own_norm = T5.Attention(dim, heads, has_bias=first), LlamaRMSNorm(dim)
            self.decodes = decodes
            if decodes:
                self.cross = T5.Attention(dim, heads, has_bias=False)
                self.cross_norm = LlamaRMSNorm(dim)
            self.wi, self.wo = (
                nn.Linear(dim, hidden, bias=False),
                nn.Linear(hidden, dim, bias=False),
            )
            self.norm = LlamaRMSNorm(dim)

        def forward(
            self, x: torch.Tensor, bias: torch.Tensor, memory: torch.Tensor | None
        ) -> torch.Tensor:
            h = self.own_norm(x)
            x = x + self.own(h, h, bias)
            if memory is not None:
                x = x + self.cross(self.cross_norm(x), memory, None)
            return x + self.wo(F.relu(self.wi(self.norm(x))))  # type: ignore[no-any-return]

    def __init__(self, *, words: int, dim: int, hidden: int, layers: int, heads: int) -> None:
        super().__init__()
        self.shared = nn.Embedding(words, dim)
        nn.init.normal_(self.shared.weight, std=0.02)
        self.encoder, self.decoder = (
            nn.ModuleList(
                self.Layer(dim, hidden, heads, first=number == 0, decodes=decodes)
                for number in range(layers)
            )
            for decodes in (False, True)
        )
        self.encoder_norm, self.decoder_norm = LlamaRMSNorm(dim), LlamaRMSNorm(dim)
        self.lm_head = nn.Linear(dim, words, bias=False)
        self.lm_head.weight = self.shared.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        memory = x = self.shared(words)
        bias = self.encoder[0].own.bias(words.shape[1], causal=False)  # type: ignore[union-attr, operator]
        for layer in self.encoder:
            memory = layer(memory, bias, None)
        memory = self.encoder_norm(memory)
        bias = self.decoder[0].own.bias(words.shape[1], causal=True)  # type: ignore[union-attr, operator]
        for layer in self.decoder:
            x = layer(x, bias, memory)
        return self.lm_head(self.decoder_norm(x))  # type: ignore[no-any-return]


class ViT(nn.Module):
    def __init__(
        self, *, size: int, patch: int, dim: int, layers: int, heads: int, classes: int
    ) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(3, dim, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embedding = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2 + 1, dim))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                dim, heads, 4 * dim, 0.0, F.gelu, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.ln, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = self.conv_proj(images).flatten(2).mT
        x = torch.cat([self.class_token.expand(len(images), -1, -1), patches], dim=1)
        x = x + self.pos_embedding
        for layer in self.layers:
            x = layer(x)
        return self.head(self.ln(x[:, 0]))  # type: ignore[no-any-return]


class ResNet(nn.Module):
    class Layer(nn.Module):
        def __init__(self, width: int, maps: int, stride: int, *, is_bottleneck: bool) -> None:
            super().__init__()
            sizes = [(1, 1), (3, stride), (1, 1)] if is_bottleneck else [(3, stride), (3, 1)]
            widths = [width, *[maps] * (len(sizes) - 1), maps * (4 if is_bottleneck else 1)]
            parts: list[nn.Module] = []
            for (taps, step), (inputs, outputs) in zip(sizes, pairwise(widths), strict=True):
                parts += [
                    nn.Conv2d(inputs, outputs, taps, step, taps // 2, bias=False),
                    nn.BatchNorm2d(outputs),
                    nn.ReLU(),
                ]
            self.body = nn.Sequential(*parts[:-1])
            self.shortcut = nn.Sequential(
                *(
                    [
                        nn.Conv2d(width, widths[-1], 1, stride, bias=False),
                        nn.BatchNorm2d(widths[-1]),
                    ]
                    if stride > 1 or width != widths[-1]
                    else []
                )
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(self.body(x) + self.shortcut(x))

    def __init__(
        self, *, depths: Sequence[int], width: int, is_bottleneck: bool, classes: int
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )
        parts, inputs = [], width
        for stage, depth in enumerate(depths):
            maps = width * 2**stage
            for number in range(depth):
                stride = 2 if stage and not number else 1
                parts.append(self.Layer(inputs, maps, stride, is_bottleneck=is_bottleneck))
                inputs = maps * (4 if is_bottleneck else 1)
        self.stages, self.fc = nn.Sequential(*parts), nn.Linear(inputs, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.fc(self.stages(self.stem(images)).mean((2, 3)))  # type: ignore[no-any-return]


class MobileNetV2(nn.Module):
    """Depthwise convolutions between those of one tap."""

    SETTING = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )

    class Layer(nn.Module):
        def __init__(self, inputs: int, outputs: int, stride: int, widening: int) -> None:
            super().__init__()
            hidden = inputs * widening
            parts: list[nn.Module] = []
            if widening > 1:
                parts += MobileNetV2.conv(inputs, hidden, 1, 1, 1)
            parts += MobileNetV2.conv(hidden, hidden, 3, stride, hidden)
            parts += MobileNetV2.conv(hidden, outputs, 1, 1, 1)[:-1]
            self.body, self.adds = nn.Sequential(*parts), stride == 1 and inputs == outputs

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.body(x) if self.adds else self.body(x)  # type: ignore[no-any-return]

    @staticmethod
    def conv(inputs: int, outputs: int, taps: int, stride: int, groups: int) -> list[nn.Module]:
        return [
            nn.Conv2d(inputs, outputs, taps, stride, taps // 2, groups=groups, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU6(),
        ]

    def __init__(self, *, part: float, classes: int) -> None:
        super().__init__()
        inputs = int(32 * part)
        parts = self.conv(3, inputs, 3, 2, 1)
        for widening, maps, depth, stride in self.SETTING:
            for number in range(depth):
                outputs = int(maps * part)
                parts.append(self.Layer(inputs, outputs, 1 if number else stride, widening))
                inputs = outputs
        last = int(1280 * part)
        self.features = nn.Sequential(*parts, *self.conv(inputs, last, 1, 1, 1))
        self.classifier = nn.Linear(last, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images).mean((2, 3)))  # type: ignore[no-any-return]


class ConvNeXt(nn.Module):
    class LayerNorm2d(nn.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.movedim(1, -1)).movedim(-1, 1)

    class Layer(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(dim, dim, 7, padding=3, groups=dim), nn.LayerNorm(dim)
            self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
            self.layer_scale = nn.Parameter(torch.full((dim,), 1e-6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h: torch.Tensor = self.norm(self.conv(x).movedim(1, -1))
            h = self.layer_scale * self.down(F.gelu(self.up(h)))
            return x + h.movedim(-1, 1)

    def __init__(self, *, dims: Sequence[int], depths: Sequence[int], classes: int) -> None:
        super().__init__()
        parts: list[nn.Module] = [nn.Conv2d(3, dims[0], 4, 4), self.LayerNorm2d(dims[0])]
        for stage, (dim, depth) in enumerate(zip(dims, depths, strict=True)):
            if stage:
                parts += [self.LayerNorm2d(dims[stage - 1]), nn.Conv2d(dims[stage - 1], dim, 2, 2)]
            parts += [self.Layer(dim) for _ in range(depth)]
        self.features, self.norm = nn.Sequential(*parts), nn.LayerNorm(dims[-1])
        self.head = nn.Linear(dims[-1], classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.features(images).mean((2, 3))))  # type: ignore[no-any-return]


class LSTMModel(nn.Module):
    """The medium language model of arXiv 1409.2329."""

    def __init__(self, *, words: int, dim: int) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(words, dim), nn.LSTM(dim, dim, 2, batch_first=True)
        self.head = nn.Linear(dim, words)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(words))[0])  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A model in two sizes.

    Attributes:
        num_parameters: as published.
        published, small: make it.
        sees: what the small one is trained on: "words" or "images".
    """

    num_parameters: int
    published: Callable[[], nn.Module]
    small: Callable[[], nn.Module]
    sees: str


def _both(
    num_parameters: int,
    kind: Callable[..., nn.Module],
    published: dict[str, Any],
    small: dict[str, Any],
    sees: str,
) -> Architecture:
    return Architecture(
        num_parameters=num_parameters,
        published=lambda: kind(**published),
        small=lambda: kind(**(published | small)),
        sees=sees,
    )


_TEXT = {"words": 64, "dim": 32, "layers": 2, "heads": 2}

ARCHITECTURES = {
    "GPT-2": _both(
        124_439_808,
        GPT2,
        {"words": 50257, "positions": 1024, "dim": 768, "layers": 12, "heads": 12},
        _TEXT | {"positions": 16},
        "words",
    ),
    "Llama-2 7B": _both(
        6_738_415_616,
        Llama,
        {"words": 32000, "dim": 4096, "hidden": 11008, "layers": 32, "heads": 32},
        _TEXT | {"hidden": 88},
        "words",
    ),
    "BERT base": _both(
        109_514_298,
        Bert,
        {"words": 30522, "positions": 512, "dim": 768, "layers": 12, "heads": 12},
        _TEXT | {"positions": 16},
        "words",
    ),
    "T5 small": _both(
        60_506_624,
        T5,
        {"words": 32128, "dim": 512, "hidden": 2048, "layers": 6, "heads": 8},
        _TEXT | {"hidden": 64},
        "words",
    ),
    "ViT-B/16": _both(
        86_567_656,
        ViT,
        {"size": 224, "patch": 16, "dim": 768, "layers": 12, "heads": 12, "classes": 1000},
        {"size": 32, "patch": 8, "dim": 32, "layers": 2, "heads": 2, "classes": 10},
        "images",
    ),
    "ResNet-18": _both(
        11_689_512,
        ResNet,
        {"depths": (2, 2, 2, 2), "width": 64, "is_bottleneck": False, "classes": 1000},
        {"depths": (1, 1, 1, 1), "width": 8, "classes": 10},
        "images",
    ),
    "ResNet-50": _both(
        25_557_032,
        ResNet,
        {"depths": (3, 4, 6, 3), "width": 64, "is_bottleneck": True, "classes": 1000},
        {"depths": (1, 1, 1, 1), "width": 8, "classes": 10},
        "images",
    ),
    "MobileNetV2": _both(
        3_504_872,
        MobileNetV2,
        {"part": 1.0, "classes": 1000},
        {"part": 0.25, "classes": 10},
        "images",
    ),
    "ConvNeXt-T": _both(
        28_589_128,
        ConvNeXt,
        {"dims": (96, 192, 384, 768), "depths": (3, 3, 9, 3), "classes": 1000},
        {"dims": (8, 16), "depths": (1, 1), "classes": 10},
        "images",
    ),
    "LSTM of 2 x 650": _both(
        19_780_400, LSTMModel, {"words": 10000, "dim": 650}, {"words": 64, "dim": 32}, "words"
    ),
}
