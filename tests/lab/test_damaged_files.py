"""Files that are damaged, or were made by somebody who means ill: clusters, records, comparisons,
data, what workers report, and manifests, also such as somebody has made who can sign one anew.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz_support import (
    LEAVES,
    LONG_NUMBER,
    NESTED,
    NESTED_OBJECTS,
    altered,
    altered_bytes,
    altered_text,
    bounded_memory,
    succeeds_or_refuses,
)
from lab_support.made import comparison, strategy, write_run
from offbeat.errors import CheckpointError, ConfigError, RecordError, WireError
from offbeat.run.local_worker import LocalWorker
from offbeat.run.progress import (
    MAX_REPORT_BYTES,
    Failure,
    Joined,
    Paused,
    Remark,
    Report,
    WorkerProgress,
    decode,
    encode,
)
from offbeat.run.records import last_step
from offbeat.run.step_recorder import Position
from offbeat_lab import cluster
from offbeat_lab.checkpoints import latest, read_manifest, read_shard, verify, write_checkpoint
from offbeat_lab.comparison import FILE, read_comparison
from offbeat_lab.records import Record
from offbeat_lab.schedule import position_from_json
from offbeat_lab.tasks.images import read_arrays
from report_support.synthetic import mega_batch_of

MIB = 1 << 20

CLUSTER = """
name = "a cluster"
workers = 4
speeds = [1.0, 0.5]
link = "1gbit/0.2ms"
straggling = ["2x320ms:10%", "rank3x1s"]
step = "200ms"
seed = 3
[[changes]]
at = "3s"
worker = 1
speed = 0.25
[[faults]]
at = "1s"
worker = 2
action = "kill"
[links]
0 = {rate = "100 Mbit/s", latency = "1ms"}
"""
VALUES = st.sampled_from(
    [
        "1e999",
        "nan",
        "-inf",
        "-1",
        "true",
        '"\\u0000"',
        '"1e999gbit"',
        '"9999999999x1s"',
        "[]",
        "[[]]",
        "{}",
        "{a = 1}",
        "1979-05-27",
        LONG_NUMBER,
        "0x" + "f" * 400,
        "[" * 5000 + "]" * 5000,
        "{a=" * 5000 + "1" + "}" * 5000,
    ]
)


@st.composite
def clusters(draw: st.DrawFn) -> str:
    """A description of a cluster with some lines changed."""
    lines = CLUSTER.strip().split("\n")
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(lines) - 1))
        key = lines[place].partition("=")[0]
        lines[place] = draw(st.just("") | VALUES.map(lambda value, key=key: f"{key}={value}"))
    return "\n".join(lines)


@given(clusters() | altered_bytes(CLUSTER.encode()).map(lambda said: said.decode(errors="replace")))
def test_a_cluster_is_read_or_refused(text: str) -> None:
    succeeds_or_refuses(lambda: cluster.parse_cluster(text, "a file").describe())


@pytest.mark.parametrize(
    "content", [b"\xff\xfe", b"workers = 1 #" + bytes(8 * MIB), f"workers = {LONG_NUMBER}".encode()]
)
def test_a_file_that_is_no_cluster_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "cluster.toml"
    path.write_bytes(content)
    with bounded_memory(8 * MIB), pytest.raises(ConfigError):
        cluster.load(path)


def test_nested_toml_is_refused() -> None:
    with pytest.raises(ConfigError, match="is no TOML"):
        cluster.parse_cluster("a = " + NESTED, "a file")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("damaged") / "run"
    write_run(path, step_s=[0.1] * 3, metrics=[(1, 0.5), (3, 0.7)])
    line = json.dumps(asdict(mega_batch_of(1, step=2, workers=2)))
    (path / "mega-batches.jsonl").write_text(line + "\n")
    return path


def read_everything(path: Path) -> None:
    record = Record(path)
    for rank in range(2):
        record.heads(rank)
        list(record.events(rank))
        last_step(path, rank)
    record.evaluations()
    record.mega_batches()
    record.summary()


FILES = [
    "config.json",
    "summary.json",
    "events-rank-0.jsonl",
    "evaluations.jsonl",
    "mega-batches.jsonl",
]


@pytest.mark.parametrize("name", FILES)
@given(data=st.data())
def test_a_record_is_read_or_refused(run: Path, name: str, data: st.DataObject) -> None:
    file = run / name
    content = file.read_bytes()
    lines = content.splitlines()
    number = data.draw(st.integers(0, len(lines) - 1))
    if name.endswith(".jsonl"):
        lines[number] = data.draw(altered_text(json.loads(lines[number])))
        changed = b"\n".join(lines) + b"\n"
    else:
        changed = data.draw(altered_text(json.loads(content)))
    file.write_bytes(changed)
    try:
        succeeds_or_refuses(lambda: read_everything(run))
    finally:
        file.write_bytes(content)


@pytest.mark.parametrize("line", [NESTED, NESTED_OBJECTS, "[]", "1", '"a"', "null", LONG_NUMBER])
@pytest.mark.parametrize("name", FILES)
def test_a_line_of_a_record_that_is_something_else_is_passed_over_or_refused(
    run: Path, name: str, line: str
) -> None:
    file = run / name
    content = file.read_bytes()
    file.write_bytes(content + line.encode() + b"\n")
    try:
        succeeds_or_refuses(lambda: read_everything(run))
    finally:
        file.write_bytes(content)


def test_a_record_cannot_have_more_workers_than_a_cluster(run: Path) -> None:
    file = run / "config.json"
    content = file.read_bytes()
    values = json.loads(content)
    values["config"]["workers"] = 10**9
    file.write_text(json.dumps(values))
    try:
        with pytest.raises(RecordError, match=r"config\.workers"):
            Record(run)
    finally:
        file.write_bytes(content)


@given(data=st.data())
def test_a_comparison_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    made = json.loads(comparison([strategy("gtopk"), strategy("ddp")]).model_dump_json())
    directory = tmp_path_factory.mktemp("comparison")
    (directory / FILE).write_bytes(data.draw(altered_text(made)))
    succeeds_or_refuses(lambda: read_comparison(directory))


@pytest.mark.parametrize("run", ["../elsewhere", "/etc", "runs/../../elsewhere", "runs/\0"])
def test_a_comparison_names_no_directory_outside_its_own(tmp_path: Path, run: str) -> None:
    made = json.loads(comparison([strategy("ddp")]).model_dump_json())
    made["strategies"][0]["runs"] = [run]
    (tmp_path / FILE).write_text(json.dumps(made))
    with pytest.raises(RecordError, match="is not a directory below the comparison's"):
        read_comparison(tmp_path)


REPORTS: list[Report] = [
    WorkerProgress(
        rank=1,
        pid=2,
        step=3,
        seconds=4.0,
        target=5,
        loss=float("nan"),
        wait_share=0.1,
        bytes_per_step=7.0,
        survives_death=True,
        metric=None,
    ),
    Failure(rank=1, kind="PeerError", message="what happened", has_printed=False),
    Paused(rank=1, step=3, seconds=0.5),
    Joined(rank=1, step=3),
    Remark(rank=0, text="what is known by then"),
]


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: type(report).__name__)
def test_a_report_arrives_as_it_was(report: Report) -> None:
    assert repr(decode(encode(report))) == repr(report)


@given(data=st.data())
def test_a_report_is_read_or_refused(data: st.DataObject) -> None:
    report = data.draw(st.sampled_from(REPORTS))
    line = data.draw(altered_text(json.loads(encode(report))))
    succeeds_or_refuses(lambda: decode(line))


@pytest.mark.parametrize(
    "line", [b"{}", b"[]", b'{"report": []}', b'{"report": "Joined", "rank": "1", "step": 2}']
)
def test_a_line_that_is_no_report_is_refused_with_what_it_says(line: bytes) -> None:
    with pytest.raises(WireError, match="is no report"):
        decode(line)


def test_a_worker_cannot_fill_its_supervisors_memory(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    path.write_bytes(bytes(2 * MAX_REPORT_BYTES))
    with path.open("rb") as pipe:
        worker = LocalWorker(rank=3, process=None, stdin=None, pipe=pipe.fileno())  # type: ignore[arg-type]
        with pytest.raises(WireError, match="worker 3 reported a line of more than"):
            list(iter(worker.read, None))


@given(altered(asdict(Position(step=1, epoch=2, num_samples=3))) | LEAVES)
def test_a_position_is_read_or_refused(values: Any) -> None:
    succeeds_or_refuses(lambda: position_from_json(values))


def test_a_position_of_another_type_is_refused() -> None:
    with pytest.raises(CheckpointError, match="position"):
        position_from_json({"step": "1", "epoch": 0, "num_samples": 0})


def npz_with(**members: bytes) -> bytes:
    """An archive with these files."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, member in members.items():
            archive.writestr(f"{name}.npy", member)
    return content.getvalue()


def npy(shape: str, dtype: str = "<f8", data: bytes = b"") -> bytes:
    """An array's file with any header."""
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header = header.ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


def bomb() -> bytes:
    return npz_with(x=npy("(83886080,)", "<u1", bytes(80 * MIB)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (bomb, "unpack to 83,886,"),
        (lambda: npz_with(x=npy("(1152921504606846976,)")), "there are fewer bytes"),
        (lambda: npz_with(x=npy("(4611686018427387904, 4)")), "there are fewer bytes"),
        (lambda: npz_with(x=npy("(-1,)", data=bytes(64))), "x.npz"),
        (lambda: npz_with(x=npy("(2,)", "|O", bytes(64))), "x.npz"),
        (lambda: npz_with(x=b""), "not an npz file"),
        (lambda: npz_with(x=b"\x93NUMPY\x03\x00"), "has version"),
        (lambda: npz_with(x=npy("(" * 90)), "not an npz file"),
        (lambda: npz_with(y=npy("(1,)")), "has no x"),
        (lambda: b"PK", "not an npz file"),
    ],
    ids=["bomb", "huge", "overflow", "negative", "objects", "empty", "version", "nested", "other",
         "no archive"],
)  # fmt: skip
def test_an_archive_that_is_not_what_it_says_is_refused(
    tmp_path: Path, make: Callable[[], bytes], message: str
) -> None:
    path = tmp_path / "x.npz"
    path.write_bytes(make())
    with bounded_memory(16 * MIB), pytest.raises(ConfigError, match=message):
        read_arrays(path, ["x"])


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, bytes]]:
    path = tmp_path_factory.mktemp("archives") / "x.npz"
    np.savez_compressed(path, x=np.arange(100.0), y=np.ones((3, 2), np.uint8))
    return path, path.read_bytes()


@given(data=st.data())
def test_an_archive_is_read_or_refused(archives: tuple[Path, bytes], data: st.DataObject) -> None:
    path, content = archives
    path.write_bytes(data.draw(altered_bytes(content)))
    succeeds_or_refuses(lambda: read_arrays(path, ["x", "y"]))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    return write_checkpoint(root, {"step": 3}, step=7, rank=0, world_size=1, barrier=lambda: None)


def read_all(path: Path) -> None:
    manifest = latest(path.parent)
    verify(manifest)
    for rank in range(manifest.world_size):
        read_shard(manifest, rank)


def signed(body: Any) -> bytes:
    """A manifest whose checksum is right."""
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({"body": body, "sha256": digest}).encode()


def body_of(path: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((path / "manifest.json").read_bytes())["body"]
    return body


def with_manifest(path: Path, content: bytes) -> None:
    """Read everything with another manifest, which is taken away afterwards."""
    file = path / "manifest.json"
    before = file.read_bytes()
    file.write_bytes(content)
    try:
        succeeds_or_refuses(lambda: read_all(path))
    finally:
        file.write_bytes(before)


@given(data=st.data())
def test_a_manifest_is_read_or_refused(checkpoint: Path, data: st.DataObject) -> None:
    manifest = json.loads((checkpoint / "manifest.json").read_bytes())
    with_manifest(checkpoint, data.draw(altered_text(manifest)))


@given(data=st.data())
def test_a_manifest_that_was_signed_anew_is_read_or_refused(
    checkpoint: Path, data: st.DataObject
) -> None:
    with_manifest(checkpoint, signed(data.draw(altered(body_of(checkpoint)))))


@pytest.mark.parametrize(
    "change",
    [
        {"step": "7"},
        {"step": True},
        {"step": -7},
        {"world_size": 10**12},
        {"world_size": 0, "files": {}, "num_bytes": {}},
        {"files": [], "num_bytes": []},
        {"files": {"../../secret": "00"}, "num_bytes": {"../../secret": 1}},
        {"num_bytes": {"/etc/passwd": 1}},
        {"metadata": None},
        {"metadata": [1]},
    ],
)
def test_a_signed_manifest_of_other_types_or_files_is_refused(
    checkpoint: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    path = tmp_path / checkpoint.name
    path.mkdir()
    (path / "manifest.json").write_bytes(signed(body_of(checkpoint) | change))
    with pytest.raises(CheckpointError, match="is not a manifest"):
        read_manifest(path)


@pytest.mark.parametrize("content", [NESTED, NESTED_OBJECTS, "[]", '{"body": [1]}', "1"])
def test_a_file_that_is_no_manifest_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "step-00000007"
    path.mkdir()
    (path / "manifest.json").write_text(content)
    with pytest.raises(CheckpointError, match="is not a manifest"):
        read_manifest(path)
