"""A session's metrics on their way to loggers, while it trains."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from offbeat.session.loggers import MetricsLogger
from offbeat.session.metrics import SessionObserver

if TYPE_CHECKING:
    from offbeat.session.session import Session

EVERY: Final = 10
"""Steps between two looks at the session; what is said of steps is the mean over these."""

_log = logging.getLogger("offbeat")


class LiveMetrics(SessionObserver):
    """Tells `loggers` what the loop logs, at once, and every tenth step how `session` is doing:

    - `offbeat/step_s`, `offbeat/wait_s`, `offbeat/encode_s`: seconds of a step, of waiting for
      other ranks and of encoding in it;
    - `offbeat/bytes_sent`: by this rank in a step;
    - `offbeat/residual_norm`: norm of what this rank has not sent yet, with a sparse strategy;
    - `offbeat/entry_age`: steps that an entry of the gradient waits to be sent, a mean over the
    same steps;
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
        ends_with_session: bool = True,
    ) -> None:
        """Begin.

        Args:
            session: that is looked at.
            loggers: that are told.
            steps_before: steps of the run that were done before this session began.
            ends_with_session: whether loggers are closed with it; else `end` does so, since another
                session of the same run may follow.
        """
        self._session = session
        self._ends_with_session = ends_with_session
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
        if self._ends_with_session:
            self.end()

    def end(self) -> None:
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
        _log.warning("%s is told no more metrics: %s", type(logger).__name__, failure)
