"""Files of sparse rows, written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import BinaryIO

import numpy as np

from offbeat.errors import ConfigError
from offbeat.xmc.rows import Examples, SparseRows
from offbeat.xmc.xmlrepo import XmlFiles


def write(
    files: XmlFiles, samples: Iterable[Examples], *, header: tuple[int, int, int] | None
) -> int:
    """Write samples as `files` describes. Nothing is there under its name before all is written.

    Args:
        files: where, and the numbers to count from.
        samples: chunks, in order.
        header: rows, features, labels; None writes none, and the numbers of columns are lost.

    Returns:
        How many rows were written.

    Raises:
        ConfigError: a label's value is not 1 where everything goes into one file, or the header is
            not true.
    """
    unfinished = [path.with_name(f"{path.name}.unfinished") for path in files.paths]
    num_rows = 0
    try:
        with ExitStack() as stack:
            outputs = [stack.enter_context(path.open("wb")) for path in unfinished]
            if header is not None:
                _write_header(outputs, header)
            for chunk in samples:
                _write_chunk(outputs, chunk, files)
                num_rows += len(chunk)
        if header is not None and header[0] != num_rows:
            raise ConfigError(f"the header says {header[0]} rows, and there are {num_rows}")
        for path, target in zip(unfinished, files.paths, strict=True):
            path.replace(target)
    finally:
        for path in unfinished:
            path.unlink(missing_ok=True)
    return num_rows


def _write_header(outputs: Sequence[BinaryIO], header: tuple[int, int, int]) -> None:
    num_rows, num_features, num_labels = header
    if len(outputs) == 1:
        outputs[0].write(b"%d %d %d\n" % header)
        return
    outputs[0].write(b"%d %d\n" % (num_rows, num_features))
    outputs[1].write(b"%d %d\n" % (num_rows, num_labels))


def _write_chunk(outputs: Sequence[BinaryIO], chunk: Examples, files: XmlFiles) -> None:
    features = _lines(chunk.features, _entries(chunk.features, files.first_feature), " ")
    if files.labels_path is not None:
        labels = _lines(chunk.labels, _entries(chunk.labels, files.first_label), " ")
        outputs[0].write("\n".join([*features, ""]).encode())
        outputs[1].write("\n".join([*labels, ""]).encode())
        return
    if np.any(chunk.labels.values != 1):
        raise ConfigError(
            "labels with values other than 1 do not fit into one file with the features; write"
            " labels to a file of their own"
        )
    labels = _lines(
        chunk.labels,
        [str(label) for label in (chunk.labels.columns + files.first_label).tolist()],
        ",",
    )
    outputs[0].write(
        "".join(f"{of} {row}\n" for of, row in zip(labels, features, strict=True)).encode()
    )


def _entries(rows: SparseRows, first: int) -> list[str]:
    distinct, which = np.unique(rows.values, return_inverse=True)
    texts = [
        str(value).removesuffix(".0") for value in distinct
    ]  # the shortest text that reads as the same float32
    columns = (rows.columns.astype(np.int64) + first).tolist()
    return [
        f"{column}:{texts[value]}" for column, value in zip(columns, which.tolist(), strict=True)
    ]


def _lines(rows: SparseRows, tokens: list[str], separator: str) -> list[str]:
    bounds = rows.offsets.tolist()
    return [separator.join(tokens[begin:end]) for begin, end in pairwise(bounds)]
