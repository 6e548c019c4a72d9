"""What is said of scripts that come to their end without a session."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from offbeat.run.plan import script_command, script_config
from offbeat.run.progress import Failure, Report
from offbeat.run.recipes import recipe_for
from offbeat.run.recording import ScriptRecorder
from offbeat.run.worker import ScriptRun

TRAINS_ALONE = """
import torch
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.1)
weight.sum().backward()
try:
    optimizer.step()
except Exception:
    pass
"""


@pytest.mark.parametrize(
    ("body", "said", "unsaid"),
    [
        ("print(1 + 1)", "no training was seen", "init_process_group"),
        (TRAINS_ALONE, "trains on one rank only", "no training"),
    ],
)
def test_a_script_that_trains_nothing_is_told_so_and_one_that_trains_alone_what_to_add(
    body: str, said: str, unsaid: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = tmp_path / "script.py"
    script.write_text(body)
    config = script_config(script_command([str(script)]), "gtopk", workers=1)
    reports: list[Report] = []
    recorder = ScriptRecorder(lambda: None, reports.append, stop_after=None)
    recipe = recipe_for(config.strategy, config.strategy_options)
    assert ScriptRun(config, recipe, recorder, reports.append, rank=0).carry_out() == 1
    (failure,) = reports
    assert isinstance(failure, Failure)
    assert said in failure.message
    assert unsaid not in failure.message
