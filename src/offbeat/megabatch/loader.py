"""Batches of any map-style dataset, claimed by whoever is free: each sample once an epoch, in an
order of (seed, epoch).

    for each mega-batch of the epoch
        while samples are left: claim the next b_i, compute with them
        when nothing is left: merge models, and choose new b_i

An epoch of N samples has round(N / M) mega-batches, at least one, whose sizes differ by one sample
at most: none is a remnant, and a dataset smaller than M is one mega-batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from offbeat.errors import CheckpointError, ConfigError, PeerError
from offbeat.megabatch.claims import (
    Claim,
    ClaimLog,
    Merged,
    Place,
    Span,
    Spans,
    Work,
    num_positions,
    part_of,
    without,
)
from offbeat.parts.part import Part


class MapStyle(Protocol):
    """A dataset with a length whose samples can be had by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class Desk(Protocol):
    """What a strategy that dispatches does for the loader.

    Attributes:
        mega_batch: samples between merges.
        ranks: who takes part, ascending.
        batch_sizes: what each of them claims at a time, in samples.
        deals_equally: whether each rank gets an equal share of each mega-batch, in place of what it
            claims.
        entry: the merge by which this rank has come into a run that was under way, and which its
            loader has not heard of.
    """

    mega_batch: int
    ranks: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    deals_equally: bool
    entry: Merged | None

    @property
    def batch_size(self) -> int:
        """What this rank claims at a time."""
        ...

    @property
    def is_left_out(self) -> bool:
        """Whether the others have gone on without this rank: what it has in hand counts no more."""
        ...

    def on_batch_claimed(self, num_samples: int) -> None:
        """The next optimizer step will be taken with so many further samples."""
        ...

    def gather(self, value: Any) -> Mapping[int, Any] | None:
        """Every living rank's value, of JSON's kinds, by rank, ascending. Collective over those who
        live.

        None where the others have gone on without this rank meanwhile; `entry` is what they merged
        then.
        """
        ...

    def limit(self, largest: Mapping[int, int | None]) -> None:
        """A loader begins; a rank's memory holds a batch of so many samples, by rank. Raises
        `ConfigError`.
        """
        ...

    def settle(self) -> None:
        """Return when what this rank has begun to compute is done."""
        ...

    def merge(self, work: Work, place: Place) -> Merged:
        """Merge models after a round and choose new batch sizes. Collective over those who live.

        The round that was merged: another one than `place` where the others had gone on without
        this rank.
        """
        ...


@dataclass(kw_only=True)
class Recording:
    """Who claimed what, to be repeated: of JSON's kinds throughout, so that `dataclasses.asdict`
    can be written to a file.

    Attributes:
        num_samples: of the dataset.
        seed: of the order.
        world_size: number of ranks.
        mega_batches: by epoch and number, such as "0/3": the batch sizes, and each rank's claims as
            lists of spans.
    """

    num_samples: int
    seed: int
    world_size: int
    mega_batches: dict[str, dict[str, Any]] = field(default_factory=dict)


def order_of(num_samples: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """The samples' numbers in the order of an epoch, shape (num_samples,)."""
    return np.random.default_rng((seed, epoch)).permutation(num_samples)


def mega_batch_span(num_samples: int, mega_batch: int, number: int) -> Span:
    """Where mega-batch `number` of an epoch lies in its order.

    >>> [mega_batch_span(10, 4, number) for number in (0, 1)]
    [Span(begin=0, end=5), Span(begin=5, end=10)]
    """
    count = num_mega_batches(num_samples, mega_batch)
    return Span(num_samples * number // count, num_samples * (number + 1) // count)


def num_mega_batches(num_samples: int, mega_batch: int) -> int:
    """In an epoch: samples over samples, rounded, at least 1."""
    return max(1, (2 * num_samples + mega_batch) // (2 * mega_batch))


def require_map_style(dataset: object) -> int:
    """Number of samples. Raises `ConfigError` for what has no length, no samples by number, or none
    at all.
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ConfigError(
            "the dataset must be of map style, with len(dataset) and dataset[i], got a"
            f" {type(dataset).__name__}; samples of a stream cannot be shared out by number: put"
            " them in a list, or feed your own loop"
        )
    if not (num_samples := len(dataset)):
        raise ConfigError("the dataset is empty; is this the right split?")
    return num_samples


def data_description(
    dataset: object,
    *,
    seed: int,
    batch_size: int | None,
    max_batch_size: int | None,
    claims: bool,
    recorded: bool,
) -> dict[str, Any]:
    """What of a loader must be the same on all ranks, as JSON.

    Args:
        dataset: that the loader is to read.
        seed: of the order.
        batch_size: given to the loader.
        max_batch_size: given to the loader.
        claims: whether the strategy has batch sizes of its own, and samples are claimed.
        recorded: whether claims are to be recorded or replayed.

    Raises:
        ConfigError: this cannot work.
    """
    num_samples = require_map_style(dataset)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"seed must be an integer of at least 0, got {seed!r}")
    for name, size in (("batch_size", batch_size), ("max_batch_size", max_batch_size)):
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ConfigError(f"{name} must be an integer of at least 1, got {size!r}")
    if claims and batch_size is not None:
        raise ConfigError(
            f"the strategy has a batch_size of its own, so the loader takes none, got {batch_size};"
            " leave it out"
        )
    if not claims and batch_size is None:
        raise ConfigError(
            "the strategy has no batch size: pass batch_size=..., which may differ between ranks"
        )
    if not claims and (max_batch_size is not None or recorded):
        raise ConfigError(
            "max_batch_size, record and replay are for strategies that claim samples, such as"
            " offbeat.AdaptiveSGD()"
        )
    return {"data": {"samples": num_samples, "seed": seed}}


def fetch(dataset: MapStyle, indices: Sequence[int], collate: Callable[[list[Any]], Any]) -> Any:
    """A batch of the samples `indices`."""
    at_once = getattr(dataset, "__getitems__", None)
    return collate(at_once(list(indices)) if at_once else [dataset[index] for index in indices])


class DispatchLoader(Part):
    """Iterating over it yields this rank's batches of an epoch; how many, nobody knows before. Made
    by `Session.loader`.

    All ranks must iterate. One that stops in the middle of an epoch goes on there when it iterates
    again; the others wait for it at the next merge. To stop all ranks together, take
    `one_mega_batch()` at a time.

    Args:
        dataset: of map style; the same on all ranks.
        log: of claims.
        desk: the strategy's part.
        seed: of the order, >= 0.
        collate: makes a batch of a list of samples.
        rank: this rank.
        notify: for remarks.
        record: keep `recording`.
        replay: claims to repeat.
        clock: seconds, monotonic.

    Attributes:
        epoch: passes over the data completed.
        mega_batch: mega-batches of the pass under way that have been merged.
        recording: of this loader's mega-batches so far; None unless asked for.
        last: the work in the mega-batch merged last, of each worker that is in it, by rank; empty
            before the first.
    """

    state_key: ClassVar[str] = "loader"

    def __init__(
        self,
        dataset: MapStyle,
        *,
        log: ClaimLog,
        desk: Desk,
        seed: int,
        collate: Callable[[list[Any]], Any],
        rank: int,
        notify: Callable[[str], None],
        record: bool = False,
        replay: Recording | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.epoch = self.mega_batch = 0
        self.last: Sequence[Work] = ()
        world_size = len(desk.ranks)
        self.recording = (
            Recording(num_samples=len(dataset), seed=seed, world_size=world_size)
            if record
            else None
        )
        if replay is not None:
            _require_fit(replay, num_samples=len(dataset), seed=seed, world_size=world_size)
        self._dataset, self._collate, self._seed = dataset, collate, seed
        self._log, self._desk, self._notify, self._clock = log, desk, notify, clock
        self._rank = rank
        self._replay = replay
        self._order: tuple[int, NDArray[np.int64]] | None = None
        self._place: Place | None = None
        self._works: dict[int, Work] = {}
        self._deal: Iterator[Claim] | None = None
        self._in_hand: list[Claim] = []
        self._computed: list[Claim] = []
        self._updates, self._busy_s = 0, 0.0
        self._claimed_at_s: float | None = None
        if desk.entry is not None:
            self._begin()

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch
        while self.epoch == epoch:
            yield from self.one_mega_batch()

    @property
    def num_merged(self) -> int:
        """Mega-batches that have been merged, of all passes."""
        return (
            self.epoch * num_mega_batches(len(self._dataset), self._desk.mega_batch)
            + self.mega_batch
        )

    @property
    def num_samples_merged(self) -> int:
        """Samples of the pass under way that are in the merged model."""
        return self._whole(self.epoch, self.mega_batch)[0].begin

    def one_mega_batch(self) -> Iterator[Any]:
        """This rank's batches of the next mega-batch, or of what is left of the one under way."""
        self._begin()
        under_way = self.epoch, self.mega_batch
        while (self.epoch, self.mega_batch) == under_way:
            while (claim := self._take()) is not None:
                self._in_hand.append(claim)
                self._desk.on_batch_claimed(claim.num_samples)
                yield fetch(self._dataset, self._indices(claim), self._collate)
            self._merge()

    # Events

    @override
    def on_after_step(self) -> None:
        if self._in_hand:
            self._computed += self._in_hand
            self._in_hand = []
            self._updates += 1

    # One mega-batch

    def _begin(self) -> None:
        """Agree on where to begin, unless that is known."""
        if self._desk.entry is not None:
            self._follow(self._desk.entry)
            self._desk.entry = None
        elif self._place is None:
            self._agree()

    def _agree(self) -> None:
        """Begin with what no rank's model has seen: all of a mega-batch, or what was not computed
        when a run was saved.
        """
        mine = {
            "place": [self.epoch, self.mega_batch],
            "round": self._log.round,
            "computed": [span for claim in self._computed for span in claim.spans],
        }
        stated = self._desk.gather(mine)
        if stated is None:
            assert self._desk.entry is not None, "the others have loaders too"
            self._begin()
            return
        places = {rank: tuple(other["place"]) for rank, other in stated.items()}
        if len(set(places.values())) > 1:
            raise CheckpointError(
                "the ranks' states were saved in different mega-batches (epoch and number by rank:"
                f" {places}); save them on all ranks after the same merge, or in the middle of the"
                " same mega-batch"
            )
        computed = [Span(*span) for other in stated.values() for span in other["computed"]]
        spans = without(self._whole(self.epoch, self.mega_batch), computed)
        number = 1 + max(other["round"] for other in stated.values())
        self._open(
            Place(epoch=self.epoch, mega_batch=self.mega_batch, round=number, retry=0, spans=spans)
        )

    def _open(self, place: Place) -> None:
        ranks = self._desk.ranks
        self._log.open(place.round, place.spans, sweeps=self._rank == min(ranks))
        self._place = place
        self._deal = None
        if self._replay is not None:
            self._deal = iter(self._replayed(len(self._computed)))
        elif self._desk.deals_equally:
            self._deal = iter(self._share(place.spans))

    def _take(self) -> Claim | None:
        self._desk.settle()
        now_s = self._clock()
        if self._claimed_at_s is not None:
            self._busy_s += now_s - self._claimed_at_s
        self._claimed_at_s = None
        if self._desk.is_left_out or self._desk.entry is not None:
            return None
        size = self._desk.batch_size
        claim = self._log.claim(size) if self._deal is None else next(self._deal, None)
        self._claimed_at_s = None if claim is None else now_s
        return claim

    def _merge(self) -> None:
        if self._desk.entry is not None:  # what this rank had in hand was lost when it was left out
            self._begin()
            return
        assert self._place is not None, "no round is open"
        self._computed += self._in_hand  # the user chose not to step with these
        work = Work(
            rank=self._rank,
            claims=tuple(self._computed),
            updates=self._updates,
            batch_size=self._desk.batch_size,
            busy_s=self._busy_s,
        )
        ranks, sizes = self._desk.ranks, self._desk.batch_sizes
        merged = self._desk.merge(work, self._place)
        if merged.ranks != ranks:
            self._go_on_with_others(ranks, merged)
        if self.recording is not None:
            claims = [
                [[list(span) for span in claim.spans] for claim in work.claims]
                for work in merged.works
            ]
            self.recording.mega_batches[self._name] = {"batch_sizes": list(sizes), "claims": claims}
        self._follow(merged)

    def _follow(self, merged: Merged) -> None:
        """A round is over: go on with the one after it."""
        place = merged.place
        before = (
            self._works
            if place.retry and self._place is not None and place.round == self._place.round
            else {}
        )
        works = {
            work.rank: before[work.rank].plus(work) if work.rank in before else work
            for work in merged.works
        }
        works = {rank: works.get(rank, before.get(rank)) for rank in sorted({*before, *works})}  # type: ignore[misc]
        self._in_hand, self._computed, self._updates, self._busy_s, self._claimed_at_s = (
            [],
            [],
            0,
            0.0,
            None,
        )
        following = place.after(
            merged.claims, self._whole, num_mega_batches(len(self._dataset), self._desk.mega_batch)
        )
        self.epoch, self.mega_batch, self._works = following.epoch, following.mega_batch, works
        if following.retry == 0:
            self.last, self._works = tuple(works.values()), {}
        if self._replay is not None and self._name not in self._replay.mega_batches:
            self._place = None  # there may be nothing more to do
        else:
            self._open(following)

    def _go_on_with_others(self, ranks: Sequence[int], merged: Merged) -> None:
        """The workers of the next round are not those of the last."""
        if self._replay is not None:
            raise PeerError(
                f"a recording of workers {list(ranks)} cannot be replayed by workers"
                f" {list(merged.ranks)}"
            )
        if self.recording is not None:
            self.recording = None
            self._notify(
                "the recording is given up, since workers have come or gone: claims of others"
                " cannot be replayed"
            )
        gone = sorted(set(ranks) - {work.rank for work in merged.works})
        left = num_positions(
            without(merged.place.spans, [span for claim in merged.claims for span in claim.spans])
        )
        if gone and left:
            which = f"worker{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))}"
            self._notify(
                f"mega-batch {self._name}: {left} samples that {which} had taken are given out"
                " again"
            )

    def _whole(self, epoch: int, number: int) -> Spans:
        return (mega_batch_span(len(self._dataset), self._desk.mega_batch, number),)

    def _share(self, spans: Spans) -> Iterator[Claim]:
        """This rank's equal share of `spans`, in batches."""
        total, ranks = num_positions(spans), self._desk.ranks
        if self._rank not in ranks:
            return
        place = ranks.index(self._rank)
        begin, last = (total * number // len(ranks) for number in (place, place + 1))
        size = self._desk.batch_size
        for first in range(begin, last, size):
            yield Claim(part_of(spans, first, min(first + size, last)))

    def _replayed(self, num_done: int) -> list[Claim]:
        assert self._replay is not None
        recorded = self._replay.mega_batches.get(self._name)
        if recorded is None:
            raise ConfigError(
                f"the recording ends before mega-batch {self._name} (epoch/number); train for less,"
                " or without it"
            )
        self._desk.batch_sizes = tuple(recorded["batch_sizes"])
        claims = [
            Claim(tuple(Span(*span) for span in spans)) for spans in recorded["claims"][self._rank]
        ]
        return claims[num_done:]

    def _indices(self, claim: Claim) -> list[int]:
        if self._order is None or self._order[0] != self.epoch:
            self._order = (
                self.epoch,
                order_of(len(self._dataset), seed=self._seed, epoch=self.epoch),
            )
        order = self._order[1]
        return [index for begin, end in claim.spans for index in order[begin:end].tolist()]

    @property
    def _name(self) -> str:
        return f"{self.epoch}/{self.mega_batch}"

    # State

    @override
    def state_dict(self) -> dict[str, dict[str, Any]]:
        """What this rank's model has seen of the mega-batch under way; a claim counts once its
        optimizer step was taken.
        """
        claims = [[list(span) for span in claim.spans] for claim in self._computed]
        place = {"epoch": self.epoch, "mega_batch": self.mega_batch}
        return {
            "local": {**place, "claims": claims, "updates": self._updates, "busy_s": self._busy_s}
        }

    @override
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        saved = state["local"]
        if "mega_batch" not in saved:
            raise CheckpointError("the state lacks 'mega_batch'; it was saved by another loader")
        self.epoch, self.mega_batch = int(saved["epoch"]), int(saved["mega_batch"])
        self._computed = [Claim(tuple(Span(*span) for span in spans)) for spans in saved["claims"]]
        self._updates, self._busy_s = int(saved["updates"]), float(saved["busy_s"])
        self._in_hand, self._claimed_at_s, self._place, self._works = [], None, None, {}

    @override
    def close(self) -> None:
        """The dataset is the user's."""


def _require_fit(replay: Recording, **here: int) -> None:
    for name, value in here.items():
        if (recorded := getattr(replay, name)) != value:
            raise ConfigError(
                f"the recording to replay was made with {name} {recorded}, here it is {value}"
            )
