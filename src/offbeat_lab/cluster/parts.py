"""What a cluster is made of: links, stragglers, changes of speed and faults.

Python names carry their units; in TOML the same keys go without (`rate_bit_per_s` is `rate =
"1gbit"`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from offbeat.errors import ConfigError, nearest
from offbeat_lab.cluster.quantities import display_duration, display_rate

Kind = Literal["random", "permanent"]
Action = Literal["kill", "return", "stop", "continue", "cut", "mend"]


SPEEDS = "numbers from 0.001 to 1, where 1 is the fastest worker"
_STRAGGLERS = "a count of 1 or more, or a list of workers' numbers"

Worker = Annotated[int, Field(strict=True, ge=0, description="the number of a worker, from 0")]
Duration = Annotated[
    float, Field(strict=True, ge=0, le=86_400, allow_inf_nan=False, description="0 to 1 day")
]
Length = Annotated[
    float,
    Field(
        strict=True, gt=0, le=86_400, allow_inf_nan=False, description="more than 0, up to 1 day"
    ),
]
Speed = Annotated[float, Field(strict=True, ge=1e-3, le=1, description=SPEEDS)]


class InvalidClusterError(ConfigError):
    """A value that no cluster can have: `path` leads to it from the outermost object, `reason` says
    the rest.
    """

    def __init__(self, path: tuple[str | int, ...], reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"{path_text(path)} {reason}")


def path_text(path: tuple[str | int, ...]) -> str:
    """`("faults", 2, "worker")` is `faults[2].worker`."""
    return "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in path
    ).removeprefix(".")


PAYLOAD_SHARE: Final = 0.95
"""What headers of TCP, IP and Ethernet leave of a link's rate: 1,448 of 1,514 to 1,538 bytes of a
frame. gloo's all-reduce was measured to fill 0.92 to 0.955 of emulated links.
"""


class DescribedModel(BaseModel):
    """Base of all parts: frozen, without unknown keys, and refusing in one sentence."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    if not TYPE_CHECKING:  # the signature that the fields give is the one to check calls against

        def __init__(self, **values: object) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise _first_error(type(self), error) from None


class LinkSpec(DescribedModel):
    """What connects one worker to its peers.

    Attributes:
        rate_bit_per_s: in each direction, 1 bit/s to 10 Tbit/s; None where it is not limited.
        latency_s: one way, 0 to 10 s.
        window_bytes: what TCP lets be under way at once between two workers; None: enough. A
            connection carries at most this in a round trip.
    """

    rate_bit_per_s: float | None = Field(
        default=None, strict=True, ge=1, le=1e13, description="1 bit/s to 10 Tbit/s"
    )
    latency_s: float = Field(default=0.0, strict=True, ge=0, le=10, description="0 to 10 s")

    window_bytes: int | None = Field(
        default=None, strict=True, ge=1024, le=1 << 40, description="1024 or more bytes"
    )

    @property
    def bytes_per_s(self) -> float:
        """The rate in bytes; infinite where it is not limited."""
        return math.inf if self.rate_bit_per_s is None else self.rate_bit_per_s / 8

    def connection_bytes_per_s(self, further_s: float = 0.0) -> float:
        """What one connection carries: the rate, or a window in each round trip if that is less.

        Args:
            further_s: one way, besides the latency of this link.
        """
        one_way_s = self.latency_s + further_s
        if self.window_bytes is None or not one_way_s:
            return self.bytes_per_s
        return min(self.bytes_per_s, self.window_bytes / (2 * one_way_s))

    @property
    def is_plain(self) -> bool:
        return self == LinkSpec()

    def describe(self) -> str:
        """One line for people: `1 Gbit/s, 200 us one way`."""
        rate = (
            "links not limited"
            if self.rate_bit_per_s is None
            else display_rate(self.rate_bit_per_s)
        )
        return f"{rate}, {display_duration(self.latency_s)} one way" if self.latency_s else rate


class RackSpec(DescribedModel):
    """Workers behind switches, or on sites, that share one connection to all other workers.

    Attributes:
        size: workers in a rack: the first `size` are in the first, the next in the second.
        rate_bit_per_s: of each rack's connection, in each direction, 1 bit/s to 100 Tbit/s.
        latency_s: one way, from rack to rack, besides that of the workers' links, 0 to 10 s.
    """

    size: int = Field(strict=True, ge=1, description="1 or more workers")
    rate_bit_per_s: float = Field(strict=True, ge=1, le=1e14, description="1 bit/s to 100 Tbit/s")
    latency_s: float = Field(default=0.0, strict=True, ge=0, le=10, description="0 to 10 s")

    def describe(self) -> str:
        """One line for people: `racks of 8 that share 10 Gbit/s, 20 ms one way between them`."""
        text = f"racks of {self.size} that share {display_rate(self.rate_bit_per_s)}"
        if self.latency_s:
            text += f", {display_duration(self.latency_s)} one way between them"
        return text


class Straggling(DescribedModel):
    """Workers that sleep before they exchange.

    Attributes:
        workers: how many, drawn as `kind` says; or which ones, as a tuple of their numbers.
        delay_s: how long each of them sleeps in a step, more than 0.
        kind: whether a count is drawn anew for each step, from (seed, step), or once, from the
            seed. Named workers are always the same.
        probability: that a step is hit at all, 0 < p <= 1; all its stragglers together, drawn from
            (seed, step).
        spread: 0: all delays are `delay_s`; more than 0: they are log-normal with `delay_s` as
            their median, and this is the standard deviation of their logarithm, up to 5.
    """

    workers: (
        Annotated[int, Field(strict=True, ge=1)]
        | Annotated[tuple[Worker, ...], Field(min_length=1)]
    ) = Field(description=_STRAGGLERS)
    delay_s: Length
    kind: Kind = Field(default="random", description="random or permanent")
    probability: float = Field(
        default=1.0, strict=True, gt=0, le=1, description="more than 0, up to 1"
    )
    spread: float = Field(default=0.0, strict=True, ge=0, le=5, description="0 to 5")

    @field_validator("workers")
    @classmethod
    def _in_order(cls, workers: int | tuple[int, ...]) -> int | tuple[int, ...]:
        return workers if isinstance(workers, int) else tuple(sorted(set(workers)))

    def describe(self) -> str:
        """One line for people: `2 random workers 320 ms late each step`."""
        if isinstance(self.workers, int):
            who = f"{self.workers} {self.kind} worker{'s' * (self.workers > 1)}"
        else:
            who = f"worker{'s' * (len(self.workers) > 1)} {', '.join(map(str, self.workers))}"
        how_often = (
            "each step"
            if self.probability == 1
            else f"in {100 * self.probability:.4g}% of the steps"
        )
        about = f" (spread {self.spread:g})" if self.spread else ""
        return f"{who} {display_duration(self.delay_s)}{about} late {how_often}"


class SpeedChange(DescribedModel):
    """From `at_s` seconds after the start, `worker` has `speed` (0.001 to 1, on the scale of
    `Cluster.speeds`).
    """

    at_s: Duration
    worker: Worker
    speed: Speed


class ClusterFault(DescribedModel):
    """Something that breaks, or recovers, `at_s` seconds after the start.

    Attributes:
        at_s: seconds since training began.
        worker: its number.
        action: `kill` ends the process, `return` starts it anew; `stop` freezes it until
            `continue`; `cut` lets nothing through its link until `mend`.
    """

    at_s: Duration
    worker: Worker
    action: Action = Field(description="kill, return, stop, continue, cut or mend")


def _first_error(model: type[BaseModel], error: ValidationError) -> InvalidClusterError:
    """Pydantic's first complaint as one sentence with what was got and what is allowed."""
    first = error.errors()[0]
    path = tuple(part for part in first["loc"] if isinstance(part, int) or part.isidentifier())
    inner = first.get("ctx", {}).get("error")
    if isinstance(inner, InvalidClusterError):
        return InvalidClusterError((*path, *inner.path), inner.reason)
    if first["type"] == "extra_forbidden":
        # A file may have any key here, such as an empty one.
        key, allowed = str(first["loc"][0]), ", ".join(model.model_fields)
        return InvalidClusterError(
            (key if key.isidentifier() else repr(key),),
            f"is no field; allowed are {allowed}{nearest(key, model.model_fields)}",
        )
    got = "is missing" if first["type"] == "missing" else f"is {first['input']!r}"
    return InvalidClusterError(
        path, f"{got}; allowed is {model.model_fields[str(path[0])].description}"
    )
