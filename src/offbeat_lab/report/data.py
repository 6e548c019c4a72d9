"""What the page shows, as plain values. `page` builds it from records; what draws and says it knows
nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from offbeat.callbacks.callback import Decision
from offbeat.run.records import WorkerLoss
from offbeat_lab.breakdown import Steps
from offbeat_lab.cluster import Cluster
from offbeat_lab.comparison import Difference
from offbeat_lab.figures import Better
from offbeat_lab.records import EmulationReport, MegaBatch
from offbeat_lab.statistics import Estimate

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Curve:
    """The metric as one run went on; arrays of shape (number of evaluations,), in order.

    Attributes:
        steps: optimizer steps done.
        seconds: of training until then, evaluations excluded.
        bytes_sent: by a worker until then, mean over workers.
        metric: as measured; NaN where it was not finite.
    """

    steps: Floats
    seconds: Floats
    bytes_sent: Floats
    metric: Floats


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunResults:
    """One run of a strategy.

    Attributes:
        seed: of parameters and sample order.
        directory: as the user would name it.
        status: "finished", "stopped", or "unfinished" where there is no summary.
        curve, steps: what it did.
        last_start: the step from which the last attempt went on; 0 unless the run was resumed.
        losses: workers that died while its peers went on.
        decisions: which strategy was to be at work when; empty where it was named.
        mega_batches: what workers did between merges; empty where they have batches of their own.
    """

    seed: int
    directory: str
    status: str
    curve: Curve
    steps: Steps
    last_start: int = 0
    losses: Sequence[WorkerLoss] = ()
    decisions: Sequence[Decision] = ()
    mega_batches: Sequence[MegaBatch] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StrategyResults:
    """One strategy with its options, and what its runs gave.

    Attributes:
        measures: estimates by the names of `figures.MEASURES`.
        notices: honest remarks of its runs.
        failure: why it has no result.
    """

    label: str
    strategy: str
    options: Mapping[str, object]
    summary: str = ""
    runs: Sequence[RunResults] = ()
    measures: Mapping[str, Estimate] = field(default_factory=dict)
    notices: Sequence[str] = ()
    failure: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PageContent:
    """Everything on the page.

    Attributes:
        title: what it is about.
        unfinished: what the reader must know when the runs did not end as planned; None when they
            did.
        verdict: one sentence.
        winner: the label that it speaks of; None where nothing finished.
        findings: a few more.
        metric_better: which way the metric is to go.
        target: of the metric.
        cluster, emulation: what the runs ran on, and how it was imitated; None where no cluster was
            described, or none imitated.
        details: rows of the configuration, what and value.
        environment: rows of the machine.
        command: what reproduces it.
    """

    title: str
    verdict: str
    winner: str | None = None
    findings: Sequence[str] = ()
    unfinished: str | None = None
    created_at: str = ""
    metric_name: str
    metric_better: Better
    target: float | None = None
    strategies: Sequence[StrategyResults]
    differences: Sequence[Difference] = ()
    cluster: Cluster | None = None
    emulation: EmulationReport | None = None
    details: Sequence[tuple[str, str]] = ()
    environment: Sequence[tuple[str, str]] = ()
    command: str = ""

    @property
    def compares(self) -> bool:
        """Whether there is more than one strategy."""
        return len(self.strategies) > 1
