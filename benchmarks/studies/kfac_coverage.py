"""What K-FAC covers of ten public architectures, what that costs in bytes, and how much memory it
takes.

Each architecture is counted in its published size, on the meta device: parameters, the share of
them that K-FAC covers, seconds to find the layers and to plan messages, owners and their order for
four workers, memory of averages, inverses and messages, and bytes that a worker sends in a step at
the default intervals, beside those of the gradients. Plans need costs, which cannot be measured
without tensors: a link of 1 Gbit/s with 0.2 ms latency, inversions at 20 GFLOP/s, and a factor
every millisecond are assumed.

The small model of each is then trained on one fixed batch of 16: the table shows the loss before
the first step and after the last one, by the defaults of SPDKFAC and by SGD with the same learning
rate and momentum.

The last table has the peak resident memory of a process that trains ResNet-18 on 8 images of 64 x
64, one worker, three steps.

    python benchmarks/studies/kfac_coverage.py [--json] [--results benchmarks/results]
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

import _benchmarks  # noqa: F401
import offbeat
from _measure import Row, add_output_options, present
from _models.architectures import ARCHITECTURES, Architecture
from _ranks import run_ranks
from _results import Figure
from offbeat.arithmetic.costs import Channel, LinkCost
from offbeat.kfac.blocks import slots_of
from offbeat.kfac.costs import equivalent_dim
from offbeat.kfac.placement import InverseCosts
from offbeat.kfac.plans import FactorCosts, PlanInputs, inversion_order
from offbeat.kfac.survey import percent, survey
from offbeat.strategies.base import Strategy
from offbeat_lab.plan.profile import PolynomialInversion

WORLD_SIZE = 4
LINK = LinkCost(alpha_s=2e-4, beta_s_per_byte=8e-9)
INVERSION = PolynomialInversion(constant_s=1e-5, square_s=0.0, cube_s=1 / 20e9)
SECONDS_BETWEEN_FACTORS = 1e-3
NUM_STEPS, LEARNING_RATE = 60, 0.02
GOAL_COVERED, MUST_COVER = 0.95, ("GPT-2", "Llama-2 7B", "ViT-B/16", "ResNet-18", "ResNet-50")
GOAL_MEMORY_GB = 1.0


def counted(name: str, architecture: Architecture) -> Iterator[Row]:
    strategy = offbeat.SPDKFAC()
    with torch.device("meta"):
        model = architecture.published()
    began_s = time.perf_counter()
    found = survey(model, strategy.curvature)
    slots = slots_of(found.blocks)
    inputs = PlanInputs(
        world_size=WORLD_SIZE,
        same_devices=True,
        dims=[equivalent_dim(slot.shape) for slot in slots],
        sizes_bytes=[slot.size_bytes for slot in slots],
        kinds=[(slot.dtype, slot.device) for slot in slots],
        costs=FactorCosts(
            all_reduce=LINK,
            inverse=InverseCosts(
                inversion=INVERSION, broadcast=Channel(link=LINK, gap_s=LINK.alpha_s), fused=True
            ),
        ),
        # A in the forward pass, G in the backward pass
        ready_s=[
            SECONDS_BETWEEN_FACTORS
            * (slot.index if slot.side == "input" else 2 * len(slots) - slot.index)
            for slot in slots
        ],
    )
    plan = strategy.planner.plan(inputs)
    inversion_order(plan, inputs, pairs=strategy.curvature.pi)
    planned_s = time.perf_counter() - began_s

    num = sum(parameter.numel() for parameter in model.parameters())
    if num != architecture.num_parameters:
        raise SystemExit(
            f"{name} has {num:,} parameters, published are {architecture.num_parameters:,}"
        )
    share = 2 * (WORLD_SIZE - 1) / WORLD_SIZE
    factors = sum(slot.size_bytes for slot in slots)
    inverses = [4 * slot.shape.joined.num_elements for slot in slots]
    sent = sum(size for size, owner in zip(inverses, plan.owners, strict=True) if owner is not None)
    a_step = (
        share * factors / strategy.factor_interval
        + (WORLD_SIZE - 1) / WORLD_SIZE * sent / strategy.inverse_interval
    )
    figure = partial(Figure, table="architectures", case=name)
    yield figure(column="parameters", value=f"{num:,}")
    covered = found.num_covered / found.num_parameters
    must = name in MUST_COVER
    yield figure(column="covered", value=percent(found.num_covered, found.num_parameters))
    if must:
        yield Figure(
            case=f"{name}, share of parameters that is covered",
            value=covered,
            decimals=3,
            goal=f"at least {GOAL_COVERED}",
            holds=covered >= GOAL_COVERED,
            bound=1.0,
        )
    yield figure(column="planning, s", value=planned_s, decimals=2)
    yield figure(column="memory, MB", value=(2 * factors + sum(inverses)) / 1e6, decimals=0)
    yield figure(column="sent a step, MB", value=a_step / 1e6, decimals=1)
    yield figure(column="gradients, MB", value=share * 4 * num / 1e6, decimals=1)
    yield from trained(name, architecture)


def trained(name: str, architecture: Architecture) -> Iterator[Row]:
    figure = partial(Figure, table="small models", case=name)
    for label, strategy in (
        ("SGD", offbeat.AllReduce()),
        (
            "SPDKFAC",
            offbeat.SPDKFAC(
                curvature=offbeat.Curvature(
                    loss_terms="position" if architecture.sees == "words" else "example"
                )
            ),
        ),
    ):
        before, after = losses_of(architecture, strategy)
        if label == "SGD":
            yield figure(column="loss before", value=before, decimals=2)
        yield figure(column=f"after {NUM_STEPS} steps of {label}", value=after, decimals=3)


def losses_of(architecture: Architecture, strategy: Strategy) -> tuple[float, float]:
    torch.manual_seed(0)
    model = architecture.small()
    if architecture.sees == "words":
        words = torch.randint(64, (16, 17))
        x, y = words[:, :-1], words[:, 1:]
    else:
        x, y = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    found = []
    with offbeat.attach(model, optimizer, strategy):
        for _ in range(NUM_STEPS + 1):
            loss = nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())
            found.append(float(loss.detach()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return found[0], found[-1]


def peak_bytes(rank: int, world_size: int, strategy: Strategy) -> int:
    """Of this process, after three steps of ResNet-18, each of them with factors and inversions."""
    torch.manual_seed(0)
    model = ARCHITECTURES["ResNet-18"].published()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(8, 3, 64, 64), torch.randint(1000, (8,))
    with offbeat.attach(model, optimizer, strategy):
        for _ in range(3):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory() -> Iterator[Row]:
    for label, strategy in (
        ("S-SGD", offbeat.AllReduce()),
        ("gTop-k", offbeat.GTopK()),
        ("SPDKFAC", offbeat.SPDKFAC()),
        (
            "SPDKFAC, factors whole (max_dim=8192)",
            offbeat.SPDKFAC(curvature=offbeat.Curvature(max_dim=8192)),
        ),
    ):
        peak = run_ranks(peak_bytes, 1, strategy) / 1e9
        yield Figure(
            table="memory of ResNet-18", case=label, column="peak, GB", value=peak, decimals=2
        )
        if label == "SPDKFAC":
            yield Figure(
                case="ResNet-18, peak memory under the defaults, GB",
                value=peak,
                decimals=2,
                goal=f"at most {GOAL_MEMORY_GB:g}",
                holds=peak <= GOAL_MEMORY_GB,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_output_options(parser)
    torch.set_num_threads(1)
    cells = {name: partial(counted, name, each) for name, each in ARCHITECTURES.items()}
    present(cells | {"memory": memory}, parser.parse_args())
