"""What a prediction has to know of a model and of the device that trains it, as a JSON file.

    offbeat profile --task digits > digits.json        measured here
    offbeat plan --profile digits.json                 or the name of a shipped profile

A profile is of one device and one batch size. The gradient of a tensor is ready at a share of the
backward pass, so that exchanges which overlap with it can be simulated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

import torch

from offbeat.codec.described_options import OneOrMore, Range
from offbeat.codec.json_objects import build
from offbeat.errors import ConfigError
from offbeat.kfac.placement import TabledInversion
from offbeat.simulation.measured import USUAL_CODING_S
from offbeat.simulation.training import TensorProfile

FORMAT: Final = 2
FLOAT_BYTES: Final = 4

DTYPES: Final = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
"""Of weights and gradients, by the bytes of an element."""

SELECTED_DENSITY: Final = 0.001
"""At which `select_s_per_element` is timed, and `SELECTED_CODECS` are part of it."""

SELECTED_CODECS: Final[tuple[Literal["float32"], Literal["gaps"]]] = ("float32", "gaps")

NOT_MEASURED: Final = "not measured"
"""What the source of such a number begins with."""

_DIVIDED: Final = (
    "optimizer_s",
    "select_s_per_element",
    "copy_s_per_byte",
    "bucket_s_per_byte",
    "publish_s_per_byte",
    "mean_s_per_byte",
)
"""What the devices of a node divide, as they do the model."""

_MOST: Final = 1e30
Amount: TypeAlias = Annotated[float, Range("in [0, 1e30]", lambda number: 0 <= number <= _MOST)]
"""A finite number, as files are checked for."""
_Duration: TypeAlias = Annotated[
    float, Range("in [1e-12, 1e30]", lambda number: 1e-12 <= number <= _MOST)
]

_MOST_CHARACTERS: Final = 1 << 26
_LATENCY_WITHIN_S: Final = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedBatch:
    """How long a batch takes on the device, alone.

    Attributes:
        batch_size: samples, >= 1.
        forward_s: seconds > 0.
        backward_s: seconds > 0.
    """

    batch_size: OneOrMore
    forward_s: _Duration
    backward_s: _Duration

    @classmethod
    def of(cls, batch_size: int, seconds: float, *, forward: float) -> TimedBatch:
        """Both passes take `seconds`, of which the forward pass has the share `forward`."""
        forward_s = forward * seconds
        return cls(batch_size=batch_size, forward_s=forward_s, backward_s=seconds - forward_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecCost:
    """What a value codec or an index codec computes.

    Attributes:
        name: by which options of strategies name it.
        s_per_entry: encoding an entry of a message, and decoding it again.
    """

    name: str
    s_per_entry: Amount


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectorCost:
    """What a selector of entries computes.

    Attributes:
        name: by which options of strategies name it.
        s_per_element: as `ModelProfile.select_s_per_element`.
    """

    name: str
    s_per_element: Amount


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where a number comes from.

    Attributes:
        field: its name.
        source: in words.
    """

    field: str
    source: str

    @classmethod
    def of(cls, **sources: str) -> tuple[Source, ...]:
        """In words, by field."""
        return tuple(cls(field=field, source=source) for field, source in sources.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """Predictions that were held against measured steps.

    Attributes:
        record: where the measurements are.
        workers: how many there were.
        least_rate_bit_per_s, most_rate_bit_per_s: of their links; infinite: not limited.
        strategies: that ran, with their options.
        median_error: of a predicted step, as a share of the measured one.
        worst_error: likewise.
        most_latency_s: of their links.
    """

    record: str
    workers: int
    least_rate_bit_per_s: float
    most_rate_bit_per_s: float
    strategies: tuple[str, ...]
    median_error: float
    worst_error: float
    most_latency_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A linear layer or a convolution.

    Attributes:
        a_dim: rows of A: inputs of an output element, the bias included.
        g_dim: rows of G: output channels.
        num_positions: outputs of a channel for one sample; 1 for a linear layer.
        tensor: which of the profile's tensors its weight is, counted from 0.
    """

    a_dim: int
    g_dim: int
    num_positions: int = 1
    tensor: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PolynomialInversion:
    """a + b d^2 + c d^3: launching, moving the matrix, operations.

    Attributes:
        constant_s: a, in seconds, >= 0.
        square_s: b, in seconds for each element, >= 0.
        cube_s: c, in seconds for each d^3, >= 0.
    """

    constant_s: float
    square_s: float
    cube_s: float

    def time_s(self, dim: int) -> float:
        return self.constant_s + self.square_s * dim**2 + self.cube_s * dim**3


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelProfile:
    """A model on a device.

    Attributes:
        name: for people.
        device: likewise.
        on_gpu: whether the device is a GPU, where dense collectives are NCCL's; elsewhere they are
            gloo's.
        batches: at one or more batch sizes, ascending; the last is the one that is planned for.
        optimizer_s: the optimizer's step.
        element_bytes: of a weight and its gradient: one of `DTYPES`.
        devices: that divide the model by FSDP and are one worker.
        device_bytes: memory of the device; 0: unknown.
        activation_bytes: what a batch keeps in it for the backward pass; 0: unknown.
        tokens_per_sample: of text; 0: samples are something else.
        padding_s: the part of the forward pass that is slept, as a cluster with `step` asks for.
        earlier_s: the part of the forward pass in which batches are accumulated, from the backward
            pass of the first one to the forward pass of the last one.
        tensors: parameters, in the order of the model.
        select_s_per_element: residual and selection of the largest entries, for each element.
        selectors: the same by other selectors; those that are not named here cost as much.
        codecs: what coding entries costs; those that are not named here cost what selection's do.
        copy_s_per_byte: reading or writing a model beside training, from or to the host's memory,
            for each byte.
        bucket_s_per_byte: likewise gradients and their buckets, which stay on the device; 0: as
            `copy_s_per_byte`.
        publish_s_per_byte: giving the model to a thread that averages it, and taking it back; 0: as
            two copies.
        mean_s_per_byte: adding what a peer has sent of its model to a mean on the host, for each
            byte; 0: unknown.
        low_rank_s_per_element: approximating gradients as PowerSGD does, at rank 1, for each
            element of the model; 0: unknown.
        low_rank_s_per_element_and_rank: what each further rank adds.
        low_rank_launch_s_per_element: the part of `low_rank_s_per_element` that launches kernels,
            which the devices of a node do not divide; 0: unknown.
        hook_s_per_element, hook_s_per_element_and_rank: likewise of torch's hook; 0: as PowerSGD.
        spread: standard deviation of a step over its mean, on one device, >= 0.
        moments: what the optimizer keeps of each parameter, in sizes of the model, >= 0: 1 with SGD
            with momentum, 2 with Adam.
        frozen_bytes: of weights that are not trained, as those beside a LoRA.
        layers: those with Kronecker factors, in the order of the forward pass; none: K-FAC cannot
            be planned.
        factors_s: computing all factors of a batch; 0: unknown.
        precondition_s: turning all gradients into preconditioned ones; 0: unknown.
        inversion: of a factor; None: unknown.
        sources: where the numbers come from.
        checked: predictions from it that were held against measurements.
        format: of the file.
    """

    name: str
    device: str
    batches: tuple[TimedBatch, ...]
    optimizer_s: Amount
    tensors: tuple[TensorProfile, ...]
    select_s_per_element: Amount
    copy_s_per_byte: Amount
    on_gpu: bool = False
    element_bytes: int = FLOAT_BYTES
    devices: int = 1
    device_bytes: Amount = 0.0
    activation_bytes: Amount = 0.0
    tokens_per_sample: int = 0
    selectors: tuple[SelectorCost, ...] = ()
    codecs: tuple[CodecCost, ...] = ()
    bucket_s_per_byte: Amount = 0.0
    publish_s_per_byte: Amount = 0.0
    mean_s_per_byte: Amount = 0.0
    low_rank_s_per_element: Amount = 0.0
    low_rank_s_per_element_and_rank: Amount = 0.0
    low_rank_launch_s_per_element: Amount = 0.0
    hook_s_per_element: Amount = 0.0
    hook_s_per_element_and_rank: Amount = 0.0
    padding_s: Amount = 0.0
    earlier_s: Amount = 0.0
    spread: Amount = 0.0
    moments: Amount = 1.0
    frozen_bytes: Amount = 0.0
    layers: tuple[Layer, ...] = ()
    factors_s: Amount = 0.0
    precondition_s: Amount = 0.0
    inversion: PolynomialInversion | TabledInversion | None = None
    sources: tuple[Source, ...] = ()
    checked: tuple[Checked, ...] = ()
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ConfigError(
                f"profile {self.name!r} has format {self.format}, this offbeat reads {FORMAT};"
                " write it anew with `offbeat profile`"
            )
        if not self.batches or not self.tensors:
            raise ConfigError(
                f"profile {self.name!r} has {len(self.batches)} timed batches and"
                f" {len(self.tensors)} tensors, needed is at least one of each"
            )
        if self.element_bytes not in DTYPES:
            raise ConfigError(
                f"profile {self.name!r} has weights of {self.element_bytes} bytes, allowed are"
                f" {', '.join(map(str, DTYPES))}"
            )
        for layer in self.layers:
            if not 0 <= layer.tensor < len(self.tensors):
                raise ConfigError(
                    f"profile {self.name!r} has a layer whose weight is tensor {layer.tensor};"
                    f" allowed is 0 to {len(self.tensors) - 1}; write it anew with `offbeat"
                    " profile`"
                )

    @property
    def batch(self) -> TimedBatch:
        """The batch that is planned for."""
        return self.batches[-1]

    @property
    def num_elements(self) -> int:
        return sum(tensor.num_elements for tensor in self.tensors)

    @property
    def num_bytes(self) -> int:
        """Of the model."""
        return self.element_bytes * self.num_elements

    @property
    def unmeasured(self) -> frozenset[str]:
        """Fields that were derived from something else."""
        return frozenset(one.field for one in self.sources if one.source.startswith(NOT_MEASURED))

    def selection_s(self, num_elements: int, selector: str) -> float:
        """What residual and selection take by the selector called `selector`."""
        known = {one.name: one.s_per_element for one in self.selectors}
        return known.get(selector, self.select_s_per_element) * num_elements

    def coding_s(self, num_elements: int, num_entries: int, codecs: Sequence[str]) -> float:
        """What coding a message takes besides what selection includes, >= 0; 0 where a codec was
        not timed.

        Args:
            num_elements: of the vector.
            num_entries: of it that travel.
            codecs: of their values and indices.
        """
        if not self.codecs:
            return 0.0
        costs = {one.name: one.s_per_entry for one in self.codecs}
        if not costs.keys() >= {*codecs, *SELECTED_CODECS}:
            return 0.0
        included_s = SELECTED_DENSITY * num_elements * sum(costs[name] for name in SELECTED_CODECS)
        return max(0.0, num_entries * sum(costs[name] for name in codecs) - included_s)

    def value_coding_s(self, num_elements: int, codec: str) -> float:
        """What it takes to code a whole vector and to read it again.

        Args:
            num_elements: of the vector.
            codec: of its values; one that was not timed takes `USUAL_CODING_S`.
        """
        timed = {one.name: one.s_per_entry for one in self.codecs}
        return num_elements * timed.get(codec, USUAL_CODING_S / self.devices)

    def hook_s(self, num_elements: int, rank: int) -> float:
        """What torch's hook takes for it."""
        if not self.hook_s_per_element:
            return self.low_rank_s(num_elements, rank)
        further_s = (rank - 1) * self.hook_s_per_element_and_rank
        return num_elements * (self.hook_s_per_element + further_s)

    def low_rank_s(self, num_elements: int, rank: int) -> float:
        """What approximating gradients takes as PowerSGD does."""
        further_s = (rank - 1) * self.low_rank_s_per_element_and_rank
        return num_elements * (self.low_rank_s_per_element + further_s)

    @property
    def compute_s(self) -> float:
        """A step that exchanges nothing."""
        return self.batch.forward_s + self.batch.backward_s + self.optimizer_s

    def checked_like(
        self, *, workers: int, rate_bit_per_s: float, latency_s: float, strategy: str
    ) -> list[Checked]:
        """For each cell like this one that predictions from this profile were held against, the
        check that it was in.

        Args:
            workers: of the prediction.
            rate_bit_per_s: of its links.
            latency_s: of its links. A millisecond more than what was checked lies within.
            strategy: its name.
        """
        alike = [
            (one, sum(strategy == spec.partition(":")[0] for spec in one.strategies))
            for one in self.checked
        ]
        alike = [(one, cells) for one, cells in alike if cells]
        if (
            not alike
            or not min(c.workers for c, _ in alike) <= workers <= max(c.workers for c, _ in alike)
            or rate_bit_per_s < min(one.least_rate_bit_per_s for one, _ in alike)
            or rate_bit_per_s > max(one.most_rate_bit_per_s for one, _ in alike)
            or latency_s > max(one.most_latency_s for one, _ in alike) + _LATENCY_WITHIN_S
        ):
            return []
        return [one for one, cells in alike for _ in range(cells)]

    def at_batch_size(self, batch_size: int) -> ModelProfile:
        """The same model in batches of `batch_size`: along the line through the two nearest sizes
        that were timed; in proportion to the batch where only one was.
        """
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}, allowed is 1 or more")
        batches = sorted(self.batches, key=lambda one: abs(one.batch_size - batch_size))[:2]
        timed = TimedBatch(
            batch_size=batch_size,
            forward_s=_between(batch_size, [(one.batch_size, one.forward_s) for one in batches]),
            backward_s=_between(batch_size, [(one.batch_size, one.backward_s) for one in batches]),
        )
        share = batch_size / self.batch.batch_size
        return replace(
            self,
            batches=(timed,),
            padding_s=0.0,
            factors_s=self.factors_s * share,
            activation_bytes=self.activation_bytes * share,
        )

    def with_step(self, *, batch_size: int, forward_backward_s: float, device: str) -> ModelProfile:
        """The same model on another device, where a batch takes so long."""
        share = self.batch.forward_s / (self.batch.forward_s + self.batch.backward_s)
        timed = TimedBatch.of(batch_size, forward_backward_s, forward=share)
        return replace(self, batches=(timed,), padding_s=0.0, device=device)

    def accumulated(self, batches: int) -> ModelProfile:
        """The same model, which exchanges gradients with the last of so many batches, all of
        which have factors.
        """
        batch = self.batch
        before_s = (batches - 1) * (batch.forward_s + batch.backward_s)
        larger = replace(
            batch,
            batch_size=batches * batch.batch_size,
            forward_s=before_s + batch.forward_s,
        )
        factors_s = batches * self.factors_s
        return replace(self, batches=(larger,), earlier_s=before_s, factors_s=factors_s)

    def on_island(self, devices: int, bytes_per_s: float) -> ModelProfile:
        """The same model on a node whose devices divide it by FSDP, each of which takes a batch.

        A device gathers all weights for each pass, and its part of the gradients, as long as it
        does not compute. A worker is such a node.

        Args:
            devices: of the node.
            bytes_per_s: between two of them, in each direction.
        """
        batch, elements = self.batch, 1 / devices
        gather_s = (1 - elements) * (self.num_bytes + self.frozen_bytes) / bytes_per_s
        launch_s = self.low_rank_launch_s_per_element
        return replace(
            self,
            device=f"{devices} x {self.device}",
            devices=devices,
            batches=(
                TimedBatch(
                    batch_size=devices * batch.batch_size,
                    forward_s=max(batch.forward_s, gather_s),
                    backward_s=max(batch.backward_s, 2 * gather_s),
                ),
            ),
            **{name: elements * getattr(self, name) for name in _DIVIDED},
            low_rank_s_per_element=launch_s + elements * (self.low_rank_s_per_element - launch_s),
            selectors=tuple(
                replace(one, s_per_element=elements * one.s_per_element) for one in self.selectors
            ),
            codecs=tuple(
                replace(one, s_per_entry=elements * one.s_per_entry) for one in self.codecs
            ),
        )

    def padded(self, duration_s: float) -> ModelProfile:
        """The same model where the passes of each accumulated batch take `duration_s` together, as
        the lab pads them: before the backward pass. Unchanged if they take longer.
        """
        batch, computing_s = self.batch, self.batch.forward_s + self.batch.backward_s
        one_s = computing_s - self.earlier_s
        if duration_s <= one_s:
            return self
        padding_s = (duration_s - one_s) * computing_s / one_s
        padded = replace(batch, forward_s=batch.forward_s + padding_s)
        return replace(self, batches=(padded,), padding_s=padding_s)

    def to_json(self) -> str:
        """As `read_profile` reads it."""
        return json.dumps(asdict(self), indent=1) + "\n"


def _between(size: int, timed: Sequence[tuple[int, float]]) -> float:
    (first, first_s), (last, last_s) = timed[0], timed[-1]
    if first == last:
        return first_s * size / first
    slope = max(0.0, (last_s - first_s) / (last - first))
    # A sample takes no less in a batch that is smaller than both.
    least_s = size * min(first_s / first, last_s / last) if size < min(first, last) else 0.0
    return max(first_s + slope * (size - first), least_s)


def read_profile(path: Path) -> ModelProfile:
    """The profile in a file.

    Raises:
        ConfigError: there is none, it is no JSON, or it is not a profile.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MOST_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read profile {path}: {error}") from None
    if len(text) > _MOST_CHARACTERS:
        raise ConfigError(f"{path} is longer than {_MOST_CHARACTERS} characters; is it a profile?")
    try:
        return profile_from_json(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no profile: {error}; `offbeat profile` writes one") from None


def profile_from_json(text: str) -> ModelProfile:
    """What `ModelProfile.to_json` wrote.

    Raises:
        ConfigError: numbers that do not go together.
        TypeError, ValueError, RecursionError: it is something else.
    """
    return build(ModelProfile, json.loads(text))
