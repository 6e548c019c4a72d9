"""Lightning's Trainer and Fabric on two real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from integrations_support.ranks import as_launched, only_ours_are_errors
from offbeat.errors import OffbeatError, OffbeatWarning, UnsupportedError
from offbeat.integrations.lightning import OffbeatFabricStrategy, OffbeatStrategy
from ranks_support.launch import RunRanks

pytestmark = pytest.mark.ranks

BATCHES = 12


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
        )
        self.seen: dict[str, Any] = {}

    def training_step(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, batch: Any) -> None:
        self.seen["validated"] = vector(self)

    def on_train_end(self) -> None:
        session = getattr(self.trainer.strategy, "offbeat_session", None)
        if session is not None:
            self.seen["exchanges"] = session.stats.exchanges
            self.seen["steps"] = session.stats.steps

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.5)


def data() -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(BATCHES * 2 * 4, 8, generator=draw)
    return DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=4)


def vector(module: torch.nn.Module) -> list[float]:
    return torch.nn.utils.parameters_to_vector(module.parameters()).tolist()


def fit(
    strategy: Any, directory: Path, *, resume: Path | None = None, **options: Any
) -> Regression:
    trainer = lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        plugins=[LightningEnvironment()],
        default_root_dir=directory,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, "enable_checkpointing": False, **options},
    )
    module = Regression()
    trainer.fit(module, data(), ckpt_path=resume)
    return module


def in_trainer(rank: int, world_size: int, *, directory: str) -> dict[str, Any]:
    as_launched(rank, world_size)
    only_ours_are_errors()
    root, found = Path(directory), {}
    clipped = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}
    found["ddp"] = vector(fit("ddp", root, **clipped))
    for name in ("offbeat_allreduce", "offbeat_gtopk"):
        module = fit(name, root, **clipped)
        found[name] = {"model": vector(module), **module.seen}
    validated = fit(OffbeatStrategy(offbeat.LocalSGD(period=5)), root)
    found["localsgd"] = vector(validated)
    by_value = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}
    with pytest.raises(UnsupportedError, match="clip by norm"):
        fit("offbeat_gtopk", root, **by_value)

    # Two epochs at once, and with a stop between.
    def gtopk() -> OffbeatStrategy:
        return OffbeatStrategy(offbeat.GTopK(density=0.05, collective="tree"))

    found["at once"] = vector(fit(gtopk(), root, max_epochs=2))
    saving = lightning.pytorch.callbacks.ModelCheckpoint(root / "saved", filename="first")
    fit(gtopk(), root, callbacks=[saving], enable_checkpointing=True)
    found["files"] = sorted(path.name for path in (root / "saved").rglob("*.*"))
    found["resumed"] = vector(
        fit(gtopk(), root, max_epochs=2, resume=root / "saved" / "first.ckpt")
    )
    return found


def test_trainer(run_ranks: RunRanks, tmp_path: Path) -> None:
    first, second = run_ranks(in_trainer, 2, timeout_s=270, directory=str(tmp_path))
    allreduce, gtopk = first["offbeat_allreduce"], first["offbeat_gtopk"]
    assert allreduce["model"] == pytest.approx(first["ddp"], abs=1e-6)
    assert allreduce["exchanges"] == allreduce["steps"] == BATCHES // 3
    assert gtopk["exchanges"] == gtopk["steps"] == BATCHES // 3
    assert first["localsgd"] == second["localsgd"]
    assert {"first.ckpt", "rank-00000.safetensors", "rank-00001.safetensors"} <= set(first["files"])
    assert first["resumed"] == first["at once"] == second["resumed"]


def in_fabric(rank: int, world_size: int, *, directory: str) -> dict[str, Any]:
    as_launched(rank, world_size)
    only_ours_are_errors()
    path = Path(directory) / "fabric.ckpt"

    def train(strategy: Any, first: int, last: int, load: bool = False) -> dict[str, Any]:
        fabric = lightning.Fabric(
            strategy=strategy, accelerator="cpu", devices=2, plugins=[LightningEnvironment()]
        )
        fabric.launch()
        module = Regression().net
        optimizer = torch.optim.SGD(module.parameters(), lr=0.02, momentum=0.5)
        module, optimizer = fabric.setup(module, optimizer)
        state = {"module": module, "optimizer": optimizer}
        if load:
            with pytest.warns(OffbeatWarning, match="given no state to fill"):
                fabric.load(path)
            assert fabric.load(path, state) == {}
            with pytest.raises(UnsupportedError, match="clip by norm"):
                fabric.clip_gradients(module, optimizer, clip_val=0.05)
        batches = list(fabric.setup_dataloaders(data()))
        for step in range(first, last):
            for part in range(3):
                x, y = batches[(3 * step + part) % len(batches)]
                with fabric.no_backward_sync(module, enabled=part < 2):
                    fabric.backward(torch.nn.functional.mse_loss(module(x), y))
            fabric.clip_gradients(module, optimizer, max_norm=0.05)
            optimizer.step()
            optimizer.zero_grad()
        fabric.save(path, state)
        found: dict[str, Any] = {"model": vector(module)}
        if isinstance(fabric.strategy, OffbeatFabricStrategy):
            found["exchanges"] = fabric.strategy.offbeat_sessions[0].stats.exchanges
            fabric.strategy.close()
        return found

    def gtopk() -> OffbeatFabricStrategy:
        return OffbeatFabricStrategy(offbeat.GTopK(density=0.05, collective="tree", clip_norm=0.05))

    return {
        "ddp": train("ddp", 0, 6),
        "allreduce": train("offbeat_allreduce", 0, 6),
        "at once": train(gtopk(), 0, 6),
        "half": train(gtopk(), 0, 3),
        "resumed": train(gtopk(), 3, 6, load=True),
    }


def test_fabric(run_ranks: RunRanks, tmp_path: Path) -> None:
    found, _ = run_ranks(in_fabric, 2, timeout_s=270, directory=str(tmp_path))
    assert found["allreduce"]["model"] == pytest.approx(found["ddp"]["model"], abs=1e-6)
    assert found["allreduce"]["exchanges"] == 6
    assert found["resumed"]["model"] == found["at once"]["model"] != found["half"]["model"]


class ByValue(Regression):
    """Clips by itself, as modules with manual optimization do."""

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="value")


def by_value_in_the_module(rank: int, world_size: int, *, directory: str) -> None:
    as_launched(rank, world_size)
    only_ours_are_errors()
    trainer = lightning.Trainer(
        strategy="offbeat_gtopk",
        accelerator="cpu",
        devices=2,
        plugins=[LightningEnvironment()],
        default_root_dir=directory,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(OffbeatError, match="clip by norm"):
        trainer.fit(ByValue(), data())


def test_a_module_that_clips_by_value_itself_is_refused(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    run_ranks(by_value_in_the_module, 2, timeout_s=270, directory=str(tmp_path))
