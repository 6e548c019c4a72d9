"""What K-FAC adds to a step of S-SGD, on one thread, beside the floor from counted operations; and
its inverses against eigen.

The model: five 3x3 convolutions (3-32, 32-64 stride 2, 64-64, 64-128 stride 2, 128-128, each with
BatchNorm and ReLU), global pooling, Linear 128-256-10; 32 images of 3x32x32. On one thread the
released kfac-pytorch 0.4.2 adds 5.45 steps when it updates in every step, and 0.55 where factors
are updated in every tenth and inverses in every hundredth.

The floor counts multiplications and additions, and asks for as many a second as a product of 1,024
x 1,024 matrices reaches beside it:

- preconditioning: 2 d_out d_in (d_out + d_in) for each layer;
- factors: 2 operations for each row and each element of the triangle of A and G; for a convolution
  A has a row for each output position, and with stride 1 its 3x3 taps repeat 13 products of
  channels in place of 81, whose borders are not counted;
- inverses: d^3 / 3 for the Cholesky decomposition of each factor, three times that for its inverse.

By default convolutions' factors look at every fourth example; with `--stride n` all look at every
n-th. Their floor is such a part. By default
inverses are in bfloat16 at intervals of 10 and 100, if this processor multiplies that fast, and
triangles in float32 in every step; `--inverse-dtype` has one of the two throughout. Where it is
bfloat16 the floor of preconditioning is at the rate of a product in bfloat16, and what is made in
every step are inverses, not triangles. What bounds eigendecompositions over Cholesky is the ratio
of operations: 6 d^3 (4/3 d^3 to a tridiagonal matrix, 8/3 d^3 to put the eigenvectors of its parts
together, 2 d^3 to turn them back), if they ran at one rate.

    python benchmarks/kfac_overhead.py [--json] [--rounds 10] [--stride auto] [--inverse-dtype auto]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import nn

import offbeat
from _measure import Cells, Ratio, Row, add_output_options, interleave, present, ratio, timed
from _ranks import run_ranks
from _results import Figure
from offbeat.kfac.callback import KFACCallback
from offbeat.kfac.curvature import AUTO_STRIDE, Curvature
from offbeat.kfac.factors import packed_pieces, unpack
from offbeat.kfac.inverses import InverseForm, InversionTask, Inverter, multiplies_bfloat16_fast
from offbeat.kfac.survey import survey
from offbeat.session.session import Session

STEPS_A_ROUND = 10
GOAL_EVERY_STEP, GOAL_SAMPLED, GOAL_AT_INTERVALS, GOAL_EIGEN = 2.0, 1.0, 0.2, 5.0
FACTOR_INTERVAL, INVERSE_INTERVAL = 10, 100
Stride: TypeAlias = int | Literal["auto"]
InverseDtype: TypeAlias = Literal["auto", "float32", "bfloat16"]

CUBES_OF_EIGEN = 6
CUBES: dict[InverseForm, float] = {"triangle": 1 / 3, "inverse": 1}
"""Operations for a factor of d rows, by d^3."""

SIZES = (1024, 1024)
"""Of the matrices whose product says how fast the machine multiplies."""


def make_cnn() -> nn.Module:
    layers: list[nn.Module] = []
    for channels, maps, stride in (
        (3, 32, 1),
        (32, 64, 2),
        (64, 64, 1),
        (64, 128, 2),
        (128, 128, 1),
    ):
        layers += [
            nn.Conv2d(channels, maps, 3, stride=stride, padding=1),
            nn.BatchNorm2d(maps),
            nn.ReLU(),
        ]
    return nn.Sequential(
        *layers,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def part_of(session: Session) -> KFACCallback:
    return next(part for part in session.callbacks if isinstance(part, KFACCallback))


def floating_operations() -> dict[str, float]:
    """The floor of preconditioning, of factors and of inverses, in operations, for a batch."""
    model = make_cnn()
    batch, rows = torch.zeros(32, 3, 32, 32), dict[int, int]()

    def count(module: nn.Module, _: object, output: torch.Tensor) -> None:
        rows[id(module)] = output.numel() // output.shape[1]

    for module in model.modules():
        module.register_forward_hook(count)
    model(batch)
    counted = {"precondition": 0.0, "factors": 0.0, "inverses": 0.0}
    for block in survey(model, Curvature()).blocks:
        _, outputs, inputs = block.matrix_shape
        counted["precondition"] += 2 * outputs * inputs * (outputs + inputs)
        module = block.module
        repeats = isinstance(module, nn.Conv2d) and module.stride == (1, 1)
        inputs_of_a = 26 * (inputs // 9) ** 2 if repeats else inputs * (inputs + 1)
        counted["factors"] += rows[id(module)] * (inputs_of_a + outputs * (outputs + 1))
        counted["inverses"] += (inputs**3 + outputs**3) / 3
    return counted


def multiplications_per_s(dtype: torch.dtype) -> float:
    """Operations a second of a product of matrices on one thread, the fastest of a few."""
    left, right = torch.randn(SIZES).to(dtype), torch.randn(SIZES).to(dtype)
    return 2 * SIZES[0] * SIZES[1] * SIZES[1] / min(timed(lambda: left @ right) for _ in range(10))


def measure(
    rank: int, world_size: int, rounds: int, stride: Stride, inverse_dtype: InverseDtype
) -> dict[str, list[dict[str, float]]]:
    """Of rounds of steps of each, by turns: seconds a step, and what K-FAC counts."""
    every = offbeat.SPDKFAC(
        factor_interval=1,
        inverse_interval=1,
        curvature=offbeat.Curvature(sample_stride=stride, inverse_dtype=inverse_dtype),
    )
    seldom = replace(every, factor_interval=FACTOR_INTERVAL, inverse_interval=INVERSE_INTERVAL)
    strategies = {"ssgd": offbeat.AllReduce(), "every step": every, "at intervals": seldom}
    generator = torch.Generator().manual_seed(0)
    x, y = (
        torch.randn(32, 3, 32, 32, generator=generator),
        torch.randint(10, (32,), generator=generator),
    )
    found: dict[str, list[dict[str, float]]] = {label: [] for label in strategies}
    with ExitStack() as stack:
        trainers: dict[str, tuple[Callable[[], None], Session]] = {}
        for label, strategy in strategies.items():
            torch.manual_seed(0)
            model = make_cnn()
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
            session = stack.enter_context(offbeat.attach(model, optimizer, strategy))

            def step(
                model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer
            ) -> None:
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

            trainers[label] = step, session
        for label, (run_step, _) in trainers.items():
            repeat(run_step, INVERSE_INTERVAL if label == "at intervals" else STEPS_A_ROUND)
        for _ in range(rounds):
            for label, (run_step, session) in trainers.items():
                counted = {} if label == "ssgd" else part_of(session).counters()
                taken_s = timed(partial(repeat, run_step, STEPS_A_ROUND))
                spent = {} if label == "ssgd" else part_of(session).counters()
                row = {what: (spent[what] - counted[what]) / STEPS_A_ROUND for what in spent}
                found[label].append(row | {"step_s": taken_s / STEPS_A_ROUND})
        for what, dtype in (
            ("rate", torch.float32),
            ("rate_in_bfloat16", torch.bfloat16),
        ):
            found["ssgd"][0][what] = max(multiplications_per_s(dtype) for _ in range(3))
    return found


def repeat(step: Callable[[], None], times: int) -> None:
    for _ in range(times):
        step()


def tasks() -> list[InversionTask]:
    """The model's factors, some of them."""
    made = []
    generator = torch.Generator().manual_seed(0)
    for block in survey(make_cnn(), Curvature()).blocks:
        for shape in (block.inputs, block.outputs):
            rows = torch.randn(shape.groups, 2 * shape.dim, shape.dim, generator=generator)
            packed = packed_pieces(rows.mT @ rows / rows.shape[1], shape)
            damping, valid = torch.tensor(0.01), torch.tensor(True)
            made.append(
                InversionTask(
                    name=block.name, packed=packed, shape=shape, damping=damping, valid=valid
                )
            )
    return made


def kind_of(stride: Stride, inverse_dtype: InverseDtype) -> str:
    kind = "" if stride == "auto" else f", factors of one example in {stride}"
    if stride == 1:
        kind = ", factors of all examples"
    return kind + (f", inverses in {inverse_dtype}" if inverse_dtype != "auto" else "")


def overhead(rounds: int, stride: Stride, inverse_dtype: InverseDtype) -> Iterator[Row]:
    found = run_ranks(measure, 1, rounds, stride, inverse_dtype)
    plain_s = [row["step_s"] for row in found["ssgd"]]
    usual_s, rate = sorted(plain_s)[len(plain_s) // 2], found["ssgd"][0]["rate"]
    floor = {
        what: operations / rate / usual_s for what, operations in floating_operations().items()
    }
    rounded = floor["precondition"] * rate / found["ssgd"][0]["rate_in_bfloat16"]
    is_fast = multiplies_bfloat16_fast(torch.device("cpu"))
    in_every = rounded if inverse_dtype == "bfloat16" else floor["precondition"]
    at_intervals = (
        rounded
        if inverse_dtype == "bfloat16" or (inverse_dtype == "auto" and is_fast)
        else floor["precondition"]
    )
    kind = kind_of(stride, inverse_dtype)
    every = f"what K-FAC in every step adds to a step of S-SGD{kind}"
    seldom = f"the same at intervals of {FACTOR_INTERVAL} and {INVERSE_INTERVAL}{kind}"
    of_one = CUBES["inverse" if inverse_dtype == "bfloat16" else "triangle"] / CUBES["triangle"]
    inverting_s = sum(row["invert_s"] for row in found["at intervals"])
    pairs = [
        (row["step_s"] - plain, plain)
        for row, plain in zip(found["every step"], plain_s, strict=True)
    ]
    # nearly all of them are of convolutions
    factors = floor["factors"] / (AUTO_STRIDE if stride == "auto" else stride)
    yield ratio(
        every,
        pairs,
        at_most=GOAL_EVERY_STEP if stride in ("auto", 1) else GOAL_SAMPLED,
        bound=in_every + factors + of_one * floor["inverses"],
    )
    # inverses are made in one of ten rounds, and spread over all
    pairs = [
        (row["step_s"] - row["invert_s"] + inverting_s / rounds - plain, plain)
        for row, plain in zip(found["at intervals"], plain_s, strict=True)
    ]
    yield ratio(
        seldom,
        pairs,
        at_most=GOAL_AT_INTERVALS,
        bound=at_intervals + factors / FACTOR_INTERVAL + 3 * floor["inverses"] / INVERSE_INTERVAL,
    )
    yield from parts(every, found["every step"], usual_s)
    yield from parts(seldom, found["at intervals"], usual_s)


def eigendecompositions() -> Iterator[Ratio]:
    """Those of the model's factors against what K-FAC makes of them by Cholesky decomposition. This
    is why K-FAC has none.
    """
    some = tasks()
    by_dim: dict[int, list[torch.Tensor]] = {}
    for task in some:
        by_dim.setdefault(task.shape.dim, []).append(unpack(task.packed, task.shape.dim))

    def decompose() -> None:
        for matrices in by_dim.values():
            torch.linalg.eigh(torch.cat(matrices))

    for form, cubes in CUBES.items():
        inverter = Inverter(print, form)
        taken = interleave(
            {
                "eigen": partial(timed, decompose),
                form: partial(timed, partial(inverter.invert, some)),
            },
            num_rounds=5,
        )
        pairs = list(zip(taken["eigen"], taken[form], strict=True))
        yield ratio(
            f"eigendecompositions over Cholesky, {form}",
            pairs,
            at_least=GOAL_EIGEN,
            bound=CUBES_OF_EIGEN / cubes,
        )


def parts(case: str, rows: list[dict[str, float]], usual_s: float) -> Iterator[Figure]:
    """What of a step goes where, in steps of S-SGD."""
    for column, what in (("preconditioning", "precondition_s"), ("inverses", "invert_s")):
        mean = sum(row[what] for row in rows) / len(rows) / usual_s
        yield Figure(
            table="parts of what is added", case=case, column=column, value=mean, decimals=2
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_output_options(parser)
    parser.add_argument("--rounds", type=int, default=10, help="of ten steps of each")
    parser.add_argument(
        "--stride",
        type=lambda text: text if text == "auto" else int(text),
        default="auto",
        help="factors are of every n-th example of a batch; default: as it comes",
    )
    parser.add_argument(
        "--inverse-dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16"),
        help="what inverses are kept in",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    options = arguments.stride, arguments.inverse_dtype
    found_cells: Cells = {
        f"overhead{kind_of(*options)}": partial(overhead, arguments.rounds, *options),
        "eigendecompositions": eigendecompositions,
    }
    present(found_cells, arguments)
