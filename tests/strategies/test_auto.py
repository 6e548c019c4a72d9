"""`Auto`: another strategy takes over between two steps, nothing is lost by that, and the choice is
that of measurements and predictions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import offbeat
from conformance_support.lent import lent
from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context, Notices, stream_counter
from offbeat.errors import ConfigError, NonFiniteError
from offbeat.simulation.measured import MeasuredRun, Predicted
from offbeat.strategies import auto, choice
from offbeat.strategies.base import Strategy
from offbeat.strategies.choice import CANDIDATES, EARLY_LOOK, FIRST_LOOK, LEAST_SEEN, SETTLING
from offbeat.transport import host
from offbeat.transport.connect import RejoinedDriver
from offbeat.transport.single_rank import SingleRank
from thread_support.nets import make_model, step_of
from thread_support.world import ThreadDriver, results_of, session_on

TAKES_OVER: dict[str, Strategy] = {
    "topk": offbeat.TopK(density=0.1, warmup=None),
    "gtopk": offbeat.GTopK(density=0.1, collective="reduce_scatter", warmup=None),
    "powersgd": offbeat.PowerSGD(rank=1),
    "allreduce in 8 bits": offbeat.AllReduce(codec="linear8"),
    "localsgd": offbeat.LocalSGD(period=3, warmup=0),
    "localsgd in 4 bits": offbeat.LocalSGD(period=3, codec="linear4"),
}


def constant_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """A step whose gradient is the same wherever the model is, and another one on each rank."""
    draw = torch.Generator().manual_seed(rank)
    loss = sum(
        (torch.randn(p.shape, generator=draw, dtype=p.dtype) * p).sum() for p in model.parameters()
    )
    assert isinstance(loss, torch.Tensor)
    # Through the model's output, which is where a session sees a backward pass begin.
    (loss + 0 * model(torch.zeros(1, 4, dtype=torch.float64)).sum()).backward()
    optimizer.step()
    optimizer.zero_grad()


class Switcher(Callback):
    """Lets `wanted` take over."""

    state_key = "switcher"

    def __init__(self, context: Context) -> None:
        self._context = context
        self.wanted: Strategy | None = None

    def on_after_step(self) -> None:
        if self.wanted is not None and self._context.switch(self.wanted, self, 0):
            self.wanted = None


@dataclass(frozen=True, kw_only=True)
class Changing(Strategy):
    """Begins as AllReduce; a test says when it changes."""

    name = "changing"
    replicas_differ = True

    def begins_as(self, *, returns: bool = False) -> Strategy:
        return offbeat.AllReduce()

    def build(self, context: Context) -> list[Callback]:
        return [*self.begins_as().build(context), Switcher(context)]


def take_over(session: offbeat.Session, strategy: Strategy, step: Callable[[], None]) -> int:
    """Take steps until `strategy` is at work. Returns how many."""
    switcher = session.callbacks[-1]
    assert isinstance(switcher, Switcher)
    switcher.wanted, taken = strategy, 0
    while switcher.wanted is not None and taken < 10:
        step()
        taken += 1
    assert session.acting == strategy
    return taken


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", TAKES_OVER)
def test_nothing_is_lost_by_a_change(world_size: int, name: str) -> None:
    """With constant gradients the model has moved by the sum of all of them, whoever was at work
    when.
    """

    def job(driver: ThreadDriver) -> tuple[list[torch.Tensor], int]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        step = lambda: constant_step(model, optimizer, driver.rank)  # noqa: E731
        with session_on(driver, model, optimizer, Changing()) as session:
            step()
            taken = 1 + take_over(session, TAKES_OVER[name], step)
            for _ in range(4):
                step()
            taken += 4 + take_over(session, offbeat.AllReduce(), step)
            step()
            assert session.stats.steps == taken + 1
            assert session.stats.exchanges > 2
            return [p.detach().clone() for p in model.parameters()], taken + 1

    results = results_of(world_size, job)
    for rank in range(world_size):
        tensors, taken = results[rank]
        draws = [torch.Generator().manual_seed(each) for each in range(world_size)]
        for begun, found in zip(make_model().parameters(), tensors, strict=True):
            noise = [torch.randn(begun.shape, generator=draw, dtype=begun.dtype) for draw in draws]
            expected = begun - 0.01 * taken * torch.stack(noise).mean(0)
            torch.testing.assert_close(
                found, expected, rtol=0, atol=1e-6 if "bits" in name else 1e-9
            )


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("name", TAKES_OVER)
def test_replicas_are_equal_after_a_change(name: str, make: type[torch.optim.Optimizer]) -> None:
    def job(driver: ThreadDriver) -> list[torch.Tensor]:
        model = make_model()
        options = {"momentum": 0.9} if make is torch.optim.SGD else {}
        optimizer = make(model.parameters(), lr=0.01, **options)  # type: ignore[call-arg]
        count = iter(range(100))
        step = lambda: step_of(model, optimizer, driver.rank, next(count))  # noqa: E731
        with session_on(driver, model, optimizer, Changing()) as session:
            step()
            take_over(session, TAKES_OVER[name], step)
            for _ in range(4):
                step()
            take_over(session, lent(offbeat.AllReduce(), replica_check_interval=1), step)
            for _ in range(3):
                step()
            states = [optimizer.state[p] for p in model.parameters()]
            moments = [v for state in states for v in state.values() if torch.is_tensor(v)]
            return [*(p.detach().clone() for p in model.parameters()), *moments]

    first, second = results_of(2, job)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_a_last_step_that_is_skipped_sends_nothing_and_is_taken_again() -> None:
    """What is owed when the step before a change is not finite must not be lost."""

    def job(driver: ThreadDriver) -> list[torch.Tensor]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        step = lambda: constant_step(model, optimizer, driver.rank)  # noqa: E731
        with session_on(driver, model, optimizer, Changing()) as session:
            take_over(session, TAKES_OVER["topk"], step)  # 2 steps
            for _ in range(4):
                step()
            switcher = session.callbacks[-1]
            assert isinstance(switcher, Switcher)
            switcher.wanted = offbeat.AllReduce()
            step()  # after which the change is asked for
            (model(torch.ones(1, 4, dtype=torch.float64)).sum() * float("nan")).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert session.acting.name == "topk"
            step()
            assert session.acting.name == "allreduce"
            return [p.detach().clone() for p in model.parameters()]

    for tensors in results_of(2, job):
        draws = [torch.Generator().manual_seed(each) for each in range(2)]
        for begun, found in zip(make_model().parameters(), tensors, strict=True):
            noise = [torch.randn(begun.shape, generator=draw, dtype=begun.dtype) for draw in draws]
            expected = begun - 0.01 * 8 * torch.stack(noise).mean(0)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_clipping_goes_on_with_the_strategy_that_takes_over() -> None:
    def job(driver: ThreadDriver) -> float:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with session_on(driver, model, optimizer, Changing()) as session:

            def step() -> None:
                (1e3 * model(torch.ones(1, 4, dtype=torch.float64)).sum()).backward()
                session.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()

            step()
            take_over(session, TAKES_OVER["topk"], step)
            before = [p.detach().clone() for p in model.parameters()]
            step()
            after = model.parameters()
            moved = [(p.detach() - q).square().sum() for p, q in zip(after, before, strict=True)]
            return float(torch.stack(moved).sum().sqrt())

    for moved in results_of(2, job):
        assert 0 < moved < 5  # with what was owed; not clipped it would be hundreds


@pytest.mark.filterwarnings("ignore::offbeat.errors.OffbeatWarning")
def test_a_model_that_is_loaded_alone_is_said_where_what_took_over_goes_on_from_the_last() -> None:
    def job(driver: ThreadDriver) -> list[bool]:
        model, told = make_model(), list[bool]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        step = lambda: constant_step(model, optimizer, driver.rank)  # noqa: E731
        with session_on(driver, model, optimizer, Changing()) as session:
            step()
            for each in (offbeat.AllReduce(), TAKES_OVER["localsgd in 4 bits"]):
                take_over(session, each, step)
                model.load_state_dict(make_model().state_dict())
                step()
                said = "a model was loaded between two steps"
                told.append(any(said in notice for notice in session.notices))
        return told

    assert results_of(2, job) == [[False, True]] * 2


Costs = Callable[[str, MeasuredRun], float]

PERIODS = {auto.built(spec): candidate.period for spec, candidate in CANDIDATES.items()}


def predict_by(
    monkeypatch: pytest.MonkeyPatch, costs: Costs, *, most_waiting: float = float("inf")
) -> None:
    """Let `costs` predict steps, by strategy, however little of a step is waiting; early where more
    than `most_waiting` is.
    """

    def predicted(strategy: Strategy, run: MeasuredRun, *, period: int = 1) -> Predicted:
        is_beginning = getattr(strategy, "period", 0) == 1
        assert period == (1 if is_beginning else PERIODS.get(strategy, 1))
        return Predicted(costs("beginning" if is_beginning else strategy.name, run), 1.0)

    monkeypatch.setattr(auto, "predict", predicted)
    monkeypatch.setattr(choice, "LEAST_MARGIN", float("-inf"))
    monkeypatch.setattr(choice, "MOST_WAITING", most_waiting)


def record_runs(monkeypatch: pytest.MonkeyPatch) -> list[MeasuredRun]:
    """What predictions are asked for will be in this list."""
    seen: list[MeasuredRun] = []

    def costs(name: str, run: MeasuredRun) -> float:
        seen.append(run)
        return 1.0

    predict_by(monkeypatch, costs)
    return seen


def choosing(
    monkeypatch: pytest.MonkeyPatch,
    costs: Costs,
    *,
    num_steps: int,
    strategy: Strategy | None = None,
    world_size: int = 2,
    stop: int | None = None,
    most_waiting: float = float("inf"),
) -> list[tuple[list[str], list[str], list[torch.Tensor]]]:
    """What was at work after each step, the notices and the parameters, where predictions are
    `costs`.
    """

    def of_a_model_in_double_precision(name: str, run: MeasuredRun) -> float:
        assert run.dtype == torch.float64
        return costs(name, run)

    predict_by(monkeypatch, of_a_model_in_double_precision, most_waiting=most_waiting)

    def job(driver: ThreadDriver) -> tuple[list[str], list[str], list[torch.Tensor]]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session = session_on(driver, model, optimizer, strategy or offbeat.Auto())
        at_work, notices = [], []
        for step in range(num_steps):
            if step == stop:
                saved = copy.deepcopy(session.state_dict())
                notices += session.notices
                session.close()
                session = session_on(driver, model, optimizer, strategy or offbeat.Auto())
                session.load_state_dict(saved)
            step_of(model, optimizer, driver.rank, step)
            at_work.append(session.acting.name)
        session.close()
        return at_work, [*notices, *session.notices], [p.detach() for p in model.parameters()]

    return results_of(world_size, job)


def test_nobody_joins_who_has_nobodys_place() -> None:
    newcomer = Context(
        parameters={},
        driver=RejoinedDriver(2, 2, on_closed=lambda: None),
        new_stream=stream_counter(),
        notices=Notices(2),
        returns=True,
    )
    with pytest.raises(ConfigError, match="RANK is 2, and the run was begun with 2 workers"):
        offbeat.Auto().build(newcomer)


def fastest(name: str) -> Costs:
    """What is at work costs what it was seen to, so all others cost more than any step here takes,
    however busy the host is.
    """
    return lambda strategy, run: 1e-9 if strategy in (name, "beginning") else 1e3


@pytest.mark.parametrize(("name", "world_size"), [("gtopk", 3), ("powersgd", 2), ("localsgd", 3)])
def test_what_is_predicted_to_be_first_takes_over_on_all_ranks_at_once(
    monkeypatch: pytest.MonkeyPatch, name: str, world_size: int
) -> None:
    ranks = choosing(monkeypatch, fastest(name), num_steps=FIRST_LOOK + 5, world_size=world_size)
    for at_work, notices, _ in ranks:
        # One more step is taken, in which nothing is left owed.
        assert at_work == ["allreduce"] * FIRST_LOOK + [name] * 5
        assert any(f"goes over to {name}" in notice for notice in notices)


def test_steps_that_mostly_wait_are_known_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    def costs(name: str, run: MeasuredRun) -> float:
        assert 1 <= len(run.computed_s) <= LEAST_SEEN  # a pause of the host is no step
        return fastest("gtopk")(name, run)

    ranks = choosing(monkeypatch, costs, num_steps=EARLY_LOOK + 5, most_waiting=float("-inf"))
    for at_work, _, _ in ranks:
        assert at_work == ["allreduce"] * EARLY_LOOK + ["gtopk"] * 5


def test_what_is_hardly_faster_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def costs(strategy: str, run: MeasuredRun) -> float:
        return {"allreduce": 1.0, "gtopk": 0.95}.get(strategy, 2.0)

    for at_work, notices, _ in choosing(monkeypatch, costs, num_steps=FIRST_LOOK + 2):
        assert set(at_work) == {"allreduce"}
        assert any("stays with allreduce" in notice for notice in notices)


@pytest.mark.parametrize(("beginning_s", "chosen"), [(1e-9, "localsgd"), (1e3, "allreduce")])
def test_what_is_slow_at_first_has_to_be_worth_that(
    monkeypatch: pytest.MonkeyPatch, beginning_s: float, chosen: str
) -> None:
    def costs(strategy: str, run: MeasuredRun) -> float:
        return {"localsgd": 1e-9, "beginning": beginning_s}.get(strategy, 1e3)

    for at_work, _, _ in choosing(monkeypatch, costs, num_steps=FIRST_LOOK + 2):
        assert at_work[-1] == chosen


def test_a_prediction_that_was_wrong_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """`gtopk` takes far longer than a nanosecond, and AllReduce is predicted to take less."""

    def costs(strategy: str, run: MeasuredRun) -> float:
        return {"gtopk": 1e-12, "allreduce": 1e-9}.get(strategy, 1.0)

    monkeypatch.setattr(choice, "EVERY", 10)
    monkeypatch.setattr(choice, "BETWEEN_CHANGES", 20)
    back = FIRST_LOOK + 30  # the first look that is 20 steps after the change
    for at_work, _, _ in choosing(monkeypatch, costs, num_steps=back + 3):
        assert at_work[FIRST_LOOK + 1] == "gtopk"
        assert at_work[back - 1] == "gtopk"  # at most one change in so many steps
        assert at_work[-1] == "allreduce"


@pytest.mark.parametrize(("fails", "chosen"), [("gtopk", "localsgd"), ("allreduce", "allreduce")])
def test_a_prediction_that_fails_ends_no_run(
    monkeypatch: pytest.MonkeyPatch, fails: str, chosen: str
) -> None:
    def costs(strategy: str, run: MeasuredRun) -> float:
        if strategy == fails:
            raise ValueError("no such shape")
        return {"gtopk": 1e-12, "localsgd": 1e-9, "beginning": 1e-9}.get(strategy, 1e3)

    ranks = choosing(monkeypatch, costs, num_steps=FIRST_LOOK + 3)
    assert [at_work[-1] for at_work, _, _ in ranks] == [chosen] * 2
    said = [notice for _, notices, _ in ranks for notice in notices]
    assert any(f"leaves {fails} out" in notice for notice in said)


@pytest.mark.parametrize("options", [{"exclude": "gtopk"}, {"allow": ("localsgd", "powersgd")}])
def test_what_is_not_allowed_is_not_considered(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, str]
) -> None:
    strategy = offbeat.Auto(**options)  # type: ignore[arg-type]
    ranks = choosing(monkeypatch, fastest("gtopk"), num_steps=FIRST_LOOK + 2, strategy=strategy)
    for at_work, notices, _ in ranks:
        assert set(at_work) == {"allreduce"}
        assert not any("gtopk" in notice for notice in notices)


@pytest.mark.parametrize("stop", [5, FIRST_LOOK, FIRST_LOOK + 8])
def test_a_resumed_run_goes_on_with_what_was_at_work_or_about_to_be(
    monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    def costs(strategy: str, run: MeasuredRun) -> float:
        return 1e-9 if strategy == "powersgd" else 1.0

    num_steps = FIRST_LOOK + 15
    whole = choosing(monkeypatch, costs, num_steps=num_steps)
    resumed = choosing(monkeypatch, costs, num_steps=num_steps, stop=stop)
    for (at_work, _, tensors), (at_work_then, _, tensors_then) in zip(whole, resumed, strict=True):
        assert at_work == at_work_then
        for one, other in zip(tensors, tensors_then, strict=True):
            assert torch.equal(one, other)


def test_a_resumed_run_clips_before_it_selects_in_its_first_step_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    predict_by(monkeypatch, fastest("gtopk"))

    def job(driver: ThreadDriver) -> tuple[str, float]:
        model, saved = make_model(), dict[str, Any]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for num_steps in (FIRST_LOOK + 3, 1):
            with session_on(driver, model, optimizer, offbeat.Auto()) as session:
                if saved:
                    session.load_state_dict(saved)
                for _ in range(num_steps):
                    (1e3 * model(torch.ones(1, 4, dtype=torch.float64)).sum()).backward()
                    session.clip_grad_norm_(0.5)
                    optimizer.step()
                    optimizer.zero_grad()
                saved = session.state_dict()
                at_work, owed = session.acting.name, session.gauges()["residual_norm"]
        return at_work, owed

    for at_work, owed in results_of(2, job):
        assert at_work == "gtopk"
        assert owed < 5  # not clipped it would be hundreds


@pytest.mark.parametrize("steps_before", [1, SETTLING + LEAST_SEEN - 1])
def test_a_run_that_is_resumed_just_before_a_look_has_seen_too_little(
    monkeypatch: pytest.MonkeyPatch, steps_before: int
) -> None:
    """Its first steps are slow, and no others would be looked at."""
    stop = FIRST_LOOK - steps_before
    ranks = choosing(monkeypatch, fastest("gtopk"), num_steps=FIRST_LOOK + 2, stop=stop)
    for at_work, _, _ in ranks:
        assert set(at_work) == {"allreduce"}


def test_exchanges_go_on_beside_the_last_of_the_passes_that_accumulate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A forward pass takes a second, a backward pass two, and there are three of both in a step."""
    seen = record_runs(monkeypatch)

    def job(driver: ThreadDriver) -> None:
        now_s = 0.0

        def work(seconds: float) -> None:
            nonlocal now_s
            now_s += seconds

        monkeypatch.setattr(driver, "now_s", lambda channel: now_s, raising=False)
        model = make_model()
        model.register_forward_pre_hook(lambda *_: work(1.0))
        first = next(model.children())
        first.register_forward_hook(
            lambda *args: args[-1].register_hook(lambda _: work(2.0)) and None
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with session_on(driver, model, optimizer, offbeat.Auto()) as session:
            for _ in range(FIRST_LOOK):
                with session.no_sync():
                    for _ in range(2):
                        model(torch.ones(5, 4, dtype=torch.float64)).sum().backward()
                model(torch.ones(5, 4, dtype=torch.float64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

    results_of(2, job)
    assert seen
    for run in seen:
        assert (run.forward_s, run.backward_s) == pytest.approx((3 * 1.0 + 2 * 2.0, 2.0))


class Tempered(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = torch.nn.Parameter(torch.ones(()))
        self.layer = torch.nn.Linear(4, 3, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


def test_weights_are_predicted_to_be_as_long_as_most_of_them_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first parameter is a single number that no pass has used, in another type."""
    seen = record_runs(monkeypatch)

    def job(driver: ThreadDriver) -> None:
        model = Tempered()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with session_on(driver, model, optimizer, offbeat.Auto()):
            for _ in range(FIRST_LOOK):
                model(torch.ones(5, 4, dtype=torch.bfloat16)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

    results_of(2, job)
    assert {(run.dtype, run.moments) for run in seen} == {(torch.bfloat16, 2)}


@pytest.mark.parametrize(("sizes", "chosen"), [((8, 8), "localsgd"), ((8, 4), "gtopk")])
def test_models_are_not_averaged_where_a_rank_has_more_samples(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int], chosen: str
) -> None:
    """Those of a batch of few would count for more than others."""
    step_s = {"localsgd": 1e-12, "beginning": 1e-12, "gtopk": 1e-9}
    predict_by(monkeypatch, lambda name, run: step_s.get(name, 1.0))

    def job(driver: ThreadDriver) -> tuple[str, list[str]]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with session_on(driver, model, optimizer, offbeat.Auto()) as session:
            for step in range(FIRST_LOOK + 2):
                session.weigh(sizes[driver.rank])
                step_of(model, optimizer, driver.rank, step)
            return session.acting.name, session.notices

    for at_work, notices in results_of(2, job):
        assert at_work == chosen
        assert any("batches are unlike" in each for each in notices) == (chosen == "gtopk")


def unlike_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 computes three times as long as rank 0, in each step that is seen."""

    def seen(at_work: str, whole_s: Any, computed_s: Any) -> choice.SeenSteps:
        return choice.SeenSteps(
            at_work=at_work, step_s=1.0, computed_s=np.tile([0.2, 0.6], (LEAST_SEEN, 1))
        )

    monkeypatch.setattr(choice.SeenSteps, "of", seen)


def slowest_s(name: str, run: MeasuredRun) -> float:
    slowest: float = run.computed_s.max(axis=1).mean()
    return slowest if name == "allreduce" else 1e3


@pytest.mark.parametrize("sizes", [(4, 4), (6, 4)], ids=["alike", "unlike"])
def test_batches_follow_speeds_unless_the_user_wants_unlike_ones(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int]
) -> None:
    """And the model goes where it goes without that."""
    predict_by(monkeypatch, slowest_s)
    unlike_speeds(monkeypatch)
    draw = torch.Generator().manual_seed(5)
    samples = torch.randn(80, 4, generator=draw, dtype=torch.float64)

    def job(driver: ThreadDriver, strategy: Strategy) -> tuple[Any, ...]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        found = []
        with session_on(driver, model, optimizer, strategy) as session:
            loader = session.loader(samples, batch_size=sizes[driver.rank])
            for _ in range(3):
                for x in loader:
                    found.append(len(x))
                    model(x).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            assert session.acting.name == "allreduce"
            decisions = [each.after for each in session.decisions]
            notices = session.notices
        return found, decisions, notices, [p.detach() for p in model.parameters()]

    plain = results_of(2, lambda driver: job(driver, offbeat.AllReduce()))
    auto_ = results_of(2, lambda driver: job(driver, offbeat.Auto()))
    for rank in range(2):
        found, decisions, notices, parameters = auto_[rank]
        usual = plain[rank][0]
        if sizes == (4, 4):
            assert found[FIRST_LOOK:] == [(6, 2)[rank]] * (len(usual) - FIRST_LOOK)
            assert decisions == ["allreduce by speed"]
            assert "batches have 6, 2 samples now, by rank" in notices
        else:
            assert found == usual
            assert decisions == ["allreduce"]
        assert found[:FIRST_LOOK] == usual[:FIRST_LOOK]
        for mine, other in zip(parameters, plain[rank][-1], strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=0.0)


def test_a_loop_without_a_loader_is_told_that_batches_could_follow_speeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unlike_speeds(monkeypatch)
    for at_work, notices, _ in choosing(monkeypatch, slowest_s, num_steps=FIRST_LOOK + 2):
        assert set(at_work) == {"allreduce"}
        assert any("batches of session.loader would follow them" in each for each in notices)


def test_models_that_are_averaged_get_batches_of_the_size_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After batches have followed speeds."""
    monkeypatch.setattr(choice, "BETWEEN_CHANGES", 0)
    monkeypatch.setattr(choice, "EVERY", FIRST_LOOK)
    monkeypatch.setattr(choice, "UNEXPECTED", float("-inf"))
    unlike_speeds(monkeypatch)

    def costs(name: str, run: MeasuredRun) -> float:
        if name in ("localsgd", "beginning"):
            # As long as a batch of 4 samples takes where one of 2 has taken .6 s.
            is_second_look = run.computed_s[0, 1] == pytest.approx(1.2)
            return 1e-9 if is_second_look else 1e3
        return slowest_s(name, run)

    predict_by(monkeypatch, costs)

    def job(driver: ThreadDriver) -> tuple[list[int], str]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        sizes = []
        with session_on(driver, model, optimizer, offbeat.Auto(allow="localsgd")) as session:
            for x in session.loader(torch.zeros(400, 4).double(), batch_size=4):
                sizes.append(len(x))
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return sizes, session.acting.name

    for rank, (sizes, at_work) in enumerate(results_of(2, job)):
        assert at_work == "localsgd"
        assert sizes[FIRST_LOOK] == (6, 2)[rank]
        assert sizes[-1] == 4


def test_what_has_too_little_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "free_bytes", lambda device: 100.0)
    for at_work, notices, _ in choosing(monkeypatch, fastest("gtopk"), num_steps=FIRST_LOOK + 2):
        assert set(at_work) == {"allreduce"}
        others = ", ".join(name for name in CANDIDATES if name != "allreduce")
        assert any(f"leaves {others} out" in each for each in notices)


def test_memory_that_the_system_would_make_free_is_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A host that has read a data set once has filled nearly all of it with that."""
    memory = tmp_path / "meminfo"
    memory.write_text("MemFree:  1024 kB\nMemAvailable:  20480 kB\nBuffers:  1 kB\n")
    monkeypatch.setattr(host, "MEMINFO", memory)
    assert host.free_bytes(torch.device("cpu")) == 20480 * 1024


@pytest.mark.parametrize(
    ("membership", "limited", "names"),
    [
        ("0::/job/task", "job", ("memory.max", "memory.current", "inactive_file")),
        (
            "4:memory:/docker/unseen\n0::/",
            "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
def test_memory_beyond_the_limit_of_a_container_or_a_job_is_not_free(
    membership: str,
    limited: str,
    names: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "job/task").mkdir(parents=True)
    (tmp_path / "job/task/memory.max").write_text("max\n")
    (tmp_path / limited).mkdir(exist_ok=True)
    for name, value in zip(names, ("5000", "3000"), strict=False):
        (tmp_path / limited / name).write_text(f"{value}\n")
    (tmp_path / limited / "memory.stat").write_text(f"anon 2000\n{names[2]} 1000\n")
    (tmp_path / "membership").write_text(f"{membership}\n")
    monkeypatch.setattr(host, "CGROUPS", tmp_path)
    monkeypatch.setattr(host, "CGROUPS_OF_PROCESS", tmp_path / "membership")
    assert host.free_bytes(torch.device("cpu")) == 5000 - 3000 + 1000


def test_memory_that_pytorch_keeps_for_tensors_to_come_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, found in (
        ("mem_get_info", (1000, 9000)),
        ("memory_reserved", 700),
        ("memory_allocated", 300),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda device, found=found: found)
    assert host.free_bytes(torch.device("cuda")) == 1000 + 700 - 300


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        ([[0, 1, 2, 3]] * 2, 2.0),
        ([[0, 1], [2, 3]], 2.0),
        ([[0], [0, 1, 2, 3]], 1.0),
    ],
)
def test_cores_are_shared_by_the_ranks_that_have_the_same_ones(
    cores: list[list[int]], expected: float
) -> None:
    places = [{"host": "one", "cores": each, "processors": {}} for each in cores]
    other = {"host": "other", "cores": [*range(64)], "processors": {}}
    assert auto.cores_of_one([*places, other]) == expected


@pytest.mark.parametrize(
    ("membership", "files"),
    [
        ("0::/job/task", {"job/cpu.max": "150000 100000", "job/task/cpu.max": "max 100000"}),
        (
            "4:cpu,cpuacct:/docker/unseen\n3:cpuset:/\n0::/",
            {"cpu,cpuacct/cpu.cfs_quota_us": "30000", "cpu,cpuacct/cpu.cfs_period_us": "20000"},
        ),
        ("1:cpu:/\n0::/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}),
    ],
)
def test_a_container_has_the_time_of_so_many_cores_which_its_ranks_share(
    membership: str, files: Mapping[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    (tmp_path / "membership").write_text(f"{membership}\n")
    monkeypatch.setattr(host, "CGROUPS", tmp_path)
    monkeypatch.setattr(host, "CGROUPS_OF_PROCESS", tmp_path / "membership")
    limits, cores = host.processor_limits(), [*range(8)]
    contained = {"host": "one", "cores": cores, "processors": limits}
    other = {"host": "one", "cores": cores, "processors": {"other": 6.0}}
    is_limited = "-1" not in files.values()
    assert [*limits.values()] == [1.5] * is_limited
    for num_ranks in (1, 2):
        found = auto.cores_of_one([contained] * num_ranks + [other])
        assert found == (1.5 / num_ranks if is_limited else 8 / (num_ranks + 1))


@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adafactor]
)
def test_optimizers_that_scale_by_squares_take_the_steps_to_equal_of_adam(kind: Any) -> None:
    parameters = make_model().parameters()
    found = offbeat.Auto().steps(kind(parameters))
    assert found == {name: one.adam for name, one in CANDIDATES.items()}
    assert found != offbeat.Auto().steps(torch.optim.SGD(make_model().parameters(), lr=0.1))


def test_what_is_owed_is_sent_after_a_resume_in_the_midst_of_a_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`gtopk` owes most of its gradients where it is left, which is where the run is stopped."""

    def costs(strategy: str, run: MeasuredRun) -> float:
        return {"gtopk": 1e-12, "allreduce": 1e-9}.get(strategy, 1.0)

    def built(name: str) -> Strategy:
        """What sends by the clock, as GTopK's density and collective may, is not the same twice."""
        as_it_comes = {"gtopk": offbeat.GTopK(density=0.05, collective="all_gather")}
        return as_it_comes.get(name) or offbeat.AllReduce()

    monkeypatch.setattr(auto, "built", built)
    monkeypatch.setattr(choice, "EVERY", 10)
    monkeypatch.setattr(choice, "BETWEEN_CHANGES", 20)
    left = FIRST_LOOK + 30
    whole, resumed = (
        choosing(monkeypatch, costs, num_steps=left + 3, stop=stop) for stop in (None, left)
    )
    for (at_work, _, tensors), (at_work_then, _, tensors_then) in zip(whole, resumed, strict=True):
        last = slice(left - 1, None)
        assert at_work[last] == at_work_then[last] == ["gtopk"] + ["allreduce"] * 3
        for one, other in zip(tensors, tensors_then, strict=True):
            assert torch.equal(one, other)


def test_a_command_line_has_a_plus_between_the_names_that_are_allowed() -> None:
    asked = auto.built("auto:allow=gtopk+localsgd+wagma:exclude=wagma+powersgd")
    assert isinstance(asked, offbeat.Auto)
    assert [auto.built(spec).name for spec in asked.allowed()] == [
        "allreduce",
        "gtopk",
        *["localsgd"] * 2,
    ]


@pytest.mark.parametrize("has_scaler", [False, True])
def test_behind_a_scaler_only_gradients_are_exchanged(has_scaler: bool) -> None:
    context = Context(
        parameters=dict(make_model().named_parameters()),
        driver=SingleRank(),
        new_stream=stream_counter(),
        notices=Notices(0),
        has_scaler=has_scaler,
    )
    expected = {"allreduce", "gtopk", "powersgd"} if has_scaler else CANDIDATES.keys()
    assert offbeat.Auto().candidates(context).keys() == expected


def test_more_ranks_go_on_with_what_was_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def job(
        driver: ThreadDriver, states: Sequence[dict[str, Any]] = (), num_steps: int = FIRST_LOOK + 5
    ) -> tuple[list[tuple[int, str, str]], dict[str, Any]]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with session_on(driver, model, optimizer, offbeat.Auto()) as session:
            if states:
                share = offbeat.reshard(states, driver.world_size, driver.rank)
                session.load_state_dict(share)
            for step in range(num_steps):
                step_of(model, optimizer, driver.rank, step)
            assert session.acting.name == "powersgd"
            assert all("are computing" in one.why for one in session.decisions)
            made = [(one.step, one.before, one.after) for one in session.decisions]
            return made, copy.deepcopy(session.state_dict())

    predict_by(monkeypatch, lambda name, run: 1e-9 if name == "powersgd" else 1.0)
    states = [state for _, state in results_of(2, job)]
    after = results_of(3, lambda driver: job(driver, states, 1))
    assert [made for made, _ in after] == [[(FIRST_LOOK, "allreduce", "powersgd")]] * 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"exclude": "allreduce"}, "every run begins with"),
        ({"allow": "gtop"}, "did you mean"),
        ({"quality": "best"}, "equal"),
    ],
)
def test_what_it_does_not_know_is_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        offbeat.Auto(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TAKES_OVER)
def test_another_strategy_takes_over_while_a_parameter_is_frozen(name: str) -> None:
    """Which was not when the session began, and trains again later."""

    def job(driver: ThreadDriver) -> None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        count = iter(range(100))
        step = lambda: step_of(model, optimizer, driver.rank, next(count))  # noqa: E731
        with session_on(driver, model, optimizer, Changing()) as session:
            step()
            weight = next(model.parameters()).requires_grad_(False)
            frozen = weight.detach().clone()
            take_over(session, TAKES_OVER[name], step)
            step()
            assert torch.equal(weight, frozen)
            weight.requires_grad_(True)
            for _ in range(3):
                step()
            assert not torch.equal(weight, frozen)

    results_of(2, job)


def test_where_a_loop_clips_by_value_nothing_selects_entries_before_that() -> None:
    context = Context(
        parameters=dict(make_model().named_parameters()),
        driver=SingleRank(),
        new_stream=stream_counter(),
        notices=Notices(0),
        clips_by_value=lambda: True,
    )
    assert offbeat.Auto().candidates(context).keys() == CANDIDATES.keys() - {"gtopk"}


def test_all_ranks_average_the_same_buffers_after_a_change() -> None:
    """One of which a bad sample has spoilt on one rank."""

    def job(driver: ThreadDriver) -> None:
        model = make_model()
        model.register_buffer("seen", torch.ones(3, dtype=torch.float64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        step = lambda: constant_step(model, optimizer, driver.rank)  # noqa: E731
        with session_on(driver, model, optimizer, Changing()) as session:
            step()
            if driver.rank == 1:
                model.get_buffer("seen").fill_(float("nan"))
            take_over(session, TAKES_OVER["localsgd"], step)
            for _ in range(4):
                step()

    with pytest.raises(NonFiniteError, match="weights of rank 1"):
        results_of(2, job)


def test_models_are_not_averaged_where_another_optimizer_steps_a_part_of_them() -> None:
    """Its state, and its step just after a change back, would be each rank's own."""
    parameters = dict(make_model().named_parameters())
    context = Context(
        parameters=parameters,
        driver=SingleRank(),
        new_stream=stream_counter(),
        notices=Notices(0),
        optimizer=torch.optim.SGD([*parameters.values()][:2], lr=0.1),
    )
    found = offbeat.Auto().candidates(context)
    assert found.keys() == {"allreduce", "gtopk", "powersgd"}


def test_batches_by_speed_leave_no_rank_a_single_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """With which BatchNorm1d cannot train."""
    predict_by(monkeypatch, slowest_s)
    unlike_speeds(monkeypatch)
    samples = torch.arange(320, dtype=torch.float64).view(80, 4) / 320

    def job(driver: ThreadDriver) -> set[int]:
        layers = [torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)]
        model = torch.nn.Sequential(*layers).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        sizes = set()
        with session_on(driver, model, optimizer, offbeat.Auto()) as session:
            loader = session.loader(samples, batch_size=2)
            for _ in range(2):
                for x in loader:
                    sizes.add(len(x))
                    model(x).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return sizes

    assert results_of(2, job) == [{2}, {2}]


def test_batches_are_divided_anew_when_a_slow_rank_has_become_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step takes as long as before, since the other rank has its samples."""
    monkeypatch.setattr(choice, "BETWEEN_CHANGES", 0)
    monkeypatch.setattr(choice, "EVERY", FIRST_LOOK)
    predict_by(monkeypatch, slowest_s)
    calls = count()

    def seen(at_work: str, whole_s: Any, computed_s: Any) -> choice.SeenSteps:
        # Two ranks look early, then first, then again.
        step_s, each_s = (1.0, [0.2, 0.6]) if next(calls) < 4 else (0.3, [0.3, 0.1])
        return choice.SeenSteps(
            at_work=at_work, step_s=step_s, computed_s=np.tile(each_s, (LEAST_SEEN, 1))
        )

    monkeypatch.setattr(choice.SeenSteps, "of", seen)

    def job(driver: ThreadDriver) -> list[int]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        sizes = []
        with session_on(driver, model, optimizer, offbeat.Auto()) as session:
            for x in session.loader(torch.zeros(400, 4).double(), batch_size=4):
                sizes.append(len(x))
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return sizes

    for rank, sizes in enumerate(results_of(2, job)):
        assert sizes[FIRST_LOOK] == (6, 2)[rank]
        assert sizes[-1] == 4
