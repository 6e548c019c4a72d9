"""What a plain `pip install offbeat` can do, and what it says of the rest."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

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

WHAT_A_PLAIN_INSTALL_CAN_DO = """
import json
import pkgutil
import traceback
from importlib import import_module

import offbeat

assert "Cluster" not in dir(offbeat)
from offbeat import *

try:
    offbeat.Cluster
except offbeat.OffbeatError as error:
    of_cluster = str(error)

failed = {}
for module in pkgutil.walk_packages(offbeat.__path__, "offbeat.", onerror=lambda name: None):
    needs_lab = module.name.split(".")[1] in ("lab", "cli", "plan", "report", "script")
    needs_lab = needs_lab or module.name.split(".")[1] == "integrations"
    if not needs_lab and not module.name.endswith("triton_kernels"):
        try:
            import_module(module.name)
        except Exception:
            failed[module.name] = traceback.format_exc()

import torch
from offbeat.strategies import REGISTRY

torch.set_num_threads(1)
trained = []
for name, kind in REGISTRY.items():
    shared = {"mega_batch": 2} if hasattr(kind, "mega_batch") else {}
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
    trained.append(name)
print(json.dumps({"of Cluster": of_cluster, "failed imports": failed, "trained": trained}))
"""

USE_THE_COMMAND_LINE = """
sys.argv = ["offbeat", "train", "--task", "digits"]
from offbeat_lab.cli.__main__ import start

start()
"""

WHAT_TO_INSTALL = (
    f"offbeat's command line and offbeat.Cluster need {', '.join(LAB)}, which `pip install"
    " 'offbeat[lab]'` installs"
)


def run(program: str) -> subprocess.CompletedProcess[str]:
    """Run `program` where the packages of the extra are not there."""
    return subprocess.run(
        [sys.executable, "-c", HIDE + program], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def plain_install() -> dict[str, Any]:
    done = run(WHAT_A_PLAIN_INSTALL_CAN_DO)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_every_strategy_trains_without_the_lab(plain_install: dict[str, Any]) -> None:
    from offbeat.strategies import REGISTRY

    assert plain_install["trained"] == list(REGISTRY)


def test_nothing_below_the_lab_needs_what_the_lab_needs(plain_install: dict[str, Any]) -> None:
    assert plain_install["failed imports"] == {}


def test_asking_for_the_lab_says_what_to_install_in_one_sentence(
    plain_install: dict[str, Any],
) -> None:
    assert plain_install["of Cluster"] == WHAT_TO_INSTALL


def test_the_command_line_says_what_to_install_in_one_sentence() -> None:
    done = run(USE_THE_COMMAND_LINE)
    assert done.returncode == 1, done.stderr
    assert done.stderr.strip().removeprefix("offbeat: ") == WHAT_TO_INSTALL


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
