"""What stands in the files of a record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final, Literal, TypeAlias

from offbeat.codec.json_objects import Count
from offbeat.run.config import RunConfig
from offbeat.transport.driver import Arrival

SCHEMA: Final = 2
"""Version of the layout. A reader refuses a newer one."""

RUN_KIND: Final = "offbeat run"
EVENTS_KIND: Final = "offbeat events"
CONFIG: Final = "config.json"
SUMMARY: Final = "summary.json"
EVALUATIONS: Final = "evaluations.jsonl"
MEGA_BATCHES: Final = "mega-batches.jsonl"


def events_path(run: Path, rank: int) -> Path:
    """The file with the steps of `rank`."""
    return run / f"events-rank-{rank}.jsonl"


def profile_path(run: Path, rank: int) -> Path:
    """The file with the few steps of `rank` that were looked at closely, of second-order
    strategies.
    """
    return run / f"profile-rank-{rank}.jsonl"


Speeds: TypeAlias = Literal["equal", "quotas", "padded", "sleeping", "ignored"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEvent:
    """One optimizer step of one rank. Durations in seconds, times on the host's monotonic clock.

    Attributes:
        step: counted from 1.
        loss: of this rank's batch; None when it is not finite.
        batch_size: samples in it.
        began_s: when the step began.
        ready_s: when this rank first waited for peers; None if it never did.
        duration_s: of the whole step: `compute_s`, `encode_s` and `wait_s` together.
        compute_s: all of the step but `encode_s` and `wait_s`.
        encode_s: selection, compression and decoding.
        wait_s: blocked on other ranks.
        padded_s: the part of `compute_s` that was slept, for emulated compute and straggling.
        bytes_sent: handed to the network.
        messages_sent: likewise.
        skipped: whether some rank's gradient was not finite, so that no rank applied the step.
        arrivals: when this rank came to each collective.
    """

    step: Count
    loss: float | None
    batch_size: Count
    began_s: float
    ready_s: float | None
    duration_s: float
    compute_s: float
    encode_s: float
    wait_s: float
    padded_s: float
    bytes_sent: Count
    messages_sent: Count
    skipped: bool
    arrivals: Sequence[Arrival] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The metric, measured by the rank that leads: 0, and once that is dead the next one. It pauses
    meanwhile.

    Attributes:
        step: steps done.
        seconds: training time so far, without measuring and checkpoints, over all attempts.
        bytes_sent: by that rank so far, over all attempts.
        metric: its value.
        at_s: when, on the host's monotonic clock.
        rank: which one leads.
        others: what else the task tells of the model, by name.
        without: the living ranks whose models the measured mean lacks; empty where it is whole.
    """

    step: Count
    seconds: float
    bytes_sent: Count
    metric: float
    at_s: float
    rank: Count = 0
    others: Mapping[str, float] = field(default_factory=dict)
    without: Sequence[Count] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one rank did in a mega-batch.

    Attributes:
        rank: which one.
        batch_size: samples that it claimed at a time.
        updates: optimizer steps that it took.
        samples: that it computed with.
        weight: of its model in the merge; they sum to 1.
        computing_s: from each claim to the next, claiming and emulated compute included.
        idle_s: from when it found nothing left until the last rank did.
        claims: in order, each a list of (begin, end) in the epoch's order of samples.
    """

    rank: Count
    batch_size: Count
    updates: Count
    samples: Count
    weight: float
    computing_s: float
    idle_s: float
    claims: Sequence[Sequence[tuple[Count, Count]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class MegaBatch:
    """Samples that all ranks shared, and the merge after them, as the rank that leads saw it.

    Attributes:
        number: of the run, counted from 1.
        epoch: of its samples, counted from 0.
        step: steps done with it.
        seconds: training time so far, as in `Evaluation`.
        at_s: when the merge was over, or training went on beside it, on the host's monotonic clock.
        duration_s: from the merge before to the end of this one.
        merge_s: the last part of it, from when all ranks had come; of a merge beside training, what
            training stood still for it.
        by_rank: of those that took part.
    """

    number: Count
    epoch: Count
    step: Count
    seconds: float
    at_s: float
    duration_s: float
    merge_s: float
    by_rank: Sequence[Share]


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The first line of one rank's events of one attempt.

    Attributes:
        attempt: counted from 0.
        host, pid: where the rank ran.
        monotonic_to_unix_s: what to add to a time to compare hosts.
        start_step: the step from which a worker that came back goes on; None for one that was there
            from the beginning.
    """

    attempt: Count
    host: str
    pid: int
    monotonic_to_unix_s: float
    start_step: Count | None = None


EVENT_FIELDS: Final = tuple(field.name for field in fields(StepEvent))
HEAD_FIELDS: Final = tuple(field.name for field in fields(Head))


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLoss:
    """A worker that died while its peers went on.

    Attributes:
        rank: which one.
        step: the last step that it has recorded; it may have done another one or two.
        seconds: training time when it was missed.
        cause: how it ended.
        num_left, num_workers: how many went on, of how many.
        returned_step, returned_s: after which step, and at what training time, it was back; None if
            it never was.
    """

    rank: Count
    step: Count
    seconds: float
    cause: str
    num_left: Count
    num_workers: Count
    returned_step: Count | None = None
    returned_s: float | None = None

    def sentence(self) -> str:
        """For people."""
        what = (
            f"worker {self.rank} died after step {self.step} was recorded ({self.cause});"
            f" {self.num_left} of {self.num_workers} went on"
        )
        return (
            what
            if self.returned_step is None
            else f"{what}; it was back after step {self.returned_step}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """How a run ended. The fields are described in docs/records.md."""

    status: str
    task: str
    strategy: str
    workers: Count
    world_size: Count
    steps: Count
    metric: float | None
    metric_name: str
    higher_is_better: bool
    other_metrics: Mapping[str, float] = field(default_factory=dict)
    loss: float | None
    seconds: float
    steps_per_s: float
    samples_per_s: float
    bytes_sent_per_step: float
    messages_sent_per_step: float
    peak_memory_bytes: Sequence[Count]
    skipped_steps: Count
    mean_entry_age: float | None = None
    num_parameters: Count
    parameters_sha256: str
    replicas_identical: bool
    resumed_from_step: Count | None
    notices: Sequence[str]
    losses: Sequence[WorkerLoss] = field(default_factory=list)
    run_directory: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkCheck:
    """What a worker's link carried before it was handed out.

    Attributes:
        worker: whose link.
        peer: the worker it sent to; None where there is no other.
        asked_bit_per_s: rate asked for, each way; None where it is not limited.
        sent_bit_per_s, received_bit_per_s: payload, measured both ways at once.
        share: the worse direction over what the links at both its ends allow; None where neither is
            limited.
        round_trip_s: the shortest of a few, to `peer` and back, of a byte while nothing else was
            sent.
        together: whether all workers were sending meanwhile; False where the link keeps its rate
            only by itself.
    """

    worker: Count
    peer: Count | None
    asked_bit_per_s: float | None
    sent_bit_per_s: float
    received_bit_per_s: float
    share: float | None
    round_trip_s: float
    together: bool = True

    @property
    def measured_bit_per_s(self) -> float:
        """The worse of the two directions."""
        return min(self.sent_bit_per_s, self.received_bit_per_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulationReport:
    """What was emulated, and how. It belongs into the record and on the page.

    Attributes:
        kind: by what means the network is emulated.
        network, compute: a sentence each.
        speeds: what makes workers of different speeds: the kernel's quotas, steps padded to a fixed
            time, or workers that sleep after they computed; "equal" where there is no difference,
            "ignored" where no emulation was asked for.
        checks: of each worker's link, by worker; empty where the kernel emulates none.
        notices: what was asked for and could not be emulated, why, and what stands in for it.
    """

    kind: Literal["none", "namespaces", "delaying"]
    network: str
    compute: str
    speeds: Speeds = "equal"
    checks: Sequence[LinkCheck] = field(default_factory=list)
    notices: Sequence[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One start of the run: the first, or a resume."""

    started_at: str
    workers: Count
    start_step: Count
    emulation: EmulationReport | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHead:
    """The contents of config.json."""

    kind: str
    schema_version: int
    config: RunConfig
    attempts: Sequence[Attempt]
    environment: Mapping[str, object]
