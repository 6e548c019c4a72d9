"""A session in a loop with Accelerate.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with attach(accelerator, model, optimizer, offbeat.GTopK(density=0.01)) as accelerated:
        ...

The loop inside stays as it is, `accelerator.backward` and `accelerator.accumulate` included.
`accelerator.save_state` writes each rank's part of the strategy's state with the rest, and
`accelerator.load_state` reads it.

With FSDP2 the model is divided inside an island, and the strategy trains between islands:

    Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
        parallelism_config=IslandsConfig(dp_replicate_size=nodes, dp_shard_size=gpus),
    )
"""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from offbeat.errors import UnsupportedError
from offbeat.integrations.framework import FrameworkSession, as_strategy
from offbeat.integrations.state_files import load_state, make_state, save_state
from offbeat.session.attach import SessionRecorder
from offbeat.session.sharded import is_sharded
from offbeat.strategies.base import Strategy

try:
    import accelerate
    from accelerate.parallelism_config import ParallelismConfig
except ImportError as error:
    raise ImportError(
        "offbeat.integrations.accelerate needs accelerate, which `pip install"
        " 'offbeat[transformers]'` installs"
    ) from error

STATE_DIRECTORY = "offbeat"
"""In a directory that Accelerate saves its state in."""

_NUMBERS: Final[WeakKeyDictionary[accelerate.Accelerator, set[int]]] = WeakKeyDictionary()
"""Of the sessions that are open with each; the first one has 0."""


class IslandsConfig(ParallelismConfig):
    """Accelerate's `ParallelismConfig`, with FSDP inside islands of `dp_shard_size` ranks alone:
    between the `dp_replicate_size` islands a strategy of offbeat's exchanges.
    """

    @property
    @override
    def fsdp_dim_names(self) -> list[str]:
        return [name for name in super().fsdp_dim_names if name != "dp_replicate"]


def across_islands(model: torch.nn.Module, state: Any, strategy: Strategy) -> DeviceMesh | None:
    """The mesh that crosses islands, for a model that Accelerate has divided; None: it is whole.

    Args:
        model: prepared.
        state: of Accelerate.
        strategy: that is to train it.

    Raises:
        UnsupportedError: it is divided so that nothing is left to be exchanged between islands.
    """
    plugin = getattr(state, "fsdp_plugin", None)
    if plugin is not None and plugin.fsdp_version == 1:
        raise UnsupportedError(
            "Accelerate has divided the model by FSDP1, which hides its shards; pass"
            " fsdp_version=2 to the FSDP plugin, or {'version': 2} as fsdp_config"
        )
    if not is_sharded(model):
        return None
    if not isinstance(state.parallelism_config, IslandsConfig) or (
        not state.parallelism_config.dp_replicate_enabled
    ):
        raise UnsupportedError(
            f"Accelerate has divided the model among all ranks, so {strategy.name} has nothing to"
            " exchange; pass Accelerator, or TrainingArguments, parallelism_config="
            "offbeat.integrations.accelerate.IslandsConfig(dp_replicate_size=..., dp_shard_size="
            "...) with at least two islands"
        )
    mesh: DeviceMesh = state.device_mesh["dp_replicate"]
    return mesh


def refuse_mixed_files(state: Any, strategy: Strategy) -> None:
    """Raise `UnsupportedError` where a checkpoint would have some shards of one island and some of
    another, whose models or optimizers differ: of what has one name on all islands PyTorch writes
    each shard by whichever rank has least to write.
    """
    plugin = getattr(state, "fsdp_plugin", None)
    if strategy.replicas_differ and "SHARDED" in str(getattr(plugin, "state_dict_type", "")):
        raise UnsupportedError(
            f"islands differ between averages of {strategy.name}, and a checkpoint of kind"
            " SHARDED_STATE_DICT would mix their shards; use state_dict_type='FULL_STATE_DICT' in"
            " the FSDP plugin or in fsdp_config"
        )


class AcceleratedSession(FrameworkSession):
    """A session in such a loop.

    Args:
        accelerator: that has prepared the model.
        rest, options: as of `FrameworkSession`.
    """

    def __init__(self, accelerator: accelerate.Accelerator, *rest: Any, **options: Any) -> None:
        super().__init__(*rest, **options)
        self._state = accelerator.state
        self._numbers = _NUMBERS.setdefault(accelerator, set())
        self._number = next(number for number in count() if number not in self._numbers)
        self._numbers.add(self._number)
        self._handles: list[Any] = [
            accelerator.register_save_state_pre_hook(self._saves),
            accelerator.register_load_state_pre_hook(self._loads),
        ]

    @override
    def close(self, error: BaseException | None = None) -> None:
        if self._handles:  # another session may have the number already when this is called again
            self._numbers.discard(self._number)
        while self._handles:
            self._handles.pop().remove()
        super().close(error)

    def _saves(self, models: object, weights: object, directory: str) -> None:
        if is_sharded(self.model):
            refuse_mixed_files(self._state, self.session.strategy)
        save_state(self._directory(directory), self.state_to_save(), tag="")

    def _loads(self, models: object, directory: str) -> None:
        if is_sharded(self.model):
            make_state(self.model, self.optimizer)
        load_state(self._directory(directory), self.session, tag="")

    def _directory(self, directory: str) -> Path:
        """Of this session's state: sessions are attached in the same order when a run resumes."""
        return Path(directory) / f"{STATE_DIRECTORY}{f'-{self._number}' if self._number else ''}"


def attach(
    accelerator: accelerate.Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy | str,
    *,
    recorder: SessionRecorder | None = None,
) -> AcceleratedSession:
    """Attach a strategy to what `accelerator.prepare` has returned. Collective.

    Args:
        accelerator: the loop's.
        model: prepared, so perhaps wrapped in DistributedDataParallel, which exchanges nothing any
            more until the session is closed.
        optimizer: prepared.
        strategy: such as `offbeat.GTopK(density=0.001)`, or a name such as "gtopk".
        recorder: writes the session's steps down; see `offbeat.attach`.

    Raises:
        ConfigError, UnsupportedError: this cannot work; see `offbeat.attach`.
    """
    # Accelerate would else take DDP out of a compiled model's modules, and not of what it calls.
    inner = accelerator.unwrap_model(model, keep_torch_compile=False)
    strategy = as_strategy(strategy)
    mesh = across_islands(inner, accelerator.state, strategy)
    accelerated = AcceleratedSession(
        accelerator, inner, optimizer, strategy, mesh=mesh, recorder=recorder
    )
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            accelerated.silence(module)
    return accelerated
