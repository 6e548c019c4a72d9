"""What plans depend on, agreed on by all ranks: the sizes of the factors, whether all devices round
alike, and what all-reducing factors, inverting them and broadcasting inverses costs here.

Inversions are timed at the model's own sizes and stand in a table, since no polynomial knows the
steps in which the time rises with the number of rows. On a CPU it is the processor's time that
counts: all ranks measure at once, and where they share cores, what each waits for its turn would be
several times what an owner needs while the others stand still. So a share of a core that is held
down by a quota is not seen. Between two inversions other memory is written to, since a step's
inversions do not find theirs in the cache either.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch

from offbeat.arithmetic.costs import Channel, LinkCost, fit_link
from offbeat.codec.device_copies import fastest_s, numpy_dtype
from offbeat.codec.topk_codec import VALUE_CODECS
from offbeat.collectives.dense import dense_all_reduce, dense_broadcast, gather_values
from offbeat.kfac.blocks import FactorSlot
from offbeat.kfac.curvature import KFACSettings
from offbeat.kfac.factors import FactorShape, lapack_version, pack
from offbeat.kfac.inverses import InverseForm, InversionTask, Inverter, form_of
from offbeat.kfac.placement import InverseCosts, TabledInversion, slowest
from offbeat.kfac.plans import FactorCosts, PlanInputs
from offbeat.torch_private import has_avx512_bfloat16
from offbeat.transport.driver import Driver, Stream
from offbeat.transport.operations import Collective

MESSAGE_ELEMENTS = (16, 1 << 18)
"""Sizes of messages that are timed."""

LARGEST_DIM = 1000
"""Rows of the largest matrix that is timed. Larger ones count as its time times the cube of how
much larger they are.
"""

MAX_SIZES = 8
"""How many sizes of matrices are timed. What lies between is interpolated."""

CACHE_ELEMENTS = 1 << 20
"""As much float32 as a core's own caches hold, and more."""

NUM_AT_ONCE = 8
"""Broadcasts that are begun without waiting, to see how far their latencies overlap."""


def device_kind(device: torch.device) -> str:
    """What decides how results are rounded: ranks of which this is the same compute the same
    bits.
    """
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} {torch.version.cuda} {torch.__version__}"
    capability = torch.backends.cpu.get_cpu_capability(), has_avx512_bfloat16()
    versions = torch.get_num_threads(), torch.__version__, lapack_version()
    return " ".join(map(str, (platform.machine(), platform.processor(), *capability, *versions)))


def gather_plan_inputs(
    slots: Sequence[FactorSlot],
    *,
    settings: KFACSettings,
    measures: bool,
    driver: Driver,
    stream: Stream,
) -> PlanInputs:
    """What a K-FAC strategy plans from. Collective; every rank gets the same.

    Args:
        slots: the factors of the model.
        settings: how they are inverted.
        measures: whether costs are measured, which takes a fraction of a second. In a world of one
            nothing is sent, and there is nothing to weigh against anything.
        driver: carries out what is timed.
        stream: its channels.
    """
    first = slots[0]
    kinds = driver.run(gather_values(device_kind(first.device)), stream.next())
    same_devices = len(set(kinds)) == 1
    dims = [equivalent_dim(slot.shape) for slot in slots]
    values = VALUE_CODECS[settings.curvature.factor_codec].suited_to(numpy_dtype(first.dtype))
    costs = None
    if measures and driver.world_size > 1:
        invert = partial(_invert_sample, form_of(slots, settings, same_devices=same_devices))
        costs = measure(driver, stream, dims=dims, like=first.zeros(), invert=invert)
    return PlanInputs(
        world_size=driver.world_size,
        same_devices=same_devices,
        dims=dims,
        sizes_bytes=[int(values.num_bytes(slot.shape.num_elements)) for slot in slots],
        kinds=[(slot.dtype, slot.device) for slot in slots],
        costs=costs,
    )


def time_inversions(slots: Sequence[FactorSlot], settings: KFACSettings) -> TabledInversion:
    """What inverting factors of the sizes of `slots` costs on this rank alone."""
    like, dims = slots[0].zeros(), [equivalent_dim(slot.shape) for slot in slots]
    invert = partial(_invert_sample, form_of(slots, settings, same_devices=True))
    timed_s = _time_inversions(dims, like, invert, inversion_clock(like.device, time.monotonic))
    return TabledInversion(dims=tuple(timed_s), seconds=tuple(timed_s.values()))


def equivalent_dim(shape: FactorShape) -> int:
    """Rows of one matrix that takes as long to invert as the factor; a diagonal takes next to
    nothing.
    """
    return 1 if shape.is_diagonal else max(round(shape.dim * shape.groups ** (1 / 3)), 1)


def _invert_sample(form: InverseForm, matrix: torch.Tensor) -> None:
    """Invert `matrix` as training does, to be timed."""
    damping = torch.ones((), dtype=matrix.dtype, device=matrix.device)
    task = InversionTask(
        name="sample",
        packed=pack(matrix[None]),
        shape=FactorShape(groups=1, dim=matrix.shape[0]),
        damping=damping,
        valid=damping > 0,
    )
    Inverter(lambda _: None, form).invert([task])


def measure(
    driver: Driver,
    stream: Stream,
    *,
    dims: Sequence[int],
    like: torch.Tensor,
    invert: Callable[[torch.Tensor], object],
) -> FactorCosts:
    """Time everything on every rank, and keep what the slowest needed. Collective; takes a fraction
    of a second.

    Args:
        driver, stream: carry the messages out.
        dims: rows of the model's factors, >= 1.
        like: any tensor of the factors' dtype and device.
        invert: inverts a matrix of shape (d, d), as training does.
    """
    now_s, small = partial(driver.now_s, 0), MESSAGE_ELEMENTS[0]

    def send(collectives: Iterable[Collective[torch.Tensor]]) -> None:
        for pending in [driver.launch(collective, stream.next()) for collective in collectives]:
            pending.wait()

    def broadcast_several() -> None:
        roots = [number % driver.world_size for number in range(NUM_AT_ONCE)]
        send(dense_broadcast(like.new_zeros(small), root) for root in roots)

    def timed_s(make: Callable[[torch.Tensor], Collective[torch.Tensor]]) -> dict[int, float]:
        tensors = map(like.new_zeros, MESSAGE_ELEMENTS)
        return {
            tensor.numel(): fastest_s(like, lambda: send([make(tensor)]), now_s)  # noqa: B023 - is called at once
            for tensor in tensors
        }

    mine = {
        "inversions": _time_inversions(dims, like, invert, inversion_clock(like.device, now_s)),
        "all-reduces": timed_s(dense_all_reduce),
        "broadcasts": timed_s(partial(dense_broadcast, root=0)),
        "several": {NUM_AT_ONCE: fastest_s(like, broadcast_several, now_s)},
    }
    answers = driver.run(gather_values(mine), stream.next())
    # A rank that plans from what all ranks measured plans what all ranks plan; the slowest counts,
    # since everybody waits for it.
    agreed = {
        what: slowest({int(size): s for size, s in answer[what].items()} for answer in answers)
        for what in mine
    }
    broadcast = _link(agreed["broadcasts"], like)
    gap_s = (agreed["several"][NUM_AT_ONCE] - agreed["broadcasts"][small]) / (NUM_AT_ONCE - 1)
    return FactorCosts(
        all_reduce=_link(agreed["all-reduces"], like),
        inverse=InverseCosts(
            inversion=TabledInversion(
                dims=tuple(agreed["inversions"]), seconds=tuple(agreed["inversions"].values())
            ),
            broadcast=Channel(link=broadcast, gap_s=min(max(gap_s, 0.0), broadcast.alpha_s)),
            fused=True,
        ),
    )


def _time_inversions(
    dims: Sequence[int],
    like: torch.Tensor,
    invert: Callable[[torch.Tensor], object],
    clock: Callable[[], float],
) -> dict[int, float]:
    """Seconds by number of rows."""
    generator = torch.Generator().manual_seed(0)
    elsewhere = torch.zeros(CACHE_ELEMENTS, device=like.device)
    times_s = {}
    for dim in sizes_to_time(dims):
        rows = torch.randn(2 * dim, dim, generator=generator).to(like)
        matrix = rows.mT @ rows / dim
        times_s[dim] = fastest_s(like, partial(invert, matrix), clock, before=elsewhere.zero_)
    return times_s


def sizes_to_time(dims: Sequence[int]) -> list[int]:
    """Sizes of matrices that stand for `dims`, ascending: at most `MAX_SIZES`, evenly chosen, none
    above `LARGEST_DIM`.

    >>> sizes_to_time([4608, 64, 577, 64])
    [64, 577, 1000]
    >>> sizes_to_time(range(10, 20))
    [10, 11, 13, 14, 15, 16, 18, 19]
    """
    sizes = sorted({min(dim, LARGEST_DIM) for dim in dims})
    last, num = len(sizes) - 1, min(len(sizes), MAX_SIZES)
    return [sizes[round(place * last / max(num - 1, 1))] for place in range(num)]


def inversion_clock(device: torch.device, now_s: Callable[[], float]) -> Callable[[], float]:
    """The clock, in seconds, that inversions on `device` are timed with: `now_s`, but on a CPU the
    processor's. Ranks that share a core measure all at once, but an owner mostly inverts while its
    peers wait.
    """
    return time.thread_time if device.type == "cpu" else now_s


def _link(samples: Mapping[int, float], like: torch.Tensor) -> LinkCost:
    return fit_link((size * like.element_size(), seconds) for size, seconds in samples.items())
