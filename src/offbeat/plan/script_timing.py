"""`offbeat profile -- train.py`: solo steps of a user's own script.

The script runs in a process of its own (`python -m offbeat.plan.script_timing`), with what `offbeat
run` changes in PyTorch: DistributedDataParallel exchanges nothing, `init_process_group` makes a
group of one. It is stopped when enough steps were timed. A script that is not distributed runs as
it is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn.parallel import DistributedDataParallel

from offbeat.errors import ConfigError
from offbeat.lab.config import ScriptCommand
from offbeat.plan.profile import ModelProfile, read_profile
from offbeat.plan.timing import StepTimer, profile_of
from offbeat.script import patches
from offbeat.script.attach import AttachOverride, overriding
from offbeat.script.recipes import NoExchange
from offbeat.script.worker import run_as_main
from offbeat.session.session import Session

_TAIL: Final = 2000


def measure_script(
    script: ScriptCommand,
    *,
    steps: int,
    also: Sequence[str] = (),
    batch_size: int | None = None,
) -> ModelProfile:
    """Time `steps` steps of a script.

    Args:
        script: what runs.
        steps: 1 or more.
        also: further arguments of a second run, with another batch size; none: there is none. The
            larger of both sizes is planned for.
        batch_size: of the first run, where it cannot be seen; None: it can.

    Raises:
        ConfigError: the script fails, or trains nothing.
    """
    if steps < 1:
        raise ConfigError(f"--steps is {steps}; allowed is 1 or more")
    profile = _run(script, steps, batch_size)
    if not also:
        return profile
    more = script.model_copy(update={"arguments": [*script.arguments, *also]})
    return at_both_sizes(profile, _run(more, steps, None), also=" ".join(also))


def at_both_sizes(profile: ModelProfile, other: ModelProfile, *, also: str) -> ModelProfile:
    """`profile` with the batch size of `other` too, for which the script got the arguments `also`.

    Raises:
        ConfigError: they are of different models, or of one batch size.
    """
    if [t.num_elements for t in other.tensors] != [t.num_elements for t in profile.tensors]:
        raise ConfigError(
            f"with {also} the script trains another model; only the batch size may change"
        )
    if other.batch.batch_size == profile.batch.batch_size:
        raise ConfigError(
            f"with {also} too the script has batches of {other.batch.batch_size}; give arguments"
            " that change the batch size"
        )
    sizes = sorted((other.batch, profile.batch), key=lambda one: one.batch_size)
    return replace(profile, batches=tuple(sizes))


def _run(script: ScriptCommand, steps: int, batch_size: int | None) -> ModelProfile:
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "profile.json"
        asked = {"script": script.model_dump(), "steps": steps, "batch_size": batch_size}
        done = subprocess.run(
            [sys.executable, "-m", __name__, json.dumps(asked), str(out)],
            env={
                "OMP_NUM_THREADS": "1",
                **os.environ,
                "RANK": "0",
                "LOCAL_RANK": "0",
                "WORLD_SIZE": "1",
                "LOCAL_WORLD_SIZE": "1",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if out.exists():
            return read_profile(out)
    raise ConfigError(f"{script.path} could not be profiled:\n{done.stdout[-_TAIL:].strip()}")


class ScriptTimer:
    """A `ScriptListener` that times steps and then ends the script.

    Args:
        timer: of the steps.
        enough: is called when all are timed.
    """

    def __init__(self, timer: StepTimer, enough: Callable[[], None]) -> None:
        self._timer = timer
        self._enough = enough
        self._optimizers: list[torch.optim.Optimizer] = []
        self._main: torch.optim.Optimizer | None = None
        self._has_seen_samples = False
        self._hook = torch.nn.modules.module.register_module_forward_pre_hook(self._forward)

    def remove(self) -> None:
        """Watch no forward pass any more."""
        self._hook.remove()

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers.append(optimizer)
        optimizer.register_step_post_hook(self._stepped)

    def backward_begins(self, loss: torch.Tensor) -> None:
        self._timer.backward_begins()

    def backward_ended(self) -> None:
        self._timer.backward_ended()
        self._has_seen_samples = False

    def ddp_made(self, ddp: DistributedDataParallel) -> None: ...

    def hook_ignored(self, ddp: DistributedDataParallel) -> None: ...

    def scaler_made(self, scaler: torch.amp.GradScaler) -> None: ...

    def mode_changed(self, module: torch.nn.Module) -> None: ...

    def group_ends(self) -> None: ...

    def _forward(self, module: torch.nn.Module, args: Any) -> None:
        """The first module of a training pass that is called with a tensor shows the samples."""
        if self._has_seen_samples or not torch.is_grad_enabled():
            return
        tensor = next((one for one in args if isinstance(one, torch.Tensor) and one.dim()), None)
        if tensor is not None:
            self._has_seen_samples = True
            self._timer.samples_seen(len(tensor))

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._main is None:
            self._main = max(self._optimizers, key=_size)
            trained = [p for one in self._optimizers for p in _parameters(one)]
            self._timer.watch(list(dict.fromkeys(trained)))
        if optimizer is self._main:
            self._timer.step_ended()
            if self._timer.is_done:
                self._enough()


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _size(optimizer: torch.optim.Optimizer) -> int:
    return sum(parameter.numel() for parameter in _parameters(optimizer))


def time_script(script: ScriptCommand, *, steps: int, batch_size: int | None) -> ModelProfile:
    """Run `script` in this process until `steps` steps were timed.

    Raises:
        ConfigError: it ended before that.
    """
    timer = StepTimer(steps)

    class Enough(SystemExit):
        """All steps are timed."""

    def enough() -> None:
        raise Enough(0)  # the script's own `finally` clauses are carried out

    listener = ScriptTimer(timer, enough)
    override = AttachOverride(
        replace=lambda _: NoExchange(), wrap=lambda driver: driver, attached=_no_notice
    )
    try:
        with ExitStack() as stack:
            stack.enter_context(patches.patched(listener, exchanges=False, ddp_options={}))
            stack.enter_context(patches.beside_the_group(0, 1))
            stack.enter_context(overriding(override))
            run_as_main(script)
    except SystemExit as error:
        if not isinstance(error, Enough) and error.code:
            raise
    finally:
        listener.remove()
    if not timer.is_done:
        raise ConfigError(
            f"{script.path} ended after {len(timer.steps)} timed steps, and {steps} were asked"
            " for; let it train longer, or give a smaller --steps"
        )
    sizes = {step.batch_size for step in timer.steps}
    if batch_size is None:
        if 0 in sizes:
            raise ConfigError(
                f"no batch of {script.path} was seen, since no module is called with a tensor as"
                " its first argument; say --batch-size"
            )
        batch_size = max(sizes, key=[step.batch_size for step in timer.steps].count)
        timer.steps = [step for step in timer.steps if step.batch_size == batch_size]
    source = f"measured on this machine, {steps} steps of {Path(script.path).name}, one process"
    return profile_of(script.name, [(batch_size, timer.steps)], timer.parameters, source=source)


def _no_notice(_: Session, __: torch.nn.Module, ___: torch.optim.Optimizer) -> None: ...


def main() -> None:
    """Entry point of the process."""
    text, out = sys.argv[1:]
    asked = json.loads(text)
    try:
        profile = time_script(
            ScriptCommand(**asked["script"]), steps=asked["steps"], batch_size=asked["batch_size"]
        )
    except ConfigError as error:
        sys.exit(f"{error}")
    Path(out).write_text(profile.to_json(), encoding="utf-8")


if __name__ == "__main__":
    main()
