"""Proof, every now and then, that the ranks' parameters are still identical to the bit.

Processors of unlike kinds round products of matrices in unlike ways. Where a strategy multiplies on
each rank (PowerSGD, K-FAC), or an optimizer does, replicas drift apart on them, and there a
difference is told and the run goes on.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, TypeAlias

import torch
from typing_extensions import override

from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Context
from offbeat.collectives.dense import gather_values
from offbeat.errors import DivergedError

EARLY_STEPS: Final = frozenset((1, 10))
"""After these steps of a session replicas are compared in any case: most of what makes them differ
does so from the beginning.
"""

Options: TypeAlias = list[dict[str, str]]
"""An optimizer's, such as the learning rate, by name: of each of its groups."""


def checksum(parameters: Sequence[torch.Tensor]) -> int:
    """A number that changes when any bit of any parameter does, except for changes that cancel out.

    One pass over the bits, at memory speed; it finds drift and corruption, and is no defence
    against intent.
    """
    total = 0
    for position, parameter in enumerate(parameters):
        flat = parameter.detach().reshape(-1)
        if flat.storage_offset() * flat.element_size() % 8:
            flat = flat.clone()
        bits = flat.view(torch.uint8)
        whole = bits.numel() // 8 * 8
        words = int(bits[:whole].view(torch.int64).sum()) + int(bits[whole:].sum())
        total = (total + (2 * position + 1) * words) & 0xFFFFFFFFFFFFFFFF
    return total - (1 << 63)


_USUAL_REASONS: Final = (
    "their optimizers have the same options: does every rank run the same code and library versions"
    " on the same kind of device, does nothing but the optimizer change parameters, and did all"
    " optimizers begin with the same state? After a session that averages weights each rank's has"
    " its own: begin with new ones."
)


def hyperparameters_of(optimizer: torch.optim.Optimizer) -> Options:
    """What `optimizer` steps with now, as text; functions have none that processes share, and each
    rank has a device of its own.
    """
    return [
        {
            name: str(value.tolist() if isinstance(value, torch.Tensor) else value)
            for name, value in group.items()
            if name != "params" and not callable(value)
        }
        for group in optimizer.param_groups
    ]


def processor(device: torch.device) -> str:
    """What decides how results are rounded on `device`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} with {torch.backends.cpu.get_cpu_capability()}"


class ReplicaCheck(Callback):
    """After every `interval` optimizer steps of a session, and after `EARLY_STEPS`, compares a
    checksum of the parameters over all ranks.

    Cost: one pass over the parameters and an all-gather of one number, each time.

    Args:
        context: lent by the session. The options of its optimizer are compared where parameters
            differ.
        arrive: waits until parameters are what the last step has made of them.
    """

    state_key: ClassVar[str] = "replica_check"
    may_begin_anew: ClassVar[bool] = True

    def __init__(self, context: Context, *, arrive: Callable[[], None] = lambda: None) -> None:
        self._parameters = list(context.parameters.values())
        self._optimizer, self._warn = context.optimizer, context.notices.warn
        self._driver, self._stream = context.driver, context.new_stream()
        self._interval, self._arrive = context.replica_check_interval, arrive
        self._num_steps = self._num_steps_here = 0

    @override
    def on_after_step(self) -> None:
        # By the steps of this session: they are the same on all ranks, which a number of steps that
        # one rank alone has loaded is not.
        self._num_steps += 1
        self._num_steps_here += 1
        if self._num_steps_here in EARLY_STEPS or self._num_steps_here % self._interval == 0:
            self.verify()

    def verify(self) -> None:
        """Compare now. If they differ, every rank raises `DivergedError`, or is told so where the
        ranks' processors differ too.
        """
        self._arrive()
        mine = gather_values(checksum(self._parameters))
        checksums = self._driver.run(mine, self._stream.next())
        named = self._driver.name_of
        odd = [named(rank) for rank, value in enumerate(checksums) if value != checksums[0]]
        if odd:
            found = f"the parameters of ranks {odd} are no longer those of rank {named(0)}"
            difference = self._difference()
            device = self._parameters[0].device
            kinds = self._driver.run(gather_values(processor(device)), self._stream.next())
            if difference is None and len(set(kinds)) > 1:
                self._warn(
                    f"{found} to the bit, since processors of unlike kinds round in unlike ways:"
                    f" {', '.join(sorted(set(kinds)))}. They drift apart slowly"
                )
                return
            raise DivergedError(
                f"after step {self._num_steps} {found}, and {difference or _USUAL_REASONS} Resume"
                " from the last checkpoint, or attach with replica_check_interval=0 to go on"
                " regardless"
            )

    def _difference(self) -> str | None:
        """In what the ranks' optimizers differ; None: in nothing. Collective."""
        mine = [] if self._optimizer is None else hyperparameters_of(self._optimizer)
        everyone: list[Options] = self._driver.run(gather_values(mine), self._stream.next())
        for rank, theirs in enumerate(everyone):
            for number, (expected, group) in enumerate(zip(everyone[0], theirs, strict=False)):
                for name, value in group.items():
                    if (on_rank_0 := expected.get(name)) != value:
                        return (
                            f"the optimizer's group {number} has {name}={value} on rank"
                            f" {self._driver.name_of(rank)} and {name}={on_rank_0} on rank"
                            f" {self._driver.name_of(0)}. Set the same on every rank; to a"
                            " scheduler that follows a loss give its mean over all ranks, as"
                            " session.gather(loss) lets you compute it."
                        )
        return None

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"replicated": {"num_steps": self._num_steps}}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._num_steps = int(state["replicated"]["num_steps"])
