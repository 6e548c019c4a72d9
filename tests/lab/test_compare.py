"""What a comparison refuses before anything starts, and how its runs are named, shared out and put
in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab_support.made import comparison, strategy
from offbeat.errors import ConfigError, RecordError
from offbeat.run.config import EmulationMode
from offbeat.run.interrupts import Interrupts
from offbeat.run.progress import WorkerProgress
from offbeat_lab import compare, memory
from offbeat_lab.cluster import Cluster
from offbeat_lab.compare import ComparePlan, CompareRequest, plan_comparison, run_comparison
from offbeat_lab.comparison import read_comparison, write_comparison
from offbeat_lab.config import cluster_of, task_of
from offbeat_lab.emulation import Emulation, emulate

GIGABYTE = 10**9
REQUEST = CompareRequest(
    task="digits",
    strategies=["ddp", "gtopk"],
    cluster=Cluster(workers=2),
    emulation="none",
    seeds=(0,),
    steps=24,
)


class Deaf:
    """A listener that hears nothing."""

    def begin(self, labels: object, num_workers: int, num_seeds: int, steps: int) -> None: ...
    def seed(self, place: int) -> None: ...
    def turn(self, label: str) -> None: ...
    def progress(self, label: str, progress: WorkerProgress) -> None: ...
    def failed(self, label: str, reason: str) -> None: ...


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategies": []}, "no strategies to compare; give some, such as --strategies ddp,gtopk"),
        ({"strategies": ["ddp", "gtopkk"]}, "no strategy 'gtopkk'.*did you mean 'gtopk'"),
        (
            {"strategies": ["gtopk:densty=0.1"]},
            "'densty=0.1' in 'gtopk:densty=0.1' is no option.*did you mean 'density'",
        ),
        ({"strategies": ["gtopk:density"]}, "write gtopk:key=value"),
        ({"strategies": ["gtopk:density=2"]}, "density"),
        ({"strategies": ["gtopk:density=0.1:density=0.2"]}, "option density is given twice in"),
        (
            {"strategies": ["ddp", "gtopk", "ddp"]},
            "strategy 'ddp' is given twice; give it once, or with different options",
        ),
        (
            {"strategies": ["gtopk:density=0.1", "gtopk:density=0.1"]},
            "strategy 'gtopk density=0.1' is given twice",
        ),
        ({"strategies": ["ddp", "alone"]}, "alone takes part in every comparison.*leave it out"),
        ({"strategies": ["ddp:rank=1"]}, "nothing, since it has none"),
        (
            {"strategies": ["gtopk:density=0.1"], "settings": ["density=0.2"]},
            "density is given twice",
        ),
        ({"task": "digit"}, "no task 'digit'.*did you mean 'digits'"),
        ({"settings": ["batchsize=4"]}, "option 'batchsize'.*did you mean 'batch_size'"),
        ({"seeds": ()}, "no seeds; give at least one"),
        ({"seeds": (0, -1)}, "seed -1 cannot be; allowed is 0 to"),
        ({"seeds": (0, 2**32)}, "seed 4294967296 cannot be"),
        ({"seeds": (1, 2, 1)}, "a seed is given twice among 1, 2, 1; give each once"),
        ({"turn_s": 0.0}, "a turn of 0 s cannot be; allowed is a number of seconds above 0"),
        ({"turn_s": -1.0}, "a turn of -1 s cannot be"),
        ({"turn_s": math.nan}, "a turn of nan s cannot be"),
        ({"turn_s": math.inf}, "a turn of inf s cannot be"),
        ({"target": math.nan}, "target nan cannot be reached; give a number, or leave it out"),
        ({"target": math.inf}, "target inf cannot be reached"),
        ({"eval_every": 0}, "--eval-every is 0; allowed is 1 or more"),
        ({"eval_every": -3}, "--eval-every is -3"),
        ({"steps": 0}, "--steps is 0"),
        ({"steps": 3, "epochs": 1}, "got --epochs 1 and --steps 3; give one of them"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_comparison(replace(REQUEST, **changes), out=tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_variants_of_one_strategy_have_labels_and_directories_of_their_own() -> None:
    strategies = [
        "gtopk",
        "ddp",
        "gtopk:density=0.01",
        "gtopk:density=0.01:collective=tree",
        " ddp-powersgd:rank=1",
    ]
    plan = plan_comparison(replace(REQUEST, strategies=strategies, seeds=(3, 1)))
    assert [c.label for c in plan.strategies] == [
        "gtopk",
        "ddp",
        "gtopk density=0.01",
        "gtopk density=0.01 collective=tree",
        "ddp-powersgd",
    ]
    assert plan.strategies[2].runs == [
        "runs/gtopk-density=0.01-seed-3",
        "runs/gtopk-density=0.01-seed-1",
    ]
    runs = [run for c in plan.strategies for run in c.runs]
    assert len(set(runs)) == len(runs) == 10
    assert [c.options.get("density") for c in plan.strategies] == ["auto", None, 0.01, 0.01, None]
    assert plan.strategies[4].options["rank"] == 1
    assert [(config.strategy, config.strategy_options) for config in plan.configs] == [
        (c.strategy, c.options) for c in plan.strategies
    ]


def test_one_strategy_may_be_compared_with_itself_in_batches_by_speed() -> None:
    strategies = ["allreduce", "allreduce:batch_shares=1/0.25"]
    request = replace(REQUEST, strategies=strategies, cluster=Cluster(workers=2))
    plan = plan_comparison(request)
    assert [c.label for c in plan.strategies] == ["allreduce", "allreduce batch_shares=1/0.25"]
    assert [config.batch_shares for config in plan.configs] == [[], [1.0, 0.25]]
    assert plan.strategies[1].options["batch_shares"] == "1/0.25"
    with pytest.raises(ConfigError, match="no option of strategy 'localsgd'"):
        plan_comparison(replace(request, strategies=["localsgd:batch_shares=1/0.25"]))


def test_all_runs_are_as_long_and_measured_as_often() -> None:
    plan = plan_comparison(replace(REQUEST, settings=["batch_size=16"]))
    for config in plan.configs:
        assert (config.steps, config.epochs, config.eval_every, config.checkpoint_every) == (
            24,
            None,
            2,
            None,
        )
        assert (config.workers, cluster_of(config), config.task_options["batch_size"]) == (
            2,
            REQUEST.cluster,
            16,
        )
    assert plan.steps == 24
    assert plan_comparison(replace(REQUEST, eval_every=7)).configs[0].eval_every == 7
    assert plan_comparison(replace(REQUEST, steps=5)).configs[0].eval_every == 1
    in_epochs = plan_comparison(replace(REQUEST, steps=None, epochs=2))
    assert in_epochs.steps == 2 * task_of(in_epochs.configs[0]).steps_per_epoch(2)


@pytest.mark.parametrize(
    ("available_bytes", "at_once"),
    [(100 * GIGABYTE, 3), (2 * GIGABYTE, 3), (GIGABYTE + GIGABYTE // 5, 2)],
)
def test_as_many_runs_take_turns_as_fit_into_memory(
    monkeypatch: pytest.MonkeyPatch, available_bytes: int, at_once: int
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: available_bytes)
    assert plan_comparison(REQUEST).at_once == at_once


def test_more_workers_than_memory_allows_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: GIGABYTE)
    with pytest.raises(
        ConfigError,
        match=(
            r"8 workers with [\d,]+ parameters need about 1\.\d GB, and 1\.0 GB are free; use fewer"
        ),
    ):
        plan_comparison(replace(REQUEST, cluster=Cluster(workers=8)), out=tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_directory_in_use_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("precious")
    for out in (tmp_path / "out", tmp_path / "out" / "thesis.txt"):
        with pytest.raises(RecordError, match="choose another --out"):
            plan_comparison(REQUEST, out=out)
    late = replace(
        plan_comparison(REQUEST), out=tmp_path / "out"
    )  # it was filled after the plan was made
    with pytest.raises(RecordError, match="is not empty"):
        run_comparison(late, Deaf(), command="")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "thesis.txt"]
    assert (tmp_path / "out" / "thesis.txt").read_text() == "precious"


def test_a_directory_with_a_comparison_is_refused_without_saying_that_it_holds_nothing(
    tmp_path: Path,
) -> None:
    write_comparison(tmp_path, comparison([strategy("ddp")]))
    with pytest.raises(RecordError, match="is not empty; choose another --out"):
        plan_comparison(REQUEST, out=tmp_path)


def test_a_directory_that_cannot_be_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    plan = plan_comparison(REQUEST, out=tmp_path / "out")
    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(
        RecordError, match=r"cannot write .*out: Read-only file system; choose another --out"
    ):
        run_comparison(plan, Deaf(), command="")


def test_a_cluster_that_cannot_be_emulated_leaves_the_name_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(cluster: Cluster, *, mode: str) -> None:
        raise ConfigError("no root")

    monkeypatch.setattr(compare, "emulate", refuse)
    with pytest.raises(ConfigError, match="no root"):
        run_comparison(plan_comparison(REQUEST, out=tmp_path / "out"), Deaf(), command="")
    assert not list(tmp_path.iterdir())


class FakeRuns:
    """In place of the runs: notes what was to run together, and in what order."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        failing: Callable[[str, int], bool] = lambda label, place: False,
    ) -> None:
        self.together: list[list[str]] = []

        def run(rounds: Any, runs: Any, interrupted: Interrupts) -> None:
            self.together.append([label for label, _, _ in runs])
            for label, path, config in runs:
                assert path.name.endswith(f"-seed-{config.seed}")
                if failing(label, config.seed):
                    rounds.failures[label] = "it broke"

        monkeypatch.setattr(compare.InterleavedRuns, "run_together", run)
        monkeypatch.setattr(compare, "analyse", lambda directory, comparison, alone: comparison)


def planned(out: Path, at_once: int, **changes: Any) -> ComparePlan:
    request = replace(REQUEST, strategies=["ddp", "gtopk", "topk"], seeds=(0, 1, 2), **changes)
    return replace(plan_comparison(request, out=out), at_once=at_once)


def test_every_seed_has_another_first_and_the_ideal_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = FakeRuns(monkeypatch)
    directory, comparison = run_comparison(
        planned(tmp_path / "out", 4), Deaf(), command="the command"
    )
    assert rounds.together == [
        ["ddp", "gtopk", "topk", "alone"],
        ["gtopk", "topk", "ddp", "alone"],
        ["topk", "ddp", "gtopk", "alone"],
    ]
    assert (comparison.status, comparison.command, comparison.num_parameters > 0) == (
        "finished",
        "the command",
        True,
    )
    assert read_comparison(directory) == comparison
    assert not any("fit into memory" in notice for notice in comparison.emulation.notices)


def test_runs_that_do_not_fit_together_follow_each_other_and_the_record_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = FakeRuns(monkeypatch)
    _, comparison = run_comparison(planned(tmp_path / "out", 3), Deaf(), command="")
    assert rounds.together[:4] == [
        ["ddp", "gtopk", "topk"],
        ["alone"],
        ["gtopk", "topk", "ddp"],
        ["alone"],
    ]
    assert any(
        notice.startswith("3 of 4 runs fit into memory at a time")
        for notice in comparison.emulation.notices
    )


def test_who_has_failed_does_not_run_with_the_next_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = FakeRuns(monkeypatch, lambda label, seed: (label, seed) == ("gtopk", 1))
    _, comparison = run_comparison(planned(tmp_path / "out", 4), Deaf(), command="")
    assert [sorted(labels) for labels in rounds.together] == [
        ["alone", "ddp", "gtopk", "topk"],
        ["alone", "ddp", "gtopk", "topk"],
        ["alone", "ddp", "topk"],
    ]
    assert [c.failure for c in comparison.strategies] == [None, "it broke", None]


def test_one_worker_has_nobody_to_exchange_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = FakeRuns(monkeypatch)
    run_comparison(planned(tmp_path / "out", 4, cluster=Cluster(workers=1)), Deaf(), command="")
    assert rounds.together[0] == ["ddp", "gtopk", "topk"]


def test_without_a_name_the_first_free_one_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeRuns(monkeypatch)
    monkeypatch.chdir(tmp_path)
    names = [
        run_comparison(replace(planned(Path("x"), 4), out=None), Deaf(), command="")[0]
        for _ in range(2)
    ]
    assert names == [Path("runs/compare-digits-001"), Path("runs/compare-digits-002")]


def test_a_name_that_another_comparison_takes_meanwhile_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = Path("runs/compare-digits-001/comparison.json")

    def slowly(cluster: Cluster, *, mode: EmulationMode) -> Emulation:
        theirs.parent.mkdir(parents=True)
        theirs.write_text("theirs")
        return emulate(cluster, mode=mode)

    FakeRuns(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "emulate", slowly)
    plan = replace(planned(Path("x"), 4), out=None)
    assert run_comparison(plan, Deaf(), command="")[0] == Path("runs/compare-digits-002")
    assert theirs.read_text() == "theirs"
