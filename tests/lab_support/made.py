"""Runs and comparisons made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

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
from offbeat_lab.cluster import Cluster
from offbeat_lab.comparison import ComparedStrategy, Comparison, Difference, Measure
from offbeat_lab.records import EmulationReport
from offbeat_lab.statistics import Estimate, estimate

_ALWAYS: Sequence[Measure] = ("time_to_target_s", "step_s", "final_metric")
NO_EMULATION = EmulationReport(kind="none", network="loopback", compute="this machine's cores")


def write_run(
    path: Path,
    *,
    step_s: Sequence[float],
    metrics: Sequence[tuple[int, float]] = (),
    late_s: Sequence[float | None] = (0.0, 0.0),
    batch_size: int = 8,
    strategy: str = "ddp",
    status: str = "finished",
    notices: Sequence[str] = (),
    skipped_steps: int = 0,
    peak_memory_bytes: Sequence[int] = (100, 200),
    bytes_sent: Sequence[int] | None = None,
    workers: int = 2,
) -> Path:
    """A run record.

    Args:
        path: where.
        step_s: how long each step takes, on all ranks.
        metrics: the metric after so many steps.
        late_s: by rank, how long after the first it comes to the exchange; None: it exchanges
            nothing.
        batch_size: of each rank.
        bytes_sent: in each step, by each rank; None: 1,000.
        strategy, status, notices, skipped_steps, peak_memory_bytes, workers: as in the summary.
    """
    config = RunConfig(
        task="digits",
        task_options={},
        strategy=strategy,
        strategy_options={},
        workers=workers,
        epochs=None,
        steps=max(1, len(step_s)),
        seed=0,
        checkpoint_every=None,
        eval_every=None,
    )
    create(path, config)
    attempt = begin_attempt(path, config, start_step=0)
    began_s = [sum(step_s[:step], 50.0) for step in range(len(step_s))]
    for rank, late in zip(range(workers), late_s, strict=True):
        writer = EventWriter(path, rank=rank, attempt=attempt)
        for step, (begin_s, duration_s) in enumerate(zip(began_s, step_s, strict=True), start=1):
            writer.add(
                StepEvent(
                    step=step,
                    loss=1.0,
                    batch_size=batch_size,
                    began_s=begin_s,
                    ready_s=None if late is None else begin_s + duration_s / 2 + late,
                    duration_s=duration_s,
                    compute_s=duration_s / 4,
                    encode_s=duration_s / 4,
                    wait_s=duration_s / 2,
                    padded_s=0.0,
                    bytes_sent=1_000 if bytes_sent is None else bytes_sent[step - 1],
                    messages_sent=4,
                    skipped=False,
                )
            )
        if rank == 0:
            for step, metric in metrics:
                seconds = sum(step_s[:step])
                writer.add_evaluation(
                    Evaluation(
                        step=step,
                        seconds=seconds,
                        bytes_sent=1_000 * step,
                        metric=metric,
                        at_s=50.0 + seconds,
                    )
                )
        writer.close()
    seconds = sum(step_s)
    write_summary(
        Summary(
            status=status,
            task="digits",
            strategy=strategy,
            workers=workers,
            world_size=workers,
            steps=len(step_s),
            metric=metrics[-1][1] if metrics else None,
            metric_name="accuracy",
            higher_is_better=True,
            loss=1.0,
            seconds=seconds,
            steps_per_s=len(step_s) / (seconds or 1.0),
            samples_per_s=len(step_s) * workers * batch_size / (seconds or 1.0),
            bytes_sent_per_step=1_000.0 if bytes_sent is None else sum(bytes_sent) / len(step_s),
            messages_sent_per_step=4.0,
            peak_memory_bytes=list(peak_memory_bytes),
            skipped_steps=skipped_steps,
            num_parameters=10,
            parameters_sha256="0",
            replicas_identical=True,
            resumed_from_step=None,
            notices=list(notices),
            run_directory=str(path),
        )
    )
    return path


def strategy(
    label: str,
    measures: Mapping[Measure, Sequence[float | None]] | None = None,
    *,
    failure: str | None = None,
    lateness_s: Sequence[float] = (),
    num_seeds: int = 3,
) -> ComparedStrategy:
    """One whose measures have these values, one for each seed."""
    estimates: dict[Measure, Estimate] = {
        name: estimate(values) for name, values in (measures or {}).items()
    }
    if estimates:  # a strategy that ran has every measure
        nothing = estimate([None] * num_seeds)
        estimates = dict.fromkeys(_ALWAYS, nothing) | estimates
    return ComparedStrategy(
        label=label,
        strategy=label.split()[0],
        options={},
        summary=f"What {label} does",
        runs=[f"runs/{label}-seed-{seed}" for seed in range(num_seeds)],
        failure=failure,
        measures=estimates,
        lateness_s=list(lateness_s),
    )


def comparison(
    strategies: Sequence[ComparedStrategy],
    *,
    target: float | None = 0.9,
    target_was_given: bool = True,
    higher_is_better: bool = True,
    differences: Sequence[Difference] = (),
    num_seeds: int = 3,
    workers: int = 2,
) -> Comparison:
    """A comparison of these, not judged."""
    return Comparison(
        status="running",
        command="offbeat compare",
        created_at="2026-01-01T00:00:00+00:00",
        task="digits",
        task_options={},
        metric_name="accuracy",
        higher_is_better=higher_is_better,
        target=target,
        target_was_given=target_was_given,
        seeds=list(range(num_seeds)),
        steps=40,
        workers=workers,
        num_parameters=10,
        cluster=Cluster(workers=workers),
        emulation=NO_EMULATION,
        environment={"python": "3"},
        strategies=list(strategies),
        differences=list(differences),
    )
