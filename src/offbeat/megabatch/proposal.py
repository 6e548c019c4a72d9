"""The message with which each member of the run begins a merge, what it proposes to do and what its
peers need to know about it; and what all of them conclude from these messages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, TypeAlias

from offbeat.codec.json_objects import build
from offbeat.errors import MALFORMED, ConfigError, MismatchError, WireError
from offbeat.megabatch.claims import ClaimRound, MegaBatchShare
from offbeat.transport.operations import Payload

ProposalKind: TypeAlias = Literal["merge", "step", "mean", "agree", "finish"]
"""What a member proposes: to merge models, to average gradients before a step, to compute the mean
of models for a copy, to hear each other's payloads, or to do nothing more, since it has come to the
end of its training.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How much a rank has done since batch sizes were chosen.

    Attributes:
        updates: counted by their samples, as `MegaBatchShare.full_updates`.
        busy_s: as `MegaBatchShare.busy_s`.
    """

    updates: float = 0.0
    busy_s: float = 0.0

    def plus(self, share: MegaBatchShare) -> Pace:
        return Pace(updates=self.updates + share.full_updates, busy_s=self.busy_s + share.busy_s)

    def in_batches(self, size: int, *, before: int) -> Pace:
        """The same in updates of `size` samples, where they had `before`."""
        return Pace(updates=self.updates * before / size, busy_s=self.busy_s)

    @property
    def whole_updates(self) -> int:
        """The updates as rules of whole numbers count them. The last claim of a round, which is
        smaller or larger than the others, says nothing about speed unless it is half a batch away
        from them.
        """
        return max(1, round(self.updates)) if self.updates else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerReport:
    """What a rank's trainer has done, and where it stands.

    Attributes:
        share: what it computed since the last merge.
        claim_round: the round of claims that it has come to the end of; None without a loader.
        memory_limit: how many samples fit into its memory at once; None: any number.
        num_steps: steps that it has taken.
        since_merge: how many of these after its last merge.
        learning_rates: of the groups of its optimizer, as the user or a scheduler has set them.
        pace: what it has done since batch sizes were chosen.
        base: the batch size that learning rates are for; None: no loader has said so here.
        following: the round with which it goes on while this merge is under way; None: it waits.
        norm: of its model, per parameter; 0.0 where nobody uses it.
        steps_before: of the run before `num_steps`, where it was resumed or this rank has joined.
    """

    share: MegaBatchShare
    claim_round: ClaimRound | None
    memory_limit: int | None
    num_steps: int
    since_merge: int
    learning_rates: tuple[float, ...] = ()
    pace: Pace = Pace()
    base: int | None = None
    following: ClaimRound | None = None
    norm: float = 0.0
    steps_before: int = 0

    @property
    def rank(self) -> int:
        return self.share.rank


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeProposal:
    """One member's proposal.

    Attributes:
        kind: what it proposes to do.
        is_new: whether it has joined the run, or comes back to it, and holds nothing that its peers
            could use: neither a model nor the state of the run.
        report: what its trainer has done.
        num_merges: number of merges in the run so far, as it knows.
        rows_known_since: number of the merge since which it knows which rows have changed; None: it
            does not know.
        sparse: positions of the parameters whose gradient has been sparse there.
        touched: of each parameter that is compared: its position, and how many rows have changed.
        states: of its optimizer, that are merged with the model: by name, which parameters have
            them, as `packed` writes it; before a step which have a "gradient", none where it takes
            none.
        payload: what it tells its peers in "agree", as JSON; else empty.
    """

    kind: ProposalKind
    is_new: bool
    report: TrainerReport
    num_merges: int
    rows_known_since: int | None
    sparse: tuple[int, ...]
    touched: tuple[tuple[int, int], ...]
    states: tuple[tuple[str, str], ...] = ()
    payload: str = ""

    @property
    def rank(self) -> int:
        return self.report.rank

    def is_party_to(self, kind: ProposalKind | None) -> bool:
        """Whether this member's own model is in what members do. In a merge that of one that has
        finished is, too, where no loader gives out again what it has done since the last one.
        """
        report = self.report
        brings_steps = self.kind == "finish" and report.base is None and report.since_merge > 0
        takes_part = self.kind == kind or (kind == "merge" and brings_steps)
        return takes_part and not self.is_new

    def to_bytes(self) -> bytes:
        # `asdict` would copy each of the claims first.
        return json.dumps(self, default=_fields_of).encode()

    @classmethod
    def from_bytes(cls, data: Payload) -> MergeProposal:
        """Inverse of `to_bytes`. Raises `WireError`."""
        try:
            return build(cls, json.loads(bytes(data)))
        except MALFORMED as error:
            raise WireError(
                f"a proposal before a merge is damaged: {bytes(data[:80])!r}"
            ) from error


def _fields_of(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


# What members conclude from their proposals, each of them alone.

_ACTIONS: Final[dict[ProposalKind, str]] = {
    "merge": "merge",
    "step": "take a step together",
    "mean": "call averaged_model()",
    "agree": "begin with a loader",
}


def agreed_kind(proposals: Sequence[MergeProposal]) -> ProposalKind | None:
    """What members with these proposals do. None: nothing, since all of them are new, so that
    nobody has a model.

    Members that have finished, or are new, go along with their peers.

    Raises:
        MismatchError: the proposals do not go together.
        ConfigError: a member's clock cannot be used.
    """
    for proposal in proposals:
        busy_s = proposal.report.share.busy_s + proposal.report.pace.busy_s
        if not math.isfinite(busy_s):
            raise ConfigError(f"a rank was busy for {busy_s} seconds; its clock cannot be used")
    knowing = [proposal for proposal in proposals if not proposal.is_new]
    kinds = {proposal.kind for proposal in knowing}
    if len(kinds & _ACTIONS.keys()) > 1:
        ranks = {kind: sorted(each.rank for each in knowing if each.kind == kind) for kind in kinds}
        different = " while ".join(
            f"ranks {ranks[kind]} {action}" for kind, action in _ACTIONS.items() if kind in kinds
        )
        raise MismatchError(f"{different}; do the same on all ranks, after the same merge")
    merging = [each.report for each in knowing if each.kind in ("merge", "step")]
    claim_rounds = {report.claim_round for report in merging}
    if len(claim_rounds) > 1:
        raise MismatchError(
            f"ranks merge different rounds, {claim_rounds}; do all of them iterate over the loader?"
        )
    if len({report.following for report in merging}) > 1:
        raise MismatchError(
            "some ranks wait for this merge, and others go on beside it; iterate over the loader in"
            " the same way on all ranks"
        )
    order: tuple[ProposalKind, ...] = (*_ACTIONS, "finish")
    return next((kind for kind in order if kind in kinds), None)


def hold_the_same(proposals: Sequence[MergeProposal]) -> bool:
    """Whether no model has changed since the last merge, which left them all the same."""
    knowing = [proposal for proposal in proposals if not proposal.is_new]
    merged = {proposal.num_merges for proposal in knowing}
    return (
        len(merged) == 1
        and 0 not in merged
        and not any(proposal.report.since_merge for proposal in knowing)
    )
