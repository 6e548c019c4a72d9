"""Functions and dataclasses in JSON, by where they are defined: another process looks there. What
a function has made names it, and its arguments, as `made_by`.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FunctionType
from typing import Any


def dumps(value: Any) -> str:
    """`value` as JSON; functions and dataclasses in it must be found at the top level of a
    module.
    """
    return json.dumps(value, default=_described)


def loads(text: str) -> Any:
    """What `dumps` was given. Modules that are not known yet are executed."""
    return json.loads(text, object_hook=_restored)


def _described(value: Any) -> dict[str, Any]:
    if isinstance(value, FunctionType):
        return {"function of": _place(value)}
    if (made := getattr(value, "made_by", None)) is not None:
        function, arguments = made
        return {"instance of": _place(function), "with": arguments}
    if is_dataclass(value) and not isinstance(value, type):
        options = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        return {"instance of": _place(type(value)), "with": options}
    raise TypeError(f"{value!r} is neither JSON, nor a function, nor a dataclass")


def _place(thing: Any) -> list[str]:
    module, name = thing.__module__, thing.__qualname__
    if getattr(sys.modules[module], name, None) is not thing:
        raise TypeError(
            f"{module}.{name} cannot be found by another process: define it at the top level of its"
            " module"
        )
    source = inspect.getsourcefile(thing)
    assert source is not None
    return [module, source, name]


def _restored(described: dict[str, Any]) -> Any:
    if described.keys() == {"function of"}:
        return _found(*described["function of"])
    if described.keys() == {"instance of", "with"}:
        return _found(*described["instance of"])(**described["with"])
    return described


def _found(module: str, source: str, name: str) -> Any:
    # A test module has the name that pytest gave it, which need not lead to its file by an import.
    if module not in sys.modules:
        spec = importlib.util.spec_from_file_location(module, Path(source))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
    return getattr(sys.modules[module], name)
