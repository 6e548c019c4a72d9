"""What a run is to do, complete and checked: this is what a record's `config.json` holds and a
worker is given.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from offbeat.errors import ConfigError
from offbeat.megabatch.batch_sizes import Bounds, Proportional
from offbeat.session.loggers import named_loggers
from offbeat.strategies.base import Strategy
from offbeat_lab.cluster import Cluster
from offbeat_lab.cluster.model import MAX_WORKERS
from offbeat_lab.emulation import Mode as EmulationMode
from offbeat_lab.native import Native
from offbeat_lab.options import (
    BATCH_SHARES,
    Recipe,
    build_strategy,
    route,
    split_shares,
    strategy_options,
    strategy_type,
    strategy_values,
)
from offbeat_lab.tasks import Task, build_task

_DEFAULT_WORKERS = 4
_DEFAULT_CHECKPOINT_EVERY = 100
_LEAST_STEPS_A_MERGE = 2
"""So that a merge always comes at a later step than the one before."""


class ScriptCommand(BaseModel):
    """A user's script, as Python would be told to run it.

    Attributes:
        path: of its file; the name of a module if `as_module`.
        arguments: its own.
        as_module: whether it is run as by `python -m`.
        metric: which of the values that it logs is the metric; None: chosen by name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    arguments: list[str] = []
    as_module: bool = False
    metric: str | None = None

    @property
    def name(self) -> str:
        """What the run is called."""
        return self.path.rpartition(".")[2] if self.as_module else Path(self.path).stem


class RunConfig(BaseModel):
    """A resolved run: every option has a value.

    Attributes:
        task, task_options: what is trained; where it is a script, its name and its arguments.
        strategy, strategy_options: how workers exchange.
        workers: number of processes.
        epochs, steps: when to stop; exactly one of them is a number, but for a script, which knows
            by itself when to stop, or is stopped after `steps`.
        seed: of the initial parameters and of the order of samples.
        checkpoint_every: steps between checkpoints, and there is one at the end in any case; None:
            none at all.
        eval_every: steps between measurements of the metric; None: only at the end.
        cluster: what is emulated; None: this machine as it is.
        emulation: how, see `offbeat_lab.emulation.emulate`.
        script: what runs in the place of a task; None for a task.
        log_to: who hears metrics while training runs: "tensorboard", "wandb", "mlflow".
        batch_shares: each worker's part of a step's samples, in proportion; empty: all the same.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    task_options: dict[str, JsonValue]
    strategy: str
    strategy_options: dict[str, JsonValue]
    workers: int = Field(ge=1, le=MAX_WORKERS)
    epochs: int | None = Field(ge=1)
    steps: int | None = Field(ge=1)
    seed: int = Field(ge=0)
    checkpoint_every: int | None = Field(ge=1)
    eval_every: int | None = Field(None, ge=1)
    cluster: Cluster | None = None
    emulation: EmulationMode = "auto"
    script: ScriptCommand | None = None
    log_to: list[str] = []
    batch_shares: list[float] = []

    def build_task(self) -> Task:
        return build_task(self.task, self.task_options)

    def build_strategy(self) -> Recipe:
        return build_strategy(self.strategy, self.strategy_options)

    def steps_to_do(self, task: Task) -> int:
        """Optimizer steps of an uninterrupted run. Raises `ConfigError` when a worker does not get
        one batch an epoch.
        """
        steps_per_epoch = task.steps_per_epoch(self.workers)
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return self.epochs * steps_per_epoch

    def batch_sizes(self, task: Task) -> tuple[int, ...] | None:
        """How many samples each worker has in a step, where these numbers differ. They sum to what
        all workers have with batches of the task's size.

        >>> from offbeat_lab.tasks import build_task
        >>> run = resolve(
        ...     Request(
        ...         task="digits",
        ...         strategy="allreduce",
        ...         workers=3,
        ...         settings=["batch_size=8", "batch_shares=1/1/0.5"],
        ...     )
        ... )
        >>> run.batch_sizes(run.build_task())
        (10, 9, 5)
        """
        if not self.batch_shares:
            return None
        size = task.options.batch_size
        # What AdaptiveSGD does after each mega-batch, once.
        return Proportional(base=size).resize(
            [size] * self.workers, self.batch_shares, [Bounds()] * self.workers
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
    if "warmup" in for_strategy and "steps_per_epoch" in known:
        # It is counted in epochs, and only the task knows how long they are.
        for_strategy.setdefault("steps_per_epoch", str(task.steps_per_epoch(workers)))
    if (
        "clip_norm" in known and task.max_grad_norm is not None
    ):  # such a strategy clips before it selects
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
        cluster=request.cluster,
        emulation=request.emulation,
        log_to=list(request.log_to),
        batch_shares=shares,
    )
    _check_together(config, task)
    return config


def resolve_script(
    script: ScriptCommand,
    strategy: str,
    options: Mapping[str, str],
    *,
    workers: int,
    steps: int | None = None,
    cluster: Cluster | None = None,
    emulation: EmulationMode = "auto",
    log_to: Sequence[str] = (),
) -> RunConfig:
    """The run of a user's script.

    Args:
        script: what runs.
        strategy, options: how workers exchange.
        workers: number of ranks, >= 1.
        steps: after which the script is stopped; None: it stops by itself.
        cluster: what is emulated; None: this machine as it is.
        emulation: how.
        log_to: as in `RunConfig`.

    Raises:
        ConfigError: no such strategy, option or logger, or a number that cannot be.
    """
    for name, value in (("workers", workers), ("steps", steps)):
        if value is not None and value < 1:
            raise ConfigError(f"--{name} is {value}; allowed is 1 or more")
    recipe = build_strategy(strategy, options)
    if isinstance(recipe, Strategy):
        recipe.check_world(workers)
    _check_loggers(log_to, recipe)
    return RunConfig(
        task=script.name,
        task_options={"arguments": shlex.join(script.arguments)} if script.arguments else {},
        strategy=strategy,
        strategy_options=strategy_values(recipe),
        workers=workers,
        epochs=None,
        steps=steps,
        seed=0,
        checkpoint_every=None,
        eval_every=None,
        cluster=cluster,
        emulation=emulation,
        script=script,
        log_to=list(log_to),
    )


def resolve_resume(
    stored: RunConfig, request: Request, *, steps_done: int, epochs_done: int
) -> RunConfig:
    """The stored run with what may be changed: `workers`, and more `epochs` or `steps`.

    Args:
        stored: as read from the record.
        request: what the user said besides `--resume`.
        steps_done: optimizer steps of the checkpoint.
        epochs_done: complete passes over the data.

    Raises:
        ConfigError: the request contradicts the record, or there is nothing left to do.
    """
    _check_numbers(request)
    recipe = stored.build_strategy()
    if isinstance(recipe, Native) and not recipe.resumable:
        raise ConfigError(
            f"{recipe.name} keeps state that torch does not let anybody save; start a new run with"
            " --out"
        )
    for name in ("task", "strategy", "seed", "checkpoint_every", "eval_every", "cluster"):
        asked, kept = getattr(request, name), getattr(stored, name)
        if asked is not None and asked != kept:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{flag} {asked} contradicts the record, which has {kept}; leave it out, or start a"
                " new run with --out"
            )
    _check_settings(stored, request.settings)
    workers = request.workers or stored.workers
    config = stored.model_copy(
        update={
            "workers": workers,
            "cluster": None if stored.cluster is None else stored.cluster.left_with(workers),
            "epochs": request.epochs or (None if request.steps else stored.epochs),
            "steps": request.steps or (None if request.epochs else stored.steps),
            "log_to": list(request.log_to) or stored.log_to,
        }
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
    _check_together(config, config.build_task())
    return config


MAX_SEED = 2**32 - 1
"""Each rank makes its own generators' seeds out of it, and those have 64 bits."""


def _check_together(config: RunConfig, task: Task) -> None:
    """Refuse what each part alone allows."""
    config.steps_to_do(task)
    model = task.build_model(config.seed)
    recipe = config.build_strategy()
    recipe.check(model, task.optimizer(model))
    _check_loggers(config.log_to, recipe)
    if isinstance(recipe, Strategy):
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


def _check_shares(config: RunConfig, task: Task, recipe: Recipe) -> None:
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


def _check_loggers(names: Sequence[str], recipe: Recipe) -> None:
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
    if shares and shares != stored.batch_shares:
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
        asked, kept = (
            (asked_task if key in for_task else asked_strategy)[key],
            (stored.task_options | stored.strategy_options)[key],
        )
        if asked != kept:
            raise ConfigError(
                f"--set {key}={asked} contradicts the record, which has {kept}; leave it out, or"
                " start a new run"
            )
