"""`offbeat profile -- train.py`: solo steps of a user's own script.

The script runs in a process of its own (`python -m offbeat_lab.plan.script_timing`), with what
`offbeat run` changes in PyTorch: DistributedDataParallel exchanges nothing, `init_process_group`
makes a group of one. It is stopped when enough steps were timed. A script that is not distributed
runs as it is. Then it runs once more, with K-FAC, until factors were timed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from offbeat.errors import ConfigError, OffbeatError
from offbeat.run import patches
from offbeat.run.config import ScriptCommand
from offbeat.run.patches import ScriptListener
from offbeat.run.recipes import NoExchange
from offbeat.run.worker import run_as_main
from offbeat.session.attach import AttachOverride, attach_through, overriding
from offbeat.session.session import Session
from offbeat_lab.plan.factors import STRATEGY, FactorTimer
from offbeat_lab.plan.profile import ModelProfile, profile_from_json, read_profile
from offbeat_lab.plan.timing import StepTimer, profile_of

_TAIL: Final = 2000


def measure_script(
    script: ScriptCommand,
    *,
    steps: int,
    also: Sequence[str] = (),
    batch_size: int | None = None,
    inform: Callable[[str], None] = lambda remark: None,
) -> ModelProfile:
    """Time `steps` steps of a script, and what its Kronecker factors cost.

    Args:
        script: what runs.
        steps: 1 or more.
        also: further arguments of a second run, with another batch size; none: there is none. The
            larger of both sizes is planned for.
        batch_size: of the first run, where it cannot be seen; None: it can.
        inform: is told why nothing is known of K-FAC, where that is so.

    Raises:
        ConfigError: the script fails, or trains nothing.
    """
    if steps < 1:
        raise ConfigError(f"--steps is {steps}; allowed is 1 or more")
    profile = _run(script, _Asked(steps=steps, batch_size=batch_size))
    if also:
        more = replace(script, arguments=[*script.arguments, *also])
        other = _run(more, _Asked(steps=steps))
        if other.batch.batch_size > profile.batch.batch_size:
            script = more
        profile = at_both_sizes(profile, other, also=" ".join(also))
    try:
        return _run(script, _Asked(steps=None, profile=profile.to_json()))
    except ConfigError as error:
        inform(f"K-FAC is not in the profile: {error}")
        return profile


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


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What the process is to time.

    Attributes:
        steps: without exchange; None: K-FAC's costs are timed.
        batch_size: where it cannot be seen.
        profile: to which K-FAC's costs are added, as JSON.
    """

    steps: int | None
    batch_size: int | None = None
    profile: str = ""


def _run(script: ScriptCommand, asked: _Asked) -> ModelProfile:
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "profile.json"
        words = json.dumps({"script": asdict(script), **asdict(asked)})
        # A profile may be longer than an argument of a process.
        done = subprocess.run(
            [sys.executable, "-m", __name__, str(out)],
            env={
                "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29500",  # which nobody opens: the group is of one process
                **os.environ,
                "RANK": "0",
                "LOCAL_RANK": "0",
                "WORLD_SIZE": "1",
                "LOCAL_WORLD_SIZE": "1",
            },
            input=words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if out.exists():
            return read_profile(out)
    raise ConfigError(f"{script.path} could not be profiled:\n{done.stdout[-_TAIL:].strip()}")


class _Enough(SystemExit):
    """Everything is timed. The script's own `finally` clauses are carried out."""


class _Watching(ScriptListener):
    """Watches what a script trains, and ends the script when all is timed.

    Attributes:
        optimizers: that the script has made.
    """

    def __init__(self) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []
        self._hook = torch.nn.modules.module.register_module_forward_pre_hook(self._forward)

    def remove(self) -> None:
        """Watch no forward pass any more."""
        self._hook.remove()

    @override
    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizers.append(optimizer)

    def _forward(self, module: torch.nn.Module, args: Any) -> None:
        """`module` is called with `args`."""


class ScriptTimer(_Watching):
    """Times steps by `timer`."""

    def __init__(self, timer: StepTimer) -> None:
        super().__init__()
        self._timer = timer
        self._main: torch.optim.Optimizer | None = None
        self._model: torch.nn.Module | None = None
        self._has_seen_samples = False

    @property
    def frozen_bytes(self) -> int:
        """Of weights that are in the model and not trained."""
        trained = {id(parameter) for parameter in self._timer.parameters}
        weights = () if self._model is None else self._model.parameters()
        return sum(weight.nbytes for weight in weights if id(weight) not in trained)

    @override
    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        super().optimizer_made(optimizer)
        optimizer.register_step_post_hook(self._stepped)

    @override
    def backward_begins(self, loss: torch.Tensor) -> None:
        self._timer.backward_begins()

    @override
    def backward_ended(self) -> None:
        self._timer.backward_ended()
        self._has_seen_samples = False

    def _forward(self, module: torch.nn.Module, args: Any) -> None:
        """The first module of a training pass that is called with a tensor shows the samples."""
        if self._has_seen_samples or not torch.is_grad_enabled():
            return
        if self._model is None:
            self._model = module  # the first that is called holds the others
        tensor = next((one for one in args if isinstance(one, torch.Tensor) and one.dim()), None)
        if tensor is not None:
            self._has_seen_samples = True
            self._timer.samples_seen(len(tensor))

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._main is None:
            self._main = max(self.optimizers, key=_size)
            trained = dict.fromkeys(p for one in self.optimizers for p in _parameters(one))
            weights = () if self._model is None else self._model.parameters()
            # Buckets follow the model, whatever the optimizer's groups begin with.
            in_order = dict.fromkeys(weight for weight in weights if weight in trained)
            self._timer.watch([*(in_order | trained)])
        if optimizer is self._main:
            self._timer.step_ended()
            if self._timer.is_done:
                raise _Enough(0)


class ScriptFactors(_Watching):
    """Attaches K-FAC to what the script trains, and times its factors.

    Attributes:
        timer: of the factors; None: nothing was attached so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.timer: FactorTimer | None = None
        self._session: Session | None = None
        self._scaler: torch.amp.GradScaler | None = None

    def attached(
        self, session: Session, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """K-FAC is at work on `model`."""
        if self._session is None:
            self._session, self.timer = session, FactorTimer(model)
            optimizer.register_step_post_hook(self._stepped)

    @override
    def scaler_made(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler

    def _forward(self, module: torch.nn.Module, args: Any) -> None:
        """The first module that is called and holds all that is trained is what is trained."""
        if self._session is not None or not (self.optimizers and torch.is_grad_enabled()):
            return
        model = module.module if isinstance(module, DistributedDataParallel) else module
        optimizer = max(self.optimizers, key=_size)
        if {id(p) for p in _parameters(optimizer)} <= {id(p) for p in model.parameters()}:
            session = attach_through(
                lambda driver: driver, model, optimizer, STRATEGY, scaler=self._scaler
            )
            self.attached(session, model, optimizer)

    def _stepped(self, *_: Any) -> None:
        assert self._session is not None
        assert self.timer is not None
        self.timer.step_ended(self._session)
        if self.timer.is_done:
            raise _Enough(0)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _size(optimizer: torch.optim.Optimizer) -> int:
    return sum(parameter.numel() for parameter in _parameters(optimizer))


def _run_until_enough(script: ScriptCommand, listener: _Watching, override: AttachOverride) -> None:
    """Run `script` in this process, with DistributedDataParallel that exchanges nothing, until
    all is timed.
    """
    try:
        with ExitStack() as stack:
            stack.enter_context(patches.patched(listener, exchanges=False, ddp_options={}))
            stack.enter_context(patches.beside_the_group(0, 1))
            stack.enter_context(overriding(override))
            run_as_main(script)
    except SystemExit as error:
        if not isinstance(error, _Enough) and error.code:
            raise
    finally:
        listener.remove()


def time_factors(script: ScriptCommand, profile: ModelProfile) -> ModelProfile:
    """Run `script` in this process with K-FAC until factors were timed, and add these to
    `profile`.

    Raises:
        ConfigError: nothing of it can be trained with K-FAC, or it ended before that.
    """
    listener = ScriptFactors()
    override = AttachOverride(
        replace=lambda _: STRATEGY, wrap=lambda driver: driver, attached=listener.attached
    )
    _run_until_enough(script, listener, override)
    if listener.timer is None or not listener.timer.is_done:
        raise ConfigError(f"{script.path} ended before its factors were timed")
    source = f"measured on this machine, SPD-KFAC in {Path(script.path).name}, one process"
    return listener.timer.complete(profile, source)


def time_script(script: ScriptCommand, *, steps: int, batch_size: int | None) -> ModelProfile:
    """Run `script` in this process until `steps` steps were timed.

    Raises:
        ConfigError: it ended before that.
    """
    timer = StepTimer(steps)
    override = AttachOverride(
        replace=lambda _: NoExchange(), wrap=lambda driver: driver, attached=lambda *_: None
    )
    listener = ScriptTimer(timer)
    _run_until_enough(script, listener, override)
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
    with patches.beside_the_group(0, 1):
        return profile_of(
            script.name,
            [(batch_size, timer.steps)],
            timer.parameters,
            optimizers=listener.optimizers,
            frozen_bytes=listener.frozen_bytes,
            source=source,
        )


def main() -> None:
    """Entry point of the process."""
    (out,) = sys.argv[1:]
    words = json.loads(sys.stdin.read())
    script, asked = ScriptCommand(**words.pop("script")), _Asked(**words)
    try:
        if asked.steps is None:
            made = time_factors(script, profile_from_json(asked.profile))
        else:
            made = time_script(script, steps=asked.steps, batch_size=asked.batch_size)
    except OffbeatError as error:
        sys.exit(f"{error}")
    Path(out).write_text(made.to_json(), encoding="utf-8")


if __name__ == "__main__":
    main()
