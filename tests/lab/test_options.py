"""`--set` reaches the right part, typed, or is refused with the nearest name."""

from __future__ import annotations

import pytest

import offbeat
from offbeat.errors import ConfigError
from offbeat.strategies import REGISTRY
from offbeat.strategies.by_name import strategy_values
from offbeat_lab.config import Request, resolve, task_of
from offbeat_lab.options import build_strategy, parse_spec, route, strategy_options, task_options
from offbeat_lab.tasks import TASKS


def test_settings_are_divided_between_task_and_strategy() -> None:
    assert route("digits", "gtopk", ["size=small", "density=0.5", "lr=1"]) == (
        {"size": "small", "lr": "1"},
        {"density": "0.5"},
    )


def test_no_option_belongs_to_a_task_and_to_a_strategy() -> None:
    of_tasks = {option.name for task in TASKS for option in task_options(task)}
    of_strategies = {option.name for name in REGISTRY for option in strategy_options(name)}
    assert of_tasks & of_strategies == set()


def test_the_task_says_how_large_batches_are() -> None:
    assert route("digits", "adaptive", ["batch_size=8"]) == ({"batch_size": "8"}, {})
    with pytest.raises(ConfigError, match="no option of strategy 'adaptive'"):
        parse_spec("adaptive:batch_size=8")
    config = resolve(Request(task="digits", strategy="adaptive", settings=["batch_size=8"]))
    assert task_of(config).options.batch_size == 8
    assert "batch_size" not in config.strategy_options


def test_a_mega_batch_has_room_for_steps() -> None:
    with pytest.raises(ConfigError, match="mega_batch is 7, but 4 workers need 8 batches or more"):
        resolve(Request(task="digits", strategy="elasticsgd", settings=["mega_batch=7"]))


@pytest.mark.parametrize("name", REGISTRY)
def test_every_option_is_explained_and_its_default_can_be_given_as_text(name: str) -> None:
    options = strategy_options(name)
    assert all(option.help for option in options), [
        option.name for option in options if not option.help
    ]
    given = {option.name: option.default for option in options if option.default != "required"}
    assert build_strategy(name, given) == build_strategy(name, {})


@pytest.mark.parametrize("name", TASKS)
def test_every_task_option_is_explained(name: str) -> None:
    assert all(option.help and option.allowed for option in task_options(name))


@pytest.mark.parametrize("name", REGISTRY)
def test_a_strategy_is_rebuilt_from_its_values(name: str) -> None:
    strategy = build_strategy(name, {})
    assert build_strategy(name, strategy_values(strategy)) == strategy


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["desity=0.1"],
            (
                "neither task 'digits' nor strategy 'gtopk' has an option 'desity'.*did you mean"
                " 'density'"
            ),
        ),
        (["density"], "takes key=value, got 'density'"),
        (["=3"], "takes key=value"),
        (["density=1", "density=1"], "density is given twice"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        route("digits", "gtopk", settings)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gtopc", {}, "no strategy 'gtopc'.*did you mean 'gtopk'"),
        (
            "gtopk",
            {"density": "lots"},
            "option density of strategy 'gtopk': got 'lots'; allowed is number",
        ),
        ("gtopk", {"collective": "ring"}, "option collective .*got 'ring'; allowed is auto"),
        ("gtopk", {"densty": "1"}, "no option 'densty'.*'density'"),
        ("gtopk", {"density": "0"}, "density"),
        ("gtopk", {"density": "nan"}, "density"),
    ],
)
def test_strategies_that_cannot_be_built_are_refused(
    name: str, options: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_strategy(name, options)


def test_options_of_kfacs_curvature_are_written_like_its_own() -> None:
    name, options = parse_spec("spdkfac:damping=0.1:max_dim=256:plain=head,LayerNorm")
    assert build_strategy(name, options) == offbeat.SPDKFAC(
        damping=0.1, curvature=offbeat.Curvature(max_dim=256, plain=("head", "LayerNorm"))
    )
    with pytest.raises(ConfigError, match="option max_dim of strategy 'spdkfac': got 'many'"):
        build_strategy(name, {"max_dim": "many"})
    with pytest.raises(ConfigError, match="max_dim must be an integer of at least 1"):
        build_strategy(name, {"max_dim": "0"})
