"""How the samples of a batch are read: by the training process when it asks for them, or ahead of
time by worker processes.

A loader says which samples belong to its next batch; a fetcher reads them. The worker processes are
those of `torch.utils.data.DataLoader`, which asks for the next batch's samples while it reads this
one's: as many batches ahead as it may.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from offbeat.errors import ConfigError


class MapStyle(Protocol):
    """A dataset that has a length, and whose samples can be read by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def require_map_style(dataset: object) -> int:
    """The number of samples. Raises `ConfigError` for a dataset without a length, without samples
    by number, or without any samples.
    """
    # A stream of PyTorch's has a `__getitem__`, which raises, and may have a length.
    is_stream = isinstance(dataset, IterableDataset)
    if is_stream or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ConfigError(
            "the dataset must be of map style, with len(dataset) and dataset[i], got a"
            f" {type(dataset).__name__}; samples of a stream cannot be shared out by number: put"
            " them in a list, or feed your own loop"
        )
    if not (num_samples := len(dataset)):
        raise ConfigError("the dataset is empty; is this the right split?")
    return num_samples


class Fetcher(ABC):
    """Reads batches of one dataset.

    Attributes:
        num_samples: of the dataset.
        batches_ahead: how many batches are read, or wait to be taken, while the training process
            computes with the one before them; 0: it reads each batch itself.
        dataset: itself; None: there is none.
        spare_processes: how many worker processes that the user has asked for are not used.
    """

    dataset: object = None
    num_samples: int
    batches_ahead: int
    spare_processes: int = 0

    @abstractmethod
    def batches(self, numbers: Iterable[list[int]], *, epoch: int) -> Iterator[Any]:
        """One batch for each list of samples' numbers, in their order.

        Each list is asked for as late as `batches_ahead` permits. Only the newest iterator may be
        used. What reading raises takes the place of its batch, and the iterator goes on behind it.

        Args:
            numbers: of the samples of each batch.
            epoch: to which they belong.
        """

    def epoch_ended(self) -> None:  # noqa: B027 - as `close`
        """End worker processes that serve a single epoch."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """End worker processes."""


class ReadAhead(Fetcher):
    """Reads batches as a `DataLoader` does, with its worker processes, its pinned
    memory and whatever else it was given, except for its own division into batches.

    Worker processes draw random numbers from a generator of their own unless the `DataLoader` has
    one. So the training process draws the same numbers as without worker processes, and those of
    each rank, and of each loader of a session, draw others.

    Args:
        loader: its dataset is of map style, with at least one sample.
        num_processes: how many worker processes read; 0: the training process does.
        batches_each: how many batches each of them has at a time, >= 1.
        seed: of their random numbers, with the rank, the epoch and `number`.
        rank: this rank.
        number: how many loaders in step the session has already.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        num_processes: int,
        batches_each: int,
        seed: int,
        rank: int,
        number: int = 0,
    ) -> None:
        self.dataset = loader.dataset
        self.num_samples = len(loader.dataset)  # type: ignore[arg-type]  # it is of map style
        self.batches_ahead = num_processes * batches_each
        self.spare_processes = loader.num_workers - num_processes
        self._loader, self._num_processes, self._batches_each = loader, num_processes, batches_each
        self._seed, self._rank, self._number = seed, rank, number
        self._reader: DataLoader[Any] | None = None
        self._numbers = _Numbers()
        self._epoch = -1

    @override
    def batches(self, numbers: Iterable[list[int]], *, epoch: int) -> Iterator[Any]:
        num_samples = len(self._loader.dataset)  # type: ignore[arg-type]  # as above
        if num_samples != self.num_samples:
            raise ConfigError(
                f"the dataset has {num_samples} samples, and had {self.num_samples} when its loader"
                " was made; the loader shares out those, so attach anew, and make another one"
            )
        if epoch != self._epoch:
            # Processes that begin with an epoch see what the dataset is by then.
            self.epoch_ended()
        if self._reader is None:
            self._reader = self._new_reader(epoch)
        self._epoch, self._numbers.lists = epoch, numbers
        return iter(self._reader)

    def _new_reader(self, epoch: int) -> DataLoader[Any]:
        given = self._loader
        generator = given.generator
        if generator is None:
            entropy = (self._seed, self._rank, epoch, self._number)
            state = np.random.SeedSequence(entropy).generate_state(1)
            generator = torch.Generator().manual_seed(int(state[0]))
        of_processes: dict[str, Any] = {}
        if self._num_processes:
            # Within an epoch the same processes serve one mega-batch after the other.
            of_processes = {
                "prefetch_factor": self._batches_each,
                "persistent_workers": True,
                "timeout": given.timeout,
                "worker_init_fn": given.worker_init_fn,
                "multiprocessing_context": given.multiprocessing_context,
            }
        return DataLoader(
            given.dataset,
            batch_sampler=self._numbers,
            num_workers=self._num_processes,
            collate_fn=given.collate_fn,
            pin_memory=given.pin_memory,
            generator=generator,
            **of_processes,
        )

    @override
    def epoch_ended(self) -> None:
        if not self._loader.persistent_workers:
            self.close()

    @override
    def close(self) -> None:
        # A DataLoader ends its processes when nothing refers to it any more.
        self._reader, self._numbers.lists = None, ()


class _Numbers:
    """A batch sampler that is told anew what to yield, by a reader that lives longer."""

    lists: Iterable[list[int]] = ()

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.lists)
