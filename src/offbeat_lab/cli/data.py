"""`offbeat data`: look at files of sparse rows, turn one layout into another, and make some up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from offbeat.errors import ConfigError, nearest

if TYPE_CHECKING:
    from offbeat_lab.sparse_data import Inspection

data = typer.Typer(
    help="Look at, convert and generate data of the Extreme Classification Repository's format.",
    no_args_is_help=True,
)

LabelsFile = Annotated[
    Path | None,
    typer.Option(
        "--labels-file",
        help="The labels, where FILE or SOURCE holds features only (the new layout).",
    ),
]
FirstFeature = Annotated[
    int, typer.Option(help="The number of the first feature in the files, 0 or 1.")
]
FirstLabel = Annotated[
    int, typer.Option(help="The number of the first label in the files, 0 or 1.")
]
NumFeatures = Annotated[
    int | None, typer.Option("--features", help="How many there are, whatever the file says.")
]
NumLabels = Annotated[
    int | None, typer.Option("--labels", help="How many there are, whatever the file says.")
]
TargetLabels = Annotated[
    Path | None,
    typer.Option(
        "--target-labels-file",
        help="Write labels here, and features alone to TARGET (the new layout).",
    ),
]
FeaturesOut = Annotated[
    int, typer.Option(help="The number of the first feature in what is written, 0 or 1.")
]
LabelsOut = Annotated[
    int, typer.Option(help="The number of the first label in what is written, 0 or 1.")
]


@data.command()
def inspect(
    file: Annotated[
        Path, typer.Argument(help="Rows of labels and features, or of features alone.")
    ],
    labels_file: LabelsFile = None,
    features: NumFeatures = None,
    labels: NumLabels = None,
    first_feature: FirstFeature = 0,
    first_label: FirstLabel = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON in place of the table.")
    ] = False,
) -> None:
    """Read a file from end to end and say what is in it; the first line that cannot be read is
    named, and why.
    """
    import json
    from dataclasses import asdict

    from offbeat.xmc.xmlrepo import XmlFiles
    from offbeat_lab.sparse_data import inspect as count

    files = XmlFiles(
        path=file,
        labels_path=labels_file,
        num_features=features,
        num_labels=labels,
        first_feature=first_feature,
        first_label=first_label,
    )
    with _files_named():
        found = count(files)
    if as_json:
        print(json.dumps(asdict(found)))
    else:
        _print_inspection(
            f"{file}: {found.num_rows:,} rows", found, _hints(found, first_feature, first_label)
        )


@data.command()
def convert(
    source: Annotated[Path, typer.Argument(help="What to read.")],
    target: Annotated[Path, typer.Argument(help="New file to write.")],
    labels_file: LabelsFile = None,
    target_labels_file: TargetLabels = None,
    features: NumFeatures = None,
    labels: NumLabels = None,
    first_feature: FirstFeature = 0,
    first_label: FirstLabel = 0,
    target_first_feature: FeaturesOut = 0,
    target_first_label: LabelsOut = 0,
    header: Annotated[bool, typer.Option(help="Begin with a line of sizes.")] = True,
) -> None:
    """Write the same samples in another layout: one file or two, with or without a header, counted
    from 0 or from 1.
    """
    from offbeat.xmc.xmlrepo import XmlFiles
    from offbeat_lab.sparse_data import convert as convert_files

    files = XmlFiles(
        path=source,
        labels_path=labels_file,
        num_features=features,
        num_labels=labels,
        first_feature=first_feature,
        first_label=first_label,
    )
    written = XmlFiles(
        path=target,
        labels_path=target_labels_file,
        first_feature=target_first_feature,
        first_label=target_first_label,
    )
    _require_new(written.paths)
    with _files_named():
        num_rows = convert_files(files, written, header=header)
    print(f"{num_rows:,} rows in {_joined(written.paths)}")


@data.command()
def generate(
    target: Annotated[Path, typer.Argument(help="New file to write.")],
    rows: Annotated[int, typer.Option(help="Samples.")],
    features: Annotated[
        int, typer.Option(help="Columns of the features (default: Amazon-670k's).")
    ] = 135_909,
    labels: Annotated[
        int, typer.Option(help="Columns of the labels (default: Amazon-670k's).")
    ] = 670_091,
    draws: Annotated[
        float, typer.Option(help="Features drawn for a row on average; repeated ones become one.")
    ] = 119.0,
    mean_labels: Annotated[float, typer.Option(help="Labels of a row on average.")] = 5.45,
    split: Annotated[
        str, typer.Option(help="train or test: other rows of the same law.")
    ] = "train",
    seed: Annotated[int, typer.Option(help="Of everything.")] = 0,
    target_labels_file: TargetLabels = None,
) -> None:
    """Draw sparse data with something to learn: Zipf features and labels, log-normal lengths, by
    default like Amazon-670k.
    """
    from offbeat.xmc.xmlrepo import XmlFiles
    from offbeat_lab.sparse_data import Split, Synthetic, write

    if split not in get_args(Split):
        allowed = get_args(Split)
        raise ConfigError(
            f"--split is {split!r}; allowed are {', '.join(allowed)}{nearest(split, allowed)}"
        )
    like = Synthetic(
        num_features=features,
        num_labels=labels,
        mean_draws=draws,
        mean_labels=mean_labels,
        seed=seed,
    )
    written = XmlFiles(path=target, labels_path=target_labels_file)
    _require_new(written.paths)
    with _files_named():
        num_rows = write(
            written, like.read(rows, split=cast(Split, split)), header=(rows, features, labels)
        )
    print(f"{num_rows:,} rows in {_joined(written.paths)}")


@contextmanager
def _files_named() -> Iterator[None]:
    """What the operating system says against a file becomes one sentence."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{error.filename or 'a file'} cannot be read or written: {error.strerror}"
        ) from None


def _require_new(paths: Sequence[Path]) -> None:
    for path in paths:
        if path.exists():
            raise ConfigError(f"{path} exists; choose another name, or remove it first")
        if not path.parent.is_dir():
            raise ConfigError(f"there is no directory {path.parent} for {path.name}; make it first")
    if len(set(paths)) < len(paths):
        raise ConfigError(
            f"features and labels are both to be written to {paths[0]}; give them two names"
        )


def _joined(paths: Sequence[Path]) -> str:
    return " and ".join(map(str, paths))


def _hints(found: Inspection, first_feature: int, first_label: int) -> list[str]:
    hints = []
    for what, lowest, first in (
        ("feature", found.lowest_feature, first_feature),
        ("label", found.lowest_label, first_label),
    ):
        if first == 0 and lowest == 1:
            hints.append(
                f"no {what} 0 occurs; if {what}s are counted from 1, pass --first-{what} 1"
            )
    if not found.has_header:
        hints.append(
            "the file has no header, so it does not say how many features and labels there may be"
        )
    return hints


def _print_inspection(title: str, found: Inspection, hints: Sequence[str]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("", "features", "labels", title=escape(title), title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    num_rows = max(found.num_rows, 1)
    for name, of_features, of_labels in (
        ("how many", found.num_features, found.num_labels),
        ("that occur", found.features_seen, found.labels_seen),
        ("lowest number", found.lowest_feature, found.lowest_label),
        ("entries", found.num_entries, found.num_label_entries),
        (
            "of a row, on average",
            round(found.num_entries / num_rows, 2),
            round(found.num_label_entries / num_rows, 2),
        ),
        ("of a row, at most", found.longest_row, found.most_labels),
        ("rows without any", found.rows_without_features, found.rows_without_labels),
    ):
        table.add_row(
            name,
            *("none" if number is None else f"{number:,}" for number in (of_features, of_labels)),
        )
    console = Console()
    console.print(table)
    for hint in hints:
        console.print(f"note: {hint}", highlight=False, soft_wrap=True)
