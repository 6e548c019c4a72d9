"""Profiles of well-known networks, from published constants: each number with its source.

Layers and parameters follow from the networks' definitions. A layer is given by its Kronecker
factors: `a_dim` inputs of an output element, `g_dim` outputs, and at how many positions it is
applied. Its share of the passes is that of its multiplications.

What a device needs for them was published by others, for the device that is named. Backward passes
are taken to last twice as long as forward passes (`FORWARD_SHARE`), and the optimizer's step to be
in the published time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Final

from offbeat.errors import ConfigError, nearest
from offbeat.simulation.training import TensorProfile
from offbeat_lab.plan.profile import (
    Layer,
    ModelProfile,
    PolynomialInversion,
    Source,
    TimedBatch,
    read_profile,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkLayer:
    """A layer and the parameters that belong to it.

    Attributes:
        a_dim: inputs of an output element, the bias not included.
        g_dim: outputs.
        num_positions: >= 1; 0 for a table that is looked up, which multiplies nothing.
        bias: whether it has one.
        norm: elements of a normalisation's weight and bias beside it.
    """

    a_dim: int
    g_dim: int
    num_positions: int = 1
    bias: bool = False
    norm: int = 0

    @property
    def multiplications(self) -> int:
        return self.a_dim * self.g_dim * self.num_positions

    @property
    def num_elements(self) -> Iterator[int]:
        yield self.a_dim * self.g_dim
        if self.bias:
            yield self.g_dim
        if self.norm:
            yield from (self.norm // 2, self.norm // 2)


Network = Sequence[NetworkLayer]


def tensors_of(network: Network) -> tuple[TensorProfile, ...]:
    """Parameters in the order of the model; gradients are ready when the backward pass, which takes
    the layers in reverse, has passed their layer.
    """
    done = list(accumulate(layer.multiplications for layer in reversed(network)))
    ready = [part / done[-1] for part in reversed(done)]
    return tuple(
        TensorProfile(
            num_elements=size,
            ready=round(share, 6),
            rows=size // layer.a_dim if number == 0 else size,
        )
        for layer, share in zip(network, ready, strict=True)
        for number, size in enumerate(layer.num_elements)
    )


def factors_of(network: Network) -> tuple[Layer, ...]:
    """The layers that have Kronecker factors."""
    first = [0, *accumulate(len(list(layer.num_elements)) for layer in network)]
    return tuple(
        Layer(
            a_dim=layer.a_dim + layer.bias,
            g_dim=layer.g_dim,
            num_positions=layer.num_positions,
            tensor=tensor,
        )
        for layer, tensor in zip(network, first, strict=False)
        if layer.num_positions
    )


def _convolution(
    kernel: int | tuple[int, int], inputs: int, outputs: int, size: int, *, bias: bool = False
) -> NetworkLayer:
    """With batch normalisation behind it, which stands in the place of a bias."""
    height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
    return NetworkLayer(
        a_dim=height * width * inputs,
        g_dim=outputs,
        num_positions=size * size,
        bias=bias,
        norm=0 if bias else 2 * outputs,
    )


def _linear(inputs: int, outputs: int, positions: int = 1, *, norm: int = 0) -> NetworkLayer:
    return NetworkLayer(a_dim=inputs, g_dim=outputs, num_positions=positions, bias=True, norm=norm)


def resnet(blocks: Sequence[int], *, image_size: int = 224) -> Network:
    """Bottleneck networks on ImageNet (arXiv 1512.03385, table 1): 3, 4, 6, 3 is ResNet-50.

    Images have `image_size` pixels on a side, a multiple of 32.
    """

    def stages() -> Iterator[NetworkLayer]:
        size, inputs = image_size // 4, 64
        for stage, count in enumerate(blocks):
            width = 64 << stage
            for block in range(count):
                before, size = size, size // 2 if stage and not block else size
                yield _convolution(1, inputs, width, before)
                yield _convolution(3, width, width, size)
                yield _convolution(1, width, 4 * width, size)
                if not block:
                    yield _convolution(1, inputs, 4 * width, size)
                inputs = 4 * width

    return [_convolution(7, 3, 64, image_size // 2), *stages(), _linear(2048, 1000)]


def resnet_cifar(blocks_per_stage: int) -> Network:
    """Networks of 6 n + 2 layers on CIFAR-10 (arXiv 1512.03385, 4.2): n = 3 for ResNet-20."""

    def stages() -> Iterator[NetworkLayer]:
        inputs, size = 16, 32
        for stage in range(3):
            width = 16 << stage
            for block in range(blocks_per_stage):
                size = size // 2 if stage and not block else size
                yield _convolution(3, inputs, width, size)
                yield _convolution(3, width, width, size)
                inputs = width

    return [_convolution(3, 3, 16, 32), *stages(), _linear(64, 10)]


def vgg16_cifar() -> Network:
    """VGG-16's convolutions (arXiv 1409.1556, configuration D) with batch normalisation and one
    linear layer, on CIFAR-10.
    """
    layers, inputs, size = [], 3, 32
    for count, width in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(count):
            layers.append(_convolution(3, inputs, width, size))
            inputs = width
        size //= 2
    return [*layers, _linear(512, 10)]


def alexnet() -> Network:
    """In one column (arXiv 1404.5997), on ImageNet."""
    convolutions = ((11, 3, 64, 55), (5, 64, 192, 27), (3, 192, 384, 13), (3, 384, 256, 13))
    return [
        *(_convolution(*one, bias=True) for one in (*convolutions, (3, 256, 256, 13))),
        _linear(9216, 4096),
        _linear(4096, 4096),
        _linear(4096, 1000),
    ]


def densenet201() -> Network:
    """Growth 32, blocks of 6, 12, 48 and 32 (arXiv 1608.06993, table 1), on ImageNet."""

    def before(inputs: int, kernel: int, outputs: int, size: int) -> NetworkLayer:
        """With batch normalisation before it."""
        plain = _convolution(kernel, inputs, outputs, size)
        return replace(plain, norm=2 * inputs)

    def blocks() -> Iterator[NetworkLayer]:
        channels, size = 64, 56
        for number, count in enumerate((6, 12, 48, 32)):
            for _ in range(count):
                yield before(channels, 1, 128, size)
                yield before(128, 3, 32, size)
                channels += 32
            if number < 3:
                yield before(channels, 1, channels // 2, size)
                channels, size = channels // 2, size // 2

    return [_convolution(7, 3, 64, 112), *blocks(), _linear(1920, 1000, norm=2 * 1920)]


def _branch(size: int, inputs: int, *steps: tuple[int | tuple[int, int], int]) -> Network:
    """Convolutions behind each other, (kernel, outputs), whose outputs have `size` pixels on a
    side.
    """
    found = []
    for kernel, outputs in steps:
        found.append(_convolution(kernel, inputs, outputs, size))
        inputs = outputs
    return found


def inception_v4() -> Network:
    """arXiv 1602.07261, figures 3 to 9, on ImageNet at 299 pixels."""
    row, column = (1, 7), (7, 1)
    stem = [
        *_branch(149, 3, (3, 32)),
        *_branch(147, 32, (3, 32), (3, 64)),
        *_branch(73, 64, (3, 96)),
        *_branch(73, 160, (1, 64)),
        *_branch(71, 64, (3, 96)),
        *_branch(73, 160, (1, 64), (row, 64), (column, 64)),
        *_branch(71, 64, (3, 96)),
        *_branch(35, 192, (3, 192)),
    ]
    a = [
        *_branch(35, 384, (1, 96)),
        *_branch(35, 384, (1, 64), (3, 96)),
        *_branch(35, 384, (1, 64), (3, 96), (3, 96)),
        *_branch(35, 384, (1, 96)),
    ]
    reduction_a = [
        *_branch(17, 384, (3, 384)),
        *_branch(35, 384, (1, 192), (3, 224)),
        *_branch(17, 224, (3, 256)),
    ]
    b = [
        *_branch(17, 1024, (1, 384)),
        *_branch(17, 1024, (1, 192), (row, 224), (column, 256)),
        *_branch(17, 1024, (1, 192), (column, 192), (row, 224), (column, 224), (row, 256)),
        *_branch(17, 1024, (1, 128)),
    ]
    reduction_b = [
        *_branch(17, 1024, (1, 192)),
        *_branch(8, 192, (3, 192)),
        *_branch(17, 1024, (1, 256), (row, 256), (column, 320)),
        *_branch(8, 320, (3, 320)),
    ]
    c = [
        *_branch(8, 1536, (1, 256)),
        *_branch(8, 1536, (1, 384), ((1, 3), 256)),
        *_branch(8, 384, ((3, 1), 256)),
        *_branch(8, 1536, (1, 384), ((3, 1), 448), ((1, 3), 512), ((1, 3), 256)),
        *_branch(8, 512, ((3, 1), 256)),
        *_branch(8, 1536, (1, 256)),
    ]
    return [*stem, *4 * a, *reduction_a, *7 * b, *reduction_b, *3 * c, _linear(1536, 1000)]


def lstm_ptb() -> Network:
    """Two LSTM layers between a table and a linear layer, the large model of arXiv 1409.2329."""
    width, words, steps = 1500, 10_000, 35
    cell = NetworkLayer(a_dim=2 * width, g_dim=4 * width, num_positions=steps, bias=True)
    return [
        NetworkLayer(a_dim=words, g_dim=width, num_positions=0),
        cell,
        cell,
        _linear(width, words, steps),
    ]


def transformer(*, words: int, positions: int, tokens: int, head: bool) -> Network:
    """Blocks of attention and two linear layers between a table of words and one of positions.

    Args:
        words: rows of the table of words.
        positions: rows of that of positions.
        tokens: of a sample.
        head: whether a linear layer of its own stands before the output, which uses the table of
            words again.
    """
    width, depth = 768, 12
    block = [
        _linear(width, 3 * width, tokens, norm=2 * width),
        _linear(width, width, tokens),
        _linear(width, 4 * width, tokens, norm=2 * width),
        _linear(4 * width, width, tokens),
    ]
    # The table of words is one parameter: its gradient is ready when the backward pass ends.
    return [
        NetworkLayer(a_dim=words, g_dim=width, num_positions=0),
        NetworkLayer(a_dim=positions, g_dim=width, num_positions=0, norm=2 * width),
        *depth * block,
        *([_linear(width, width, tokens, norm=2 * width)] if head else []),
    ]


FORWARD_SHARE: Final = 1 / 3
"""Backward multiplies twice as often as forward."""

_GTOPK: Final = "gTop-k S-SGD's released scripts/icdcs2019/communication.py"
_SPDKFAC: Final = "SPD-KFAC's released scripts/time_breakdown.py, batch.sh"

_SELECT_S_PER_ELEMENT: Final = 6.1e-9
"""gTop-k's seconds of compression at 32 nodes: 91.4 ms for 14.7 M elements, 384 ms for 61.1 M, 154
ms for 25.6 M, 1.6 ms for 0.27 M; 5.9 to 6.3 ns each.
"""

_SELECT_BYTES: Final = 520
"""What `GTopK` takes of the memory's rate for each element, its own work on the host counted:
`offbeat profile` of GPT-2 on an H200, 0.108 ns at 4.8e12 B/s.
"""

COPY_S_PER_BYTE: Final = 1 / 6e9
"""A copy between a GPU and page-locked memory over PCIe 3.0 x16, at half of its 12.6 GB/s."""

MEMORY: Final[Mapping[str, tuple[float, float]]] = {
    "P102-100": (440e9, 5 << 30),
    "RTX 2080 Ti": (616e9, 11 << 30),
    "A100": (1555e9, 40 << 30),
}
"""Its rate in bytes a second, and bytes, as makers state them."""

_LOW_RANK_BYTES: Final = 44
"""That PowerSGD's hook reads and writes for each element: 11 accesses to float32, as torch does it
(add what is owed, clone, multiply three times, subtract).
"""

_HOOK_S, _HOOK_S_PER_RANK = 55e-6, 30e-6
LOW_RANK_S, _LOW_RANK_S_PER_RANK = 110e-6, 16e-6
"""What launching kernels takes for a tensor, of whatever size, and for each further rank: torch's
hook and `PowerSGD` on an H200, four networks (`benchmarks/gpu.py`, cell "low rank").
"""

MEMORY_SHARE: Final = 0.7
"""What plain kernels reach of a memory's rate."""

INVERSION: Final = PolynomialInversion(constant_s=1.183e-3, square_s=0.0, cube_s=3.23e-13)
"""On an RTX 2080 Ti: a + c d^3 with SPD-KFAC's published time for the largest of ResNet-50's
factors and D-KFAC's measured sum over all.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """What was published of a network.

    Attributes:
        network: makes it.
        device: that computed.
        batch_size: samples.
        forward_backward_s: of that batch, one device alone.
        source: of these.
        factors_s: computing all Kronecker factors; 0: not published.
        moments: that the optimizer keeps, 1 of SGD with momentum, 2 of Adam.
        tokens: of a sample; 0: it has none.
    """

    network: Callable[[], Network]
    device: str
    batch_size: int
    forward_backward_s: float
    source: str
    factors_s: float = 0.0
    moments: float = 1.0
    tokens: int = 0


PUBLISHED: Final[Mapping[str, Published]] = {
    "vgg16": Published(
        network=vgg16_cifar,
        device="P102-100",
        batch_size=128,
        forward_backward_s=128 / 1317.3,
        source=f"{_GTOPK}: 1317.3 samples/s on CIFAR-10, one node",
    ),
    "alexnet": Published(
        network=alexnet,
        device="P102-100",
        batch_size=64,
        forward_backward_s=64 / 173.5,
        source=f"{_GTOPK}: 173.5 samples/s on ImageNet, one node",
    ),
    "resnet20": Published(
        network=lambda: resnet_cifar(3),
        device="P102-100",
        batch_size=128,
        forward_backward_s=128 / 920.6,
        source=f"{_GTOPK}: 920.6 samples/s on CIFAR-10, one node",
    ),
    "lstm-ptb": Published(
        network=lstm_ptb,
        device="P102-100",
        batch_size=100,
        forward_backward_s=100 / 392.0,
        source=f"{_GTOPK}: 392 samples/s on Penn Treebank, one node; batches of 100 are assumed",
    ),
    "resnet50": Published(
        network=lambda: resnet((3, 4, 6, 3)),
        device="RTX 2080 Ti",
        batch_size=32,
        forward_backward_s=0.132,
        source=_SPDKFAC,
        factors_s=0.211,
    ),
    "resnet152": Published(
        network=lambda: resnet((3, 8, 36, 3)),
        device="RTX 2080 Ti",
        batch_size=8,
        forward_backward_s=0.114,
        source=_SPDKFAC,
        factors_s=0.193,
    ),
    "densenet201": Published(
        network=densenet201,
        device="RTX 2080 Ti",
        batch_size=16,
        forward_backward_s=0.178,
        source=_SPDKFAC,
        factors_s=0.319,
    ),
    "inception-v4": Published(
        network=inception_v4,
        device="RTX 2080 Ti",
        batch_size=16,
        forward_backward_s=0.134,
        source=_SPDKFAC,
        factors_s=0.198,
    ),
    "gpt2": Published(
        network=lambda: transformer(words=50_257, positions=1024, tokens=1024, head=False),
        device="A100",
        batch_size=12,
        forward_backward_s=0.135,
        source="nanoGPT's README: 135 ms an iteration, 12 samples of 1,024 tokens, compiled",
        moments=2.0,
        tokens=1024,
    ),
    "bert-base": Published(
        network=lambda: transformer(words=30_522, positions=514, tokens=128, head=True),
        device="A100",
        batch_size=64,
        forward_backward_s=0.0794,
        source=(
            "not measured: 64 samples of 128 tokens, at nanoGPT's seconds for each multiplication"
            " of GPT-2, output layers counted"
        ),
        moments=2.0,
        tokens=128,
    ),
}
"""By name."""


def shipped_profile(name: str) -> ModelProfile:
    """The profile called `name`. Raises `ConfigError` with the nearest name that exists."""
    if name not in PUBLISHED:
        raise ConfigError(
            f"no profile {name!r}; shipped are {', '.join(PUBLISHED)}{nearest(name, PUBLISHED)}"
        )
    published = PUBLISHED[name]
    network = published.network()
    factors = factors_of(network) if published.factors_s else ()
    peak_bytes_per_s, device_bytes = MEMORY[published.device]
    bytes_per_s = MEMORY_SHARE * peak_bytes_per_s
    memory = f"{MEMORY_SHARE:.0%} of the memory's {peak_bytes_per_s:.3g} B/s"
    # The other devices are as old as the one on which gTop-k's selection was published.
    select_s, selects = _SELECT_S_PER_ELEMENT, f"{_GTOPK}: 6.1 ns on a P102-100"
    if published.device == "A100":
        select_s, selects = selection_cost(bytes_per_s), f"an H200's at {memory}"
    sources = Source.of(
        tensors="the network's definition",
        batches=published.source,
        select_s_per_element=selects,
        copy_s_per_byte="half of PCIe 3.0 x16",
        bucket_s_per_byte=f"{memory}, read and written",
        low_rank_s_per_element=f"{_LOW_RANK_BYTES} bytes at {memory}, and an H200's host for each"
        " tensor",
        moments="Adam" if published.moments > 1 else "SGD with momentum",
    )
    if factors:
        sources += Source.of(
            factors_s=_SPDKFAC,
            inversion=f"{_SPDKFAC}: ResNet-50's sum and its largest factor, a + c d^3",
        )
    batch = TimedBatch.of(published.batch_size, published.forward_backward_s, forward=FORWARD_SHARE)
    profile = ModelProfile(
        name=name,
        device=published.device,
        on_gpu=True,
        batches=(batch,),
        optimizer_s=0.0,
        tensors=tensors_of(network),
        select_s_per_element=select_s,
        copy_s_per_byte=COPY_S_PER_BYTE,
        bucket_s_per_byte=2 / bytes_per_s,
        device_bytes=device_bytes,
        tokens_per_sample=published.tokens,
        moments=published.moments,
        layers=factors,
        factors_s=published.factors_s,
        inversion=INVERSION if factors else None,
        sources=sources,
    )
    return with_low_rank(profile, bytes_per_s)


def selection_cost(bytes_per_s: float) -> float:
    """Seconds of `GTopK` for each element, where kernels reach such a rate of memory."""
    return MEMORY_SHARE * _SELECT_BYTES / bytes_per_s


def low_rank_bound(bytes_per_s: float) -> float:
    """Seconds for each element that a memory of such a rate lets PowerSGD's hook take at least."""
    return _LOW_RANK_BYTES / bytes_per_s


def with_low_rank(profile: ModelProfile, bytes_per_s: float) -> ModelProfile:
    """The profile with what PowerSGD computes, where kernels reach such a rate of memory."""
    share = len(profile.tensors) / profile.num_elements
    least_s = low_rank_bound(bytes_per_s)
    return replace(
        profile,
        low_rank_s_per_element=least_s + share * LOW_RANK_S,
        low_rank_launch_s_per_element=share * LOW_RANK_S,
        low_rank_s_per_element_and_rank=share * _LOW_RANK_S_PER_RANK,
        hook_s_per_element=least_s + share * _HOOK_S,
        hook_s_per_element_and_rank=share * _HOOK_S_PER_RANK,
    )


def named_profile(name: str) -> ModelProfile:
    """A shipped profile by name (`resnet50`), or a file by path. Raises `ConfigError` otherwise."""
    path = Path(name)
    if path.exists() and path.is_file():
        return read_profile(path)
    if path.name == name and path.stem in PUBLISHED:
        return shipped_profile(path.stem)
    if path.name != name or path.suffix == ".json":
        raise ConfigError(
            f"there is no profile {name}; `offbeat profile` writes one, and shipped are"
            f" {', '.join(PUBLISHED)}"
        )
    return shipped_profile(name)
