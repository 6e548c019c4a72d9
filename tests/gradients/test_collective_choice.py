"""What `collective="auto"` has chosen is always said."""

from __future__ import annotations

import pytest

from offbeat.arithmetic.costs import LinkCost, NetworkCosts
from offbeat.gradients.collective_choice import BucketKind, CheapestCollective

BUCKET = BucketKind(num_elements=1_000_000, element_bytes=4)


@pytest.mark.parametrize(
    ("dense_s_per_byte", "name", "level"), [(1e-12, "dense", "notify"), (1e-6, "sparse", "inform")]
)
def test_the_choice_is_said_once_whichever_it_is(
    dense_s_per_byte: float, name: str, level: str
) -> None:
    said: list[tuple[str, str]] = []
    choice = CheapestCollective(
        NetworkCosts(
            messages=LinkCost(alpha_s=1e-4, beta_s_per_byte=1e-9),
            dense=LinkCost(alpha_s=1e-4, beta_s_per_byte=dense_s_per_byte),
            select_s_per_element=1e-9,
        ),
        world_size=4,
        notify=lambda remark: said.append(("notify", remark)),
        inform=lambda remark: said.append(("inform", remark)),
    )
    chosen = {choice.choose(BUCKET, k) for k in (1000, 1000, 1001)}
    assert len(chosen) == 1
    assert (chosen == {"dense"}) == (name == "dense")
    [(how, remark)] = said
    # Whoever wants to see what sparse messages do is told how to have them.
    others = {
        other
        for other in ("reduce_scatter", "all_gather")
        if f'pass collective="{other}"' in remark
    }
    assert len(others) == (name == "dense")
    assert how == level
    assert f'collective="auto" chose {chosen.pop()} for 1,000,000 elements' in remark
    assert remark.count(" ms") == 3
