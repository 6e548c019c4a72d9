"""Steps of the K-FAC strategies, by the planner that they run themselves (`kfac.planning`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from typing_extensions import override

from offbeat.errors import ConfigError
from offbeat.kfac.planning.inversion import PolynomialInversion, TabledInversion
from offbeat.kfac.planning.iteration import (
    Iteration,
    IterationCosts,
    dkfac,
    factor_dims,
    mpdkfac,
    spdkfac,
)
from offbeat.kfac.planning.placement import InverseCosts, least_loaded, packed_bytes
from offbeat.plan.methods import DenseGradients
from offbeat.plan.profile import ModelProfile
from offbeat.plan.simulation import Method, Setting, Simulated
from offbeat.planning.costs import Channel, LinkCost
from offbeat.planning.trees import num_rounds


def iteration_costs(setting: Setting, *, gradients_s: float) -> IterationCosts:
    """What an iteration costs on a cluster: factors and inverses travel as dense collectives.

    Args:
        setting: the model on the cluster.
        gradients_s: exposed exchange of gradients.

    Raises:
        ConfigError: the profile lacks what K-FAC needs.
    """
    profile, world_size = setting.profile, setting.world_size
    if not profile.layers or profile.inversion is None:
        raise ConfigError(
            f"profile {profile.name!r} has no layers with Kronecker factors, or no cost of their"
            " inversion, so K-FAC cannot be planned; leave its strategies out"
        )
    link = setting.network.dense
    hops, rounds = 2 * (world_size - 1), num_rounds(world_size)
    all_reduce = LinkCost(
        alpha_s=hops * link.alpha_s, beta_s_per_byte=hops / world_size * link.beta_s_per_byte
    )
    broadcast = LinkCost(
        alpha_s=rounds * link.alpha_s, beta_s_per_byte=rounds * link.beta_s_per_byte
    )
    gap_s = min(broadcast.alpha_s, rounds * setting.message_s)
    crowding = setting.factor_crowding
    return IterationCosts(
        forward_backward_s=profile.compute_s * setting.crowding,
        factors_s=profile.factors_s * crowding,
        gradients_s=gradients_s,
        all_reduce=all_reduce,
        inverse=InverseCosts(
            inversion=_slowed(profile.inversion, crowding),
            broadcast=Channel(link=broadcast, gap_s=gap_s),
            fused=True,
        ),
    )


class SecondOrder(Method):
    """D-KFAC, MPD-KFAC and SPD-KFAC: gradients as in S-SGD, and now and then factors and inverses.

    Args:
        plan: of an iteration with both.
        factor_interval: steps from one with factors to the next.
        inverse_interval: steps from one with inversions to the next.
    """

    def __init__(
        self,
        plan: Callable[..., Iteration],
        *,
        factor_interval: int,
        inverse_interval: int,
    ) -> None:
        super().__init__()
        self._plan = plan
        self._factor_interval = factor_interval
        self._inverse_interval = inverse_interval
        self.steps_in_a_period = max(factor_interval, inverse_interval)

    @override
    def simulate(self, setting: Setting) -> Simulated:
        profile = setting.profile
        plain = DenseGradients().simulate(setting)
        gradients_s = max(0.0, plain.step_s - setting.ideal_s)
        costs = iteration_costs(setting, gradients_s=gradients_s)
        iteration = self._plan(profile.layers, setting.world_size, costs)
        factors_s = (costs.factors_s + iteration.factors_s) / self._factor_interval
        inverse_s = iteration.inverse.total_s / self._inverse_interval
        dims = factor_dims(profile.layers)
        share = 2 * (setting.world_size - 1) / setting.world_size
        factor_bytes = share * sum(map(packed_bytes, dims)) / self._factor_interval
        inverse_bytes = sum(
            packed_bytes(dim)
            for dim, owner in zip(dims, iteration.owners, strict=True)
            if owner is not None
        )
        exposed_s = gradients_s + iteration.factors_s / self._factor_interval
        exposed_s += iteration.inverse.exposed_s / self._inverse_interval
        alone = replace(costs, all_reduce=replace(costs.all_reduce, beta_s_per_byte=0.0))
        latency_s = self._plan(profile.layers, setting.world_size, alone).factors_s
        return Simulated(
            step_s=plain.step_s
            + factors_s
            + inverse_s
            + profile.precondition_s * setting.factor_crowding,
            bytes_per_step=plain.bytes_per_step
            + factor_bytes
            + inverse_bytes / setting.world_size / self._inverse_interval,
            encode_s=plain.encode_s
            + profile.precondition_s
            + costs.factors_s / self._factor_interval
            + iteration.inverse.computing_s / self._inverse_interval,
            alpha_share=min(1.0, (plain.alpha_share * gradients_s + latency_s) / exposed_s)
            if exposed_s
            else 0.0,
            by_events=plain.by_events,
            note=_note(profile),
        )


class OwnerFactors(Method):
    """DP-KFAC: each block's owner inverts factors of its own batch; preconditioned gradients are
    broadcast in every step.

    Args:
        factor_interval: steps from one with factors to the next.
        inverse_interval: steps from one with inversions to the next.
    """

    def __init__(self, *, factor_interval: int, inverse_interval: int) -> None:
        super().__init__()
        self._factor_interval = factor_interval
        self._inverse_interval = inverse_interval
        self.steps_in_a_period = max(factor_interval, inverse_interval)

    @override
    def simulate(self, setting: Setting) -> Simulated:
        profile, world_size = setting.profile, setting.world_size
        plain = DenseGradients().simulate(setting)
        costs = iteration_costs(setting, gradients_s=0.0)
        layers = profile.layers
        loads = [
            costs.inverse.inversion.time_s(layer.a_dim)
            + costs.inverse.inversion.time_s(layer.g_dim)
            for layer in layers
        ]
        sums = [0.0] * world_size
        for load, owner in zip(loads, least_loaded(loads, world_size), strict=True):
            sums[owner] += load
        messages = [(0.0, 4 * layer.a_dim * layer.g_dim) for layer in layers]
        broadcast_s = costs.inverse.broadcast.last_arrival_s(messages) if world_size > 1 else 0.0
        computed_s = costs.factors_s / world_size / self._factor_interval
        computed_s += profile.precondition_s * setting.factor_crowding / world_size
        computed_s += max(sums) / self._inverse_interval
        channel = costs.inverse.broadcast
        return Simulated(
            step_s=plain.step_s + computed_s + broadcast_s,
            bytes_per_step=plain.bytes_per_step + profile.num_bytes / world_size,
            encode_s=plain.encode_s + computed_s,
            alpha_share=min(1.0, len(layers) * channel.gap_s / broadcast_s) if broadcast_s else 0.0,
            by_events=plain.by_events,
            note=_note(profile),
        )


def _slowed(
    inversion: PolynomialInversion | TabledInversion, factor: float
) -> PolynomialInversion | TabledInversion:
    """Where everything takes `factor` times as long."""
    if isinstance(inversion, TabledInversion):
        return replace(inversion, seconds=tuple(factor * seconds for seconds in inversion.seconds))
    return PolynomialInversion(
        constant_s=factor * inversion.constant_s,
        square_s=factor * inversion.square_s,
        cube_s=factor * inversion.cube_s,
    )


def _note(profile: ModelProfile) -> str:
    return "" if profile.factors_s else "the profile does not say how long factors take"


PLANS: dict[str, Callable[..., Iteration]] = {
    "dkfac": dkfac,
    "mpdkfac": mpdkfac,
    "spdkfac": spdkfac,
}
"""Of an iteration, by name of the strategy."""
