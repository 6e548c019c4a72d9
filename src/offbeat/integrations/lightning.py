"""A strategy of offbeat's in Lightning: `OffbeatStrategy` for the Trainer, `OffbeatFabricStrategy`
for Fabric, and `OffbeatModelParallelStrategy` for a Trainer whose model `fully_shard` divides.

    import offbeat.integrations.lightning  # registers the names

    Trainer(strategy="offbeat_gtopk", accelerator="cpu", devices=4)
    Trainer(strategy=OffbeatStrategy(offbeat.GTopK(density=0.01)), accelerator="cpu", devices=4)
    Fabric(strategy="offbeat_wagma", accelerator="cpu", devices=4)

They take DDP's place: devices, launchers, samplers and precision are as with `strategy="ddp"`. The
session is attached when the optimizer is there, to the plain module, and ends with the fit.

- Gradients that are accumulated are exchanged once.
- `gradient_clip_val` becomes `clip_norm` of a strategy that selects entries, since those are
  clipped before they are selected.
- Validation, and checkpoints, have the mean of all ranks' models.
- Beside a checkpoint `x.ckpt` each rank writes its own part of the strategy's state, such as its
  residuals, below `x.ckpt.offbeat/`, and reads it when the fit is resumed.
"""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from offbeat.errors import ConfigError, OffbeatWarning, UnsupportedError
from offbeat.integrations.framework import (
    FrameworkSession,
    as_strategy,
    names_for_frameworks,
)
from offbeat.integrations.state_files import (
    load_state,
    make_state,
    remove_state,
    save_state,
    state_directory,
)
from offbeat.run.recipes import refuse_clipping_by_value
from offbeat.session.attach import SessionRecorder
from offbeat.session.session import Session
from offbeat.strategies.base import Strategy

try:
    from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRIC_STRATEGIES
    from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
    from lightning.pytorch.strategies import (
        DDPStrategy,
        ModelParallelStrategy,
        ParallelStrategy,
        StrategyRegistry,
    )
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise ImportError(
        "offbeat.integrations.lightning needs lightning, which `pip install 'offbeat[lightning]'`"
        " installs"
    ) from error

STATE_KEY: Final = "offbeat"
"""In a checkpoint: the tag of the ranks' states beside it."""

_REST: Final = "meta.pt"
"""What Lightning calls the file of a divided checkpoint that has what is not divided."""

_OF_DDP: Final = frozenset(
    {
        *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision"),
        *("precision_plugin", "process_group_backend", "timeout", "start_method"),
    }
)


class _FitStrategy(ParallelStrategy):
    """A session for the time of a fit, whatever divides the model.

    Args:
        offbeat_strategy: such as `offbeat.GTopK(density=0.001)`, or a name such as "gtopk".
        recorder: writes the session's steps down; see `offbeat.attach`.
        options: of Lightning's strategy.
    """

    def __init__(
        self,
        offbeat_strategy: Strategy | str,
        *,
        recorder: SessionRecorder | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._strategy = as_strategy(offbeat_strategy)
        self._recorder = recorder
        self._running: FrameworkSession | None = None
        self._last_state: Mapping[str, Any] | None = None

    @property
    def offbeat_session(self) -> Session | None:
        return None if self._running is None else self._running.session

    @override
    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if len(self.optimizers) != 1:
            raise UnsupportedError(
                f"configure_optimizers returned {len(self.optimizers)} optimizers, and"
                f" {type(self).__name__} works with one; put the parameters into groups of one"
                " optimizer"
            )
        by_norm = trainer.gradient_clip_algorithm in (None, "norm")
        clip_norm = trainer.gradient_clip_val if by_norm else None
        strategy = as_strategy(self._strategy, clip_norm=clip_norm or None)
        if trainer.gradient_clip_val and not by_norm:
            refuse_clipping_by_value(strategy)
        (optimizer,), (module, mesh) = self.optimizers, self._attached()
        scaler = getattr(self.precision_plugin, "scaler", None)
        self._running = FrameworkSession(
            module, optimizer, strategy, mesh=mesh, scaler=scaler, recorder=self._recorder
        )
        session = self._running.session
        session.clips_by_value = bool(trainer.gradient_clip_val) and not by_norm
        self._last_state = None

        def clip(_: torch.optim.Optimizer, clip_val: float) -> None:
            if clip_val > 0:
                session.clip_grad_norm_(clip_val)

        by_value = self.precision_plugin.clip_grad_by_value

        def clip_by_value(stepped: torch.optim.Optimizer, clip_val: float) -> None:
            """Modules may ask for it by themselves, and in manual optimization only they do."""
            session.clips_by_value = True
            refuse_clipping_by_value(session.acting)
            by_value(stepped, clip_val)

        self.precision_plugin.clip_grad_by_norm = clip
        self.precision_plugin.clip_grad_by_value = clip_by_value

    def _attached(self) -> tuple[torch.nn.Module, DeviceMesh | None]:
        """What the session is attached to, and the mesh that crosses islands."""
        return self.lightning_module, None

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None]:
        if self._running is None:
            yield
        else:
            with self._running.session.no_sync():
                yield

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._running is not None:
            self._running.trains()
        return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._running is not None:
            self._running.evaluates()
        return super().validation_step(*args, **kwargs)

    def _save_state(self, checkpoint: dict[str, Any], filepath: Any) -> None:
        """Write the session's state beside a checkpoint, which is told of it."""
        state = self._last_state if self._running is None else self._running.state_to_save()
        if state is not None and "optimizer_states" in checkpoint:
            checkpoint[STATE_KEY] = tag = self.broadcast(secrets.token_hex(8))
            save_state(state_directory(filepath), state, tag=tag)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.local_rank == 0:
            remove_state(state_directory(filepath))

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._close(exception)
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self._close(None)
        super().teardown()

    def _close(self, error: BaseException | None) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        del self.precision_plugin.clip_grad_by_norm, self.precision_plugin.clip_grad_by_value
        if error is None:
            self._last_state = running.session.state_dict()
        running.close(error)


class OffbeatStrategy(_FitStrategy, DDPStrategy):
    """A strategy of offbeat's for Lightning's Trainer.

    Args:
        offbeat_strategy: such as `offbeat.GTopK(density=0.001)`, or a name such as "gtopk".
        recorder: writes the session's steps down; see `offbeat.attach`.
        options: of Lightning's `DDPStrategy` that say how processes are started.

    Attributes:
        offbeat_session: while a fit is under way.

    Raises:
        ConfigError: there is no such strategy, or an option is of DDP's own exchange.
    """

    def __init__(self, offbeat_strategy: Strategy | str, **options: Any) -> None:
        _check_options(options)
        super().__init__(offbeat_strategy, **options)
        self._loaded_from: Path | None = None

    @override
    def configure_ddp(self) -> None:
        """The model stays as it is."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        self._save_state(checkpoint, filepath)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        self._loaded_from = state_directory(os.path.realpath(checkpoint_path))
        return super().load_checkpoint(checkpoint_path, weights_only=weights_only)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self._running is not None and self._loaded_from is not None and STATE_KEY in checkpoint:
            load_state(self._loaded_from, self._running.session, tag=checkpoint[STATE_KEY])


class OffbeatModelParallelStrategy(_FitStrategy, ModelParallelStrategy):
    """A strategy of offbeat's between islands, for a model that `fully_shard` divides inside each
    of them, with Lightning's Trainer.

    It takes the place of `ModelParallelStrategy`, and `configure_model` stays as it is:
    `self.device_mesh["data_parallel"]` are the ranks of one island.

    Args:
        offbeat_strategy: such as `offbeat.LocalSGD()`, or a name such as "localsgd".
        data_parallel_size: the ranks of an island; "auto": those of a node.
        recorder: writes the session's steps down; see `offbeat.attach`.
        options: `process_group_backend` and `timeout`, of Lightning's strategy.

    Attributes:
        offbeat_session: while a fit is under way.

    Raises:
        ConfigError: there is no such strategy or option.
    """

    def __init__(
        self,
        offbeat_strategy: Strategy | str,
        *,
        data_parallel_size: int | Literal["auto"] = "auto",
        recorder: SessionRecorder | None = None,
        **options: Any,
    ) -> None:
        if foreign := sorted(set(options) - {"process_group_backend", "timeout"}):
            raise ConfigError(
                f"{', '.join(foreign)} is no option here: an island is divided by fully_shard()"
                " alone, and each rank saves its shards; there are data_parallel_size,"
                " process_group_backend and timeout"
            )
        super().__init__(offbeat_strategy, recorder=recorder, **options)
        self._num_shards = data_parallel_size

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        num_shards = self.num_processes if self._num_shards == "auto" else self._num_shards
        if self.world_size % num_shards:
            raise ConfigError(
                f"{self.world_size} ranks cannot be islands of {num_shards}; start a multiple of"
                " that, or pass another data_parallel_size"
            )
        self._device_mesh = self.lightning_module._device_mesh = init_device_mesh(
            self.root_device.type,
            (self.world_size // num_shards, num_shards, 1),
            mesh_dim_names=("replicate", "data_parallel", "tensor_parallel"),
        )

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every rank of every island has samples of its own."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @override
    def _attached(self) -> tuple[torch.nn.Module, DeviceMesh | None]:
        """The module that was divided, since a LightningModule itself mostly is not."""
        module: torch.nn.Module = self.lightning_module
        divided: Any = next(
            (each for each in module.modules() if isinstance(each, FSDPModule)), module
        )
        known = {id(parameter) for parameter in divided.parameters()}
        if not known.issuperset(map(id, module.parameters())):
            raise UnsupportedError(
                "the LightningModule has parameters outside of the first module that"
                " fully_shard() has divided; put all of them into one module, and call"
                " fully_shard() on that one after its blocks, in configure_model"
            )
        return divided, self.device_mesh["replicate"]

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """The files of Lightning's, in whose place this writes. Of what has one name on all islands
        the first one's is written: each shard would else be that of whichever island has least to
        write, and they may differ.
        """
        if storage_options is not None:
            raise ConfigError(
                "storage_options are for a file that one rank writes, and each rank writes its"
                " shards; leave them out"
            )
        path = Path(self.broadcast(filepath))
        self._save_state(checkpoint, path)
        parts = {"state_dict": checkpoint.pop("state_dict")}
        for number, state in enumerate(checkpoint.pop("optimizer_states", [])):
            parts[f"optimizer_{number}"] = state
        if path.is_file():
            path.unlink()
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        dcp.save(parts, checkpoint_id=path, planner=planner)
        if self.global_rank == 0:
            self.checkpoint_io.save_checkpoint(checkpoint, path / _REST)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        if self._running is not None:
            make_state(self._running.model, self.optimizers[0])
        rest = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        if self._running is not None and STATE_KEY in rest:
            directory = state_directory(os.path.realpath(checkpoint_path))
            load_state(directory, self._running.session, tag=rest[STATE_KEY])
        return rest


class OffbeatFabricStrategy(FabricDDPStrategy):
    """A strategy of offbeat's for Lightning's Fabric.

    `fabric.setup` attaches a session; `fabric.strategy.close()` at the end makes the model the mean
    of all ranks', with strategies that average weights.

    Args:
        offbeat_strategy: such as `offbeat.GTopK(density=0.001)`, or a name such as "gtopk".
        recorder: writes the session's steps down; see `offbeat.attach`.
        options: of Fabric's `DDPStrategy` that say how processes are started.

    Attributes:
        offbeat_sessions: one for each module that was set up with its optimizer.

    Raises:
        ConfigError: there is no such strategy, or an option is of DDP's own exchange.
    """

    def __init__(
        self,
        offbeat_strategy: Strategy | str,
        *,
        recorder: SessionRecorder | None = None,
        **options: Any,
    ) -> None:
        _check_options(options)
        super().__init__(**options)
        self._strategy = as_strategy(offbeat_strategy)
        self._recorder = recorder
        self._modules: list[torch.nn.Module] = []
        self._running: list[FrameworkSession] = []
        self._backward_sync_control = self

    @property
    def offbeat_sessions(self) -> list[Session]:
        return [running.session for running in self._running]

    @override
    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        self._modules.append(module)
        return module

    @override
    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}

        def shared(module: torch.nn.Module) -> int:
            return sum(id(parameter) in stepped for parameter in module.parameters())

        module = max(self._modules, key=shared, default=None)
        if module is None or not shared(module):
            raise ConfigError(
                "the optimizer has no parameters of a module that was set up; call fabric.setup"
                " with the module and its optimizer"
            )
        scaler = getattr(self.precision, "scaler", None)
        running = FrameworkSession(
            module, optimizer, self._strategy, scaler=scaler, recorder=self._recorder
        )
        self._running.append(running)
        return optimizer

    def no_backward_sync(
        self, module: torch.nn.Module, enabled: bool
    ) -> AbstractContextManager[None]:
        """What `fabric.no_backward_sync` does."""
        running = self._of(module)
        return running.session.no_sync() if enabled and running is not None else nullcontext()

    @override
    def clip_gradients_norm(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        running = self._of(module)
        if running is None or norm_type != 2.0:
            norm: torch.Tensor = super().clip_gradients_norm(
                module, optimizer, max_norm, norm_type, error_if_nonfinite
            )
            return norm
        self.precision.unscale_gradients(optimizer)
        return running.session.clip_grad_norm_(max_norm)

    @override
    def clip_gradients_value(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, clip_val: float
    ) -> None:
        running = self._of(module)
        if running is not None:
            running.session.clips_by_value = True
        refuse_clipping_by_value(self._strategy if running is None else running.session.acting)
        super().clip_gradients_value(module, optimizer, clip_val)

    @override
    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        if self._running:
            tag = self.broadcast(secrets.token_hex(8))
            state = {**state, STATE_KEY: tag}
            for directory, running in self._directories(path):
                save_state(directory, running.session.state_dict(), tag=tag)
        super().save_checkpoint(path, state, storage_options, filter)

    @override
    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        rest: dict[str, Any] = super().load_checkpoint(path, state, strict, weights_only)
        tag = rest.pop(STATE_KEY, None)
        if tag is not None and state:
            for directory, running in self._directories(path):
                load_state(directory, running.session, tag=tag)
        elif tag is not None and self._running:
            warnings.warn(
                f"fabric.load was given no state to fill, so {self._strategy.name} goes on without"
                " the one that it had at the checkpoint; call fabric.load(path, state) with what"
                " fabric.save was given",
                OffbeatWarning,
                stacklevel=2,
            )
        return rest

    def close(self) -> None:
        """End the sessions: each module is the mean of all ranks'. Collective."""
        while self._running:
            self._running.pop(0).close()

    @override
    def teardown(self) -> None:
        self.close()
        super().teardown()

    def _of(self, module: torch.nn.Module) -> FrameworkSession | None:
        return next((running for running in self._running if running.model is module), None)

    def _directories(self, path: Any) -> Iterator[tuple[Path, FrameworkSession]]:
        for number, running in enumerate(self._running):
            yield state_directory(path) / f"model-{number}", running


def _check_options(options: Mapping[str, Any]) -> None:
    if foreign := sorted(set(options) - _OF_DDP):
        raise ConfigError(
            f"{', '.join(foreign)} is no option here: it is of DistributedDataParallel, whose place"
            f" offbeat takes; there are {', '.join(sorted(_OF_DDP))}"
        )


for _name in names_for_frameworks():
    StrategyRegistry.register(
        f"offbeat_{_name}", OffbeatStrategy, description=f"offbeat: {_name}", offbeat_strategy=_name
    )
    FABRIC_STRATEGIES.register(
        f"offbeat_{_name}",
        OffbeatFabricStrategy,
        description=f"offbeat: {_name}",
        offbeat_strategy=_name,
    )
