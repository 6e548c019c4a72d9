"""Makes the loaders of a session: checks that all ranks read the same data, and lets the strategy
say whether samples are claimed or shared out step by step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store
from torch.utils.data import DataLoader

from offbeat.callbacks.callback import Callback
from offbeat.collectives.dense import gather_values
from offbeat.errors import ConfigError, MismatchError, OffbeatError
from offbeat.megabatch.callback import MegaBatchCallback
from offbeat.megabatch.claims import ClaimLog
from offbeat.megabatch.fetching import MapStyle
from offbeat.megabatch.loader import DispatchLoader, data_description
from offbeat.session.agreement import agree, answer_of, require_agreement
from offbeat.session.data_source import DataSource, data_source
from offbeat.session.lockstep_loader import LockstepLoader
from offbeat.transport.driver import Driver, Stream
from offbeat.transport.network import Network, store_of

_DATA_KEY = "data"
"""The key in the store for the description of what the founders' loaders read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderFactory:
    """What a session lends to its loaders.

    Attributes:
        callbacks: of the strategy.
        driver: whose traffic is not counted, since sharing samples out is no training.
        control: channels for it.
        network: through which the ranks are connected; None in a world of one.
        weigh: tells the callbacks how many samples the next batch has.
        notify: for remarks.
        returns: whether this rank has joined a run under way, so that its peers do not make their
            loaders together with it.
    """

    callbacks: Sequence[Callback]
    driver: Driver
    control: Stream
    network: Network | None
    weigh: Callable[[int], None]
    notify: Callable[[str], None]
    returns: bool

    def loader(
        self,
        dataset: MapStyle | DataLoader[Any],
        *,
        seed: int,
        batch_size: int | None,
        max_batch_size: int | None,
        claims_ahead: int | None,
        collate: Callable[[list[Any]], Any] | None,
    ) -> DispatchLoader | LockstepLoader:
        """A loader for this rank, as `Session.loader` says. Collective.

        Args:
            dataset: of map style, the same on all ranks; or a DataLoader of one.
            seed: of the order, >= 0.
            batch_size: of this rank, >= 1; None where the DataLoader has one.
            max_batch_size: what fits into this rank's memory, in samples; None: any number.
            claims_ahead: how many claims worker processes read ahead; None: one.
            collate: makes a batch of a list of samples; torch's `default_collate` if None.

        Raises:
            ConfigError: this cannot work, with the reason. Every rank raises.
            MismatchError: the ranks disagree on the data.
        """
        policy = next(
            (callback for callback in self.callbacks if isinstance(callback, MegaBatchCallback)),
            None,
        )
        source: DataSource | None = None
        description: OffbeatError | dict[str, Any]
        try:
            source = data_source(dataset, batch_size=batch_size, collate=collate)
            if policy is not None:
                _require_claims(source, claims_ahead)
            description = data_description(
                source.dataset,
                seed=seed,
                shuffles=source.shuffles,
                batch_size=source.batch_size,
                max_batch_size=max_batch_size,
                claims=policy is not None,
                claims_ahead=claims_ahead,
            )
        except ConfigError as error:
            description = error
        rank = self.driver.rank
        if policy is None:
            agree(self.driver, self.control, description)
            assert source is not None, "else `agree` raises"
            self._note_drop_last(source)
            sizes = self.driver.run(gather_values(source.batch_size), self.control.next())
            return LockstepLoader(
                source.fetcher(claims_ahead=None, seed=seed, rank=rank),
                batch_sizes=sizes,
                claimed=self.weigh,
                seed=seed,
                rank=rank,
                shuffles=source.shuffles,
            )
        store = store_of(self.network)
        limits = self._memory_limits(policy, store, description, max_batch_size)
        assert source is not None, "else `_memory_limits` raises"
        assert source.batch_size is not None, "its description has it"
        policy.feed(source.batch_size, limits)
        self._note_drop_last(source)
        return DispatchLoader(
            source.fetcher(claims_ahead=claims_ahead or 1, seed=seed, rank=rank),
            log=ClaimLog(store),
            policy=policy,
            seed=seed,
            rank=rank,
            notify=self.notify,
            shuffles=source.shuffles,
        )

    def _note_drop_last(self, source: DataSource) -> None:
        if source.loader is not None and source.loader.drop_last:
            self.notify(
                "drop_last of the DataLoader has no effect: each sample is shared out once an"
                " epoch, in batches of which none is a small remnant"
            )

    def _memory_limits(
        self,
        policy: MegaBatchCallback,
        store: Store,
        mine: OffbeatError | dict[str, Any],
        max_batch_size: int | None,
    ) -> dict[int, int | None]:
        """How many samples fit into each rank's memory. Raises unless the ranks that live, or that
        founded the run, read the same data.

        Args:
            policy: of the strategy.
            store: of the run.
            mine: what this rank's loader is to read, or why it cannot.
            max_batch_size: what fits into this rank's memory.
        """
        answers = None
        if not self.returns:
            fits = None if isinstance(mine, OffbeatError) else max_batch_size
            answers = policy.gather(answer_of(mine) | {"fits": fits})
        if answers is None:
            # This rank came later than its peers: what they read stands in the store.
            _agree_with_founders(store, mine)
            return {self.driver.rank: max_batch_size}
        require_agreement(mine, answers)
        store.set(_DATA_KEY, json.dumps(mine))
        return {rank: answer["fits"] for rank, answer in answers.items()}


def _require_claims(source: DataSource, claims_ahead: int | None) -> None:
    """Raise `ConfigError` unless so many claims can be read ahead from this source."""
    num_workers = 0 if source.loader is None else source.loader.num_workers
    if claims_ahead is None:
        return
    is_number = isinstance(claims_ahead, int) and not isinstance(claims_ahead, bool)
    if not is_number or not 1 <= claims_ahead <= num_workers:
        raise ConfigError(
            f"claims_ahead must be an integer from 1 to the DataLoader's num_workers, which is"
            f" {num_workers}, got {claims_ahead!r}; each worker process reads one claim ahead"
        )


def _agree_with_founders(store: Store, mine: OffbeatError | dict[str, Any]) -> None:
    """Raise unless the founders' loaders read the same data."""
    if isinstance(mine, OffbeatError):
        raise mine
    if not store.check([_DATA_KEY]):
        raise ConfigError(
            "the run that this worker has joined has no loader; feed your own loop, as its peers do"
        )
    theirs = json.loads(store.get(_DATA_KEY))
    if theirs != mine:
        raise MismatchError(
            f"this worker's loader differs from that of the run that it has joined: {mine} here,"
            f" {theirs} there"
        )
