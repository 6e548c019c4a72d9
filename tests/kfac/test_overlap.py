"""Fusion of messages that become ready in turn: nothing ends earlier than the best, and what the
published rule misses.
"""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from _models.kfac_iteration import fuse_by_rule, last_end_s
from offbeat.arithmetic.costs import LinkCost
from offbeat.kfac.overlap import fuse_for_earliest_end


def cases(max_size: int) -> st.SearchStrategy[tuple[list[float], list[int], LinkCost]]:
    """(ready_s, sizes_bytes, link)."""
    messages = st.lists(
        st.tuples(st.floats(0, 2), st.integers(0, 100)), min_size=1, max_size=max_size
    )
    links = st.builds(LinkCost, alpha_s=st.floats(0, 3), beta_s_per_byte=st.floats(0, 0.1))
    return st.tuples(messages, links).map(
        lambda drawn: (
            list(accumulate(wait for wait, _ in drawn[0])),
            [size for _, size in drawn[0]],
            drawn[1],
        )
    )


def unfused(num_messages: int) -> list[list[int]]:
    return [[index] for index in range(num_messages)]


def every_fusion(num_messages: int) -> list[list[list[int]]]:
    fusions = []
    for num_cuts in range(num_messages):
        for cuts in combinations(range(1, num_messages), num_cuts):
            bounds = [0, *cuts, num_messages]
            fusions.append([list(range(a, b)) for a, b in pairwise(bounds)])
    return fusions


@given(cases(7))
def test_no_fusion_ends_earlier(case: tuple[list[float], list[int], LinkCost]) -> None:
    best = last_end_s(fuse_for_earliest_end(*case), *case)
    assert best == pytest.approx(
        min(last_end_s(fusion, *case) for fusion in every_fusion(len(case[0])))
    )


@given(cases(40))
def test_fused_is_never_slower_than_unfused_or_fully_fused_or_the_rule(
    case: tuple[list[float], list[int], LinkCost],
) -> None:
    num_messages = len(case[0])
    best = last_end_s(fuse_for_earliest_end(*case), *case) * (1 - 1e-12)
    assert best <= last_end_s(unfused(num_messages), *case)
    assert best <= last_end_s([list(range(num_messages))], *case)
    assert best <= last_end_s(fuse_by_rule(*case), *case)


@given(cases(40))
def test_the_rule_is_never_slower_than_unfused_or_fully_fused(
    case: tuple[list[float], list[int], LinkCost],
) -> None:
    num_messages = len(case[0])
    by_rule = last_end_s(fuse_by_rule(*case), *case) * (1 - 1e-12)
    assert by_rule <= last_end_s(unfused(num_messages), *case)
    assert by_rule <= last_end_s([list(range(num_messages))], *case)


@given(cases(40))
@pytest.mark.parametrize("fuse", [fuse_for_earliest_end, fuse_by_rule])
def test_every_message_is_sent_once_in_order(
    fuse: object, case: tuple[list[float], list[int], LinkCost]
) -> None:
    assert callable(fuse)
    assert [index for group in fuse(*case) for index in group] == list(range(len(case[0])))


@given(cases(40))
def test_the_rule_merges_just_those_that_are_ready_within_alpha(
    case: tuple[list[float], list[int], LinkCost],
) -> None:
    ready_s, sizes_bytes, link = case
    groups = fuse_by_rule(ready_s, sizes_bytes, link)
    for before, group in enumerate(groups):
        free_s = last_end_s(groups[:before], ready_s, sizes_bytes, link)
        for index in group[:-1]:
            assert ready_s[index + 1] < max(free_s, ready_s[index]) + link.alpha_s
        if group is not groups[-1]:
            assert ready_s[group[-1] + 1] >= max(free_s, ready_s[group[-1]]) + link.alpha_s


def test_the_published_rule_may_fuse_everything_into_the_last_message() -> None:
    """Each message waits a little for the next, and so the first one waits for the last; sending on
    the way costs less.
    """
    link = LinkCost(alpha_s=1.0, beta_s_per_byte=0.1)
    ready_s, sizes_bytes = [0.9 * index for index in range(20)], [5] * 20
    assert len(fuse_by_rule(ready_s, sizes_bytes, link)) == 1
    as_published = (
        last_end_s(fuse_by_rule(ready_s, sizes_bytes, link), ready_s, sizes_bytes, link)
        - ready_s[-1]
    )
    best = (
        last_end_s(fuse_for_earliest_end(ready_s, sizes_bytes, link), ready_s, sizes_bytes, link)
        - ready_s[-1]
    )
    assert as_published > 4 * best


def test_free_start_up_needs_no_fusion_and_free_bytes_need_no_hurry() -> None:
    ready_s, sizes_bytes = [0.0, 1.0, 2.0], [10, 10, 10]
    free_start = LinkCost(alpha_s=0.0, beta_s_per_byte=0.01)
    assert last_end_s(
        fuse_for_earliest_end(ready_s, sizes_bytes, free_start), ready_s, sizes_bytes, free_start
    ) == pytest.approx(2.1)
    assert fuse_for_earliest_end(
        ready_s, sizes_bytes, LinkCost(alpha_s=10.0, beta_s_per_byte=0.0)
    ) == [[0, 1, 2]]


def test_nothing_to_send_is_no_group() -> None:
    link = LinkCost(alpha_s=1.0, beta_s_per_byte=1.0)
    assert fuse_for_earliest_end([], [], link) == fuse_by_rule([], [], link) == []
    assert last_end_s([], [], [], link) == 0.0


@given(cases(7))
def test_no_fusion_that_ends_as_early_has_fewer_messages(
    case: tuple[list[float], list[int], LinkCost],
) -> None:
    fused = fuse_for_earliest_end(*case)
    end_s = last_end_s(fused, *case) * (1 + 1e-12)
    assert len(fused) == min(
        len(fusion) for fusion in every_fusion(len(case[0])) if last_end_s(fusion, *case) <= end_s
    )
