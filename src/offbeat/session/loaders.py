"""Makes the loaders of a session of what the user gives to `Session.loader`, a dataset or a
DataLoader: checks that all ranks read the same data, and lets the strategy say whether samples are
claimed, or shared out step by step: then a `LockstepLoader` gives batches of any sizes, the same
number on every rank, each sample once. With b_i samples asked for on rank i, an epoch of N samples
has ceil(N / sum b) steps of nearly equal sizes, so that no step is a remnant; a step's samples are
shared out in proportion to b_i, at least one to each rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar, cast

import torch
from torch.distributed import Store
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)
from typing_extensions import override

from offbeat.callbacks.callback import Callback
from offbeat.collectives.dense import gather_values
from offbeat.errors import CheckpointError, ConfigError, MismatchError, OffbeatError
from offbeat.megabatch.callback import MegaBatchCallback
from offbeat.megabatch.claims import ClaimLog, SampleRange
from offbeat.megabatch.fetching import Fetcher, MapStyle, ReadAhead, require_map_style
from offbeat.megabatch.loader import (
    DispatchLoader,
    data_description,
    description_of_order,
    order_of,
    require_same_order,
)
from offbeat.session.agreement import answer_of, require_agreement
from offbeat.torch_private import iterates_by_itself
from offbeat.transport.driver import Driver, Stream
from offbeat.transport.network import Network, store_of

_DATA_KEY = "data"
"""The key in the store for the description of what the founders' loaders read, and their sizes."""


def data_source(
    data: MapStyle | DataLoader[Any],
    *,
    batch_size: int | None,
    collate: Callable[[list[Any]], Any] | None,
) -> tuple[DataLoader[Any], int | None, bool]:
    """What `data` says.

    Args:
        data: a dataset of map style, or a DataLoader.
        batch_size: given beside it.
        collate: given beside it.

    Returns:
        The loader, of the user or of the dataset; the batch size of this rank, None where none was
        given; and whether the order is drawn anew for each epoch: else it is the dataset's.

    Raises:
        ConfigError: the DataLoader has something that cannot be honoured where ranks share samples
            out.
    """
    if not isinstance(data, DataLoader):
        # What it is like is looked at later.
        return DataLoader[Any](cast(Any, data), collate_fn=collate), batch_size, True
    if iterates_by_itself(data):
        raise ConfigError(
            f"the loader is a {type(data).__name__}, whose way of making batches is its own; pass"
            " the torch.utils.data.DataLoader as it was before it was prepared, or its dataset, or"
            " feed your own loop with it and tell session.weigh the samples of each batch"
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
    return data, data.batch_size, _shuffles(data.sampler, num_samples)


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


def make_loader(
    dataset: MapStyle | DataLoader[Any],
    *,
    callbacks: Sequence[Callback],
    driver: Driver,
    control: Stream,
    network: Network | None,
    weigh: Callable[[int], None],
    notify: Callable[[str], None],
    returns: bool,
    seed: int,
    batch_size: int | None,
    max_batch_size: int | None,
    claims_ahead: int | None,
    collate: Callable[[list[Any]], Any] | None,
) -> DispatchLoader | LockstepLoader:
    """A loader for this rank. Collective. The arguments that follow are what a session lends to it;
    `Session.loader` describes the others.

    Args:
        callbacks: of the strategy, and the session's loaders so far.
        driver: whose traffic is not counted, since sharing samples out is no training.
        control: channels for it.
        network: through which the ranks are connected; None in a world of one.
        weigh: tells the callbacks how many samples the next batch has.
        notify: for remarks.
        returns: whether this rank has joined a run under way, so that its peers do not make their
            loaders together with it.

    Raises:
        ConfigError: this cannot work, with the reason. Every rank raises.
        MismatchError: the ranks disagree on the data.
    """
    policy = next((each for each in callbacks if isinstance(each, MegaBatchCallback)), None)
    description: OffbeatError | dict[str, Any]
    try:
        loader, batch_size, shuffles = data_source(dataset, batch_size=batch_size, collate=collate)
        if policy is not None:
            _require_claims(loader.num_workers, claims_ahead)
        description = data_description(
            loader.dataset,
            seed=seed,
            shuffles=shuffles,
            batch_size=batch_size,
            max_batch_size=max_batch_size,
            claims=policy is not None,
            claims_ahead=claims_ahead,
        )
    except ConfigError as error:
        description = error  # which all ranks raise below
    others = [each for each in callbacks if isinstance(each, LockstepLoader)]
    store = store_of(network)
    key = f"{_DATA_KEY}/in step/{len(others)}" if policy is None else _DATA_KEY
    # Also how many samples a rank asks for, or how many fit into its memory.
    size = batch_size if policy is None else max_batch_size
    mine = answer_of(description)
    mine["size"] = None if "refusal" in mine else size
    answers: Mapping[int, Any] | None = None
    if not returns:
        answers = (
            dict(enumerate(driver.run(gather_values(mine), control.next())))
            if policy is None
            else policy.gather(mine)
        )
    if answers is None:
        # This rank came later than its peers, or was left out.
        sizes = _sizes_of_founders(store, description, key)
        if policy is None and driver.rank not in sizes:
            raise ConfigError(
                f"RANK is {driver.rank}, and samples were shared out among {len(sizes)} workers at"
                " first; come back in the place of one that has died, or feed your own loop"
            )
    else:
        require_agreement(description, answers)
        sizes = {rank: answer["size"] for rank, answer in answers.items()}
        store.set(key, json.dumps([description, [*sizes.items()]]))
    if loader.drop_last:
        notify(
            "drop_last of the DataLoader has no effect: each sample is shared out once an"
            " epoch, in batches of which none is a small remnant"
        )
    num_workers, batches_each = loader.num_workers, loader.prefetch_factor or 1
    if policy is not None:
        num_workers, batches_each = min(claims_ahead or 1, num_workers), 1
    fetcher = ReadAhead(
        loader,
        num_processes=num_workers,
        batches_each=batches_each,
        seed=seed,
        rank=driver.rank,
        number=len(others),
    )
    if policy is None:
        older = [each for each in others if each.has_read(loader.dataset)]
        for each in older:
            each.close()  # its processes; it starts others if it is iterated again
        if len(older) == 1:
            notify(
                "session.loader was called for data of which a loader of this session has given out"
                " an epoch: the new one begins with epoch 0 again, in the same order, and the other"
                " stays with the session; make a loader once, and iterate over it in each epoch"
            )
        return LockstepLoader(
            fetcher,
            batch_sizes=[*sizes.values()],
            claimed=weigh,
            seed=seed,
            rank=driver.rank,
            shuffles=shuffles,
            number=len(others),
        )
    assert batch_size is not None, "its description has it"
    policy.feed(batch_size, {driver.rank: max_batch_size} if answers is None else sizes)
    return DispatchLoader(
        fetcher,
        log=ClaimLog(store),
        policy=policy,
        seed=seed,
        rank=driver.rank,
        notify=notify,
        shuffles=shuffles,
    )


def _require_claims(num_workers: int, claims_ahead: int | None) -> None:
    """Raise `ConfigError` unless so many processes can read so many claims ahead."""
    if claims_ahead is None:
        return
    is_number = isinstance(claims_ahead, int) and not isinstance(claims_ahead, bool)
    if not is_number or not 1 <= claims_ahead <= num_workers:
        raise ConfigError(
            f"claims_ahead must be an integer from 1 to the DataLoader's num_workers, which is"
            f" {num_workers}, got {claims_ahead!r}; each worker process reads one claim ahead"
        )


def _sizes_of_founders(
    store: Store, mine: OffbeatError | dict[str, Any], key: str
) -> dict[int, int]:
    """What those who made their loaders together told each other, by rank, which stands in the
    store. Raises unless they read the same data.
    """
    if isinstance(mine, OffbeatError):
        raise mine
    if not store.check([key]):
        raise ConfigError(
            "the run that this worker has joined has no loader; feed your own loop, as its peers do"
        )
    theirs, sizes = json.loads(store.get(key))
    if theirs != mine:
        raise MismatchError(
            f"this worker's loader differs from that of the run that it has joined: {mine} here,"
            f" {theirs} there"
        )
    return dict(sizes)


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
    ranks = len(batch_sizes)
    # One sample alone has no variance, so who has asked for more gets two where there are enough.
    least = 2 if min(batch_sizes) > 1 and end - begin >= 2 * ranks else 1
    wanted = [size - least for size in batch_sizes]
    passed = [0, *accumulate(wanted if any(wanted) else [1] * ranks)]
    beyond = end - begin - least * ranks
    cuts = [
        begin + least * rank + beyond * before // passed[-1] for rank, before in enumerate(passed)
    ]
    return tuple(map(SampleRange, cuts, cuts[1:]))


class LockstepLoader(Callback):
    """Iterating over it yields this rank's batches of an epoch, as many as every other rank's. It
    is made by `Session.loader`.

    A loop that stopped in the middle of an epoch goes on there when it iterates again. If the state
    was saved by another number of ranks, or with other batch sizes, what is left of the epoch is
    shared out anew; where fewer samples than ranks are left, the ones before them are seen again.

    Args:
        fetcher: reads batches of the dataset, which is the same on all ranks.
        batch_sizes: asked for, by rank, each >= 1. `share_out` changes them.
        claimed: is told how many samples the next batch has, unless gradients are off.
        seed: of the order, >= 0.
        rank: this rank.
        shuffles: whether the order is drawn anew for each epoch; else it is the dataset's.
        number: how many such loaders the session has already, each with a state of its own.

    Attributes:
        epoch: number of completed passes over the data.
        step: number of batches taken from the pass under way, since it was last shared out.
        asked: the `batch_sizes` that were asked for.
        batch_sizes: that batches have now.
        trains: whether a batch was taken with gradients on.
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
        number: int = 0,
    ) -> None:
        if number:
            self.state_key = f"{self.state_key}_{number + 1}"  # type: ignore[misc]  # each its own
        self.epoch = self.step = 0
        self._fetcher, self._num_samples = fetcher, fetcher.num_samples
        self.asked = self.batch_sizes = tuple(batch_sizes)
        self.trains = False
        self._claimed = claimed
        self._seed, self._rank, self._shuffles = seed, rank, shuffles
        self._num_steps = num_steps(self._num_samples, batch_sizes)
        self._first = 0  # of the epoch's samples that this sharing out is of
        self._num_ended = 0  # epochs, whatever number a state that was loaded has given them
        self._batches: Iterator[Any] = iter(())

    def __len__(self) -> int:
        """Steps in an epoch."""
        return self._num_steps

    def __iter__(self) -> Iterator[Any]:
        ended, batches = self._num_ended, self._begin()
        try:
            # A loop inside this one may have ended the epoch.
            while self._num_ended == ended and self.step < self._num_steps_left():
                if self._batches is not batches:  # A state was loaded: the place is another one.
                    batches = self._begin()
                # A batch that cannot be read counts as taken, so that ranks stay in step.
                span, self.step = self._span(self.step), self.step + 1
                if torch.is_grad_enabled():  # else it is an evaluation, which no gradient is of
                    self.trains = True
                    self._claimed(span.end - span.begin)
                yield next(batches)
        finally:
            # A loop that ends with the last batch, without asking for one more, is through, too.
            if self._batches is batches and self.step >= self._num_steps_left():
                self.epoch, self.step, self._first = self.epoch + 1, 0, 0
                self._num_ended += 1
                self._batches = iter(())
                self._fetcher.epoch_ended()

    @property
    def place(self) -> tuple[int, int]:
        """As of `SharesOut`."""
        return self.epoch, self.step

    def share_out(self, batch_sizes: Sequence[int]) -> None:
        """As of `SharesOut`. An epoch keeps its steps, and a step its samples, so that only their
        division among ranks is another one.
        """
        assert sum(batch_sizes) == sum(self.asked), (batch_sizes, self.asked)
        self.batch_sizes = tuple(batch_sizes)
        if self.step < self._num_steps_left():
            self._batches = iter(())  # what was read ahead are samples of the sizes before

    def has_read(self, dataset: object) -> bool:
        """Whether it has given out an epoch of `dataset`."""
        return self.epoch > 0 and self._fetcher.dataset is dataset

    def _begin(self) -> Iterator[Any]:
        """Read from the next step on."""
        self._batches = self._fetcher.batches(self._samples(self.step), epoch=self.epoch)
        return self._batches

    def _samples(self, step: int) -> Iterator[list[int]]:
        """This rank's samples of the steps from `step` on, by number."""
        order = order_of(
            self._num_samples, seed=self._seed, epoch=self.epoch, shuffles=self._shuffles
        )
        for number in range(step, self._num_steps_left()):
            span = self._span(number)
            yield order[self._first + span.begin : self._first + span.end].tolist()

    def _num_steps_left(self) -> int:
        """How many steps the samples from `_first` on have."""
        left = self._num_samples - self._first
        return num_steps(left, self.batch_sizes) if left else 0

    def _span(self, step: int) -> SampleRange:
        return spans_of(self._num_samples - self._first, self.batch_sizes, step)[self._rank]

    @override
    def state_dict(self) -> dict[str, dict[str, Any]]:
        return {
            "replicated": {
                "epoch": self.epoch,
                "step": self.step,
                "first": self._first,
                "batch_sizes": list(self.asked),
                "shared_out": list(self.batch_sizes),
                "order": self._order,
            }
        }

    @property
    def _order(self) -> dict[str, int]:
        return description_of_order(self._num_samples, self._seed, shuffles=self._shuffles)

    @override
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        saved = state["replicated"]
        if "step" not in saved:
            raise CheckpointError("the state lacks 'step'; it was saved by another loader")
        step, first = int(saved["step"]), int(saved["first"])
        if step or first:
            require_same_order(saved["order"], self._order)
        self.epoch, self.step, self._first = int(saved["epoch"]), step, first
        self._batches = iter(())
        before = tuple(map(int, saved["batch_sizes"]))
        left = self._num_samples - self._first
        if before == self.asked:
            self.batch_sizes = tuple(map(int, saved["shared_out"]))
        elif left:
            left -= left * self.step // num_steps(left, before)
            # Each rank needs a sample in a step.
            left = max(left, len(self.asked)) if left else 0
            self._first, self.step = self._num_samples - left, 0

    @override
    def load_older_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        self.load_state_dict(state)  # where peers are in their data they do not tell

    @override
    def close(self) -> None:
        self._batches = iter(())
        self._fetcher.close()
