"""Mega-batches that ranks share out, and their merges: Adaptive SGD and elastic SGD."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from typing_extensions import override

from offbeat.collectives.weighted_mean import weighted_mean
from offbeat.megabatch.batch_sizes import Proportional
from offbeat.megabatch.callback import MegaBatchPlan
from offbeat.transport.virtual import VirtualCluster
from offbeat_lab.plan.dispatch import dispatch
from offbeat_lab.plan.profile import FLOAT_BYTES
from offbeat_lab.plan.simulation import EVENTS_UP_TO, MINIATURE, Method, Setting, Simulated


class MegaBatches(Method):
    """Ranks share a mega-batch out, and merge: Adaptive SGD, elastic SGD. Where epochs end, which
    no profile knows, a mega-batch is of another size.

    Args:
        plan: how. Batches begin with the size of the profile's.
    """

    extra_bytes = 3.0

    def __init__(self, plan: MegaBatchPlan) -> None:
        self._plan = plan

    @override
    def simulate(self, setting: Setting) -> Simulated:
        profile, world_size = setting.profile, setting.world_size
        base = profile.batch.batch_size
        step = world_size * base  # samples of all ranks
        whole = max(self._plan.mega_batch * base, step)
        if setting.steps is None:
            rounds, merges_per_step = [range(whole)], step / whole
            merged: Sequence[range] = rounds
        else:
            first, last = setting.steps.start * step, setting.steps.stop * step
            rounds = [
                one for one in self._rounds(last, whole, world_size, base) if one.stop > first
            ]
            merged = [one for one in rounds if one.stop <= last]
            merges_per_step = len(merged) / len(setting.steps)
        computed_s = step * self._computed_s(setting, rounds) / sum(map(len, rounds))
        num_bytes = profile.averaged_bytes(with_state=self._plan.merges_optimizer_state)
        merge_s, merge_bytes = self._merge(setting, num_bytes)
        encode_s = 2 * profile.copy_s_per_byte * num_bytes
        messages_s = 2 * (world_size - 1) * setting.network.messages.alpha_s
        exposed_s = merge_s
        if merged:
            # One merge is under way at most.
            hidden_s = min(merge_s, computed_s / merges_per_step)
            exposed_s -= self._overlapped(merged, whole) * hidden_s
        return Simulated(
            step_s=computed_s + merges_per_step * (exposed_s + encode_s),
            bytes_per_step=merges_per_step * merge_bytes,
            encode_s=merges_per_step * encode_s,
            alpha_share=min(1.0, messages_s / merge_s) if merge_s else 0.0,
            by_events=world_size <= EVENTS_UP_TO,
        )

    def _overlapped(self, merged: Sequence[range], whole: int) -> float:
        """The share of the merges that end `merged` while which ranks go on training."""
        match self._plan.overlap:
            case "all":
                return 1.0
            case "whole":
                return sum(one.stop % whole == 0 for one in merged) / len(merged)
            case "none":
                return 0.0

    def _rounds(self, until: int, whole: int, world_size: int, base: int) -> Iterator[range]:
        """The samples between merges, as `megabatch.loader` cuts mega-batches of `whole` samples,
        until `until` are merged.
        """
        begin = 0
        while begin < until:
            size = self._plan.samples_of_round(begin, world_size, base)
            left = whole - begin % whole
            end = begin + (left if size is None or 2 * left < 3 * size else size)
            yield range(begin, end)
            begin = end

    def _computed_s(self, setting: Setting, rounds: Sequence[range]) -> float:
        """From the beginning of the first round to the end of the last, if merges took no time."""
        base, late_s = setting.profile.batch.batch_size, setting.late_s
        computing_s = setting.durations_s - late_s
        num_claims = [0] * setting.world_size

        def claim_s(rank: int, samples: float) -> float:
            row = num_claims[rank] % setting.num_steps
            num_claims[rank] += 1
            return float(late_s[row, rank] + computing_s[row, rank] * samples / base)

        def share_s(rank: int, samples: float) -> float:
            """Of an equal share, in batches of the base size."""
            whole, rest = divmod(samples, base)
            return sum(claim_s(rank, base) for _ in range(int(whole))) + (
                claim_s(rank, rest) if rest else 0.0
            )

        if self._plan.rule == "equal":
            ranks = range(setting.world_size)
            return sum(
                max(share_s(rank, len(one) / setting.world_size) for rank in ranks)
                for one in rounds
            )
        # Batch sizes follow speeds, so that updates end together.
        speeds = (1 / setting.durations_s.mean(axis=0)).tolist()
        equal, bounds = [base] * len(speeds), [self._plan.bounds(base)] * len(speeds)
        sizes = Proportional(base=base).resize(equal, speeds, bounds)
        return sum(dispatch(sizes, len(one), claim_s).duration_s for one in rounds)

    def _merge(self, setting: Setting, num_bytes: int) -> tuple[float, float]:
        """Seconds, and bytes that a rank sends, of a merge of `num_bytes`.

        Nobody computes meanwhile, so what encrypts messages is waited for: each is encrypted as a
        whole before it leaves.
        """
        world_size = setting.world_size
        num_messages = 2 * (world_size - 1)
        sent = num_messages / world_size * num_bytes
        work_s = (
            setting.factor_crowding * num_messages * setting.message_work_s(num_bytes / world_size)
        )
        if world_size > EVENTS_UP_TO:
            seconds = setting.network.messages.beta_s_per_byte * sent + work_s
            return seconds + 2 * setting.latency_s + num_messages * setting.message_s, sent
        scale = num_bytes / FLOAT_BYTES / MINIATURE
        cluster = VirtualCluster(
            world_size,
            link=setting.links,
            racks=setting.cluster.virtual_racks(),
            num_bytes=lambda payload: len(payload) * scale,
        )
        zeros = np.zeros(MINIATURE, dtype=np.float32)
        cluster.run(
            [
                weighted_mean(
                    rank, [1.0] * world_size, zeros, num_elements=MINIATURE, dtype=zeros.dtype
                )
                for rank in range(world_size)
            ]
        )
        return cluster.now_s + work_s, sent
