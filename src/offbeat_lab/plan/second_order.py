"""Steps of the K-FAC strategies, by the planner that they run themselves (`kfac.plans`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from typing_extensions import override

from offbeat.arithmetic.costs import Channel, LinkCost
from offbeat.arithmetic.trees import num_rounds
from offbeat.errors import ConfigError
from offbeat.kfac.costs import equivalent_dim
from offbeat.kfac.curvature import KFACSettings
from offbeat.kfac.factors import factor_shape
from offbeat.kfac.placement import InverseCosts, InversionCost, Owner, least_loaded, packed_bytes
from offbeat_lab.plan.kfac_iteration import (
    Iteration,
    IterationCosts,
    Layer,
    dkfac,
    factor_dims,
    mpdkfac,
    spdkfac,
)
from offbeat_lab.plan.profile import ModelProfile
from offbeat_lab.plan.simulation import Method, Setting, Simulated


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
    # Whoever waits for a broadcast says so once, before it begins.
    once_s = setting.announced_s if world_size > 1 else 0.0
    broadcast = LinkCost(
        alpha_s=once_s + rounds * (link.alpha_s - setting.announced_s),
        beta_s_per_byte=rounds * link.beta_s_per_byte,
    )
    gap_s = min(broadcast.alpha_s, rounds * setting.message_s)
    return IterationCosts(
        forward_backward_s=profile.compute_s * setting.crowding,
        # Padded passes take as long as they should, whatever is computed in them.
        factors_s=max(0.0, profile.factors_s * setting.factor_crowding - profile.padding_s),
        gradients_s=gradients_s,
        all_reduce=all_reduce,
        inverse=InverseCosts(
            inversion=profile.inversion,
            broadcast=Channel(link=broadcast, gap_s=gap_s),
            fused=True,
        ),
        forward_share=profile.batch.forward_s / profile.compute_s,
    )


def inverting_s(
    owners: Sequence[Owner], dims: Sequence[int], inversion: InversionCost, setting: Setting
) -> float:
    """Until the last rank has inverted all it has to, where ranks share cores.

    Args:
        owners: who inverts each factor; None: every rank.
        dims: rows of each.
        inversion: on a core of its own.
        setting: says how many cores there are.
    """
    by_all_s, loads_s = 0.0, [0.0] * setting.world_size
    for owner, dim in zip(owners, dims, strict=True):
        if owner is None:
            by_all_s += inversion.time_s(dim)
        else:
            loads_s[owner] += inversion.time_s(dim)
    cores = setting.cluster.cores or setting.world_size
    return by_all_s * setting.factor_crowding + max(*loads_s, sum(loads_s) / cores)


class KroneckerFactors(Method):
    """Gradients as in S-SGD, and now and then factors and inverses.

    Args:
        settings: in which steps there are factors and inversions.
        gradients: how these are exchanged.
    """

    def __init__(self, settings: KFACSettings, gradients: Method) -> None:
        self._settings = settings
        self._gradients = gradients
        self.extra_bytes = gradients.extra_bytes
        self.steps_in_a_period = max(
            settings.factor_steps.first_interval, settings.inverse_steps.first_interval
        )

    def _cut(self, layers: Sequence[Layer]) -> list[Layer]:
        """Layers whose factors take as long as these do when they are cut as the strategy says."""

        def cut(dim: int) -> int:
            return equivalent_dim(factor_shape(1, dim, self._settings.curvature.max_dim))

        return [replace(layer, a_dim=cut(layer.a_dim), g_dim=cut(layer.g_dim)) for layer in layers]

    @override
    def waiting_s(self, setting: Setting, encode_s: float) -> float:
        return self._gradients.waiting_s(setting, encode_s)


class SecondOrder(KroneckerFactors):
    """D-KFAC, MPD-KFAC and SPD-KFAC: factors of all ranks' batches.

    Args:
        plan: of an iteration with factors and inverses.
        settings: as of `KroneckerFactors`.
        gradients: likewise.
    """

    def __init__(
        self, plan: Callable[..., Iteration], settings: KFACSettings, gradients: Method
    ) -> None:
        super().__init__(settings, gradients)
        self._plan = plan

    @override
    def simulate(self, setting: Setting) -> Simulated:
        profile = setting.profile
        plain = self._gradients.simulate(setting)
        gradients_s = max(0.0, plain.step_s - setting.ideal_s)
        costs = iteration_costs(setting, gradients_s=gradients_s)
        size = 0.5 if self._settings.curvature.factor_dtype == "bfloat16" else 1.0
        beta = size * costs.all_reduce.beta_s_per_byte
        costs = replace(costs, all_reduce=replace(costs.all_reduce, beta_s_per_byte=beta))
        layers = self._cut(profile.layers)
        iteration = self._plan(layers, setting.world_size, costs)
        dims = factor_dims(layers)
        with_factors = setting.share(self._settings.has_factors)
        with_inversions = setting.share(self._settings.has_inversions)
        inverted_s = inverting_s(iteration.owners, dims, costs.inverse.inversion, setting)
        precondition_s = profile.precondition_s * setting.factor_crowding
        exposed_s = with_factors * iteration.factors_s
        exposed_s += with_inversions * iteration.inverse.exposed_s
        share = 2 * (setting.world_size - 1) / setting.world_size
        factor_bytes = size * share * sum(map(packed_bytes, dims)) * with_factors
        inverse_bytes = sum(
            packed_bytes(dim)
            for dim, owner in zip(dims, iteration.owners, strict=True)
            if owner is not None
        )
        alone = replace(costs, all_reduce=replace(costs.all_reduce, beta_s_per_byte=0.0))
        latency_s = self._plan(layers, setting.world_size, alone).factors_s
        waited_s = gradients_s + exposed_s
        return Simulated(
            step_s=plain.step_s
            + with_factors * costs.factors_s
            + with_inversions * inverted_s
            + precondition_s
            + exposed_s,
            bytes_per_step=plain.bytes_per_step
            + factor_bytes
            + inverse_bytes / setting.world_size * with_inversions,
            encode_s=plain.encode_s
            + profile.precondition_s
            + with_factors * costs.factors_s / setting.factor_crowding
            + with_inversions * inverted_s / setting.factor_crowding,
            alpha_share=min(
                1.0, (plain.alpha_share * gradients_s + with_factors * latency_s) / waited_s
            )
            if waited_s
            else 0.0,
            by_events=plain.by_events,
            note=_note(profile),
            kept_bytes=plain.kept_bytes,
        )


class OwnerFactors(KroneckerFactors):
    """DP-KFAC: each block's owner inverts factors of its own batch; preconditioned gradients are
    broadcast in every step.
    """

    @override
    def simulate(self, setting: Setting) -> Simulated:
        profile, world_size = setting.profile, setting.world_size
        plain = self._gradients.simulate(setting)
        costs = iteration_costs(setting, gradients_s=0.0)
        layers, inversion = self._cut(profile.layers), costs.inverse.inversion
        loads = [inversion.time_s(layer.a_dim) + inversion.time_s(layer.g_dim) for layer in layers]
        owners = least_loaded(loads, world_size)
        dims = [dim for layer in layers for dim in (layer.a_dim, layer.g_dim)]
        inverted_s = inverting_s(
            [owner for owner in owners for _ in range(2)], dims, inversion, setting
        )
        messages = [(0.0, 4 * layer.a_dim * layer.g_dim) for layer in profile.layers]
        broadcast_s = costs.inverse.broadcast.last_arrival_s(messages) if world_size > 1 else 0.0
        computed_s = costs.factors_s / world_size * setting.share(self._settings.has_factors)
        computed_s += profile.precondition_s * setting.factor_crowding / world_size
        computed_s += inverted_s * setting.share(self._settings.has_inversions)
        channel = costs.inverse.broadcast
        return Simulated(
            step_s=plain.step_s + computed_s + broadcast_s,
            bytes_per_step=plain.bytes_per_step + profile.num_bytes / world_size,
            encode_s=plain.encode_s + computed_s,
            alpha_share=min(1.0, len(layers) * channel.gap_s / broadcast_s) if broadcast_s else 0.0,
            by_events=plain.by_events,
            note=_note(profile),
            kept_bytes=plain.kept_bytes,
        )


def _note(profile: ModelProfile) -> str:
    return "" if profile.factors_s else "the profile does not say how long factors take"


PLANS: dict[str, Callable[..., Iteration]] = {
    "dkfac": dkfac,
    "mpdkfac": mpdkfac,
    "spdkfac": spdkfac,
}
"""Of an iteration, by name of the strategy."""
