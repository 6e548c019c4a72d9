"""What stands in the files of a record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final

from pydantic import BaseModel, ConfigDict

from offbeat.checkpoint import Json
from offbeat.lab.config import RunConfig
from offbeat.lab.emulation import EmulationReport
from offbeat.transport.wrappers import Arrival

SCHEMA: Final = 2
"""Version of the layout. A reader refuses a newer one."""

RUN_KIND: Final = "offbeat run"
EVENTS_KIND: Final = "offbeat events"
CONFIG: Final = "config.json"
SUMMARY: Final = "summary.json"
EVALUATIONS: Final = "evaluations.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEvent:
    """One optimizer step of one rank. Durations in seconds, times on the host's monotonic clock.

    Attributes:
        step: counted from 1.
        loss: of this rank's batch; None when it is not finite.
        batch_size: samples in it.
        began_s: when the step began.
        ready_s: when this rank first stood still for others; None if it never did.
        duration_s: of the whole step: `compute_s`, `encode_s` and `wait_s` together.
        compute_s: all of the step but `encode_s` and `wait_s`.
        encode_s: selection, compression and decoding.
        wait_s: blocked on other ranks.
        padded_s: the part of `compute_s` that was slept, for emulated compute and straggling.
        bytes_sent: handed to the network.
        messages_sent: likewise.
        skipped: whether some rank's gradient was not finite, so that nobody applied the step.
        arrivals: when this rank came to each collective.
    """

    step: int
    loss: float | None
    batch_size: int
    began_s: float
    ready_s: float | None
    duration_s: float
    compute_s: float
    encode_s: float
    wait_s: float
    padded_s: float
    bytes_sent: int
    messages_sent: int
    skipped: bool
    arrivals: Sequence[Arrival] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The metric, measured by the rank that leads: 0, and once that is gone the next one. It pauses meanwhile.

    Attributes:
        step: steps done.
        seconds: training time so far, without measuring and checkpoints, over all attempts.
        bytes_sent: by that rank so far, over all attempts.
        metric: its value.
        at_s: when, on the host's monotonic clock.
        rank: which one leads.
    """

    step: int
    seconds: float
    bytes_sent: int
    metric: float
    at_s: float
    rank: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The first line of one rank's events of one attempt.

    Attributes:
        attempt: counted from 0.
        host, pid: where the rank ran.
        monotonic_to_unix_s: what to add to a time to compare hosts.
        start_step: the step from which a worker that came back goes on; None for one that was there from the beginning.
    """

    attempt: int
    host: str
    pid: int
    monotonic_to_unix_s: float
    start_step: int | None = None


EVENT_FIELDS: Final = tuple(field.name for field in fields(StepEvent))
HEAD_FIELDS: Final = tuple(field.name for field in fields(Head))


class Loss(BaseModel):
    """A worker that died while the others went on.

    Attributes:
        rank: which one.
        step: the last step that it has recorded.
        seconds: training time when it was missed.
        cause: how it ended.
        num_left, num_workers: how many went on, of how many.
        returned_step, returned_s: after which step, and at what training time, it was back; None if it never was.
    """

    model_config = ConfigDict(frozen=True)

    rank: int
    step: int
    seconds: float
    cause: str
    num_left: int
    num_workers: int
    returned_step: int | None = None
    returned_s: float | None = None

    def sentence(self) -> str:
        """For people."""
        what = f"worker {self.rank} died after step {self.step} ({self.cause}); {self.num_left} of {self.num_workers} went on"
        return what if self.returned_step is None else f"{what}; it was back after step {self.returned_step}"


class Summary(BaseModel):
    """How a run ended. The fields are described in docs/records.md."""

    model_config = ConfigDict(frozen=True)

    status: str
    task: str
    strategy: str
    workers: int
    world_size: int
    steps: int
    metric: float | None
    metric_name: str
    higher_is_better: bool
    loss: float | None
    seconds: float
    steps_per_s: float
    samples_per_s: float
    bytes_sent_per_step: float
    messages_sent_per_step: float
    peak_memory_bytes: list[int]
    skipped_steps: int
    num_parameters: int
    parameters_sha256: str
    replicas_identical: bool
    resumed_from_step: int | None
    notices: list[str]
    losses: list[Loss] = []
    run_directory: str


class Attempt(BaseModel):
    """One start of the run: the first, or a resume."""

    model_config = ConfigDict(frozen=True)

    started_at: str
    workers: int
    start_step: int
    emulation: EmulationReport | None = None


class RunHead(BaseModel):
    """The contents of config.json."""

    model_config = ConfigDict(frozen=True)

    kind: str
    schema_version: int
    config: RunConfig
    attempts: list[Attempt]
    environment: dict[str, Json]
