"""What of a script may be imported before it runs."""

from __future__ import annotations

from pathlib import Path

from offbeat.run.config import ScriptCommand
from offbeat_lab.forked_workers import first_imports


def imports_of(path: Path, text: str) -> list[str]:
    path.write_text(text)
    return first_imports(ScriptCommand(path=str(path), arguments=[]))


def test_they_end_where_the_script_does_something_else(tmp_path: Path) -> None:
    text = '''"""A script."""
from __future__ import annotations
import os, sklearn.datasets as data
from torch.utils import data as loaders
from math import *
from . import sibling
os.environ["SETTING"] = "1"
import transformers
'''
    assert imports_of(tmp_path / "train.py", text) == [
        "__future__.annotations",
        "os",
        "sklearn.datasets",
        "torch.utils.data",
        "math",
    ]


def test_the_scripts_own_modules_are_left_to_it(tmp_path: Path) -> None:
    (tmp_path / "model.py").touch()
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers" / "__init__.py").touch()
    text = "import model\nfrom layers.dense import Dense\nimport math\n"
    assert imports_of(tmp_path / "train.py", text) == ["math"]


def test_what_is_no_python_is_left_to_python(tmp_path: Path) -> None:
    assert imports_of(tmp_path / "train.py", "import math\nthis is no Python\n") == []
    module = ScriptCommand(path="package.train", arguments=[], as_module=True)
    assert first_imports(module) == []
