"""Writes the checkpoints that `test_old_checkpoints.py` reads, by the code of the day.

    PYTHONPATH=src:tests python tests/golden/write_checkpoints.py DIRECTORY [FAMILY ...]

Those beside this file are of the first layout, in which parts of a session's state go by the names
of classes. They stay as they are: what users have on disk has to be read by every later version.

    FAMILY/step-00000005/      as `offbeat.session.checkpoint.write_checkpoint` leaves it
    FAMILY/expected.json       by rank: parameters after three steps more, in the same session, and
                               the samples that its loader gave out before and after
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import offbeat
from offbeat.session.checkpoint import write_checkpoint

HERE = Path(__file__).parent / "checkpoints"
WORLD_SIZE = 2
SAVED_AT, STEPS_MORE = 5, 3
NUM_SAMPLES = 40


@dataclass(frozen=True, kw_only=True)
class Family:
    """Strategies whose state has the same parts.

    Attributes:
        strategy: makes one with the options that were used; they have to stay possible.
        momentum: of the optimizer.
        loader: options of the session's loader; None trains without one.
        mega_batches: how many are trained on before the checkpoint is written, with such a loader.
        batches: how many are taken after these.
        repeats: whether three steps more end in the same numbers each time.
    """

    strategy: Callable[[], Any]
    momentum: float = 0.0
    loader: dict[str, Any] | None = None
    mega_batches: int = 0
    batches: int = SAVED_AT
    repeats: bool = True


FAMILIES: dict[str, Family] = {
    "allreduce": Family(
        strategy=lambda: offbeat.AllReduce(),
        momentum=0.9,
        loader={"batch_size": 3},
    ),
    "topk": Family(strategy=lambda: offbeat.TopK(density=0.1, selection="reuse")),
    "gtopk": Family(
        strategy=lambda: offbeat.GTopK(
            density=0.1,
            collective="reduce_scatter",
            momentum_correction=0.9,
            momentum_rule="masked",
        )
    ),
    "gtopk_auto": Family(strategy=lambda: offbeat.GTopK(density=0.1)),
    "localsgd": Family(
        strategy=lambda: offbeat.LocalSGD(period=2, optimizer_state="averaged", outer="diloco"),
        momentum=0.9,
    ),
    "postlocalsgd": Family(strategy=lambda: offbeat.LocalSGD(period=2, start_step=6), momentum=0.9),
    "dpsgd": Family(strategy=lambda: offbeat.DPSGD(), momentum=0.9),
    "sgp": Family(strategy=lambda: offbeat.SGP(), momentum=0.9),
    "crossbow": Family(strategy=lambda: offbeat.Crossbow(period=2, centre_momentum=0.5)),
    "wagma": Family(
        strategy=lambda: offbeat.WAGMA(period=4, momenta="averaged"),
        momentum=0.9,
        repeats=False,
    ),
    "adpsgd": Family(strategy=lambda: offbeat.ADPSGD(), repeats=False),
    "eagersgd": Family(strategy=lambda: offbeat.EagerSGD(period=50), repeats=False),
    "adaptive": Family(
        strategy=lambda: offbeat.AdaptiveSGD(
            mega_batch=8, batch_size=2, min_batch_size=2, max_batch_size=2, merge_momentum=0.5
        ),
        loader={},
        mega_batches=2,
        batches=1,
        repeats=False,
    ),
    "elasticsgd": Family(
        strategy=lambda: offbeat.ElasticSGD(mega_batch=8, batch_size=2),
        loader={},
        mega_batches=2,
        batches=1,
    ),
    "spdkfac": Family(
        strategy=lambda: offbeat.SPDKFAC(
            plain="BatchNorm1d",  # version 0.1 did not cover it
            factor_interval=1,
            inverse_interval=2,
            fusion="none",
            placement="rule",
        ),
        momentum=0.9,
    ),
    "dkfac_eigen": Family(
        strategy=lambda: offbeat.DKFAC(
            plain="BatchNorm1d",
            factor_interval=1,
            inverse_interval=3,
            inverse="eigen",
            exchange=offbeat.GTopK(density=0.2, collective="tree"),
        )
    ),
    "dpkfac": Family(
        strategy=lambda: offbeat.DPKFAC(plain="BatchNorm1d", factor_interval=1, inverse_interval=2)
    ),
}


class Samples:
    """Sample i is a vector drawn from i, a target, and i itself."""

    def __init__(self) -> None:
        self.x = torch.randn(NUM_SAMPLES, 3, generator=torch.Generator().manual_seed(1))
        self.y = self.x[:, :2].sin()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.x[index], self.y[index], index


def make_net(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4),
        torch.nn.BatchNorm1d(4),
        torch.nn.Tanh(),
        torch.nn.Linear(4, 2),
    )


def begin(family: Family, *, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any, Any]:
    """A net, its optimizer, a session with them, and the session's loader or None."""
    net = make_net(seed)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=family.momentum)
    session = offbeat.attach(net, optimizer, family.strategy())
    loader = None if family.loader is None else session.loader(Samples(), seed=3, **family.loader)
    return net, optimizer, session, loader


def batch_of(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(100 * step + rank))
    return x, x[:, :2].sin()


def train_step(
    net: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    x: torch.Tensor,
    y: torch.Tensor,
) -> None:
    torch.nn.functional.mse_loss(net(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def train(
    net: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Any,
    *,
    rank: int,
    begin: int,
    num_steps: int | None,
) -> list[int]:
    """So many steps, all there are if None. The samples that were seen, where `batches` says so."""
    seen: list[int] = []
    step = begin
    while num_steps is None or step < begin + num_steps:
        if batches is None:
            x, y = batch_of(rank, step)
        elif (batch := next(batches, None)) is not None:
            x, y = batch[:2]
            seen += batch[2].tolist()
        else:
            break
        train_step(net, optimizer, x, y)
        step += 1
    return seen


def parameters_of(net: torch.nn.Module) -> list[float]:
    return [value for p in net.parameters() for value in p.detach().flatten().tolist()]


def write(rank: int, world_size: int, *, family: str, root: str) -> None:
    """What each rank does."""
    how, directory = FAMILIES[family], Path(root) / family
    net, optimizer, session, loader = begin(how, seed=rank)
    with session:
        before: list[int] = []
        for _ in range(how.mega_batches):
            batches = iter(loader.one_mega_batch())
            before += train(net, optimizer, batches, rank=rank, begin=0, num_steps=None)
        batches = None if loader is None else iter(loader)
        before += train(net, optimizer, batches, rank=rank, begin=0, num_steps=how.batches)
        if family == "eagersgd":  # what is owed depends on who came first: put something there
            state = session.state_dict()
            for part in state["parts"].values():
                for number, tensor in enumerate(part["additive"].values()):
                    tensor.fill_((rank + 1) / (number + 4))
            session.load_state_dict(state)
        tree = {
            "model": net.state_dict(),
            "optimizer": optimizer.state_dict(),
            "session": session.state_dict(),
        }
        write_checkpoint(
            directory,
            tree,
            step=SAVED_AT,
            rank=rank,
            world_size=world_size,
            barrier=dist.barrier,
        )
        num_steps = STEPS_MORE if loader is None else None
        after = train(net, optimizer, batches, rank=rank, begin=SAVED_AT, num_steps=num_steps)
        session.finish()
        mine = {"parameters": parameters_of(net), "seen_before": before, "seen_after": after}
        if not how.repeats:
            del mine["parameters"]
    (directory / f"expected-{rank}.json").write_text(json.dumps(mine))
    dist.barrier()
    if rank == 0:
        paths = [directory / f"expected-{other}.json" for other in range(world_size)]
        expected = [json.loads(path.read_text()) for path in paths]
        (directory / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
        for path in paths:
            path.unlink()


def main(root: str, *families: str) -> None:
    from ranks_support.launch import launch
    from ranks_support.templates import Templates

    templates = Templates()
    try:
        for family in families or FAMILIES:
            with tempfile.TemporaryDirectory() as directory:
                launch(
                    write,
                    WORLD_SIZE,
                    templates=templates,
                    directory=Path(directory),
                    timeout_s=60.0,
                    may_die=(),
                    arguments={"family": family, "root": str(Path(root).absolute())},
                )
    finally:
        templates.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
