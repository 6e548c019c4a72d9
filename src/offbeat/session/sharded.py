"""The model of a session as this rank has it: whole, or the shards of one that `fully_shard`, of
FSDP2, has divided inside an island. What can be trained, and how the state lies in checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from offbeat.callbacks.callback import CallbackState
from offbeat.callbacks.module_hook import ModuleHook
from offbeat.errors import CheckpointError, ConfigError, OffbeatError, UnsupportedError
from offbeat.membership.island import Island
from offbeat.session.agreement import Description, agree
from offbeat.session.checkpoint import naming_misfit
from offbeat.session.state import plain_name, reshard_callback
from offbeat.strategies.base import Strategy
from offbeat.transport.driver import Driver, Stream
from offbeat.transport.grid import Grid
from offbeat.weights.shard import Shard, is_distributed, local_of, optimizer_of_shards

_NOT_OF_ALL = ("additive", "local", "owned")
_HOW = "call fully_shard(model, mesh=mesh['shard']) and pass mesh=mesh['replicate'] to attach"


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether a parameter of `model` is not whole on this rank."""
    return any(is_distributed(parameter.data) for parameter in model.parameters()) or any(
        type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()
    )


def check_sharded(
    model: torch.nn.Module,
    strategy: Strategy,
    mesh: Any,
    scaler: Any,
    *,
    finds_islands: bool = False,
) -> None:
    """Refuse a model, or what trains it, that a session over islands could not train.

    Args:
        model: of the user.
        strategy: that is to train it.
        mesh: of the replicas, as given to `attach`; None: it was given none.
        scaler: the enabled GradScaler; None: there is none.
        finds_islands: whether no mesh is needed.
    """
    reshard_modules(model)
    if not is_sharded(model):
        if mesh is None:
            return
        raise ConfigError(
            "mesh is for a model that fully_shard() has divided among the ranks of an island, and"
            f" this one is whole on every rank; {_HOW}, or leave mesh out"
        )
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise UnsupportedError(
            "the model is sharded by FullyShardedDataParallel (FSDP1), which hides its shards; use"
            f" torch.distributed.fsdp.fully_shard: {_HOW}"
        )
    _check_layout(model)
    if mesh is None and not finds_islands:
        raise UnsupportedError(
            "the model is sharded by fully_shard(), so this rank holds a part of it only; pass"
            " mesh=mesh['replicate'] to attach, the dimension of the device mesh that crosses"
            " islands, or pass the model before fully_shard()"
        )
    if mesh is not None and getattr(mesh, "ndim", 0) != 1:
        raise ConfigError(
            f"mesh must be one dimension of a device mesh, the one that crosses islands, got"
            f" {mesh!r}; pass mesh['replicate']"
        )
    if not strategy.trains_islands:
        raise UnsupportedError(
            f"{strategy.name} with these options does not train models that fully_shard() has"
            " divided: it looks at whole layers, shares samples out, or lets ranks go on without"
            " each other; use AllReduce, TopK, GTopK, EF21, PowerSGD, LocalSGD, WAGMA, AD-PSGD or"
            " eager SGD, or pass the model before fully_shard()"
        )
    if scaler is not None:
        raise UnsupportedError(
            "a GradScaler looks for infinities in this rank's shard alone; use bfloat16, as"
            " MixedPrecisionPolicy(param_dtype=torch.bfloat16) does, which needs no scaler"
        )
    if not any(local_of(p.detach()).numel() for p in model.parameters() if p.requires_grad):
        raise ConfigError(
            "this rank holds no element of any parameter, since the model has fewer rows than the"
            " island has ranks; shard it among fewer ranks"
        )


def reshard_modules(model: torch.nn.Module) -> None:
    """Let `fully_shard`'s modules have their shards, and not what those were in the last forward
    pass, which stays where no backward pass came after it.
    """
    for module in model.modules():
        if callable(reshard := getattr(module, "reshard", None)) and _is_fsdp(module):
            reshard()


def _is_fsdp(module: torch.nn.Module) -> bool:
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def _check_layout(model: torch.nn.Module) -> None:
    meshes = set()
    for name, parameter in model.named_parameters():
        if not is_distributed(parameter.data):
            raise UnsupportedError(
                f"parameter {name!r} is whole on every rank of the island, and others are sharded,"
                " so nobody brings its gradients together; call fully_shard() on the model itself"
                " after its blocks, without ignored_params"
            )
        whole: Any = parameter
        meshes.add(whole.device_mesh)
        if whole.device_mesh.ndim > 1:
            if any(each.is_replicate() for each in whole.placements):
                raise UnsupportedError(
                    f"parameter {name!r} is sharded by native HSDP, on a mesh of"
                    f" {whole.device_mesh.ndim} dimensions, so FSDP exchanges between islands"
                    f" itself; {_HOW}"
                )
            raise UnsupportedError(
                f"parameter {name!r} is divided along {whole.device_mesh.ndim} dimensions of a"
                " mesh, as by tensor parallelism beside fully_shard(), which is not supported;"
                " shard by fully_shard() alone"
            )
        if not whole.placements[0].is_shard():
            raise UnsupportedError(
                f"parameter {name!r} has the placement {whole.placements[0]}, and only shards are"
                " supported; shard the model by fully_shard() alone"
            )
    if not _is_fsdp(model):
        raise UnsupportedError(
            "the model is divided, but not by fully_shard() on the model itself, as by tensor"
            f" parallelism; {_HOW}"
        )
    if len(meshes) > 1:
        raise UnsupportedError(
            f"parameters are sharded over {len(meshes)} meshes; shard all of them over one"
        )


class Replica:
    """The model that a session trains, as this rank has it: whole, or its shards. One that is whole
    is an island of one rank.

    Args:
        model: of the user; one that is divided as `check_sharded` accepts it.
        grid: where this rank stands.
        driver: connects the island that has divided the model; None: it is whole.

    Attributes:
        grid: as given.
        island: decides together.
        is_sharded: whether the model is divided.
        parameters: the model's by name, in its order, or this rank's shards of them.
        layout: of the session's state in checkpoints.
    """

    def __init__(self, model: torch.nn.Module, grid: Grid, driver: Driver | None = None) -> None:
        self.grid, self.island, self.is_sharded = grid, Island(driver), driver is not None
        self._model = model
        self._shards = {name: Shard(p) for name, p in model.named_parameters() if self.is_sharded}
        self.parameters: Mapping[str, torch.nn.Parameter] = (
            self._shards if self.is_sharded else dict(model.named_parameters())
        )
        self.layout = StateLayout(grid, {plain_name(n): shard for n, shard in self._shards.items()})

    def agree(self, driver: Driver, stream: Stream, mine: Description) -> None:
        """Compare the descriptions of all ranks of all islands. Collective; as `agree` raises, on
        every rank.

        Args:
            driver: connects the column.
            stream: of its channels.
            mine: of this rank.
        """
        said: Description | OffbeatError = mine
        try:
            agree(self.island.driver, Stream(1), mine, ranks=self.grid.island)
        except OffbeatError as error:
            said = error  # which all columns of this island hear
        agree(driver, stream, said, ranks=self.grid.column)

    def optimizer(self, optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
        """The user's optimizer as callbacks see it."""
        if optimizer is None or not self.is_sharded:
            return optimizer
        return optimizer_of_shards(optimizer, list(self._shards.values()))

    def hook(self) -> Callable[[], None]:
        """Look at each forward pass whether the shards are still the model's memory. Returns what
        ends that.
        """
        places = {
            name: (self._model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            for name in self._shards
        }

        def follow(module: torch.nn.Module, args: Any) -> None:
            for name, shard in self._shards.items():
                now = getattr(*places[name])
                if is_distributed(now.data) and now is not shard.whole:
                    raise UnsupportedError(
                        f"parameter {name!r} is another object than when the session was attached,"
                        " as after load_state_dict(assign=True) or to_empty(), so this session and"
                        " the optimizer still have the old one; load with assign=False, or do it"
                        " before the optimizer is made and attach"
                    )
                if shard.whole.dtype != shard.dtype:
                    raise UnsupportedError(
                        f"parameter {name!r} is of {shard.whole.dtype} and was of {shard.dtype}"
                        " when the session was attached; convert the model before"
                    )
                shard.follow()

        # In front of FSDP's own hook, which puts whole parameters into the modules.
        hook = ModuleHook(self._model, follow)
        return self._model.register_forward_pre_hook(hook, prepend=True).remove


class StateLayout:
    """Translates between the states of a rank's callbacks and a layout that
    `torch.distributed.checkpoint` saves with the model and the optimizer, and loads into other
    numbers of islands and of shards. Where models are whole each rank is an island.

        strategy, num_islands, num_shards
        callbacks                                         their names, also of those without entries
        replicated/<callback>/<entry>                     the same on all islands
        islands/<island>/<callback>/<kind>/<entry>        of one island
        shards/<island>.<shard>/<callback>/<kind>/<entry> of one rank: numbers, what has no shard's
                                                          shape, and all where models are whole

    What has a shard's shape is a DTensor, so sharing it out among another number of ranks is
    PyTorch's work. Over islands, what is additive is summed, as `session.state.reshard` does it.

    Args:
        grid: where this rank stands.
        shards: of its parameters, by name; none where they are whole.
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
            for kind in _NOT_OF_ALL:
                for key, value in state.get(kind, {}).items():
                    wrapped = self._wrapped(key, value)
                    section = of_island if is_distributed(wrapped) else of_rank
                    section.setdefault(name, {}).setdefault(kind, {})[key] = wrapped
        return {
            "strategy": strategy,
            "num_islands": self._num_islands,
            "num_shards": self._num_shards,
            "callbacks": "/".join(callbacks),
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
            needed = self._needed(num_islands)
            parts = [
                self._part(state, island, self._shard % num_shards, is_needed=island in needed)
                for island in range(num_islands)
            ]
            # A checkpoint of PyTorch's has no dictionaries that are empty.
            replicated = state.get("replicated", {})
            found = {}
            for name in filter(None, state["callbacks"].split("/")):
                of_islands = [part.get(name, {}) for part in parts]
                found[name] = reshard_callback(of_islands, self._num_islands, self._island)
                same = replicated.get(name, {})
                found[name]["replicated"] = {key: self._own(each) for key, each in same.items()}
            return found

    def to_load(self, metadata: Any, key: str) -> dict[str, Any]:
        """What `torch.distributed.checkpoint.load` fills with a saved state, for `callbacks`.

        Args:
            metadata: of the checkpoint, as `FileSystemReader(path).read_metadata()` gives it.
            key: under which the state was saved.
        """
        with naming_misfit("the checkpoint's metadata"):
            paths = {
                tuple(map(str, path[1:])): metadata.state_dict_metadata[name]
                for name, path in metadata.planner_data.items()
                if path[0] == key
            }
            places = [tuple(map(int, p[1].split("."))) for p in paths if p[0] == "shards"]
            if not places:
                raise CheckpointError(f"the checkpoint has no state of a session under {key!r}")
            num_islands, num_shards = (max(each) + 1 for each in zip(*places, strict=True))
            needed, shard = self._needed(num_islands), self._shard % num_shards
            wanted = {
                "islands": {str(island) for island in needed},
                "shards": {f"{island}.{shard}" for island in needed},
            }
            found: dict[str, Any] = {}
            for path, saved in paths.items():
                # What one rank owns any other may own by then.
                if "owned" in path[3:4] or path[0] not in wanted or path[1] in wanted[path[0]]:
                    entries = found
                    for step in path[:-1]:
                        entries = entries.setdefault(step, {})
                    is_tensor = hasattr(saved, "size")  # what is none is bytes
                    entries[path[-1]] = self._empty(path[-1], saved) if is_tensor else None
            return found

    def _needed(self, num_islands: int) -> set[int]:
        """Of which of so many old islands this one takes something."""
        added = range(self._island, num_islands, self._num_islands)
        return {*added, self._island % num_islands}

    def _part(
        self, state: Mapping[str, Any], island: int, shard: int, *, is_needed: bool
    ) -> dict[str, CallbackState]:
        """What one old rank had, by callback, with local tensors."""
        place = f"{island}.{shard}"
        if is_needed and place not in state["shards"]:
            raise CheckpointError(
                f"the state is of island and shard {', '.join(state['shards'])}, and this rank"
                f" needs that of {place}; load each rank's own, or save and load by"
                " torch.distributed.checkpoint, with session.state_to_load(metadata)"
            )
        found: dict[str, CallbackState] = {}
        for section in (
            state.get("islands", {}).get(str(island), {}),
            state["shards"].get(place, {}),
        ):
            for name, kinds in section.items():
                for kind in kinds if isinstance(kinds, Mapping) else ():
                    entries = found.setdefault(name, {}).setdefault(kind, {})
                    entries |= {k: self._own(v) for k, v in kinds[kind].items()}
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
