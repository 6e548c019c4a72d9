"""The scalars are those of the record; without TensorBoard there is a hint and nothing else."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace, TracebackType
from typing import Self

import pytest

from offbeat.errors import ConfigError, RecordError
from offbeat.run.records import Evaluation, EventWriter, StepEvent, begin_attempt, create
from offbeat_lab.config import Request, resolve
from offbeat_lab.report import trace
from offbeat_lab.report.trace import write_scalars

CONFIG = resolve(Request(task="digits", strategy="allreduce", steps=20, workers=2))
UNIX_S = 1_700_000_000.0


def event(
    step: int,
    *,
    loss: float | None = 1.0,
    wait_s: float = 0.0,
    bytes_sent: int = 0,
    duration_s: float = 1.0,
) -> StepEvent:
    return StepEvent(
        step=step,
        loss=loss,
        batch_size=4,
        began_s=1000.0 + step,
        ready_s=None,
        duration_s=duration_s,
        compute_s=duration_s - wait_s,
        encode_s=0.0,
        wait_s=wait_s,
        padded_s=0.0,
        bytes_sent=bytes_sent,
        messages_sent=0,
        skipped=loss is None,
    )


RANKS = [
    [event(1, loss=1.0, wait_s=0.5, bytes_sent=10), event(2, loss=None), event(3)],
    [event(1, loss=3.0, bytes_sent=30, duration_s=1.5), event(2, loss=None)],
]
EXPECTED = {
    "loss": {1: 2.0, 3: 1.0},
    "metric": {0: 0.125, 3: 0.5},
    "bytes per step": {1: 20.0, 2: 0.0, 3: 0.0},
    "wait share": {1: 0.2, 2: 0.0, 3: 0.0},
    "step time in s/rank 0": {1: 1.0, 2: 1.0, 3: 1.0},
    "step time in s/rank 1": {1: 1.5, 2: 1.0},
}


def write_record(path: Path, ranks: Sequence[Sequence[StepEvent]] = RANKS) -> Path:
    create(path, CONFIG)
    attempt = begin_attempt(path, CONFIG, start_step=0)
    for rank, events in enumerate(ranks):
        writer = EventWriter(path, rank=rank, attempt=attempt)
        for one in events:
            writer.add(one)
        if rank == 0:
            for step, metric in ((0, 0.125), (3, 0.5)):
                writer.add_evaluation(
                    Evaluation(
                        step=step, seconds=0.0, bytes_sent=0, metric=metric, at_s=1001.0 + step
                    )
                )
        writer.close()
    return path


class Writer:
    """Stands in for TensorBoard's, and keeps what it is given by directory and tag."""

    scalars: dict[str, dict[str, dict[int, float]]]
    times: dict[str, list[float]]

    def __init__(self, log_dir: str) -> None:
        Path(log_dir).mkdir(parents=True)
        (Path(log_dir) / "events").write_text("")
        self._name = Path(log_dir).name

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def add_scalar(self, tag: str, value: float, step: int, at_unix_s: float) -> None:
        self.scalars[self._name].setdefault(tag, {})[step] = value
        self.times[self._name].append(at_unix_s)


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> type[Writer]:
    Writer.scalars, Writer.times = defaultdict(dict), defaultdict(list)
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return Writer


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_scalars_are_those_of_the_record(tmp_path: Path, writer: type[Writer]) -> None:
    write_scalars(write_record(tmp_path / "run"), tmp_path / "out")
    (found,) = writer.scalars.values()
    assert found == EXPECTED
    assert names(tmp_path) == ["out", "run"]
    assert names(tmp_path / "out") == ["events"]


def test_each_scalar_has_the_time_when_its_step_was_done(
    tmp_path: Path, writer: type[Writer]
) -> None:
    run = write_record(tmp_path / "run", [[event(1), event(2)]])
    file = run / "events-rank-0.jsonl"
    head, _, rest = file.read_text().partition("\n")
    file.write_text(
        head.partition('"monotonic_to_unix_s"')[0] + f'"monotonic_to_unix_s": {UNIX_S}}}\n{rest}'
    )
    write_scalars(run, tmp_path / "out")
    (times,) = writer.times.values()
    assert sorted(set(times)) == [UNIX_S + at_s for at_s in (1001.0, 1002.0, 1003.0, 1004.0)]


def test_each_run_of_a_comparison_gets_a_directory(
    tmp_path: Path, writer: type[Writer], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a-seed-0", "b-seed-0"):
        write_record(tmp_path / "runs" / name)
    (tmp_path / "comparison.json").write_text("{}")
    contestants = [SimpleNamespace(runs=[f"runs/{name}-seed-0"]) for name in "ab"]
    monkeypatch.setattr(
        trace, "read_comparison", lambda path: SimpleNamespace(contestants=contestants)
    )
    write_scalars(tmp_path, tmp_path / "out")
    assert writer.scalars == {"a-seed-0": EXPECTED, "b-seed-0": EXPECTED}
    assert names(tmp_path / "out") == ["a-seed-0", "b-seed-0"]


def test_without_tensorboard_there_is_a_hint_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    run = write_record(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"pip install offbeat\[tensorboard\]"):
        write_scalars(run, tmp_path / "out")
    assert names(tmp_path) == ["run"]


@pytest.mark.usefixtures("writer")
def test_what_exists_is_left_alone(tmp_path: Path) -> None:
    run = write_record(tmp_path / "run")
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="exists; choose another --out"):
        write_scalars(run, tmp_path / "out")
    assert names(tmp_path / "out") == []


@pytest.mark.usefixtures("writer")
def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="holds no run record"):
        write_scalars(tmp_path, tmp_path / "out")
    assert names(tmp_path) == []


def test_a_full_disk_leaves_nothing(
    tmp_path: Path, writer: type[Writer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "add_scalar", refuse)
    run = write_record(tmp_path / "run")
    with pytest.raises(
        RecordError, match="cannot write .*out: No space left on device; choose another --out"
    ):
        write_scalars(run, tmp_path / "out")
    assert names(tmp_path) == ["run"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_them(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_scalars(write_record(tmp_path / "run"), tmp_path / "out")
    accumulator = EventAccumulator(str(tmp_path / "out"))
    accumulator.Reload()
    assert set(accumulator.Tags()["scalars"]) == set(EXPECTED)
    for tag, values in EXPECTED.items():
        assert {scalar.step: scalar.value for scalar in accumulator.Scalars(tag)} == pytest.approx(
            values
        )
