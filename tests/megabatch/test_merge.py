"""What those who meet conclude from what all say, and when a rank that is new has come in."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from offbeat.errors import ConfigError, MismatchError, WireError
from offbeat.megabatch.assembly import Assembly, Work
from offbeat.megabatch.claims import Work as Done
from offbeat.megabatch.merge import Meetings, Met
from offbeat.megabatch.proposal import Kind, Report, Statement, purpose
from offbeat.membership.agreement import Generation, Member
from offbeat.weights.model_weights import ModelWeights, choose_buffers

GENERATION = Generation(number=0, members=(Member(0, 0),), newcomers=frozenset(), tickets=0)


def statement(kind: Kind, *, rank: int = 0, is_new: bool = False, said: str = "") -> Statement:
    done = Done(rank=rank, claims=(), updates=0, batch_size=1, busy_s=0.0)
    return Statement(
        kind=kind,
        is_new=is_new,
        report=Report(work=done, place=None, largest=None, num_steps=0, since_merge=0),
        norm=0.0,
        num_elements=1,
        dtype="float32",
        num_counters=0,
        num_merges=0,
        kept=None,
        sparse=(),
        touched=((0, 3),),
        said=said,
    )


def test_a_statement_arrives_as_it_was() -> None:
    sent = statement("agree", rank=2, said='{"fits": null}')
    assert Statement.from_bytes(sent.to_bytes()) == sent
    with pytest.raises(WireError, match="is damaged"):
        Statement.from_bytes(b"{}")


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        (
            ["merge", "mean"],
            r"ranks \[0\] merge while ranks \[1\] call averaged_model\(\); do the same",
        ),
        (
            ["agree", "finish", "mean"],
            r"ranks \[2\] call averaged_model\(\) while ranks \[0\] begin with a loader",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(kinds: list[Kind], said: str) -> None:
    with pytest.raises(MismatchError, match=said):
        purpose([statement(kind, rank=rank) for rank, kind in enumerate(kinds)])


@pytest.mark.parametrize("kind", ["merge", "mean", "agree"])
def test_who_has_finished_or_is_new_follows_the_others(kind: Kind) -> None:
    others = [statement("finish", rank=1), statement("merge", rank=2, is_new=True)]
    assert purpose([statement(kind), *others]) == kind
    assert purpose(others) == "finish"
    assert purpose(others[1:]) is None


class Scripted:
    """An assembly whose meetings come out as told."""

    def __init__(self, *kinds: Kind, is_new: bool) -> None:
        self.kinds = list(kinds)
        self.is_new = is_new

    def run(self, work: Work[Met]) -> Met:
        mine = statement("merge", is_new=self.is_new)
        return Met(kind=self.kinds.pop(0), mine=mine, generation=GENERATION, stated=(mine,))


def meetings(assembly: Scripted, monkeypatch: pytest.MonkeyPatch) -> Meetings:
    monkeypatch.setattr(Meetings, "_write", lambda self, met: None)
    weights = ModelWeights(
        parameters={"w": torch.nn.Parameter(torch.zeros(1))},
        buffers=dict,
        chosen=choose_buffers({}),
    )
    return Meetings(
        weights,
        assembly=cast(Assembly, assembly),
        shares=lambda stated: (),
        momentum=None,
        norm=lambda: 0.0,
        rank=0,
    )


def test_who_is_new_comes_in_by_a_merge_and_not_by_what_the_others_agree_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assembly = Scripted("agree", "mean", "merge", is_new=True)
    met = meetings(assembly, monkeypatch).agree(statement("agree").report, "1")
    assert (met.kind, assembly.kinds) == ("merge", [])
    with pytest.raises(ConfigError, match="ended while this worker was on its way in"):
        meetings(Scripted("agree", "finish", is_new=True), monkeypatch).agree(
            statement("agree").report, "1"
        )


def test_who_is_not_new_agrees_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assembly = Scripted("agree", "merge", is_new=False)
    assert meetings(assembly, monkeypatch).agree(statement("agree").report, "1").kind == "agree"
    assert assembly.kinds == ["merge"]
