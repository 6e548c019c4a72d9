"""Steps that exchange nothing; averages of neighbours' models in each step, and of the gradients of
those who have arrived.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from typing_extensions import override

from offbeat.arithmetic.costs import NetworkCosts
from offbeat.arithmetic.topologies import exponential_peers, ring_weights
from offbeat.collectives.gossip import neighbour_mean, push_sum
from offbeat.transport.operations import Collective, Payload
from offbeat_lab.plan.ceilings import on_first_call
from offbeat_lab.plan.simulation import (
    MINIATURE,
    Method,
    Run,
    Setting,
    Simulated,
    StepMethod,
    until_over,
)


class SoloSteps(StepMethod):
    """Nothing is exchanged: what every other strategy is held against."""

    @override
    def step(self, run: Run, rank: int, number: int) -> Collective[None]:
        profile = run.setting.profile
        yield from run.late(rank, number)
        yield from run.forward(rank, number)
        yield from run.compute(rank, number, profile.batch.backward_s + profile.optimizer_s)

    @override
    def encode_s(self, setting: Setting) -> float:
        return 0.0

    @override
    def exchange_cost_s(self, setting: Setting, network: NetworkCosts) -> float:
        return 0.0


class Gossip(StepMethod):
    """Models are averaged with a few peers in every step, on a model of few elements each of which
    stands for many.

    Args:
        out_degree: of push-sum, behind the step (SGP); None: both neighbours on a ring, while
            gradients are computed (D-PSGD).
    """

    weightless = False
    extra_bytes = 3.0

    def __init__(self, out_degree: int | None = None) -> None:
        self._out_degree = out_degree

    @override
    def num_bytes(self, setting: Setting, payload: Payload) -> float:
        return len(payload) * setting.profile.num_elements / MINIATURE

    @override
    def step(self, run: Run, rank: int, number: int) -> Collective[None]:
        setting = run.setting
        profile, world_size = setting.profile, setting.world_size
        behind_s = profile.batch.backward_s + profile.optimizer_s
        mine = [np.zeros(MINIATURE, dtype=np.float32)]
        copied_s = profile.publish_s / 2
        yield from run.late(rank, number)
        yield from run.forward(rank, number)
        if self._out_degree is None:
            yield from run.compute(rank, number, copied_s)
            average = neighbour_mean(rank, mine, ring_weights(rank, world_size))
            pending = run.begin(rank, average, number)
            yield from run.compute(rank, number, behind_s)
        else:
            yield from run.compute(rank, number, behind_s + copied_s)
            peers = exponential_peers(
                rank, world_size, round_number=number, out_degree=self._out_degree
            )
            pending = run.begin(rank, push_sum(peers, mine, 1.0), number)
        yield until_over(pending)
        yield from run.compute(rank, number, copied_s + self._mean_s(setting))

    def _degree(self, setting: Setting) -> int:
        """Peers that a rank sends to, and hears from."""
        return self._out_degree or min(2, setting.world_size - 1)

    def _mean_s(self, setting: Setting) -> float:
        profile = setting.profile
        return self._degree(setting) * profile.mean_s_per_byte * profile.num_bytes

    @override
    def encode_s(self, setting: Setting) -> float:
        return setting.profile.publish_s + self._mean_s(setting)

    @override
    def exchange_cost_s(self, setting: Setting, network: NetworkCosts) -> float:
        degree = self._degree(setting)
        return network.messages.time_s(num_messages=1, num_bytes=degree * setting.profile.num_bytes)


class PartialMean(Method):
    """Gradients are averaged by whoever has arrived: eager SGD. By the arithmetic of who waits for
    whom, and the closed form of the exchange.

    Args:
        quorum: of how many ranks an average waits for, of a number of ranks.
    """

    extra_bytes = 4.0

    def __init__(self, quorum: Callable[[int], int]) -> None:
        self._quorum = quorum

    @override
    def simulate(self, setting: Setting) -> Simulated:
        profile, world_size = setting.profile, setting.world_size
        durations_s = np.tile(setting.durations_s, (max(1, 20 // setting.num_steps), 1))
        used = on_first_call(durations_s, period=1, quorum=self._quorum(world_size))
        network = setting.network
        bytes_sent = 2 * (world_size - 1) / world_size * profile.num_bytes
        exchange_s = network.messages.time_s(num_messages=2, num_bytes=bytes_sent)
        encode_s = 2 * profile.copy_s_per_byte * profile.num_bytes
        return Simulated(
            step_s=setting.ideal_s / used.mean
            + exchange_s * (world_size > 1)
            + encode_s * setting.crowding,
            bytes_per_step=bytes_sent,
            encode_s=encode_s,
            alpha_share=2 * network.messages.alpha_s / exchange_s if exchange_s else 0.0,
            by_events=False,
        )
