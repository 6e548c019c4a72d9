"""Data that somebody damaged or made up, and the property that every reader has: it succeeds or
raises an `OffbeatError`, and takes little memory.
"""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from hypothesis import strategies as st

from offbeat.errors import OffbeatError

NESTED = "[" * 100_000
NESTED_OBJECTS = '{"a":' * 100_000
LONG_NUMBER = "9" * 5000

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from([0, -1, 1 << 31, 1 << 63, 10**300])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["..", "../../etc/passwd", "/etc/passwd", "\0", "\ud800", "1e999gbit"])
)
JSON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
"""Any value that JSON can hold, with some that are likely to hurt."""


def places_in(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to all values in a document."""
    inner: Any = ()
    if isinstance(document, dict):
        inner = document.items()
    elif isinstance(document, list):
        inner = enumerate(document)
    return [path, *(place for key, part in inner for place in places_in(part, (*path, key)))]


@st.composite
def altered(draw: st.DrawFn, document: Any) -> Any:
    """The document with one or two values replaced, removed or added."""
    document = json.loads(json.dumps(document))
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from(places_in(document)))
        value = draw(JSON)
        if not path:
            return value
        holder = document
        for key in path[:-1]:
            holder = holder[key]
        match draw(st.sampled_from(["replace", "remove", "add"])):
            case "replace":
                holder[path[-1]] = value
            case "remove":
                del holder[path[-1]]
            case "add" if isinstance(holder, dict):
                holder[draw(st.text(max_size=8))] = value
            case "add":
                holder.append(value)
    return document


def altered_text(document: Any) -> st.SearchStrategy[bytes]:
    """JSON that says something else than `document`, or is none."""
    text = json.dumps(document)
    whole = altered(document).map(json.dumps)
    nested = st.sampled_from([NESTED, NESTED_OBJECTS, LONG_NUMBER, "", "\ufeff" + text])
    return (whole | nested).map(lambda said: said.encode(errors="surrogatepass")) | altered_bytes(
        text.encode()
    )


@st.composite
def altered_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """The content cut off, or with some bytes replaced, or with some more."""
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(changed)))
        end = draw(st.integers(at, min(at + 8, len(changed))))
        changed[at:end] = draw(st.binary(max_size=8))
    return bytes(changed[: draw(st.sampled_from([len(changed), len(changed) // 2]))])


def succeeds_or_refuses(read: Callable[[], object]) -> None:
    """Any other error than an `OffbeatError` fails the test."""
    with suppress(OffbeatError):
        read()


@contextmanager
def bounded_memory(num_bytes: int) -> Iterator[None]:
    """Fails when Python and numpy take more than so many bytes at once."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= num_bytes, f"{peak:,} bytes were taken, allowed are {num_bytes:,}"
