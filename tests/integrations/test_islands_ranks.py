"""Models that the frameworks divide by `fully_shard`, on 2 islands of 2 real ranks each."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import lightning
import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from lightning.fabric.plugins.environments import LightningEnvironment
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import offbeat
from integrations_support.ranks import as_launched, only_ours_are_errors
from integrations_support.regression import Line, Regression
from offbeat.errors import ConfigError, UnsupportedError
from offbeat.integrations.accelerate import IslandsConfig, across_islands, attach
from offbeat.integrations.lightning import OffbeatModelParallelStrategy
from offbeat.integrations.transformers import OffbeatCallback
from ranks_support.launch import RunRanks

pytestmark = pytest.mark.ranks

MOMENTUM = {"lr": 0.02, "momentum": 0.5}


def vector(module: torch.nn.Module) -> list[float]:
    """All parameters. Collective in an island."""
    found = []
    for parameter in module.parameters():
        whole: Any = parameter.detach()
        found.append((whole.full_tensor() if hasattr(whole, "full_tensor") else whole).reshape(-1))
    return torch.cat(found).tolist()


class Module(lightning.LightningModule):
    def __init__(self, divides: bool) -> None:
        super().__init__()
        self.model = Regression()
        self.divides = divides
        self.seen: dict[str, Any] = {}

    def configure_model(self) -> None:
        if self.divides:
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch)["loss"]
        return loss

    def validation_step(self, batch: Any) -> None:
        self.seen["validated"] = vector(self)

    def on_train_end(self) -> None:
        session = getattr(self.trainer.strategy, "offbeat_session", None)
        if session is not None:
            self.seen |= {"exchanges": session.stats.exchanges, "steps": session.stats.steps}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), **MOMENTUM)


def with_lightning(rank: int, world_size: int, *, directory: str) -> dict[str, Any]:
    as_launched(rank, world_size)
    only_ours_are_errors()
    root = Path(directory)

    def fit(strategy: Any, *, resume: Path | None = None, **options: Any) -> dict[str, Any]:
        trainer = lightning.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=4,
            plugins=[LightningEnvironment()],
            default_root_dir=root,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            **{"max_epochs": 1, "enable_checkpointing": False, **options},
        )
        module = Module(divides=strategy != "ddp")
        loader = DataLoader(Line(), batch_size=4)
        trainer.fit(module, loader, loader, ckpt_path=resume)
        return {"model": vector(module), **module.seen}

    def over_islands(strategy: Any) -> OffbeatModelParallelStrategy:
        return OffbeatModelParallelStrategy(strategy, data_parallel_size=2)

    found: dict[str, Any] = {}
    clipped = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}
    found["ddp"] = fit("ddp", **clipped)
    found["allreduce"] = fit(over_islands("allreduce"), **clipped)
    found["localsgd"] = fit(over_islands(offbeat.LocalSGD(period=4)))
    for strategy in (
        offbeat.GTopK(density=0.05, collective="tree"),
        offbeat.LocalSGD(period=3, outer="diloco"),
    ):
        name = strategy.name
        found[f"{name} at once"] = fit(over_islands(strategy), max_epochs=2)
        saving = lightning.pytorch.callbacks.ModelCheckpoint(root / name, filename="first")
        with patch("torch.distributed.checkpoint.save", wraps=dcp.save) as saves:
            found[f"{name} half"] = fit(
                over_islands(strategy), callbacks=[saving], enable_checkpointing=True
            )
        found[f"{name} written"] = [
            str(call.kwargs["checkpoint_id"]) for call in saves.call_args_list
        ]
        found[f"{name} resumed"] = fit(
            over_islands(strategy), max_epochs=2, resume=root / name / "first.ckpt"
        )
    try:
        fit(OffbeatModelParallelStrategy("allreduce", data_parallel_size=3))
    except ConfigError as error:
        found["refused"] = str(error)
    return found


def test_lightning(run_ranks: RunRanks, tmp_path: Path) -> None:
    first, *others = run_ranks(with_lightning, 4, timeout_s=400, directory=str(tmp_path))
    assert first["allreduce"]["model"] == pytest.approx(first["ddp"]["model"], abs=1e-6)
    assert first["allreduce"]["exchanges"] == first["allreduce"]["steps"] == 2
    for other in others:
        assert other["localsgd"]["model"] == first["localsgd"]["model"]
        assert other["localsgd"]["validated"] == first["localsgd"]["validated"]
        assert other["localsgd resumed"]["model"] == first["localsgd resumed"]["model"]
    assert first["gtopk resumed"]["model"] == first["gtopk at once"]["model"]
    for name in ("gtopk", "localsgd"):
        assert first[f"{name} half"]["model"] != first[f"{name} resumed"]["model"]
        # A death between two writes would leave shards of different islands.
        written = first[f"{name} written"]
        assert str(tmp_path / name / "first.ckpt") in written
        assert len(set(written)) == len(written)
    assert "cannot be islands of 3" in first["refused"]


def pretends_to_have_devices() -> None:
    """Accelerate divides a model only where ranks have devices, and on CPUs takes no heed of the
    plugin (`AcceleratorState.__init__`) or refuses the configuration
    (`ParallelismConfig._validate_accelerator`).
    """
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def with_accelerate(rank: int, world_size: int, *, directory: str) -> dict[str, Any]:
    as_launched(rank, world_size)
    os.environ["ACCELERATE_USE_CPU"] = "1"
    only_ours_are_errors()

    def train(strategy: Any, first: int, last: int, **options: Any) -> dict[str, Any]:
        pretends_to_have_devices()
        config = options.get("config", IslandsConfig)
        accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=2,
            fsdp_plugin=FullyShardedDataParallelPlugin(
                fsdp_version=2,
                state_dict_type=options.get("kind", "FULL_STATE_DICT"),
            ),
            parallelism_config=config(dp_replicate_size=2, dp_shard_size=2),
        )
        model = Regression()
        optimizer = torch.optim.SGD(model.parameters(), **MOMENTUM)
        loader = DataLoader(Line(), batch_size=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        running = None if strategy is None else attach(accelerator, model, optimizer, strategy)
        if options.get("load"):
            accelerator.load_state(f"{directory}/state")
        for batch in list(loader)[2 * first : 2 * last]:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                if accelerator.sync_gradients and options.get("clip"):
                    accelerator.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()
        found: dict[str, Any] = {}
        if running is not None:
            try:
                accelerator.save_state(f"{directory}/state")
            except UnsupportedError as error:
                found["refused"] = str(error)
            running.close()
        return {"model": vector(model), **found}

    found = {
        "hsdp": train(None, 0, 3, config=ParallelismConfig, clip=True),
        "allreduce": train("allreduce", 0, 3, clip=True),
        "localsgd": train(offbeat.LocalSGD(period=2), 0, 3, kind="SHARDED_STATE_DICT"),
    }
    gtopk = offbeat.GTopK(density=0.05, collective="tree", momentum_correction=None)
    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        found[f"{kind} at once"] = train(gtopk, 0, 3, kind=kind)
        train(gtopk, 0, 1, kind=kind)
        found[f"{kind} resumed"] = train(gtopk, 1, 3, kind=kind, load=True)
    try:
        train("allreduce", 0, 1, config=ParallelismConfig)
    except UnsupportedError as error:
        found["refused"] = str(error)
    return found


def test_accelerate(run_ranks: RunRanks, tmp_path: Path) -> None:
    first, *others = run_ranks(with_accelerate, 4, timeout_s=400, directory=str(tmp_path))
    assert first["allreduce"]["model"] == pytest.approx(first["hsdp"]["model"], abs=1e-6)
    assert all(other["localsgd"]["model"] == first["localsgd"]["model"] for other in others)
    assert "FULL_STATE_DICT" in first["localsgd"]["refused"]
    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        assert first[f"{kind} resumed"]["model"] == first[f"{kind} at once"]["model"], kind
    assert "IslandsConfig" in first["refused"]


def test_fsdp1_of_accelerate_is_refused() -> None:
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=1))
    with pytest.raises(UnsupportedError, match="fsdp_version=2"):
        across_islands(Regression(), state, offbeat.AllReduce())


def with_transformers(rank: int, world_size: int, *, directory: str) -> dict[str, Any]:
    as_launched(rank, world_size)
    os.environ["ACCELERATE_USE_CPU"] = "1"
    only_ours_are_errors()

    def fit(strategy: Any, out: str, *, resume: bool = False, **options: Any) -> dict[str, Any]:
        pretends_to_have_devices()
        config = IslandsConfig if strategy is not None else ParallelismConfig
        arguments = TrainingArguments(
            output_dir=f"{directory}/{out}",
            use_cpu=True,
            ddp_backend="gloo",
            optim="adamw_torch",  # PyTorch loads no state that has no tensor
            learning_rate=0.01,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            lr_scheduler_type="constant",
            report_to=[],
            disable_tqdm=True,
            fsdp=True,
            fsdp_config={"version": 2},
            parallelism_config=config(dp_replicate_size=2, dp_shard_size=2),
            **{"save_strategy": "no", "max_steps": 6, **options},
        )
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        trainer = Trainer(
            Regression(),
            arguments,
            train_dataset=Line(),
            eval_dataset=Line(),
            callbacks=[] if strategy is None else [OffbeatCallback(strategy)],
        )
        trainer.train(resume_from_checkpoint=resume or None)
        return {"model": vector(trainer.model), "loss": trainer.evaluate()["eval_loss"]}

    gtopk = offbeat.GTopK(density=0.05, collective="tree", momentum_correction=None)
    saving = {"save_strategy": "steps", "save_steps": 3}
    return {
        "hsdp": fit(None, "hsdp"),
        "allreduce": fit("allreduce", "allreduce"),
        "localsgd": fit(offbeat.LocalSGD(period=4), "local", eval_strategy="steps", eval_steps=3),
        "gtopk": fit(gtopk, "once", **saving),
        "half": fit(gtopk, "halves", max_steps=3, **saving),
        "resumed": fit(gtopk, "halves", resume=True),
    }


def test_transformers(run_ranks: RunRanks, tmp_path: Path) -> None:
    first, *others = run_ranks(with_transformers, 4, timeout_s=400, directory=str(tmp_path))
    assert first["allreduce"]["model"] == pytest.approx(first["hsdp"]["model"], abs=1e-6)
    assert first["allreduce"]["loss"] == pytest.approx(first["hsdp"]["loss"], abs=1e-5)
    assert all(other["localsgd"] == first["localsgd"] for other in others)
    assert first["resumed"]["model"] == first["gtopk"]["model"] != first["half"]["model"]
