"""Profiles of language models that nobody has trained yet, from their configuration: shapes follow
from it without a weight, and seconds from a device's arithmetic and the part of it that others
reached.

    offbeat plan --config llama/config.json --device h100 --link 25gbit --workers 2,4,8
    offbeat plan --config layers=32,hidden=4096,heads=32,sequence=2048 ...
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Final

from offbeat.codec.described_options import NotNegative, OneOrMore, check_options
from offbeat.errors import ConfigError, nearest
from offbeat_lab.plan.profile import NOT_MEASURED, ModelProfile, Source, TimedBatch
from offbeat_lab.plan.shipped import (
    COPY_S_PER_BYTE,
    FORWARD_SHARE,
    MEMORY_SHARE,
    NetworkLayer,
    selection_cost,
    tensors_of,
    with_low_rank,
)

_GIB: Final = 1 << 30
PCIE_BYTES_PER_S: Final = 16e9
"""Between two devices of a node that is not known, as over PCIe."""


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator.

    Attributes:
        name: for people.
        flops_per_s: its maker's, in bfloat16 without sparsity.
        memory_bytes_per_s: likewise.
        memory_bytes: that it has.
        node_bytes_per_s: between two of a node, in each direction.
        reached: which part of `flops_per_s` training reaches.
    """

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: float
    node_bytes_per_s: float
    reached: float = 0.4


DEVICES: Final[Mapping[str, Device]] = {
    one.name.lower().replace(" ", "-"): one
    for one in (
        Device("H100", 989e12, 3.35e12, 80 * _GIB, 450e9, reached=0.42),
        Device("A100", 312e12, 2.04e12, 80 * _GIB, 300e9, reached=0.57),
        Device("A100 40GB", 312e12, 1.56e12, 40 * _GIB, 300e9, reached=0.55),
        Device("L40S", 362e12, 0.86e12, 48 * _GIB, 32e9),
        Device("A10G", 70e12, 0.6e12, 24 * _GIB, 32e9),
        Device("RTX 4090", 165e12, 1.01e12, 24 * _GIB, 32e9),
        Device("RTX 3090", 71e12, 0.94e12, 24 * _GIB, 16e9),
    )
}
"""By name. What was reached on H100s and A100s is the median of MPT's training without recomputed
activations, 1 to 13 billion parameters at 2,048 tokens (mosaicml/llm-foundry, benchmarking); of
other devices nobody has published as much, and 0.4 is assumed.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A decoder.

    Attributes:
        layers, hidden, heads: as their names say.
        kv_heads: of keys and values; 0: as `heads`.
        head_dim: of a head; 0: `hidden` over `heads`.
        intermediate: width of the feed-forward layers; 0: four times `hidden`.
        vocabulary: rows of the table of words.
        sequence: tokens of a sample.
        window: on how many tokens attention looks back; 0: on all.
        positions: rows of a table of positions; 0: there is none.
        gated: whether feed-forward layers have a gate, as SwiGLU's.
        tied: whether the output layer is the table of words.
        bias: whether linear layers have one, and norms too.
        attention_bias: whether queries, keys and values have one; else as `bias`.
    """

    layers: OneOrMore
    hidden: OneOrMore
    heads: OneOrMore
    kv_heads: NotNegative = 0
    head_dim: NotNegative = 0
    intermediate: NotNegative = 0
    vocabulary: NotNegative = 32_000
    sequence: OneOrMore = 2048
    window: NotNegative = 0
    positions: NotNegative = 0
    gated: bool = True
    tied: bool = False
    bias: bool = False
    attention_bias: bool = False

    def network(self) -> Iterator[NetworkLayer]:
        """Its layers; attention's own products have no parameters."""
        hidden, tokens = self.hidden, self.sequence
        head_dim = self.head_dim or hidden // self.heads
        queries, keys = self.heads * head_dim, (self.kv_heads or self.heads) * head_dim
        width = self.intermediate or 4 * hidden
        norm = hidden * (1 + self.bias)
        yield NetworkLayer(a_dim=self.vocabulary, g_dim=hidden, num_positions=0)
        if self.positions:
            yield NetworkLayer(a_dim=self.positions, g_dim=hidden, num_positions=0)
        linear = partial(NetworkLayer, num_positions=tokens, bias=self.bias)
        attention_bias = self.bias or self.attention_bias
        for layer in range(self.layers):
            for outputs, its_norm in ((queries, norm), (keys, 0), (keys, 0)):
                yield linear(a_dim=hidden, g_dim=outputs, bias=attention_bias, norm=its_norm)
            yield linear(a_dim=queries, g_dim=hidden)
            for its_norm in (norm, 0)[: 1 + self.gated]:
                yield linear(a_dim=hidden, g_dim=width, norm=its_norm)
            yield linear(a_dim=width, g_dim=hidden, norm=norm * (layer == self.layers - 1))
        if not self.tied:
            yield NetworkLayer(a_dim=hidden, g_dim=self.vocabulary, num_positions=tokens)

    def flops(self, num_elements: int) -> float:
        """Of forward and backward pass of a sample: 6 for each parameter that multiplies and each
        token, and 12 for each layer, each number of its queries and each pair of tokens within the
        window.
        """
        looked_up = (self.positions + (0 if self.tied else self.vocabulary)) * self.hidden
        width = self.heads * (self.head_dim or self.hidden // self.heads)
        window = min(self.window or self.sequence, self.sequence)
        pairs = window * (2 * self.sequence - window)
        attention = 12 * self.layers * width * pairs
        return 6 * (num_elements - looked_up) * self.sequence + attention

    def activation_bytes(self) -> float:
        """Of a sample, kept for the backward pass, in 16 bits for each token: 18 bytes for each
        number of a layer's width, and 4 for each of its feed-forward layers' (arXiv 2205.05198,
        where attention is computed in parts), 8 if those have a gate; and what is kept of the
        output layer, in float32 too.
        """
        inside = (4 if self.gated else 2) * (self.intermediate or 4 * self.hidden)
        per_token = 2 * self.layers * (9 * self.hidden + inside)
        return self.sequence * (per_token + (2 + 4) * self.vocabulary)


_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocabulary": ("vocab_size",),
    "tied": ("tie_word_embeddings",),
    "attention_bias": ("attention_bias",),
}
"""Fields of `Shape`, and what configurations call them."""

_GATED: Final = ("silu", "swish", "swiglu")
_ALWAYS_GATED: Final = ("gemma", "gemma2", "gemma3_text")
_LEARNED: Final = ("gpt2", "opt", "gpt_neo", "gpt_bigcode")
_BIAS: Final = (*_LEARNED, "bloom", "starcoder2")
_TIED: Final = (*_BIAS, *_ALWAYS_GATED, "cohere", "cohere2", "falcon", "mpt")
_ATTENTION_BIAS: Final = ("qwen2",)
_WINDOWED: Final = ("mistral", "phi3", "starcoder2")
"""Kinds of models, and what their configurations leave out, since transformers knows it."""


def read_shape(given: str, sequence: int | None = None) -> Shape:
    """A model's shape.

    Args:
        given: a configuration as transformers writes it (config.json), or `layers=32,hidden=4096,
            heads=32` with other fields of `Shape`.
        sequence: tokens of a sample; None: what the configuration says, up to 2,048.

    Raises:
        ConfigError: there is no such file, something is missing, or it is no decoder of this kind.
    """
    path = Path(given)
    values = _from_words(given) if "=" in given and not path.exists() else _from_file(path)
    if sequence is not None:
        values["sequence"] = sequence
    missing = [name for name in ("layers", "hidden", "heads") if name not in values]
    if missing:
        raise ConfigError(
            f"--config {given} says no {', '.join(missing)}; needed are layers, hidden and heads,"
            " as in layers=32,hidden=4096,heads=32"
        )
    shape = Shape(**values)
    check_options(shape)
    if not shape.head_dim and shape.hidden % shape.heads:
        raise ConfigError(
            f"--config {given}: hidden is {shape.hidden} and heads {shape.heads}; allowed are heads"
            " that divide hidden"
        )
    return shape


def _from_words(given: str) -> dict[str, Any]:
    names = [one.name for one in fields(Shape)]
    values: dict[str, Any] = {}
    for word in given.split(","):
        name, _, value = word.strip().partition("=")
        if name not in names:
            raise ConfigError(
                f"--config has {name!r}; allowed are {', '.join(names)}{nearest(name, names)}"
            )
        if not value.isdecimal():
            raise ConfigError(f"--config has {name}={value!r}; allowed is a whole number")
        values[name] = int(value)
    return values


def _from_file(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read --config {path}: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is no configuration of a model")
    kind = config.get("model_type", "")
    if config.get("is_encoder_decoder") or _has_experts(config) or config.get("kv_lora_rank"):
        raise ConfigError(
            f"{path} is of an encoder with a decoder, of a mixture of experts, or has latent"
            " attention, and only decoders of one kind of layer can be planned so; time a script of"
            " it with offbeat profile"
        )
    if "bert" in kind or not config.get("vocab_size"):
        raise ConfigError(
            f"{path} is of an encoder, or of no language model, and only decoders can be planned"
            " so; time a script of it with offbeat profile"
        )
    values = {
        field: config[name]
        for field, names in _NAMES.items()
        for name in names
        if config.get(name) is not None
    }
    longest = config.get("max_position_embeddings") or config.get("n_positions")
    if longest:
        values["sequence"] = min(int(longest), 2048)
    activation = config.get("hidden_act") or config.get("activation_function", "")
    is_learned = kind in _LEARNED
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        values["kv_heads"] = 1
    return values | {
        "gated": kind in _ALWAYS_GATED or activation in _GATED,
        "tied": config.get("tie_word_embeddings", kind in _TIED),
        "bias": kind in _BIAS,
        "attention_bias": config.get("attention_bias", kind in _ATTENTION_BIAS),
        "positions": (int(longest or 0) if is_learned else 0),
        # Of other kinds, some of the layers look back on all.
        "window": (config.get("sliding_window") or 0) if kind in _WINDOWED else 0,
    }


def _has_experts(config: Mapping[str, Any]) -> bool:
    """Whether it has a number of experts, which each kind of model calls by a name of its own, some
    in a part for feed-forward layers.
    """
    return any(
        _has_experts(value) if isinstance(value, dict) else value and "expert" in name
        for name, value in config.items()
    )


def device_named(name: str) -> Device:
    """The device called `name`. Raises `ConfigError` where there is none."""
    key = name.lower().replace(" ", "-")
    if key not in DEVICES:
        raise ConfigError(
            f"--device is {name!r}; known are {', '.join(DEVICES)}{nearest(key, DEVICES)}"
        )
    return DEVICES[key]


def node_bytes_per_s(name: str) -> float | None:
    """Between two devices of a node, in each direction; None: nobody knows.

    Args:
        name: of the device, as torch has it: "NVIDIA H100 80GB HBM3".
    """
    words = set(re.findall(r"\w+", name.lower()))
    known = [one for one in DEVICES.values() if words.issuperset(one.name.lower().split())]
    if not known or "pcie" in words:
        return None
    return max(known, key=lambda one: len(one.name)).node_bytes_per_s


def language_model(
    shape: Shape, device: Device, *, batch_size: int, element_bytes: int
) -> ModelProfile:
    """A profile that nothing was measured for.

    Args:
        shape: of the model.
        device: that computes, in bfloat16.
        batch_size: samples of a batch.
        element_bytes: of a weight, and of its gradient: 2 for bfloat16, 4 for float32.
    """
    tensors = tensors_of(list(shape.network()))
    num_elements = sum(tensor.num_elements for tensor in tensors)
    passes_s = batch_size * shape.flops(num_elements) / (device.flops_per_s * device.reached)
    bytes_per_s = MEMORY_SHARE * device.memory_bytes_per_s
    moments = 2.0
    profile = ModelProfile(
        name=f"{num_elements / 1e9:.3g} billion parameters",
        device=device.name,
        on_gpu=True,
        batches=(TimedBatch.of(batch_size, passes_s, forward=FORWARD_SHARE),),
        # Adam reads weight, gradient and moments, and writes all but the gradient.
        optimizer_s=(3 + 2 * moments) * element_bytes * num_elements / bytes_per_s,
        tensors=tensors,
        element_bytes=element_bytes,
        device_bytes=device.memory_bytes,
        activation_bytes=batch_size * shape.activation_bytes(),
        tokens_per_sample=shape.sequence,
        select_s_per_element=selection_cost(bytes_per_s),
        copy_s_per_byte=COPY_S_PER_BYTE,
        bucket_s_per_byte=2 / bytes_per_s,
        moments=moments,
        sources=Source.of(
            tensors="the configuration",
            batches=f"{NOT_MEASURED}: {device.reached:.0%} of {device.flops_per_s:.3g} FLOP/s",
            low_rank_s_per_element="an H200's by this memory, and an H200's host for each tensor",
            select_s_per_element="an H200's by this memory",
        ),
    )
    return with_low_rank(profile, bytes_per_s)
