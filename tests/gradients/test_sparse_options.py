"""What options of the sparse strategies do to the mean that ranks apply, with ranks as threads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import offbeat
from offbeat.errors import ConfigError
from offbeat.strategies.sparse_gradient import SparseGradientStrategy
from offbeat.transport.driver import Ticket
from offbeat.transport.operations import Operation
from thread_support.world import ThreadDriver, ThreadWorld, results_of, session_on

NUM_RANKS = 3
Means = list[list[torch.Tensor]]
"""By step and parameter."""


def net() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(20, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    draw = torch.Generator().manual_seed(1)  # the global one is shared by all threads
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    return model


def backward(model: torch.nn.Module, rank: int, step: int) -> None:
    draw = torch.Generator().manual_seed(100 * step + rank)
    model(torch.randn(8, 20, generator=draw)).square().mean().backward()


def applied(strategy: SparseGradientStrategy, num_steps: int) -> Means:
    """The gradients that ranks are given; parameters do not move."""

    def job(driver: ThreadDriver) -> Means:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        means: Means = []
        with session_on(driver, model, optimizer, strategy):
            for step in range(num_steps):
                backward(model, driver.rank, step)
                means.append(
                    [
                        torch.zeros_like(p) if p.grad is None else p.grad.clone()
                        for p in model.parameters()
                    ]
                )
                optimizer.step()
                optimizer.zero_grad()
        return means

    first, *others = results_of(NUM_RANKS, job)
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)
    return first


def whole(num_steps: int) -> Means:
    """What `AllReduce` would apply."""
    means: Means = []
    for step in range(num_steps):
        model = net()
        for rank in range(NUM_RANKS):
            backward(model, rank, step)
        means.append([p.grad / NUM_RANKS for p in model.parameters() if p.grad is not None])
    return means


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_small_parameters_are_sent_whole_and_others_are_not(collective: str) -> None:
    strategy = offbeat.GTopK(density=0.05, collective=collective, dense_below=48)
    for mean, expected in zip(applied(strategy, 2), whole(2), strict=True):
        for mine, its in zip(mean, expected, strict=True):
            if its.numel() < 48:
                torch.testing.assert_close(mine, its)
            else:
                assert 0 < mine.count_nonzero() <= NUM_RANKS * max(1, round(0.05 * 368))


@pytest.mark.parametrize(
    "options",
    [
        {"collective": "all_gather"},
        {"collective": "tree"},
        {"collective": "reduce_scatter", "clip_norm": 0.01},
        {"collective": "dense"},
    ],
)
@pytest.mark.parametrize("num_ranks", [2, 5])
def test_small_parameters_are_as_where_everything_is_sent(
    options: dict[str, Any], num_ranks: int
) -> None:
    """Clipped, and where a rank has nothing to contribute to a step."""

    def job(driver: ThreadDriver, strategy: SparseGradientStrategy) -> list[torch.Tensor]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        found = []
        with session_on(driver, model, optimizer, strategy):
            for step in range(4):
                if step != 2 or driver.rank:
                    backward(model, driver.rank, step)
                optimizer.step()
                found += [p.grad.clone() for p in model.parameters() if p.numel() < 48]  # type: ignore[union-attr]
                optimizer.zero_grad()
        return found

    sparse = offbeat.GTopK(density=0.05, dense_below=48, **options)
    everything = replace(sparse, density=1.0, dense_below=0)
    for mine, its in zip(
        results_of(num_ranks, lambda driver: job(driver, sparse)),
        results_of(num_ranks, lambda driver: job(driver, everything)),
        strict=True,
    ):
        torch.testing.assert_close(mine, its)


def test_a_rank_that_fails_after_its_small_parameters_were_launched_stops_all() -> None:
    """The first layer's weight comes last in backward."""
    strategy = offbeat.GTopK(density=0.05, collective="all_gather", dense_below=48)

    def job(driver: ThreadDriver) -> str:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

        def fail(gradient: torch.Tensor) -> torch.Tensor:
            raise ValueError("no such luck")

        with session_on(driver, model, optimizer, strategy):
            backward(model, driver.rank, 0)
            optimizer.step()
            optimizer.zero_grad()
            if driver.rank == 1:
                model[0].weight.register_hook(fail)  # type: ignore[index,operator]
            try:
                backward(model, driver.rank, 1)
            except (ValueError, offbeat.OffbeatError) as error:
                return str(error)
        return "nothing"

    others, failed, _ = results_of(NUM_RANKS, job)
    assert failed == "no such luck"
    assert "raised inside backward in exchange 2" in others


class Watched(ThreadDriver):
    """Remembers on which channels something was begun; each collective has one of its own."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        super().__init__(world, rank)
        self.channels = set[int]()

    def start(self, operation: Operation, channel: int) -> Ticket:
        self.channels.add(channel)
        return super().start(operation, channel)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"density": 0.05}, 1),
        ({"density": 0.05, "collective": "tree"}, 1),
        ({"density": 0.05, "bucket_mib": 1e-3}, 2),  # the others are cut into two buckets
        ({"density": 0.05, "bucket_mib": 5e-5}, 4),  # too small for both biases
        ({"density": 0.05, "warmup": ((1.0, 1),)}, 1),  # all entries, and the tally with them
    ],
)
def test_small_parameters_travel_in_the_messages_of_the_others(
    options: dict[str, Any], expected: int
) -> None:
    strategy = offbeat.GTopK(**{"collective": "all_gather", "dense_below": 48, **options})

    def job(driver: ThreadDriver) -> int:
        watched = Watched(driver.world, driver.rank)
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with session_on(watched, model, optimizer, strategy):
            watched.channels.clear()
            backward(model, driver.rank, 0)
            return len(watched.channels)

    assert results_of(NUM_RANKS, job) == [expected] * NUM_RANKS


def test_small_parameters_of_many_ranks_travel_by_themselves() -> None:
    """Among P ranks P - 1 copies reach each, where an all-reduce of their own brings two."""
    sizes = [torch.nn.Parameter(torch.zeros(size)) for size in (1000, 1000, 1_000_000)]
    carried = [offbeat.GTopK().carries_small(sizes, world_size) for world_size in (2, 9, 10)]
    assert carried == [True, True, False]
    assert not offbeat.GTopK(dense_below=0).carries_small(sizes, 2)
    halves = [*sizes[1:], torch.nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))]
    assert not offbeat.GTopK().carries_small(halves, 2)


def test_a_gradient_that_is_not_finite_in_a_small_parameter_skips_the_step_everywhere() -> None:
    strategy = offbeat.GTopK(density=0.05, collective="all_gather", dense_below=48)

    def job(driver: ThreadDriver) -> tuple[int, list[bool]]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with session_on(driver, model, optimizer, strategy) as session:
            backward(model, driver.rank, 0)
            optimizer.step()
            optimizer.zero_grad()
            before = [parameter.detach().clone() for parameter in model.parameters()]
            if driver.rank == 1:
                model[2].bias.register_hook(lambda gradient: gradient * torch.inf)  # type: ignore[operator,union-attr,index]
            backward(model, driver.rank, 1)
            optimizer.step()
            after = list(model.parameters())
            moved = [not torch.equal(*pair) for pair in zip(before, after, strict=True)]
            return session.stats.skipped_steps, moved

    for skipped, moved in results_of(NUM_RANKS, job):
        assert skipped == 1
        assert not any(moved)


@pytest.mark.parametrize("selection", ["exact", "reuse"])
def test_by_layer_each_parameter_has_the_same_density(selection: Any) -> None:
    """Union and global top-k, which lets no layer send more than it has selected."""
    for apply in ("union", "global"):
        strategy = offbeat.GTopK(
            density=0.05,
            collective="all_gather",
            apply=apply,  # type: ignore[arg-type]
            scope="layer",
            selection=selection,
        )
        for mean in applied(strategy, 3):
            counts = [(int(each.count_nonzero()), each.numel()) for each in mean]
            for count, size in counts:
                assert count <= NUM_RANKS * max(1, round(0.06 * size))
            if apply == "union":
                assert all(count >= max(1, round(0.04 * size)) for count, size in counts)


def test_the_first_steps_of_a_warm_up_may_send_everything() -> None:
    strategy = offbeat.GTopK(
        density=0.01, collective="reduce_scatter", warmup=((1.0, 2), (0.25, 1))
    )
    means = applied(strategy, 4)
    torch.testing.assert_close(means[:2], whole(4)[:2])
    sent = [sum(int(mean.count_nonzero()) for mean in step) for step in means[2:]]
    size = sum(p.numel() for p in net().parameters())
    assert sent[0] == pytest.approx(0.25 * size, rel=0.05)
    assert sent[1] == pytest.approx(0.01 * size, abs=2)


@pytest.mark.parametrize(
    "warmup",
    [(), ((0.5, 0),), ((0.0, 3),), ((1.5, 3),), ((0.5, 2.5),), (0.5, 3), "0.5", "0.5x", "paper's"],
)
def test_a_warm_up_that_is_none_is_refused(warmup: object) -> None:
    with pytest.raises(ConfigError, match=r"pairs of a density in \(0, 1\] and a number"):
        offbeat.GTopK(warmup=warmup)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (offbeat.GTopK(density=0.01), 1024),
        (offbeat.TopK(density=0.002), 1024),
        (offbeat.TopK(density=0.001), 0),
        (offbeat.GTopK(), 1024),
        (offbeat.GTopK(density=0.01, variant="paper", collective="tree"), 0),
        (offbeat.GTopK(density=0.01, dense_below=0), 0),
        (offbeat.GTopK(density=0.001, dense_below=200), 200),
    ],
)
def test_small_parameters_are_sent_whole_by_themselves_where_they_are_few(
    strategy: SparseGradientStrategy, expected: int
) -> None:
    model = torch.nn.Linear(256, 100)  # of whose elements 1 in 257 is a bias
    assert strategy.small_below(list(model.parameters())) == expected
    assert replace(strategy, dense_below=5).small_below(list(model.parameters())) == 5
    small = torch.nn.Linear(20, 10)  # which is small altogether
    if strategy.dense_below == "auto":
        assert strategy.small_below(list(small.parameters())) == 0


def test_a_scope_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="scope must be one of 'bucket', 'layer', got 'model'"):
        offbeat.TopK(scope="model")  # type: ignore[arg-type]


@pytest.mark.parametrize("dense_below", [-1, 2.5, True])
def test_a_size_that_is_none_is_refused(dense_below: object) -> None:
    with pytest.raises(ConfigError, match="dense_below must be an integer of at least 0"):
        offbeat.TopK(dense_below=dense_below)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("collective", "apply", "said"),
    [
        ("all_gather", "auto", "apply='auto': all entries that any rank sent are applied, because"),
        ("all_gather", "global", None),
        ("reduce_scatter", "auto", None),
        ("dense", "auto", None),
    ],
)
def test_it_is_said_once_what_is_applied(collective: str, apply: str, said: str | None) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    strategy = offbeat.GTopK(density=0.1, collective=collective, apply=apply)  # type: ignore[arg-type]
    with offbeat.attach(model, optimizer, strategy) as session:
        for step in range(3):
            backward(model, 0, step)
            optimizer.step()
        remarks = [notice for notice in session.notices if "apply=" in notice]
    assert [said in remark for remark in remarks if said] == [True] * (said is not None)
    assert bool(remarks) == (said is not None)


def test_five_ranks_agree_on_a_density_and_a_resumed_run_begins_with_it() -> None:
    def job(driver: ThreadDriver) -> list[dict[str, Any]]:
        model, choices = net(), list[dict[str, Any]]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        state: dict[str, Any] = {}
        for steps in (range(5), range(5, 7)):
            with session_on(driver, model, optimizer, offbeat.GTopK()) as session:
                if state:
                    session.load_state_dict(state)
                for step in steps:
                    backward(model, driver.rank, step)
                    optimizer.step()
                    optimizer.zero_grad()
                state = session.state_dict()
                chosen = state["parts"]
                choices.append(
                    {
                        "density": chosen["density_choice"]["replicated"]["density"],
                        "exchanges": chosen["density_choice"]["replicated"]["num_exchanges"],
                        "links": chosen["collective_choice"]["replicated"],
                    }
                )
        return choices

    ranks = results_of(5, job)
    assert all(choices == ranks[0] for choices in ranks)
    first, resumed = ranks[0]
    assert (first.pop("exchanges"), resumed.pop("exchanges")) == (5, 7)
    assert resumed == first
