"""Profiles from scripts and tasks, against clocks that are made up."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from offbeat.errors import ConfigError
from offbeat.run.config import ScriptCommand
from offbeat.simulation.training import TensorProfile
from offbeat_lab.cli.main import app
from offbeat_lab.plan import timing
from offbeat_lab.plan.profile import Layer, ModelProfile, TimedBatch, read_profile
from offbeat_lab.plan.script_timing import ScriptTimer, at_both_sizes, time_factors, time_script
from offbeat_lab.plan.timing import (
    WARM_UP_STEPS,
    StepTimer,
    TimedStep,
    hook_s,
    profile_of,
    time_low_rank,
)
from rank_jobs.module import run_module
from ranks_support.launch import Place, launch_in_places
from ranks_support.templates import Templates

SCRIPT = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--steps", type=int, default=1000)
asked = parser.parse_args()
torch.distributed.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(asked.steps):
    optimizer.zero_grad()
    model(torch.randn(asked.batch_size, 6)).square().sum().backward()
    optimizer.step()
"""

TWO_TENSORS = ModelProfile(
    name="two",
    device="none",
    batches=(TimedBatch(batch_size=1, forward_s=1.0, backward_s=1.0),),
    optimizer_s=0.0,
    tensors=(
        TensorProfile(num_elements=10, ready=1.0),
        TensorProfile(num_elements=20, ready=0.0),
    ),
    select_s_per_element=1e-9,
    copy_s_per_byte=1e-9,
)


class Clock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def passes(self, seconds: float) -> None:
        self.now_s += seconds


def test_passes_of_accumulated_gradients_are_added_up() -> None:
    clock = Clock()
    timer = StepTimer(1, clock)
    weight = torch.nn.Parameter(torch.ones(3))
    timer.watch([weight])
    for _ in range(WARM_UP_STEPS + 1):
        timer.step_begins()
        for _ in range(2):
            timer.samples_seen(4)
            clock.passes(1.0)  # forward
            timer.backward_begins()
            clock.passes(3.0)
            timer.backward_ended()
        clock.passes(0.5)
        timer.step_ended()
        clock.passes(9.0)  # between steps
    (step,) = timer.steps
    assert (step.forward_s, step.backward_s, step.optimizer_s) == (2.0, 6.0, 0.5)
    assert step.batch_size == 8
    assert step.ready == (1.0,)  # no gradient came, so nothing can leave before the end


def test_gradients_are_ready_in_the_order_of_the_backward_pass() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(200, 300), torch.nn.Linear(300, 100))
    timer = StepTimer(2)
    timer.watch(list(model.parameters()))
    while not timer.is_done:
        timer.step_begins()
        loss = model(torch.randn(64, 200)).sum()
        timer.backward_begins()
        loss.backward()
        timer.backward_ended()
        timer.step_ended()
    made = profile_of("two layers", [(64, timer.steps)], timer.parameters, source="here")
    first, last = made.tensors[0], made.tensors[-1]
    assert 0 < last.ready < first.ready <= 1
    assert (first.num_elements, first.rows) == (60_000, 300)


def test_an_evaluation_between_two_steps_makes_no_worker_late() -> None:
    usual = TimedStep(batch_size=1, forward_s=1.0, backward_s=2.0, optimizer_s=0.0, ready=(1.0,))
    behind_it = replace(usual, forward_s=60.0)
    weight = torch.nn.Parameter(torch.ones(30, 20))
    made = profile_of("it", [(1, [usual] * 11 + [behind_it])], [weight], source="here")
    assert (made.spread, made.batch.forward_s) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("dtype", "num_bytes"), [(torch.bfloat16, 2), (torch.float32, 4), (torch.float64, 8)]
)
def test_a_profile_has_the_bytes_of_the_models_weights(dtype: torch.dtype, num_bytes: int) -> None:
    weight = torch.nn.Parameter(torch.ones(30, 20, dtype=dtype))
    step = TimedStep(batch_size=1, forward_s=1.0, backward_s=1.0, optimizer_s=0.0, ready=(1.0,))
    assert profile_of("it", [(1, [step])], [weight], source="here").num_bytes == 600 * num_bytes


def test_weights_that_are_not_trained_are_counted() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    listener = ScriptTimer(StepTimer(1))
    listener.optimizer_made(optimizer)
    model(torch.ones(3, 6)).sum().backward()
    optimizer.step()
    listener.remove()
    assert listener.frozen_bytes == 4 * (6 * 5 + 5)


def test_an_empty_weight_is_no_tensor_of_a_profile() -> None:
    timer = StepTimer(1)
    timer.watch([torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 3), (0, 3), (4,))])
    ready = (1.0,) * len(timer.parameters)
    step = TimedStep(batch_size=1, forward_s=1.0, backward_s=1.0, optimizer_s=0.0, ready=ready)
    made = profile_of("it", [(1, [step])], timer.parameters, source="here")
    assert [tensor.num_elements for tensor in made.tensors] == [6, 4]


def test_tensors_are_in_the_order_of_the_model_whatever_the_optimizers_groups() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
    groups = [
        {"params": [weight for weight in model.parameters() if weight.ndim == ndim]}
        for ndim in (2, 1)
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    timer = StepTimer(1)
    listener = ScriptTimer(timer)
    listener.optimizer_made(optimizer)
    model(torch.ones(3, 6)).sum().backward()
    optimizer.step()
    listener.remove()
    assert [weight.numel() for weight in timer.parameters] == [30, 5, 10, 2]


@pytest.mark.ranks
def test_a_script_is_profiled_in_a_process_of_its_own(
    tmp_path: Path, templates: Templates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is forked here."""

    def fork(command: list[str], **options: Any) -> SimpleNamespace:
        asked = {"environment": options["env"], "stdin": options["input"]}
        launch_in_places(
            run_module,
            [Place()],
            templates=templates,
            directory=tmp_path,
            arguments={"command": command, **asked},
        )
        return SimpleNamespace(stdout="")

    monkeypatch.setattr(subprocess, "run", fork)
    script, out = tmp_path / "train.py", tmp_path / "profile.json"
    script.write_text(SCRIPT)
    arguments = ["profile", "--steps", "3", "--out", str(out), "--", str(script)]
    result = CliRunner().invoke(app, [*arguments, "--batch-size", "16"])
    assert result.exit_code == 0, result.exception
    profile = read_profile(out)
    assert profile.batch.batch_size == 16
    assert [tensor.num_elements for tensor in profile.tensors] == [30, 5, 10, 2]
    assert profile.name == "train"
    # The bias counts as an input.
    assert [(layer.a_dim, layer.g_dim) for layer in profile.layers] == [(7, 5), (6, 2)]
    assert profile.moments == 1
    assert profile.factors_s > 0
    assert profile.precondition_s > 0


def test_what_powersgd_computes_is_timed_without_a_process_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((10, 9), (9,), ())]
    # A copy alone, and with the hook of rank 1; the same with that of rank 4.
    times_s = iter([1.0, 6.0, 1.0, 21.0])

    def timed(call: Callable[[], object], device: torch.device) -> float:
        call()
        return next(times_s)

    monkeypatch.setattr(timing, "usual_s", timed)
    assert time_low_rank(parameters, hook_s) == pytest.approx((5.0 / 100, 15.0 / 3 / 100))
    assert not dist.is_initialized()


def test_a_second_batch_size_is_of_the_same_model() -> None:
    larger = TWO_TENSORS.with_step(batch_size=4, forward_backward_s=3.0, device="none")
    both = at_both_sizes(larger, TWO_TENSORS, also="--batch-size 1")
    assert [batch.batch_size for batch in both.batches] == [1, 4]
    with pytest.raises(ConfigError, match="batches of 1"):
        at_both_sizes(TWO_TENSORS, TWO_TENSORS, also="--lr 1")
    with pytest.raises(ConfigError, match="another model"):
        at_both_sizes(larger, replace(TWO_TENSORS, tensors=larger.tensors[:1]), also="--small")


@pytest.fixture
def restored_interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a script that runs in this process changes is as before."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("restored_interpreter")
def test_a_script_that_ends_too_early_is_refused_in_a_sentence(tmp_path: Path) -> None:
    script = tmp_path / "short.py"
    script.write_text(SCRIPT)
    command = ScriptCommand(path=str(script), arguments=["--steps", "5"])
    with pytest.raises(ConfigError, match="ended after 1 timed steps, and 9 were asked for"):
        time_script(command, steps=9, batch_size=None)


@pytest.mark.usefixtures("restored_interpreter")
def test_layers_are_counted_among_what_is_trained(tmp_path: Path) -> None:
    script = tmp_path / "frozen.py"
    wrapping = "model = torch.nn.parallel"
    script.write_text(SCRIPT.replace(wrapping, f"model[0].requires_grad_(False)\n{wrapping}"))
    made = time_factors(ScriptCommand(path=str(script), arguments=[]), TWO_TENSORS)
    assert [layer.tensor for layer in made.layers] == [0]


def test_a_layer_without_a_tensor_is_refused() -> None:
    with pytest.raises(ConfigError, match="whose weight is tensor 2; allowed is 0 to 1"):
        replace(TWO_TENSORS, layers=(Layer(a_dim=7, g_dim=5, tensor=2),))


def test_a_gpu_has_its_nodes_links_by_the_name_that_torch_gives_it(tmp_path: Path) -> None:
    def planned(device: str) -> dict[str, Any]:
        file = tmp_path / "profile.json"
        tensor = TensorProfile(num_elements=10**9, ready=1.0)
        batch = TimedBatch(batch_size=1, forward_s=0.05, backward_s=0.1)
        changed = replace(TWO_TENSORS, device=device, batches=(batch,), tensors=(tensor,))
        file.write_text(replace(changed, on_gpu=True).to_json())
        where = ["--island", "8", "--link", "100gbit", "--workers", "1", "--json"]
        result = CliRunner().invoke(app, ["plan", "--profile", str(file), *where])
        assert result.exit_code == 0, result.exception
        made: dict[str, Any] = json.loads(result.output)
        return made

    def is_assumed(plan: dict[str, Any]) -> bool:
        return any("16 GB/s between two of them are assumed" in one for one in plan["remarks"])

    short, long, over_pcie = map(planned, ("H100", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe"))
    speeds = [
        [one["samples_per_s"] for one in plan["predictions"]] for plan in (short, long, over_pcie)
    ]
    assert speeds[0] == speeds[1] != speeds[2]
    assert [is_assumed(plan) for plan in (short, long, over_pcie)] == [False, False, True]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["profile"], "got nothing to profile"),
        (["profile", "--task", "digits", "--", "train.py"], "got a script and --task"),
        (["plan", "--profile", "vgg16", "--out", "p.json"], "--out is where --check writes"),
        (["plan"], "nothing to plan for"),
        (["plan", "--check", "runs/none"], "runs/none"),
        (["plan", "--profile", "vgg16", "--link", "1gbit/1ms,1gbit/2ms"], "one rate twice"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert complaint in str(result.exception)
