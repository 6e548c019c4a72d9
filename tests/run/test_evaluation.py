"""What a script evaluates and saves where ranks' models differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import offbeat
from offbeat.run.evaluation import EvaluationWeights
from offbeat.strategies.base import Strategy
from thread_support.nets import make_model, step_of
from thread_support.world import ThreadDriver, results_of, session_on

LOCAL = offbeat.LocalSGD(period=4, warmup=0)


@contextmanager
def evaluating(
    driver: ThreadDriver,
    strategy: Strategy = LOCAL,
    after_step: Callable[[torch.nn.Module], object] = lambda model: None,
) -> Iterator[tuple[torch.nn.Module, EvaluationWeights]]:
    """A model after six steps, whose session is at work."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with session_on(driver, model, optimizer, strategy) as session:
        evaluation = EvaluationWeights(session, model, optimizer)
        for step in range(6):
            step_of(model, optimizer, driver.rank, step)
            after_step(model)
        yield model, evaluation
        evaluation.close()


@pytest.mark.parametrize(
    "strategy",
    [offbeat.DPSGD(), offbeat.SGP(), offbeat.Crossbow(), offbeat.DEFSGD(ratio=4)],
    ids=lambda each: each.name,
)
def test_a_run_of_few_steps_saves_the_same_model_on_all_ranks(strategy: Strategy) -> None:
    def job(driver: ThreadDriver) -> list[list[torch.Tensor]]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        saved = []
        with session_on(driver, model, optimizer, strategy) as session:
            evaluation = EvaluationWeights(session, model, optimizer)
            for step in range(7):
                step_of(model, optimizer, driver.rank, step)
                saved.append([*model.state_dict().values()])
            evaluation.close()
        return saved

    first, *others = results_of(4, job)
    for other in others:
        for one, two in zip(first, other, strict=True):
            assert all(map(torch.equal, one, two))
    assert not all(map(torch.equal, first[0], first[-1]))


def test_what_is_saved_is_the_mean_of_each_part_and_by_each_name_of_what_is_tied() -> None:
    """As GPT's embedding and head: what is loaded by the second name would undo the first."""

    def job(driver: ThreadDriver) -> list[torch.Tensor]:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
        model[2].weight = model[0].weight
        optimizer = torch.optim.SGD(model.double().parameters(), lr=0.05)
        with session_on(driver, model, optimizer, offbeat.LocalSGD(period=4, warmup=0)) as session:
            evaluation = EvaluationWeights(session, model, optimizer)
            for step in range(6):
                step_of(model, optimizer, driver.rank, step)
            saved = model.state_dict()
            assert not torch.equal(saved["0.weight"], model[0].weight)
            assert torch.equal(saved["0.weight"], saved["2.weight"])
            for part in "02":
                for name, saved_alone in model[int(part)].state_dict().items():
                    assert torch.equal(saved[f"{part}.{name}"], saved_alone)
            assert model[2].state_dict(keep_vars=True)["bias"] is model[2].bias
            evaluation.close()
        return [*saved.values()]

    first, second = results_of(2, job)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("strategy", [LOCAL, offbeat.DPSGD()], ids=lambda each: each.name)
def test_a_model_whose_session_ends_while_the_script_goes_on_is_the_mean(
    strategy: Strategy,
) -> None:
    def job(driver: ThreadDriver) -> tuple[torch.Tensor, torch.Tensor]:
        with evaluating(driver, strategy) as (model, evaluation):
            own = torch.nn.utils.parameters_to_vector(model.parameters())
            model.eval()
            evaluation.mode_changed(training=False)
            evaluation.take_mean()
        return own, torch.nn.utils.parameters_to_vector(model.parameters())

    results = results_of(3, job)
    mean = torch.stack([own for own, _ in results]).mean(dim=0)
    for own, left in results:
        assert not torch.allclose(own, mean)
        torch.testing.assert_close(left, mean)


def test_weights_that_are_no_numbers_any_more_are_not_taken_for_what_the_script_has_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What is evaluated until the next average, which names the rank, is the mean as ever."""

    def job(driver: ThreadDriver) -> bool:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with session_on(driver, model, optimizer, LOCAL) as session:
            evaluation = EvaluationWeights(session, model, optimizer)
            for step in range(6):
                if step == 5:
                    optimizer.param_groups[0]["lr"] = float("nan")
                step_of(model, optimizer, driver.rank, step)
            evaluation.mode_changed(training=False)
            is_finite = all(bool(value.isfinite().all()) for value in held(model))
            evaluation.mode_changed(training=True)
            assert all(bool(value.isnan().all()) for value in held(model))
            session.close(average=False)
            evaluation.close()
        return is_finite

    assert results_of(2, job) == [True, True]
    assert "has written into the parameters" not in caplog.text


def write(model: torch.nn.Module, values: list[torch.Tensor], *, rebinds: bool = False) -> None:
    for parameter, value in zip(model.parameters(), values, strict=True):
        if rebinds:
            parameter.data = value
        else:
            parameter.data.copy_(value)


def held(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("goes_back_first", [True, False])
@pytest.mark.parametrize("rebinds", [True, False])
def test_a_moving_average_that_a_script_puts_into_the_model_is_evaluated_and_saved(
    *, rebinds: bool, goes_back_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """And training goes on from this rank's own weights, whenever the script puts them back."""

    def job(driver: ThreadDriver) -> None:
        with evaluating(driver) as (model, evaluation):
            own = [parameter.data for parameter in model.parameters()]
            if not rebinds:
                own = [value.clone() for value in own]
            kept = held(model)
            smooth = [value / 2 for value in own]
            write(model, [value.clone() for value in smooth], rebinds=rebinds)
            evaluation.mode_changed(training=False)
            assert all(map(torch.equal, held(model), smooth))
            assert all(map(torch.equal, model.state_dict().values(), smooth))
            if goes_back_first:
                write(model, own, rebinds=rebinds)
                evaluation.mode_changed(training=True)
            else:
                evaluation.mode_changed(training=True)
                write(model, own, rebinds=rebinds)
            assert all(map(torch.equal, held(model), kept))

    results_of(2, job)
    assert caplog.text.count("not the mean of all ranks' models") == 2  # once on each rank


def test_what_a_script_writes_over_the_mean_stays() -> None:
    """As weights that were better, to which it goes back after an evaluation."""

    def job(driver: ThreadDriver) -> None:
        with evaluating(driver) as (model, evaluation):
            evaluation.mode_changed(training=False)
            better = [value + 1 for value in held(model)]
            write(model, better)
            evaluation.mode_changed(training=True)
            assert all(map(torch.equal, held(model), better))

    results_of(2, job)


def test_where_a_script_writes_after_each_step_the_mean_is_evaluated(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As one that keeps weights within bounds."""

    def job(driver: ThreadDriver) -> list[torch.Tensor]:
        def clamp(model: torch.nn.Module) -> None:
            write(model, [value.clamp(-0.3, 0.3) for value in held(model)])

        with evaluating(driver, after_step=clamp) as (model, evaluation):
            evaluation.mode_changed(training=False)
            return held(model)

    first, second = results_of(2, job)
    assert all(map(torch.equal, first, second))
    assert not caplog.records


def test_own_steps_that_are_lost_by_what_a_script_writes_over_the_mean_are_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def job(driver: ThreadDriver) -> None:
        with evaluating(driver) as (model, evaluation):
            for _ in range(2):
                evaluation.mode_changed(training=False)
                write(model, [value + 1 for value in held(model)])
                evaluation.mode_changed(training=True)

    results_of(2, job)
    assert caplog.text.count("own steps since the last average are gone") == 2  # once on each rank


def test_where_ranks_come_together_no_mean_is_made_for_evaluations_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each costs the bytes of an average: nine more in a period of 500 steps."""
    plain, asked = offbeat.Session.averaged_tensors, list[int]()

    def counted(session: offbeat.Session) -> dict[str, torch.Tensor]:
        asked.append(session.steps_done)
        return plain(session)

    monkeypatch.setattr(offbeat.Session, "averaged_tensors", counted)

    def job(driver: ThreadDriver) -> None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        strategy = offbeat.LocalSGD(period=60, warmup=0)
        with session_on(driver, model, optimizer, strategy) as session:
            evaluation = EvaluationWeights(session, model, optimizer)
            for step in range(110):
                step_of(model, optimizer, driver.rank, step)
            evaluation.close()

    results_of(2, job)
    assert 50 in asked
    assert max(asked) < 60
