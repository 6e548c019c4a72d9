"""A DataLoader that is handed to a session is read as it would read itself, and refused where that
cannot be.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import offbeat
from offbeat import Session
from offbeat.errors import ConfigError

Make = Callable[..., tuple[torch.nn.Module, torch.optim.Optimizer, Session]]

NUM_SAMPLES = 23


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class Readers(Numbers):
    """A sample is its number, the process that read it, and a random number drawn there."""

    def __getitem__(self, index: int) -> Any:
        return index, os.getpid(), random.random()


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(NUM_SAMPLES))


@pytest.fixture
def attached() -> Iterator[Make]:
    sessions: list[Session] = []

    def make(strategy: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer, Session]:
        net = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        sessions.append(offbeat.attach(net, optimizer, strategy))
        return net, optimizer, sessions[-1]

    yield make
    for session in sessions:
        session.close()


STRATEGIES = {
    "claimed": offbeat.AdaptiveSGD(mega_batch=3, warmup=0),
    "equal shares": offbeat.ElasticSGD(mega_batch=3),
    "in step, gradients": offbeat.AllReduce(),
    "in step, weights": offbeat.LocalSGD(),
}
every_strategy = pytest.mark.parametrize("label", STRATEGIES)


def step(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def collate(samples: list[int]) -> dict[str, list[int]]:
    return {"numbers": samples}


@every_strategy
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_data_loader_is_taken_as_it_is(attached: Make, label: str, shuffle: bool) -> None:
    net, optimizer, session = attached(STRATEGIES[label])
    given = DataLoader(Numbers(), batch_size=4, shuffle=shuffle, collate_fn=collate)
    before = torch.get_rng_state()
    loader = session.loader(given)
    orders = []
    for _ in range(2):
        batches = []
        for batch in loader:
            batches.append(batch["numbers"])
            step(net, optimizer)
        assert all(2 <= len(numbers) <= 5 for numbers in batches)
        orders.append([number for numbers in batches for number in numbers])
        assert len(loader) == len(given)
    assert [sorted(order) for order in orders] == [list(range(NUM_SAMPLES))] * 2
    assert (orders[0] == list(range(NUM_SAMPLES))) == (not shuffle)
    assert (orders[0] == orders[1]) == (not shuffle)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_data_loader_and_its_dataset_give_the_same_batches(attached: Make) -> None:
    batches = []
    for data, size in ((DataLoader(Numbers(), batch_size=5, shuffle=True), None), (Numbers(), 5)):
        _, _, session = attached(offbeat.AllReduce())
        loader = session.loader(data, seed=3, batch_size=size)
        batches.append([batch.tolist() for batch in loader])
    assert batches[0] == batches[1]


def test_the_last_batch_that_is_not_dropped_is_told_of(attached: Make) -> None:
    _, _, session = attached(offbeat.AllReduce())
    loader = session.loader(DataLoader(Numbers(), batch_size=4, drop_last=True))
    assert sorted(n for batch in loader for n in batch.tolist()) == list(range(NUM_SAMPLES))
    assert any("drop_last of the DataLoader has no effect" in notice for notice in session.notices)


class Prepared(DataLoader[int]):
    def __iter__(self) -> Any:
        return super().__iter__()


class Neighbours(DataLoader[int]):
    """As a loader of graphs, whose samples are numbers until its own iterator has made batches."""

    def _get_iterator(self) -> Any:
        return iter([[NUM_SAMPLES]])


def weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0] * NUM_SAMPLES, NUM_SAMPLES)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: DataLoader([], batch_size=4), "the dataset is empty"),
        (lambda: DataLoader(Stream(), batch_size=4), "IterableDataset, .* of map style"),
        (
            lambda: DataLoader(Numbers(), batch_sampler=[[1, 2], [3]]),
            "has a batch_sampler, .* give it batch_size=",
        ),
        (lambda: DataLoader(Numbers(), batch_size=None), "does not make batches"),
        (
            lambda: DataLoader(
                Numbers(), batch_size=4, sampler=DistributedSampler(Numbers(), 2, 0)
            ),
            "DistributedSampler, .* leave it out: .* use shuffle=True",
        ),
        (
            lambda: DataLoader(Numbers(), batch_size=4, sampler=SubsetRandomSampler([1, 2])),
            r"SubsetRandomSampler, .* use torch.utils.data.Subset\(dataset, indices\)",
        ),
        (
            lambda: DataLoader(Numbers(), batch_size=4, sampler=weighted()),
            "WeightedRandomSampler, which chooses samples itself",
        ),
        (
            lambda: DataLoader(
                Numbers(), batch_size=4, sampler=RandomSampler(Numbers(), replacement=True)
            ),
            "draws 23 of 23 samples with replacement",
        ),
        (
            lambda: DataLoader(
                Numbers(), batch_size=4, sampler=RandomSampler(Numbers(), num_samples=9)
            ),
            "draws 9 of 23 samples without replacement",
        ),
        (lambda: Prepared(Numbers(), batch_size=4), "is a Prepared, whose way of making batches"),
        (lambda: Neighbours(Numbers(), batch_size=4), r"is a Neighbours, .* session\.weigh"),
    ],
)
@pytest.mark.parametrize("label", ["claimed", "in step, gradients"])
def test_what_cannot_be_honoured_is_refused(
    attached: Make, label: str, build: Callable[[], DataLoader[Any]], said: str
) -> None:
    _, _, session = attached(STRATEGIES[label])
    with pytest.raises(ConfigError, match=said):
        session.loader(build())


class StreamWithLength(Stream):
    def __len__(self) -> int:
        return NUM_SAMPLES


@every_strategy
def test_a_stream_that_has_a_length_is_refused_as_well(attached: Make, label: str) -> None:
    _, _, session = attached(STRATEGIES[label])
    with pytest.raises(ConfigError, match="got a StreamWithLength; samples of a stream cannot"):
        session.loader(StreamWithLength(), batch_size=4)


@pytest.mark.parametrize(
    ("label", "arguments", "said"),
    [
        ("in step, gradients", {"batch_size": 4}, "says its batch_size itself"),
        ("in step, gradients", {"collate": list}, "says its collate itself"),
        ("in step, gradients", {"claims_ahead": 1}, "max_batch_size and claims_ahead are for"),
        ("claimed", {"claims_ahead": 1}, "from 1 to the DataLoader's num_workers, which is 0"),
        ("claimed", {"claims_ahead": True}, "claims_ahead must be an integer"),
    ],
)
def test_what_is_said_twice_or_in_vain_is_refused(
    attached: Make, label: str, arguments: dict[str, Any], said: str
) -> None:
    _, _, session = attached(STRATEGIES[label])
    with pytest.raises(ConfigError, match=said):
        session.loader(DataLoader(Numbers(), batch_size=4), **arguments)


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker")  # as on a single core
@pytest.mark.parametrize("label", ["claimed", "in step, gradients"])
def test_worker_processes_read_and_end(attached: Make, label: str) -> None:
    """Two epochs, of which the first is left, saved and gone on with in another session."""
    arguments = {"claims_ahead": 2} if label == "claimed" else {}
    seen: list[list[int]] = [[], []]
    readers: set[int] = set()
    state: dict[str, Any] = {}
    for stops in (True, False):
        net, optimizer, session = attached(STRATEGIES[label])
        given = DataLoader(Readers(), batch_size=4, shuffle=True, num_workers=2)
        loader = session.loader(given, **arguments)
        drawn = []
        if state:
            session.load_state_dict(state)
        while loader.epoch < 2:
            epoch = loader.epoch
            for numbers, pids, random_numbers in loader:
                seen[epoch] += numbers.tolist()
                readers |= set(pids.tolist())
                drawn += random_numbers.tolist()
                step(net, optimizer)
                if stops:
                    break
            if stops:
                state = copy.deepcopy(session.state_dict())
                break
        del numbers, pids, random_numbers
        session.close()
        assert not multiprocessing.active_children()
    assert [sorted(numbers) for numbers in seen] == [list(range(NUM_SAMPLES))] * 2
    assert os.getpid() not in readers
    assert len(readers) == 1 + 2 * 2  # one before the stop, and two for each epoch after it
    assert len(set(drawn)) == len(drawn)


@pytest.mark.ranks
def test_worker_processes_of_an_epoch_end_with_it(attached: Make) -> None:
    _, _, session = attached(offbeat.AllReduce())
    loader = session.loader(DataLoader(Numbers(), batch_size=4, num_workers=1))
    assert [bool(multiprocessing.active_children()) for _ in loader] == [True] * len(loader)
    assert not multiprocessing.active_children()


@pytest.mark.ranks
def test_persistent_processes_end_where_another_loader_takes_their_data_over(
    attached: Make,
) -> None:
    """As in a loop that makes its loader in each epoch; the first one may be iterated all the
    same.
    """
    _, _, session = attached(offbeat.AllReduce())
    data = Numbers()
    loaders = []
    for _ in range(2):
        given = DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True)
        loaders.append(session.loader(given))
        assert not multiprocessing.active_children()
        list(loaders[-1])
        assert len(multiprocessing.active_children()) == 1
    assert [len(batch) for batch in loaders[0]] == [len(batch) for batch in loaders[1]]
    assert len(multiprocessing.active_children()) == 2


@pytest.mark.ranks
def test_worker_processes_of_two_loaders_draw_unlike_random_numbers(attached: Make) -> None:
    """As of two views of the same samples, which would be one."""
    _, _, session = attached(offbeat.AllReduce())
    data = Readers()
    pair = [session.loader(DataLoader(data, batch_size=4, num_workers=1)) for _ in range(2)]
    orders: list[list[int]] = [[], []]
    drawn: set[float] = set()
    for batches in zip(*pair, strict=True):
        for order, (numbers, _, random_numbers) in zip(orders, batches, strict=True):
            order += numbers.tolist()
            drawn |= set(random_numbers.tolist())
    assert orders[0] == orders[1]
    assert len(drawn) == 2 * NUM_SAMPLES


def test_a_loader_that_is_made_for_each_epoch_is_told_of(attached: Make) -> None:
    _, _, session = attached(offbeat.AllReduce())
    data, orders = Numbers(), []
    for _ in range(3):
        loader = session.loader(data, batch_size=4)
        orders.append([batch.tolist() for batch in loader])
    assert orders[0] == orders[1] == orders[2]
    assert sum("make a loader once" in notice for notice in session.notices) == 1


class Torn(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 7:
            raise OSError("sample 7 cannot be read")
        return index


@every_strategy
def test_samples_that_cannot_be_read_are_not_asked_for_again(attached: Make, label: str) -> None:
    net, optimizer, session = attached(STRATEGIES[label])
    loader = session.loader(DataLoader(Torn(), batch_size=4))
    seen: list[int] = []
    for _ in range(2):
        try:
            for batch in loader:
                seen += batch.tolist()
                step(net, optimizer)
        except OSError as error:
            assert "sample 7" in str(error)  # noqa: PT017 - the loop goes on behind it
    assert loader.epoch == 1
    assert set(seen) > set(range(NUM_SAMPLES)) - {4, 5, 6, 7, 8, 9, 10}
    assert len(seen) == len(set(seen)) < NUM_SAMPLES


@every_strategy
@pytest.mark.parametrize("is_given_whole", [False, True])
def test_a_dataset_that_has_grown_is_refused(
    attached: Make, label: str, is_given_whole: bool
) -> None:
    """What came to it was never read."""
    net, optimizer, session = attached(STRATEGIES[label])
    data = list(range(8))
    loader = (
        session.loader(DataLoader(data, batch_size=4))  # type: ignore[arg-type]  # as a dataset
        if is_given_whole
        else session.loader(data, batch_size=4)
    )
    for _ in loader:
        step(net, optimizer)
    data.append(8)
    with pytest.raises(ConfigError, match="has 9 samples, and had 8 when its loader was made"):
        next(iter(loader))
