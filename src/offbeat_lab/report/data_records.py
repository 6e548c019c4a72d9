"""What pages of runs and of comparisons have in common: a run's steps and curve, the cluster, rows
of a configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from offbeat.run.records import Evaluation
from offbeat_lab.breakdown import Steps, read_steps
from offbeat_lab.cluster import Cluster
from offbeat_lab.factor_work import factor_work
from offbeat_lab.records import EmulationReport, Profiled, Record, read_profiles
from offbeat_lab.report.data import Curve, EmulatedCluster, RunResults
from offbeat_lab.report.style import BYTES, write, write_option


def read_run(record: Record, *, name: str) -> RunResults:
    """One run: its steps on one clock, and its metric on the way."""
    steps = read_steps(record)
    summary = record.summary()
    profiles = {
        rank: _on_one_clock(record, rank, found) for rank, found in read_profiles(record).items()
    }
    return RunResults(
        seed=record.config.seed,
        directory=name,
        status=summary.status if summary else "unfinished",
        curve=_curve(record.evaluations(), steps),
        steps=steps,
        last_start=record.attempts[-1].start_step if record.attempts else 0,
        losses=summary.losses if summary else (),
        profiles=profiles,
        work=factor_work(profiles),
        mega_batches=record.mega_batches(),
    )


def _on_one_clock(record: Record, rank: int, profiles: Sequence[Profiled]) -> list[Profiled]:
    """`profiles` of `rank` on rank 0's monotonic clock, as the times of steps are."""
    mine, first = record.heads(rank)[-1], record.heads(0)[-1]
    shift_s = (
        mine.monotonic_to_unix_s - first.monotonic_to_unix_s if mine.host != first.host else 0.0
    )
    return [
        replace(
            one,
            spans=[
                span._replace(began_s=span.began_s + shift_s, ended_s=span.ended_s + shift_s)
                for span in one.spans
            ],
        )
        for one in profiles
    ]


def _curve(evaluations: Sequence[Evaluation], steps: Steps) -> Curve:
    """Bytes are the mean over the workers that did a step wherever every step's are known, else of
    the rank that measured.
    """
    at = np.array([evaluation.step for evaluation in evaluations], dtype=np.float64)
    bytes_sent = np.array([evaluation.bytes_sent for evaluation in evaluations], dtype=np.float64)
    if (
        at.size
        and np.array_equal(steps.step, np.arange(1, steps.num_steps + 1))
        and at[-1] <= steps.num_steps
    ):
        total = np.concatenate([[0.0], np.cumsum(np.nanmean(steps.bytes_sent, axis=0))])
        bytes_sent = total[at.astype(np.int64)]
    return Curve(
        steps=at,
        seconds=np.array([evaluation.seconds for evaluation in evaluations], dtype=np.float64),
        bytes_sent=bytes_sent,
        metric=np.array([evaluation.metric for evaluation in evaluations], dtype=np.float64),
    )


def incomplete_means(record: Record) -> list[str]:
    """A remark on the measurements of means that lack models of living workers, if there are."""
    marked = [evaluation for evaluation in record.evaluations() if evaluation.without]
    if not marked:
        return []
    steps = ", ".join(f"{evaluation.step:,}" for evaluation in marked)
    workers = sorted({rank for evaluation in marked for rank in evaluation.without})
    return [
        f"the metric at step {steps} is that of a mean without worker"
        f" {', '.join(map(str, workers))}, which did not answer in time"
    ]


def setting(emulation: EmulationReport | None, cluster: Cluster | None) -> EmulatedCluster:
    """What a run or comparison ran on."""
    described = (
        EmulatedCluster()
        if cluster is None
        else EmulatedCluster(cluster=cluster.describe(), cluster_file=cluster.to_toml())
    )
    if emulation is None:
        return described
    return replace(
        described,
        network=emulation.network,
        compute=emulation.compute,
        checks=emulation.checks,
        notices=emulation.notices,
    )


def rows(values: Mapping[str, object]) -> list[tuple[str, str]]:
    """Options or versions, as (name, value) for people."""
    return [
        (words(name.removesuffix("_bytes")), write(value, BYTES))
        if name.endswith("_bytes") and isinstance(value, int)
        else (words(name), write_option(value))
        for name, value in values.items()
    ]


def words(name: str) -> str:
    """An identifier as people write it."""
    return name.replace("_", " ")


def count_workers(number: int) -> str:
    return "one worker" if number == 1 else f"{number} workers"
