"""How long an iteration of D-KFAC, MPD-KFAC and SPD-KFAC takes, from the sizes of layers and from
fitted costs.

              factors are computed in    and all-reduced            and inverted by
    D-KFAC    both passes                behind backward: A, G      every rank
    MPD-KFAC  both passes                behind backward: A, G      one rank each, then broadcast
    SPD-KFAC  both passes                in groups, meanwhile       every rank, or one and broadcast

In the forward pass A of a layer is computed before the layer, in the backward pass G behind it.
They differ in two plans: how all-reduces are fused and when they start, and who inverts what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from offbeat.arithmetic.costs import LinkCost, fit
from offbeat.kfac.overlap import fuse_for_earliest_end
from offbeat.kfac.placement import (
    InverseCosts,
    Owner,
    PlacementTime,
    by_every_rank,
    packed_bytes,
    place_for_shortest_phase,
    placement_time,
    round_robin,
)
from offbeat_lab.plan.profile import Layer, PolynomialInversion
from offbeat_lab.plan.shipped import FORWARD_SHARE

Fusion: TypeAlias = Callable[[Sequence[float], Sequence[int], LinkCost], list[list[int]]]
"""`overlap.fuse_for_earliest_end`, or another with the same arguments."""

Placement: TypeAlias = Callable[[Sequence[int], int, InverseCosts], tuple[Owner, ...]]
"""`placement.place_for_shortest_phase`, or another with the same arguments."""


def fit_inversion(samples: Iterable[tuple[int, float]]) -> PolynomialInversion:
    """The polynomial nearest to timed inversions, each (rows, seconds > 0), of three sizes or more.

    >>> timed = [(d, 1e-3 + 2e-13 * d**3) for d in (64, 256, 1024, 4096)]
    >>> fitted = fit_inversion(timed)
    >>> round(fitted.constant_s, 9), round(fitted.cube_s, 18)
    (0.001, 2e-13)
    """
    constant_s, square_s, cube_s = fit(
        samples, [lambda _: 1.0, lambda dim: dim**2, lambda dim: dim**3]
    )
    return PolynomialInversion(constant_s=constant_s, square_s=square_s, cube_s=cube_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationCosts:
    """What was measured or fitted.

    Attributes:
        forward_backward_s: of one iteration without any K-FAC.
        factors_s: computing all A and G.
        gradients_s: what remains of the gradients' all-reduce behind the backward pass.
        all_reduce: of factors, one message after the other.
        inverse: of factors.
        forward_share: which part of `forward_backward_s` the forward pass takes, 0 to 1.
    """

    forward_backward_s: float
    factors_s: float
    gradients_s: float
    all_reduce: LinkCost
    inverse: InverseCosts
    forward_share: float = FORWARD_SHARE


@dataclass(frozen=True, kw_only=True, slots=True)
class Iteration:
    """Where the time goes.

    Attributes:
        computing_s: forward, backward and factors.
        gradients_s: exchange of gradients, as far as exposed.
        factors_s: exchange of factors, as far as exposed.
        inverse: inverting and broadcasting.
        groups: which factors are all-reduced together, as indices into A of every layer, first
            layer first, then G, last first.
        owners: who inverts each of them.
    """

    computing_s: float
    gradients_s: float
    factors_s: float
    inverse: PlacementTime
    groups: list[list[int]]
    owners: tuple[Owner, ...]

    @property
    def total_s(self) -> float:
        return self.computing_s + self.gradients_s + self.factors_s + self.inverse.total_s


def fuse_by_rule(
    ready_s: Sequence[float], sizes_bytes: Sequence[int], link: LinkCost
) -> list[list[int]]:
    """The rule of SPD-KFAC (arXiv 2107.06533), that of MG-WFBP (arXiv 1912.09268): going forward,
    message l waits for the next one if that is ready before l could be over its alpha, R_{l+1} <
    s_l + alpha. Arguments and result are those of `kfac.overlap.fuse_for_earliest_end`.

    >>> fuse_by_rule([0.0, 0.1, 5.0], [10, 10, 10], LinkCost(alpha_s=1.0, beta_s_per_byte=0.01))
    [[0, 1], [2]]
    """
    groups: list[list[int]] = []
    fused: list[int] = []
    free_s = 0.0
    for index, ready in enumerate(ready_s):
        fused.append(index)
        start_s = max(free_s, ready)
        is_last = index + 1 == len(ready_s)
        if is_last or not ready_s[index + 1] < start_s + link.alpha_s:
            num_bytes = sum(sizes_bytes[i] for i in fused)
            free_s = start_s + link.time_s(num_messages=1, num_bytes=num_bytes)
            groups.append(fused)
            fused = []
    return groups


def last_end_s(
    groups: Sequence[Sequence[int]],
    ready_s: Sequence[float],
    sizes_bytes: Sequence[int],
    link: LinkCost,
) -> float:
    """When the last group has been all-reduced; a group is sent when all of it is ready.

    Args:
        groups: indices of messages that are sent together, in the order in which they are sent.
        ready_s: when each message is ready, in seconds.
        sizes_bytes: of each message.
        link: the all-reduce.

    >>> link = LinkCost(alpha_s=1.0, beta_s_per_byte=0.1)
    >>> last_end_s([[0, 1], [2]], [0.0, 0.5, 5.0], [10, 10, 10], link)
    7.0
    """
    end_s = 0.0
    for group in groups:
        num_bytes = sum(sizes_bytes[index] for index in group)
        end_s = max(end_s, max(ready_s[index] for index in group)) + link.time_s(
            num_messages=1, num_bytes=num_bytes
        )
    return end_s


def dkfac(layers: Sequence[Layer], world_size: int, costs: IterationCosts) -> Iteration:
    """Everything in sequence, everything inverted by every rank."""
    return _in_sequence(factor_dims(layers), world_size, costs, by_every_rank(2 * len(layers)))


def mpdkfac(layers: Sequence[Layer], world_size: int, costs: IterationCosts) -> Iteration:
    """Everything in sequence, factors inverted in turn."""
    return _in_sequence(
        factor_dims(layers), world_size, costs, round_robin(2 * len(layers), world_size)
    )


def spdkfac(
    layers: Sequence[Layer],
    world_size: int,
    costs: IterationCosts,
    *,
    fusion: Fusion = fuse_for_earliest_end,
    placement: Placement = place_for_shortest_phase,
    pipelining: bool = True,
) -> Iteration:
    """Factors exchanged while computing goes on, inverted where that is cheapest. Without
    `pipelining` they are exchanged as by D-KFAC.

    With `fusion=fuse_by_rule` and `placement=place_by_rule` as the paper has it.
    """
    dims = factor_dims(layers)
    if not pipelining:
        owners = placement(dims, world_size, costs.inverse)
        return _in_sequence(dims, world_size, costs, owners)
    ready_s = ready_times(layers, costs)
    groups = fusion(ready_s, [packed_bytes(dim) for dim in dims], costs.all_reduce)
    return _iteration(
        dims, world_size, costs, ready_s, groups, placement(dims, world_size, costs.inverse)
    )


def factor_dims(layers: Sequence[Layer]) -> list[int]:
    """Rows of all factors in the order in which they are made: A of the first layer first, then G
    of the last layer first.

    >>> factor_dims([Layer(a_dim=3, g_dim=5), Layer(a_dim=6, g_dim=2)])
    [3, 6, 2, 5]
    """
    return [layer.a_dim for layer in layers] + [layer.g_dim for layer in reversed(layers)]


def ready_times(layers: Sequence[Layer], costs: IterationCosts) -> list[float]:
    """When each factor, in the order of `factor_dims`, has been computed, in seconds since the
    forward pass began.

    Times of passes and factors are divided among layers by the number of multiplications: positions
    x rows of A x rows of G
    for a pass, positions x rows^2 for a factor.
    """
    passes = [layer.num_positions * layer.a_dim * layer.g_dim for layer in layers]
    factors = [
        (layer.num_positions * layer.a_dim**2, layer.num_positions * layer.g_dim**2)
        for layer in layers
    ]
    pass_s = costs.forward_backward_s / sum(passes)
    factor_s = costs.factors_s / sum(a + g for a, g in factors)
    now_s = 0.0
    ready_s: list[float] = []
    for num_pass, (num_a, _) in zip(passes, factors, strict=True):
        now_s += num_a * factor_s
        ready_s.append(now_s)
        now_s += num_pass * pass_s * costs.forward_share
    for num_pass, (_, num_g) in zip(reversed(passes), reversed(factors), strict=True):
        now_s += num_pass * pass_s * (1 - costs.forward_share) + num_g * factor_s
        ready_s.append(now_s)
    return ready_s


def _in_sequence(
    dims: Sequence[int], world_size: int, costs: IterationCosts, owners: tuple[Owner, ...]
) -> Iteration:
    """All A in one message and all G in another, once everything has been computed."""
    computed_s = costs.forward_backward_s + costs.factors_s
    half = len(dims) // 2
    groups = [list(range(half)), list(range(half, len(dims)))]
    return _iteration(dims, world_size, costs, [computed_s] * len(dims), groups, owners)


def _iteration(
    dims: Sequence[int],
    world_size: int,
    costs: IterationCosts,
    ready_s: Sequence[float],
    groups: list[list[int]],
    owners: tuple[Owner, ...],
) -> Iteration:
    computing_s = costs.forward_backward_s + costs.factors_s
    exchanged_s = (
        last_end_s(groups, ready_s, [packed_bytes(dim) for dim in dims], costs.all_reduce)
        if world_size > 1
        else 0.0
    )
    return Iteration(
        computing_s=computing_s,
        gradients_s=costs.gradients_s,
        factors_s=max(0.0, exchanged_s - computing_s),
        inverse=placement_time(owners, dims, world_size, costs.inverse),
        groups=groups,
        owners=owners,
    )
