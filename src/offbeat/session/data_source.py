"""What the user gives to `Session.loader`: a dataset, or a `torch.utils.data.DataLoader` whose
dataset is to be shared out and read as it would read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    default_collate,
)

from offbeat.errors import ConfigError
from offbeat.megabatch.fetching import (
    Fetcher,
    MapStyle,
    ReadAhead,
    ReadHere,
    require_map_style,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSource:
    """What a session's loader reads, and how.

    Attributes:
        dataset: whatever the user gave.
        collate: makes a batch of a list of samples; None: torch's `default_collate`.
        batch_size: of this rank; None where none was given.
        shuffles: whether the order is drawn anew for each epoch; else it is the dataset's.
        loader: the user's DataLoader; None where a dataset was given.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any] | None
    batch_size: int | None
    shuffles: bool = True
    loader: DataLoader[Any] | None = None

    def fetcher(self, *, claims_ahead: int | None, seed: int, rank: int) -> Fetcher:
        """Reads the batches.

        Args:
            claims_ahead: how many batches are read ahead, each by a worker process; None: as many
                as the DataLoader would.
            seed: of the random numbers of worker processes, with the rank.
            rank: this rank.
        """
        if self.loader is None:
            return ReadHere(self.dataset, collate=self.collate or default_collate)
        num_workers = self.loader.num_workers
        processes, each = num_workers, self.loader.prefetch_factor or 1
        if claims_ahead is not None:
            processes, each = min(claims_ahead, num_workers), 1
        return ReadAhead(
            self.loader, num_processes=processes, batches_each=each, seed=seed, rank=rank
        )


def data_source(
    data: MapStyle | DataLoader[Any],
    *,
    batch_size: int | None,
    collate: Callable[[list[Any]], Any] | None,
) -> DataSource:
    """What `data` says.

    Args:
        data: a dataset of map style, or a DataLoader.
        batch_size: given beside it.
        collate: given beside it.

    Raises:
        ConfigError: the DataLoader has something that cannot be honoured where ranks share samples
            out.
    """
    if not isinstance(data, DataLoader):
        return DataSource(dataset=data, collate=collate, batch_size=batch_size)
    if type(data).__iter__ is not DataLoader.__iter__:
        raise ConfigError(
            f"the loader is a {type(data).__name__}, whose way of making batches is its own; pass"
            " the torch.utils.data.DataLoader as it was before it was prepared, or its dataset"
        )
    for name, given in (("batch_size", batch_size), ("collate", collate)):
        if given is not None:
            raise ConfigError(
                f"the DataLoader says its {name} itself, so leave {name}= out, or pass its dataset"
            )
    if isinstance(data.dataset, IterableDataset):
        raise ConfigError(
            "the DataLoader's dataset is an IterableDataset, whose samples cannot be shared out by"
            " number: use a dataset of map style, with len(dataset) and dataset[i], or divide the"
            " stream yourself and feed your own loop"
        )
    if data.batch_size is None:
        what = (
            "does not make batches (batch_size=None)"
            if data.batch_sampler is None
            else "has a batch_sampler, which decides what batches are made of"
        )
        raise ConfigError(
            f"the DataLoader {what}, but the session does that; give it batch_size=..., and"
            " shuffle=True or not, or feed your own loop with it"
        )
    num_samples = require_map_style(data.dataset)
    return DataSource(
        dataset=data.dataset,
        collate=data.collate_fn,
        batch_size=data.batch_size,
        shuffles=_shuffles(data.sampler, num_samples),
        loader=data,
    )


def _shuffles(sampler: object, num_samples: int) -> bool:
    """Whether the order of samples is random. Raises `ConfigError` for a sampler that takes other
    samples than each one once an epoch, or that divides them among ranks itself.
    """
    if type(sampler) is SequentialSampler:
        return False
    if type(sampler) is RandomSampler:
        if not sampler.replacement and sampler.num_samples == num_samples:
            return True
        raise ConfigError(
            f"the DataLoader's RandomSampler draws {sampler.num_samples} of {num_samples} samples"
            f" {'with' if sampler.replacement else 'without'} replacement, but the session shares"
            " each sample out once an epoch; use shuffle=True"
        )
    fix = "use shuffle=True, or leave the sampler out"
    if isinstance(sampler, DistributedSampler):
        fix = "leave it out: the session divides the samples among ranks; use shuffle=True"
    elif isinstance(sampler, SubsetRandomSampler):
        fix = "use torch.utils.data.Subset(dataset, indices) as the dataset, and shuffle=True"
    raise ConfigError(
        f"the DataLoader has a {type(sampler).__name__}, which chooses samples itself, but the"
        f" session shares each sample out once an epoch; {fix}"
    )
