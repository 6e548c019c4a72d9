"""Writes a cluster as TOML. The standard library only reads it, and what is to be written has few
shapes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from pydantic import BaseModel

from offbeat_lab.cluster.quantities import duration_text, rate_text


def toml_key(field: str) -> str:
    """A Python name without its unit: `latency_s` is `latency`. In TOML the unit stands in the
    value, or is bytes.
    """
    return field.removesuffix("_bit_per_s").removesuffix("_s").removesuffix("_bytes")


def to_toml(cluster: BaseModel) -> str:
    """Every field that differs from its default: plain values first, then tables."""
    plain, tables = [], []
    for name, value in _changed_fields(cluster):
        match value:
            case BaseModel():
                tables.append(_table(f"[{name}]", value))
            case Mapping():
                tables += [_table(f"[{name}.{key}]", part) for key, part in value.items()]
            case [BaseModel() as first, *others]:
                tables += [
                    _table(f"[[{name}]]", part)
                    for part in (first, *others)
                    if isinstance(part, BaseModel)
                ]
            case _:
                plain.append(_line(name, value))
    return "\n".join(["".join(plain), *tables])


def _changed_fields(part: BaseModel) -> Iterator[tuple[str, object]]:
    for name, field in type(part).model_fields.items():
        value = getattr(part, name)
        if field.is_required() or value != field.default:
            yield name, value


def _table(head: str, part: BaseModel) -> str:
    return "".join([f"{head}\n", *(_line(name, value) for name, value in _changed_fields(part))])


def _line(field: str, value: object) -> str:
    return f"{toml_key(field)} = {_value(field, value)}\n"


def _value(field: str, value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_value(field, item) for item in value)}]"
    if isinstance(value, float) and field.endswith("_bit_per_s"):
        return f'"{rate_text(value)}"'
    if isinstance(value, float) and field.endswith("_s"):
        return f'"{duration_text(value)}"'
    # Of printable text, whole numbers and finite ones TOML is a superset.
    return json.dumps(value, ensure_ascii=False)
