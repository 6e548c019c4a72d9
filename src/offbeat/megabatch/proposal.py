"""What each rank says before models are merged, and what all conclude from it, each for itself."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, TypeAlias

from offbeat.errors import ConfigError, MismatchError, WireError
from offbeat.megabatch.claims import Claim, Place, Span, Work
from offbeat.transport.operations import Payload

Kind: TypeAlias = Literal["merge", "mean", "agree", "finish"]
"""What a rank has come for: to merge models, to be given their mean, to hear what all say, or to
the end of its training.
"""

_DOES: Final[dict[Kind, str]] = {
    "merge": "merge",
    "mean": "call averaged_model()",
    "agree": "begin with a loader",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a rank did, and where it stands.

    Attributes:
        work: what it did since the last merge.
        place: which round it comes from; None without a loader.
        largest: what fits into its memory, in samples; None: anything.
        num_steps: that it has taken.
        since_merge: of them, after its last merge.
    """

    work: Work
    place: Place | None
    largest: int | None
    num_steps: int
    since_merge: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """One rank's.

    Attributes:
        kind: what it has come for.
        is_new: whether it knows nothing of what the others have done, and is to be told.
        report: what it did.
        norm: of its model, per parameter.
        num_elements: of what it would merge, laid out whole.
        dtype: of their vector.
        num_counters: elements of its integer buffers.
        num_merges: that it has been through.
        kept: number of the merge since which it knows which rows have changed; None: it does not
            know.
        sparse: positions of parameters whose gradient has been sparse.
        touched: of the parameters that it watches, how many rows have changed, by position.
        said: what it has come to say, as JSON; empty unless it has come for that.
    """

    kind: Kind
    is_new: bool
    report: Report
    norm: float
    num_elements: int
    dtype: str
    num_counters: int
    num_merges: int
    kept: int | None
    sparse: tuple[int, ...]
    touched: tuple[tuple[int, int], ...]
    said: str = ""

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, payload: Payload) -> Statement:
        """Inverse of `to_bytes`. Raises `WireError`."""
        try:
            entry = json.loads(bytes(payload))
            report = entry.pop("report")
            work, place = report.pop("work"), report.pop("place")
            entry["sparse"] = tuple(entry["sparse"])
            entry["touched"] = tuple((position, count) for position, count in entry["touched"])
            claims = tuple(Claim(_spans(claim["spans"])) for claim in work["claims"])
            place = None if place is None else Place(**place | {"spans": _spans(place["spans"])})
            return cls(
                report=Report(work=Work(**work | {"claims": claims}), place=place, **report),
                **entry,
            )
        except (ValueError, KeyError, TypeError) as error:
            raise WireError(
                f"a statement before a merge is damaged: {bytes(payload[:80])!r}"
            ) from error


def _spans(raw: Sequence[Any]) -> tuple[Span, ...]:
    return tuple(Span(*span) for span in raw)


def purpose(stated: Sequence[Statement]) -> Kind | None:
    """What those who have met do. None: all of them are new, and nobody knows anything.

    Raises:
        MismatchError: they have come for what does not go together.
        ConfigError: a rank's clock cannot be used.
    """
    for statement in stated:
        if not math.isfinite(statement.report.work.busy_s):
            raise ConfigError(
                f"a rank was busy for {statement.report.work.busy_s} seconds; its clock cannot be"
                " used"
            )
    kinds = {statement.kind for statement in stated if not statement.is_new}
    if len(kinds & _DOES.keys()) > 1:
        doers = {
            kind: sorted(s.report.work.rank for s in stated if s.kind == kind and not s.is_new)
            for kind in _DOES
        }
        different = " while ".join(
            f"ranks {ranks} {_DOES[kind]}" for kind, ranks in doers.items() if ranks
        )
        raise MismatchError(f"{different}; do the same on all ranks, after the same merge")
    places = {
        statement.report.place
        for statement in stated
        if statement.kind == "merge" and not statement.is_new
    }
    if len(places) > 1:
        raise MismatchError(
            f"ranks merge different rounds, {places}; do all of them iterate over the loader?"
        )
    order: tuple[Kind, ...] = (*_DOES, "finish")
    return next((kind for kind in order if kind in kinds), None)


def hold_the_same(stated: Sequence[Statement]) -> bool:
    """Whether no model has changed since the last merge, by which they were the same."""
    knowing = [statement for statement in stated if not statement.is_new]
    merged = {statement.num_merges for statement in knowing}
    return (
        len(merged) == 1
        and 0 not in merged
        and not any(statement.report.since_merge for statement in knowing)
    )
