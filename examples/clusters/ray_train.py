"""Ray Train starts the workers and makes their process group; offbeat exchanges in the place of
DistributedDataParallel. Only the lines marked with a comment differ from a script with DDP.

    pip install 'offbeat[lab]' 'ray[train]'
    python examples/clusters/ray_train.py --workers 2 --density 0.05

Ray runs on this machine unless `RAY_ADDRESS` names a cluster.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.session import checkpoint


def read_digits() -> tuple[TensorDataset, TensorDataset]:
    """Training and held-out images, of shape (64,) and in [0, 1], with their labels."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(images).float() / 16, torch.from_numpy(labels).long()
    held_out = torch.arange(len(y)) % 5 == 0
    return TensorDataset(x[~held_out], y[~held_out]), TensorDataset(x[held_out], y[held_out])


def train_worker(config: dict[str, Any]) -> None:
    """What each of Ray's workers does."""
    train_set, test_set = read_digits()
    x_test, y_test = test_set.tensors
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    model = ray.train.torch.prepare_model(model, parallel_strategy=None)  # not "ddp"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = ray.train.torch.prepare_data_loader(DataLoader(train_set, batch_size=32, shuffle=True))

    strategy = offbeat.GTopK(density=config["density"])  # new
    with offbeat.attach(model, optimizer, strategy) as session:  # new
        begin = restore(model, optimizer, session)
        for epoch in range(begin, config["epochs"]):
            if session.world_size > 1:
                loader.sampler.set_epoch(epoch)
            for x, y in loader:
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                accuracy = (model(x_test).argmax(dim=1) == y_test).float().mean().item()
            checksum = sum(p.detach().double().sum().item() for p in model.parameters())
            metrics = {
                "accuracy": accuracy,
                "bytes_sent": session.stats.bytes_sent,
                "same_model": len(set(session.gather(checksum))) == 1,
            }
            with tempfile.TemporaryDirectory() as directory:
                save(Path(directory), epoch + 1, model, optimizer, session)
                written = ray.train.Checkpoint.from_directory(directory)
                ray.train.report(metrics, checkpoint=written)


def save(
    directory: Path,
    epochs: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    session: offbeat.Session,
) -> None:
    """Write what this rank needs to go on after `epochs`; what a rank owes is different on each."""
    parts = {"model": model, "optimizer": optimizer, "session": session}
    state = {name: part.state_dict() for name, part in parts.items()}
    checkpoint.save(directory, f"rank-{session.rank}", {**state, "epochs": epochs})


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, session: offbeat.Session) -> int:
    """Read the last checkpoint, if Ray has started the workers again; returns epochs done."""
    last = ray.train.get_checkpoint()
    if last is None:
        return 0
    with last.as_directory() as directory:
        state: Any = checkpoint.load(Path(directory), f"rank-{session.rank}").tree
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    session.load_state_dict(state["session"])
    return int(state["epochs"])


def main(workers: int, epochs: int, density: float, storage: Path) -> None:
    trainer = ray.train.torch.TorchTrainer(
        train_worker,
        train_loop_config={"epochs": epochs, "density": density},
        torch_config=ray.train.torch.TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        run_config=ray.train.RunConfig(name="offbeat", storage_path=str(storage.resolve())),
    )
    last = trainer.fit().metrics
    print(f"{workers} workers, {epochs} epochs: accuracy {last['accuracy']:.3f}")
    print(f"rank 0 sent {last['bytes_sent'] / 1e6:.1f} MB")
    print(f"all workers have the same model: {last['same_model']}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--density", type=float, default=0.05)
    parser.add_argument("--storage", type=Path, default=Path("runs/ray"))
    arguments = parser.parse_args()
    main(arguments.workers, arguments.epochs, arguments.density, arguments.storage)
