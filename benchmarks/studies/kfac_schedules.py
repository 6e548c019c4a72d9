"""The K-FAC strategies' step times against each other: factors and inverses in every step, four
workers, an imitated link.

All train in the same processes, by turns, so that whatever disturbs the machine disturbs all. The
link is imitated in user space (`transport.wrappers.Delaying`). Computing is padded: a layer's
passes and an inversion sleep for as long as a device would compute, so that four workers do not
compete for the machine's cores. What they really compute comes on top, and is printed.

With `--rules`, and only so, links are the kernel's and there are four and eight workers: SPD-KFAC
by this package's rules against D-KFAC, MPD-KFAC, the paper's rules of fusion and of placement, each
alone and both, and no pipelining.

The bound is arithmetic: D-KFAC's own step without what it waits for factors, and with its
inversions divided among the ranks as evenly as the largest one allows.

    python benchmarks/studies/kfac_schedules.py [--json] [--turns 12] [--models cnn,transformer]
        [--fusion | --schedules | --ablations | --rules]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

import _benchmarks  # noqa: F401
import offbeat
from _measure import Cells, Ratio, Row, add_output_options, present, ratio
from _models.kfac_iteration import fuse_by_rule
from _ranks import run_ranks
from _results import Figure
from offbeat.arithmetic.costs import LinkCost
from offbeat.kfac import costs as factor_costs
from offbeat.kfac.callback import KFACCallback
from offbeat.kfac.inverses import InversionTask, Inverter
from offbeat.kfac.placement import Owner, place_by_rule
from offbeat.kfac.plans import (
    Groups,
    KFACPlanner,
    PlanInputs,
    every_rank,
    split_kinds,
    two_messages,
)
from offbeat.session.attach import attach_through
from offbeat.session.session import Session
from offbeat.strategies.kfac import KFACStrategy
from offbeat.transport.driver import Driver
from offbeat_lab.cluster import LinkSpec
from offbeat_lab.emulation.delaying import Delaying

WORLD_SIZE = 4
LATENCY_S = 1e-4
WARM_UP = 6
"""Steps before any is timed: groups are planned in the fourth."""
NO_SLOWER = 0.98
"""Schedules that are as good as each other differ by less than this."""

PLANNER = offbeat.SPDKFAC.planner


class NoPipelining(offbeat.SPDKFAC):
    planner: ClassVar[KFACPlanner] = replace(PLANNER, groups=two_messages, streamed=False)


class NoLoadBalancing(offbeat.SPDKFAC):
    planner: ClassVar[KFACPlanner] = replace(PLANNER, owners=every_rank)


class Neither(offbeat.SPDKFAC):
    planner: ClassVar[KFACPlanner] = replace(NoPipelining.planner, owners=every_rank)


class FullyFused(offbeat.SPDKFAC):
    planner: ClassVar[KFACPlanner] = replace(PLANNER, groups=two_messages)


class Unfused(offbeat.SPDKFAC):
    planner: ClassVar[KFACPlanner] = replace(
        PLANNER,
        groups=lambda inputs: tuple((s,) for group in two_messages(inputs) for s in group),
    )


def published_groups(inputs: PlanInputs) -> Groups:
    """As `planned_messages`, by the paper's rule of fusion."""
    if inputs.ready_s is None or inputs.costs is None:
        return two_messages(inputs)
    ready_s, sizes = inputs.ready_s, inputs.sizes_bytes
    order = sorted(range(len(ready_s)), key=lambda slot: (ready_s[slot], slot))
    groups = fuse_by_rule(
        [ready_s[slot] for slot in order], [sizes[slot] for slot in order], inputs.costs.all_reduce
    )
    return split_kinds([[order[place] for place in group] for group in groups], inputs.kinds)


def published_owners(inputs: PlanInputs) -> tuple[Owner, ...]:
    """As `shortest_phase`, by the paper's rule of placement. Inverses of one owner share messages
    as with this package's.
    """
    if inputs.costs is None:
        return every_rank(inputs)
    return place_by_rule(inputs.dims, inputs.world_size, inputs.costs.inverse)


class PublishedFusion(offbeat.SPDKFAC):
    planner: ClassVar[KFACPlanner] = replace(PLANNER, groups=published_groups)


class PublishedPlacement(offbeat.SPDKFAC):
    planner: ClassVar[KFACPlanner] = replace(PLANNER, owners=published_owners)


class PublishedRules(offbeat.SPDKFAC):
    planner: ClassVar[KFACPlanner] = replace(PublishedFusion.planner, owners=published_owners)


SCHEDULES: dict[str, KFACStrategy] = {
    "dkfac": offbeat.DKFAC(factor_interval=1, inverse_interval=1),
    "mpdkfac": offbeat.MPDKFAC(factor_interval=1, inverse_interval=1),
    "spdkfac": offbeat.SPDKFAC(factor_interval=1, inverse_interval=1),
}
ABLATIONS: dict[str, KFACStrategy] = {
    "both": offbeat.SPDKFAC(factor_interval=1, inverse_interval=1),
    "no pipelining": NoPipelining(factor_interval=1, inverse_interval=1),
    "no load balancing": NoLoadBalancing(factor_interval=1, inverse_interval=1),
    "neither": Neither(factor_interval=1, inverse_interval=1),
}
FUSIONS: dict[str, KFACStrategy] = {
    "spdkfac": offbeat.SPDKFAC(factor_interval=1, inverse_interval=1),
    "unfused": Unfused(factor_interval=1, inverse_interval=1),
    "fully fused": FullyFused(factor_interval=1, inverse_interval=1),
}

PUBLISHED = "the paper's rules"
RULES: dict[str, KFACStrategy] = {
    **SCHEDULES,
    PUBLISHED: PublishedRules(factor_interval=1, inverse_interval=1),
    "the paper's fusion": PublishedFusion(factor_interval=1, inverse_interval=1),
    "the paper's placement": PublishedPlacement(factor_interval=1, inverse_interval=1),
    "no pipelining": ABLATIONS["no pipelining"],
}
RULES_WORKERS, RULES_RATES_BIT_PER_S = (4, 8), (1e9, 2.5e9)


class Pause(torch.autograd.Function):
    """The identity, which takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradient, None, None


def pause(x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
    """`x`, later, and its gradient later too."""
    y: torch.Tensor = Pause.apply(x, forward_s, backward_s)  # type: ignore[no-untyped-call]
    return y


class Slow(nn.Module):
    """A layer whose forward pass takes longer, behind its inputs, and whose backward pass twice as
    long, behind its outputs.
    """

    def __init__(self, layer: nn.Module, forward_s: float) -> None:
        super().__init__()
        self.layer = layer
        self.forward_s = forward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = pause(self.layer(pause(x, 0.0, 2 * self.forward_s)), self.forward_s, 0.0)
        return y


def make_cnn(forward_s: float) -> nn.Module:
    convolutions = [
        nn.Sequential(
            Slow(nn.Conv2d(channels, 48, 3, stride=stride, padding=1), forward_s / 5), nn.ReLU()
        )
        for channels, stride in ((3, 1), (48, 2), (48, 1), (48, 2), (48, 1))
    ]
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10))


def make_transformer(forward_s: float) -> nn.Module:
    layers = [
        Slow(nn.TransformerEncoderLayer(128, 4, 384, dropout=0.0, batch_first=True), forward_s / 2)
        for _ in range(2)
    ]
    return nn.Sequential(nn.Linear(64, 128), *layers, nn.Linear(128, 32))


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """A model and what it is trained on.

    Attributes:
        shape: of a batch.
        forward_s: padding of the forward pass; the backward pass has twice as much.
        invert_s: padding of inverting all factors.
        cubes: sum of the factors' rows^3, groups counted.
        rate_bit_per_s: of the link on which schedules are compared.
    """

    shape: tuple[int, ...]
    forward_s: float
    invert_s: float
    cubes: float
    rate_bit_per_s: float


MAKE = {"cnn": make_cnn, "transformer": make_transformer}
BENCHES = {
    "cnn": Bench(
        shape=(4, 3, 16, 16), forward_s=0.04, invert_s=0.16, cubes=3.26e8, rate_bit_per_s=1e9
    ),
    "transformer": Bench(
        shape=(4, 16, 64), forward_s=0.06, invert_s=0.2, cubes=2.63e8, rate_bit_per_s=1e9
    ),
}
FUSION_RATES_BIT_PER_S = (5e7, 2e8, 1e9, 1e10)


def pad_inversions(s_per_cube: float) -> None:
    """Let inversions of this process take as long as a device would."""
    invert = Inverter.invert

    def padded(self: Inverter, tasks: Sequence[InversionTask], **more: Any) -> list[torch.Tensor]:
        time.sleep(s_per_cube * sum(task.shape.groups * task.shape.dim**3 for task in tasks))
        return invert(self, tasks, **more)

    Inverter.invert = padded  # type: ignore[method-assign]
    # A processor's time does not see who sleeps.
    factor_costs.inversion_clock = lambda device, now_s: now_s


def part_of(session: Session) -> KFACCallback:
    return next(part for part in session.callbacks if isinstance(part, KFACCallback))


def measure(
    rank: int,
    world_size: int,
    name: str,
    strategies: Mapping[str, KFACStrategy],
    rate_bit_per_s: float | None,
    turns: int,
) -> dict[str, object]:
    """Of each strategy's steps, by turns: seconds, processor seconds and counters; and the largest
    inversion's share. Without a rate no link is imitated.
    """
    bench = BENCHES[name]
    pad_inversions(bench.invert_s / bench.cubes)

    def slow(driver: Driver) -> Driver:
        rate = rate_bit_per_s
        if rate is None:
            return driver
        return Delaying(driver, LinkCost(alpha_s=LATENCY_S, beta_s_per_byte=8 / rate))

    batch = torch.randn(bench.shape, generator=torch.Generator().manual_seed(rank))
    steps: dict[str, list[dict[str, float]]] = {label: [] for label in strategies}
    orders = list(permutations(strategies))
    with ExitStack() as stack:
        models, optimizers, sessions = {}, {}, {}
        for label, strategy in strategies.items():
            torch.manual_seed(0)
            models[label] = MAKE[name](bench.forward_s)
            optimizers[label] = torch.optim.SGD(models[label].parameters(), lr=1e-3)
            session = attach_through(slow, models[label], optimizers[label], strategy)
            sessions[label] = stack.enter_context(session)
        for turn in range(WARM_UP + turns):
            for label in orders[turn * 5 % len(orders)]:
                before = part_of(sessions[label]).counters()
                dist.barrier()
                begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
                models[label](batch).square().mean().backward()
                optimizers[label].step()
                optimizers[label].zero_grad()
                taken = {
                    "step_s": time.perf_counter() - begin_s,
                    "cpu_s": time.process_time() - begin_cpu_s,
                }
                after = part_of(sessions[label]).counters()
                steps[label].append(taken | {what: after[what] - before[what] for what in after})
        slots = part_of(next(iter(sessions.values()))).slots
        cubes = [slot.shape.groups * slot.shape.dim**3 for slot in slots]
    return {
        "steps": {label: some[WARM_UP:] for label, some in steps.items()},
        "largest": max(cubes) / sum(cubes),
    }


def schedules(name: str, turns: int) -> Iterator[Row]:
    """SPD-KFAC against D-KFAC and MPD-KFAC, and what of the arithmetic remains."""
    rate = BENCHES[name].rate_bit_per_s
    measured = run_ranks(measure, WORLD_SIZE, name, SCHEDULES, rate, turns)
    d, spd = measured["steps"]["dkfac"], measured["steps"]["spdkfac"]
    evenly = max(measured["largest"], 1 / WORLD_SIZE)
    saved = [step["factor_wait_s"] + step["invert_s"] * (1 - evenly) for step in d]
    middle = turns // 2
    usual_s, saved_s = sorted(step["step_s"] for step in d)[middle], sorted(saved)[middle]
    where = f"{name}, {rate / 1e6:g} Mbit/s"
    really = sum(step["cpu_s"] for step in d) / sum(step["step_s"] for step in d)
    percent = partial(Figure, table="what could be saved", case=name, unit="%", decimals=0)
    yield percent(column="of D-KFAC's step", value=100 * saved_s / usual_s)
    yield percent(column="not padded, of D-KFAC's step", value=100 * really)
    scheduled = partial(ratio, table="schedules")
    steps_s = {
        label: [step["step_s"] for step in some] for label, some in measured["steps"].items()
    }
    bound = usual_s / (usual_s - saved_s)
    pairs = list(zip(steps_s["dkfac"], steps_s["spdkfac"], strict=True))
    yield scheduled(f"dkfac over spdkfac, step time, {where}", pairs, at_least=1.25, bound=bound)
    pairs = list(zip(steps_s["mpdkfac"], steps_s["spdkfac"], strict=True))
    yield scheduled(
        f"mpdkfac over spdkfac, step time, {where}", pairs, at_least=1.15, bound=float("inf")
    )
    pairs = [(a["step_s"] - b["step_s"], could) for a, b, could in zip(d, spd, saved, strict=True)]
    yield scheduled(
        f"what spdkfac saves of what could be saved, {where}", pairs, at_least=0.9, bound=1.0
    )
    pairs = [(b["factor_wait_s"], a["factor_wait_s"]) for a, b in zip(d, spd, strict=True)]
    yield scheduled(
        f"spdkfac over dkfac, exposed communication of factors, {where}",
        pairs,
        at_most=0.2,
        bound=0.0,
    )
    pairs = [(b["invert_s"], a["invert_s"] * evenly) for a, b in zip(d, spd, strict=True)]
    yield scheduled(
        f"spdkfac's inversions over the best division, {where}", pairs, at_most=1.1, bound=1.0
    )
    pairs = [
        (b["invert_s"] + b["inverse_wait_s"], a["invert_s"] * evenly)
        for a, b in zip(d, spd, strict=True)
    ]
    yield scheduled(f"the same with the broadcasts, {where}", pairs, at_most=1.1, bound=1.0)


def fusions(name: str, rate: float, turns: int) -> Iterator[Ratio]:
    """SPD-KFAC's groups against one message for each factor, and one for all A and one
    for all G.
    """
    steps = run_ranks(measure, WORLD_SIZE, name, FUSIONS, rate, turns)["steps"]
    for other in ("unfused", "fully fused"):
        pairs = [
            (a["step_s"], b["step_s"]) for a, b in zip(steps[other], steps["spdkfac"], strict=True)
        ]
        case = f"{other} over spdkfac, step time, {name}, {rate / 1e6:g} Mbit/s"
        yield ratio(case, pairs, at_least=NO_SLOWER, bound=float("inf"), table="fusion")


def ablations(name: str, turns: int) -> Iterator[Ratio]:
    """SPD-KFAC without one of its two plans, and without both, which is D-KFAC."""
    rate = BENCHES[name].rate_bit_per_s
    steps = run_ranks(measure, WORLD_SIZE, name, ABLATIONS, rate, turns)["steps"]
    for other in ("no pipelining", "no load balancing", "neither"):
        pairs = [
            (a["step_s"], b["step_s"]) for a, b in zip(steps[other], steps["both"], strict=True)
        ]
        case = f"{other} over spdkfac, step time, {name}, {rate / 1e6:g} Mbit/s"
        yield ratio(case, pairs, at_least=NO_SLOWER, bound=float("inf"), table="ablations")


def rules(name: str, workers: int, rate: float, turns: int) -> Iterator[Figure]:
    """The steps of all over those of SPD-KFAC by this package's rules, behind the kernel's links;
    and MPD-KFAC's over those by the paper's.
    """
    link = LinkSpec(rate_bit_per_s=rate)
    steps = run_ranks(measure, workers, name, RULES, None, turns, link=link)["steps"]
    cell = partial(
        Figure,
        table="rules behind links of the kernel",
        column=f"{name}, {workers} workers, {rate / 1e6:g} Mbit/s",
    )
    pairs = [(other, "spdkfac") for other in RULES if other != "spdkfac"]
    for other, base in [*pairs, ("mpdkfac", PUBLISHED)]:
        found = ratio(
            "",
            [(a["step_s"], b["step_s"]) for a, b in zip(steps[other], steps[base], strict=True)],
            at_least=1.0,
            bound=float("inf"),
        )
        yield cell(case=f"{other} over {base}", value=found.value, interval=found.interval)
    ours = sorted(step["step_s"] for step in steps["spdkfac"])
    yield cell(case="a step of spdkfac", value=ours[len(ours) // 2], unit="s")
    busy = [step["cpu_s"] / step["step_s"] for step in steps["spdkfac"]]
    yield cell(case="of it not padded", value=100 * sum(busy) / len(busy), unit="%", decimals=0)


def cells(
    models: Sequence[str],
    turns: int,
    *,
    with_rules: bool,
    with_schedules: bool,
    with_fusions: bool,
    with_ablations: bool,
) -> Cells:
    found: dict[str, Callable[[], Iterable[Row]]] = {}
    for name in models:
        if with_ablations:
            found[f"ablations, {name}"] = partial(ablations, name, turns)
        if with_schedules:
            found[f"schedules, {name}"] = partial(schedules, name, turns)
        for workers in RULES_WORKERS if with_rules else ():
            for rate in RULES_RATES_BIT_PER_S:
                cell = f"rules, {name}, {workers} workers, {rate / 1e6:g} Mbit/s"
                found[cell] = partial(rules, name, workers, rate, turns)
        for rate in FUSION_RATES_BIT_PER_S if with_fusions else ():
            cell = f"fusion, {name}, {rate / 1e6:g} Mbit/s"
            found[cell] = partial(fusions, name, rate, turns)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_output_options(parser)
    parser.add_argument("--turns", type=int, default=12, help="timed steps of each strategy")
    parser.add_argument("--models", default=",".join(MAKE), help="which, separated by commas")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--schedules",
        action="store_true",
        help="only D-KFAC, MPD-KFAC and SPD-KFAC against each other",
    )
    which.add_argument(
        "--fusion", action="store_true", help="only SPD-KFAC's groups against none and one"
    )
    which.add_argument(
        "--ablations",
        action="store_true",
        help="only SPD-KFAC without pipelining, without load balancing, without both",
    )
    which.add_argument(
        "--rules",
        action="store_true",
        help="only all of them and the paper's rules, behind the kernel's links",
    )
    arguments = parser.parse_args()
    is_all = not (arguments.fusion or arguments.schedules or arguments.ablations or arguments.rules)
    found_cells = cells(
        arguments.models.split(","),
        arguments.turns,
        with_rules=arguments.rules,
        with_schedules=is_all or arguments.schedules,
        with_fusions=is_all or arguments.fusion,
        with_ablations=is_all or arguments.ablations,
    )
    present(found_cells, arguments)
