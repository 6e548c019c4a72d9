"""Stragglers that are those of a recorded run."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from lab_support.made import comparison, write_run
from offbeat.errors import ConfigError
from offbeat_lab.cli.main import app
from offbeat_lab.cluster import Cluster, LinkSpec, load, parse_cluster
from offbeat_lab.comparison import write_comparison
from offbeat_lab.emulation import emulate
from offbeat_lab.plan.predictions import predict_step
from offbeat_lab.plan.profile import ModelProfile, TensorProfile, TimedBatch
from offbeat_lab.plan.simulation import RecordedTimes, Setting

MODEL = ModelProfile(
    name="toy",
    device="none",
    batches=(TimedBatch(batch_size=10, forward_s=0.1, backward_s=0.2),),
    optimizer_s=0.0,
    tensors=(TensorProfile(num_elements=1000, ready=1.0),),
    select_s_per_element=0.0,
    copy_s_per_byte=0.0,
    spread=0.5,  # which the record's takes the place of
)


def write_cluster(directory: Path, workers: int = 4) -> Path:
    """A cluster beside the record of a run in which every fourth step took three times as long."""
    write_run(directory / "slow", step_s=[0.1, 0.1, 0.1, 0.3] * 20)
    file = directory / "office.toml"
    file.write_text(f'workers = {workers}\nlink = "10gbit"\nstraggling_record = "slow"')
    return file


def test_workers_take_as_long_as_ranks_did_together() -> None:
    times = RecordedTimes(relative=np.array([[1.0, 2.0], [1.5, 3.0]]))
    drawn = np.stack([times.drawn(seed=0, step=step, workers=5) for step in range(50)])
    assert set(map(tuple, drawn[:, :2])) == set(map(tuple, drawn[:, 2:4])) == {(1, 2), (1.5, 3)}
    assert (drawn[:, 0] != drawn[:, 2]).any()  # drawn anew for every two workers
    fewer = np.stack([times.drawn(seed=0, step=step, workers=3) for step in range(50)])
    assert (fewer == drawn[:, :3]).all()


def test_a_plan_waits_as_long_as_the_recorded_run_was_late(tmp_path: Path) -> None:
    cluster = load(write_cluster(tmp_path))
    setting = Setting(profile=MODEL, cluster=cluster)
    assert set(setting.factors.ravel().round(6)) == {1.0, 3.0}
    alone_s, ddp_s = (predict_step(spec, setting).step_s for spec in ("alone", "ddp"))
    assert alone_s == pytest.approx(0.3 * setting.factors.mean())
    assert ddp_s == pytest.approx(0.3 * setting.factors.max(axis=1).mean(), rel=0.01)


def test_a_path_starts_from_the_file_and_nothing_emulates_it(tmp_path: Path) -> None:
    file = write_cluster(tmp_path)
    cluster = load(file)
    assert cluster.straggling_record == str(tmp_path / "slow")
    assert parse_cluster(cluster.to_toml(), "again") == cluster
    with pytest.raises(ConfigError, match="takes computing times from a record"):
        emulate(cluster)
    arguments = ["plan", "--profile", "vgg16", "--cluster", str(file), "--strategies", "ddp"]
    for flags in ([], ["--delay", "none"]):
        result = CliRunner().invoke(app, [*arguments, *flags])
        assert result.exit_code == 0, result.output
        assert ("computing times as in" in result.output) == (not flags)
        assert ("without the record's computing times" in result.output) == (not flags)


@pytest.mark.parametrize("kind", ["comparison", "short"])
def test_a_record_that_cannot_serve_is_refused_in_a_sentence(kind: str, tmp_path: Path) -> None:
    if kind == "comparison":
        write_comparison(tmp_path, comparison([]))
        complaint = "is a comparison; name one of the runs in it"
    else:
        write_run(tmp_path, step_s=[0.1] * 5)
        complaint = "steps that all ranks did after the first ones; needed are 10"
    cluster = Cluster(link=LinkSpec(rate_bit_per_s=1e9), straggling_record=str(tmp_path))
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        predict_step("ddp", Setting(profile=MODEL, cluster=cluster))
