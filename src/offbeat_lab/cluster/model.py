"""A cluster as a whole: how many workers, how fast each is, what connects them, who is late, what
breaks when.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Annotated, Self, TypeVar

import numpy as np
from pydantic import Field, field_validator, model_validator

from offbeat.run.config import MAX_WORKERS
from offbeat.simulation.virtual import VirtualLink, VirtualRacks
from offbeat_lab.cluster.parts import (
    SPEEDS,
    Action,
    ClusterFault,
    DescribedModel,
    InvalidClusterError,
    Length,
    LinkSpec,
    RackSpec,
    Speed,
    SpeedChange,
    Straggling,
)
from offbeat_lab.cluster.quantities import display_duration
from offbeat_lab.cluster.toml_writer import to_toml

Event = TypeVar("Event", SpeedChange, ClusterFault)
_UNDOES: Mapping[Action, Action] = {"return": "kill", "continue": "stop", "mend": "cut"}


class Cluster(DescribedModel):
    """A cluster, to be emulated by real processes or simulated under a virtual clock.

    Attributes:
        name: for people.
        workers: how many.
        speeds: each worker's speed, 0.001 to 1, where 1 is the fastest; fewer than workers are
            repeated in turn.
        link: what connects each worker to its peers.
        links: workers with a link of their own; it stands in place of `link` as a whole.
        racks: which workers share a connection to all others; None: none do. Simulated only.
        straggling: who is late. Delays of several entries add up.
        changes: speeds that change while training runs, sorted by time.
        faults: what breaks, sorted by time.
        step_s: how long forward and backward take a worker of speed 1, as an accelerator would
            need; None where the machine takes the time it takes.
        deaths_per_hour: of a worker, 0 to 60. Used by predictions only.
        cores: that all workers share, since they run on one machine, 1 or more; None: each has
            enough of its own. Used by predictions only.
        gloo_ns_per_byte: what the processors add to each byte that gloo sends, in nanoseconds;
            None: not measured. Used by predictions only.
        seed: of every random draw.

    Raises:
        ConfigError: a value that is not allowed, or several that contradict each other.
    """

    name: str = Field(
        default="custom", min_length=1, max_length=80, description="up to 80 printable characters"
    )
    workers: int = Field(
        default=4, strict=True, ge=1, le=MAX_WORKERS, description=f"1 to {MAX_WORKERS}"
    )
    speeds: tuple[Speed, ...] = Field(default=(1.0,), min_length=1, description=SPEEDS)
    link: LinkSpec = Field(
        default=LinkSpec(),
        description='a rate, "1gbit", a rate and a latency, "1gbit/0.2ms", or a table',
    )
    links: dict[Annotated[int, Field(ge=0)], LinkSpec] = Field(
        default={}, description="a table from numbers of workers to links"
    )
    racks: RackSpec | None = Field(
        default=None,
        description='a table such as {size = 8, rate = "10gbit"}, with latency if there is any',
    )
    straggling: tuple[Straggling, ...] = Field(
        default=(), description='text such as "2x320ms", tables, or a list of these'
    )
    changes: tuple[SpeedChange, ...] = Field(
        default=(), description="a list of tables with at, worker and speed"
    )
    faults: tuple[ClusterFault, ...] = Field(
        default=(), description="a list of tables with at, worker and action"
    )
    step_s: Length | None = Field(default=None, description="more than 0, up to 1 day")
    deaths_per_hour: float = Field(
        default=0.0, strict=True, ge=0, le=60, allow_inf_nan=False, description="0 to 60"
    )
    cores: int | None = Field(
        default=None, strict=True, ge=1, le=MAX_WORKERS, description=f"1 to {MAX_WORKERS}"
    )
    gloo_ns_per_byte: float | None = Field(
        default=None, strict=True, ge=0, le=1000, allow_inf_nan=False, description="0 to 1000"
    )
    seed: int = Field(default=0, strict=True, ge=0, le=2**32 - 1, description=f"0 to {2**32 - 1}")

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: object) -> object:
        """Give every worker its speed."""
        if not isinstance(values, Mapping):
            return values
        workers, speeds = values.get("workers", 4), values.get("speeds", (1.0,))
        if (
            isinstance(workers, int)
            and 0 < workers <= MAX_WORKERS
            and isinstance(speeds, list | tuple)
            and speeds
        ):
            return {
                **values,
                "speeds": (
                    *speeds,
                    *(speeds[rank % len(speeds)] for rank in range(len(speeds), workers)),
                ),
            }
        return values

    @field_validator("name")
    @classmethod
    def _printable(cls, name: str) -> str:
        if not name.isprintable():
            raise InvalidClusterError(
                (), f"is {name!r}; allowed is {cls.model_fields['name'].description}"
            )
        return name

    @field_validator("changes", "faults")
    @classmethod
    def _in_order(cls, events: tuple[Event, ...]) -> tuple[Event, ...]:
        return tuple(sorted(events, key=lambda event: event.at_s))

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(self.speeds) > self.workers:
            raise InvalidClusterError(
                ("speeds",),
                f"has {len(self.speeds)} numbers for {self.workers} workers; leave some out, or"
                " have more workers",
            )
        for path, worker in self._mentions():
            if worker >= self.workers:
                raise InvalidClusterError(
                    path,
                    f"names worker {worker}; allowed is 0 to {self.workers - 1}, since there are"
                    f" {self.workers} workers",
                )
        for number, late in enumerate(self.straggling):
            if isinstance(late.workers, int) and late.workers > self.workers:
                raise InvalidClusterError(
                    ("straggling", number, "workers"),
                    f"is {late.workers}; allowed is 1 to {self.workers}, the number of workers",
                )
        self._check_faults()
        return self

    def _mentions(self) -> Iterator[tuple[tuple[str | int, ...], int]]:
        """Every place that names a worker."""
        yield from ((("links", str(worker)), worker) for worker in self.links)
        yield from ((("changes",), change.worker) for change in self.changes)
        yield from ((("faults",), fault.worker) for fault in self.faults)
        for i, late in enumerate(self.straggling):
            if not isinstance(late.workers, int):
                yield from ((("straggling", i, "workers"), worker) for worker in late.workers)

    def _check_faults(self) -> None:
        """Refuse a fault that nothing can do to the state the worker is in."""
        states: defaultdict[int, set[Action]] = defaultdict(set)
        for fault in self.faults:
            state = states[fault.worker]
            when = f"worker {fault.worker} at {display_duration(fault.at_s)}"
            needed = _UNDOES.get(fault.action)
            if "kill" in state and needed != "kill":
                raise InvalidClusterError(
                    ("faults",),
                    f"has {fault.action!r} of {when}, which was killed before; add a 'return'"
                    " between them",
                )
            if needed is not None and needed not in state:
                raise InvalidClusterError(
                    ("faults",),
                    f"has {fault.action!r} of {when}, but no {needed!r} comes before it; add one",
                )
            if fault.action in state:
                raise InvalidClusterError(
                    ("faults",),
                    f"has {fault.action!r} of {when}, to which that has been done already; leave"
                    " it out",
                )
            state.discard(needed) if needed is not None else state.add(fault.action)
            if fault.action == "kill":
                state.discard("stop")  # what comes back is another process

    def delayed_ranks(self, step: int) -> dict[int, float]:
        """Seconds that each straggler of step `step` (from 0 or 1, never negative) sleeps, by rank;
        the others are left out.

        It follows from the seed and the step alone, so that all ranks agree without asking.
        """
        delays_s: dict[int, float] = {}
        for number, late in enumerate(self.straggling):
            # The 1 keeps it apart from (seed, number), zero-padded.
            draws = np.random.default_rng((self.seed, number, 1, step))
            if draws.random() >= late.probability:
                continue
            if isinstance(late.workers, int):
                chooser = (
                    draws if late.kind == "random" else np.random.default_rng((self.seed, number))
                )
                ranks = chooser.choice(self.workers, size=late.workers, replace=False).tolist()
            else:
                ranks = list(late.workers)
            for rank in sorted(ranks):
                scale = draws.lognormal(0.0, late.spread) if late.spread else 1.0
                delays_s[rank] = delays_s.get(rank, 0.0) + scale * late.delay_s
        return delays_s

    def delay_s(self, rank: int, step: int) -> float:
        """Seconds that rank `rank` sleeps in step `step`; the same on every rank, and in whatever
        order.
        """
        return self.delayed_ranks(step).get(rank, 0.0) if self.straggling else 0.0

    @property
    def mean_delay_s(self) -> float:
        """Seconds that a worker sleeps in a step, mean over workers and all steps."""
        all_s = 0.0
        for late in self.straggling:
            workers = late.workers if isinstance(late.workers, int) else len(late.workers)
            # The mean of log-normal delays is more than their median.
            all_s += workers * late.probability * late.delay_s * math.exp(late.spread**2 / 2)
        return all_s / self.workers

    def speed_at(self, worker: int, elapsed_s: float) -> float:
        """The speed of `worker` when `elapsed_s` seconds have passed; of changes at one time the
        last in the list counts.
        """
        past = [
            change.speed
            for change in self.changes
            if change.worker == worker and change.at_s <= elapsed_s
        ]
        return past[-1] if past else self.speeds[worker]

    def link_of(self, worker: int) -> LinkSpec:
        return self.links.get(worker, self.link)

    @property
    def limited_rates(self) -> list[float]:
        """In bit/s, of the workers' links that have a limit."""
        rates = [self.link_of(worker).rate_bit_per_s for worker in range(self.workers)]
        return [rate for rate in rates if rate is not None]

    @property
    def between_workers_bit_per_s(self) -> float:
        """The rate that exchanges of all workers have: of the links, which must have one, or of the
        connections of racks where these are slower and workers are in several.
        """
        rate = self.link.rate_bit_per_s or max(self.limited_rates)
        if self.racks is None or self.workers <= self.racks.size:
            return rate
        return min(rate, self.racks.rate_bit_per_s)

    @property
    def most_latency_s(self) -> float:
        """One way, of the longest way between two workers."""
        link_s = max(self.link_of(worker).latency_s for worker in range(self.workers))
        return link_s + self.between_racks_s

    @property
    def between_racks_s(self) -> float:
        """One way, from rack to rack, besides that of links; 0 where all are in one."""
        is_apart = self.racks is not None and self.workers > self.racks.size
        return self.racks.latency_s if self.racks is not None and is_apart else 0.0

    def changed(self, **values: object) -> Cluster:
        """The same cluster with other values; the pattern of speeds is repeated.

        Raises:
            ConfigError: values that no cluster has.
        """
        return Cluster(**{**dict(self), "speeds": self.speed_pattern, **values})

    def left_with(self, workers: int) -> Cluster:
        """The same cluster for a run that goes on with so many workers: what names workers left out
        is left out, and the pattern of speeds is repeated.

        Raises:
            ConfigError: a pattern of speeds that does not fit into so few, since it is unknown
                whose speed is to go.
        """
        if workers >= self.workers:
            return self.changed(workers=workers)
        late = [
            entry.model_copy(update={"workers": who})
            for entry in self.straggling
            if (
                who := (
                    min(entry.workers, workers)
                    if isinstance(entry.workers, int)
                    else tuple(worker for worker in entry.workers if worker < workers)
                )
            )
        ]
        return self.changed(
            workers=workers,
            links={worker: link for worker, link in self.links.items() if worker < workers},
            straggling=tuple(late),
            changes=tuple(change for change in self.changes if change.worker < workers),
            faults=tuple(fault for fault in self.faults if fault.worker < workers),
        )

    def virtual_links(self) -> list[VirtualLink]:
        """Each worker's link for the virtual driver, which carries what its connections to other
        racks do.
        """
        further_s = self.between_racks_s
        return [
            VirtualLink(
                latency_s=link.latency_s, bytes_per_s=link.connection_bytes_per_s(further_s)
            )
            for link in map(self.link_of, range(self.workers))
        ]

    def virtual_racks(self) -> VirtualRacks | None:
        """The racks for the virtual driver."""
        if self.racks is None:
            return None
        size, rate = self.racks.size, self.racks.rate_bit_per_s / 8
        rack_of = tuple(worker // size for worker in range(self.workers))
        return VirtualRacks(rack_of=rack_of, bytes_per_s=rate, latency_s=self.racks.latency_s)

    def to_toml(self) -> str:
        """This cluster as a file that reads back as the same one."""
        return to_toml(self.model_copy(update={"speeds": self.speed_pattern}))

    def describe(self) -> str:
        """One line for people: `8 workers, 1 Gbit/s, speeds 1 1 1 0.5, 2 random workers 320 ms late
        each step`.
        """
        parts = [f"{self.workers} worker{'s' * (self.workers > 1)}"]
        if not self.link.is_plain or self.links:
            parts.append(self.link.describe())
        parts += [
            f"worker {worker}: {link.describe()}" for worker, link in sorted(self.links.items())
        ]
        if self.racks is not None:
            parts.append(self.racks.describe())
        if self.deaths_per_hour:
            parts.append(f"{self.deaths_per_hour:g} deaths of a worker an hour")
        if self.cores is not None:
            parts.append(f"{self.cores} core{'s' * (self.cores > 1)} for all workers")
        if set(self.speeds) != {1.0}:
            parts.append("speeds " + " ".join(f"{speed:g}" for speed in self.speed_pattern))
        if self.step_s is not None:
            parts.append(f"steps padded to {display_duration(self.step_s)}")
        parts += [late.describe() for late in self.straggling]
        parts += [
            f"worker {c.worker} at speed {c.speed:g} from {display_duration(c.at_s)}"
            for c in self.changes
        ]
        parts += [
            f"{fault.action} worker {fault.worker} at {display_duration(fault.at_s)}"
            for fault in self.faults
        ]
        return ", ".join(parts)

    @property
    def speed_pattern(self) -> tuple[float, ...]:
        """The shortest beginning of `speeds` that repeats to all of them."""
        speeds = self.speeds
        return next(
            speeds[:p]
            for p in range(1, len(speeds) + 1)
            if all(s == speeds[i % p] for i, s in enumerate(speeds))
        )
