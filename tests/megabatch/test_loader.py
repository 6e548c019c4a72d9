"""Samples shared out: each once an epoch, whatever the sizes; what a loader does is told from
outside.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

import offbeat
from offbeat import Session
from offbeat.errors import CheckpointError, ConfigError, OffbeatWarning
from offbeat.megabatch.loader import (
    DispatchLoader,
    data_description,
    mega_batch_span,
    num_mega_batches,
    order_of,
)
from offbeat.session.loaders import LockstepLoader, make_loader, num_steps, spans_of
from offbeat.transport.connect import Connection, RejoinedDriver
from offbeat.transport.driver import Driver, Stream
from thread_support.world import results_of, session_on

Make = Callable[..., tuple[torch.nn.Module, torch.optim.Optimizer, Session]]


@pytest.fixture
def attached() -> Iterator[Make]:
    sessions: list[Session] = []

    def make(
        strategy: Any, lr: float = 0.1, kind: str = "SGD"
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer, Session]:
        torch.manual_seed(1)
        net = torch.nn.Linear(1, 1)
        optimizer = getattr(torch.optim, kind)(net.parameters(), lr=lr)
        sessions.append(offbeat.attach(net, optimizer, strategy))
        return net, optimizer, sessions[-1]

    yield make
    for session in sessions:
        session.close()


def numbers(count: int) -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(torch.arange(count, dtype=torch.float32)[:, None])


def step(net: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> list[int]:
    (net(x / 100) - 1).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return x.flatten().int().tolist()


@given(st.integers(1, 500), st.integers(1, 600))
def test_mega_batches_cover_an_epoch_and_differ_by_a_sample_at_most(
    num_samples: int, mega_batch: int
) -> None:
    count = num_mega_batches(num_samples, mega_batch)
    spans = [mega_batch_span(num_samples, mega_batch, number) for number in range(count)]
    assert [position for span in spans for position in range(*span)] == list(range(num_samples))
    sizes = [span.end - span.begin for span in spans]
    assert max(sizes) - min(sizes) <= 1
    assert count == 1 or max(sizes) <= 2 * mega_batch


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 400))
def test_in_step_every_rank_has_a_share_of_every_step(batch_sizes: list[int], beyond: int) -> None:
    num_samples = len(batch_sizes) + beyond
    seen: list[int] = []
    for number in range(num_steps(num_samples, batch_sizes)):
        spans = spans_of(num_samples, batch_sizes, number)
        assert len(spans) == len(batch_sizes)
        assert all(end > begin for begin, end in spans)
        seen += [position for span in spans for position in range(*span)]
    assert seen == list(range(num_samples))


@given(st.integers(1, 6), st.integers(1, 20), st.integers(1, 9))
def test_in_step_nobody_gets_more_than_it_asked_for_where_all_can_be_served(
    ranks: int, size: int, steps: int
) -> None:
    batch_sizes = [size + rank for rank in range(ranks)]
    for number in range(steps):
        spans = spans_of(steps * sum(batch_sizes), batch_sizes, number)
        assert [end - begin for begin, end in spans] == batch_sizes


def test_an_order_belongs_to_a_seed_and_an_epoch() -> None:
    orders = [tuple(order_of(50, seed=seed, epoch=epoch)) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(orders)) == 4
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert orders[0] == tuple(order_of(50, seed=0, epoch=0))


@pytest.mark.parametrize("shuffles", [True, False])
def test_an_order_takes_four_bytes_a_sample(shuffles: bool) -> None:
    expected = np.random.default_rng((3, 1)).permutation(50) if shuffles else np.arange(50)
    order = order_of(50, seed=3, epoch=1, shuffles=shuffles)
    assert order.tolist() == expected.tolist()
    assert order.nbytes == 4 * 50


@pytest.mark.parametrize("num_samples", [1, 7, 40, 57])
@pytest.mark.parametrize("name", ["AdaptiveSGD", "ElasticSGD"])
def test_alone_every_sample_comes_once_an_epoch(
    attached: Make, num_samples: int, name: str
) -> None:
    net, optimizer, session = attached(getattr(offbeat, name)(mega_batch=5))
    loader = session.loader(numbers(num_samples), batch_size=3)
    for epoch in range(3):
        seen = [index for (x,) in loader for index in step(net, optimizer, x)]
        assert sorted(seen) == list(range(num_samples))
        assert loader.epoch == epoch + 1


def test_what_a_pass_has_left_comes_before_the_next_one_and_no_sample_of_a_batch_across_is_skipped(
    attached: Make,
) -> None:
    """As a worker finds it that was saved beside the last merge of a pass, and goes on without the
    one that had computed the rest.
    """
    net, optimizer, session = attached(offbeat.AdaptiveSGD(mega_batch=5, warmup=0))
    loader = session.loader(numbers(20), batch_size=3)
    state = loader.state_dict()
    state["local"] |= {"epoch": 1, "mega_batch": 0, "lost": [[16, 20]]}
    loader.load_state_dict(state)
    seen = [index for (x,) in loader for index in step(net, optimizer, x)]
    assert seen[:4] == order_of(20, seed=0, epoch=0)[-4:].tolist()
    assert sorted(seen[4:]) == list(range(20))


@pytest.mark.parametrize("name", ["AdaptiveSGD", "ElasticSGD"])
@pytest.mark.parametrize("num_samples", [101, 103, 110])
def test_no_batch_is_a_single_sample(attached: Make, num_samples: int, name: str) -> None:
    """A layer that normalises over the batch refuses one: the second mega-batch has 51 samples."""
    _, _, session = attached(getattr(offbeat, name)(mega_batch=5))
    sizes = [len(x) for (x,) in session.loader(numbers(num_samples), batch_size=10)]
    assert sum(sizes) == num_samples
    assert all(2 <= size <= 11 for size in sizes)


@pytest.mark.parametrize(("num_samples", "expected"), [(30, [10, 10, 10]), (33, [10, 10, 6, 7])])
def test_what_is_left_is_halved_where_it_does_not_fit(
    attached: Make, num_samples: int, expected: list[int]
) -> None:
    _, _, session = attached(offbeat.AdaptiveSGD(mega_batch=4, min_batch_size=4))
    loader = session.loader(numbers(num_samples), batch_size=10, max_batch_size=10)
    assert [len(x) for (x,) in loader] == expected


def test_at_first_gradients_are_averaged_and_then_models_more_often(attached: Make) -> None:
    """After three updates, and after one more, as long as that is less than a mega-batch."""
    net, optimizer, session = attached(offbeat.AdaptiveSGD(mega_batch=8, warmup=4))
    merges: list[int] = []
    mega_batches: list[int] = []
    session.on_merge(lambda: mega_batches.append(session.stats.exchanges))
    loader = session.loader(numbers(48), batch_size=2)
    for epoch in range(2):
        seen: list[int] = []
        for (x,) in loader:
            assert loader.batch_position == len(seen)
            merges.append(session.stats.exchanges)
            seen += step(net, optimizer, x)
        assert sorted(seen) == list(range(48))
        assert loader.epoch == epoch + 1
    # The first eight updates are steps with the mean of gradients.
    assert merges[:9] == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert mega_batches == [8, 11, 13, 14, 15, 16]
    assert [share.samples for share in loader.last] == [16]


def test_a_stop_goes_on_where_it_was(attached: Make) -> None:
    net, optimizer, session = attached(offbeat.AdaptiveSGD(mega_batch=5))
    loader = session.loader(numbers(40), batch_size=3)
    seen: list[int] = []
    while loader.epoch == 0:
        for (x,) in loader:
            seen += step(net, optimizer, x)
            if len(seen) % 2:
                break
    assert sorted(seen) == list(range(40))


def test_a_loop_that_stops_after_the_last_batch_is_through_with_the_epoch(attached: Make) -> None:
    """As `islice(loader, len(loader))` does: every second epoch was empty."""
    _, _, session = attached(offbeat.AllReduce())
    loader = session.loader(numbers(20), batch_size=4)
    for epoch in range(3):
        assert loader.epoch == epoch
        assert len(list(islice(loader, len(loader)))) == 5


def test_in_step_a_loop_ends_where_one_inside_of_it_has_ended_the_epoch(attached: Make) -> None:
    """As one does that looks at the loss over all samples now and then: it went on for ever."""
    _, _, session = attached(offbeat.AllReduce())
    loader = session.loader(numbers(20), batch_size=4)
    num_batches = 0
    for _ in islice(loader, 3):
        num_batches += 1
        with torch.no_grad():
            assert len(list(loader)) == 4
    assert (num_batches, loader.epoch) == (1, 1)
    assert len(list(loader)) == 5


@pytest.mark.parametrize("name", ["AdaptiveSGD", "ElasticSGD"])
def test_after_a_loop_that_stops_with_the_last_claim_comes_the_next_epoch(
    attached: Make, name: str
) -> None:
    net, optimizer, session = attached(getattr(offbeat, name)(mega_batch=5))
    loader = session.loader(numbers(40), batch_size=4)
    for epoch in range(3):
        batches = islice(loader, len(loader))
        seen = [index for (x,) in batches for index in step(net, optimizer, x)]
        assert sorted(seen) == list(range(40))
        assert loader.epoch == epoch  # Its last merge is still to come.


@pytest.mark.parametrize("stop", range(9))
@pytest.mark.parametrize(
    "how", [{"rule": "published", "warmup": 0}, {"rule": "published"}, {"overlap": True}]
)
def test_a_run_that_was_saved_anywhere_sees_the_rest(
    attached: Make, stop: int, how: dict[str, Any]
) -> None:
    strategy = offbeat.AdaptiveSGD(mega_batch=4, **{"warmup": 2} | how)
    net, optimizer, session = attached(strategy)
    loader = session.loader(numbers(20), batch_size=2)
    batches = iter(loader)
    seen = [index for _ in range(stop) for index in step(net, optimizer, next(batches)[0])]
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict(), session.state_dict()))
    json.dumps(
        {key: value for key, value in saved[2]["callbacks"]["loader"].items() if key != "additive"}
    )
    # What went on without a stop ends as those do that were saved.
    before, ends = seen, []
    for _ in range(3):
        works: list[Any] = []
        if ends:
            net, optimizer, session = attached(strategy)
            loader = session.loader(numbers(20), batch_size=2)
            for target, state in zip((net, optimizer, session), saved, strict=True):
                target.load_state_dict(state)
            batches = iter(loader)
        session.on_merge(
            lambda loader=loader, works=works: works.append(
                [(share.claims, share.updates, share.weight) for share in loader.last]
            )
        )
        rest = [index for (x,) in batches for index in step(net, optimizer, x)]
        assert sorted(before + rest) == list(range(20))
        # A merge that was under way is left out, and what it had comes with the next one.
        ends.append((net.weight.item(), [] if strategy.overlap else works))
    assert ends[0] == ends[1] == ends[2]


@pytest.mark.parametrize("name", ["AdaptiveSGD", "ElasticSGD"])
@pytest.mark.parametrize(("size", "mega_batch"), [(2, 5), (8, 5), (4, 3), (4, 9)])
@pytest.mark.parametrize("merges", [0, 1, 3])
def test_a_resumed_run_may_have_batches_and_mega_batches_of_other_sizes(
    attached: Make, name: str, size: int, mega_batch: int, merges: int
) -> None:
    strategy = getattr(offbeat, name)
    net, optimizer, session = attached(strategy(mega_batch=5))
    loader = session.loader(numbers(101), batch_size=4)
    seen: list[int] = []
    for _ in range(merges):
        for (x,) in loader.one_mega_batch():
            seen += step(net, optimizer, x)
    saved = copy.deepcopy(session.state_dict())
    net, optimizer, session = attached(strategy(mega_batch=mega_batch))
    loader = session.loader(numbers(101), batch_size=size)
    session.load_state_dict(saved)
    batches = [step(net, optimizer, x) for (x,) in loader]
    assert sorted(seen + [index for batch in batches for index in batch]) == list(range(101))
    assert max(map(len, batches)) <= size + 1
    assert loader.epoch == 1


def test_what_a_rank_has_computed_that_is_no_more_is_not_given_out_again(attached: Make) -> None:
    net, optimizer, session = attached(offbeat.ElasticSGD(mega_batch=5))
    batches = iter(session.loader(numbers(20), batch_size=4))
    seen = [index for _ in range(2) for index in step(net, optimizer, next(batches)[0])]
    states = [session.state_dict(), session.state_dict() | {"rank": 1}]
    owned = states[1]["callbacks"]["loader"]["owned"]
    owned["computed/1"] = owned.pop("computed/0") | {"claims": [[[8, 12]]], "updates": 1}
    seen += order_of(20, seed=0, epoch=0)[8:12].tolist()
    net, optimizer, session = attached(offbeat.ElasticSGD(mega_batch=5))
    loader = session.loader(numbers(20), batch_size=4)
    session.load_state_dict(offbeat.reshard(states, 1, 0))
    seen += [index for (x,) in loader for index in step(net, optimizer, x)]
    assert sorted(seen) == list(range(20))


@pytest.mark.parametrize("name", ["AdaptiveSGD", "ElasticSGD", "AllReduce"])
def test_a_loop_goes_on_at_the_place_of_a_state_that_it_loads(attached: Make, name: str) -> None:
    """As one does that goes back to where its loss was finite."""
    net, optimizer, session = attached(getattr(offbeat, name)())
    loader = session.loader(numbers(40), batch_size=4)
    seen: list[int] = []
    saved: list[Any] = []
    for number, (x,) in enumerate(loader):
        if number == 6:
            for target, state in zip((net, optimizer, session), saved, strict=True):
                target.load_state_dict(state)
            del seen[12:]
            continue
        seen += step(net, optimizer, x)
        if number == 2:
            saved = copy.deepcopy([net.state_dict(), optimizer.state_dict(), session.state_dict()])
    assert sorted(seen) == list(range(40))
    assert loader.epoch == 1


def test_the_rate_is_that_of_the_batch_and_schedulers_do_not_see_it(attached: Make) -> None:
    """The last claim is shorter: its rate is, too."""
    net, optimizer, session = attached(offbeat.AdaptiveSGD(mega_batch=2), lr=0.8)
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.8)
    schedulers = []
    for opt in (optimizer, plain):
        warm = torch.optim.lr_scheduler.LinearLR(opt, start_factor=0.5, total_iters=3)
        decay = torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.9)
        schedulers.append(torch.optim.lr_scheduler.ChainedScheduler([warm, decay], optimizer=opt))
    rates: list[float] = []
    optimizer.register_step_pre_hook(lambda opt, *_: rates.append(opt.param_groups[0]["lr"]))
    for (x,) in session.loader(numbers(10), batch_size=4):
        expected = plain.param_groups[0]["lr"]
        assert optimizer.param_groups[0]["lr"] == expected
        step(net, optimizer, x)
        assert rates.pop() == pytest.approx(expected * len(x) / 4)
        plain.step()
        for scheduler in schedulers:
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]


def test_every_step_that_is_taken_with_a_batch_has_its_rate(attached: Make) -> None:
    """The second one had the rate of a batch of the size to begin with."""
    net, optimizer, session = attached(offbeat.AdaptiveSGD(mega_batch=2, warmup=0), lr=0.8)
    rates: list[float] = []
    optimizer.register_step_pre_hook(lambda opt, *_: rates.append(opt.param_groups[0]["lr"]))
    for (x,) in session.loader(numbers(10), batch_size=4):
        step(net, optimizer, x)
        step(net, optimizer, x)
        assert [rates.pop(), rates.pop()] == pytest.approx([0.8 * len(x) / 4] * 2)


@pytest.mark.parametrize("scaling", ["linear", "sqrt"])
def test_the_rate_is_that_of_a_batch_where_several_are_accumulated_or_one_is_left_out(
    attached: Make, scaling: Any
) -> None:
    strategy = offbeat.AdaptiveSGD(mega_batch=9, rate_scaling=scaling, warmup=0)
    net, optimizer, session = attached(strategy, lr=0.8)
    rates: list[float] = []
    optimizer.register_step_pre_hook(lambda opt, *_: rates.append(opt.param_groups[0]["lr"]))
    for number, (x,) in enumerate(session.loader(numbers(36), batch_size=4)):
        if number == 4:
            continue  # the user leaves it out
        net(x).sum().backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    assert rates == [0.8] * 3


def test_a_merge_before_the_first_step_is_no_sign_of_a_loop_without_steps(attached: Make) -> None:
    """As where a rank accumulates gradients, and is merged with others that have stepped."""
    net, _, session = attached(offbeat.AdaptiveSGD(mega_batch=2, warmup=0, overlap=False))
    session.on_merge(lambda: net.weight.detach().add_(1))
    for (x,) in session.loader(numbers(8), batch_size=1):
        net(x).sum().backward()
    session.close()
    assert session.stats.exchanges == 4
    assert not any("was not stepped" in notice for notice in session.notices)


@pytest.mark.parametrize(("scaling", "kind"), [("sqrt", "SGD"), ("auto", "AdamW")])
def test_the_rate_may_follow_the_root_of_the_size(attached: Make, scaling: Any, kind: str) -> None:
    strategy = offbeat.AdaptiveSGD(mega_batch=1, rate_scaling=scaling)
    net, optimizer, session = attached(strategy, lr=0.8, kind=kind)
    rates: list[float] = []
    optimizer.register_step_pre_hook(lambda opt, *_: rates.append(opt.param_groups[0]["lr"]))
    for (x,) in session.loader(numbers(2), batch_size=8):
        step(net, optimizer, x)
    assert rates == [0.4]
    assert optimizer.param_groups[0]["lr"] == 0.8


@pytest.mark.parametrize(("kind", "follows"), [("AdamW", 1.0), ("Adam", 0.5)])
def test_decoupled_decay_is_that_of_the_rate_that_was_given(
    attached: Make, kind: str, follows: float
) -> None:
    """A shorter step has less noise, and no less decay. Coupled decay is part of the gradient."""
    net, optimizer, session = attached(offbeat.AdaptiveSGD(mega_batch=1), kind=kind)
    (group,) = optimizer.param_groups
    group["weight_decay"] = 0.1
    found: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: found.append(group["lr"] * group["weight_decay"]))
    for (x,) in session.loader(numbers(2), batch_size=8):
        step(net, optimizer, x)
    assert found == pytest.approx([0.1 * 0.1 * follows])
    assert group["weight_decay"] == 0.1


def test_in_a_loop_of_ones_own_the_rate_is_left_alone(attached: Make) -> None:
    net, optimizer, session = attached(offbeat.AdaptiveSGD(mega_batch=1))
    rates: list[float] = []
    optimizer.register_step_pre_hook(lambda opt, *_: rates.append(opt.param_groups[0]["lr"]))
    session.weigh(3)
    with pytest.warns(OffbeatWarning, match=r"no loader .* session.loader\(DataLoader or dataset"):
        step(net, optimizer, torch.ones(3, 1))
    step(net, optimizer, torch.ones(3, 1))  # which says nothing more
    assert rates == [0.1, 0.1]
    assert session.stats.exchanges == 2


@pytest.mark.parametrize("warmup", [0, 20])
def test_the_rate_is_that_of_the_batch_whatever_its_gradient_is_said_to_count(
    attached: Make, warmup: int
) -> None:
    """As by its tokens, in a script that trains by gradients too."""
    net, optimizer, session = attached(offbeat.AdaptiveSGD(mega_batch=4, warmup=warmup))
    rates: list[float] = []
    optimizer.register_step_pre_hook(lambda opt, *_: rates.append(opt.param_groups[0]["lr"]))
    for (x,) in session.loader(numbers(32), batch_size=4):
        session.weigh(1000 * len(x))
        step(net, optimizer, x)
    assert rates == [0.1] * 8


def test_elastic_sgd_in_a_loop_of_ones_own_says_nothing(attached: Make) -> None:
    """It is what its name says with any batches."""
    net, optimizer, session = attached(offbeat.ElasticSGD(mega_batch=1))
    step(net, optimizer, torch.ones(3, 1))
    assert session.stats.exchanges == 1
    assert not session.notices


def test_a_scheduler_can_be_stepped_by_merges(attached: Make) -> None:
    net, optimizer, session = attached(offbeat.AdaptiveSGD(mega_batch=2), lr=0.8)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    session.on_merge(scheduler.step)
    loader = session.loader(numbers(24), batch_size=4)
    rates: list[float] = []
    for merged in range(6):
        assert loader.num_merged == merged
        for (x,) in loader.one_mega_batch():
            rates.append(optimizer.param_groups[0]["lr"])
            step(net, optimizer, x)
    assert sorted(set(rates), reverse=True) == [0.8 * 0.5**merge for merge in range(6)]
    assert 2 * loader.num_mega_batches == 6


def test_without_a_loader_a_scheduler_can_be_stepped_by_merges(attached: Make) -> None:
    net, optimizer, session = attached(offbeat.ElasticSGD(mega_batch=2))
    merges: list[int] = []
    session.on_merge(lambda: merges.append(session.stats.steps))
    for _ in range(5):
        step(net, optimizer, torch.ones(4, 1))
    assert len(merges) == 2


@pytest.mark.filterwarnings("ignore:no loader of this session")
def test_without_a_loader_models_are_merged_more_often_at_first(attached: Make) -> None:
    """Mega-batches end as often as ever."""
    net, optimizer, session = attached(offbeat.AdaptiveSGD(mega_batch=4, warmup=2))
    mega_batches: list[int] = []
    session.on_merge(lambda: mega_batches.append(session.stats.steps))
    exchanges = []
    for _ in range(16):
        step(net, optimizer, torch.ones(4, 1))
        exchanges.append(session.stats.exchanges)
    # After each of 2 x 2 steps, then after three, then after whole mega-batches.
    assert exchanges == [1, 2, 3, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 7, 7]
    assert len(mega_batches) == 3


@pytest.mark.filterwarnings("ignore:no loader of this session")
def test_without_a_loader_a_resumed_run_does_not_begin_its_first_steps_anew(attached: Make) -> None:
    """Without a stop it merges after 1, 2, 3, 4, 7, 11 and 15 steps."""
    strategy = offbeat.AdaptiveSGD(mega_batch=4, warmup=2)
    net, optimizer, session = attached(strategy)
    for _ in range(12):
        step(net, optimizer, torch.ones(4, 1))
    saved = session.state_dict()
    net, optimizer, session = attached(strategy)
    session.load_state_dict(saved)
    mega_batches: list[int] = []
    session.on_merge(lambda: mega_batches.append(session.stats.steps))
    exchanges = []
    for _ in range(4):
        step(net, optimizer, torch.ones(4, 1))
        exchanges.append(session.stats.exchanges)
    assert exchanges == [0, 0, 1, 1]
    assert len(mega_batches) == 1


def test_without_mega_batches_there_is_no_merge_to_step_at(attached: Make) -> None:
    _, _, session = attached(offbeat.LocalSGD())
    with pytest.raises(ConfigError, match="the strategy is localsgd, which has no mega-batches"):
        session.on_merge(int)


def test_the_expected_number_of_batches_is_known(attached: Make) -> None:
    _, _, session = attached(offbeat.AdaptiveSGD(mega_batch=4))
    assert len(session.loader(numbers(101), batch_size=10)) == 11


def test_the_rate_is_scaled_in_a_step_with_a_closure(attached: Make) -> None:
    net, optimizer, session = attached(offbeat.AdaptiveSGD(mega_batch=1))
    before = net.bias.item()
    x = next(iter(session.loader(numbers(2), batch_size=8)))[0]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(x).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert net.bias.item() == pytest.approx(before - 0.1 * 2 / 8 * 2)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_step_that_raises_leaves_the_rate_as_it_was(attached: Make) -> None:
    _, optimizer, session = attached(offbeat.AdaptiveSGD(mega_batch=1))
    batches = iter(session.loader(numbers(4), batch_size=8))
    next(batches)
    handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    handle.remove()
    session.close()
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_bounds_that_bind_are_shown(attached: Make) -> None:
    net, optimizer, session = attached(offbeat.AdaptiveSGD(mega_batch=5, warmup=0))
    loader = session.loader(numbers(40), batch_size=4, max_batch_size=3)
    sizes = [len(x) for (x,) in loader if step(net, optimizer, x)]
    assert max(sizes) == 3
    assert any("rank 0 at its largest (3)" in notice for notice in session.notices)


def test_in_step_a_run_resumes(attached: Make) -> None:
    _, _, session = attached(offbeat.AllReduce())
    loader = session.loader(numbers(20), batch_size=6)
    batches = iter(loader)
    first = [index for _ in range(2) for index in next(batches)[0].flatten().int().tolist()]
    state = session.state_dict()
    _, _, second = attached(offbeat.AllReduce())
    again = second.loader(numbers(20), batch_size=6)
    second.load_state_dict(state)
    rest = [index for (x,) in again for index in x.flatten().int().tolist()]
    assert sorted(first + rest) == list(range(20))
    assert (again.epoch, again.step, len(again)) == (1, 0, 4)
    with pytest.raises(CheckpointError, match="another loader"):
        again.load_state_dict({"replicated": {}})


def test_a_position_that_no_loader_is_there_to_take_up_is_warned_of(attached: Make) -> None:
    _, _, session = attached(offbeat.AllReduce())
    next(iter(session.loader(numbers(20), batch_size=6)))
    net, optimizer, second = attached(offbeat.AllReduce())
    second.load_state_dict(session.state_dict())
    second.loader(numbers(20), batch_size=6)
    with pytest.warns(OffbeatWarning, match="takes up 'lockstep_loader'.*make loaders before"):
        step(net, optimizer, torch.ones(1, 1))


@pytest.mark.parametrize(
    ("sizes", "num_batches", "seen_twice"),
    [([8, 8, 8, 8], 4, 0), ([8], 4, 0), ([5, 8], 4, 0), ([1] * 5, 6, 0), ([8] * 17, 6, 1)],
)
def test_in_step_other_ranks_share_out_what_is_left_of_an_epoch(
    sizes: list[int], num_batches: int, seen_twice: int
) -> None:
    def taken(
        driver: Driver, size: int, state: Sequence[Mapping[str, Any]], most: int | None
    ) -> tuple[list[int], dict[str, Any]]:
        net = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters())
        with session_on(driver, net, optimizer, offbeat.AllReduce()) as session:
            loader = session.loader(numbers(112), batch_size=size)
            if state:
                session.load_state_dict(offbeat.reshard(state, driver.world_size, driver.rank))
            some = [index for (x,) in islice(loader, most) for index in x.flatten().int().tolist()]
            assert most or (loader.epoch, loader.step) == (1, 0)
            return some, session.state_dict()

    first = results_of(2, lambda driver: taken(driver, 8, [], num_batches))
    states = [state for _, state in first]
    rest = results_of(len(sizes), lambda driver: taken(driver, sizes[driver.rank], states, None))
    indices = [index for some, _ in first + rest for index in some]
    assert set(indices) == set(range(112))
    assert len(indices) == 112 + seen_twice


@pytest.mark.parametrize("name", ["AllReduce", "AdaptiveSGD", "ElasticSGD"])
@pytest.mark.parametrize("other", [{"seed": 1}, {"dataset": numbers(21)}], ids=["seed", "dataset"])
@pytest.mark.parametrize("stop", [1, 3])
def test_the_middle_of_an_epoch_of_another_order_is_refused(
    attached: Make, name: str, other: dict[str, Any], stop: int
) -> None:
    """Some samples would come twice in it, and others never."""
    options = {} if name == "AllReduce" else {"mega_batch": 2}
    usual = {"dataset": numbers(20), "seed": 0, "batch_size": 6}
    net, optimizer, session = attached(getattr(offbeat, name)(**options))
    loader = session.loader(**usual)
    batches = iter(loader)
    for _ in range(stop):
        step(net, optimizer, next(batches)[0])
    middle = session.state_dict()
    for (x,) in batches:
        step(net, optimizer, x)
    _, _, second = attached(getattr(offbeat, name)(**options))
    second.loader(**usual | other)
    with pytest.raises(CheckpointError, match="in the middle of an epoch of .* make it with these"):
        second.load_state_dict(middle)
    second.load_state_dict(session.state_dict())  # at the end of one, nothing is left of its order


def test_samples_may_be_fetched_at_once_and_collated_otherwise(attached: Make) -> None:
    class AtOnce(list[int]):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [10 * index for index in indices]

    _, _, session = attached(offbeat.AllReduce())
    assert sorted(next(iter(session.loader(AtOnce(range(4)), batch_size=9, collate=list)))) == [
        0,
        10,
        20,
        30,
    ]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("change_after", [0, 3, 6, 7, 9])
def test_in_step_samples_are_divided_otherwise_and_steps_stay_as_they_are(
    change_after: int, num_workers: int
) -> None:
    """An epoch has 7 steps of 8 samples."""

    def steps(driver: Driver, sizes: Sequence[int] | None) -> tuple[list[list[int]], int]:
        net = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters())
        found: list[list[int]] = []
        data = torch.utils.data.DataLoader(
            numbers(56), batch_size=4, shuffle=True, num_workers=num_workers
        )
        with session_on(driver, net, optimizer, offbeat.AllReduce()) as session:
            loader = session.loader(data)
            assert isinstance(loader, LockstepLoader)
            for _ in range(2):
                for (x,) in loader:
                    found.append(step(net, optimizer, x))
                    if sizes and len(found) == change_after:
                        loader.share_out(sizes)
            return found, loader.epoch

    usual = results_of(2, lambda driver: steps(driver, None))
    changed = results_of(2, lambda driver: steps(driver, (7, 1)))
    assert [epochs for _, epochs in usual + changed] == [2] * 4

    def of_steps(ranks: Sequence[tuple[list[list[int]], int]]) -> list[list[int]]:
        pairs = zip(*(found for found, _ in ranks), strict=True)
        return [[index for batch in pair for index in batch] for pair in pairs]

    assert of_steps(changed) == of_steps(usual)
    has_changed = change_after > 0
    assert [len(batch) for batch in changed[0][0]] == [
        7 if has_changed and number >= change_after else 4 for number in range(14)
    ]


def test_in_step_a_resumed_run_divides_samples_as_the_one_before() -> None:
    def rest(driver: Driver, state: Mapping[str, Any] | None) -> tuple[dict[str, Any], list[int]]:
        net = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters())
        with session_on(driver, net, optimizer, offbeat.AllReduce()) as session:
            loader = session.loader(numbers(56), batch_size=4)
            assert isinstance(loader, LockstepLoader)
            if state is not None:
                session.load_state_dict(state)
            batches = iter(loader)
            found = step(net, optimizer, next(batches)[0])
            if state is None:
                loader.share_out((7, 1))
                return copy.deepcopy(session.state_dict()), found
            return {}, found + [index for (x,) in batches for index in step(net, optimizer, x)]

    begun = results_of(2, lambda driver: rest(driver, None))
    ended = results_of(2, lambda driver: rest(driver, begun[driver.rank][0]))
    assert [len(found) for _, found in begun + ended] == [4, 4, 42, 6]
    assert sorted(index for _, found in begun + ended for index in found) == list(range(56))


def test_in_step_each_loader_of_a_session_resumes_at_its_own_place(attached: Make) -> None:
    states: list[dict[str, Any]] = []
    for _ in range(2):
        _, _, session = attached(offbeat.AllReduce())
        loaders = [session.loader(numbers(20), batch_size=size) for size in (2, 4, 5)]
        if states:
            session.load_state_dict(states.pop())
        else:
            for number, loader in enumerate(loaders):
                batches = iter(loader)
                for _ in range(1 + number):
                    next(batches)
            states.append(session.state_dict())
        assert [loader.step for loader in loaders] == [1, 2, 3]


def test_kinds_of_loaders(attached: Make) -> None:
    _, _, session = attached(offbeat.AdaptiveSGD(min_batch_size=4))
    with pytest.raises(ConfigError, match="have 3 samples, but min_batch_size is 4"):
        session.loader(numbers(3), batch_size=3)
    assert isinstance(session.loader(numbers(3), batch_size=4), DispatchLoader)
    with pytest.raises(ConfigError, match="has a loader already"):
        session.loader(numbers(3), batch_size=4)
    _, _, session = attached(offbeat.LocalSGD())
    assert isinstance(session.loader(numbers(3), batch_size=1), LockstepLoader)


@pytest.mark.parametrize(
    ("given", "claims", "said"),
    [
        ({"dataset": iter([1])}, True, "must be of map style"),
        ({"dataset": []}, True, "the dataset is empty"),
        ({"seed": -1}, True, "seed must be an integer of at least 0, got -1"),
        ({"seed": True}, True, "seed"),
        ({"max_batch_size": 0}, True, "max_batch_size must be an integer of at least 1"),
        ({"batch_size": None}, True, "pass batch_size="),
        ({"batch_size": None}, False, "pass batch_size="),
        ({"max_batch_size": 4}, False, "strategies that claim samples"),
        ({"claims_ahead": 1}, False, "strategies that claim samples"),
    ],
)
def test_arguments_that_cannot_work_are_refused(
    given: dict[str, Any], claims: bool, said: str
) -> None:
    usual = {
        "dataset": [1, 2],
        "seed": 0,
        "batch_size": 2,
        "max_batch_size": None,
        "claims_ahead": None,
    }
    arguments = usual | given
    with pytest.raises(ConfigError, match=said):
        data_description(arguments.pop("dataset"), claims=claims, **arguments)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: offbeat.AdaptiveSGD(mega_batch=0), "mega_batch .* of at least 1"),
        (lambda: offbeat.AdaptiveSGD(min_batch_size=0), "min_batch_size .* of at least 1"),
        (lambda: offbeat.AdaptiveSGD(rule="proportionate"), "did you mean 'proportional'"),
        (lambda: offbeat.AdaptiveSGD(rate_scaling="root"), "rate_scaling"),
        (lambda: offbeat.AdaptiveSGD(warmup=-1), "warmup .* of at least 0"),
        (lambda: offbeat.AdaptiveSGD(optimizer_state="mean"), "optimizer_state"),
        (lambda: offbeat.Crossbow(alpha=0.0), r"alpha .* in \(0, 1\]"),
        (lambda: offbeat.Crossbow(period=0), "period"),
    ],
)
def test_options_that_cannot_work_are_refused(build: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_state_of_the_middle_of_a_mega_batch_goes_through_a_distributed_checkpoint(
    attached: Make, tmp_path: Path
) -> None:
    """After a merge in it, which it goes on from."""
    strategy = offbeat.AdaptiveSGD(mega_batch=8, warmup=2)
    net, optimizer, session = attached(strategy)
    batches = iter(session.loader(numbers(48), batch_size=2))
    seen = [index for _ in range(6) for index in step(net, optimizer, next(batches)[0])]
    saved = session.state_dict()["callbacks"]["loader"]["local"]
    assert saved["earlier_shares"]
    dcp.save({"session": session.state_to_save()}, checkpoint_id=tmp_path, no_dist=True)
    net, optimizer, session = attached(strategy)
    loader = session.loader(numbers(48), batch_size=2)
    state = {"session": session.state_to_load(dcp.FileSystemReader(tmp_path).read_metadata())}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    session.load_state_dict(state["session"])
    seen += [index for (x,) in loader for index in step(net, optimizer, x)]
    assert sorted(seen) == list(range(48))


def test_a_gradient_that_no_rank_steps_with_need_not_be_finite(attached: Make) -> None:
    """In the first steps, in which gradients are averaged."""
    net, optimizer, session = attached(offbeat.AdaptiveSGD(mega_batch=40))
    seen: list[int] = []
    for number, (x,) in enumerate(session.loader(numbers(40), batch_size=4)):
        optimizer.zero_grad()
        loss = (net(x / 100) - 1).square().mean()
        (loss * torch.nan if number == 1 else loss).backward()
        seen += x.flatten().int().tolist()
        if number != 1:
            optimizer.step()
    assert sorted(seen) == list(range(40))
    assert net.weight.isfinite().all()


def test_in_step_who_has_asked_for_two_gets_two_in_steps_that_are_not_full() -> None:
    for number in range(num_steps(15, [2, 6])):  # 7 samples, and 8
        assert min(end - begin for begin, end in spans_of(15, [2, 6], number)) == 2


def test_in_step_a_worker_that_has_come_back_divides_samples_as_those_before() -> None:
    store = HashStore()
    network: Any = SimpleNamespace(own_store=lambda: store)

    def made(driver: Driver, *, returns: bool) -> LockstepLoader:
        loader = make_loader(
            numbers(20),
            callbacks=[],
            driver=driver,
            control=Stream(0),
            network=network,
            weigh=lambda num_samples: None,
            notify=lambda remark: None,
            returns=returns,
            seed=0,
            batch_size=2 + driver.rank,
            max_batch_size=None,
            claims_ahead=None,
            collate=None,
        )
        assert isinstance(loader, LockstepLoader)
        return loader

    founders = results_of(2, lambda driver: made(driver, returns=False))
    back = made(RejoinedDriver(1, 2, on_closed=lambda: None), returns=True)
    assert back.asked == (2, 3)
    batches = [[x.tolist() for (x,) in loader] for loader in (founders[1], back)]
    assert batches[0] == batches[1]


@pytest.mark.parametrize("is_by_ranks", [False, True])
def test_in_step_a_worker_that_has_come_back_goes_on_at_the_place_of_its_checkpoint(
    *, is_by_ranks: bool
) -> None:
    """It began with the first epoch again, however far its peers were."""
    store = HashStore()
    network: Any = SimpleNamespace(own_store=lambda: store, cipher="curve")

    def begun(driver: Driver, *, returns: bool) -> tuple[Session, LockstepLoader]:
        net = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters())
        connection = Connection(driver=driver, network=network)
        strategy = offbeat.AllReduce()
        session = Session(net, optimizer, strategy, connection=connection, returns=returns)
        loader = session.loader(numbers(20), batch_size=2)
        assert isinstance(loader, LockstepLoader)
        return session, loader

    def job(driver: Driver) -> tuple[dict[str, Any], list[Any]]:
        session, loader = begun(driver, returns=False)
        with session:
            assert len(list(loader)) == len(list(islice(loader, 3))) + 2
            state = session.state_to_save() if is_by_ranks else session.state_dict()
            return copy.deepcopy(state), [x.tolist() for (x,) in loader]

    _, (state, rest) = results_of(2, job)
    session, loader = begun(RejoinedDriver(1, 2, on_closed=lambda: None), returns=True)
    with session:
        session.load_state_dict(state)
        assert [x.tolist() for (x,) in loader] == rest
        assert loader.epoch == 2


def test_in_step_a_loop_goes_on_in_the_later_epoch_whose_state_is_loaded_in_it() -> None:
    def job(driver: Driver) -> tuple[list[int], list[int]]:
        net = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters())
        with session_on(driver, net, optimizer, offbeat.AllReduce()) as session:
            loader = session.loader(numbers(8), batch_size=2)
            begun = copy.deepcopy(session.state_dict())
            for _ in range(2):
                first, second = [step(net, optimizer, x) for (x,) in loader]
            later = copy.deepcopy(session.state_dict())
            third = [index for (x,) in loader for index in step(net, optimizer, x)]
            session.load_state_dict(begun)
            found = list[int]()
            for (x,) in loader:
                if not found:
                    session.load_state_dict(later)
                found += step(net, optimizer, x)
            assert len(first) == len(second) == 2
            return found, third

    for found, third in results_of(2, job):
        assert found[2:] == third  # behind the batch that it had
