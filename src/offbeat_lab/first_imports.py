"""What a script imports before it does anything else. One process can import that for all workers
that are forked from it, since nothing that the script does has an effect on it.
"""

from __future__ import annotations

import ast
from importlib.machinery import PathFinder
from pathlib import Path

from offbeat.run.config import ScriptCommand


def first_imports(script: ScriptCommand) -> list[str]:
    """What `script` begins by importing, up to its first statement that is no import: names such
    as "sklearn.datasets.load_digits". Modules in the script's own directory are left out, as they
    may be anything; of what runs as a module, or is no Python, there is nothing.
    """
    path = Path(script.path)
    try:
        statements = [] if script.as_module else ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []
    if statements and isinstance(statements[0], ast.Expr):  # its docstring
        del statements[0]
    names: list[str] = []
    for statement in statements:
        match statement:
            case ast.Import(names=imported):
                names += [each.name for each in imported]
            case ast.ImportFrom(module=str(module), names=imported, level=0):
                names += [f"{module}.{each.name}".removesuffix(".*") for each in imported]
            case _:
                break
    beside = [str(path.resolve().parent)]
    return [name for name in names if PathFinder.find_spec(name.partition(".")[0], beside) is None]
