"""Weights, averaged through files that all workers can write and read: a directory, or what fsspec
opens.

    at the beginning    worker 0 writes its weights, and the others take them
    at each average     each writes how far it has moved from the anchor, waits until all have, and
                        reads what they wrote
        anchor = the outer optimizer's step from the anchor, with the mean of the changes
        x      = anchor

No worker opens a port or knows another one's address, so each is a world of one for torch and for
its session; who it is among all says the option. All add up the same files in the same order, so
their anchors are equal to the bit, and a checksum of the anchor in each file proves it. When a
worker has read an average, everyone has written it and so has read the one before, whose file it
then removes.

Cost per average: n elements written and P n read by each worker, and as many looks at the store as
there are pauses while it waits, of 10 ms at first and 1 s in the end. Nothing is overlapped.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Final

import fsspec  # type: ignore[import-untyped]  # which has no types
import numpy as np
import torch
from typing_extensions import override

from offbeat.averaging.outer import OuterOptimizer
from offbeat.averaging.periodic import Everyone, WeightExchange
from offbeat.codec.option_value import OptionValue
from offbeat.codec.tensor_bytes import packed, unpacked
from offbeat.errors import ConfigError, MismatchError, PeerTimeoutError
from offbeat.transport.operations import Collective, Sleep
from offbeat.weights.model_weights import ModelWeights, require_finite

_FIRST_PAUSE_S: Final = 0.01
_LONGEST_PAUSE_S: Final = 1.0


class ObjectStore(OptionValue):
    """Where the workers of one run leave what they tell each other.

    Args:
        path: a directory, or what fsspec takes, such as "s3://bucket/run7": of this run alone, and
            of one start of it.
        rank: this worker's number, in [0, world_size).
        world_size: number of workers.
        patience_s: how long a worker waits for another one, > 0.
    """

    def __init__(
        self, path: str, *, rank: int, world_size: int, patience_s: float = 3600.0
    ) -> None:
        if not 0 <= rank < world_size:
            raise ConfigError(
                f"rank of an ObjectStore must be in [0, {world_size}), the number of workers, got"
                f" {rank!r}"
            )
        if not patience_s > 0:
            raise ConfigError(f"patience_s of an ObjectStore must be > 0, got {patience_s!r}")
        self.path, self.rank, self.world_size = str(path), rank, world_size
        self.patience_s = patience_s


class StoreMean(WeightExchange):
    """The weights of all workers become what `rule` makes of the mean of their changes.

    Args:
        weights: what is averaged.
        peers: carries waiting out.
        store: where.
        rule: as of `WeightExchange`; it keeps an anchor.
        shared: what all workers begin with as worker 0 has it; see `Context`.
    """

    state_key = "object_store"
    brings_together = True
    averages_models = True

    def __init__(
        self,
        weights: ModelWeights,
        peers: Everyone,
        *,
        store: ObjectStore,
        rule: OuterOptimizer,
        shared: Sequence[torch.Tensor],
    ) -> None:
        super().__init__(rule=rule)
        self._weights, self._peers, self._store = weights, peers, store
        self._files, self._root = fsspec.core.url_to_fs(store.path)
        self._number = self._num_means = 0
        self._written: str | None = None  # this worker's file of the last average
        self._begin_alike(shared)

    def _begin_alike(self, shared: Sequence[torch.Tensor]) -> None:
        """Take worker 0's model, as connected ranks do when they attach: also what is frozen, and
        integer buffers. Of two permutations, say, the largest entries are none.
        """
        tensors = [tensor.detach() for tensor in shared]
        name, mine = self._name("start", 0), _numbered(tensors)
        if self._store.rank == 0:
            if self._files.exists(name):
                raise ConfigError(
                    f"{self._store.path} holds files of another run, or of an earlier start of"
                    " this one; name an empty place, the same for all workers"
                )
            self._write(name, mine)
        (start,) = self._read([name], like=mine)
        for number, tensor in mine.items():
            tensor.copy_(start[number])

    @override
    def launch(self, number: int) -> None:
        self._number = number

    @override
    def merge(self) -> None:
        changes = [*self.rule.changes()]
        self.rule.merge_(self._meet(f"{self._number:08d}", changes, self._weights))

    @override
    def average_into(self, weights: ModelWeights) -> frozenset[int]:
        self._num_means += 1
        parameters = [*weights.parameters.values()]
        means = self._meet(f"mean-{self._num_means:08d}", parameters, weights)
        for parameter, mean in zip(parameters, means, strict=True):
            parameter.detach().copy_(mean)
        return frozenset()

    def _meet(
        self, title: str, mine: Sequence[torch.Tensor], weights: ModelWeights
    ) -> list[torch.Tensor]:
        """The mean of all workers' tensors. Statistics and counters of `weights` are averaged in
        place.
        """
        statistics = weights.statistics()
        vectors = [each.detach() for each in (*mine, *statistics)]
        told = _numbered(vectors)
        told["counters"] = torch.from_numpy(weights.own_counters())
        told["anchor"] = torch.tensor([self._fingerprint()])
        names = [self._name(title, rank) for rank in range(self._store.world_size)]
        self._write(names[self._store.rank], told)
        heard = self._read(names, like=told)
        for rank, each in enumerate(heard):
            if not torch.equal(each["anchor"], told["anchor"]):
                raise MismatchError(
                    f"worker {rank} started this period from other weights than worker"
                    f" {self._store.rank}; resume all workers from one checkpoint, with another"
                    " path in their ObjectStore"
                )
            # Not before it is written: the others would wait for it until their patience ends.
            require_finite([each[str(number)] for number in range(len(vectors))], rank=rank)
        if self._written is not None:
            self._files.rm(self._written)
        self._written = names[self._store.rank]
        means = [
            _mean_of([each[str(number)] for each in heard]).to(vector.device)
            for number, vector in enumerate(vectors)
        ]
        for statistic, mean in zip(statistics, means[len(mine) :], strict=True):
            statistic.copy_(mean)
        counters = [each["counters"].numpy() for each in heard]
        weights.write_counters(np.max(counters, axis=0))
        return means[: len(mine)]

    def _fingerprint(self) -> int:
        """Of the anchor; 0 before the first step."""
        found = 0
        for key, tensor in self.rule.state().items():
            if key.startswith("anchor/"):
                found = zlib.crc32(tensor.cpu().numpy().tobytes(), found)
        return found

    def _name(self, title: str, rank: int) -> str:
        return f"{self._root}/{title}-{rank}.safetensors"

    def _write(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self._files.makedirs(self._root, exist_ok=True)
        # Nobody may read half a file: it gets its name when it is whole.
        self._files.pipe_file(name + ".part", packed(tensors))
        self._files.mv(name + ".part", name)

    def _read(
        self, names: Sequence[str], *, like: Mapping[str, torch.Tensor]
    ) -> list[dict[str, torch.Tensor]]:
        self._peers.launch(self._wait(names)).wait()
        found, shapes = [], {key: value.shape for key, value in like.items()}
        for name in names:
            found.append(unpacked(self._files.cat_file(name), name))
            if {key: value.shape for key, value in found[-1].items()} != shapes:
                raise MismatchError(f"{name} is of another model than this worker's")
        return found

    def _wait(self, names: Sequence[str]) -> Collective[None]:
        waited_s, pause_s = 0.0, _FIRST_PAUSE_S
        for name in names:
            while not self._files.exists(name):
                if waited_s > self._store.patience_s:
                    raise PeerTimeoutError(
                        f"{name} was not there after {waited_s:.0f} s: has its worker died, or"
                        " taken fewer steps? All can go on from one checkpoint, with another path"
                    )
                yield Sleep(pause_s)
                waited_s, pause_s = waited_s + pause_s, min(_LONGEST_PAUSE_S, 1.5 * pause_s)
                self._files.invalidate_cache()


def _numbered(tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {str(number): tensor for number, tensor in enumerate(tensors)}


def _mean_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """In float32 or wider, so that half precision is rounded once, by whoever takes it over."""
    total = torch.zeros_like(tensors[0], dtype=torch.promote_types(tensors[0].dtype, torch.float32))
    for tensor in tensors:
        total += tensor
    return total.div_(len(tensors))
