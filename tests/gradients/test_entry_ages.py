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
    for indices in (None, np.arange(500)):
        ages = EntryAges(500)
        for _ in range(7):
            ages.after_exchange(indices)
        assert (ages.num_sent, ages.total_age) == (3500, 3500)


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
    }.items():
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        with offbeat.attach(net, optimizer, strategy) as session:
            train(net, optimizer, range(20))
            ages[name] = session.stats.mean_entry_age
    assert (ages["whole"], ages["dense"]) == (None, 1.0)
    assert ages["sparse"] is not None
    assert 2 < ages["sparse"] < 20
