"""`offbeat doctor`: what is here, what the network does, and what that means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote

from pydantic import TypeAdapter
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from offbeat.errors import ConfigError
from offbeat_lab.cli.common import print_line, require_writable, working
from offbeat_lab.doctor import Diagnosis, diagnose
from offbeat_lab.doctor.diagnosis import (
    ALONE,
    cluster_of,
    display_link,
    display_seconds,
    require_measurable,
    within,
)
from offbeat_lab.doctor.facts import Finding
from offbeat_lab.doctor.measure import Measurement
from offbeat_lab.plan.plans import PlanRequest, make_plan, usual_strategies
from offbeat_lab.plan.profile import ModelProfile
from offbeat_lab.plan.shipped import named_profile

_MARKS = {"ok": "[green]ok[/green]", "missing": "[yellow]missing[/yellow]"}
_PAIRS_SHOWN = 10


def run(
    *,
    workers: int | None = None,
    write: Path | None = None,
    profile: str | None = None,
    as_json: bool = False,
) -> int:
    """Diagnose and, on rank 0, print. Returns the exit status: 1 when training on several workers
    is impossible here.

    Args:
        workers: local workers to measure between; None measures only where torchrun or srun started
            this command.
        write: where the measured cluster goes, as TOML.
        profile: a model to plan for on it.
        as_json: print one line of JSON in place of the tables.

    Raises:
        ConfigError: an argument that is not allowed, or a plan where nothing was measured.
    """
    model = None if profile is None else named_profile(profile)
    if write is not None:
        require_writable(write)
    if workers is None:
        diagnosis = diagnose()
    else:
        require_measurable(workers)
        with working(f"measuring what {workers} workers send each other", quiet=as_json):
            diagnosis = diagnose(workers=workers)
    if diagnosis is None:
        return 0
    if write is not None or model is not None:
        diagnosis = _with_cluster(diagnosis, write, model)
    if as_json:
        print(TypeAdapter(Diagnosis).dump_json(diagnosis).decode())
    else:
        print_diagnosis(Console(), diagnosis)
    return int(
        any(one.name in ("torch", "gloo") and one.state == "missing" for one in diagnosis.findings)
    )


def _with_cluster(diagnosis: Diagnosis, path: Path | None, model: ModelProfile | None) -> Diagnosis:
    """What was measured as a cluster, written to `path`; the advice is the plan for `model` on it.

    Raises:
        ConfigError: nothing was measured.
    """
    if diagnosis.measurement is None:
        raise ConfigError(f"nothing was measured, so there is no cluster. {ALONE}")
    cluster = cluster_of(diagnosis.measurement)
    remarks = [*diagnosis.advice, f"Measured: {cluster.describe()}."]
    if path is not None:
        path.write_text(cluster.to_toml(), encoding="utf-8")
        remarks.append(
            f"Written: {path}. Plan with it: offbeat plan --cluster {quote(str(path))} --script"
            " train.py"
        )
    if model is None:
        return replace(diagnosis, advice=remarks)
    strategies = usual_strategies(model)
    plan = make_plan(PlanRequest(profile=model, clusters=[cluster], strategies=strategies))
    best = plan.best(cluster.workers, plan.predictions[0].rate_bit_per_s)
    steps = ", ".join(
        f"{one.strategy} {display_seconds(one.step_s)}"
        for one in sorted(plan.predictions, key=lambda one: one.step_s)
    )
    return replace(
        diagnosis,
        verdict=f"{within(diagnosis.measurement)}Plan for {model.name}: {best.strategy},"
        f" {best.share_of_ideal:.0%} of the ideal.",
        advice=[*remarks, f"A step of {model.name}: {steps}.", *plan.remarks],
    )


def print_diagnosis(console: Console, diagnosis: Diagnosis) -> None:
    """The tables, and the verdict last, where the eye is."""
    console.print(_findings(diagnosis.findings))
    if diagnosis.measurement is not None:
        console.print(_network(diagnosis.measurement))
        console.print(_sockets(diagnosis.measurement))
    for sentence in diagnosis.advice:
        print_line(console, f"- {sentence}")
    print_line(console, diagnosis.verdict, "bold")


def _findings(findings: Sequence[Finding]) -> Table:
    table = Table(title="for training", title_justify="left", show_header=False)
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for one in findings:
        text = f"{one.value}: {one.means}" if one.value else one.means
        remedy = f"; to get it: {one.remedy}" if one.remedy else ""
        mark = "[dim]none[/dim]" if one.state == "missing" and not one.remedy else _MARKS[one.state]
        table.add_row(one.name, mark, escape(text + remedy))
    return table


def _network(measurement: Measurement) -> Table:
    title = f"between {measurement.world_size} workers, the slowest one's figures"
    table = Table(title=title, title_justify="left", show_header=False)
    network = measurement.network
    table.add_row("messages", display_link(network.messages))
    table.add_row(f"dense all-reduce ({measurement.device}), a hop", display_link(network.dense))
    table.add_row(
        "selection",
        f"{display_seconds(network.select_s_per_element * 1e6)} for each million elements",
    )
    pairs = sorted(measurement.pairs, key=lambda link: link.cost.beta_s_per_byte, reverse=True)
    for link in pairs[:_PAIRS_SHOWN]:
        table.add_row(f"worker {link.first} and worker {link.second}", display_link(link.cost))
    if len(pairs) > _PAIRS_SHOWN:
        table.add_row("", f"and {len(pairs) - _PAIRS_SHOWN} faster pairs")
    return table


def _sockets(measurement: Measurement) -> Table:
    table = Table(
        "worker",
        "opened by",
        "listens on",
        "",
        title="sockets that accept connections",
        title_justify="left",
    )
    for one in measurement.listening:
        address = f"[{one.address}]" if ":" in one.address else one.address
        open_to_all = "[yellow]every network[/yellow]" if one.is_open_to_all else ""
        table.add_row(str(one.rank), one.owner, escape(f"{address}:{one.port}"), open_to_all)
    return table
