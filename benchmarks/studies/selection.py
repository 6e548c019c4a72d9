"""Residual and selection: 25 M float32 at density 0.001, on one thread; on a GPU too where there is
one.

python benchmarks/studies/selection.py [--json]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

import torch

import _benchmarks  # noqa: F401
from _measure import Ratio, interleave, main, ratio, timed
from offbeat.codec import jit
from offbeat.codec.selectors import Exact, Selector, ThresholdReuse

NUM_ELEMENTS = 25_000_000
K = NUM_ELEMENTS // 1000
NUM_ROUNDS = 25
NUM_GRADIENTS = 3


class Staging:
    """Stages one gradient after the other against the same residual; the threshold for reuse comes
    from the gradient before.
    """

    def __init__(
        self,
        selector: Selector,
        gradients: list[torch.Tensor],
        residual: torch.Tensor,
    ) -> None:
        self._gradients = gradients
        self._selector, self._residual = selector, residual
        self._state = selector.initial_state()
        self._buffer = torch.empty_like(residual)
        self._turn = 0

    def seconds(self) -> float:
        self._buffer.copy_(self._gradients[self._turn % len(self._gradients)])
        self._turn += 1
        synchronize(self._buffer)
        return timed(self._stage)

    def _stage(self) -> None:
        picked = self._selector.select(
            self._buffer, self._residual, k=K, weight=1.0, state=self._state
        )
        self._state = picked.state
        synchronize(self._buffer)


def synchronize(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


def normal(device: str) -> Callable[[], torch.Tensor]:
    generator = torch.Generator(device=device).manual_seed(0)
    return lambda: torch.randn(NUM_ELEMENTS, generator=generator, device=device)


def on_cpu() -> Iterator[Ratio]:
    torch.set_num_threads(1)
    jit.warm()
    draw = normal("cpu")
    gradients, residual = [draw() for _ in range(NUM_GRADIENTS)], draw()
    magnitudes = (residual + gradients[0]).abs()
    target = residual.clone()
    seconds = interleave(
        {
            "topk": lambda: timed(lambda: torch.topk(magnitudes, K)),
            "add_": lambda: timed(lambda: target.add_(gradients[0])),
            "exact": Staging(Exact(), gradients, residual).seconds,
            "reuse": Staging(ThresholdReuse(), gradients, residual).seconds,
        },
        num_rounds=NUM_ROUNDS,
    )

    def pairs(first: str, second: str) -> list[tuple[float, float]]:
        return list(zip(seconds[first], seconds[second], strict=True))

    one_pass = median(seconds["topk"]) / median(
        seconds["add_"]
    )  # were selection as cheap as the addition
    yield ratio(
        "torch.topk over exact selection", pairs("topk", "exact"), at_least=8, bound=one_pass
    )
    yield ratio("exact selection over residual.add_", pairs("exact", "add_"), at_most=5, bound=1.0)
    yield ratio(
        "torch.topk over threshold reuse", pairs("topk", "reuse"), at_least=20, bound=one_pass
    )
    yield ratio(
        "threshold reuse over residual.add_", pairs("reuse", "add_"), at_most=2.5, bound=1.0
    )


def on_gpu() -> Iterator[Ratio]:
    """Against 12 bytes an element at the bandwidth of a copy, which moves 8."""
    draw = normal("cuda")
    gradients, residual = [draw() for _ in range(NUM_GRADIENTS)], draw()
    target = torch.empty_like(residual)

    def copy() -> None:
        target.copy_(residual)
        synchronize(target)

    measured = {
        "copy": lambda: timed(copy) * 12 / 8,
        "exact": Staging(Exact(), gradients, residual).seconds,
        "reuse": Staging(ThresholdReuse(), gradients, residual).seconds,
    }
    seconds = interleave(measured, num_rounds=NUM_ROUNDS)
    device = torch.cuda.get_device_name()
    for name in ("exact", "reuse"):
        pairs = list(zip(seconds[name], seconds["copy"], strict=True))
        yield ratio(
            f"{name} selection over 12 bytes an element, {device}", pairs, at_most=1.5, bound=1.0
        )


if __name__ == "__main__":
    main({"CPU": on_cpu} | ({"GPU": on_gpu} if torch.cuda.is_available() else {}))
