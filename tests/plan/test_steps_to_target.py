"""Times to a target, from steps that a comparison measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from pydantic import JsonValue
from typer.testing import CliRunner

from lab_support.made import comparison, strategy
from offbeat.errors import ConfigError
from offbeat.strategies.by_name import strategy_values
from offbeat_lab.cli.main import app
from offbeat_lab.comparison import read_comparison, write_comparison
from offbeat_lab.options import build_strategy, parse_spec
from offbeat_lab.plan.shipped import shipped_profile
from offbeat_lab.plan.steps_to_target import steps_to_target
from offbeat_lab.statistics import estimate

MODEL = shipped_profile("resnet20")


def record(
    directory: Path,
    steps: dict[str, Sequence[float | None]],
    *,
    target: float | None = 0.9,
    num_parameters: int = 0,
) -> Path:
    """A comparison of strategies, by specification, that took so many steps in two runs."""
    entries = []
    for spec, values in steps.items():
        name, options = parse_spec(spec)
        entries.append(
            strategy(name, num_seeds=2).model_copy(
                update={
                    "strategy": name,
                    "options": strategy_values(build_strategy(name, options)),
                    "measures": {"steps_to_target": estimate(list(values))},
                }
            )
        )
    made = comparison(entries, num_seeds=2, target=target, workers=4)
    write_comparison(directory, made.model_copy(update={"num_parameters": num_parameters}))
    return directory


def test_a_time_is_there_for_what_was_measured_alike_and_reached_the_target(
    tmp_path: Path,
) -> None:
    steps: dict[str, Sequence[float | None]] = {
        "ddp": [100.0, 120.0],
        "gtopk:density=0.01": [200.0, 200.0],
        "localsgd": [300.0, None],
        "wagma": [50.0, 50.0],
    }
    record(tmp_path, steps)
    specs = "ddp,gtopk:density=0.01,gtopk,localsgd"
    arguments = ["plan", "--profile", "resnet20", "--link", "1gbit", "--workers", "4"]
    arguments += ["--strategies", specs, "--steps-from", str(tmp_path)]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    found = {one["strategy"]: one for one in json.loads(result.output)["predictions"]}
    ddp, sparse = found["ddp"], found["gtopk:density=0.01"]
    assert ddp["time_to_target_s"] == pytest.approx(110 * ddp["step_s"])
    assert sparse["time_to_target_s"] == pytest.approx(200 * sparse["step_s"])
    assert found["gtopk"]["time_to_target_s"] is found["localsgd"]["time_to_target_s"] is None

    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert "Target: accuracy 0.9, after the steps that each strategy took" in result.output
    assert "with 4 workers" in result.output
    assert "Not all runs reached it: localsgd." in result.output
    _, heads, *_ = result.output.splitlines()
    assert "target" in heads.split()


def test_what_deaths_cost_is_in_the_time_to_a_target_and_its_price(tmp_path: Path) -> None:
    record(tmp_path, {"ddp": [100.0, 100.0]})
    arguments = ["plan", "--profile", "resnet20", "--link", "1gbit", "--workers", "4", "--json"]
    arguments += ["--strategies", "ddp", "--steps-from", str(tmp_path), "--price", "3.60"]
    result = CliRunner().invoke(app, [*arguments, "--deaths", "0.5"])
    (one,) = json.loads(result.output)["predictions"]
    assert one["lost_to_deaths"] > 0.01
    assert one["time_to_target_s"] * one["samples_per_s"] == pytest.approx(
        100 * 4 * 128 / (1 - one["lost_to_deaths"])
    )
    assert one["cost"] == pytest.approx(4 * one["time_to_target_s"] / 1000)


def test_who_comes_to_the_target_first_is_said_where_it_is_not_who_takes_the_shortest_steps(
    tmp_path: Path,
) -> None:
    arguments = ["plan", "--profile", "resnet20", "--link", "100mbit", "--workers", "4"]
    arguments += ["--strategies", "ddp,localsgd", "--steps-from", str(tmp_path)]
    said = "ddp comes to the target first"
    for steps, is_first in ((10.0, True), (10_000.0, False)):
        record(tmp_path, {"ddp": [steps, steps], "localsgd": [5_000.0, 5_000.0]})
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        assert (said in result.output) is is_first


def test_a_step_that_is_a_lower_limit_is_not_said_to_lead_to_the_target_first(
    tmp_path: Path,
) -> None:
    record(tmp_path, {"ddp": [100.0, 100.0], "wagma": [100.0, 100.0]})
    arguments = ["plan", "--profile", "vgg16", "--link", "100mbit", "--workers", "4"]
    arguments += ["--strategies", "ddp,wagma", "--steps-from", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "4 workers: ddp at 100 Mbit/s" in result.output
    assert "comes to the target first" not in result.output


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"target": None}, "knows of no metric that its strategies reached"),
        ({"num_parameters": 7}, "trained a model of 7; give the profile of that model"),
        ({"removed": 1}, "compared wagma, and none of these is planned for"),
        ({}, "compared wagma, and none of these is planned for"),
    ],
)
def test_a_comparison_that_says_nothing_of_the_plan_is_refused(
    more: dict[str, int | None], complaint: str, tmp_path: Path
) -> None:
    more = dict(more)
    options: dict[str, JsonValue] = {"removed": more.pop("removed")} if "removed" in more else {}
    record(tmp_path, {"wagma": [1.0, 2.0]}, **more)  # type: ignore[arg-type]
    if options:  # which a version before had
        made = read_comparison(tmp_path)
        old = made.strategies[0].model_copy(update={"options": options})
        write_comparison(tmp_path, made.model_copy(update={"strategies": [old]}))
    with pytest.raises(ConfigError, match=complaint):
        steps_to_target(tmp_path, ["wagma" if options else "ddp"], MODEL)
