"""The command line: quick to answer, one sentence for every mistake, one line of JSON
when asked.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import offbeat
from offbeat.strategies import REGISTRY
from offbeat_lab.cli.main import app, main
from offbeat_lab.native import NATIVE


class Outcome:
    """Exit status, standard output and standard error of one call."""

    def __init__(
        self, capture: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["offbeat", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        self.status = ended.value.code or 0
        self.out, self.err = capture.readouterr()


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: Outcome(capsys, monkeypatch, *arguments)


CALLS = """
import json, sys
from offbeat_lab.cli.main import main
for words in sys.argv[1:]:
    sys.argv = ["offbeat", *words.split()]
    try: status = main()
    except SystemExit as end: status = end.code or 0
    heavy = {"torch", "numpy", "zmq", "sklearn"} & sys.modules.keys()
    print("\\ntold:", json.dumps([status, *heavy]), flush=True)
"""


def in_a_fresh_interpreter(*commands: str) -> list[list[Any]]:
    """The exit status of each command, and what is imported once it has ended."""
    answer = subprocess.run(
        [sys.executable, "-c", CALLS, *commands],
        check=False,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert answer.returncode == 0, answer.stderr
    told = [line for line in answer.stdout.splitlines() if line.startswith("told: ")]
    return [json.loads(line.removeprefix("told: ")) for line in told]


def test_version(call) -> None:
    assert call("--version").out == f"offbeat {offbeat.__version__}\n"


@pytest.mark.parametrize("command", ["train", "compare"])
def test_the_help_of_a_command_has_no_more_options_than_fit_on_a_screen(call, command: str) -> None:
    options = re.findall(r"^│ *\*? *--", call(command, "--help").out, re.MULTILINE)
    assert 10 < len(options) <= 19 + 1  # and --help


COMMANDS = [
    "run", "compare", "strategies", "doctor", "plan", "profile", "demo", "train", "tasks",
    "report", "trace",
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shows_an_example_of_itself(call, command: str) -> None:
    assert f"Example: offbeat {command}" in call(command, "--help").out


def test_commands_stand_in_groups(call) -> None:
    listed = call("--help").out
    panels = re.findall(r"^╭─ (.*?) ─+╮$(.*?)^╰", listed, re.MULTILINE | re.DOTALL)
    groups = {title: set(re.findall(r"^│ (\w+)  ", rows, re.MULTILINE)) for title, rows in panels}
    assert groups["Your own script"] == {"run", "compare"}
    assert set().union(*groups.values()) >= {*COMMANDS, "lab"}


COMPLETED = {
    "offbeat comp": ["compare"],
    "offbeat compare --strategies ddp,spd": ["ddp,spdkfac"],
    "offbeat strategies local": ["localsgd"],
}


def test_the_shell_completes_commands_and_strategies(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_OFFBEAT_COMPLETE", "complete_bash")
    for words, offered in COMPLETED.items():
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        with pytest.raises(SystemExit):
            app(prog_name="offbeat")
        assert capsys.readouterr().out.split() == offered


def test_tasks_are_listed_with_their_options(call) -> None:
    tasks = call("tasks").out
    assert all(word in tasks for word in ("digits", "charlm", "mnist", "batch_size", "required"))


def test_strategies_are_listed_without_their_options(call) -> None:
    listed = call("strategies").out
    names = re.findall(r"^  (\S+)  ", listed, re.MULTILINE)
    assert names == list(REGISTRY)
    families = re.findall(r"^(\S.*):\n((?:  .*\n)+)", listed, re.MULTILINE)
    assert [family for family, _ in families] == list(REGISTRY.families)
    assert "gtopk " in dict(families)["Gradients, of which a part travels"]
    assert "arXiv 1901.04359" in listed
    assert "momentum_correction" not in listed
    assert f"Of others, to compare with: alone, {', '.join(NATIVE)}" in listed


MISSPELT = (
    "strategies gtopc",
    "run --nonsense",
    "run nowhere.py",
    "run --strategy gtopc README.md",
    "compare --nonsense",
    "compare --strategies ddp",
    "compare --strategies ddp,gtopc --task digits",
    "watch nowhere --nonsense",
)
HELP = ("--help", "--version", "train --help")


def test_help_imports_nothing_heavy_and_what_is_misspelt_is_said_before_torch_is_imported() -> None:
    found = in_a_fresh_interpreter(*HELP, "strategies", *MISSPELT)
    helped, (listed, *refused) = found[: len(HELP)], found[len(HELP) :]
    assert helped == [[0]] * len(HELP)
    assert listed[0] == 0
    assert "torch" not in listed
    for words, (status, *imported) in zip(MISSPELT, refused, strict=True):
        assert status == 2, words
        assert "torch" not in imported, words


def test_one_strategy_is_listed_by_its_name(call) -> None:
    listed = " ".join(call("strategies", "spdkfac").out.split())
    assert listed.startswith("spdkfac K-FAC whose communication hides behind its computation")
    assert "arXiv 2107.06533" in listed
    assert "damping = 0.01 number" in listed
    assert "gtopk =" not in listed


def test_an_unknown_strategy_is_refused_with_the_nearest_name(call) -> None:
    outcome = call("strategies", "gtopc")
    assert outcome.status == 2
    assert "did you mean 'gtopk'" in outcome.err


TRAIN = ("train", "--task", "digits", "--strategy", "gtopk")


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("train",), 2, "--task is missing"),
        (("run",), 2, "no script to run"),
        (("run", "trian.py"), 2, "trian.py does not exist"),
        (("run", "taken"), 2, "taken is a directory"),
        (("run", "--strategy", "gtop", "taken"), 2, "taken is a directory"),
        (("run", "--nodes", "2", __file__), 2, "--rendezvous and --node-rank are missing"),
        (
            ("run", "--nodes", "2", "--node-rank", "2", "--rendezvous", "head:29500", __file__),
            2,
            "--node-rank is 2; allowed is 0 to 1",
        ),
        (
            ("run", "--nodes", "2", "--node-rank", "0", "--rendezvous", "head", __file__),
            2,
            "allowed is HOST:PORT",
        ),
        (("run", "-m", "no_such_module"), 2, "no module 'no_such_module'"),
        (("run", "--restarts", "-1", __file__), 2, "--restarts is -1"),
        (("run", "--strategy", "gtop", "taken/thesis.tex"), 2, "did you mean 'gtopk'"),
        (("run", "--strategy", "gtopk:densiti=1", "taken/thesis.tex"), 2, "'density'"),
        (("run", "--workers", "0", "taken/thesis.tex"), 2, "--workers is 0"),
        (("run", "--out", "taken", "taken/thesis.tex"), 1, "taken is not empty"),
        (("compare", "--strategies", "ddp,gtopk"), 2, "after two dashes: -- train.py"),
        (("compare", "--strategies", "ddp", "--", "trian.py"), 2, "trian.py does not exist"),
        (
            ("compare", "--strategies", "ddp", "--task", "digits", "--workers", "0"),
            2,
            "--workers 0: workers is 0; allowed is 1 to",
        ),
        (
            ("compare", "--strategies", "ddp", "--eval-every", "5", "--", "taken/thesis.tex"),
            2,
            "--eval-every are for tasks",
        ),
        (
            ("plan", "--config", "layers=2,hidden=64,heads=4", "--batch-size", "0"),
            2,
            "--batch-size is 0; allowed is 1 or more",
        ),
        (("profile", "--set", "size=tiny", "--", "taken/thesis.tex"), 2, "--set is for tasks"),
        (("profile", "--batch-size", "0", "--", "taken/thesis.tex"), 2, "--batch-size is 0"),
        ((*TRAIN, "--out", "n" * 300), 1, "File name too long; choose another --out"),
        (
            ("compare", "--task", "digits", "--strategies", "ddp", "--out", "n" * 300),
            1,
            "File name too long; choose another --out",
        ),
        (("profile", "--task", "digits", "--also", "--batch-size 8"), 2, "are for scripts"),
        (
            ("compare", "--strategies", "ddp", "--task", "digits", "--", "taken/thesis.tex"),
            2,
            "give one of them",
        ),
        (("train", "--task", "digitz", "--strategy", "gtopk"), 2, "did you mean 'digits'"),
        (("train", "--task", "digits", "--strategy", "gtop"), 2, "did you mean 'gtopk'"),
        ((*TRAIN, "--set", "densiti=0.1"), 2, "did you mean 'density'"),
        ((*TRAIN, "--set", "density=0"), 2, "density"),
        ((*TRAIN, "--set", "density=1.5"), 2, "density"),
        (("train", "--task", "digits", "--strategy", "gtopk:density=2"), 2, "got 2.0"),
        (("train", "--task", "digits", "--strategy", "gtopk:densiti=1"), 2, "'density'"),
        ((*TRAIN[:-1], "gtopk:density=0.1", "--set", "density=1"), 2, "density is given twice"),
        ((*TRAIN, "--workers", "0"), 2, "--workers is 0"),
        ((*TRAIN, "--workers", "100"), 2, "100 workers"),
        (
            ("train", "--task", "mnist", "--strategy", "topk", "--set", "path=none.npz"),
            2,
            "none.npz; give the path",
        ),
        (("train", "--resume", "nowhere"), 1, "nowhere holds no run record"),
        ((*TRAIN, "--out", "taken"), 1, "taken is not empty; choose another --out"),
        (("demo", "--out", "taken"), 1, "taken is not empty"),
        (("run", "--strategy", "ddp,wagma", "-m", "json"), 2, "offbeat compare --strategies ddp,w"),
    ],
)
def test_a_mistake_is_one_sentence_and_starts_nothing(
    call, tmp_path: Path, arguments: tuple[str, ...], status: int, words: str
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").write_text("precious")
    outcome = call(*arguments)
    assert outcome.status == status
    assert outcome.out == ""
    assert outcome.err.count("\n") == 1
    assert words in outcome.err
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == [
        "taken",
        "taken/thesis.tex",
    ]


def test_what_this_user_may_not_open_is_one_sentence(call, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refuse)
    outcome = call("report", "theirs")
    assert outcome.status == 1
    assert outcome.err == "offbeat: permission denied: theirs/comparison.json\n"


def test_a_narrow_terminal_takes_nothing_from_a_plan(call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    plan = ("plan", "--profile", "resnet50", "--link", "1gbit", "--workers", "4")
    head, _, row, *_ = call(*plan, "--strategies", "ddp").out.splitlines()[1:]
    assert head.split()[:3] == ["strategy", "step", "band"]
    assert row.split()[0] == "ddp"
    assert "…" not in row


def test_a_launched_rank_refuses_another_number_of_workers(
    call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    outcome = call(*TRAIN, "--workers", "3")
    assert (outcome.status, outcome.err.count("\n")) == (2, 1)
    assert "--workers 3, but 2 processes were launched" in outcome.err


def test_a_launched_rank_refuses_to_start_others_again(
    call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    outcome = call("run", "--restarts", "2", __file__)
    assert (outcome.status, outcome.err.count("\n")) == (2, 1)
    assert "--restarts 2 is for workers that offbeat run starts itself" in outcome.err


@pytest.mark.ranks
def test_json_is_one_line_and_a_table_is_for_people(call, tmp_path: Path) -> None:
    images, labels = np.zeros((8, 28, 28), dtype=np.uint8), np.arange(8)
    np.savez(tmp_path / "data.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    arguments = (
        "train",
        "--task",
        "mnist",
        "--strategy",
        "dkfac",
        "--workers",
        "1",
        "--set",
        "path=data.npz",
    )
    outcome = call(*arguments, "--set", "batch_size=4", "--steps", "2", "--json", "--out", "run")
    assert (outcome.status, outcome.out.count("\n")) == (0, 1)
    line = json.loads(outcome.out)
    assert outcome.err.count("K-FAC's factors take") == 1
    assert outcome.err.index("MB of memory on this rank") < outcome.err.index("step 2/2")
    assert any("K-FAC's factors take" in notice for notice in line["notices"])
    expected = {
        "task",
        "strategy",
        "workers",
        "steps",
        "metric",
        "metric_name",
        "seconds",
        "bytes_sent_per_step",
        "world_size",
    }
    assert expected <= line.keys()
    assert (line["task"], line["steps"], line["metric_name"]) == ("mnist", 2, "accuracy")
    table = call("train", "--resume", "run", "--steps", "3").out
    assert all(word in table for word in ("accuracy", "sent by a worker", "steps", "mnist"))
    assert call("train", "--resume", "run").status == 2


def test_a_module_in_the_working_directory_is_found_as_by_python(call, tmp_path: Path) -> None:
    (tmp_path / "trains_here.py").touch()
    outcome = call("run", "--workers", "0", "-m", "trains_here")
    assert outcome.status == 2
    assert "--workers is 0" in outcome.err
