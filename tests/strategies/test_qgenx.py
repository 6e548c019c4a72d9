"""Extra-gradient steps against the algorithm, and a game that plain steps cannot end."""

from __future__ import annotations

import copy

import pytest
import torch

import offbeat
from conformance_support.lent import lent
from offbeat.errors import ConfigError
from thread_support.world import ThreadDriver, results_of, session_on

LR = 0.4


class Game(torch.nn.Module):
    """min over x, max over y of x' A y + b' x - c' y, of which ranks see A with noise."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        self.x = torch.nn.Parameter(torch.randn(6, generator=draw))
        self.y = torch.nn.Parameter(torch.randn(6, generator=draw))
        self.solution = torch.randn(2, 6, generator=draw)
        self.matrix = torch.linalg.qr(torch.randn(6, 6, generator=draw)).Q

    def backward(self, noise: float, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        matrix = self.matrix + noise * torch.randn(6, 6, generator=draw)
        x, y = self.x - self.solution[0], self.y - self.solution[1]
        (x @ matrix @ y.detach() - x.detach() @ matrix @ y).backward()

    def distance(self) -> float:
        point = torch.stack([self.x.detach(), self.y.detach()])
        return float((point - self.solution).norm())


def optimizer_of(game: Game) -> torch.optim.Optimizer:
    return torch.optim.SGD(game.parameters(), lr=LR)


def play(driver: ThreadDriver, strategy: offbeat.AllReduce | offbeat.QGenX) -> tuple[float, Game]:
    game = Game()
    optimizer = optimizer_of(game)
    with session_on(driver, game, optimizer, strategy):
        for step in range(400):
            game.backward(0.1, 10 * step + driver.rank)
            optimizer.step()
            optimizer.zero_grad()
    return game.distance(), game


def test_plain_steps_circle_around_the_solution_of_a_game() -> None:
    found = results_of(3, lambda driver: play(driver, offbeat.AllReduce()))
    assert found[0][0] > 10 * Game().distance()


def test_a_game_ends_at_its_solution() -> None:
    codec = "stochastic4"
    before = Game().distance()
    found = results_of(
        3, lambda driver: play(driver, lent(offbeat.QGenX(codec=codec), replica_check_interval=1))
    )
    for distance, game in found:
        assert distance < before / 100
        assert torch.equal(game.x, found[0][1].x)


def published(num_steps: int) -> Game:
    """Extra-gradient with plain vectors."""
    game = Game()
    for step in range(0, num_steps, 2):
        begun = [p.detach().clone() for p in game.parameters()]
        for moment in (step, step + 1):
            game.zero_grad()
            game.backward(0.5, moment)
            with torch.no_grad():
                for parameter, start in zip(game.parameters(), begun, strict=True):
                    assert parameter.grad is not None
                    parameter.copy_(start - LR * parameter.grad)
    return game


def test_two_steps_of_the_loop_are_one_of_the_algorithm() -> None:
    game = Game()
    optimizer = optimizer_of(game)
    with offbeat.attach(game, optimizer, offbeat.QGenX(codec="float32")):
        for step in range(7):  # the last one is only a look
            game.backward(0.5, step)
            optimizer.step()
            optimizer.zero_grad()
    assert torch.allclose(game.x, published(6).x, atol=1e-6)


@pytest.mark.parametrize("saved_after", [2, 3])
def test_a_resumed_run_goes_on_to_the_bit(saved_after: int) -> None:
    def begin() -> tuple[Game, torch.optim.Optimizer, offbeat.Session]:
        game = Game()
        optimizer = optimizer_of(game)
        return game, optimizer, offbeat.attach(game, optimizer, offbeat.QGenX())

    game, optimizer, session = begin()
    with session:
        for step in range(6):
            if step == saved_after:
                saved = copy.deepcopy([game.state_dict(), session.state_dict()])
            game.backward(0.5, step)
            optimizer.step()
            optimizer.zero_grad()
    resumed, optimizer, session = begin()
    with session:
        resumed.load_state_dict(saved[0])
        session.load_state_dict(saved[1])
        for step in range(saved_after, 6):
            resumed.backward(0.5, step)
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(resumed.x, game.x)


def test_a_codec_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="values must be one of"):
        offbeat.QGenX(codec="stochastic5")


def test_what_is_written_after_a_look_stays() -> None:
    """As the best model of a run is, which was loaded for its end."""
    game = Game()
    optimizer = optimizer_of(game)
    with offbeat.attach(game, optimizer, offbeat.QGenX(codec="float32")):
        for step in range(3):
            game.backward(0.5, step)
            optimizer.step()
            optimizer.zero_grad()
        ahead = game.y.detach().clone()
        with torch.no_grad():
            game.x.fill_(7.0)
    assert torch.equal(game.x, torch.full_like(game.x, 7.0))
    assert not torch.equal(game.y, ahead)
