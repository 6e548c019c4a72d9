"""The runs of a comparison, by turns.

    for each seed
        start the workers of every strategy, and let them wait
        until all have finished
            for each strategy in turn: let it train for a few seconds

A machine that drifts while this goes on slows all strategies down alike. Where the workers of all
strategies do not fit into memory together, as many as fit take turns, and the order is rotated from
seed to seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from offbeat.errors import OffbeatError
from offbeat.lab import records
from offbeat.lab.compare_plan import ALONE, ComparePlan
from offbeat.lab.config import RunConfig
from offbeat.lab.emulation import Emulation
from offbeat.lab.interrupts import Interrupts
from offbeat.lab.options import build_strategy, strategy_values
from offbeat.lab.progress import Listener, News, Progress
from offbeat.lab.supervisor import Crew

_POLL_S = 0.1
_FIRST_TURN_STEPS = 3
_ALONE_STEPS = 30


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

    def news(self, label: str, news: News) -> None:
        """One worker of `label` is gone, and the others go on; or it is back."""

    def failed(self, label: str, reason: str) -> None:
        """`label` is out."""


@dataclass(kw_only=True)
class _Entrant:
    """One run that takes turns."""

    label: str
    crew: Crew
    step_s: float = 0.0
    last_s: float = 0.0
    last_step: int = 0
    judged: bool = False


class Rounds:
    """Carries out the runs, seed by seed.

    Attributes:
        failures: by label, why it is out.
        alone: by seed, the run without exchange.
    """

    def __init__(
        self, directory: Path, plan: ComparePlan, emulation: Emulation, watcher: Watcher
    ) -> None:
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
            (
                contestant.label,
                self._directory / contestant.runs[place],
                config.model_copy(update={"seed": seed}),
            )
            for contestant, config in zip(plan.contestants, plan.configs, strict=True)
            if contestant.label not in self.failures
        ]
        first = place % len(runs) if runs else 0
        runs = runs[first:] + runs[:first]
        if plan.request.cluster.workers > 1:
            runs.append(
                (ALONE, self._directory / f"runs/{ALONE}-seed-{seed}", self._alone_config(seed))
            )
        while runs and not interrupted.count:
            self._run_together(runs[: plan.at_once], interrupted)
            runs = runs[plan.at_once :]
        path = self._directory / f"runs/{ALONE}-seed-{seed}"
        if ALONE not in self.failures and path.exists():
            self.alone[seed] = path

    def _alone_config(self, seed: int) -> RunConfig:
        strategy = build_strategy(ALONE, {})
        return self._plan.configs[0].model_copy(
            update={
                "strategy": ALONE,
                "strategy_options": strategy_values(strategy),
                "seed": seed,
                "steps": min(self._plan.steps, _ALONE_STEPS),
                "eval_every": None,
            }
        )

    def _run_together(
        self, runs: Sequence[tuple[str, Path, RunConfig]], interrupted: Interrupts
    ) -> None:
        with ExitStack() as stack:
            entrants: list[_Entrant] = []
            for label, path, config in runs:
                if interrupted.count:
                    break
                records.create(path, config)
                records.begin_attempt(path, config, start_step=0, emulation=self._emulation.report)
                crew = Crew(
                    path, config, self._emulation, turns=True, on_progress=self._listener(label)
                )
                entrants.append(_Entrant(label=label, crew=stack.enter_context(crew)))
                # One after the other, and nobody's turn before all are ready: some measure the
                # network while they start.
                while not crew.over and crew.paused_at is None:
                    self._poll([entrants[-1]], entrants, interrupted)
            while waiting := [entrant for entrant in entrants if not entrant.crew.over]:
                for entrant in waiting:
                    self._take_turn(entrant, entrants, interrupted)
            self._poll([], entrants, interrupted)

    def _take_turn(
        self, entrant: _Entrant, entrants: Sequence[_Entrant], interrupted: Interrupts
    ) -> None:
        crew = entrant.crew
        if (done := crew.paused_at) is not None:
            self._watcher.turn(entrant.label)
            turn_s = self._plan.request.turn_s
            crew.let_go(
                done
                + (max(1, round(turn_s / entrant.step_s)) if entrant.step_s else _FIRST_TURN_STEPS)
            )
        while not crew.over and crew.paused_at is None:
            self._poll([entrant], entrants, interrupted)
        if (paused_at := crew.paused_at) is not None and paused_at > entrant.last_step:
            entrant.step_s = (crew.seconds - entrant.last_s) / (paused_at - entrant.last_step)
            entrant.last_s, entrant.last_step = crew.seconds, paused_at

    def _poll(
        self, active: Sequence[_Entrant], entrants: Sequence[_Entrant], interrupted: Interrupts
    ) -> None:
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
                        records.add_to_summary(
                            entrant.crew.run_directory, entrant.crew.remarks, entrant.crew.losses
                        )
                except OffbeatError as error:
                    if not interrupted.count:
                        self.failures[entrant.label] = str(error)
                        self._watcher.failed(entrant.label, str(error))

    def _listener(self, label: str) -> Listener:
        def listen(report: Progress | News) -> None:
            if isinstance(report, News):
                self._watcher.news(label, report)
            else:
                self._watcher.progress(label, report)

        return listen
