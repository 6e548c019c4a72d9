"""What PowerSGD computes: torch's own hook is timed, in a group of one rank that sends nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from typing_extensions import override

from offbeat_lab.plan.clock import usual_s

_RANKS: Final = (1, 4)


def time_low_rank(parameters: Sequence[torch.nn.Parameter]) -> tuple[float, float]:
    """Seconds for each element of the model: at rank 1, and what each further rank adds."""
    num_elements = sum(parameter.numel() for parameter in parameters)
    at_one_s, at_four_s = (_hook_s(parameters, rank) for rank in _RANKS)
    further_s = max(0.0, at_four_s - at_one_s) / (_RANKS[1] - _RANKS[0])
    return at_one_s / num_elements, further_s / num_elements


def _hook_s(parameters: Sequence[torch.nn.Parameter], rank: int) -> float:
    """The fastest of a few calls, all gradients in one bucket, as in `offbeat_lab.native`."""
    device = parameters[0].device
    bucket = _Bucket(parameters)
    state = powerSGD_hook.PowerSGDState(
        process_group=_GroupOfOne(), matrix_approximation_rank=rank, start_powerSGD_iter=2
    )
    gradient = torch.randn_like(bucket.flat)

    def call() -> None:
        bucket.flat.copy_(gradient)
        powerSGD_hook.powerSGD_hook(state, bucket).wait()  # type: ignore[arg-type]  # has what it asks for

    # Two calls come before the first approximation, which makes room for all others.
    for _ in range(3):
        call()
    copied_s = usual_s(lambda: bucket.flat.copy_(gradient), device)
    return max(0.0, usual_s(call, device) - copied_s)


class _Bucket:
    """What the hook asks a `torch.distributed.GradBucket` for."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        first = parameters[0]
        self.flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        self._gradients = [
            part.view(parameter.shape if parameter.ndim else (1,))
            for part, parameter in zip(self.flat.split(sizes), parameters, strict=True)
        ]

    def buffer(self) -> torch.Tensor:
        return self.flat

    def gradients(self) -> list[torch.Tensor]:
        return self._gradients

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


class _GroupOfOne(dist.ProcessGroup):
    """Its all-reduce leaves tensors as they are."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # torch's stubs lack what subclasses call

    @override
    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        return _Over(tensors)


class _Over(dist.Work):
    """What is done before it is asked for."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(tensors)

    @override
    def wait(self, timeout: Any = None) -> bool:
        return True

    @override
    def get_future(self) -> Any:
        return self._future
