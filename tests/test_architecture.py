"""The laws of the house that reading the source can prove: who may import whom, and what nobody may
use.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
LIBRARY, LAB = "offbeat", "offbeat_lab"

SYSTEMS = frozenset({"averaging", "megabatch", "kfac"})
"""Rooms that hold one system each, with everything that belongs to it alone."""

FACADE_OPENS = frozenset({"codec", "errors", "run", "session", "strategies"})

BLOCKING = frozenset(
    {
        "asyncio",
        "select",
        "selectors",
        "socket",
        "socketserver",
        "ssl",
        "subprocess",
        "torch.distributed",
        "zmq",
        "time.sleep",
    }
)
"""What can wait for another process or for the network: the business of `transport`."""

STORES = frozenset({f"torch.distributed.{name}" for name in ("Store", "HashStore", "PrefixStore")})
"""Types of stores, which other rooms are handed by `transport`."""

MAY_BLOCK = {
    **{
        f"offbeat/integrations/{name}.py": {"torch.distributed"}
        for name in ("accelerate", "framework", "lightning", "state_files")
    },
    "offbeat/torch_private.py": {
        "torch.distributed"
    },  # makes gloo's and NCCL's groups for transport
    "offbeat/session/attach.py": {
        "torch.distributed"
    },  # names the type of the user's group and asks whether there is one
    "offbeat/run/patches.py": {"torch.distributed"},  # what of it a script finds changed
    "offbeat/run/coupling.py": {"torch.distributed"},  # asks whether there is a process group
    "offbeat/run/coordination.py": {
        "torch.distributed"
    },  # serves the store, as torchrun does for a user's workers
    "offbeat_lab/joining.py": {"torch.distributed"},  # makes the group of the lab's workers
    "offbeat/run/records.py": {"socket"},  # the host's name
    "offbeat_lab/doctor/facts.py": {"torch.distributed"},  # asks which backends there are
    "offbeat_lab/doctor/diagnosis.py": {"subprocess"},  # starts workers to measure between
    "offbeat_lab/native/session.py": {
        "time.sleep"
    },  # holds torch's own collectives back where links are imitated in user space
    "offbeat_lab/native/ddp.py": {"torch.distributed"},  # what torch ships, as torch ships it
    "offbeat_lab/emulation/check.py": {"socket"},  # sends through the links it checks
    "offbeat_lab/emulation/commands.py": {"subprocess"},  # ip and tc
    "offbeat_lab/emulation/namespaces.py": {"socket"},  # names of interfaces
    "offbeat_lab/emulation/delaying.py": {"time.sleep"},  # emulated compute
    "offbeat_lab/forking.py": {"socket", "subprocess"},  # has workers forked; no training happens
    "offbeat/run/local_worker.py": {"subprocess"},  # starts a worker; no training happens in it
    "offbeat_lab/attaching.py": {"torch.distributed"},  # asks who this rank is
    "offbeat_lab/worker_server.py": {"socket"},  # takes the end of a socket that it was given
    "offbeat_lab/cli/watching.py": {
        "socket",
        "time.sleep",
    },  # the host's name; reads a record now and then
    "offbeat/run/supervisor.py": {"selectors"},  # watches workers
    "offbeat_lab/plan/timing.py": {
        "torch.distributed"
    },  # a group of one for torch's hook, which sends nothing
    "offbeat_lab/plan/script_timing.py": {"subprocess"},  # runs a user's script to time it
}

UNPICKLING = frozenset(
    {
        "pickle",
        "cPickle",
        "_pickle",
        "cloudpickle",
        "dill",
        "joblib",
        "marshal",
        "shelve",
        "torch.load",
        "torch.save",
    }
)

MACHINE_PATH = re.compile(rb"(?<![\w./~-])/(?:home|Users|root|work|tmp|mnt|scratch)/[\w.-]+")


@dataclass(frozen=True, slots=True)
class Use:
    """A dotted name that a file imports, or reaches through what it imports, and the line."""

    name: str
    line: int

    def within(self, names: frozenset[str]) -> str | None:
        """Which of `names` this is or lies in."""
        if self.name in STORES:
            return None
        return next((name for name in names if f"{self.name}.".startswith(f"{name}.")), None)


Nodes: TypeAlias = tuple[ast.AST, ...]


def nodes_in(source: str) -> Nodes:
    return tuple(ast.walk(ast.parse(source)))


@cache
def nodes_of(path: Path) -> Nodes:
    """Walked through once, since several laws ask for all of them."""
    return nodes_in(path.read_text())


@cache
def uses_of(path: Path) -> tuple[Use, ...]:
    return tuple(find_uses(nodes_of(path)))


def find_uses(nodes: Nodes) -> Iterator[Use]:
    """Every imported name in full, and every attribute of one: `import torch as t; t.load` uses
    `torch` and `torch.load`.
    """
    known: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                known[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
                yield Use(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield Use(f"{node.module}.{alias.name}", node.lineno)
    for node in nodes:
        if isinstance(node, ast.Attribute) and (name := dotted(node)):
            first, _, rest = name.partition(".")
            if first in known:
                yield Use(f"{known[first]}.{rest}", node.lineno)


def dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (start := dotted(node.value)):
        return f"{start}.{node.attr}"
    return None


@cache
def rooms() -> tuple[str, ...]:
    """The rooms of the library from top to bottom, as ARCHITECTURE.md lists them."""
    _, found, table = (ROOT / "ARCHITECTURE.md").read_text().partition("| room of `offbeat` |")
    assert found, "ARCHITECTURE.md has lost its table of rooms"
    rows = table.partition("\n\n")[0].splitlines()[2:]
    return tuple(row.split("|")[1].strip(" `/").removesuffix(".py") for row in rows)


def room_of(module: str) -> str:
    """The room of a dotted name below `offbeat`; an empty string for the facade itself."""
    name = module.split(".")[1] if "." in module else ""
    return name if name in rooms() else ""


def room_of_file(path: Path) -> str:
    return room_of(".".join(path.relative_to(SOURCE).with_suffix("").parts))


def objections(path: Path, room: str) -> Iterator[str]:
    """Why `path`, which lies in `room` of the library, may not import what it imports."""
    for use in uses_of(path):
        package = use.name.partition(".")[0]
        if package == LAB:
            yield f"line {use.line}: the library imports {use.name}"
        if package != LIBRARY:
            continue
        target = room_of(use.name)
        if not room:
            allowed = target in FACADE_OPENS
        elif not target:
            # The facade opens the session, so only rooms above that may enter through it.
            allowed = rooms().index(room) < rooms().index("session")
        else:
            allowed = target == room or rooms().index(target) > rooms().index(room)
        if not allowed:
            yield f"line {use.line}: {room or 'the facade'} imports {use.name}"
        elif {room, target} <= SYSTEMS and room != target:
            yield f"line {use.line}: one system, {room}, imports another, {use.name}"


FILES = sorted(SOURCE.rglob("*.py"))
OF_LIBRARY = [path for path in FILES if path.relative_to(SOURCE).parts[0] == LIBRARY]


def offences_by_file(find: Callable[[Path], Iterable[object]]) -> dict[str, list[object]]:
    """What `find` finds in each file of the package in which it finds anything."""
    found = {path.relative_to(SOURCE).as_posix(): list(find(path)) for path in FILES}
    return {name: offences for name, offences in found.items() if offences}


def test_every_file_lies_in_a_room() -> None:
    outside = [path for path in OF_LIBRARY if not room_of_file(path)]
    assert outside == [SOURCE / LIBRARY / "__init__.py", SOURCE / LIBRARY / "__main__.py"]


def test_every_room_is_there() -> None:
    assert {room_of_file(path) for path in OF_LIBRARY} == {"", *rooms()}


def test_a_room_imports_only_rooms_below_it() -> None:
    found = {
        path.relative_to(SOURCE).as_posix(): list(objections(path, room_of_file(path)))
        for path in OF_LIBRARY
    }
    assert {name: offences for name, offences in found.items() if offences} == {}


def test_public_names_of_classes_are_unique() -> None:
    """One name means one thing in both packages."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path.relative_to(SOURCE).as_posix())
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_only_transport_waits() -> None:
    def waits(path: Path) -> Iterator[tuple[int, str]]:
        if room_of_file(path) == "transport":
            return
        allowed = MAY_BLOCK.get(path.relative_to(SOURCE).as_posix(), set())
        for use in uses_of(path):
            name = use.within(BLOCKING)
            if name is not None and name not in allowed:
                yield use.line, name

    assert offences_by_file(waits) == {}


def test_no_exception_outlives_its_use() -> None:
    for name, allowed in MAY_BLOCK.items():
        assert {
            found for use in uses_of(SOURCE / name) if (found := use.within(BLOCKING))
        } == allowed, name


STANDARD_PRIVATE = frozenset({"_replace", "_exit", "_value2member_map_"})
"""Names of the standard library that are documented in spite of their underscore."""


def private_names(nodes: Nodes) -> Iterator[tuple[int, str]]:
    """The line and the name of each private attribute that is not of `self`, its class or another
    instance of it, and of each private name that is imported.
    """
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    defined |= {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and dotted(node.value) == "self"
    }
    for node in nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if node.attr not in STANDARD_PRIVATE | defined:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            for alias in node.names:
                parts = f"{module or ''}.{alias.name}".split(".")
                if any(map(is_private, parts)):
                    yield node.lineno, ".".join(parts)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_private_names_of_pytorch_stand_in_one_file() -> None:
    known = names_of_torch_private()

    def names(path: Path) -> Iterator[tuple[int, str]]:
        if path == SOURCE / LIBRARY / "torch_private.py":
            return
        nodes = nodes_of(path)
        yield from private_names(nodes)
        # The names may not be reached as strings either, as by `getattr`.
        for node in nodes:
            if isinstance(node, ast.Constant) and node.value in known:
                yield node.lineno, str(node.value)

    assert offences_by_file(names) == {}


def names_of_torch_private() -> frozenset[str]:
    nodes = nodes_of(SOURCE / LIBRARY / "torch_private.py")
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    strings = {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
    return frozenset(name for name in attributes | strings if is_private(name))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._C._current_graph_task_id()",
        "from torch._prims_common import is_non_overlapping_and_dense",
        "import torch.utils._pytree",
        "from torch.utils import _pytree",
        "def f(gradient):\n    return gradient._values()",
    ],
)
def test_private_names_are_found_in_every_form(source: str) -> None:
    assert list(private_names(nodes_in(source)))


def test_a_private_name_of_the_same_class_is_no_offence() -> None:
    source = "class A:\n    def f(self, a):\n        self._x = 1\n        return a._x"
    assert list(private_names(nodes_in(source))) == []


def test_nothing_is_pickled() -> None:
    def suspicious(path: Path) -> Iterator[tuple[int, str]]:
        for use in uses_of(path):
            if (
                use.within(UNPICKLING)
                or re.search(r"^torch\.distributed.*(_object|_object_list)$", use.name)
                or use.name.endswith((".send_pyobj", ".recv_pyobj"))
            ):
                yield use.line, use.name

    assert offences_by_file(suspicious) == {}


def test_numpy_never_unpickles() -> None:
    """`numpy.load` unpickles only when it is told to."""

    def told_to(path: Path) -> Iterator[tuple[int, str]]:
        for node in nodes_of(path):
            for keyword in node.keywords if isinstance(node, ast.Call) else ():
                if keyword.arg == "allow_pickle" and not (
                    isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                ):
                    yield node.lineno, ast.unparse(keyword)

    assert offences_by_file(told_to) == {}


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [
        path
        for name in listed.stdout.decode().split("\0")
        if name and (path := ROOT / name).is_file()
    ]


def test_no_file_names_a_path_of_one_machine() -> None:
    text = {".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".html", ""}
    found = {
        path.relative_to(ROOT).as_posix(): match.group()
        for path in tracked_files()
        if path.suffix in text and (match := MACHINE_PATH.search(path.read_bytes()))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("room", "source", "is_fine"),
    [
        ("codec", "from offbeat.arithmetic import trees", True),
        ("codec", "from offbeat.codec.sparse import Sparse", True),
        ("codec", "from offbeat.transport.driver import Driver", False),
        ("codec", "import offbeat.transport", False),
        ("codec", "def later():\n    from offbeat_lab import train", False),
        ("session", "from offbeat.session.events import Events", True),
        ("run", "import offbeat", True),
        ("run", "from offbeat import attach", True),
        ("run", "from offbeat_lab.tasks import Task", False),
        ("kfac", "from offbeat.megabatch.claims import Claims", False),
        ("transport", "import offbeat", False),
        ("", "from offbeat.session.attach import attach", True),
        ("", "from offbeat.transport.peers import Peers", False),
    ],
)
def test_the_order_is_read_from_every_form_of_import(
    tmp_path: Path, room: str, source: str, is_fine: bool
) -> None:
    path = tmp_path / "example.py"
    path.write_text(source)
    assert (list(objections(path, room)) == []) == is_fine


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import time\ntime.sleep(1)", "time.sleep"),
        ("from time import sleep as nap", "time.sleep"),
        ("import torch\ntorch.load('x')", "torch.load"),
        ("import torch as t\nt.distributed.barrier()", "torch.distributed.barrier"),
        (
            "import torch.distributed as dist\ndist.send_object_list([])",
            "torch.distributed.send_object_list",
        ),
        ("from torch import distributed", "torch.distributed"),
    ],
)
def test_uses_are_found_under_any_name(source: str, name: str) -> None:
    assert name in {use.name for use in find_uses(nodes_in(source))}
