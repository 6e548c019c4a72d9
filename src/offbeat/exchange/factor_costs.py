"""What all-reducing factors, inverting them and broadcasting inverses costs here, agreed on by all ranks."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from offbeat.collectives.dense import dense_all_reduce, dense_broadcast
from offbeat.planning.costs import Channel, Link, fit_link
from offbeat.planning.factor_plan import FactorCosts
from offbeat.planning.inversion import fit_inversion, slowest
from offbeat.planning.placement import InverseCosts
from offbeat.transport.driver import Driver, Stream
from offbeat.transport.operations import AllGather, Collective

MESSAGE_ELEMENTS = (16, 1 << 18)
"""Sizes of messages that are timed."""

DIMS = (32, 64, 128, 256, 512, 1024)
"""Sizes of matrices that are timed, as far as the model has any near them. Three are needed for the fit."""

NUM_AT_ONCE = 8
"""Broadcasts that are begun without waiting, to see how far their latencies overlap."""


def device_kind(device: torch.device) -> str:
    """What decides how results are rounded: ranks of which this is the same compute the same bits."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} {torch.version.cuda} {torch.__version__}"
    capability, bfloat16 = torch.backends.cpu.get_cpu_capability(), torch.cpu._is_avx512_bf16_supported()
    return f"{platform.machine()} {platform.processor()} {capability} {bfloat16} {torch.get_num_threads()} {torch.__version__}"


def are_alike(driver: Driver, stream: Stream, device: torch.device) -> bool:
    """Whether all ranks compute on devices of one kind. Collective."""
    kinds = driver.run(_gather(device_kind(device)), stream.next())
    return len(set(kinds)) == 1


def slowest_ready_s(driver: Driver, stream: Stream, ready_s: Sequence[float]) -> list[float]:
    """For each factor, when the last rank has it. Collective."""
    answers = driver.run(_gather(json.dumps(list(ready_s))), stream.next())
    return [max(times) for times in zip(*map(json.loads, answers), strict=True)]


def measure(
    driver: Driver, stream: Stream, *, largest_dim: int, like: torch.Tensor, invert: Callable[[torch.Tensor], object]
) -> FactorCosts:
    """Time everything on every rank, and fit what the slowest needed. Collective; takes a fraction of a second.

    Args:
        driver, stream: carry the messages out.
        largest_dim: rows of the model's largest factor.
        like: any tensor of the factors' dtype and device.
        invert: inverts a matrix of shape (d, d), as training does.
    """
    dims = [dim for dim in DIMS if dim <= 2 * largest_dim]
    dims = dims if len(dims) > 2 else list(DIMS[:3])
    generator = torch.Generator().manual_seed(0)
    inversions = {}
    for dim in dims:
        rows = torch.randn(2 * dim, dim, generator=generator).to(like)
        matrix = rows.mT @ rows / dim
        inversions[dim] = _fastest_s(like, lambda matrix=matrix: invert(matrix), repeats=3)  # type: ignore[misc]
    one, many = MESSAGE_ELEMENTS
    tensors = {size: like.new_zeros(size) for size in MESSAGE_ELEMENTS}
    reduces = {
        size: _fastest_s(like, lambda size=size: _run(driver, stream, [dense_all_reduce(tensors[size])]))  # type: ignore[misc]
        for size in (one, many)
    }
    sends = {
        size: _fastest_s(like, lambda size=size: _run(driver, stream, [dense_broadcast(tensors[size], 0)]))  # type: ignore[misc]
        for size in (one, many)
    }
    roots = [number % driver.world_size for number in range(NUM_AT_ONCE)]
    several_s = _fastest_s(like, lambda: _run(driver, stream, [dense_broadcast(like.new_zeros(one), root) for root in roots]))
    mine = {"inversions": inversions, "reduces": reduces, "sends": sends, "several": {NUM_AT_ONCE: several_s}}
    answers = [json.loads(answer) for answer in driver.run(_gather(json.dumps(mine)), stream.next())]
    agreed = {what: slowest(_by_size(answer[what]) for answer in answers) for what in mine}
    broadcast = _link(agreed["sends"], like)
    gap_s = (agreed["several"][NUM_AT_ONCE] - agreed["sends"][one]) / (NUM_AT_ONCE - 1)
    return FactorCosts(
        all_reduce=_link(agreed["reduces"], like),
        inverse=InverseCosts(
            inversion=fit_inversion(agreed["inversions"].items()),
            broadcast=Channel(link=broadcast, gap_s=min(max(gap_s, 0.0), broadcast.alpha_s)),
        ),
    )


def _by_size(samples: Mapping[str, float]) -> dict[int, float]:
    return {int(size): seconds for size, seconds in samples.items()}


def _link(samples: Mapping[int, float], like: torch.Tensor) -> Link:
    return fit_link((size * like.element_size(), seconds) for size, seconds in samples.items())


def _run(driver: Driver, stream: Stream, collectives: Sequence[Collective[torch.Tensor]]) -> None:
    for pending in [driver.launch(collective, stream.next()) for collective in collectives]:
        pending.wait()


def _fastest_s(like: torch.Tensor, call: Callable[[], object], *, repeats: int = 5) -> float:
    """The least seconds that `call` takes: everything else is disturbance."""
    durations_s = []
    for _ in range(repeats):
        begin_s = time.perf_counter()
        call()
        if like.is_cuda:
            torch.cuda.synchronize(like.device)
        durations_s.append(time.perf_counter() - begin_s)
    return max(min(durations_s), 1e-9)


def _gather(answer: str) -> Collective[list[str]]:
    payloads = yield AllGather(answer.encode())
    return [bytes(payload).decode() for payload in payloads]
