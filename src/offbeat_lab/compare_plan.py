"""What a comparison is to do, complete and checked before anything starts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from pydantic import JsonValue

from offbeat.errors import ConfigError, RecordError
from offbeat.run.config import RunConfig, ScriptCommand, script_run
from offbeat.run.recipes import ALONE
from offbeat.strategies.by_name import strategy_values
from offbeat.strategies.docstrings import first_sentence
from offbeat_lab.cluster import Cluster
from offbeat_lab.comparison import ComparedStrategy
from offbeat_lab.config import MAX_SEED, Request, as_json, resolve, steps_to_do, task_of
from offbeat_lab.emulation import Mode as EmulationMode
from offbeat_lab.memory import num_runs_that_fit
from offbeat_lab.options import BATCH_SHARES, build_strategy, parse_spec, strategy_type

_EVALUATIONS = 12
DEFAULT_SCRIPT_STEPS = 300
"""After so many steps a script is stopped, unless the request says otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareRequest:
    """What the user asked for.

    Attributes:
        task, settings: what is trained, and `key=value` options of the task.
        strategies: such as "gtopk" or "gtopk:density=0.01:codec=reuse".
        cluster: what is emulated.
        emulation: how.
        seeds: the runs of each strategy.
        epochs, steps: how long each run is; neither: the task's default.
        eval_every: steps between measurements of the metric; None: about a dozen in a run.
        target: the metric to be reached; None: the best that every run reaches.
        turn_s: how long a strategy trains before the next one's turn.
        script: what runs in the place of a task.
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
    script: ScriptCommand | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparePlan:
    """A checked comparison that has touched nothing yet."""

    request: CompareRequest
    contestants: Sequence[ComparedStrategy]
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
        check_free(out)
    specs = [parse_spec(text) for text in request.strategies]
    labels = _labels(specs)
    contestants, configs = [], []
    for label, (name, options) in zip(labels, specs, strict=True):
        config = _config(request, name, options)
        contestants.append(
            ComparedStrategy(
                label=label,
                strategy=name,
                options={
                    **cast(dict[str, JsonValue], config.strategy_options),
                    **({BATCH_SHARES: options[BATCH_SHARES]} if BATCH_SHARES in options else {}),
                },
                summary=first_sentence(strategy_type(name)),
                runs=[f"runs/{_file_name(label)}-seed-{seed}" for seed in request.seeds],
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
        contestants=contestants,
        configs=configs,
        steps=steps,
        num_parameters=num_parameters,
        at_once=num_runs_that_fit(len(contestants) + 1, request.cluster.workers, num_parameters),
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
    return resolve(
        Request(
            task=request.task,
            strategy=strategy,
            settings=[*request.settings, *(f"{key}={value}" for key, value in options.items())],
            epochs=request.epochs,
            steps=request.steps,
            seed=request.seeds[0],
            eval_every=request.eval_every,
            cluster=request.cluster,
            emulation=request.emulation,
        )
    )


def check_free(directory: Path) -> None:
    """Raise `RecordError` unless a comparison may be written to `directory`. Touches nothing."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise RecordError(f"{directory} exists and is not empty; choose another --out")


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


def _file_name(label: str) -> str:
    return "".join(
        character if character.isalnum() or character in "-_.=" else "-" for character in label
    )
