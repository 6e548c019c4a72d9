"""What a run of the lab is to do, complete and checked, and what of it only the lab can read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from offbeat.errors import ConfigError
from offbeat.megabatch.batch_sizes import Bounds, Proportional
from offbeat.run.config import EmulationMode, RunConfig
from offbeat.session.loggers import named_loggers
from offbeat.strategies.base import Strategy
from offbeat.strategies.by_name import strategy_values
from offbeat_lab.cluster import Cluster
from offbeat_lab.native import Native
from offbeat_lab.options import (
    BATCH_SHARES,
    build_strategy,
    route,
    split_shares,
    strategy_options,
    strategy_type,
)
from offbeat_lab.tasks import Task, build_task

_DEFAULT_WORKERS = 4
_DEFAULT_CHECKPOINT_EVERY = 100
_KEPT = ("task", "strategy", "seed", "checkpoint_every", "eval_every")
_LEAST_STEPS_A_MERGE = 2
"""So that a merge always comes at a later step than the one before."""


def task_of(config: RunConfig) -> Task:
    """What is trained."""
    return build_task(config.task, config.task_options)


def recipe_of(config: RunConfig) -> Strategy:
    """How workers exchange."""
    return build_strategy(config.strategy, config.strategy_options)


def cluster_of(config: RunConfig) -> Cluster | None:
    """What is emulated; None: this machine as it is."""
    return None if config.cluster is None else Cluster.model_validate(config.cluster)


def steps_to_do(config: RunConfig, task: Task) -> int:
    """Optimizer steps of an uninterrupted run. Raises `ConfigError` when a worker does not get one
    batch an epoch.
    """
    steps_per_epoch = task.steps_per_epoch(config.workers)
    if config.steps is not None:
        return config.steps
    assert config.epochs is not None
    return config.epochs * steps_per_epoch


def batch_sizes(config: RunConfig, task: Task) -> tuple[int, ...] | None:
    """How many samples each worker has in a step, where these numbers differ. They sum to what all
    workers have with batches of the task's size.

    >>> run = resolve(
    ...     Request(
    ...         task="digits",
    ...         strategy="allreduce",
    ...         workers=3,
    ...         settings=["batch_size=8", "batch_shares=1/1/0.5"],
    ...     )
    ... )
    >>> batch_sizes(run, task_of(run))
    (10, 9, 5)
    """
    if not config.batch_shares:
        return None
    size = task.options.batch_size
    # What AdaptiveSGD does after each mega-batch, once.
    return Proportional(base=size).resize(
        [size] * config.workers, config.batch_shares, [Bounds()] * config.workers
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the user asked for; None and empty where nothing was said."""

    task: str | None = None
    strategy: str | None = None
    workers: int | None = None
    settings: Sequence[str] = ()
    epochs: int | None = None
    steps: int | None = None
    seed: int | None = None
    checkpoint_every: int | None = None
    eval_every: int | None = None
    cluster: Cluster | None = None
    emulation: EmulationMode = "auto"
    log_to: Sequence[str] = ()


def resolve(request: Request) -> RunConfig:
    """Fill in defaults and check everything that can be checked without training.

    Raises:
        ConfigError: anything that cannot be run as asked.
    """
    if request.task is None or request.strategy is None:
        missing = "--task" if request.task is None else "--strategy"
        raise ConfigError(
            f"{missing} is missing; give one (offbeat tasks and offbeat strategies list them), or"
            " --resume DIR"
        )
    _check_numbers(request)
    shares, settings = split_shares(request.settings)
    for_task, for_strategy = route(request.task, request.strategy, settings)
    task = build_task(request.task, for_task)
    workers = request.workers or (
        request.cluster.workers if request.cluster is not None else _DEFAULT_WORKERS
    )
    known = {option.name for option in strategy_options(request.strategy)}
    # Such a strategy clips before it selects.
    if "clip_norm" in known and task.max_grad_norm is not None:
        for_strategy.setdefault("clip_norm", str(task.max_grad_norm))
    if strategy_type(request.strategy).shares_samples and task.deals_unequally:
        raise ConfigError(
            f"strategy {request.strategy!r} lets workers claim samples, so skew= would change"
            " nothing; leave skew out, or this strategy"
        )
    config = RunConfig(
        task=request.task,
        task_options=task.options.model_dump(mode="json"),
        strategy=request.strategy,
        strategy_options=strategy_values(build_strategy(request.strategy, for_strategy)),
        workers=workers,
        epochs=(
            task.default_epochs
            if request.epochs is None and request.steps is None
            else request.epochs
        ),
        steps=request.steps,
        seed=request.seed or 0,
        checkpoint_every=request.checkpoint_every or _DEFAULT_CHECKPOINT_EVERY,
        eval_every=request.eval_every,
        cluster=as_json(request.cluster),
        emulation=request.emulation,
        log_to=list(request.log_to),
        batch_shares=shares,
    )
    _check_together(config, task)
    return config


def as_json(cluster: Cluster | None) -> dict[str, object] | None:
    """A cluster as it stands in a `RunConfig`."""
    return None if cluster is None else cluster.model_dump(mode="json")


def resolve_resume(
    stored: RunConfig, request: Request, *, steps_done: int, epochs_done: int
) -> RunConfig:
    """The stored run with what may be changed: `workers`, more `epochs` or `steps`, `emulation` and
    `log_to`.

    Args:
        stored: as read from the record.
        request: what the user said besides `--resume`.
        steps_done: optimizer steps of the checkpoint.
        epochs_done: complete passes over the data.

    Raises:
        ConfigError: the request contradicts the record, or there is nothing left to do.
    """
    _check_numbers(request)
    recipe = recipe_of(stored)
    if isinstance(recipe, Native) and not recipe.resumable:
        raise ConfigError(
            f"{recipe.name} keeps state that torch does not let anybody save; start a new run with"
            " --out"
        )
    cluster = cluster_of(stored)
    for name, asked, kept in (
        *((name, getattr(request, name), getattr(stored, name)) for name in _KEPT),
        ("cluster", request.cluster, cluster),
    ):
        if asked is not None and asked != kept:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{flag} {asked} contradicts the record, which has {kept}; leave it out, or start a"
                " new run with --out"
            )
    _check_settings(stored, request.settings)
    workers = request.workers or stored.workers
    config = replace(
        stored,
        workers=workers,
        cluster=None if cluster is None else as_json(cluster.left_with(workers)),
        epochs=request.epochs or (None if request.steps else stored.epochs),
        steps=request.steps or (None if request.epochs else stored.steps),
        emulation=stored.emulation if request.emulation == "auto" else request.emulation,
        log_to=list(request.log_to) or stored.log_to,
    )
    done, target, unit = (
        (steps_done, config.steps, "steps")
        if config.steps is not None
        else (epochs_done, config.epochs, "epochs")
    )
    if target is not None and target <= done:
        raise ConfigError(
            f"the run has done {done} {unit} and is to do {target}; raise --{unit} to go on"
        )
    _check_together(config, task_of(config))
    return config


MAX_SEED = 2**32 - 1
"""Each rank makes its own generators' seeds out of it, and those have 64 bits."""


def _check_together(config: RunConfig, task: Task) -> None:
    """Refuse what each part alone allows."""
    steps_to_do(config, task)
    model = task.build_model(config.seed)
    recipe = recipe_of(config)
    recipe.check(model, task.optimizer(model))
    _check_loggers(config.log_to, recipe)
    recipe.check_world(config.workers)
    if config.batch_shares:
        _check_shares(config, task, recipe)
    mega_batch = recipe.samples_between_merges(1)
    least = _LEAST_STEPS_A_MERGE * config.workers
    if mega_batch is not None and mega_batch < least:
        raise ConfigError(
            f"mega_batch is {mega_batch}, but {config.workers} workers need {least} batches or more"
            f" between merges for {_LEAST_STEPS_A_MERGE} each; raise mega_batch"
        )


def _check_shares(config: RunConfig, task: Task, recipe: Strategy) -> None:
    """Refuse unequal batches where a step would not be that of all their samples together."""
    if not recipe.weighs_samples:
        why = (
            "lets workers share samples out by themselves"
            if recipe.shares_samples
            else "averages over workers, not over samples"
        )
        raise ConfigError(
            f"strategy {config.strategy!r} {why}, so it goes without {BATCH_SHARES}; choose one"
            " that averages gradients, such as allreduce"
        )
    if len(config.batch_shares) != config.workers:
        raise ConfigError(
            f"{BATCH_SHARES} has {len(config.batch_shares)} numbers for {config.workers} workers;"
            " give one for each"
        )
    if task.deals_unequally:
        raise ConfigError(
            f"skew= deals all workers equally many samples, so it goes without {BATCH_SHARES};"
            " leave one of them out"
        )


def _check_loggers(names: Sequence[str], recipe: Strategy) -> None:
    """Refuse loggers that do not exist or are not installed, and those that would hear nothing."""
    named_loggers(names, Path())
    if names and isinstance(recipe, Native):
        raise ConfigError(
            f"--log-to tells what a session of offbeat measures, and {recipe.name} is PyTorch's own"
            " exchange; leave it out, or choose allreduce"
        )


def _check_numbers(request: Request) -> None:
    for name, least in (
        ("workers", 1),
        ("epochs", 1),
        ("steps", 1),
        ("seed", 0),
        ("checkpoint_every", 1),
        ("eval_every", 1),
    ):
        value = getattr(request, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; allowed is {least} or more")
    if request.seed is not None and request.seed > MAX_SEED:
        raise ConfigError(f"--seed is {request.seed}; allowed is 0 to {MAX_SEED}")
    if request.epochs is not None and request.steps is not None:
        raise ConfigError(
            f"got --epochs {request.epochs} and --steps {request.steps}; give one of them"
        )


def _check_settings(stored: RunConfig, settings: Sequence[str]) -> None:
    """Refuse a `--set` that differs from what the record has."""
    shares, settings = split_shares(settings)
    if shares and shares != list(stored.batch_shares):
        raise ConfigError(
            f"--set {BATCH_SHARES} contradicts the record, which has"
            f" {stored.batch_shares or 'equal batches'}; leave it out, or start a new run"
        )
    for_task, for_strategy = route(stored.task, stored.strategy, settings)
    asked_task = build_task(stored.task, {**stored.task_options, **for_task}).options.model_dump(
        mode="json"
    )
    asked_strategy = strategy_values(
        build_strategy(stored.strategy, {**stored.strategy_options, **for_strategy})
    )
    for key in [*for_task, *for_strategy]:
        asked = (asked_task if key in for_task else asked_strategy)[key]
        kept = {**stored.task_options, **stored.strategy_options}[key]
        if asked != kept:
            raise ConfigError(
                f"--set {key}={asked} contradicts the record, which has {kept}; leave it out, or"
                " start a new run"
            )
