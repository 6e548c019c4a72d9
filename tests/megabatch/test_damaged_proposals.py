"""Proposals and momenta that are damaged are read or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given

from fuzz_support import LONG_NUMBER, NESTED, altered_text, succeeds_or_refuses
from offbeat.errors import WireError
from offbeat.megabatch.claims import Claim, ClaimRound, MegaBatchShare, SampleRange
from offbeat.megabatch.proposal import MergeProposal, TrainerReport

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
    num_elements=100,
    dtype="float32",
    num_counters=1,
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
