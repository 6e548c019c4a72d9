"""The K-FAC strategies' step times against each other: factors and inverses in every step, four workers, an imitated link.

All train in the same processes, by turns, so that whatever disturbs the machine disturbs all. The link is imitated in user
space (`transport.wrappers.Delaying`). The bound is arithmetic: D-KFAC's own step without what it waits for factors, and without
the inversions that another rank could do for it.

    python benchmarks/kfac_schedules.py [--json] [--turns 12]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import permutations

import torch
import torch.distributed as dist
from torch import nn

import offbeat
from _measure import Ratio, print_rows, ratio
from _ranks import run_ranks
from offbeat.exchange.factors import FactorExchange
from offbeat.session import Session, attach_through
from offbeat.strategies.kfac import KFACStrategy
from offbeat.transport.driver import Driver
from offbeat.transport.wrappers.delaying import Delaying

WORLD_SIZE = 4
LATENCY_S = 1e-4
RATES_BIT_PER_S = (1e9, 2.5e8)
WARM_UP = 6
"""Steps before any is timed: groups are planned in the fourth."""

EVERY_STEP = {"factor_interval": 1, "inverse_interval": 1}
STRATEGIES: dict[str, KFACStrategy] = {
    "dkfac": offbeat.DKFAC(**EVERY_STEP),
    "mpdkfac": offbeat.MPDKFAC(**EVERY_STEP),
    "spdkfac": offbeat.SPDKFAC(**EVERY_STEP),
    "spdkfac unfused": offbeat.SPDKFAC(fusion="none", **EVERY_STEP),
    "spdkfac fully fused": offbeat.SPDKFAC(fusion="all", **EVERY_STEP),
}
GOALS = {"dkfac": 1.25, "mpdkfac": 1.15, "spdkfac unfused": 1.0, "spdkfac fully fused": 1.0}
"""How many times as long as SPD-KFAC's step each other one's has to be, at least."""


class Transformer(nn.Module):
    """Two small encoder layers over a sequence of 32 vectors."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(d_model=128, nhead=4, dim_feedforward=384, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.encoder(x))
        return logits


def make_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


MODELS = {"cnn": (make_cnn, (8, 3, 32, 32)), "transformer": (Transformer, (4, 32, 128))}


def part_of(session: Session) -> FactorExchange:
    return next(part for part in session._parts if isinstance(part, FactorExchange))


def measure(rank: int, world_size: int, name: str, rate_bit_per_s: float, turns: int) -> dict[str, object]:
    """Seconds of each strategy's steps, by turns, and of what D-KFAC's were spent on."""
    make, shape = MODELS[name]

    def slow(driver: Driver) -> Driver:
        return Delaying(driver, lambda d: d.num_messages * LATENCY_S + d.num_bytes * 8 / rate_bit_per_s)

    batch = torch.randn(shape, generator=torch.Generator().manual_seed(rank))
    steps_s: dict[str, list[float]] = {label: [] for label in STRATEGIES}
    orders = list(permutations(STRATEGIES))
    with ExitStack() as stack:
        models, optimizers, sessions = {}, {}, {}
        for label, strategy in STRATEGIES.items():
            torch.manual_seed(0)
            models[label] = make()
            optimizers[label] = torch.optim.SGD(models[label].parameters(), lr=1e-3)
            session = attach_through(slow, models[label], optimizers[label], strategy)
            sessions[label] = stack.enter_context(session)
        for turn in range(WARM_UP + turns):
            if turn == WARM_UP:
                before = part_of(sessions["dkfac"]).counters()
            for label in orders[turn * 7 % len(orders)]:
                dist.barrier()
                begin_s = time.perf_counter()
                models[label](batch).square().mean().backward()
                optimizers[label].step()
                optimizers[label].zero_grad()
                steps_s[label].append(time.perf_counter() - begin_s)
        after = part_of(sessions["dkfac"]).counters()
        exposed = {
            label: part_of(session).counters()["factor_wait_s"] / (WARM_UP + turns) for label, session in sessions.items()
        }
    spent = {what: (after[what] - before[what]) / turns for what in after}
    return {"steps_s": {label: times[WARM_UP:] for label, times in steps_s.items()}, "spent": spent, "exposed": exposed}


def cases(turns: int) -> Iterator[Ratio]:
    for name in MODELS:
        for rate in RATES_BIT_PER_S:
            measured = run_ranks(measure, WORLD_SIZE, name, rate, turns)
            steps_s, spent = measured["steps_s"], measured["spent"]
            usual_s = sorted(steps_s["dkfac"])[turns // 2]
            hideable_s = spent["factor_wait_s"] + spent["invert_s"] * (1 - 1 / WORLD_SIZE)
            where = f"{name}, {rate / 1e6:g} Mbit/s, {hideable_s / usual_s:.0%} of D-KFAC's step could be saved"
            for other, goal in GOALS.items():
                pairs = list(zip(steps_s[other], steps_s["spdkfac"], strict=True))
                bound = usual_s / (usual_s - hideable_s) if other == "dkfac" else float("inf")
                yield ratio(f"{other} over spdkfac, step time, {where}", pairs, at_least=goal, bound=bound)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true", help="print one JSON object per case and line")
    parser.add_argument("--turns", type=int, default=12, help="timed steps of each strategy")
    arguments = parser.parse_args()
    print_rows(cases(arguments.turns), as_json=arguments.json)
