"""How long entries waited before they were sent."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import offbeat
from conformance_support.nets import Net, train
from offbeat.gradients.entry_ages import EntryAges


def test_entries_that_take_turns_wait_for_a_round() -> None:
    ages, everything = EntryAges(1000, 100), np.arange(1000)
    for exchange in range(200):
        ages.after_exchange(everything[everything % 20 == exchange % 20])
    # The first round of each counts from the beginning: 10.5 on average.
    assert ages.num_sent == pytest.approx(100 * 10, rel=0.05)
    assert ages.total_age / ages.num_sent == pytest.approx((9 * 20 + 10.5) / 10, rel=0.05)


def test_where_all_is_sent_every_entry_is_of_this_step() -> None:
    ages = EntryAges(500)
    for _ in range(7):
        ages.after_exchange(np.arange(500))
    assert (ages.num_sent, ages.total_age) == (3500, 3500)


def test_dense_exchanges_do_not_count() -> None:
    """What is sent afterwards has waited since the last one."""
    ages, first, second = EntryAges(100), np.arange(50), np.arange(50, 100)
    for indices in (first, None, None, first, second):
        ages.after_exchange(indices)
    assert (ages.num_sent, ages.total_age) == (150, 50 * 1 + 50 * 1 + 50 * 2)


def test_nothing_is_no_trouble() -> None:
    empty, waiting = EntryAges(0), EntryAges(50)
    for ages in (empty, waiting):
        ages.after_exchange(np.empty(0, dtype=np.int64))
    empty.after_exchange(None)
    assert (empty.num_sent, waiting.num_sent) == (0, 0)
    waiting.after_exchange(np.array([0, 49]))
    assert (waiting.num_sent, waiting.total_age) == (2, 4)


def test_a_session_says_how_long_entries_wait() -> None:
    ages = {}
    for name, strategy in {
        "whole": offbeat.AllReduce(),
        "dense": offbeat.GTopK(collective="dense"),
        "sparse": offbeat.GTopK(density=0.1, collective="reduce_scatter"),
        "after dense ones": offbeat.GTopK(
            density=0.1, collective="reduce_scatter", warmup=((1.0, 5),)
        ),
    }.items():
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        with offbeat.attach(net, optimizer, strategy) as session:
            train(net, optimizer, range(20))
            ages[name] = session.stats.mean_entry_age
    assert (ages.pop("whole"), ages.pop("dense")) == (None, None)
    for name, age in ages.items():
        assert age is not None, name
        assert 2 < age < 20, name
