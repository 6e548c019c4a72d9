"""The bands of `offbeat plan`: fitted to measurements of others and to the lab's, and held against
sets that were left out of the fit.

On GPUs the measurements are public ones, with the step of one device as it was published:

- gTop-k's dense exchange of five networks on 4 and 8 nodes behind 1 Gbit/s (`published.py`). On 16
  and 32 nodes it took up to 12 times what any ring takes, and sparse exchanges had 55 ns an element
  of work that is not in the model: both are left out.
- SPD-KFAC's S-SGD of four networks on 64 GPUs, with links as its own all-reduce was measured.
- WAGMA's figure 5: its all-reduce and its local SGD. Computing is derived from its AD-PSGD, and the
  others took about as long as if all had waited for each other in each step.
- DLPerf's DDP (github.com/Oneflow-Inc/DLPerf, V100s in nodes of 8 with 100 Gbit/s InfiniBand):
  NVIDIA's examples of ResNet-50 and BERT-base in float32 and in mixed precision, and of others the
  largest cells.
- Horovod's documentation: ResNet-101 on Pascal GPUs in nodes of 4 with 25 Gbit/s.

On CPUs they are the judged cells of `benchmarks/prediction.py`, as recorded; a set is a number of
workers.

    python benchmarks/studies/bands.py [--write] [--json]
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Final

import _benchmarks  # noqa: F401
from _band_fit import MeasuredCell, fit_band
from _measure import Row, main
from _results import Figure, ResultFile
from offbeat_lab.cluster import Cluster, LinkSpec, RackSpec, from_flags
from offbeat_lab.plan import bands
from offbeat_lab.plan.bands import Band, Factor
from offbeat_lab.plan.measure import measure_task
from offbeat_lab.plan.predictions import StepPrediction, predict_step
from offbeat_lab.plan.profile import ModelProfile
from offbeat_lab.plan.shipped import factors_of, resnet, shipped_profile, tensors_of
from offbeat_lab.plan.simulation import Setting
from prediction import MEASURED, PREDICTED, TASK
from published import (
    ETHERNET,
    GTOPK,
    SPDKFAC,
    WAGMA_COMPUTE_S,
    WAGMA_MINUTES,
    WAGMA_STEPS,
    in_one_bucket,
    piz_daint,
    profile_of,
)

RESULTS: Final = Path(__file__).parents[1] / "results"


def cell(
    of: str,
    spec: str,
    setting: Setting,
    measured_s: float,
    predicted: StepPrediction | None = None,
) -> MeasuredCell:
    predicted = predicted or predict_step(spec, setting, Band())
    return MeasuredCell(
        of=of,
        strategy=spec.partition(":")[0].replace("allreduce", "ddp"),
        workers=setting.world_size,
        rate_bit_per_s=setting.cluster.between_workers_bit_per_s,
        exposed=predicted.exposed,
        overlapped=predicted.overlapped,
        ratio=measured_s / predicted.step_s,
    )


def gtopk() -> Iterator[MeasuredCell]:
    for one in GTOPK.values():
        for nodes, samples_per_s in zip((4, 8), one.dense, strict=False):
            setting = Setting(
                profile=profile_of(one),
                cluster=Cluster(name="1 GbE", workers=nodes, link=ETHERNET),
                payload_share=1.0,
            )
            predicted = in_one_bucket("allreduce", setting)
            yield cell("gTop-k", "allreduce", setting, one.batch_size / samples_per_s, predicted)


PCIE, NVLINK = LinkSpec(rate_bit_per_s=96e9), LinkSpec(rate_bit_per_s=1.04e12)
"""Of GPUs within a node: PCIe 3.0 x16, and what NCCL's ring reaches among eight V100s."""


def nodes_of(size: int, workers: int, inside: LinkSpec, rate_bit_per_s: float) -> Cluster:
    racks = RackSpec(size=size, rate_bit_per_s=rate_bit_per_s)
    return Cluster(name="nodes", workers=workers, link=inside, racks=racks)


PROBED: Final = LinkSpec(rate_bit_per_s=44e9, latency_s=87e-6)
"""SPD-KFAC's all-reduce on 64 GPUs as published, 12.2 ms and 1.45 ns an element, as of a ring."""


def spdkfac() -> Iterator[MeasuredCell]:
    cluster = Cluster(name="64 GPUs", workers=64, link=PROBED)
    for network, one in SPDKFAC.items():
        setting = Setting(profile=shipped_profile(network), cluster=cluster)
        yield cell("SPD-KFAC", "ddp", setting, one.sgd_s)


def wagma() -> Iterator[MeasuredCell]:
    setting = piz_daint(64, WAGMA_COMPUTE_S)
    for spec, minutes in WAGMA_MINUTES.items():
        if spec in ("ddp", "localsgd:period=1:optimizer_state=local"):
            yield cell("WAGMA", spec, setting, 60 * minutes / WAGMA_STEPS)


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """Samples a second of one device, and of several."""

    of: str
    profile: ModelProfile
    batch_size: int
    alone: float
    together: dict[int, float]
    size: int = 8
    inside: LinkSpec = NVLINK
    rate_bit_per_s: float = 100e9


def resnet101() -> ModelProfile:
    network = resnet((3, 4, 23, 3))
    return ModelProfile(
        **{
            **{name: getattr(BASE, name) for name in BASE.__dataclass_fields__},
            "tensors": tensors_of(network),
            "layers": factors_of(network),
        }
    )


BASE, BERT = shipped_profile("resnet50"), shipped_profile("bert-base")

SCALED: Final = (
    Scaled(
        of="DLPerf ResNet-50",
        profile=BASE,
        batch_size=128,
        alone=367.29,
        together={4: 1449.48, 8: 2887.65, 16: 5716.79, 32: 10917.09},
    ),
    Scaled(
        of="DLPerf ResNet-50",
        profile=BASE,
        batch_size=256,
        alone=802.9,
        together={4: 3137.44, 8: 6154.66, 16: 11991.94, 32: 22551.16},
    ),
    Scaled(
        of="DLPerf BERT",
        profile=BERT,
        batch_size=32,
        alone=119.6,
        together={4: 457.72, 8: 921.32, 16: 1499.4, 32: 2885.81},
    ),
    Scaled(
        of="DLPerf BERT",
        profile=BERT,
        batch_size=48,
        alone=121.94,
        together={4: 464.66, 8: 928.01, 16: 1584.32, 32: 3039.3},
    ),
    Scaled(
        of="DLPerf BERT",
        profile=BERT,
        batch_size=64,
        alone=444.51,
        together={4: 1671.66, 8: 3251.7, 16: 4936.92, 32: 9331.72},
    ),
    Scaled(
        of="DLPerf BERT",
        profile=BERT,
        batch_size=96,
        alone=462.35,
        together={4: 1727.93, 8: 3287.12, 16: 5426.07, 32: 10349.12},
    ),
    Scaled(
        of="DLPerf, others",  # PyTorch's examples
        profile=BASE,
        batch_size=128,
        alone=10632.33 / 30.0,
        together={32: 10632.33},
    ),
    Scaled(
        of="DLPerf, others",  # TensorFlow with Horovod
        profile=BASE,
        batch_size=128,
        alone=9514.64 / 26.25,
        together={32: 9514.64},
    ),
    Scaled(
        of="DLPerf, others",
        profile=BERT,
        batch_size=32,
        alone=1923.68 / 18.01,
        together={32: 1923.68},
    ),
    Scaled(
        of="DLPerf, others",
        profile=BERT,
        batch_size=48,
        alone=2478.59 / 22.02,
        together={32: 2478.59},
    ),
    Scaled(
        of="Horovod",
        profile=resnet101(),
        batch_size=64,
        alone=1656.82 / 16,
        together={workers: 0.9 * workers * 1656.82 / 16 for workers in (128, 512)},
        size=4,
        inside=PCIE,
        rate_bit_per_s=25e9,
    ),
)


def scaled() -> Iterator[MeasuredCell]:
    for one in SCALED:
        profile = one.profile.with_step(
            batch_size=one.batch_size,
            forward_backward_s=one.batch_size / one.alone,
            device="V100",
        )
        for workers, samples_per_s in one.together.items():
            cluster = nodes_of(one.size, workers, one.inside, one.rate_bit_per_s)
            setting = Setting(profile=profile, cluster=cluster)
            yield cell(one.of, "ddp", setting, workers * one.batch_size / samples_per_s)


def lab() -> Iterator[MeasuredCell]:
    """What is exchanged does not depend on the machine, and a profile of this one does."""
    profile = measure_task(TASK, {"size": "small", "batch_size": "8"}, steps=2)
    rows: dict[str, dict[str, object]] = {}
    for figure in (one.figure for one in ResultFile(RESULTS / "prediction.jsonl").results):
        if figure.table == "steps":
            rows.setdefault(figure.case, {})[figure.column] = figure.value
    for case, row in rows.items():
        if row.get("judged") != "yes":
            continue
        where, _, spec = case.partition(": ")
        match = re.match(r"(\d+) workers, ([^,]+)", where)
        assert match is not None
        cluster = from_flags(workers=int(match[1]), link=match[2])
        there = predict_step(spec, Setting(profile=profile, cluster=cluster), Band())
        predicted_s = _number(row[PREDICTED])
        yield MeasuredCell(
            of=f"{match[1]} workers",
            strategy=spec.partition(":")[0],
            workers=int(match[1]),
            rate_bit_per_s=there.rate_bit_per_s,
            exposed=there.exposed,
            overlapped=there.overlapped,
            ratio=_number(row[MEASURED]) / predicted_s,
        )


def _number(value: object) -> float:
    assert isinstance(value, float)
    return value


def public() -> list[MeasuredCell]:
    return [*gtopk(), *spdkfac(), *wagma(), *scaled()]


def on_gpus() -> Iterator[Row]:
    yield from report("gpu", public(), is_shifted=True)


def on_cpus() -> Iterator[Row]:
    yield from report("cpu", list(lab()), is_shifted=False)


FITTED: dict[str, Band] = {}


def rounded(one: MeasuredCell) -> MeasuredCell:
    """As it is recorded, so that a fit to what was recorded is the same."""

    def short(value: float) -> float:
        return float(f"{value:.5g}")

    return replace(
        one,
        rate_bit_per_s=short(one.rate_bit_per_s),
        exposed=short(one.exposed),
        overlapped=short(one.overlapped),
        ratio=short(one.ratio),
    )


def report(kind: str, found: Sequence[MeasuredCell], *, is_shifted: bool) -> Iterator[Row]:
    cells = [rounded(one) for one in found]
    for number, one in enumerate(cells):
        for column, value in asdict(one).items():
            yield Figure(
                case=f"{kind} {number}",
                table=f"{kind}: cells",
                column=column,
                value=value if isinstance(value, str) else float(value),
            )
    band, held = fit_band(cells, is_shifted=is_shifted)
    FITTED[kind] = band
    for left_out in held:
        for column, value in (
            ("cells", float(left_out.cells)),
            ("inside", left_out.inside / left_out.cells),
            ("within 15%", left_out.close / left_out.cells),
        ):
            yield Figure(case=left_out.of, table=f"{kind}: held out", column=column, value=value)
    for edge in ("low", "middle", "high"):
        factor: Factor = getattr(band, edge)
        for column, exposed, overlapped in (
            ("no exchange", 0.0, 0.0),
            ("half overlapped", 0.0, 0.5),
            ("half exposed", 0.5, 0.0),
            ("nine tenths exposed", 0.9, 0.0),
        ):
            value = factor.of(exposed=exposed, overlapped=overlapped)
            yield Figure(
                case=f"measured over simulated, {edge}",
                table=f"{kind}: band",
                column=column,
                value=float(f"{value:.3g}"),
            )
    for name, goal, value in (
        ("inside the band", 0.8, mean(one.inside / one.cells for one in held)),
        ("within 15%", 0.85, mean(one.close / one.cells for one in held)),
    ):
        yield Figure(
            case=f"{kind}: {len(cells)} cells of {len(held)} sets, each held out: {name}",
            value=value,
            goal=f"at least {goal}",
            holds=value >= goal,
        )


def write() -> None:
    text = json.dumps({name: asdict(one) for name, one in FITTED.items()}, indent=1)
    Path(bands.__file__).with_name("bands.json").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    is_written = "--write" in sys.argv
    sys.argv = [word for word in sys.argv if word != "--write"]
    main({"on GPUs": on_gpus, "on CPUs": on_cpus})
    if is_written:
        write()
