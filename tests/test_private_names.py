"""Tests stand outside what they test: they reach into no private attribute of another object."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

PRIVATE = re.compile(r"_[a-zA-Z]\w*")

HOOKS = frozenset(
    {
        "_forward_hooks",
        "_forward_pre_hooks",
        "_optimizer_step_post_hooks",
        "_optimizer_step_pre_hooks",
        "_post_accumulate_grad_hooks",
    }
)
"""PyTorch's own lists of hooks: it offers no other way to see that none was left."""

ALLOWED = {
    "conformance/test_gradient_strategies.py": HOOKS,
    "conformance/test_weight_strategies.py": HOOKS,
    "integrations/test_scripts_ranks.py": {"_reset_state"},  # accelerate's own tests do so, too
    "integrations/test_islands_ranks.py": {"_reset_state", "_shared_state"},
    "kfac/test_capture.py": HOOKS,
    "session/test_events.py": HOOKS,
    # The only way in which PyTorch lets a script name what DDP is to ignore.
    "outside/scripts/ignored.py": {"_set_params_and_buffers_to_ignore_for_model"},
    "outside/test_ddp_suite_ranks.py": {"_DistTestBase", "_internal"},  # where PyTorch's tests are
    "run/test_coupling.py": {"_set_params_and_buffers_to_ignore_for_model"},
    "ranks/test_run_ranks.py": {"_exit"},  # documented by Python, as is the next
    "report/test_trace.py": {"_replace"},
    "ranks_support/leaks.py": {"_DummyThread"},  # Python's view of a thread that C++ began
    # An interpreter's end.
    "ranks_support/template.py": {
        "_cleanups",
        "_exit",
        "_registry",
        "_run_exitfuncs",
        "_shutdown",
    },
    # The store of PyTorch's group has no public name, nor has the way to ask an island alone.
    "rank_jobs/islands.py": {"_get_default_store", "_island"},
    "test_docs.py": {"_run"},  # what comes once words have been read
    "test_torch_private.py": {"_timeout"},  # is about private parts of PyTorch
}


def private_names(source: str) -> Iterator[str]:
    """Private attributes, imports and names of attributes in a source, other than of `self` and
    `cls`.
    """
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(attr=name):
                names = [name]
            case ast.ImportFrom(names=aliases):
                names = [alias.name for alias in aliases]
            case ast.Call(
                func=ast.Name(id="getattr" | "setattr" | "hasattr" | "delattr")
                | ast.Attribute(attr="setattr" | "delattr" | "object"),
                args=[_, ast.Constant(value=str(name)), *_],
            ):
                names = [name]
            case _:
                continue
        yield from (name for name in names if PRIVATE.fullmatch(name))


def name_of(path: Path) -> str:
    return path.relative_to(TESTS).as_posix()


def test_no_test_reaches_into_private_attributes() -> None:
    found = {
        (name_of(path), name)
        for path in TESTS.rglob("*.py")
        for name in private_names(path.read_text())
        if name not in ALLOWED.get(name_of(path), frozenset())
    }
    assert found == set()


def test_no_exception_outlives_its_use() -> None:
    for name, allowed in ALLOWED.items():
        assert allowed & set(private_names((TESTS / name).read_text())), name


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("session._parts", ["_parts"]),
        ("a.b()[0]._c.d", ["_c"]),
        ("from offbeat.codec.selectors import _by_digits, exact", ["_by_digits"]),
        ("monkeypatch.setattr(selectors, '_by_digits', exact)", ["_by_digits"]),
        ("getattr(session, '_parts')", ["_parts"]),
        ("self._parts; cls._made; session.callbacks; a.__class__; _ = 1", []),
    ],
)
def test_private_names_are_found_in_every_form(source: str, found: list[str]) -> None:
    assert list(private_names(source)) == found
