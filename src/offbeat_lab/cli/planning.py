"""`offbeat plan` and `offbeat profile`."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from offbeat.errors import ConfigError
from offbeat_lab.cli.common import (
    CLUSTER,
    OUTPUT,
    WHAT,
    JsonFlag,
    flag,
    names_in,
    print_line,
    require_writable,
)

if TYPE_CHECKING:
    from offbeat_lab.cluster import Cluster
    from offbeat_lab.plan.plans import Plan
    from offbeat_lab.plan.profile import ModelProfile


_what = partial(flag, WHAT)
_where = partial(flag, CLUSTER)
_money = partial(flag, "Time and money")
_output = partial(flag, OUTPUT)

_PRICE = re.compile(r"[$\u20ac]?(\d+(?:\.\d+)?)(?:/h)?")
_RANGE = re.compile(r"(\d{1,6})\.\.(\d{1,6})")
_MOST_CLUSTERS = 200
_SCRIPT_STEPS = 20
_LEAST_COLUMNS = 80
_NAME_COLUMNS = 12  # with all other columns that is as many


def plan(
    context: typer.Context,
    profile: Annotated[
        str | None, _what("A profile's JSON file, or a shipped one: resnet50, vgg16, gpt2.")
    ] = None,
    script: Annotated[
        str | None, _what("Or your script with its arguments, profiled here at first.")
    ] = None,
    config: Annotated[
        str | None,
        _what("Or a language model: its config.json, or layers=32,hidden=4096,heads=32."),
    ] = None,
    device: Annotated[
        str | None, _what("That --config is for: h100, rtx-4090 (default: a100).")
    ] = None,
    sequence: Annotated[int | None, _what("Tokens of a sample of --config.")] = None,
    dtype: Annotated[
        str,
        _what("Of weights and gradients: bfloat16 or float32 (default for --config: bfloat16)."),
    ] = "",
    batch_size: Annotated[
        int | None, _what("Of a device (default: the profile's, 1 for --config).")
    ] = None,
    accumulate: Annotated[int, _what("Batches whose gradients are exchanged together.")] = 1,
    strategies: Annotated[
        str | None, _what("With options, as gtopk:density=0.001; commas between.")
    ] = None,
    cluster: Annotated[str | None, _where("A TOML file, or the name of a preset.")] = None,
    link: Annotated[str | None, _where("Rates to compare: 1gbit,10gbit, or 1gbit/0.2ms.")] = None,
    latency: Annotated[str | None, _where("One way, of every link: 0.1ms.")] = None,
    workers: Annotated[str | None, _where("2,4,8, or 8..1024 for all doublings between.")] = None,
    island: Annotated[
        int, _where("Devices of a node that divide the model by FSDP: then a worker is a node.")
    ] = 1,
    delay: Annotated[str | None, _where("Straggling: 2x320ms.")] = None,
    deaths: Annotated[float | None, _where("Of a worker, an hour: 0.01.")] = None,
    price: Annotated[str | None, _money("Of a device: 2.10/h.")] = None,
    tokens: Annotated[float | None, _money("Until so many tokens: 300e9.")] = None,
    samples: Annotated[float | None, _money("Or samples: 1e8.")] = None,
    steps_from: Annotated[
        Path | None, _money("Or to its target, from a comparison's directory.")
    ] = None,
    check: Annotated[
        Path | None, _output("A comparison's directory: how well it would have been predicted.")
    ] = None,
    out: Annotated[
        Path | None, _output("With --check: where the profile goes, with what was checked.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Predict which strategy is fastest on which cluster, and what it costs."""
    from offbeat_lab.plan.language_models import (
        PCIE_BYTES_PER_S,
        device_named,
        language_model,
        node_bytes_per_s,
        read_shape,
    )
    from offbeat_lab.plan.plans import PlanRequest, make_plan, plan_as_json, usual_strategies
    from offbeat_lab.plan.steps_to_target import steps_to_target

    if out is not None:
        require_writable(out)
    if check is not None:
        given = {
            f"--{name.replace('_', '-')}"
            for name in context.params.keys() - {"profile", "check", "out", "as_json"}
            if (source := context.get_parameter_source(name)) and source.name == "COMMANDLINE"
        }
        if given:
            raise ConfigError(
                "--check takes the cluster and what is trained from the comparison, and predicts"
                f" its strategies; leave {', '.join(sorted(given))} out"
            )
        _check(check, profile, out, as_json=as_json)
        return
    if out is not None:
        raise ConfigError("--out is where --check writes a profile; a plan is printed, or --json")
    if dtype not in ("", "float32", "bfloat16"):
        raise ConfigError(f"--dtype is {dtype!r}; allowed are bfloat16 and float32")
    numbers = {"accumulate": accumulate, "island": island, "batch-size": batch_size}
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ConfigError(f"--{name} is {number}; allowed is 1 or more")
    if config is None:
        if sequence is not None:
            raise ConfigError("--sequence is of --config; a profile has samples as it was timed")
        if device is not None:
            raise ConfigError("--device is of --config; a profile is of the device it was timed on")
        model = _what_to_plan(profile, script)
        if batch_size is not None:
            model = model.at_batch_size(batch_size)
        if dtype:
            model = replace(model, element_bytes=4 if dtype == "float32" else 2)
    elif profile is not None or script is not None:
        raise ConfigError("got --config and --profile or --script; give one of them")
    else:
        model = language_model(
            read_shape(config, sequence),
            device_named(device or "a100"),
            batch_size=batch_size or 1,
            element_bytes=4 if dtype == "float32" else 2,
        )
    if island > 1:
        rate = node_bytes_per_s(model.device) or PCIE_BYTES_PER_S
        model = model.on_island(island, rate)
    model = model.accumulated(accumulate)
    clusters = _clusters(cluster, link, latency, workers, delay, deaths)
    specs = tuple(dict.fromkeys(names_in(strategies))) or usual_strategies(model)
    asked = _samples(model, tokens, samples, steps_from, is_priced=price is not None)
    to_target = None if steps_from is None else steps_to_target(steps_from, specs, model)
    request = PlanRequest(
        profile=model,
        clusters=clusters,
        strategies=specs,
        to_target=to_target,
        samples=asked,
        price=None if price is None else _price(price),
    )
    with Console(stderr=True).status("Planning") as status:
        made = make_plan(request, lambda what: status.update(f"Planning {escape(what)}"))
    if as_json:
        print(json.dumps(plan_as_json(made)))
    else:
        _show(made)


def _samples(
    model: ModelProfile,
    tokens: float | None,
    samples: float | None,
    steps_from: Path | None,
    *,
    is_priced: bool,
) -> float | None:
    """How many are asked for; a round number where there is only a price."""
    if sum(one is not None for one in (tokens, samples, steps_from)) > 1:
        raise ConfigError("got two of --tokens, --samples and --steps-from; give one of them")
    for flag_name, amount in (("--tokens", tokens), ("--samples", samples)):
        if amount is not None and not 0 < amount < math.inf:
            raise ConfigError(f"{flag_name} is {amount:g}; allowed are finite numbers above 0")
    if tokens is not None and not model.tokens_per_sample:
        raise ConfigError(
            f"--tokens is of text, and profile {model.name!r} does not say how many a sample has;"
            " give --samples"
        )
    if is_priced and (tokens, samples, steps_from) == (None, None, None):
        tokens, samples = (1e9, None) if model.tokens_per_sample else (None, 1e6)
    return tokens / model.tokens_per_sample if tokens is not None else samples


def _price(text: str) -> float:
    """Of an hour: `2.10`, `2.10/h`, `$2.10/h`. Raises `ConfigError` for anything else."""
    match = _PRICE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--price is {text!r}; allowed is a number an hour, such as 2.10/h")
    return float(match[1])


def profile(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- SCRIPT [ARGUMENTS]...]", help="Your own script.", show_default=False
        ),
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="A task in its place; `offbeat tasks` lists them.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An option of the task."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps that are timed, at each batch size.")] = 20,
    also: Annotated[
        str | None,
        typer.Option(
            help="Arguments that give the script another batch size: '--batch-size 16'. It is"
            " timed with both."
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Samples of a batch, where nothing else says it.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where to (default: standard output).")] = None,
) -> None:
    """Time solo steps of your script or of a task, for `offbeat plan`."""
    from offbeat.run.plan import script_command
    from offbeat_lab.options import route
    from offbeat_lab.plan.measure import measure_task
    from offbeat_lab.plan.script_timing import measure_script

    if out is not None:
        require_writable(out)
    if bool(words) == (task is not None):
        raise ConfigError(
            f"got {'a script and --task' if words else 'nothing'} to profile; give one of: --task"
            " (offbeat tasks lists them), or a script of your own after two dashes: -- train.py"
        )
    if words and settings:
        raise ConfigError("--set is for tasks; a script takes its own arguments after its name")
    if batch_size is not None and batch_size < 1:
        raise ConfigError(f"--batch-size is {batch_size}; allowed is 1 or more")
    if task is not None and (also is not None or batch_size is not None):
        raise ConfigError(
            "--also and --batch-size are for scripts; a task is timed at its batch size and at half"
            " of it: --set batch_size=64"
        )
    if task is not None:
        options, _ = route(task, "allreduce", settings or [])
        made = measure_task(task, options, steps=steps)
    else:
        made = measure_script(
            script_command(words or []),
            steps=steps,
            also=shlex.split(also or ""),
            batch_size=batch_size,
            inform=_inform,
        )
    text = made.to_json()
    if out is None:
        print(text, end="")
    else:
        out.write_text(text, encoding="utf-8")


def _what_to_plan(profile: str | None, script: str | None) -> ModelProfile:
    from offbeat.run.plan import script_command
    from offbeat_lab.plan.script_timing import measure_script
    from offbeat_lab.plan.shipped import named_profile

    if (profile is None) == (script is None):
        raise ConfigError(
            "nothing to plan for; give --profile (a file, or resnet50), --script or --config"
            if profile is None
            else f"got --profile {profile} and --script; give one of them"
        )
    if profile is not None:
        return named_profile(profile)
    assert script is not None
    print(f"offbeat: timing {_SCRIPT_STEPS} steps of {script}", file=sys.stderr)
    return measure_script(script_command(shlex.split(script)), steps=_SCRIPT_STEPS, inform=_inform)


def _inform(remark: str) -> None:
    print(f"offbeat: {remark}", file=sys.stderr)


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
    deaths: float | None,
) -> list[Cluster]:
    from offbeat_lab.cluster import from_flags

    links: list[str | None] = [None] if link is None else [*link.split(",")]
    numbers: list[int | None] = [None] if workers is None else [*parse_workers(workers)]
    if len(links) * len(numbers) > _MOST_CLUSTERS:
        raise ConfigError(
            f"{len(links)} links and {len(numbers)} numbers of workers are more than"
            f" {_MOST_CLUSTERS} clusters; ask for fewer"
        )
    found = [
        from_flags(cluster=cluster, workers=number, link=rate, latency=latency, delay=delay)
        for rate in links
        for number in numbers
    ]
    if deaths is not None:
        found = [one.changed(deaths_per_hour=deaths) for one in found]
    if len({(one.workers, one.link.rate_bit_per_s) for one in found}) < len(found):
        raise ConfigError(
            f"--link {link} has one rate twice; plans for other latencies are made one at a time"
        )
    return found


def _show(made: Plan) -> None:
    from offbeat_lab.plan.tables import column_words, plan_tables

    console = Console()
    for found in plan_tables(made):
        table = Table(
            title=found.title,
            title_justify="left",
            box=box.SIMPLE_HEAD,
            padding=0,
            show_edge=False,
        )
        first, *others = found.heads
        longest = max(len(cells[0]) for cells in found.rows)
        table.add_column(first, overflow="fold", min_width=min(_NAME_COLUMNS, longest))
        for head in others:
            table.add_column(head, justify="right", no_wrap=True)
        for number, cells in enumerate(found.rows):
            table.add_row(*map(escape, cells), style="bold" if number == found.best else "")
        # A narrower terminal breaks lines; cut to its width, names and digits would be missing.
        Console(width=max(console.width, _LEAST_COLUMNS)).print(table)
    console.print(column_words(made), highlight=False, style="dim")
    for sentence in (*made.crossovers, *made.remarks):
        print_line(console, sentence)


def _check(directory: Path, profile: str | None, out: Path | None, *, as_json: bool) -> None:
    """Predicted against measured steps of a comparison, misses first."""
    from offbeat_lab.plan.check import WITHIN, check_comparison
    from offbeat_lab.plan.shipped import named_profile

    found = check_comparison(directory, None if profile is None else named_profile(profile))
    if out is not None:
        out.write_text(found.profile.to_json(), encoding="utf-8")
    if as_json:
        print(json.dumps([asdict(one) for one in found.steps]))
        return
    console = Console()
    table = Table(title=f"{directory.name}: {found.where}", title_justify="left")
    table.add_column("strategy")
    for head in ("measured", "predicted", "ratio", "repeats differ"):
        table.add_column(head, justify="right")
    table.add_column("")
    for one in found.steps:
        if one.predicted_s is None:
            note = one.why
        elif one.repeats_differ is None:
            note = (
                f"not judged: nothing was repeated; train for {one.needs_steps} --steps or more, or"
                " with several --seeds"
            )
        elif not one.is_judged:
            note = "not judged: its repeats differ too much"
        else:
            note = "" if one.error <= WITHIN else "[red]missed[/red]"
        table.add_row(
            escape(one.strategy),
            f"{one.measured_s:.3g} s",
            "" if one.predicted_s is None else f"{one.predicted_s:.3g} s",
            "" if one.predicted_s is None else f"{one.ratio:.2f}",
            "" if one.repeats_differ is None else f"{one.repeats_differ:.0%}",
            note,
        )
    console.print(table)
    if not found.judged:
        console.print("Nothing could be judged: train for longer, on a machine that is quiet.")
        return
    print_line(
        console,
        f"{found.share_within:.0%} of {len(found.judged)} strategies within {WITHIN:.0%}; median"
        f" error {found.median_error:.1%}; {len(found.misplaced)} of {len(found.apart)} pairs that"
        f" differ by more than {WITHIN:.0%} in the wrong order.",
    )
    if out is not None:
        print_line(console, f"Profile with this check: {out}")
