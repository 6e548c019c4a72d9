"""What a plain `pip install offbeat` can do, and what it says of the rest."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import offbeat

ROOT = Path(__file__).parents[1]
SOURCE = Path(offbeat.__file__).parents[1]
LAB = ("jinja2", "markupsafe", "psutil", "pydantic", "rich", "sklearn", "threadpoolctl", "typer")

HIDE = f"""
import sys

sys.path.insert(0, {str(SOURCE)!r})
for name in {LAB!r}:
    sys.modules[name] = None  # an import of it finds no module
"""

ATTACH_EVERY_STRATEGY = """
import torch

import offbeat
from offbeat.strategies import REGISTRY

torch.set_num_threads(1)
for name, kind in REGISTRY.items():
    shared = {"mega_batch": 4, "batch_size": 2} if hasattr(kind, "mega_batch") else {}
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.attach(model, optimizer, kind(**shared)) as session:
        for _ in range(3):
            model(torch.ones(5, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert session.stats.steps == 3, name
    assert not all(map(torch.equal, before, model.parameters())), name
    print(name)
"""

IMPORT_EVERYTHING_BELOW_THE_LAB = """
import pkgutil
from importlib import import_module

import offbeat

for module in pkgutil.walk_packages(offbeat.__path__, "offbeat.", onerror=lambda name: None):
    room = module.name.split(".")[1]
    if room not in ("lab", "cli", "report") and not module.name.endswith("triton_kernels"):
        import_module(module.name)
"""

USE_THE_COMMAND_LINE = """
sys.argv = ["offbeat", "train", "--task", "digits"]
from offbeat.cli.__main__ import start

start()
"""

ASK_FOR_CLUSTER = """
import offbeat

assert "Cluster" not in dir(offbeat)
from offbeat import *

try:
    offbeat.Cluster
except offbeat.OffbeatError as error:
    print(error)
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    """Run `program` where the packages of the extra are not there."""
    return subprocess.run(
        [sys.executable, "-c", HIDE + program], capture_output=True, text=True, check=False
    )


def test_every_strategy_trains_without_the_lab() -> None:
    done = run(ATTACH_EVERY_STRATEGY)
    assert done.returncode == 0, done.stderr
    from offbeat.strategies import REGISTRY

    assert done.stdout.split() == list(REGISTRY)


def test_nothing_below_the_lab_needs_what_the_lab_needs() -> None:
    done = run(IMPORT_EVERYTHING_BELOW_THE_LAB)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("program", [USE_THE_COMMAND_LINE, ASK_FOR_CLUSTER])
def test_what_needs_the_lab_says_what_to_install_in_one_sentence(program: str) -> None:
    done = run(program)
    said = (done.stderr if program is USE_THE_COMMAND_LINE else done.stdout).strip()
    assert done.returncode == (1 if program is USE_THE_COMMAND_LINE else 0), done.stderr
    assert said.removeprefix("offbeat: ") == (
        f"offbeat's command line and offbeat.Cluster need {', '.join(LAB)}, which `pip install"
        " 'offbeat[lab]'` installs"
    )


def test_a_plain_install_brings_these_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[\[>=]", requirement)[0] for requirement in requirements}

    assert names(project["dependencies"]) == {
        *("numba", "numpy", "pyzmq", "safetensors", "scipy", "torch", "typing_extensions")
    }
    extras = project["optional-dependencies"]
    assert names(extras["lab"]) == {*LAB, "scikit-learn"} - {"sklearn"}
    assert "offbeat[lab]" in extras["dev"]
