"""Metrics while training runs: to TensorBoard, Weights & Biases, MLflow, or whatever has these two
methods.

    attach(..., loggers=[TensorBoardLogger("runs/tb")])

None of the three is a dependency of offbeat.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

from offbeat.errors import ConfigError, nearest


class MetricsLogger(Protocol):
    """Where metrics go while training runs."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Take down `values`, by name, of optimizer step `step`."""

    def close(self) -> None:
        """Training is over; nothing more comes."""


class TensorBoardLogger:
    """Event files for TensorBoard. Needs `offbeat[tensorboard]`.

    Args:
        directory: of the event files; made with the first of them.
    """

    def __init__(self, directory: str | Path) -> None:
        _require("tensorboard", "pip install offbeat[tensorboard]")
        self._directory = str(directory)
        self._writer: Any = None

    def log(self, values: Mapping[str, float], step: int) -> None:
        if self._writer is None:
            module = import_module("torch.utils.tensorboard")
            self._writer = module.SummaryWriter(self._directory)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbLogger:
    """A run of Weights & Biases: the one that the script has begun, else one of its own, which it
    also ends.

    Args:
        settings: for `wandb.init` where it begins the run, such as `project="mine"`.
    """

    def __init__(self, **settings: Any) -> None:
        _require("wandb", "pip install wandb")
        self._settings = settings
        self._run: Any = None
        self._is_own = False

    def log(self, values: Mapping[str, float], step: int) -> None:
        if self._run is None:
            wandb = import_module("wandb")
            self._is_own = wandb.run is None
            self._run = wandb.init(**self._settings) if self._is_own else wandb.run
        # The script may log with steps of its own, and those of one run must not decrease.
        self._run.log({**values, "offbeat/step": step})

    def close(self) -> None:
        if self._is_own:
            self._run.finish()


class MLflowLogger:
    """The active run of MLflow, else one of its own, which it also ends."""

    def __init__(self) -> None:
        _require("mlflow", "pip install mlflow")
        self._mlflow: Any = None
        self._is_own = False

    def log(self, values: Mapping[str, float], step: int) -> None:
        if self._mlflow is None:
            self._mlflow = import_module("mlflow")
            self._is_own = self._mlflow.active_run() is None
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        if self._is_own:
            self._mlflow.end_run()


_MAKERS: Final[Mapping[str, Callable[[Path], MetricsLogger]]] = {
    "tensorboard": lambda record: TensorBoardLogger(record / "tensorboard"),
    "wandb": lambda record: WandbLogger(name=record.name),
    "mlflow": lambda record: MLflowLogger(),
}


def named_loggers(names: Sequence[str], record: Path) -> list[MetricsLogger]:
    """The loggers that `--log-to` names: "tensorboard", "wandb" and "mlflow".

    Args:
        names: of them.
        record: directory of the run's record, where TensorBoard's files go.

    Raises:
        ConfigError: one has another name, or its package is not installed.
    """
    for name in names:
        if name not in _MAKERS:
            raise ConfigError(
                f"--log-to is {name!r}; allowed are {', '.join(_MAKERS)}{nearest(name, _MAKERS)}"
            )
    return [_MAKERS[name](record) for name in names]


def _require(package: str, command: str) -> None:
    """Before any communication, on every rank alike."""
    found = find_spec(package)
    # Runs of wandb leave a directory of its name, which Python takes for a package without a file.
    if found is None or found.origin is None:
        raise ConfigError(f"{package} is not installed; {command}")
