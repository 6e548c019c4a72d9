"""States of the optimizer averaged with the weights or at intervals of their own, against formulas
and DES-LOC in one process.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import offbeat
from offbeat.averaging.periodic import MeanSquares
from offbeat.errors import ConfigError
from thread_support.nets import make_model, step_of, trained
from thread_support.world import ThreadDriver, in_threads, results_of, session_on

RANKS = 3
States = dict[str, torch.Tensor]
INTERVALS = {"exp_avg": 2, "exp_avg_sq": 3}


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.02)


def held(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[States]:
    """Each parameter with the states of the optimizer that go with it."""
    return [
        {"parameter": each.detach().clone()}
        | {name: value.clone() for name, value in optimizer.state[each].items()}
        for each in model.parameters()
    ]


def run(num_steps: int, *, stop: int | None = None, **options: Any) -> list[list[States]]:
    strategy = offbeat.LocalSGD(period=2, warmup=0, **options)
    return trained(RANKS, strategy, num_steps, optimizer_of=adam, held=held, stop=stop)


def reference(
    num_steps: int, intervals: Mapping[str, int] = INTERVALS, *, noise: bool = True
) -> list[list[States]]:
    """What the ranks hold after so many steps; without `noise` what squares have gained is
    corrected after each average.
    """
    models = [make_model() for _ in range(RANKS)]
    optimizers = [adam(model) for model in models]
    last: dict[int, tuple[int, torch.Tensor]] = {}
    for step in range(num_steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            step_of(model, optimizer, rank, step)
        average, rest = divmod(step + 1, 2)
        if rest:
            continue
        every = zip(*(model.parameters() for model in models), strict=True)
        for number, parameters in enumerate(every):
            alike = [[each.detach() for each in parameters]]
            for name, interval in intervals.items():
                if average % interval == 0:
                    states = zip(optimizers, parameters, strict=True)
                    alike.append([optimizer.state[each][name] for optimizer, each in states])
            for tensors in alike:
                mean = torch.stack(tensors).mean(0)
                for tensor in tensors:
                    tensor.copy_(mean)
            if noise:
                continue
            every_state = [each.state[p] for each, p in zip(optimizers, parameters, strict=True)]
            square = every_state[0]["exp_avg_sq"]
            begun, before = last.get(number, (0, torch.zeros_like(square)))
            kept = 0.999 ** (step + 1 - begun)
            gained = (square - kept * before) / (1 - kept)
            mean, share = every_state[0]["exp_avg"] / (1 - 0.9 ** (step + 1)), 0.1 / 1.9
            signal = ((mean**2 - share * gained) / (1 - share)).clamp_min(0)
            square = kept * before + (1 - kept) * (signal + (gained - signal) / RANKS)
            last[number] = step + 1, square
            for state in every_state:
                state["exp_avg_sq"].copy_(square)
    return [held(*each) for each in zip(models, optimizers, strict=True)]


@pytest.mark.parametrize("num_steps", [4, 6, 9, 12])
def test_states_are_those_of_the_paper(num_steps: int) -> None:
    found, expected = run(num_steps, optimizer_state=INTERVALS), reference(num_steps)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    # After 6 steps, which is 3 averages, second moments alone were just averaged.
    if num_steps == 6:
        same = {
            name: torch.equal(found[0][0][name], found[1][0][name])
            for name in ("parameter", *INTERVALS)
        }
        assert same == {"parameter": True, "exp_avg": False, "exp_avg_sq": True}


@pytest.mark.parametrize("chosen", ["averaged", "exp_avg=1+exp_avg_sq=1"])
def test_averaged_squares_are_those_of_the_mean_unless_they_have_an_interval(chosen: str) -> None:
    each_time = {"exp_avg": 1, "exp_avg_sq": 1}
    expected = reference(7, each_time, noise=chosen != "averaged")
    torch.testing.assert_close(run(7, optimizer_state=chosen), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chosen", ["averaged", INTERVALS], ids=str)
def test_a_run_goes_on_between_two_averages_of_a_state(chosen: Any) -> None:
    straight = run(12, optimizer_state=chosen)
    for stop in (1, 5, 6):
        resumed = run(12, stop=stop, optimizer_state=chosen)
        torch.testing.assert_close(resumed, straight, rtol=0, atol=0)


def test_squares_gathered_before_ranks_part_are_the_means() -> None:
    """All-reduced gradients made them, here or in a run before this one."""

    def squares(start_step: int) -> torch.Tensor:
        strategy = offbeat.LocalSGD(
            period=2, warmup=0, start_step=start_step, optimizer_state="averaged"
        )
        found = trained(RANKS, strategy, 12, optimizer_of=adam, held=held)
        return torch.cat([each["exp_avg_sq"].flatten() for each in found[0]])

    # As of a rank that is alone with the mean, but for two steps of twelve.
    reduced = squares(12)
    assert float((squares(10) / reduced).median()) == pytest.approx(1, abs=0.3)


def test_states_of_complex_parameters_stay_each_ranks_own() -> None:
    class OfNumbers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4, 1, dtype=torch.complex128))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.to(torch.complex128) @ self.weight).abs()

    averaged, local = (
        trained(
            RANKS,
            offbeat.LocalSGD(period=2, warmup=0, optimizer_state=chosen),
            6,
            model_of=lambda rank: OfNumbers(),
            optimizer_of=adam,
            held=held,
        )
        for chosen in ("averaged", "local")
    )
    torch.testing.assert_close(averaged, local, rtol=0, atol=0)


def test_a_rank_without_states_is_given_none_of_them_or_all() -> None:
    """Adam could not go on with a part of its state."""
    strategy = offbeat.LocalSGD(period=1, warmup=0, optimizer_state=INTERVALS)

    def job(driver: ThreadDriver) -> list[list[str]]:
        model = make_model()
        first = next(model.parameters())
        optimizer, found = adam(model), []
        if driver.rank == 0:  # it never uses the first parameter
            optimizer.register_step_pre_hook(lambda *_: setattr(first, "grad", None))
        with session_on(driver, model, optimizer, strategy):
            for step in range(6):
                step_of(model, optimizer, driver.rank, step)
                found.append(sorted(optimizer.state.get(first, {})))
        return found

    found = results_of(2, job)[0]
    assert found == [[]] * 5 + [["exp_avg", "exp_avg_sq", "step"]]


def test_rows_that_a_rank_has_no_batch_of_move_no_further_than_adam_moves_them() -> None:
    """Their squares are 0 there, by whose root it divides its peers' momentum."""
    strategy = offbeat.LocalSGD(period=1, warmup=0, optimizer_state=INTERVALS)

    def job(driver: ThreadDriver) -> float:
        model = torch.nn.Embedding(4, 3)
        optimizer = adam(model)
        with session_on(driver, model, optimizer, strategy):
            begun = model.weight.detach().clone()
            for _ in range(5):
                model(torch.tensor([2 * driver.rank, 2 * driver.rank + 1])).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return float((model.weight - begun).detach().abs().max())

    assert max(results_of(2, job)) <= 5 * 0.02


def test_steps_of_a_parameter_that_one_rank_uses_at_a_time_are_counted() -> None:
    """Rounded, the mean of 2 steps and 3 would be 2 after each average, however many there were."""

    def job(driver: ThreadDriver) -> float:
        model = make_model()
        first = next(model.parameters())
        optimizer = adam(model)
        with session_on(driver, model, optimizer, offbeat.LocalSGD(period=1)):
            for step in range(21):
                model(torch.ones(2, 4, dtype=torch.float64)).mean().backward()
                if (driver.rank + step) % 2:
                    first.grad = None
                optimizer.step()
                optimizer.zero_grad()
        return float(optimizer.state[first]["step"])

    assert results_of(2, job) == [11, 11]


def test_a_state_that_the_optimizer_lacks_is_refused_on_all_ranks() -> None:
    strategy = offbeat.LocalSGD(period=1, warmup=0, optimizer_state={"exp_avgs": 1})

    def job(driver: ThreadDriver) -> None:
        model = make_model()
        optimizer = adam(model)
        with session_on(driver, model, optimizer, strategy):
            step_of(model, optimizer, driver.rank, 0)

    for outcome in in_threads(2, job):
        assert isinstance(outcome, ConfigError)
        assert "'exp_avgs', and the states of Adam that can be averaged are 'exp_avg'" in str(
            outcome
        )


@pytest.mark.parametrize("asked", ["exp_avg=", "exp_avg=0", "exp_avg=x", {"exp_avg": 0}])
def test_an_interval_is_a_number_of_averages(asked: Any) -> None:
    with pytest.raises(ConfigError, match="interval of 'exp_avg' in optimizer_state must be"):
        offbeat.LocalSGD(optimizer_state=asked)


def test_an_earlier_state_that_a_script_loads_is_taken_for_what_it_is() -> None:
    """A script does so after a spike of its loss. No mean of squares is above the largest."""

    def job(driver: ThreadDriver) -> tuple[float, float]:
        model, largest = make_model(), [0.0]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.5))

        def look(*_: object) -> None:
            gradients = [each.grad for each in model.parameters() if each.grad is not None]
            largest.extend(float(gradient.square().max()) for gradient in gradients)

        optimizer.register_step_pre_hook(look)
        with session_on(driver, model, optimizer, offbeat.LocalSGD(period=2, warmup=0)):
            for step in range(12):
                if step == 3:
                    kept = copy.deepcopy(optimizer.state_dict())
                if step == 11:
                    optimizer.load_state_dict(kept)
                step_of(model, optimizer, driver.rank, step)
        squares = [optimizer.state[each]["exp_avg_sq"] for each in model.parameters()]
        return max(largest), max(float(square.max()) for square in squares)

    ranks = results_of(RANKS, job)
    assert ranks[0][1] <= max(largest for largest, _ in ranks)


def test_states_of_a_single_number_have_their_intervals_too() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * x

    found = trained(
        2,
        offbeat.LocalSGD(period=1, optimizer_state={"exp_avg": 2, "exp_avg_sq": 3}),
        3,
        model_of=lambda rank: Scaled(),
        optimizer_of=adam,
        held=held,
    )
    (one,), (other,) = found
    same = {name: torch.equal(one[name], other[name]) for name in one}
    assert same == {"parameter": True, "step": True, "exp_avg": False, "exp_avg_sq": True}


def test_squares_that_were_read_of_a_file_go_where_their_parameters_are() -> None:
    """A file gives tensors of the host. Tensors without content stand for those of a GPU."""
    weight = torch.nn.Parameter(torch.empty(3, device="meta"))
    squares = MeanSquares(torch.optim.Adam([weight]), {"weight": weight}, world_size=2)
    saved = {"step_of_square/weight": 4.0, "square/weight": torch.ones(3)}
    squares.load({"has_squares": True} | saved)
    assert squares.state()["square/weight"].is_meta
