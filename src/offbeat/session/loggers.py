"""Metrics while training runs: to TensorBoard, Weights & Biases, MLflow, OpenTelemetry, or whatever
has these two methods.

    attach(..., loggers=[TensorBoardLogger("runs/tb")])

None of these is a dependency of offbeat.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from typing_extensions import override

from offbeat.callbacks.context import LOGGER
from offbeat.errors import ConfigError, nearest
from offbeat.session.metrics import SessionObserver

if TYPE_CHECKING:
    from offbeat.session.session import Session


EVERY: Final = 10
"""Steps between two looks at the session; what is said of steps is the mean over these."""


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
        self._run, self._is_own = None, False  # another session may follow


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
        self._mlflow, self._is_own = None, False


class OpenTelemetryLogger:
    """A gauge for each value, of the meter provider that the script or `opentelemetry-instrument`
    has set. That one says where they go, such as to a collector or to Prometheus, and what tells
    this process from others. `attach` takes rank 0's; to see live who waits, do on each other rank
    `session.observers.append(LiveMetrics(session, [OpenTelemetryLogger()]))`.
    """

    def __init__(self) -> None:
        _require("opentelemetry.metrics", "pip install opentelemetry-sdk")
        self._gauges: dict[str, Any] = {}

    def log(self, values: Mapping[str, float], step: int) -> None:
        meter = import_module("opentelemetry.metrics").get_meter("offbeat")
        for name, value in {**values, "offbeat/step": step}.items():
            dotted = name.replace("/", ".")  # as names of instruments are written
            if dotted not in self._gauges:
                self._gauges[dotted] = meter.create_gauge(dotted)
            self._gauges[dotted].set(value)

    def close(self) -> None:
        """The provider belongs to whoever has set it, who also ends it."""


_MAKERS: Final[Mapping[str, Callable[[Path], MetricsLogger]]] = {
    "tensorboard": lambda record: TensorBoardLogger(record / "tensorboard"),
    "wandb": lambda record: WandbLogger(name=record.name),
    "mlflow": lambda record: MLflowLogger(),
    "opentelemetry": lambda record: OpenTelemetryLogger(),
}


def named_loggers(names: Sequence[str], record: Path) -> list[MetricsLogger]:
    """The loggers that `--log-to` names: "tensorboard", "wandb", "mlflow" and "opentelemetry".

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
    try:
        found = find_spec(package)
    except ModuleNotFoundError:  # the package that it is in
        found = None
    # Runs of wandb leave a directory of its name, which Python takes for a package without a file.
    if found is None or found.origin is None:
        raise ConfigError(f"{package} is not installed; {command}")


class LiveMetrics(SessionObserver):
    """Tells `loggers` what the loop logs, at once, and every tenth step how `session` is doing:

    - `offbeat/step_s`, `offbeat/wait_s`, `offbeat/encode_s`: seconds of a step, of waiting for
      other ranks and of encoding in it;
    - `offbeat/bytes_sent`: by this rank in a step;
    - `offbeat/residual_norm`: norm of what this rank has not sent yet, with a sparse strategy;
    - `offbeat/entry_age`: steps that an entry of the gradient waits to be sent, a mean since
      `attach`;
    - `offbeat/stale_share`: share of stale contributions in averages, where nobody waits;
    - `offbeat/kl_scale`: by what `kl_clip` of K-FAC multiplied the last step;
    - `offbeat/skipped_steps`: so far;
    - `offbeat/loss`: where somebody tells it by `loss_seen`.

    A logger that raises is heard of once, and is told nothing more.
    """

    def __init__(
        self,
        session: Session,
        loggers: Sequence[MetricsLogger],
        *,
        steps_before: int = 0,
    ) -> None:
        """Begin.

        Args:
            session: that is looked at.
            loggers: that are told.
            steps_before: steps of the run that were done before this session began.
        """
        self._session = session
        self._loggers = list(loggers)
        self._num_steps = self._steps_before = steps_before
        self._losses: list[float] = []
        self._before = session.stats
        self._since_s = time.monotonic()

    @override
    def step_ended(self, num_steps: int) -> None:
        self._num_steps = self._steps_before + num_steps
        if num_steps - self._before.steps >= EVERY:
            self._tell(self._measured(), self._num_steps)

    def loss_seen(self, loss: float) -> None:
        """This rank's training loss was `loss` in a step."""
        self._losses.append(loss)

    @override
    def logged(self, values: Mapping[str, float]) -> None:
        self._tell(values, self._num_steps)

    @override
    def closed(self, error: BaseException | None) -> None:
        """Close the loggers: nothing more comes."""
        for logger in list(self._loggers):
            try:
                logger.close()
            except Exception as failure:  # noqa: BLE001 - whatever a user's object raises
                self._drop(logger, failure)

    def _measured(self) -> dict[str, float]:
        stats, before, now_s = self._session.stats, self._before, time.monotonic()
        steps = max(1, stats.steps - before.steps)
        values = {
            "step_s": (now_s - self._since_s) / steps,
            "wait_s": (stats.wait_s - before.wait_s) / steps,
            "encode_s": (stats.encode_s - before.encode_s) / steps,
            "bytes_sent": (stats.bytes_sent - before.bytes_sent) / steps,
            "skipped_steps": stats.skipped_steps,
            **self._session.gauges(),
        }
        if stats.mean_entry_age is not None:
            values["entry_age"] = stats.mean_entry_age
        if self._losses:
            values["loss"] = sum(self._losses) / len(self._losses)
            self._losses = []
        self._before, self._since_s = stats, time.monotonic()
        return {f"offbeat/{name}": value for name, value in values.items()}

    def _tell(self, values: Mapping[str, float], step: int) -> None:
        for logger in list(self._loggers):
            try:
                logger.log(values, step)
            except Exception as failure:  # noqa: BLE001 - training does not end for that
                self._drop(logger, failure)

    def _drop(self, logger: MetricsLogger, failure: Exception) -> None:
        self._loggers.remove(logger)
        LOGGER.warning("%s is told no more metrics: %s", type(logger).__name__, failure)
