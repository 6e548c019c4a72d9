"""`offbeat plan` and `offbeat profile`."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from offbeat.errors import ConfigError

if TYPE_CHECKING:
    from offbeat.lab.cluster import Cluster
    from offbeat.plan.predictions import Plan

_RANGE = re.compile(r"(\d{1,6})\.\.(\d{1,6})")
_MOST_CLUSTERS = 200


def plan(
    profile: Annotated[
        str, typer.Option(help="A profile's JSON file, or a shipped one: resnet50, vgg16, gpt2.")
    ],
    cluster: Annotated[
        str | None, typer.Option(help="A cluster: a TOML file, or the name of a preset.")
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="Rates to compare: 1gbit,10gbit, or 1gbit/0.2ms.")
    ] = None,
    latency: Annotated[str | None, typer.Option(help="One way, of every link: 0.1ms.")] = None,
    workers: Annotated[
        str | None, typer.Option(help="2,4,8, or 8..1024 for all doublings between.")
    ] = None,
    strategies: Annotated[
        str | None, typer.Option(help="With options, as gtopk:density=0.001; commas between.")
    ] = None,
    delay: Annotated[str | None, typer.Option(help="Straggling: 2x320ms.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Of a worker (default: the profile's).")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also write a page of HTML here.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON, and nothing else.")
    ] = False,
) -> None:
    """Predict which strategy is fastest on which cluster."""
    from offbeat.plan.page import write_page
    from offbeat.plan.predictions import USUAL, PlanRequest, make_plan
    from offbeat.plan.shipped import named_profile

    model = named_profile(profile)
    if batch_size is not None:
        model = model.at_batch_size(batch_size)
    clusters = _clusters(cluster, link, latency, workers, delay)
    specs = tuple(USUAL) if strategies is None else tuple(strategies.split(","))
    made = make_plan(PlanRequest(profile=model, clusters=clusters, strategies=specs))
    if out is not None:
        write_page(made, out)
    if as_json:
        print(json.dumps([asdict(one) for one in made.predictions]))
    else:
        _show(made, out)


def profile(
    task: Annotated[str, typer.Option(help="What to train; `offbeat tasks` lists them.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An option of the task."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps that are timed, at each batch size.")] = 20,
    out: Annotated[Path | None, typer.Option(help="Where to (default: standard output).")] = None,
) -> None:
    """Time solo steps of a task, for `offbeat plan`."""
    from offbeat.plan.measure import measure_task

    text = measure_task(task, settings or [], steps=steps).to_json()
    if out is None:
        print(text, end="")
    else:
        out.write_text(text, encoding="utf-8")


def parse_workers(text: str) -> list[int]:
    """`2,4,8` or `8..1024`, which doubles. Raises `ConfigError` for anything else."""
    numbers: list[int] = []
    for part in text.split(","):
        if match := _RANGE.fullmatch(part.strip()):
            number, last = int(match[1]), int(match[2])
            while 1 <= number <= last:
                numbers.append(number)
                number *= 2
        elif part.strip().isdecimal():
            numbers.append(int(part))
        else:
            numbers = []
            break
    if not numbers or min(numbers) < 1:
        raise ConfigError(
            f"--workers is {text!r}; allowed are numbers from 1 on with commas between them, and"
            " ranges such as 8..1024"
        )
    return sorted(set(numbers))


def _clusters(
    cluster: str | None,
    link: str | None,
    latency: str | None,
    workers: str | None,
    delay: str | None,
) -> list[Cluster]:
    from offbeat.lab.cluster import from_flags

    links: list[str | None] = [None] if link is None else [*link.split(",")]
    numbers: list[int | None] = [None] if workers is None else [*parse_workers(workers)]
    if len(links) * len(numbers) > _MOST_CLUSTERS:
        raise ConfigError(
            f"{len(links)} links and {len(numbers)} numbers of workers are more than"
            f" {_MOST_CLUSTERS} clusters; ask for fewer"
        )
    return [
        from_flags(cluster=cluster, workers=number, link=rate, latency=latency, delay=delay)
        for rate in links
        for number in numbers
    ]


def _show(made: Plan, out: Path | None) -> None:
    from offbeat.lab.cluster.quantities import display_rate

    console = Console()
    for rate in sorted({one.rate_bit_per_s for one in made.predictions}):
        for number in sorted({one.workers for one in made.predictions}):
            best = made.best(number, rate)
            table = Table(title=f"{number} workers, {display_rate(rate)}", title_justify="left")
            table.add_column("strategy")
            for head in ("step", "band", "samples/s", "MB sent", "ideal", "memory"):
                table.add_column(head, justify="right")
            table.add_column("binds")
            for one in made.predictions:
                if (one.workers, one.rate_bit_per_s) != (number, rate):
                    continue
                name = f"[bold]{one.strategy}[/bold]" if one is best else one.strategy
                table.add_row(
                    name,
                    f"{one.step_s:.3g} s",
                    f"{one.low_s:.3g} to {one.high_s:.3g}",
                    f"{one.samples_per_s:.4g}",
                    f"{one.bytes_per_step / 1e6:.3g}",
                    f"{one.share_of_ideal:.0%}",
                    f"{one.memory_bytes / 1e6:.0f} MB",
                    one.binds,
                )
            console.print(table)
    for sentence in (*made.crossovers, *made.remarks):
        console.print(sentence, highlight=False)
    cluster = made.request.clusters[0]
    best = made.best(cluster.workers, cluster.link.rate_bit_per_s or float("inf"))
    console.print(
        f"To check in the lab: offbeat compare --strategies {_to_check(best.strategy)}"
        f" --workers {min(4, cluster.workers)} --link {_link_text(cluster)}",
        highlight=False,
        soft_wrap=True,
    )
    if out is not None:
        console.print(f"Page: {out}", highlight=False)


def _to_check(strategy: str) -> str:
    """The recommended strategy beside plain DDP; what exchanges nothing takes part anyway."""
    return ",".join(dict.fromkeys(["ddp", *({strategy} - {"alone"})]))


def _link_text(cluster: Cluster) -> str:
    from offbeat.lab.cluster.quantities import duration_text, rate_text

    rate = rate_text(cluster.link.rate_bit_per_s or 1e13)
    latency_s = cluster.link.latency_s
    return f"{rate}/{duration_text(latency_s)}" if latency_s else rate
