"""Profiles of well-known networks, from published constants: each number with its source.

Networks and their parameters follow from the networks' definitions (`plan.architectures`). What a
device needs for them was published by others, for the device that is named. Backward passes are
taken to last twice as long as forward passes (`FORWARD_SHARE`), and the
optimizer's step to be in the published time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from offbeat.errors import ConfigError, nearest
from offbeat_lab.plan import architectures
from offbeat_lab.plan.architectures import Network
from offbeat_lab.plan.profile import (
    ModelProfile,
    PolynomialInversion,
    Source,
    TimedBatch,
    read_profile,
)

FORWARD_SHARE: Final = 1 / 3
"""Backward multiplies twice as often as forward."""

_GTOPK: Final = "gTop-k S-SGD's released scripts/icdcs2019/communication.py"
_SPDKFAC: Final = "SPD-KFAC's released scripts/time_breakdown.py, batch.sh"

SELECT_S_PER_ELEMENT: Final = 6.1e-9
"""gTop-k's seconds of compression at 32 nodes: 91.4 ms for 14.7 M elements, 384 ms for 61.1 M, 154
ms for 25.6 M, 1.6 ms for 0.27 M; 5.9 to 6.3 ns each.
"""

COPY_S_PER_BYTE: Final = 1 / 6e9
"""A copy between a GPU and page-locked memory over PCIe 3.0 x16, at half of its 12.6 GB/s."""

MEMORY_BYTES_PER_S: Final[Mapping[str, float]] = {
    "P102-100": 440e9,
    "RTX 2080 Ti": 616e9,
    "A100": 1555e9,
}
"""As their makers state."""

_LOW_RANK_BYTES: Final = 44
"""That PowerSGD's hook reads and writes for each element: 11 accesses to float32, as torch does it
(add what is owed, clone, multiply three times, subtract).
"""

_MEMORY_SHARE: Final = 0.7
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
    """

    network: Callable[[], Network]
    device: str
    batch_size: int
    forward_backward_s: float
    source: str
    factors_s: float = 0.0
    moments: float = 1.0


PUBLISHED: Final[Mapping[str, Published]] = {
    "vgg16": Published(
        network=architectures.vgg16_cifar,
        device="P102-100",
        batch_size=128,
        forward_backward_s=128 / 1317.3,
        source=f"{_GTOPK}: 1317.3 samples/s on CIFAR-10, one node",
    ),
    "alexnet": Published(
        network=architectures.alexnet,
        device="P102-100",
        batch_size=64,
        forward_backward_s=64 / 173.5,
        source=f"{_GTOPK}: 173.5 samples/s on ImageNet, one node",
    ),
    "resnet20": Published(
        network=lambda: architectures.resnet_cifar(3),
        device="P102-100",
        batch_size=128,
        forward_backward_s=128 / 920.6,
        source=f"{_GTOPK}: 920.6 samples/s on CIFAR-10, one node",
    ),
    "lstm-ptb": Published(
        network=architectures.lstm_ptb,
        device="P102-100",
        batch_size=100,
        forward_backward_s=100 / 392.0,
        source=f"{_GTOPK}: 392 samples/s on Penn Treebank, one node; batches of 100 are assumed",
    ),
    "resnet50": Published(
        network=lambda: architectures.resnet((3, 4, 6, 3)),
        device="RTX 2080 Ti",
        batch_size=32,
        forward_backward_s=0.132,
        source=_SPDKFAC,
        factors_s=0.211,
    ),
    "resnet152": Published(
        network=lambda: architectures.resnet((3, 8, 36, 3)),
        device="RTX 2080 Ti",
        batch_size=8,
        forward_backward_s=0.114,
        source=_SPDKFAC,
        factors_s=0.193,
    ),
    "densenet201": Published(
        network=architectures.densenet201,
        device="RTX 2080 Ti",
        batch_size=16,
        forward_backward_s=0.178,
        source=_SPDKFAC,
        factors_s=0.319,
    ),
    "inception-v4": Published(
        network=architectures.inception_v4,
        device="RTX 2080 Ti",
        batch_size=16,
        forward_backward_s=0.134,
        source=_SPDKFAC,
        factors_s=0.198,
    ),
    "gpt2": Published(
        network=lambda: architectures.transformer(
            words=50_257, positions=1024, tokens=1024, head=False
        ),
        device="A100",
        batch_size=12,
        forward_backward_s=0.135,
        source="nanoGPT's README: 135 ms an iteration, 12 samples of 1,024 tokens, compiled",
        moments=2.0,
    ),
    "bert-base": Published(
        network=lambda: architectures.transformer(
            words=30_522, positions=514, tokens=128, head=True
        ),
        device="A100",
        batch_size=64,
        forward_backward_s=0.0794,
        source=(
            "not measured: 64 samples of 128 tokens, at nanoGPT's seconds for each multiplication"
            " of GPT-2, output layers counted"
        ),
        moments=2.0,
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
    factors = architectures.factors_of(network) if published.factors_s else ()
    bytes_per_s = _MEMORY_SHARE * MEMORY_BYTES_PER_S[published.device]
    memory = f"{_MEMORY_SHARE:.0%} of the memory's {MEMORY_BYTES_PER_S[published.device]:.3g} B/s"
    sources = [
        Source(field="tensors", source="the network's definition"),
        Source(field="batches", source=published.source),
        Source(field="select_s_per_element", source=f"{_GTOPK}: 6.1 ns on a P102-100"),
        Source(field="copy_s_per_byte", source="half of PCIe 3.0 x16"),
        Source(field="bucket_s_per_byte", source=f"{memory}, read and written"),
        Source(
            field="low_rank_s_per_element",
            source=f"not measured: {_LOW_RANK_BYTES} bytes at {memory}, without orthogonalising",
        ),
        Source(field="moments", source="Adam" if published.moments > 1 else "SGD with momentum"),
    ]
    if factors:
        sources += [
            Source(field="factors_s", source=_SPDKFAC),
            Source(
                field="inversion",
                source=f"{_SPDKFAC}: ResNet-50's sum and its largest factor, a + c d^3",
            ),
        ]
    return ModelProfile(
        name=name,
        device=published.device,
        on_gpu=True,
        batches=(
            TimedBatch(
                batch_size=published.batch_size,
                forward_s=FORWARD_SHARE * published.forward_backward_s,
                backward_s=(1 - FORWARD_SHARE) * published.forward_backward_s,
            ),
        ),
        optimizer_s=0.0,
        tensors=architectures.tensors_of(network),
        select_s_per_element=SELECT_S_PER_ELEMENT,
        copy_s_per_byte=COPY_S_PER_BYTE,
        bucket_s_per_byte=2 / bytes_per_s,
        low_rank_s_per_element=_LOW_RANK_BYTES / bytes_per_s,
        moments=published.moments,
        layers=factors,
        factors_s=published.factors_s,
        inversion=INVERSION if factors else None,
        sources=tuple(sources),
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
