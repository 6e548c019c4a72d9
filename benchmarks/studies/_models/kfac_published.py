"""What was published of SPD-KFAC on 64 GPUs, and ResNet-50's layers: what the planner is checked
against.

Seconds and costs are of SPD-KFAC (arXiv 2107.06533) and its released code: 64 RTX 2080 Ti behind
100 Gbit/s InfiniBand, 32 images a GPU, factors and inverses in every iteration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from _models.kfac_iteration import IterationCosts
from offbeat.arithmetic.costs import Channel, LinkCost
from offbeat.kfac.placement import BYTES_PER_ELEMENT, InverseCosts, packed_bytes
from offbeat_lab.plan.profile import Layer, PolynomialInversion
from offbeat_lab.plan.shipped import factors_of, resnet


@dataclass(frozen=True, kw_only=True, slots=True)
class ExponentialInversion:
    """alpha exp(beta d), as published. An exponential through 147 and 4,608 rows overestimates
    everything between, by a factor of 2.4 for the sum over ResNet-50's factors.

    Attributes:
        alpha_s: in seconds, > 0.
        beta_per_row: >= 0.
    """

    alpha_s: float
    beta_per_row: float

    def time_s(self, dim: int) -> float:
        return self.alpha_s * math.exp(self.beta_per_row * dim)


WORLD_SIZE = 64

SECONDS = {"dkfac": 0.8525, "mpdkfac": 0.7635, "spdkfac": 0.6755}
"""Of an iteration, measured."""

INVERSE_SECONDS = {"dkfac": 0.274, "mpdkfac": 0.185, "spdkfac": 0.169}
"""Of inverting and broadcasting, measured."""


def resnet50(image_size: int = 224) -> list[Layer]:
    """The 54 layers of ResNet-50 that have Kronecker factors, in the order of the forward pass.

    Args:
        image_size: pixels on a side, a multiple of 32.
    """
    return list(factors_of(resnet((3, 4, 6, 3), image_size=image_size)))


def as_printed(*, latencies_overlap: bool) -> IterationCosts:
    """The published alpha, beta and inversion model.

    Args:
        latencies_overlap: whether alpha of the broadcast, which was fitted to broadcasts that were
            waited for one by one, is paid once where many are started together, or by each.
    """
    broadcast = _per_element(1.59e-2, 7.85e-10)
    return IterationCosts(
        forward_backward_s=0.132,
        factors_s=0.2115,
        gradients_s=0.065,
        all_reduce=_per_element(1.22e-2, 1.45e-9),
        inverse=InverseCosts(
            inversion=ExponentialInversion(alpha_s=3.64e-3, beta_per_row=4.77e-4),
            broadcast=Channel(
                link=broadcast, gap_s=0.0 if latencies_overlap else broadcast.alpha_s
            ),
            pipelined=False,
        ),
    )


def fitted_to_baselines() -> IterationCosts:
    """The same, with what the measured inverse phases of D-KFAC and MPD-KFAC say of inversion and
    broadcast.

    Inversion is a + c d^3 with the published model's time for the largest factor and D-KFAC's
    measured sum; the gap between broadcasts is what MPD-KFAC's phase leaves for each of them.
    Nothing of SPD-KFAC goes in.
    """
    printed = as_printed(latencies_overlap=True)
    dims = [dim for layer in resnet50() for dim in (layer.a_dim, layer.g_dim)]
    largest_s = printed.inverse.inversion.time_s(max(dims))
    num, cubes, largest_cube = len(dims), sum(dim**3 for dim in dims), max(dims) ** 3
    cube_s = (INVERSE_SECONDS["dkfac"] - num * largest_s) / (cubes - num * largest_cube)
    inversion = PolynomialInversion(
        constant_s=largest_s - cube_s * largest_cube, square_s=0.0, cube_s=cube_s
    )
    link = printed.inverse.broadcast.link
    together_s = link.time_s(num_messages=1, num_bytes=sum(packed_bytes(dim) for dim in dims))
    gap_s = (INVERSE_SECONDS["mpdkfac"] - largest_s - together_s) / (num - 1)
    inverse = InverseCosts(
        inversion=inversion, broadcast=Channel(link=link, gap_s=gap_s), pipelined=False
    )
    return replace(printed, inverse=inverse)


def _per_element(alpha_s: float, beta_s: float) -> LinkCost:
    return LinkCost(alpha_s=alpha_s, beta_s_per_byte=beta_s / BYTES_PER_ELEMENT)
