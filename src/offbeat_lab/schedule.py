"""Where a run is and which batch comes next: the part of a training loop that has to survive a
restart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from offbeat.codec.json_objects import build
from offbeat.errors import MALFORMED, CheckpointError
from offbeat.megabatch.loader import num_mega_batches
from offbeat.run.config import RunConfig
from offbeat.run.step_recorder import Position
from offbeat_lab.config import batch_sizes
from offbeat_lab.tasks import Batch, Task


def position_from_json(values: object) -> Position:
    """The position in a checkpoint. Raises `CheckpointError`."""
    try:
        return build(Position, values)
    except MALFORMED:
        raise CheckpointError(
            f"the checkpoint's position is {values!r}; was it written by offbeat train?"
        ) from None


class ClaimedSchedule:
    """How far a run is whose ranks claim samples: it moves on at merges.

    A step is as many samples as all ranks take in one where each has batches of its own, so that
    runs of any kind are equally long after equally many steps. A run that is to do a number of
    steps ends with the first merge that reaches it.

    Args:
        config: of the run.
        position: where it begins.
        num_samples: in a pass over the data.
        mega_batch: samples between merges, nearly.
        samples_per_step: number of ranks times the base batch size.
    """

    def __init__(
        self,
        config: RunConfig,
        position: Position,
        *,
        num_samples: int,
        mega_batch: int,
        samples_per_step: int,
    ) -> None:
        self.position = position
        self._config = config
        self._num_samples = num_samples
        self._merges_per_epoch = num_mega_batches(num_samples, mega_batch)
        self._samples_per_step = samples_per_step
        # With another number of workers steps have another length, and those done were what they
        # were.
        self._others = position.step - self._steps_in(position.epoch, position.num_samples)

    @property
    def target(self) -> int:
        """Steps done when the run will be finished."""
        if self._config.steps is None:
            assert self._config.epochs is not None
            return self._others + self._steps_in(self._config.epochs, 0)
        epochs, samples = divmod(
            (self._config.steps - self._others) * self._samples_per_step, self._num_samples
        )
        merges = -(-samples * self._merges_per_epoch // self._num_samples)
        return self._others + self._steps_in(
            epochs, self._num_samples * merges // self._merges_per_epoch
        )

    @property
    def step_of_next_merge(self) -> int:
        """Steps done when the mega-batch under way is merged."""
        merges = -(-self.position.num_samples * self._merges_per_epoch // self._num_samples) + 1
        samples = self._num_samples * merges // self._merges_per_epoch
        return self._others + self._steps_in(self.position.epoch, samples)

    @property
    def complete(self) -> bool:
        return self.position.step >= self.target

    def progress_at(self, epoch: int, num_samples: int) -> float:
        """The share of the run that is done where the step of sample number `num_samples` of pass
        `epoch` begins, and half of that step.
        """
        # Of the last samples there may be too few for a step of their own.
        step = min(self._others + self._steps_in(epoch, num_samples), self.target - 1)
        return (step + 0.5) / self.target

    def merged(self, epoch: int, num_samples: int) -> None:
        """All samples up to number `num_samples` of pass `epoch` are in the model now."""
        self.position.epoch, self.position.num_samples = epoch, num_samples
        self.position.step = self._others + self._steps_in(epoch, num_samples)

    def _steps_in(self, epoch: int, num_samples: int) -> int:
        return (epoch * self._num_samples + num_samples) // self._samples_per_step


class BatchSchedule:
    """The batches one rank still has to train on; `position` is where it stands before the next
    one.

    Args:
        config: of the run.
        task: gives the batches.
        position: where the run begins.
        rank, world_size: this rank's place.
    """

    def __init__(
        self, config: RunConfig, task: Task, position: Position, *, rank: int, world_size: int
    ) -> None:
        self.position = position
        self._config = config
        self._task = task
        self._rank = rank
        self._world_size = world_size
        self._samples_per_step = world_size * task.options.batch_size
        self._batch_sizes = batch_sizes(config, task)
        # with another number of workers, the rest of a pass may be less than a step
        self._roll_over()

    @property
    def target(self) -> int:
        """Steps done when the run will be finished."""
        if self._config.steps is not None:
            return self._config.steps
        assert self._config.epochs is not None
        left = (self._config.epochs - self.position.epoch) * self._task.steps_per_epoch(
            self._world_size
        )
        return self.position.step + left - self._steps_into_epoch()

    def batches(self, should_stop: Callable[[int], bool]) -> Iterator[Batch]:
        """Batches until the run is complete, or `should_stop(steps done)` says so. Call `advance`
        after each.
        """
        while self.position.step < self.target:
            for batch in self._task.batches(
                seed=self._config.seed,
                epoch=self.position.epoch,
                rank=self._rank,
                world_size=self._world_size,
                start_step=self._steps_into_epoch(),
                batch_sizes=self._batch_sizes,
            ):
                if self.position.step >= self.target or should_stop(self.position.step):
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
        # Rounded up: with another number of workers, the pass may have been left in the middle of a
        # step.
        return -(-self.position.num_samples // self._samples_per_step)
