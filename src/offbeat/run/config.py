"""What a run is to do, complete: what a record's `config.json` holds and a worker is given."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

from offbeat.codec.described_options import OneOrMore, Range
from offbeat.codec.json_objects import Count, build
from offbeat.errors import ConfigError

EmulationMode: TypeAlias = Literal["auto", "namespaces", "delaying", "none"]
"""How a cluster is imitated."""

MAX_WORKERS: Final = 65_536


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptCommand:
    """A user's script, as Python would be told to run it.

    Attributes:
        path: of its file; the name of a module if `as_module`.
        arguments: its own.
        as_module: whether it is run as by `python -m`.
        metric: which of the values that it logs is the metric; None: chosen by name.
    """

    path: str
    arguments: Sequence[str] = field(default_factory=list)
    as_module: bool = False
    metric: str | None = None

    @property
    def name(self) -> str:
        """What the run is called."""
        return self.path.rpartition(".")[2] if self.as_module else Path(self.path).stem


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """A resolved run: every option has a value. What only `offbeat_lab` knows of it, such as the
    options of its tasks, stands here as JSON.

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
        cluster: the description of what is emulated; None: this machine as it is.
        emulation: how, see `offbeat_lab.emulation.emulate`.
        script: what runs in the place of a task; None for a task.
        log_to: who hears metrics while training runs: "tensorboard", "wandb", "mlflow",
            "opentelemetry".
        batch_shares: each worker's part of a step's samples, in proportion; empty: all the same.
    """

    task: str
    task_options: Mapping[str, object]
    strategy: str
    strategy_options: Mapping[str, object]
    workers: Annotated[
        int, Range(f"from 1 to {MAX_WORKERS}", range(1, MAX_WORKERS + 1).__contains__)
    ]
    epochs: OneOrMore | None = None
    steps: OneOrMore | None = None
    seed: Count = 0
    checkpoint_every: OneOrMore | None = None
    eval_every: OneOrMore | None = None
    cluster: Mapping[str, object] | None = None
    emulation: EmulationMode = "auto"
    script: ScriptCommand | None = None
    log_to: Sequence[str] = field(default_factory=list)
    batch_shares: Sequence[float] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RunConfig:
        """Inverse of `to_json`. Raises `TypeError`, `ValueError`."""
        return build(cls, json.loads(text))


def script_run(
    script: ScriptCommand,
    strategy: str,
    options: Mapping[str, object],
    *,
    workers: int,
    steps: int | None = None,
    log_to: Sequence[str] = (),
) -> RunConfig:
    """The run of a user's script.

    Args:
        script: what runs.
        strategy, options: how workers exchange; checked before.
        workers: number of ranks, >= 1.
        steps: after which the script is stopped; None: it stops by itself.
        log_to: as in `RunConfig`.

    Raises:
        ConfigError: a number that cannot be, or no such logger.
    """
    for name, value in (("workers", workers), ("steps", steps)):
        if value is not None and value < 1:
            raise ConfigError(f"--{name} is {value}; allowed is 1 or more")
    if log_to:
        from offbeat.session.loggers import named_loggers  # which imports torch

        named_loggers(log_to, Path())
    return RunConfig(
        task=script.name,
        task_options={"arguments": shlex.join(script.arguments)} if script.arguments else {},
        strategy=strategy,
        strategy_options=options,
        workers=workers,
        steps=steps,
        script=script,
        log_to=list(log_to),
    )
