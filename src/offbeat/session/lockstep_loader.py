"""Batches of any map-style dataset for ranks that keep step: of any sizes, the same number on every
rank, each sample once.

With b_i samples asked for on rank i, an epoch of N samples has ceil(N / sum b) steps of nearly
equal sizes, so that no step is a remnant; a step's samples are shared out in proportion to b_i, at
least one to each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar

from typing_extensions import override

from offbeat.callbacks.callback import Callback
from offbeat.errors import CheckpointError, ConfigError
from offbeat.megabatch.claims import SampleRange
from offbeat.megabatch.fetching import Fetcher
from offbeat.megabatch.loader import order_of


def num_steps(num_samples: int, batch_sizes: Sequence[int]) -> int:
    """How many steps an epoch has: samples over samples of a step, rounded up; rounded down where a
    step would otherwise have fewer samples than there are ranks.

    Raises:
        ConfigError: there are fewer samples than ranks.
    """
    if num_samples < len(batch_sizes):
        raise ConfigError(
            f"{num_samples} samples cannot be shared by {len(batch_sizes)} ranks in step; each"
            " needs one, so use fewer ranks"
        )
    rounded_up = -(-num_samples // sum(batch_sizes))
    return (
        rounded_up
        if num_samples // rounded_up >= len(batch_sizes)
        else num_samples // len(batch_sizes)
    )


def spans_of(num_samples: int, batch_sizes: Sequence[int], step: int) -> tuple[SampleRange, ...]:
    """Where each rank's samples of a step lie in the epoch's order.

    >>> spans_of(20, [1, 9], 1)
    (SampleRange(begin=10, end=11), SampleRange(begin=11, end=20))
    """
    count = num_steps(num_samples, batch_sizes)
    begin, end = num_samples * step // count, num_samples * (step + 1) // count
    beyond_one = end - begin - len(batch_sizes)
    wanted = [size - 1 for size in batch_sizes] if max(batch_sizes) > 1 else [1] * len(batch_sizes)
    passed = [0, *accumulate(wanted)]
    cuts = [begin + rank + beyond_one * before // passed[-1] for rank, before in enumerate(passed)]
    return tuple(map(SampleRange, cuts, cuts[1:]))


class LockstepLoader(Callback):
    """Iterating over it yields this rank's batches of an epoch, as many as every other rank's. It
    is made by `Session.loader`.

    A loop that stopped in the middle of an epoch goes on there when it iterates again.

    Args:
        fetcher: reads batches of the dataset, which is the same on all ranks.
        batch_sizes: asked for, by rank, each >= 1.
        claimed: is told how many samples the next batch has.
        seed: of the order, >= 0.
        rank: this rank.
        shuffles: whether the order is drawn anew for each epoch; else it is the dataset's.

    Attributes:
        epoch: number of completed passes over the data.
        step: number of batches taken from the pass under way.
    """

    state_key: ClassVar[str] = "lockstep_loader"

    def __init__(
        self,
        fetcher: Fetcher,
        *,
        batch_sizes: Sequence[int],
        claimed: Callable[[int], None],
        seed: int,
        rank: int,
        shuffles: bool = True,
    ) -> None:
        self.epoch = self.step = 0
        self._fetcher, self._num_samples = fetcher, fetcher.num_samples
        self._batch_sizes, self._claimed = tuple(batch_sizes), claimed
        self._seed, self._rank, self._shuffles = seed, rank, shuffles
        self._num_steps = num_steps(self._num_samples, batch_sizes)
        self._batches: Iterator[Any] = iter(())

    def __len__(self) -> int:
        """Steps in an epoch."""
        return self._num_steps

    def __iter__(self) -> Iterator[Any]:
        self._batches = self._fetcher.batches(self._samples(self.step), epoch=self.epoch)
        while self.step < self._num_steps:
            # A batch that cannot be read counts as taken, so that ranks stay in step.
            span, self.step = self._span(self.step), self.step + 1
            self._claimed(span.end - span.begin)
            yield next(self._batches)
        self.epoch, self.step = self.epoch + 1, 0
        self._batches = iter(())

    def _samples(self, step: int) -> Iterator[list[int]]:
        """This rank's samples of the steps from `step` on, by number."""
        order = order_of(
            self._num_samples, seed=self._seed, epoch=self.epoch, shuffles=self._shuffles
        )
        for number in range(step, self._num_steps):
            span = self._span(number)
            yield order[span.begin : span.end].tolist()

    def _span(self, step: int) -> SampleRange:
        return spans_of(self._num_samples, self._batch_sizes, step)[self._rank]

    @override
    def state_dict(self) -> dict[str, dict[str, Any]]:
        return {"replicated": {"epoch": self.epoch, "step": self.step}}

    @override
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        saved = state["replicated"]
        if "step" not in saved:
            raise CheckpointError("the state lacks 'step'; it was saved by another loader")
        self.epoch, self.step = int(saved["epoch"]), int(saved["step"])

    @override
    def close(self) -> None:
        self._batches = iter(())
        self._fetcher.close()
