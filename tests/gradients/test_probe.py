"""The probe finds the link it is run on, agrees on it everywhere, and is not fooled by a disturbed
small message.
"""

from __future__ import annotations

import pytest
import torch

from offbeat.gradients.collective_choice import MESSAGE_BYTES, fit_cost, probe
from offbeat.simulation.virtual import VirtualCluster, VirtualLink


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_the_probe_finds_the_link_and_all_ranks_agree(world_size: int) -> None:
    link = VirtualLink(latency_s=1e-4, bytes_per_s=125e6)
    ranks = [
        probe(rank, world_size, select_s_per_element=1e-9 * rank, device=torch.device("cpu"))
        for rank in range(world_size)
    ]
    networks = VirtualCluster(world_size, link=link).run(ranks)
    assert all(network == networks[0] for network in networks)
    for measured in (networks[0].messages, networks[0].dense):
        assert measured.alpha_s == pytest.approx(1e-4, rel=0.05)
        assert measured.beta_s_per_byte == pytest.approx(8e-9, rel=0.05)
    assert networks[0].select_s_per_element == pytest.approx(1e-9 * (world_size - 1))


@pytest.mark.parametrize("most_bytes", [1, 300_000])
def test_a_probe_sends_no_more_than_it_may(most_bytes: int) -> None:
    """At 1 MB/s what is sent of a small model is seen by the clock."""
    link, device = VirtualLink(latency_s=1e-4, bytes_per_s=1e6), torch.device("cpu")
    cluster = VirtualCluster(2, link=link)
    networks = cluster.run(
        [
            probe(
                rank, 2, select_s_per_element=0.0, device=device, repeats=1, most_bytes=most_bytes
            )
            for rank in range(2)
        ]
    )
    # A message of so many bytes, and as many in the two hops of a dense operation.
    assert cluster.now_s == pytest.approx(2e-6 * max(most_bytes, 1 << 16), rel=0.05)
    assert networks[0].messages.beta_s_per_byte == pytest.approx(1e-6, rel=0.05)
    assert networks[0].dense.beta_s_per_byte == pytest.approx(1e-6, rel=0.05)


@pytest.mark.parametrize("small_s", [0.0, 1e-3, 5e-3])
def test_a_disturbed_small_message_does_not_make_bytes_free(small_s: float) -> None:
    link = fit_cost(small_s, 2e-3, *MESSAGE_BYTES)
    assert link.time_s(num_messages=1, num_bytes=100 * MESSAGE_BYTES[1]) >= 50 * 2e-3
    assert link.alpha_s >= 0
