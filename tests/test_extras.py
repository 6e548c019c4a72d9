"""What a plain `pip install offbeat` can do, and what it says of the rest."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import offbeat
from offbeat.strategies import REGISTRY
from offbeat_lab.records import Record

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

import offbeat.run.supervise
import offbeat.run.worker
import offbeat.session.session

started = list(sys.modules)

import torch

net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
offbeat.attach(net, optimizer, offbeat.LocalSGD(period=2, start_step=2)).close()
of_others = [name for name in sys.modules if "kfac" in name]

from offbeat import *

failed = {}
for module in pkgutil.walk_packages(offbeat.__path__, "offbeat.", onerror=lambda name: None):
    needs_more = module.name.startswith("offbeat.integrations.")
    if not needs_more and not module.name.endswith(("triton_kernels", "__main__")):
        try:
            import_module(module.name)
        except Exception:
            failed[module.name] = traceback.format_exc()

from offbeat.strategies import REGISTRY

torch.set_num_threads(1)
trained = []
for name, kind in REGISTRY.items():
    shared = {"mega_batch": 2} if hasattr(kind, "mega_batch") else {}
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    make = torch.optim.Adam if name in ("onebitadam", "zerooneadam") else torch.optim.SGD
    optimizer = make(model.parameters(), lr=0.1)
    with offbeat.attach(model, optimizer, kind(**shared)) as session:
        for _ in range(3):
            model(torch.ones(5, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert session.stats.steps == 3, name
    assert not all(map(torch.equal, before, model.parameters())), name
    trained.append(name)
print(json.dumps([failed, trained, started, of_others]))
"""

USE_THE_COMMAND_LINE = """
import contextlib
import io
import json

from offbeat_lab.cli.__main__ import start

answers = []
for words in {commands!r}:
    sys.argv = ["offbeat", *words.split()]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            start()
        except SystemExit as end:
            answers.append([end.code or 0, said.getvalue()])
print(json.dumps(answers))
"""

TRAINS = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.full((4, 3), dist.get_rank() + 1.0)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    """Run `program` where the packages of the extra are not there."""
    return subprocess.run(
        [sys.executable, "-c", HIDE + program], capture_output=True, text=True, check=False
    )


def test_all_of_the_library_is_imported_and_every_strategy_trains_without_the_lab() -> None:
    """And a run begins without the compiler and other strategies."""
    done = run(WHAT_A_PLAIN_INSTALL_CAN_DO)
    assert done.returncode == 0, done.stderr
    failed, trained, started, of_others = json.loads(done.stdout)
    assert (failed, trained) == ({}, list(REGISTRY))
    assert not set(started) & {"torch._dynamo", "scipy.linalg", "fsspec", "offbeat.kfac"}
    assert of_others == [], "of a session of another strategy"


SAID = {
    "--help": "strategies [NAME]",
    "--version": offbeat.__version__,
    "strategies": "gtopk",
    "strategies gtopk": "density",
    "run --help": "--strategy",
}


def test_the_command_line_offers_what_the_library_can_do() -> None:
    done = run(USE_THE_COMMAND_LINE.format(commands=[*SAID]))
    assert (done.returncode, done.stderr) == (0, "")
    for words, (status, answer) in zip(SAID, json.loads(done.stdout), strict=True):
        assert status == 0, words
        assert SAID[words] in answer, words


def test_other_commands_say_what_to_install_in_one_sentence() -> None:
    done = run(USE_THE_COMMAND_LINE.format(commands=["train --task digits"]))
    assert json.loads(done.stdout) == [[2, ""]]
    assert done.stderr.startswith(f"offbeat: this command needs {', '.join(LAB)}, which")
    assert done.stderr.count("\n") == 1


def test_a_script_is_run_and_recorded(tmp_path: Path) -> None:
    """Its worker is a process of its own, which must not find the lab's packages either."""
    hidden = tmp_path / "hidden"
    for name in LAB:
        (hidden / name).mkdir(parents=True)
        (hidden / name / "__init__.py").write_text("raise ModuleNotFoundError(__name__)")
    (tmp_path / "script.py").write_text(TRAINS)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "offbeat", "run", "--strategy", "allreduce", "--workers", "1"),
            *("--out", str(tmp_path / "run"), str(tmp_path / "script.py")),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(hidden), str(SOURCE)])},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("offbeat: one worker trains with allreduce\n")
    record = Record(tmp_path / "run")
    summary = record.summary()
    assert summary is not None
    assert (summary.steps, summary.replicas_identical) == (3, True)
    assert [event.step for event in record.events(0)] == [1, 2, 3]


def test_a_plain_install_brings_these_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[\[>=]", requirement)[0] for requirement in requirements}

    assert names(project["dependencies"]) == {
        *("fsspec", "numba", "numpy", "pyzmq", "safetensors", "scipy", "torch"),
        "typing_extensions",
    }
    extras = project["optional-dependencies"]
    assert names(extras["lab"]) == {*LAB, "scikit-learn"} - {"sklearn"}
    assert "offbeat[lab]" in extras["dev"]
