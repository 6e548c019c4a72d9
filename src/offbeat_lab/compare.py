"""Strategies side by side: the same task, the same seeds, the same machine, by turns.

    for each seed
        start the workers of every strategy, and let them wait
        until all have finished
            for each strategy in turn: let it train for a few seconds

A machine that drifts while this goes on slows all strategies down alike. Where the workers of all
strategies do not fit into memory together, as many as fit take turns, and the order is rotated from
seed to seed.

A turn is over when the last rank has done its steps, and the other ranks wait for it
(`offbeat_lab.pauses`). A run by itself has no such waits: where they are long, turns become longer.
"""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol, cast

import psutil
from pydantic import JsonValue

from offbeat.codec.described_options import first_sentence
from offbeat.errors import ConfigError, OffbeatError, RecordError
from offbeat.run import records
from offbeat.run.config import RunConfig, ScriptCommand, script_run
from offbeat.run.interrupts import Interrupts, interrupts
from offbeat.run.progress import Listener, MembershipChange, WorkerProgress
from offbeat.session.checkpoint import Json
from offbeat.strategies.by_name import strategy_values
from offbeat.strategies.registry import ALONE
from offbeat_lab.analysis import analyse
from offbeat_lab.cluster import Cluster
from offbeat_lab.comparison import ComparedStrategy, Comparison, write_comparison
from offbeat_lab.config import MAX_SEED, Request, as_json, resolve, steps_to_do, task_of
from offbeat_lab.emulated_workers import EmulatedGroup
from offbeat_lab.emulation import Emulation, emulate
from offbeat_lab.memory import num_runs_that_fit
from offbeat_lab.options import BATCH_SHARES, build_strategy, parse_spec, strategy_type
from offbeat_lab.records import Record

_EVALUATIONS = 12
DEFAULT_SCRIPT_STEPS = 300
"""After so many steps a script is stopped, unless the request says otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareRequest(Request):
    """What the user asked for: what each run has of its own comes from these.

    Attributes:
        strategies: such as "gtopk" or "gtopk:density=0.01:codec=reuse".
        seeds: the runs of each strategy.
        target: the metric to be reached; None: the best that every run reaches.
        turn_s: how long a strategy trains before the next one's turn.
        script: what runs in the place of a task.
    """

    task: str
    strategies: Sequence[str]
    cluster: Cluster = field(default_factory=Cluster)
    seeds: Sequence[int] = (0, 1, 2)
    target: float | None = None
    turn_s: float = 3.0
    script: ScriptCommand | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparePlan:
    """A checked comparison that has touched nothing yet."""

    request: CompareRequest
    strategies: Sequence[ComparedStrategy]
    configs: Sequence[RunConfig]
    steps: int
    num_parameters: int
    at_once: int
    out: Path | None


def plan_comparison(request: CompareRequest, *, out: Path | None = None) -> ComparePlan:
    """Check everything that can be checked before anything starts.

    Args:
        request: what the user asked for.
        out: directory of the comparison; None: the next free one below runs/.

    Raises:
        ConfigError: the comparison cannot be made as asked.
        RecordError: `out` is in use.
    """
    _check_request(request)
    if out is not None:
        records.check_free(out)
    specs = [parse_spec(text) for text in request.strategies]
    labels = _labels(specs)
    strategies, configs = [], []
    for label, (name, options) in zip(labels, specs, strict=True):
        config = _config(request, name, options)
        file_label = re.sub(r"[^\w.=-]", "-", label)
        strategies.append(
            ComparedStrategy(
                label=label,
                strategy=name,
                options={
                    **cast(dict[str, JsonValue], config.strategy_options),
                    **({BATCH_SHARES: options[BATCH_SHARES]} if BATCH_SHARES in options else {}),
                },
                summary=first_sentence(strategy_type(name).__doc__),
                runs=[f"runs/{file_label}-seed-{seed}" for seed in request.seeds],
            )
        )
        configs.append(config)
    task = None if request.script is not None else task_of(configs[0])
    steps = DEFAULT_SCRIPT_STEPS if task is None else steps_to_do(configs[0], task)
    steps = request.steps or steps
    every = request.eval_every if request.eval_every is not None else max(1, steps // _EVALUATIONS)
    configs = [
        replace(
            config,
            steps=steps,
            epochs=None,
            checkpoint_every=None,
            eval_every=None if task is None else every,
        )
        for config in configs
    ]
    # How large a script's model is shows when it runs.
    num_parameters = 0 if task is None else task.num_parameters()
    return ComparePlan(
        request=request,
        strategies=strategies,
        configs=configs,
        steps=steps,
        num_parameters=num_parameters,
        at_once=num_runs_that_fit(len(strategies) + 1, request.cluster.workers, num_parameters),
        out=out,
    )


def _config(request: CompareRequest, strategy: str, options: Mapping[str, str]) -> RunConfig:
    """The run of one strategy."""
    if request.script is not None:
        recipe = build_strategy(strategy, options)
        recipe.check_world(request.cluster.workers)
        run = script_run(
            request.script,
            strategy,
            strategy_values(recipe),
            workers=request.cluster.workers,
            steps=request.steps,
        )
        return replace(run, cluster=as_json(request.cluster), emulation=request.emulation)
    settings = [*request.settings, *(f"{key}={value}" for key, value in options.items())]
    return resolve(replace(request, strategy=strategy, settings=settings, seed=request.seeds[0]))


def _check_request(request: CompareRequest) -> None:
    """Refuse what no comparison can be made of, whatever is compared."""
    if not request.strategies:
        raise ConfigError("no strategies to compare; give some, such as --strategies ddp,gtopk")
    if not request.seeds:
        raise ConfigError("no seeds; give at least one")
    for seed in request.seeds:
        if not 0 <= seed <= MAX_SEED:
            raise ConfigError(f"seed {seed} cannot be; allowed is 0 to {MAX_SEED}")
    if len(set(request.seeds)) < len(request.seeds):
        raise ConfigError(
            f"a seed is given twice among {', '.join(map(str, request.seeds))}; give each once"
        )
    if not 0 < request.turn_s < math.inf:
        raise ConfigError(
            f"a turn of {request.turn_s:g} s cannot be; allowed is a number of seconds above 0"
        )
    if request.target is not None and not math.isfinite(request.target):
        raise ConfigError(
            f"target {request.target} cannot be reached; give a number, or leave it out"
        )


def _labels(specs: Sequence[tuple[str, dict[str, str]]]) -> list[str]:
    """A strategy's name, with its options where the name alone would not tell it from another."""
    names = [name for name, _ in specs]
    if ALONE in names:
        raise ConfigError(
            f"{ALONE} takes part in every comparison, as the ideal to hold the others against;"
            " leave it out"
        )
    labels = [
        (
            name
            if names.count(name) == 1
            else " ".join([name, *(f"{key}={value}" for key, value in options.items())])
        )
        for name, options in specs
    ]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(
                f"strategy {label!r} is given twice; give it once, or with different options"
            )
    return labels


_POLL_S = 0.1
_FIRST_TURN_STEPS = 3
_LEAST_TURN_STEPS = 8
"""What a strategy sends beside its next step is over by the beginning of its next turn, so in each
turn one step seems to be shorter.
"""
_MOST_MET = 0.05
"""The part of a turn that its end may take, from the first rank's last step to the last one's."""

_ALONE_STEPS = 30


class ComparisonListener(Protocol):
    """Is told how a comparison goes on."""

    def begin(self, labels: Sequence[str], num_workers: int, num_seeds: int, steps: int) -> None:
        """It begins.

        Args:
            labels: of the strategies.
            num_workers: of each run.
            num_seeds: runs of each strategy.
            steps: of each run.
        """

    def seed(self, place: int) -> None:
        """The runs of the `place`-th seed begin, from 0."""

    def turn(self, label: str) -> None:
        """It is the turn of `label`."""

    def progress(self, label: str, progress: WorkerProgress) -> None:
        """One worker of `label` reports."""

    def membership_changed(self, label: str, change: MembershipChange) -> None:
        """One worker of `label` has died, and its peers go on; or it is back."""

    def failed(self, label: str, reason: str) -> None:
        """`label` has failed, and the comparison goes on without it."""


@dataclass(kw_only=True)
class _InterleavedRun:
    """One run that takes turns."""

    label: str
    group: EmulatedGroup
    step_s: float = 0.0
    last_s: float = 0.0
    last_step: int = 0
    met_s: float = 0.0
    reported: bool = False


def turn_steps(turn_s: float, step_s: float, met_s: float) -> int:
    """How many steps the next turn has.

    Args:
        turn_s: how long it takes at least.
        step_s: how long a step took in the turn before; 0: there was none.
        met_s: for how long the first rank waited at its end for the last one.
    """
    if not step_s:
        return _FIRST_TURN_STEPS
    return max(_LEAST_TURN_STEPS, round(max(turn_s, met_s / _MOST_MET) / step_s))


@dataclass
class InterleavedRuns:
    """Carries out the runs, seed by seed.

    Attributes:
        directory: of the comparison.
        plan: what is compared.
        emulation: of the cluster.
        listener: is told of what happens.
        failures: by label, why it failed.
        alone: by seed, the run without exchange.
    """

    directory: Path
    plan: ComparePlan
    emulation: Emulation
    listener: ComparisonListener
    failures: dict[str, str] = field(default_factory=dict)
    alone: dict[int, Path] = field(default_factory=dict)
    _num_passed_on: int = 0

    def run_seed(self, place: int, seed: int, interrupted: Interrupts) -> None:
        """All runs of one seed, as many at a time as fit."""
        plan = self.plan
        runs = [
            (strategy.label, self.directory / strategy.runs[place], replace(config, seed=seed))
            for strategy, config in zip(plan.strategies, plan.configs, strict=True)
            if strategy.label not in self.failures
        ]
        first = place % len(runs) if runs else 0
        runs = runs[first:] + runs[:first]
        alone = self.directory / f"runs/{ALONE}-seed-{seed}"
        if plan.request.cluster.workers > 1:
            runs.append((ALONE, alone, self._alone_config(seed)))
        while runs and not interrupted.count:
            self.run_together(runs[: plan.at_once], interrupted)
            runs = runs[plan.at_once :]
        if ALONE not in self.failures and alone.exists():
            self.alone[seed] = alone

    def _alone_config(self, seed: int) -> RunConfig:
        strategy = build_strategy(ALONE, {})
        return replace(
            self.plan.configs[0],
            strategy=ALONE,
            strategy_options=strategy_values(strategy),
            seed=seed,
            steps=min(self.plan.steps, _ALONE_STEPS),
            eval_every=None,
            batch_shares=[],
        )

    def run_together(
        self, runs: Sequence[tuple[str, Path, RunConfig]], interrupted: Interrupts
    ) -> None:
        with ExitStack() as stack:
            started: list[_InterleavedRun] = []
            for label, path, config in runs:
                if interrupted.count:
                    break
                records.create(path, config)
                records.begin_attempt(path, config, start_step=0, emulation=self.emulation.report)
                group = EmulatedGroup(
                    path, config, self.emulation, turns=True, on_progress=self._forward(label)
                )
                started.append(_InterleavedRun(label=label, group=stack.enter_context(group)))
                # One run after the other, and no turn before all are ready: some strategies measure
                # the network while they start.
                while not group.has_ended and group.paused_at is None:
                    self._poll([started[-1]], started, interrupted)
            while waiting := [run for run in started if not run.group.has_ended]:
                for run in waiting:
                    self._take_turn(run, started, interrupted)
            self._poll([], started, interrupted)

    def _take_turn(
        self, run: _InterleavedRun, started: Sequence[_InterleavedRun], interrupted: Interrupts
    ) -> None:
        group = run.group
        if (done := group.paused_at) is not None:
            self.listener.turn(run.label)
            group.run_until(done + turn_steps(self.plan.request.turn_s, run.step_s, run.met_s))
        while not group.has_ended and group.paused_at is None:
            self._poll([run], started, interrupted)
        if (paused_at := group.paused_at) is not None and paused_at > run.last_step:
            run.step_s = (group.seconds - run.last_s) / (paused_at - run.last_step)
            run.last_s, run.last_step, run.met_s = group.seconds, paused_at, group.met_s

    def _poll(
        self,
        active: Sequence[_InterleavedRun],
        started: Sequence[_InterleavedRun],
        interrupted: Interrupts,
    ) -> None:
        """Poll all runs, above all the `active` ones, and record which have failed."""
        while self._num_passed_on < interrupted.count:
            self._num_passed_on += 1
            for run in started:
                run.group.interrupt()
        for run in started:
            run.group.poll(_POLL_S / max(1, len(active)) if run in active else 0.0)
            if run.group.has_ended and not run.reported:
                run.reported = True
                try:
                    group = run.group
                    if group.has_finished() and not records.add_to_summary(
                        group.run_directory, group.remarks, group.losses
                    ):
                        raise RecordError(
                            "it ended before its first step, or trained in processes that it"
                            f" started itself; what it printed is in {group.run_directory / 'logs'}"
                        )
                except OffbeatError as error:
                    if not interrupted.count:
                        self.failures[run.label] = str(error)
                        self.listener.failed(run.label, str(error))

    def _forward(self, label: str) -> Listener:
        """Passes the reports of a run's workers on under its label."""

        def listen(report: WorkerProgress | MembershipChange) -> None:
            if isinstance(report, MembershipChange):
                self.listener.membership_changed(label, report)
            else:
                self.listener.progress(label, report)

        return listen


def run_comparison(
    plan: ComparePlan, listener: ComparisonListener, *, command: str
) -> tuple[Path, Comparison]:
    """Run the comparison and write its directory.

    Args:
        plan: from `plan_comparison`.
        listener: is told how it goes on.
        command: that reproduces it, for the record.

    Returns:
        The directory, and what was found. When a strategy fails, the others go on.

    Raises:
        RecordError: the directory is in use, or the disk does not take the record.
        ConfigError: the cluster cannot be emulated as asked.
    """
    request = plan.request
    with emulate(request.cluster, mode=request.emulation) as emulation:
        # Not before, which takes seconds: another comparison may take the name meanwhile.
        directory = plan.out or records.first_free(f"compare-{request.task}")
        records.check_free(directory)
        with records.naming_failed_file(directory, records.ELSEWHERE):
            (directory / "runs").mkdir(parents=True, exist_ok=True)
        comparison = _begin(plan, emulation, command)
        write_comparison(directory, comparison)
        listener.begin(
            [c.label for c in plan.strategies],
            request.cluster.workers,
            len(request.seeds),
            plan.steps,
        )
        runs = InterleavedRuns(directory, plan, emulation, listener)
        try:
            with interrupts() as interrupted:
                for place, seed in enumerate(request.seeds):
                    listener.seed(place)
                    runs.run_seed(place, seed, interrupted)
                    if interrupted.count:
                        break
        except (OffbeatError, OSError):
            # The disk may be full, and what goes on then is the first error.
            with suppress(OffbeatError):
                write_comparison(directory, comparison.model_copy(update={"status": "stopped"}))
            raise
    strategies = [
        c.model_copy(update={"failure": runs.failures.get(c.label)}) for c in comparison.strategies
    ]
    if interrupted.count:
        comparison = comparison.model_copy(update={"status": "stopped", "strategies": strategies})
    else:
        comparison = comparison.model_copy(update={"strategies": strategies})
        if plan.request.script is not None:
            comparison = _with_metric_of_runs(directory, comparison)
        comparison = analyse(directory, comparison, runs.alone)
        comparison = comparison.model_copy(update={"status": "finished"})
    write_comparison(directory, comparison)
    return directory, comparison


def _with_metric_of_runs(directory: Path, comparison: Comparison) -> Comparison:
    """`comparison` with what only the runs of a script tell: its metric and its model's size."""
    summaries = (
        Record(directory / run).summary()
        for strategy in comparison.strategies
        if strategy.failure is None
        for run in strategy.runs
    )
    summary = next(filter(None, summaries), None)
    if summary is None:
        return comparison
    return comparison.model_copy(
        update={
            "metric_name": summary.metric_name,
            "higher_is_better": summary.higher_is_better,
            "num_parameters": summary.num_parameters,
        }
    )


def _begin(plan: ComparePlan, emulation: Emulation, command: str) -> Comparison:
    request, config = plan.request, plan.configs[0]
    task = None if config.script is not None else task_of(config)
    report = emulation.report
    together = len(plan.strategies) + 1
    if plan.at_once < together:
        notice = (
            f"{plan.at_once} of {together} runs fit into memory at a time, so not all strategies"
            " took turns with each other"
        )
        report = replace(report, notices=[*report.notices, notice])
    return Comparison(
        status="running",
        command=command,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        task=config.task,
        task_options=cast(dict[str, JsonValue], config.task_options),
        metric_name="metric" if task is None else task.metric_name,
        higher_is_better=task is not None and task.higher_is_better,
        target=request.target,
        target_was_given=request.target is not None,
        seeds=list(request.seeds),
        steps=plan.steps,
        workers=request.cluster.workers,
        num_parameters=plan.num_parameters,
        cluster=request.cluster,
        emulation=report,
        environment=cast(dict[str, JsonValue], records.environment() | _machine()),
        strategies=list(plan.strategies),
    )


def _machine() -> dict[str, Json]:
    return {
        "host": platform.node(),
        "cpu": next(_cpu_models(), platform.machine()),
        "memory_bytes": psutil.virtual_memory().total,
    }


def _cpu_models() -> Iterator[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    yield from (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
