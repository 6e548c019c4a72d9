"""The state of a session over islands, laid out so that `torch.distributed.checkpoint` saves it
with the model and the optimizer, and loads it into other numbers of islands and of shards.

    strategy, num_islands, num_shards
    replicated/<callback>/<entry>                     the same on all islands
    islands/<island>/<callback>/<kind>/<entry>        of one island
    shards/<island>.<shard>/<callback>/<kind>/<entry> of one rank: numbers, and what has no
                                                      parameter's shape

What has a parameter's shape is a DTensor, so sharing it out among another number of ranks is
PyTorch's work. Over islands, what is additive is summed, as `session.state.reshard` does it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from offbeat.callbacks.callback import CallbackState
from offbeat.errors import CheckpointError
from offbeat.session.checkpoint import naming_misfit
from offbeat.session.state import saved_under, tree_of
from offbeat.transport.grid import Grid
from offbeat.weights.shard import Shard, is_distributed, local_of

_OF_AN_ISLAND = ("additive", "local")


class IslandState:
    """Translates between the states of a rank's callbacks and the layout above.

    Args:
        grid: where this rank stands.
        shards: of its parameters, by name.
    """

    def __init__(self, grid: Grid, shards: Mapping[str, Shard]) -> None:
        self._shards = shards
        self._island, self._num_islands = grid.column.index(grid.rank), len(grid.column)
        self._shard, self._num_shards = grid.island.index(grid.rank), len(grid.island)

    def of(self, strategy: str, callbacks: Mapping[str, CallbackState]) -> dict[str, Any]:
        """This rank's part of the state.

        Args:
            strategy: its name.
            callbacks: the states of the callbacks, with copies of tensors.
        """
        replicated, of_island = dict[str, Any](), dict[str, Any]()
        of_rank: dict[str, Any] = {"rank": [self._island, self._shard]}
        for name, state in callbacks.items():
            replicated[name] = {
                key: self._wrapped(key, value) for key, value in state.get("replicated", {}).items()
            }
            for kind in _OF_AN_ISLAND:
                for key, value in state.get(kind, {}).items():
                    wrapped = self._wrapped(key, value)
                    section = of_island if is_distributed(wrapped) else of_rank
                    section.setdefault(name, {}).setdefault(kind, {})[key] = wrapped
        return {
            "strategy": strategy,
            "num_islands": self._num_islands,
            "num_shards": self._num_shards,
            "replicated": replicated,
            "islands": {str(self._island): of_island},
            "shards": {f"{self._island}.{self._shard}": of_rank},
        }

    def callbacks(self, state: Mapping[str, Any], strategy: str) -> dict[str, CallbackState]:
        """Inverse of `of`. Raises `CheckpointError` for the state of another strategy, or of
        another shard than this rank's.
        """
        with naming_misfit("the session's state"):
            if state["strategy"] != strategy:
                raise CheckpointError(
                    f"the state was saved with strategy {state['strategy']!r}, here it is"
                    f" {strategy!r}"
                )
            num_islands, num_shards = int(state["num_islands"]), int(state["num_shards"])
            added = range(self._island, num_islands, self._num_islands)
            first = self._island % num_islands
            parts = {
                island: self._part(state, island, self._shard % num_shards)
                for island in sorted({*added, first})
            }
            found: dict[str, CallbackState] = {}
            # A checkpoint of PyTorch's has no dictionaries that are empty.
            replicated = state.get("replicated", {})
            for name in {**replicated, **parts[first]}:
                local, same = parts[first].get(name, {}), replicated.get(name, {})
                found[name] = {
                    "replicated": {key: self._own(value) for key, value in same.items()},
                    "local": local.get("local", {}),
                    "additive": {
                        key: sum(
                            (parts[each][name]["additive"][key] for each in added),
                            torch.zeros_like(value),
                        )
                        for key, value in local.get("additive", {}).items()
                    },
                }
            return found

    def to_load(self, metadata: Any, key: str) -> dict[str, Any]:
        """What `torch.distributed.checkpoint.load` fills with a saved state, for `callbacks`.

        Args:
            metadata: of the checkpoint, as `FileSystemReader(path).read_metadata()` gives it.
            key: under which the state was saved.
        """
        paths = saved_under(metadata, key)
        with naming_misfit("the checkpoint's metadata"):
            places = [tuple(map(int, p[1].split("."))) for p in paths if p[0] == "shards"]
            if not places:
                raise CheckpointError(
                    f"the checkpoint has no state of a session over islands under {key!r}"
                )
            num_islands, num_shards = (max(each) + 1 for each in zip(*places, strict=True))
            needed = {*range(self._island, num_islands, self._num_islands)}
            needed.add(self._island % num_islands)
            shard = self._shard % num_shards
            wanted = {
                "islands": {str(island) for island in needed},
                "shards": {f"{island}.{shard}" for island in needed},
            }
            return tree_of(
                {
                    path: saved
                    for path, saved in paths.items()
                    if path[0] not in wanted or path[1] in wanted[path[0]]
                },
                self._empty,
            )

    def _part(self, state: Mapping[str, Any], island: int, shard: int) -> dict[str, CallbackState]:
        """What one old rank had, by callback, with local tensors."""
        place = f"{island}.{shard}"
        if place not in state["shards"]:
            raise CheckpointError(
                f"the state is of island and shard {', '.join(state['shards'])}, and this rank"
                f" needs that of {place}; load each rank's own, or save and load by"
                " torch.distributed.checkpoint, with session.state_to_load(metadata)"
            )
        found: dict[str, CallbackState] = {}
        for section in (state.get("islands", {}).get(str(island), {}), state["shards"][place]):
            for name, kinds in section.items():
                for kind in _OF_AN_ISLAND if isinstance(kinds, Mapping) else ():
                    entries = found.setdefault(name, {}).setdefault(kind, {})
                    entries |= {k: self._own(v) for k, v in kinds.get(kind, {}).items()}
        return found

    def _wrapped(self, key: str, value: Any) -> Any:
        shard = self._shards.get(key.rpartition("/")[2])
        return value if shard is None else shard.wrap(value)

    def _own(self, value: Any) -> Any:
        if is_distributed(value) and value.device_mesh.size() != self._num_shards:
            raise CheckpointError(
                f"the state is shared out among {value.device_mesh.size()} ranks of an island, and"
                f" here there are {self._num_shards}; save and load by"
                " torch.distributed.checkpoint, with session.state_to_load(metadata)"
            )
        return local_of(value)

    def _empty(self, key: str, saved: Any) -> Any:
        shard, dtype = self._shards.get(key.rpartition("/")[2]), saved.properties.dtype
        if shard is not None and saved.size == shard.whole.shape:
            return shard.wrap(torch.empty_like(shard.detach(), dtype=dtype))
        return torch.empty(saved.size, dtype=dtype)
