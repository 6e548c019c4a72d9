"""What `collective="auto"` has chosen is always said; the probe before finds the link it is run on,
agrees on it everywhere, and is not fooled by a disturbed small message.
"""

from __future__ import annotations

import pytest
import torch

from offbeat.arithmetic.costs import LinkCost, NetworkCosts
from offbeat.callbacks.context import Notices
from offbeat.gradients.collective_choice import (
    REPEATS,
    SMALL_BYTES,
    BucketKind,
    CheapestCollective,
    fit_cost,
    probe,
)
from offbeat.simulation.virtual import VirtualCluster, VirtualLink
from ranks_support.measurements import LARGE_BYTES

pytestmark = pytest.mark.usefixtures("as_much_as_users_send")

BUCKET = BucketKind(num_elements=1_000_000, element_bytes=4)


@pytest.mark.parametrize(
    ("dense_s_per_byte", "name", "level"), [(1e-12, "dense", "WARNING"), (1e-6, "sparse", "INFO")]
)
def test_the_choice_is_said_once_whichever_it_is(
    dense_s_per_byte: float, name: str, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "offbeat")
    notices = Notices(0)
    choice = CheapestCollective(
        NetworkCosts(
            messages=LinkCost(alpha_s=1e-4, beta_s_per_byte=1e-9),
            dense=LinkCost(alpha_s=1e-4, beta_s_per_byte=dense_s_per_byte),
            select_s_per_element=1e-9,
        ),
        world_size=4,
        notices=notices,
    )
    chosen = {choice.choose(BUCKET, k) for k in (1000, 1000, 1001)}
    assert len(chosen) == 1
    assert (chosen == {"dense"}) == (name == "dense")
    [record], [remark] = caplog.records, notices.kept
    # Whoever wants to see what sparse messages do is told how to have them.
    others = {
        other
        for other in ("reduce_scatter", "all_gather")
        if f'pass collective="{other}"' in remark
    }
    assert len(others) == (name == "dense")
    assert record.levelname == level
    assert f'collective="auto" chose {chosen.pop()} for 1,000,000 elements' in remark
    assert remark.count(" ms") == 3


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_the_probe_finds_the_link_and_all_ranks_agree(world_size: int) -> None:
    link = VirtualLink(latency_s=1e-4, bytes_per_s=125e6)
    ranks = [
        probe(
            rank,
            world_size,
            select_s_per_element=1e-9 * rank,
            entry_s=1e-8 * rank,
            device=torch.device("cpu"),
        )
        for rank in range(world_size)
    ]
    networks = VirtualCluster(world_size, link=link).run(ranks)
    assert all(network == networks[0] for network in networks)
    for measured in (networks[0].messages, networks[0].dense):
        assert measured.alpha_s == pytest.approx(1e-4, rel=0.05)
        assert measured.beta_s_per_byte == pytest.approx(8e-9, rel=0.05)
    assert networks[0].select_s_per_element == pytest.approx(1e-9 * (world_size - 1))
    assert networks[0].entry_s == pytest.approx(1e-8 * (world_size - 1))


@pytest.mark.parametrize(("bytes_per_s", "latency_s"), [(1e6, 1e-4), (12.5e6, 1e-4), (25e6, 0.015)])
def test_what_a_probe_sends_grows_with_the_links_until_it_takes_long(
    bytes_per_s: float, latency_s: float
) -> None:
    """And not with the latency, which would hide what bytes cost."""
    slow, fast = (VirtualLink(latency_s=latency_s, bytes_per_s=r) for r in (bytes_per_s, 1e9))
    cluster = VirtualCluster(3, link=[fast, slow, fast])
    cpu = torch.device("cpu")
    networks = cluster.run(
        [probe(rank, 3, select_s_per_element=0.0, entry_s=0.0, device=cpu) for rank in range(3)]
    )
    assert networks[0].messages.alpha_s == pytest.approx(latency_s, rel=0.05)
    assert networks[0].messages.beta_s_per_byte == pytest.approx(1 / bytes_per_s, rel=0.05)
    large_bytes = next(n for n in LARGE_BYTES if n / bytes_per_s >= 0.02)
    # Each smaller one and that one; of a tensor four thirds go four times as far.
    enough_s = max(0.02, 4 * latency_s)
    tensor_bytes = next(n for n in LARGE_BYTES if n * 4 / 3 / bytes_per_s >= enough_s)
    tried = [n for n in LARGE_BYTES if n <= large_bytes]
    tensors = [n for n in LARGE_BYTES if large_bytes <= n <= tensor_bytes]
    sent_s = REPEATS * (sum(tried) + sum(tensors) * 4 / 3) / bytes_per_s
    assert 0.9 * sent_s < cluster.now_s < 1.1 * (sent_s + 100 * latency_s)


@pytest.mark.parametrize(("bytes_per_s", "latency_s"), [(125e6, 0.05), (1.25e9, 0.01)])
def test_latency_is_not_put_down_to_the_bytes_of_a_long_fat_link(
    bytes_per_s: float, latency_s: float
) -> None:
    link = VirtualLink(latency_s=latency_s, bytes_per_s=bytes_per_s)
    cpu = torch.device("cpu")
    (network, *_) = VirtualCluster(4, link=link).run(
        [probe(rank, 4, select_s_per_element=0.0, entry_s=0.0, device=cpu) for rank in range(4)]
    )
    # Half of an all-reduce's bytes are under way while the others arrive.
    for measured, within in ((network.messages, 0.05), (network.dense, 0.5)):
        assert measured.alpha_s == pytest.approx(latency_s, rel=0.05)
        assert measured.beta_s_per_byte == pytest.approx(1 / bytes_per_s, rel=within)


@pytest.mark.parametrize("small_s", [0.0, 1e-3, 5e-3])
def test_a_disturbed_small_message_does_not_make_bytes_free(small_s: float) -> None:
    link = fit_cost(small_s, 2e-3, SMALL_BYTES, LARGE_BYTES[-1])
    assert link.time_s(num_messages=1, num_bytes=100 * LARGE_BYTES[-1]) >= 50 * 2e-3
    assert link.alpha_s >= 0
