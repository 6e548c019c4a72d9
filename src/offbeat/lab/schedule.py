"""Where a run is and which batch comes next: the part of a training loop that has to survive a restart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from offbeat.checkpoint import Json
from offbeat.errors import CheckpointError
from offbeat.lab.config import RunConfig
from offbeat.lab.tasks import Batch, Task


@dataclass(kw_only=True, slots=True)
class Position:
    """How far a run is, the same on every rank.

    Attributes:
        step: optimizer steps done.
        epoch: passes over the data completed.
        num_samples: samples that all ranks together have taken from the pass under way.
    """

    step: int = 0
    epoch: int = 0
    num_samples: int = 0

    def to_json(self) -> dict[str, Json]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: object) -> Position:
        """Inverse of `to_json`. Raises `CheckpointError`."""
        try:
            return cls(**values)  # type: ignore[arg-type]
        except TypeError:
            raise CheckpointError(f"the checkpoint's position is {values!r}; was it written by offbeat train?") from None


class Schedule:
    """The batches one rank still has to train on; `position` is where it stands before the next one."""

    def __init__(self, config: RunConfig, task: Task, position: Position, *, rank: int, world_size: int) -> None:
        self.position = position
        self._config = config
        self._task = task
        self._rank = rank
        self._world_size = world_size
        self._samples_per_step = world_size * task.options.batch_size
        self._roll_over()  # with another number of workers, the rest of a pass may be less than a step

    @property
    def target(self) -> int:
        """Steps done when the run will be finished."""
        if self._config.steps is not None:
            return self._config.steps
        assert self._config.epochs is not None
        left = (self._config.epochs - self.position.epoch) * self._task.steps_per_epoch(self._world_size)
        return self.position.step + left - self._steps_into_epoch()

    def batches(self, should_stop: Callable[[int], bool]) -> Iterator[Batch]:
        """Batches until the run is complete, or `should_stop(steps done)` says so. Call `advance` after each."""
        while not self._complete():
            for batch in self._task.batches(
                seed=self._config.seed,
                epoch=self.position.epoch,
                rank=self._rank,
                world_size=self._world_size,
                start_step=self._steps_into_epoch(),
            ):
                if self._complete() or should_stop(self.position.step):
                    return
                yield batch

    def advance(self) -> None:
        """Count the step just done."""
        self.position.step += 1
        self.position.num_samples += self._samples_per_step
        self._roll_over()

    def _roll_over(self) -> None:
        if self._steps_into_epoch() >= self._task.steps_per_epoch(self._world_size):
            self.position.epoch += 1
            self.position.num_samples = 0

    def _steps_into_epoch(self) -> int:
        # Rounded up: with another number of workers, the pass may have been left in the middle of a step.
        return -(-self.position.num_samples // self._samples_per_step)

    def _complete(self) -> bool:
        if self._config.steps is not None:
            return self.position.step >= self._config.steps
        return self.position.epoch >= (self._config.epochs or 0)
