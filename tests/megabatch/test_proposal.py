"""Proposals and commits of a merge."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuzz_support import LONG_NUMBER, NESTED, altered_text, succeeds_or_refuses
from group_support.rounds import Script, World, draw_script
from offbeat.errors import PeerError, WireError
from offbeat.megabatch.claims import Claim, ClaimRound, MegaBatchShare, SampleRange
from offbeat.megabatch.merge import index_bytes, rows_are_cheaper, touched_rows
from offbeat.megabatch.proposal import MergeProposal, TrainerReport
from offbeat.membership.atomic_group import all_or_none
from offbeat.simulation.virtual import VirtualCluster
from offbeat.transport.operations import Collective, Recv, Send

# Merges that are final for all or for none: random schedules of deaths, stops and newcomers. Each
# is replayed by its seed.


@pytest.mark.parametrize("first", range(0, 120, 10))
def test_random_schedules(first: int) -> None:
    for seed in range(first, first + 10):
        World(draw_script(seed)).run()


@pytest.mark.parametrize("seed", range(4))
def test_a_newcomer_has_a_model_as_soon_as_claims_are_computed(seed: int) -> None:
    """A claim takes up to 0.4 s, and news up to 0.3 s; all samples together take many seconds."""
    comes_at_s = {3: 1.0, 4: 4.0}
    sizes = {"num_samples": 6000, "mega_batches": 1, "epochs": 1}
    world = World(Script(seed=seed, founders=3, joiners=2, joins=comes_at_s, **sizes))
    world.run()
    assert world.over_at_s > 12
    for rank, at_s in comes_at_s.items():
        assert world.workers[rank].model_at_s - at_s < 2.5


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(10_000, 20_000, 500))
def test_ten_thousand_random_schedules(first: int) -> None:
    for seed in range(first, first + 500):
        World(draw_script(seed)).run()


class Entry:
    """The store's, for one piece of work."""

    def __init__(self) -> None:
        self.word: str | None = None

    def __call__(self, word: str) -> bool:
        self.word = self.word or word
        return self.word == "done"


def ring(rank: int, size: int) -> Collective[int]:
    """Everyone hears of everyone: the sum of all ranks."""
    for peer in range(size):
        if peer != rank:
            yield Send(peer, bytes([rank]))
    total = rank
    for peer in range(size):
        if peer != rank:
            total += (yield Recv(peer))[0]
    return total


def undisturbed(entry: Entry, size: int) -> list[int]:
    return VirtualCluster(size).run(
        [all_or_none(rank, size, ring(rank, size), entry) for rank in range(size)]
    )


@pytest.mark.parametrize("size", [1, 2, 5])
def test_what_nobody_disturbs_is_done(size: int) -> None:
    entry = Entry()
    assert undisturbed(entry, size) == [sum(range(size))] * size
    assert entry.word == "done"


def test_what_somebody_has_given_up_is_done_for_nobody() -> None:
    entry = Entry()
    entry("void")
    with pytest.raises(PeerError, match="done again without the dead"):
        undisturbed(entry, 3)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_death_during_the_commit_gives_all_survivors_the_same_result(when: str) -> None:
    """After the work, and before or after the dead member's last word: what the others hear of it
    is the same.
    """

    def dies() -> Collective[int]:
        yield from ring(2, 3)
        if when == "after":
            yield Send(
                1, bytes(8)
            )  # the first message of the round in which all learn that everyone has an outcome
        raise PeerError("killed", rank=2)

    for seed in range(20):
        entry = Entry()
        cluster = VirtualCluster(3, seed=seed, watch_all=False)
        works: list[Callable[[], Collective[int]]] = [lambda: ring(0, 3), lambda: ring(1, 3)]
        living = [all_or_none(rank, 3, work(), entry) for rank, work in enumerate(works)]
        outcomes = cluster.outcomes([*living, dies()])
        assert (
            outcomes[:2] == [3, 3]
            if entry.word == "done"
            else all(isinstance(outcome, PeerError) for outcome in outcomes[:2])
        )


# Proposals and momenta that are damaged are read or refused.


SPANS = (SampleRange(0, 4), SampleRange(10, 12))
PROPOSAL = MergeProposal(
    kind="merge",
    is_new=False,
    report=TrainerReport(
        share=MegaBatchShare(
            rank=1, claims=(Claim(SPANS), Claim(())), updates=2, batch_size=4, busy_s=0.5
        ),
        claim_round=ClaimRound(epoch=0, mega_batch=1, round=2, retry=0, spans=SPANS),
        memory_limit=8,
        num_steps=7,
        since_merge=2,
        norm=1.5,
    ),
    num_merges=3,
    rows_known_since=None,
    sparse=(0, 2),
    touched=((0, 3),),
)
SENT: dict[str, Any] = json.loads(PROPOSAL.to_bytes())


def test_a_proposal_with_claims_arrives_as_it_was() -> None:
    assert MergeProposal.from_bytes(PROPOSAL.to_bytes()) == PROPOSAL


@given(altered_text(SENT))
def test_a_proposal_is_read_or_refused(payload: bytes) -> None:
    def read() -> None:
        proposal = MergeProposal.from_bytes(payload)
        # What is read has the types that it says.
        assert proposal.rank + sum(claim.num_samples for claim in proposal.report.share.claims) > -1
        assert proposal.to_bytes()

    succeeds_or_refuses(read)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", 1.5),
        ("num_elements", 1.5),
        ("num_elements", True),
        ("num_merges", 1 << 64),
        ("kind", "merges"),
        ("sparse", ["a"]),
        ("touched", [[1]]),
        ("report", []),
        ("report", None),
        ("other", 1),
    ],
)
def test_a_field_of_another_type_is_refused(field: str, value: object) -> None:
    with pytest.raises(WireError, match="is damaged"):
        MergeProposal.from_bytes(json.dumps(SENT | {field: value}).encode())


@pytest.mark.parametrize("payload", [NESTED, LONG_NUMBER, "[]", '{"report": {"share": []}}'])
def test_what_is_no_proposal_is_refused(payload: str) -> None:
    with pytest.raises(WireError, match="is damaged"):
        MergeProposal.from_bytes(payload.encode())


# Which rows have changed, and the bytes of a merge of some rows against those of a dense one.


shapes = st.tuples(st.integers(1, 500), st.sampled_from([4, 64, 512]))


def sent(num_ranks: int, num_values_bytes: float, sets: int = 0) -> float:
    return 2 * (num_ranks - 1) / num_ranks * num_values_bytes + (num_ranks - 1) * sets


@given(shapes, st.data())
def test_merging_some_rows_costs_at_most_the_sets_more(
    shape: tuple[int, int], data: st.DataObject
) -> None:
    num_rows, row_bytes = shape
    touched = data.draw(st.lists(st.integers(0, num_rows), min_size=1, max_size=6))
    sets = max(index_bytes(count, num_rows) for count in touched)
    dense = sent(len(touched), num_rows * row_bytes)
    if rows_are_cheaper(touched, num_rows=num_rows, row_bytes=row_bytes):
        assert sent(len(touched), max(touched) * row_bytes, sets) < dense
        assert (
            sent(len(touched), min(sum(touched), num_rows) * row_bytes, sets)
            <= dense + (len(touched) - 1) * sets
        )
    else:
        assert sent(len(touched), max(touched) * row_bytes, sets) >= dense


@given(st.integers(1, 5000), st.data())
def test_a_set_of_rows_is_no_longer_than_a_bit_for_each(num_rows: int, data: st.DataObject) -> None:
    assert index_bytes(data.draw(st.integers(0, num_rows)), num_rows) <= -(-num_rows // 8)


@pytest.mark.parametrize("shape", [(6,), (6, 5), (6, 2, 3), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_row_has_changed_where_its_bits_have(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    then = torch.zeros(shape, dtype=dtype)
    if len(then):
        then[3] = torch.nan
    now = then.clone()
    for row, value in enumerate((1.0, -0.0)[: len(then)]):
        now[row].view(-1)[-1] = value
    (rows,) = touched_rows({4: then}, [now] * 5).values()
    assert rows.tolist() == [True, True, False, False, False, False][: len(then)]
