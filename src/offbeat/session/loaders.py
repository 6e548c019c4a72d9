"""Loaders of a session: all ranks mean the same data, and the strategy says whether samples are
claimed or dealt in step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import Store

from offbeat.collectives.control import gather_values
from offbeat.errors import ConfigError, MismatchError, OffbeatError
from offbeat.megabatch.claims import ClaimLog
from offbeat.megabatch.loader import Desk, DispatchLoader, MapStyle, Recording, data_description
from offbeat.parts.part import Part
from offbeat.session.agreement import agree, answer_of, require_agreement
from offbeat.session.lockstep_loader import LockstepLoader
from offbeat.transport.driver import Driver, Stream
from offbeat.transport.network import Network, store_of

_DATA_KEY = "data"
"""What the loaders of those who began the run read, in their store."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Feeding:
    """What a session lends to its loaders.

    Attributes:
        parts: of the strategy.
        driver: not counted, since dealing samples out is no training.
        control: channels for it.
        network: the ranks met there; None in a world of one.
        weigh: tells the parts how many samples the next batch has.
        notify: for remarks.
        returns: whether this rank has joined a run under way, and cannot ask the others together.
    """

    parts: Sequence[Part]
    driver: Driver
    control: Stream
    network: Network | None
    weigh: Callable[[int], None]
    notify: Callable[[str], None]
    returns: bool

    def loader(
        self,
        dataset: MapStyle,
        *,
        seed: int,
        batch_size: int | None,
        max_batch_size: int | None,
        collate: Callable[[list[Any]], Any] | None,
        record: bool,
        replay: Recording | None,
    ) -> DispatchLoader | LockstepLoader:
        """See `Session.loader`."""
        desk = next((part for part in self.parts if isinstance(part, Desk)), None)
        description: OffbeatError | dict[str, Any]
        try:
            description = data_description(
                dataset,
                seed=seed,
                batch_size=batch_size,
                max_batch_size=max_batch_size,
                claims=desk is not None,
                recorded=record or replay is not None,
            )
        except ConfigError as error:
            description = error
        rank = self.driver.rank
        collate = torch.utils.data.default_collate if collate is None else collate
        if desk is None:
            agree(self.driver, self.control, description)
            sizes = self.driver.run(gather_values(batch_size), self.control.next())
            return LockstepLoader(
                dataset,
                batch_sizes=sizes,
                claimed=self.weigh,
                seed=seed,
                collate=collate,
                rank=rank,
            )
        store = store_of(self.network)
        desk.limit(self._agree_at(desk, store, description, max_batch_size))
        return DispatchLoader(
            dataset,
            log=ClaimLog(store),
            desk=desk,
            seed=seed,
            collate=collate,
            rank=rank,
            notify=self.notify,
            record=record,
            replay=replay,
        )

    def _agree_at(
        self,
        desk: Desk,
        store: Store,
        mine: OffbeatError | dict[str, Any],
        max_batch_size: int | None,
    ) -> dict[int, int | None]:
        """Raise unless those who live, or began the run, read the same data; what fits into their
        memories, by rank.
        """
        said = None
        if not self.returns:
            fits = None if isinstance(mine, OffbeatError) else max_batch_size
            said = desk.gather(answer_of(mine) | {"fits": fits})
        if said is None:
            _agree_with_founders(store, mine)
            return {self.driver.rank: max_batch_size}
        require_agreement(mine, said)
        store.set(_DATA_KEY, json.dumps(mine))
        return {rank: answer["fits"] for rank, answer in said.items()}


def _agree_with_founders(store: Store, mine: OffbeatError | dict[str, Any]) -> None:
    """Raise unless the loaders of those who began the run read the same data."""
    if isinstance(mine, OffbeatError):
        raise mine
    if not store.check([_DATA_KEY]):
        raise ConfigError(
            "the run that this worker has joined has no loader; feed your own loop, as the"
            " others do"
        )
    theirs = json.loads(store.get(_DATA_KEY))
    if theirs != mine:
        raise MismatchError(
            f"this worker's loader differs from that of the run that it has joined: {mine} here,"
            f" {theirs} there"
        )
