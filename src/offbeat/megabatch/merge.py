"""Models merged by those who live, for all of them or for none: with weights of their own, packed
where few rows have changed.

    statements:     everyone says what it did (`weights_statement`), and each concludes what is to
        be done
    rows:           where it is worth it, everyone says which rows have changed; their union is
        merged
    mean:           `collectives.weighted_mean`, into a vector aside
    news:           who has come in is told what else it needs
    all or none:    `megabatch.assembly`; only then the model is written

A rank that has come in weighs nothing, and has the others' model afterwards. One that has come to
the end of its training goes on to take part, and weighs nothing either, until all have. What ranks
agree on without merging, they say in statements.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np
import torch

from offbeat.codec.model_wire import Counters, Values, no_counters
from offbeat.codec.row_sets import RowSet, decode_rows, encode_rows
from offbeat.collectives.gather import all_gather
from offbeat.collectives.weighted_mean import weighted_mean
from offbeat.errors import ConfigError, PeerError
from offbeat.megabatch.assembly import Assembly
from offbeat.megabatch.merge_momentum import MergeMomentum
from offbeat.megabatch.proposal import Kind, Report, Statement, hold_the_same, purpose
from offbeat.megabatch.row_packing import packs
from offbeat.membership.agreement import Generation
from offbeat.transport.operations import Collective, Payload, Recv, Send
from offbeat.weights.model_weights import ModelWeights, require_finite
from offbeat.weights.rows import TouchedRows
from offbeat.weights.staging import Staging

Shares: TypeAlias = Callable[[Sequence[Statement]], Sequence[float]]
"""Merge weights of those who have come to merge, in order."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Met:
    """What has come of a meeting, kept aside until it is final.

    Attributes:
        kind: what was done; None: nobody knew anything.
        mine: what this rank said.
        generation: whose members have met.
        stated: what they said, by position.
        mean: of the models; None where nobody needs it.
    """

    kind: Kind | None
    mine: Statement
    generation: Generation
    stated: tuple[Statement, ...]
    mean: Mean | None = None

    @property
    def elder(self) -> Statement:
        """What the first said that knows the run and does what is done."""
        return next(
            statement
            for statement in self.stated
            if not statement.is_new and statement.kind == self.kind
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Mean:
    """The mean of models.

    Attributes:
        values: laid out by `staging`.
        staging: None where this rank was there for something else, and does not know the layout.
        tensors: where they belong; those of packed parameters are copies of `rows`.
        rows: of packed parameters, by position in the model.
        counters: the largest of each integer buffer.
        scales: with which weight each was in it, by position.
        news: what a rank that is new needs besides; None elsewhere.
    """

    values: Values
    staging: Staging | None
    tensors: Sequence[torch.Tensor]
    rows: Mapping[int, torch.Tensor]
    counters: Counters
    scales: Sequence[float]
    news: Payload | None


class Meetings:
    """One rank's model, and how it is merged with the others'.

    Args:
        weights: what is merged.
        assembly: with whom.
        shares: with which weights.
        momentum: added in each merge; None: none.
        norm: of the model, per parameter, where somebody asks for it.
        rank: this rank.

    Attributes:
        rows: those that have changed.
        num_merges: so far, in the run.
        num_exchanges: that this rank has been in.
        encode_s: seconds spent on laying vectors out and writing results.
    """

    def __init__(
        self,
        weights: ModelWeights,
        *,
        assembly: Assembly,
        shares: Shares,
        momentum: MergeMomentum | None,
        norm: Callable[[], float],
        rank: int,
    ) -> None:
        self._parameters = list(weights.parameters.values())
        self.rows = TouchedRows(self._parameters)
        self.num_merges = self.num_exchanges = 0
        self.encode_s = 0.0
        self._weights, self._assembly, self._shares = weights, assembly, shares
        self._momentum, self._norm, self._rank = momentum, norm, rank
        self._whole = Staging(weights.tensors())

    def merge(self, report: Report) -> Met:
        """Merge with all members. A rank that is new comes out of the first merge that the others
        make.

        Raises:
            PeerError: no member has a model, or this rank can take part no more.
            ConfigError: the others have ended their training while this rank was on its way in.
            MismatchError: the ranks have come for what does not go together.
            NonFiniteError: this rank's weights hold an infinity or a NaN.
        """
        return self._come("merge", self._weights, self._whole, report)

    def agree(self, report: Report, said: str) -> Met:
        """Hear what all members say. One that is new merges in the place of it."""
        return self._come("agree", self._weights, self._whole, report, said=said)

    def finish(self, report: Report) -> bool:
        """Take part until all members have come to the end of their training. Returns whether
        others have merged meanwhile.
        """
        kinds: set[Kind | None] = set()
        while "finish" not in kinds:
            kinds.add(self._meet("finish", self._weights, self._whole, report).kind)
        return "merge" in kinds

    def mean_into(self, weights: ModelWeights, report: Report) -> Met:
        """Write the mean of all members' models into `weights`, a copy of this rank's own. One that
        is new merges first.
        """
        met = self._come("mean", weights, Staging(weights.tensors()), report)
        if met.kind == "merge":
            for source, target in zip(self._weights.tensors(), weights.tensors(), strict=False):
                target.copy_(source)
        elif met.mean is not None:
            assert met.mean.staging is not None
            met.mean.staging.write_(met.mean.values, met.mean.tensors)
            weights.write_counters(met.mean.counters)
        return met

    def _come(
        self, kind: Kind, weights: ModelWeights, staging: Staging, report: Report, *, said: str = ""
    ) -> Met:
        """Meet for `kind`. A rank that is new comes out of the first merge that the others make."""
        while True:
            met = self._meet(kind, weights, staging, report, said=said)
            if met.kind == "merge" or not met.mine.is_new:
                return met
            if met.kind == "finish":
                raise ConfigError(
                    "the run ended while this worker was on its way in; start a new one"
                )

    def _meet(
        self,
        kind: Kind,
        weights: ModelWeights,
        staging: Staging,
        report: Report,
        *,
        said: str = "",
    ) -> Met:
        def part(generation: Generation, position: int) -> Collective[Met]:
            is_new = self._assembly.is_new
            joins = is_new and kind in (
                "mean",
                "agree",
            )  # it has nothing to add, and has to come into the run first
            model, layout = (self._weights, self._whole) if joins else (weights, staging)
            touched = {} if is_new else self.rows.touched()
            mine = Statement(
                kind="merge" if joins else kind,
                is_new=is_new,
                report=report,
                norm=0.0 if is_new else self._norm(),
                num_elements=layout.num_elements,
                dtype=layout.dtype.name,
                num_counters=model.read_counters().size,
                num_merges=self.num_merges,
                kept=None if is_new else self.rows.merge,
                sparse=tuple(sorted(self.rows.sparse)),
                touched=tuple((row, int(rows.sum())) for row, rows in touched.items()),
                said=said,
            )
            stated = yield from all_gather(
                position, generation.size, mine.to_bytes(), Statement.from_bytes
            )
            met = Met(kind=purpose(stated), mine=mine, generation=generation, stated=tuple(stated))
            if met.kind in (None, "agree", "finish") or (
                met.kind == "mean" and hold_the_same(stated)
            ):
                return met
            return replace(met, mean=(yield from self._mean(met, position, model, layout, touched)))

        met = self._assembly.run(part)
        if met.kind is None:
            raise PeerError("no member of the run has a model to give to this worker")
        if met.kind == "merge":
            self._write(met)
        return met

    def _mean(
        self,
        met: Met,
        position: int,
        weights: ModelWeights,
        staging: Staging,
        touched: Mapping[int, RowSet],
    ) -> Collective[Mean]:
        counts = [statement.kind == met.kind and not statement.is_new for statement in met.stated]
        parties = [statement for statement, does in zip(met.stated, counts, strict=True) if does]
        shares = iter(self._shares(parties) if met.kind == "merge" else [1.0] * len(parties))
        scales = [next(shares) if does else 0.0 for does in counts]
        num_elements, dtype = met.elder.num_elements, np.dtype(met.elder.dtype)
        rows: dict[int, torch.Tensor] = {}
        tensors: Sequence[torch.Tensor] = ()
        knows = met.stated[position].kind == met.kind or met.kind == "merge"
        if knows:
            if met.kind == "merge":
                rows = yield from self._union(met, position, touched)
            begin_s = time.perf_counter()
            tensors = [
                tensor.detach().index_select(0, rows[number]) if number in rows else tensor
                for number, tensor in enumerate(weights.tensors())
            ]
            staging = Staging(tensors) if rows else staging
            num_elements, dtype = staging.num_elements, staging.dtype
            self.encode_s += time.perf_counter() - begin_s
        values = self._read(staging, tensors, position) if scales[position] else None
        mean = yield from weighted_mean(
            position, scales, values, num_elements=num_elements, dtype=dtype
        )
        counters = no_counters()
        if met.elder.num_counters:
            own = weights.read_counters().tobytes() if counts[position] else b""
            payloads = yield from all_gather(position, len(scales), own, bytes)
            counters = np.max(
                [np.frombuffer(payload, np.int64) for payload in payloads if payload], axis=0
            )
        news = yield from self._tell_the_new(met, position)
        return Mean(
            values=mean,
            staging=staging if knows else None,
            tensors=tensors,
            rows=rows,
            counters=counters,
            scales=scales,
            news=news,
        )

    def _read(self, staging: Staging, tensors: Sequence[torch.Tensor], position: int) -> Values:
        begin_s = time.perf_counter()
        values = staging.read(tensors)
        require_finite([torch.from_numpy(values)], rank=self._rank)
        self.encode_s += time.perf_counter() - begin_s
        return values

    def _union(
        self, met: Met, position: int, touched: Mapping[int, RowSet]
    ) -> Collective[dict[int, torch.Tensor]]:
        """Which rows of which parameters are merged, by the parameter's position; the
        others whole.
        """
        stated = met.stated
        known = {statement.kept for statement in stated}
        if len(known) > 1 or None in known:
            return {}
        union: dict[int, torch.Tensor] = {}
        for number in dict(met.elder.touched):
            parameter = self._parameters[number]
            counts = [dict(statement.touched)[number] for statement in stated]
            row_bytes = parameter[:1].numel() * max(parameter.element_size(), 4)
            if packs(counts, num_rows=len(parameter), row_bytes=row_bytes):
                read = partial(decode_rows, num_rows=len(parameter))
                sets = yield from all_gather(
                    position, len(stated), encode_rows(touched[number]), read
                )
                union[number] = torch.from_numpy(np.flatnonzero(np.logical_or.reduce(sets))).to(
                    parameter.device
                )
        return union

    def _tell_the_new(self, met: Met, position: int) -> Collective[Payload | None]:
        new = [number for number, statement in enumerate(met.stated) if statement.is_new]
        if met.kind != "merge" or self._momentum is None or not new:
            return None
        teller = met.stated.index(met.elder)
        if position == teller:
            payload = self._momentum.to_bytes()
            for number in new:
                yield Send(number, payload)
        if position in new:
            told: Payload = yield Recv(teller)
            return told
        return None

    def _write(self, met: Met) -> None:
        """The merge is final: take it."""
        begin_s = time.perf_counter()
        mean = met.mean
        assert mean is not None
        assert mean.staging is not None
        mean.staging.write_(mean.values, mean.tensors)
        for number, rows in mean.rows.items():
            self._parameters[number].detach().index_copy_(0, rows, mean.tensors[number])
        self._weights.write_counters(mean.counters)
        if self._momentum is not None:
            if mean.news is not None:
                self._momentum.from_bytes(mean.news)
            self._momentum.add_()
        self.num_merges = met.elder.num_merges + 1
        self.num_exchanges += 1
        self.rows.keep(
            {number for statement in met.stated for number in statement.sparse}, self.num_merges
        )
        self._assembly.caught_up(met.generation)
        self.encode_s += time.perf_counter() - begin_s
