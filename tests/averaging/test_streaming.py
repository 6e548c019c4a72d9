"""Averages that travel while training goes on, against their papers' algorithms in one process."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch

import offbeat
from offbeat.averaging.periodic import Everyone
from offbeat.averaging.streaming import Streaming, StreamingMean, fragments_of
from offbeat.errors import ConfigError
from offbeat.transport.driver import Stream
from offbeat.transport.single_rank import SingleRank
from offbeat.weights.model_weights import BufferNames, ModelWeights
from thread_support.nets import make_model, parameters_of, step_of, trained
from thread_support.world import ThreadDriver, results_of, session_on

RANKS, LR = 3, 0.05


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR)


def run(strategy: offbeat.LocalSGD, num_steps: int) -> list[list[torch.Tensor]]:
    return trained(RANKS, strategy, num_steps, optimizer_of=sgd, held=parameters_of)


def reference(
    num_steps: int, *, interval: int, fragments: int, delay: int, mix: float | None, outer: Any
) -> list[list[torch.Tensor]]:
    """Streaming DiLoCo with all ranks in one process."""
    models = [make_model() for _ in range(RANKS)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=LR) for model in models]
    anchor = copy.deepcopy(models[0])
    parts = [list(each) for each in fragments_of(dict(anchor.named_parameters()), fragments)]
    outers = [outer([p for n, p in anchor.named_parameters() if n in part]) for part in parts]
    flying: tuple[int, int, list[dict[str, torch.Tensor]]] | None = None
    number = 0
    for step in range(1, num_steps + 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            step_of(model, optimizer, rank, step - 1)
        if step % interval == 0:
            sent = [
                {n: p.detach().clone() for n, p in model.named_parameters()} for model in models
            ]
            flying = (step, number % len(parts), sent)
            number += 1
        if flying is None or step < flying[0] + delay:
            continue
        _, place, sent = flying
        flying = None
        for name in parts[place]:
            whole = anchor.get_parameter(name)
            whole.grad = whole.detach() - sum(each[name] for each in sent) / RANKS
        outers[place].step()
        outers[place].zero_grad()
        with torch.no_grad():
            for model, begun in zip(models, sent, strict=True):
                for name in parts[place]:
                    own, new = model.get_parameter(name), anchor.get_parameter(name).detach()
                    if mix is None:
                        own.add_(new - begun[name])
                    else:
                        own.copy_(mix * own + (1 - mix) * new)
    return [[p.detach().clone() for p in model.parameters()] for model in models]


@pytest.mark.parametrize(
    ("streaming", "outer"),
    [("1x0", "diloco"), ("1x2", None), ("3x1", None), ("2x2x0.5", "diloco"), ("3x0x0", "diloco")],
)
def test_models_are_those_of_the_paper(streaming: str, outer: str | None) -> None:
    chosen = Streaming.of(streaming)
    make = offbeat.Outer() if outer else offbeat.Outer(lr=1.0, momentum=0.0, nesterov=False)
    period = 3 * chosen.fragments
    found = run(offbeat.LocalSGD(period=period, outer=outer, exchange=streaming), 20)
    expected = reference(
        20, interval=3, fragments=chosen.fragments, delay=chosen.delay, mix=chosen.mix, outer=make
    )
    for mine, theirs in zip(found, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_in_few_bits_ranks_end_near_those_of_whole_changes() -> None:
    whole, coded = (
        run(offbeat.LocalSGD(period=4, exchange="2x1", codec=codec), 40)
        for codec in (None, "linear8")
    )
    for one, other in zip(whole[0], coded[0], strict=True):
        assert not torch.equal(one, other)
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


def test_answers_leave_while_an_average_travels() -> None:
    """What an owner sends of a sum in few bits is made of what it gets. If it left at the merge
    only, half of the exchange would be waited for.
    """
    strategy = offbeat.LocalSGD(period=6, warmup=0, exchange="1x4", codec="linear4")
    together = threading.Barrier(RANKS)

    def job(driver: ThreadDriver) -> list[int]:
        model, sent = make_model(), list[int]()
        optimizer = sgd(model)
        with session_on(driver, model, optimizer, strategy) as session:
            for step in range(9):
                step_of(model, optimizer, driver.rank, step)
                sent.append(session.stats.messages_sent)
                together.wait(60)
        return sent

    for sent in results_of(RANKS, job):
        local, launched, *later = (number - sent[0] for number in sent[4:])
        assert local == 0
        assert launched >= RANKS - 1  # who launches last has what it answers already
        assert later == [2 * (RANKS - 1)] * 3


def test_the_mean_of_all_ranks_moves_by_nothing_but_their_steps() -> None:
    """With the mean as it is, merging late moves ranks and not their mean."""
    late, apart = (
        run(offbeat.LocalSGD(period=3, exchange=streaming, outer=None), steps)
        for streaming, steps in (("1x1", 4), ("1x2", 4))  # merged after step 4, and not yet
    )
    for place in range(len(late[0])):
        one, other = (sum(rank[place] for rank in ranks) for ranks in (late, apart))
        torch.testing.assert_close(one, other)
        assert not torch.allclose(late[0][place], apart[0][place])


@pytest.mark.parametrize("streaming", ["1x0", "1x1x0.5"])
def test_a_parameter_that_is_frozen_within_a_period_comes_to_the_mean(streaming: str) -> None:
    strategy = offbeat.LocalSGD(period=4, exchange=streaming, outer="diloco")

    def job(driver: ThreadDriver) -> list[torch.Tensor]:
        model = make_model()
        optimizer = sgd(model)
        with session_on(driver, model, optimizer, strategy):
            held = []
            for step in range(14):
                if step == 6:
                    model[0].weight.requires_grad_(False)
                if step in (6, 9, 13):
                    held.append(model[0].weight.detach().clone())
                step_of(model, optimizer, driver.rank, step)
            return held

    frozen, averaged, later = zip(*results_of(RANKS, job), strict=True)
    mean = sum(frozen) / RANKS
    assert not any(torch.allclose(each, mean) for each in frozen)
    for each in (*averaged, *later):
        torch.testing.assert_close(each, mean)


@pytest.mark.parametrize("codec", ["linear4", offbeat.WeightCodec(density=0.3)], ids=str)
@pytest.mark.parametrize("last", [12, 13])  # after 12 steps an average travels, too
def test_a_run_goes_on_from_a_state_saved_while_an_average_travels(codec: Any, last: int) -> None:
    strategy = offbeat.LocalSGD(period=4, exchange="2x1", outer="diloco", codec=codec)

    def job(driver: ThreadDriver) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        with session_on(driver, model, optimizer, strategy) as session:
            for step in range(6):
                step_of(model, optimizer, driver.rank, step)
            saved = session.state_dict(), copy.deepcopy(model.state_dict())
            for step in range(6, last):
                step_of(model, optimizer, driver.rank, step)
            went_on = [parameter.detach().clone() for parameter in model.parameters()]
            session.load_state_dict(saved[0])
            model.load_state_dict(saved[1])
            for step in range(6, last):
                step_of(model, optimizer, driver.rank, step)
            return went_on, [parameter.detach().clone() for parameter in model.parameters()]

    for went_on, resumed in results_of(RANKS, job):
        assert all(torch.equal(one, other) for one, other in zip(went_on, resumed, strict=True))


@pytest.mark.parametrize("outer", [None, "diloco"])
def test_a_state_that_is_saved_as_soon_as_it_is_loaded_is_the_same(outer: str | None) -> None:
    """Without a codec nothing but the state knows then what travels."""
    strategy = offbeat.LocalSGD(period=4, exchange="1x2", outer=outer)

    def job(driver: ThreadDriver) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        model = make_model()
        optimizer = sgd(model)
        with session_on(driver, model, optimizer, strategy) as session:
            for step in range(5):
                step_of(model, optimizer, driver.rank, step)
            saved = session.state_dict(), copy.deepcopy(model.state_dict())
            for step in (5, 6):
                step_of(model, optimizer, driver.rank, step)
            went_on = parameters_of(model, optimizer)
            session.load_state_dict(saved[0])
            session.load_state_dict(session.state_dict())
            model.load_state_dict(saved[1])
            for step in (5, 6):
                step_of(model, optimizer, driver.rank, step)
            return went_on, parameters_of(model, optimizer)

    for went_on, resumed in results_of(RANKS, job):
        assert all(torch.equal(one, other) for one, other in zip(went_on, resumed, strict=True))


def test_modules_may_have_names_with_slashes() -> None:
    strategy = offbeat.LocalSGD(period=2, exchange="2x0", outer="diloco")
    model = torch.nn.ModuleDict({"glue/sst2": torch.nn.Linear(2, 1), "sst2": torch.nn.Linear(2, 1)})
    optimizer = sgd(model)
    with offbeat.attach(model, optimizer, strategy) as session:
        for _ in range(4):
            sum(parameter.sum() for parameter in model.parameters()).backward()
            optimizer.step()
        state = session.state_dict()
        session.load_state_dict(state)
        entries, again = (
            each["callbacks"]["streaming_average"]["replicated"]
            for each in (state, session.state_dict())
        )
        assert entries.keys() == again.keys()
        assert "outer/SGD/momentum_buffer/glue/sst2.weight" in entries


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"exchange": "3x0"}, "multiple of the fragments"),
        ({"exchange": "2x5"}, "delay below"),
        ({"exchange": "0x0"}, "fragments >= 1"),
        ({"exchange": "soon"}, "4x2"),
        ({"exchange": "2x1", "period": "adaptive"}, "number of steps"),
        ({"exchange": "2x1", "optimizer_state": "averaged"}, "would do nothing"),
        ({"exchange": "2x1", "warmup": 5}, "would do nothing"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        offbeat.LocalSGD(**{"period": 10, **options})


def test_fragments_are_runs_of_about_equal_elements() -> None:
    sizes = [10, 1, 1, 1, 7, 20, 3, 3, 3, 11]
    named = {str(i): torch.nn.Parameter(torch.zeros(size)) for i, size in enumerate(sizes)}
    fragments = fragments_of(named, 3)
    assert [name for fragment in fragments for name in fragment] == list(named)
    assert [sum(p.numel() for p in each.values()) for each in fragments] == [20, 20, 20]
    assert len(fragments_of({"0": named["0"]}, 4)) == 1


@pytest.mark.parametrize("fragments", [6, 12])
def test_no_fragment_is_averaged_more_often_than_once_a_period(fragments: int) -> None:
    """Where one parameter is larger than a fragment, and where there are more fragments than
    parameters.
    """

    def job(driver: ThreadDriver) -> list[bool]:
        model = make_model()
        optimizer = sgd(model)
        strategy = offbeat.LocalSGD(period=12, exchange=f"{fragments}x0")
        apart = []
        with session_on(driver, model, optimizer, strategy) as session:
            for step in range(24):
                step_of(model, optimizer, driver.rank, step)
                apart.append(len({repr(m) for m in session.gather(model[0].weight.tolist())}) > 1)
        return apart

    (apart, *_) = results_of(RANKS, job)
    assert [step for step, is_apart in enumerate(apart, start=1) if not is_apart] == [
        12 // fragments,
        12 + 12 // fragments,
    ]


def test_a_mean_that_was_read_of_a_file_goes_where_its_parameter_is() -> None:
    weight = torch.nn.Parameter(torch.empty(3, device="meta"))
    named = {"weight": weight}
    exchange = StreamingMean(
        ModelWeights(parameters=named, buffers=dict, chosen=BufferNames()),
        named,
        Everyone(SingleRank(), Stream(0)),
        streaming=Streaming(delay=1),
        outer=offbeat.Outer(),
        codec=None,
    )
    kinds = ("arrived", "anchor", "outer/SGD/momentum_buffer")
    replicated = {f"{kind}/weight": torch.ones(3) for kind in kinds}
    local = {"world_size": 1, "begun/weight": torch.ones(3)}
    exchange.load({"replicated": replicated, "local": local})
    assert exchange.state()["replicated"]["arrived/weight"].is_meta
