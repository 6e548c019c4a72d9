"""Strategies side by side: the same task, the same seeds, the same machine, by turns.

    for each seed
        start the workers of every strategy, and let them wait
        until all have finished
            for each strategy in turn: let it train for a few seconds

A machine that drifts while this goes on slows all strategies down alike. Where the workers of all strategies do not fit into
memory together, as many as fit take turns, and the order is rotated from seed to seed.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from offbeat.checkpoint import Json
from offbeat.errors import ConfigError, OffbeatError, RecordError
from offbeat.lab import records
from offbeat.lab.cluster import Cluster
from offbeat.lab.comparison import Comparison, Contestant, write_comparison
from offbeat.lab.config import MAX_SEED, Request, RunConfig, resolve
from offbeat.lab.emulation import Emulation, emulate
from offbeat.lab.emulation import Mode as EmulationMode
from offbeat.lab.judge import judge
from offbeat.lab.options import build_strategy, parse_spec, strategy_type, strategy_values, summary_line
from offbeat.lab.progress import Progress
from offbeat.lab.records import Record
from offbeat.lab.supervisor import Crew, Interrupts, interrupts

_POLL_S = 0.1
_FIRST_TURN_STEPS = 3
_ALONE_STEPS = 30
_EVALUATIONS = 12
_WORKER_BYTES = 220 << 20
_BYTES_PER_PARAMETER = 32  # parameters, gradients, two optimizer moments, residual, buckets, and what a step allocates
_ALONE = "alone"


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareRequest:
    """What the user asked for.

    Attributes:
        task, settings: what is trained, and `key=value` options of the task.
        strategies: such as "gtopk" or "gtopk:density=0.01:selection=reuse".
        cluster: what is emulated.
        emulation: how.
        seeds: the runs of each strategy.
        epochs, steps: how long each run is; neither: the task's default.
        eval_every: steps between measurements of the metric; None: about a dozen in a run.
        target: the metric to be reached; None: the best that every run reaches.
        turn_s: how long a strategy trains before the next one's turn.
    """

    task: str
    strategies: Sequence[str]
    settings: Sequence[str] = ()
    cluster: Cluster = field(default_factory=Cluster)
    emulation: EmulationMode = "auto"
    seeds: Sequence[int] = (0, 1, 2)
    epochs: int | None = None
    steps: int | None = None
    eval_every: int | None = None
    target: float | None = None
    turn_s: float = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparePlan:
    """A checked comparison that has touched nothing yet."""

    request: CompareRequest
    contestants: Sequence[Contestant]
    configs: Sequence[RunConfig]
    steps: int
    num_parameters: int
    at_once: int
    out: Path | None


class Watcher(Protocol):
    """Hears how a comparison goes on."""

    def begin(self, labels: Sequence[str], num_workers: int, num_seeds: int, steps: int) -> None:
        """It begins."""

    def seed(self, place: int) -> None:
        """The runs of the `place`-th seed begin, from 0."""

    def turn(self, label: str) -> None:
        """It is the turn of `label`."""

    def progress(self, label: str, progress: Progress) -> None:
        """One worker of `label` reports."""

    def failed(self, label: str, reason: str) -> None:
        """`label` is out."""


def plan_comparison(request: CompareRequest, *, out: Path | None = None) -> ComparePlan:
    """Check everything that can be checked before anything starts.

    Raises:
        ConfigError: the comparison cannot be made as asked.
        RecordError: `out` is in use.
    """
    _check_request(request)
    if out is not None:
        _check_free(out)
    specs = [parse_spec(text) for text in request.strategies]
    labels = _labels(specs)
    contestants, configs = [], []
    for label, (name, options) in zip(labels, specs, strict=True):
        config = resolve(
            Request(
                task=request.task,
                strategy=name,
                settings=[*request.settings, *(f"{key}={value}" for key, value in options.items())],
                epochs=request.epochs,
                steps=request.steps,
                seed=request.seeds[0],
                eval_every=request.eval_every,
                cluster=request.cluster,
                emulation=request.emulation,
            )
        )
        contestants.append(
            Contestant(
                label=label,
                strategy=name,
                options=config.strategy_options,
                summary=summary_line(strategy_type(name)),
                runs=[f"runs/{_file_name(label)}-seed-{seed}" for seed in request.seeds],
            )
        )
        configs.append(config)
    task = configs[0].build_task()
    steps = configs[0].steps_to_do(task)
    every = request.eval_every if request.eval_every is not None else max(1, steps // _EVALUATIONS)
    configs = [
        config.model_copy(update={"steps": steps, "epochs": None, "checkpoint_every": None, "eval_every": every})
        for config in configs
    ]
    num_parameters = sum(parameter.numel() for parameter in task.build_model(0).parameters())
    return ComparePlan(
        request=request,
        contestants=contestants,
        configs=configs,
        steps=steps,
        num_parameters=num_parameters,
        at_once=_how_many_fit(len(contestants) + 1, request.cluster.workers, num_parameters),
        out=out,
    )


def carry_out(plan: ComparePlan, watcher: Watcher, *, command: str) -> tuple[Path, Comparison]:
    """Run the comparison and write its directory.

    Args:
        plan: from `plan_comparison`.
        watcher: hears how it goes on.
        command: that reproduces it, for the record.

    Returns:
        The directory, and what was found. A strategy that fails is out, and the others go on.

    Raises:
        RecordError: the directory is in use, or the disk does not take the record.
        ConfigError: the cluster cannot be emulated as asked.
    """
    request = plan.request
    directory = plan.out if plan.out is not None else _first_free(request.task)
    _check_free(directory)
    with emulate(request.cluster, mode=request.emulation) as emulation:
        _make_directory(directory)
        comparison = _begin(plan, emulation, command)
        write_comparison(directory, comparison)
        watcher.begin([c.label for c in plan.contestants], request.cluster.workers, len(request.seeds), plan.steps)
        rounds = _Rounds(directory, plan, emulation, watcher)
        with interrupts() as interrupted:
            for place, seed in enumerate(request.seeds):
                watcher.seed(place)
                rounds.run_seed(place, seed, interrupted)
                if interrupted.count:
                    break
    contestants = [c.model_copy(update={"failure": rounds.failures.get(c.label)}) for c in comparison.contestants]
    if interrupted.count:
        comparison = comparison.model_copy(update={"status": "stopped", "contestants": contestants})
    else:
        comparison = judge(directory, comparison.model_copy(update={"contestants": contestants}), rounds.alone)
        comparison = comparison.model_copy(update={"status": "finished"})
    write_comparison(directory, comparison)
    return directory, comparison


@dataclass(kw_only=True)
class _Entrant:
    """One run that takes turns."""

    label: str
    crew: Crew
    step_s: float = 0.0
    last_s: float = 0.0
    last_step: int = 0
    judged: bool = False


class _Rounds:
    """Carries out the runs, seed by seed.

    Attributes:
        failures: by label, why it is out.
        alone: by seed, the run without exchange.
    """

    def __init__(self, directory: Path, plan: ComparePlan, emulation: Emulation, watcher: Watcher) -> None:
        self.failures: dict[str, str] = {}
        self.alone: dict[int, Path] = {}
        self._directory = directory
        self._plan = plan
        self._emulation = emulation
        self._watcher = watcher
        self._told = 0

    def run_seed(self, place: int, seed: int, interrupted: Interrupts) -> None:
        """All runs of one seed, as many at a time as fit."""
        plan = self._plan
        runs = [
            (contestant.label, self._directory / contestant.runs[place], config.model_copy(update={"seed": seed}))
            for contestant, config in zip(plan.contestants, plan.configs, strict=True)
            if contestant.label not in self.failures
        ]
        first = place % len(runs) if runs else 0
        runs = runs[first:] + runs[:first]
        if plan.request.cluster.workers > 1:
            runs.append((_ALONE, self._directory / f"runs/{_ALONE}-seed-{seed}", self._alone_config(seed)))
        while runs and not interrupted.count:
            self._run_together(runs[: plan.at_once], interrupted)
            runs = runs[plan.at_once :]
        path = self._directory / f"runs/{_ALONE}-seed-{seed}"
        if _ALONE not in self.failures and path.exists():
            self.alone[seed] = path

    def _alone_config(self, seed: int) -> RunConfig:
        strategy = build_strategy(_ALONE, {})
        return self._plan.configs[0].model_copy(
            update={
                "strategy": _ALONE,
                "strategy_options": strategy_values(strategy),
                "seed": seed,
                "steps": min(self._plan.steps, _ALONE_STEPS),
                "eval_every": None,
            }
        )

    def _run_together(self, runs: Sequence[tuple[str, Path, RunConfig]], interrupted: Interrupts) -> None:
        with ExitStack() as stack:
            entrants: list[_Entrant] = []
            for label, path, config in runs:
                if interrupted.count:
                    break
                records.create(path, config)
                records.begin_attempt(path, config, start_step=0, emulation=self._emulation.report)
                crew = Crew(path, config, self._emulation, turns=True, on_progress=self._listener(label))
                entrants.append(_Entrant(label=label, crew=stack.enter_context(crew)))
                # One after the other, and nobody's turn before all are ready: some measure the network while they start.
                while not crew.over and crew.paused_at is None:
                    self._poll([entrants[-1]], entrants, interrupted)
            while waiting := [entrant for entrant in entrants if not entrant.crew.over]:
                for entrant in waiting:
                    self._take_turn(entrant, entrants, interrupted)
            self._poll([], entrants, interrupted)

    def _take_turn(self, entrant: _Entrant, entrants: Sequence[_Entrant], interrupted: Interrupts) -> None:
        crew = entrant.crew
        if (done := crew.paused_at) is not None:
            self._watcher.turn(entrant.label)
            turn_s = self._plan.request.turn_s
            crew.let_go(done + (max(1, round(turn_s / entrant.step_s)) if entrant.step_s else _FIRST_TURN_STEPS))
        while not crew.over and crew.paused_at is None:
            self._poll([entrant], entrants, interrupted)
        if (paused_at := crew.paused_at) is not None and paused_at > entrant.last_step:
            entrant.step_s = (crew.seconds - entrant.last_s) / (paused_at - entrant.last_step)
            entrant.last_s, entrant.last_step = crew.seconds, paused_at

    def _poll(self, active: Sequence[_Entrant], entrants: Sequence[_Entrant], interrupted: Interrupts) -> None:
        """Hear everybody, above all who is `active`, and note who has failed."""
        while self._told < interrupted.count:
            self._told += 1
            for entrant in entrants:
                entrant.crew.interrupt()
        for entrant in entrants:
            entrant.crew.poll(_POLL_S / max(1, len(active)) if entrant in active else 0.0)
            if entrant.crew.over and not entrant.judged:
                entrant.judged = True
                try:
                    if entrant.crew.verdict():
                        _add_remarks(entrant.crew)
                except OffbeatError as error:
                    if not interrupted.count:
                        self.failures[entrant.label] = str(error)
                        self._watcher.failed(entrant.label, str(error))

    def _listener(self, label: str) -> Callable[[Progress], None]:
        return lambda progress: self._watcher.progress(label, progress)


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
        raise ConfigError(f"a seed is given twice among {', '.join(map(str, request.seeds))}; give each once")
    if not 0 < request.turn_s < math.inf:
        raise ConfigError(f"a turn of {request.turn_s:g} s cannot be; allowed is a number of seconds above 0")
    if request.target is not None and not math.isfinite(request.target):
        raise ConfigError(f"target {request.target} cannot be reached; give a number, or leave it out")


def _add_remarks(crew: Crew) -> None:
    """Note in the run's summary what of the cluster's script could not be carried out."""
    summary = Record(crew.run_directory).summary() if crew.remarks else None
    if summary is not None:
        records.write_summary(summary.model_copy(update={"notices": [*summary.notices, *crew.remarks]}))


def _labels(specs: Sequence[tuple[str, dict[str, str]]]) -> list[str]:
    """A strategy's name, with its options where the name alone would not tell it from another."""
    names = [name for name, _ in specs]
    if _ALONE in names:
        raise ConfigError(f"{_ALONE} takes part in every comparison, as the ideal to hold the others against; leave it out")
    labels = [
        name if names.count(name) == 1 else " ".join([name, *(f"{key}={value}" for key, value in options.items())])
        for name, options in specs
    ]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"strategy {label!r} is given twice; give it once, or with different options")
    return labels


def _file_name(label: str) -> str:
    return "".join(character if character.isalnum() or character in "-_.=" else "-" for character in label)


def _how_many_fit(wanted: int, workers: int, num_parameters: int) -> int:
    """How many runs fit into memory at a time. Raises `ConfigError` if not even one does."""
    each = workers * (_WORKER_BYTES + num_parameters * _BYTES_PER_PARAMETER)
    available = _available_bytes()
    if available is None:
        return 1
    if each > available:
        raise ConfigError(
            f"{workers} workers with {num_parameters:,} parameters need about {each / 1e9:.1f} GB, and "
            f"{available / 1e9:.1f} GB are free; use fewer workers or a smaller model"
        )
    return min(wanted, int(available * 0.8 // each) or 1)


def _available_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _check_free(directory: Path) -> None:
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise RecordError(f"{directory} exists and is not empty; choose another --out")


def _make_directory(directory: Path) -> None:
    try:
        (directory / "runs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecordError(f"cannot write {directory}: {error.strerror}; choose another --out") from None


def _first_free(task: str) -> Path:
    number = 1
    while (path := Path("runs") / f"compare-{task}-{number:03d}").exists():
        number += 1
    return path


def _begin(plan: ComparePlan, emulation: Emulation, command: str) -> Comparison:
    request, config = plan.request, plan.configs[0]
    task = config.build_task()
    report = emulation.report
    together = len(plan.contestants) + 1
    if plan.at_once < together:
        notice = (
            f"{plan.at_once} of {together} runs fit into memory at a time, so not all strategies took turns with each other"
        )
        report = report.model_copy(update={"notices": [*report.notices, notice]})
    return Comparison(
        status="running",
        command=command,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        task=config.task,
        task_options=config.task_options,
        metric_name=task.metric_name,
        higher_is_better=task.higher_is_better,
        target=request.target,
        target_was_given=request.target is not None,
        seeds=list(request.seeds),
        steps=plan.steps,
        workers=request.cluster.workers,
        num_parameters=plan.num_parameters,
        cluster=request.cluster,
        emulation=report,
        environment=records.environment() | _machine(),
        contestants=list(plan.contestants),
    )


def _machine() -> dict[str, Json]:
    return {"host": platform.node(), "cpu": next(_cpu_models(), platform.machine()), "memory_bytes": _total_bytes()}


def _cpu_models() -> Iterator[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    yield from (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))


def _total_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
