"""Records made up to order, written as the lab writes them: workers that compute, come late, wait
and send.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from offbeat.run.config import RunConfig
from offbeat.run.records import (
    Evaluation,
    EventWriter,
    StepEvent,
    Summary,
    begin_attempt,
    create,
    write_summary,
)
from offbeat_lab.analysis import analyse
from offbeat_lab.cluster import Cluster, LinkSpec
from offbeat_lab.comparison import ComparedStrategy, Comparison, write_comparison
from offbeat_lab.records import EmulationReport, LinkCheck, MegaBatch, Share, add_mega_batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """A made-up run.

    Attributes:
        compute_s, encode_s, transfer_s: of a step.
        late_s: by rank, how much longer a slow worker computes.
        random_late_s: how long one worker, another in each step, sleeps.
        bytes_per_step, messages_per_step: of a worker.
        progress: how fast the metric rises; about 1.
        best: where set, the metric comes to this, and without noise.
        exchanges: whether workers wait for each other at all.
        mega_batches: how many, of steps as many as there are; worker r has speed 1 / (1 + r).
    """

    strategy: str = "gtopk"
    label: str = ""
    options: Mapping[str, object] = field(default_factory=lambda: {"density": 0.001})
    workers: int = 4
    steps: int = 60
    seed: int = 0
    compute_s: float = 0.2
    encode_s: float = 0.02
    transfer_s: float = 0.03
    late_s: Mapping[int, float] = field(default_factory=dict)
    random_late_s: float = 0.0
    bytes_per_step: int = 300_000
    messages_per_step: int = 6
    progress: float = 1.0
    best: float | None = None
    exchanges: bool = True
    mega_batches: int = 0
    notices: Sequence[str] = ()
    evaluations: int = 12

    @property
    def name(self) -> str:
        return self.label or self.strategy


CLUSTER = Cluster(
    name="example",
    workers=4,
    link=LinkSpec(rate_bit_per_s=1e9, latency_s=1e-4),
    speeds=(1.0, 1.0, 1.0, 0.5),
)

EMULATION = EmulationReport(
    kind="namespaces",
    network="Each worker in a network namespace of its own, tbf at 1 Gbit/s both ways.",
    compute="Quotas of processor time: worker 3 at half speed.",
    checks=[
        LinkCheck(
            worker=rank,
            peer=(rank + 1) % 4,
            asked_bit_per_s=1e9,
            sent_bit_per_s=9.6e8,
            received_bit_per_s=9.4e8 + 2e6 * rank,
            share=0.94,
            round_trip_s=2.1e-4,
        )
        for rank in range(4)
    ],
    notices=["This kernel has no netem, so torch's own collectives do not feel the latency."],
)


def config_of(made: Made, cluster: Cluster | None = None) -> RunConfig:
    return RunConfig(
        task="digits",
        task_options={"batch_size": 32},
        strategy=made.strategy,
        strategy_options=dict(made.options),  # type: ignore[arg-type]  # values of JSON
        workers=made.workers,
        epochs=None,
        steps=made.steps,
        seed=made.seed,
        checkpoint_every=100,
        cluster=None if cluster is None else cluster.model_dump(mode="json"),
    )


def write_run(
    path: Path, made: Made, *, cluster: Cluster | None = None, finished: bool = True
) -> Path:
    """A run record at `path`, as `offbeat train` leaves it."""
    config = config_of(made, cluster)
    create(path, config)
    attempt = begin_attempt(path, config, start_step=0, emulation=EMULATION if cluster else None)
    began_s, seconds, rng = 1000.0, 0.0, np.random.default_rng(made.seed)
    writers = [EventWriter(path, rank=rank, attempt=attempt) for rank in range(made.workers)]
    every = max(1, made.steps // made.evaluations)
    _evaluate(writers[0], made, 0, 0.0, rng)
    for step in range(1, made.steps + 1):
        events = _step(made, step, began_s, rng)
        for writer, event in zip(writers, events, strict=True):
            writer.add(event)
        duration_s = max(event.duration_s for event in events)
        began_s, seconds = began_s + duration_s, seconds + duration_s
        if step % every == 0 or step == made.steps:
            _evaluate(writers[0], made, step, seconds, rng)
    for number in range(1, made.mega_batches + 1):
        add_mega_batch(
            path,
            mega_batch_of(
                number, step=made.steps * number // made.mega_batches, workers=made.workers
            ),
        )
    for writer in writers:
        writer.close()
    if finished:
        write_summary(_summary(path, made, seconds))
    return path


def mega_batch_of(number: int, *, step: int, workers: int, merge_s: float = 0.05) -> MegaBatch:
    """A mega-batch of a second of computing; worker r has batches of 120 / (1 + r) samples, and is
    idle for r / 100 s.
    """
    shares = [
        Share(
            rank=rank,
            batch_size=120 // (1 + rank),
            updates=10,
            samples=10 * (120 // (1 + rank)),
            weight=1 / workers,
            computing_s=1 - rank / 100,
            idle_s=rank / 100,
            claims=[],
        )
        for rank in range(workers)
    ]
    return MegaBatch(
        number=number,
        epoch=0,
        step=step,
        seconds=number * (1 + merge_s),
        at_s=1000 + number * (1 + merge_s),
        duration_s=1 + merge_s,
        merge_s=merge_s,
        by_rank=shares,
    )


def write_comparison_of(
    directory: Path, strategies: Sequence[Made], seeds: Sequence[int] = (0, 1, 2)
) -> Path:
    """A finished comparison of `strategies` in `directory`, judged as the lab judges."""
    entries = []
    for made in strategies:
        runs = [f"runs/{made.name}-seed-{seed}" for seed in seeds]
        for seed, name in zip(seeds, runs, strict=True):
            again = Made(**{key: getattr(made, key) for key in made.__slots__} | {"seed": seed})
            write_run(directory / name, again, cluster=CLUSTER)
        entries.append(
            ComparedStrategy(
                label=made.name,
                strategy=made.strategy,
                options=dict(made.options),  # type: ignore[arg-type]  # values of JSON
                summary=f"Exchanges as {made.strategy} does.",
                runs=runs,
            )
        )
    comparison = comparison_of(strategies[0], entries, seeds)
    judged = analyse(directory, comparison, {})
    write_comparison(directory, judged)
    return directory


def comparison_of(made: Made, entries: list[ComparedStrategy], seeds: Sequence[int]) -> Comparison:
    return Comparison(
        status="finished",
        command=(
            "offbeat compare --task digits --strategies ddp,gtopk --cluster ethernet-1g --seeds 3"
            " --out DIR"
        ),
        created_at="2026-11-21T15:00:00+00:00",
        task="digits",
        task_options={"batch_size": 32},
        metric_name="accuracy",
        higher_is_better=True,
        target=0.9,
        target_was_given=True,
        seeds=list(seeds),
        steps=made.steps,
        workers=made.workers,
        num_parameters=25_000_000,
        cluster=CLUSTER,
        emulation=EMULATION,
        environment={
            "python": "3.11.2",
            "torch": "2.13.0",
            "cpu": "Example CPU",
            "num_cpus": 2,
            "memory_bytes": 8_000_000_000,
        },
        strategies=entries,
    )


def _step(made: Made, step: int, began_s: float, rng: np.random.Generator) -> list[StepEvent]:
    jitter = 1 + 0.05 * rng.standard_normal(made.workers).clip(-2, 2)
    slept = np.array([made.late_s.get(rank, 0.0) for rank in range(made.workers)])
    slept[rng.integers(made.workers)] += made.random_late_s
    compute = made.compute_s * jitter + slept
    own = compute + made.encode_s
    end = own.max() + made.transfer_s * (1 + 0.1 * rng.random()) if made.exchanges else own
    loss = 2.3 * math.exp(-3 * made.progress * step / made.steps) + 0.05
    ends = np.broadcast_to(end, (made.workers,))
    return [
        StepEvent(
            step=step,
            loss=loss * float(1 + 0.1 * rng.standard_normal()),
            batch_size=32,
            began_s=began_s,
            ready_s=began_s + float(own[rank]) if made.exchanges else None,
            duration_s=float(ends[rank]),
            compute_s=float(compute[rank]),
            encode_s=made.encode_s,
            wait_s=float(ends[rank] - own[rank]),
            padded_s=float(slept[rank]),
            bytes_sent=made.bytes_per_step if made.exchanges else 0,
            messages_sent=made.messages_per_step,
            skipped=False,
        )
        for rank in range(made.workers)
    ]


def _evaluate(
    writer: EventWriter, made: Made, step: int, seconds: float, rng: np.random.Generator
) -> None:
    risen = 1 - math.exp(-4 * made.progress * step / made.steps)
    if made.best is None:
        metric = 0.1 + 0.87 * risen + 0.01 * float(rng.standard_normal())
    else:
        metric = 0.1 + (made.best - 0.1) * risen / (1 - math.exp(-4 * made.progress))
    writer.add_evaluation(
        Evaluation(
            step=step,
            seconds=seconds,
            bytes_sent=step * made.bytes_per_step,
            metric=metric,
            at_s=1000.0 + seconds,
        )
    )


def _summary(path: Path, made: Made, seconds: float) -> Summary:
    return Summary(
        status="finished",
        task="digits",
        strategy=made.strategy,
        workers=made.workers,
        world_size=made.workers,
        steps=made.steps,
        metric=0.1 + 0.87 * (1 - math.exp(-4 * made.progress)),
        metric_name="accuracy",
        higher_is_better=True,
        loss=0.1,
        seconds=seconds,
        steps_per_s=made.steps / seconds,
        samples_per_s=32 * made.workers * made.steps / seconds,
        bytes_sent_per_step=float(made.bytes_per_step),
        messages_sent_per_step=float(made.messages_per_step),
        peak_memory_bytes=[412_000_000 + 1_000_000 * rank for rank in range(made.workers)],
        skipped_steps=0,
        num_parameters=25_000_000,
        parameters_sha256="0",
        replicas_identical=True,
        resumed_from_step=None,
        notices=list(made.notices),
        run_directory=str(path),
    )
