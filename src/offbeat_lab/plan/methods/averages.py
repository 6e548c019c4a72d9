"""Averages of the gradients of those who have arrived: eager SGD."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from typing_extensions import override

from offbeat_lab.plan.ceilings import on_first_call
from offbeat_lab.plan.simulation import Method, Setting, Simulated


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
