"""What other package managers are told agrees with pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import offbeat

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CALLED_BY_CONDA = {"torch": "pytorch"}


def least_versions(lines: list[str]) -> dict[str, str]:
    found = [re.match(r"([\w.-]+) ?>=([\d.]+)", line) for line in lines]
    return {match[1]: match[2] for match in found if match}


def test_the_conda_recipe_asks_for_what_the_wheel_asks_for() -> None:
    wanted = least_versions(PROJECT["dependencies"] + PROJECT["optional-dependencies"]["lab"])
    recipe = (ROOT / "packaging" / "meta.yaml").read_text()
    run = recipe.split("  run:\n")[1].split("\ntest:")[0]
    asked = least_versions([line.strip(" -") for line in run.splitlines()])
    assert asked.pop("python") == PROJECT["requires-python"].removeprefix(">=")
    assert asked == {CALLED_BY_CONDA.get(name, name): least for name, least in wanted.items()}


def test_versions_are_those_of_the_package() -> None:
    for path in ("CITATION.cff", "packaging/meta.yaml"):
        versions = re.findall(
            r'^(?:version:|\{% set version =) "?([\d.]+)', (ROOT / path).read_text(), re.M
        )
        assert versions == [offbeat.__version__], path


def test_the_command_is_the_wheel_s() -> None:
    recipe = (ROOT / "packaging" / "meta.yaml").read_text()
    assert f"- offbeat = {PROJECT['scripts']['offbeat']}\n" in recipe


def test_the_oldest_torch_that_is_tested_is_the_oldest_allowed() -> None:
    least = least_versions(PROJECT["dependencies"])["torch"]
    assert f"\nOLDEST_TORCH = {least}.*\n" in (ROOT / "Makefile").read_text()
