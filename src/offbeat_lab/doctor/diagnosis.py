"""Everything that `offbeat doctor` found out, put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.errors import ConfigError
from offbeat.transport.connect import launched
from offbeat_lab.doctor.advice import (
    QUESTION,
    USUAL_DENSITY,
    USUAL_SIZES,
    Prediction,
    advise,
    predict,
    verdict,
)
from offbeat_lab.doctor.facts import Finding, find_all
from offbeat_lab.doctor.local import measure_locally
from offbeat_lab.doctor.measure import Measurement, measure
from offbeat_lab.doctor.pairs import slow_workers

MAX_PARAMETERS = 10**12
ALONE = (
    "Nothing was measured, since this command was started alone. Start it as you start training, on"
    " every host: torchrun --nnodes 2 --node-rank 0 --nproc-per-node 1 --master-addr HOST"
    " --master-port 29500 -m offbeat_lab.cli doctor, or srun python -m offbeat_lab.cli doctor. With"
    " --workers 4 it measures among four workers of this machine."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What rank 0 prints.

    Attributes:
        findings: what is there on rank 0's host.
        measurement: between the workers; None when started alone.
        predictions: of the exchange alone, one for each size of model; empty without a measurement.
        verdict: all of it in a sentence; of exchanges alone, unless a model is planned for.
        advice: a sentence or two for each size, and what else should be known.
    """

    findings: list[Finding]
    measurement: Measurement | None
    predictions: list[Prediction]
    verdict: str
    advice: list[str]


def diagnose(
    *,
    workers: int | None = None,
    parameters: Sequence[int] | None = (),
    density: float = USUAL_DENSITY,
) -> Diagnosis | None:
    """Look, measure and judge. Collective where torchrun or srun started this process; None on
    ranks other than 0.

    Args:
        workers: how many to start on this machine, when started alone; None measures nothing then.
        parameters: sizes of models to speak about, 1 to 10**12; by default 1, 25 and 100 million;
            None: of no exchange alone, since a plan follows.
        density: of gTop-k, 0 < density <= 1.

    Raises:
        ConfigError: an argument that is not allowed.
        OffbeatError: the workers cannot reach each other.
    """
    _check(parameters or (), density)
    launch = launched()
    if launch is not None and workers is not None:
        raise ConfigError(
            f"--workers is {workers}, but torchrun or srun has started {launch.world_size}; leave"
            " it out"
        )
    measurement = None
    if launch is not None and launch.world_size > 1:
        measurement = measure()
        if launch.rank != 0:
            return None
    elif workers is not None:
        measurement = measure_locally(workers)
    sizes = () if parameters is None else parameters or USUAL_SIZES
    return analyse(find_all(), measurement, sizes=sizes, density=density)


def analyse(
    findings: list[Finding],
    measurement: Measurement | None,
    *,
    sizes: Sequence[int],
    density: float,
) -> Diagnosis:
    """What the findings and the measurement mean, in words. Pure.

    Args:
        findings: about this machine.
        measurement: of the network; None where none was made.
        sizes: numbers of parameters to predict exchanges of; none: nothing is advised.
        density: of compressed gradients in these predictions, in (0, 1].
    """
    if measurement is None:
        return Diagnosis(
            findings=findings, measurement=None, predictions=[], verdict=ALONE, advice=[]
        )
    world_size, network = measurement.world_size, measurement.network
    predictions = [
        predict(network, world_size=world_size, num_parameters=size, density=density)
        for size in sizes
    ]
    advice = [
        advise(prediction, network=network, world_size=world_size) for prediction in predictions
    ]
    return Diagnosis(
        findings=findings,
        measurement=measurement,
        predictions=predictions,
        verdict=within(measurement) + (verdict(predictions) if predictions else ""),
        advice=[*advice, *_remarks(measurement, predictions)],
    )


def within(measurement: Measurement) -> str:
    """What a verdict begins with where it says nothing of a network."""
    return "Within this host: " if measurement.on_one_host else ""


def _remarks(measurement: Measurement, predictions: Sequence[Prediction]) -> list[str]:
    remarks = [QUESTION] if predictions else []
    if measurement.on_one_host:
        remarks.append(
            "All workers are on one host: unless its network is an emulated one, this is what its"
            " memory and cores do, and no measure of a network."
        )
    remarks += [
        f"Worker {rank} ({measurement.hosts[rank].name}) has slow links to all others, and"
        " everybody waits for the slowest: look at its cable, its switch port and what else runs"
        " there."
        for rank in slow_workers(measurement.pairs, measurement.world_size)
    ]
    if len(versions := {host.torch for host in measurement.hosts}) > 1:
        remarks.append(
            f"The workers have different versions of torch ({', '.join(sorted(versions))}): install"
            " the same one."
        )
    open_to_all = [socket for socket in measurement.listening if socket.is_open_to_all]
    for owner in sorted({socket.owner for socket in open_to_all}):
        ports = ", ".join(
            sorted(
                {
                    f"{socket.address} port {socket.port}"
                    for socket in open_to_all
                    if socket.owner == owner
                }
            )
        )
        remarks.append(
            f"Open to every network: {owner}, {ports}. Keep strangers out with a firewall or a"
            " private network."
        )
    return remarks


def _check(parameters: Sequence[int], density: float) -> None:
    for size in parameters:
        if not 1 <= size <= MAX_PARAMETERS:
            raise ConfigError(f"--parameters is {size}; allowed is 1 to {MAX_PARAMETERS:,}")
    if not 0 < density <= 1:
        raise ConfigError(f"--density is {density}; allowed is more than 0, up to 1")
