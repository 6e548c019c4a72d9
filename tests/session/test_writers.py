"""What loggers tell TensorBoard, Weights & Biases, MLflow and OpenTelemetry, read back from what
their own writers left on the disk, without a network. Hydra makes a strategy of a file.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import offbeat
from offbeat.session.loggers import OpenTelemetryLogger

NAMES = {"accuracy", "offbeat/step_s", "offbeat/wait_s", "offbeat/bytes_sent"}

TRAINING = """
import json, sys, torch, offbeat
from offbeat.session import loggers

def train(logger):
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.attach(model, optimizer, "allreduce", loggers=[logger]) as session:
        for _ in range(20):
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        session.log(accuracy=0.25)
"""


def train(logger: str, folder: Path, settings: dict[str, str], **variables: str) -> None:
    """Train in a process of its own, since writers leave threads and variables behind."""
    code = f"{TRAINING}\ntrain(loggers.{logger}(**json.loads(sys.argv[1])))"
    subprocess.run(
        [sys.executable, "-c", code, json.dumps(settings)],
        check=True,
        cwd=folder,
        env={**os.environ, **variables},
        timeout=300,
    )


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train("TensorBoardLogger", tmp_path, {"directory": str(tmp_path)})
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert set(read.Tags()["scalars"]) >= NAMES
    assert [event.step for event in read.Scalars("offbeat/step_s")] == [10, 20]
    assert [event.value for event in read.Scalars("accuracy")] == [0.25]


def test_weights_and_biases(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    train("WandbLogger", tmp_path, {"mode": "offline", "project": "mine"})
    (written,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = written.read_bytes()
    assert all(name.encode() in content for name in NAMES)


def test_mlflow(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    store = tmp_path / "store"  # MLflow fills a folder that it makes itself
    variables = {"MLFLOW_TRACKING_URI": store.as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
    train("MLflowLogger", tmp_path, {}, **variables)
    files = {file.name: file for file in store.glob("0/*/metrics/**/*") if file.is_file()}
    assert set(files) >= {name.rpartition("/")[2] for name in NAMES}
    steps = [line.split()[2] for line in files["step_s"].read_text().splitlines()]
    assert steps == ["10", "20"]
    (ended,) = store.glob("0/*/meta.yaml")
    assert "end_time: null" not in ended.read_text()


def test_opentelemetry() -> None:
    pytest.importorskip("opentelemetry.sdk.metrics")
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    metrics.set_meter_provider(MeterProvider(metric_readers=[reader]))
    training: dict[str, Any] = {}
    exec(TRAINING, training)  # noqa: S102 - the same loop, where this test's provider is
    training["train"](OpenTelemetryLogger())
    read: Any = reader.get_metrics_data()
    (scope,) = read.resource_metrics[0].scope_metrics
    values = {metric.name: metric.data.data_points[0].value for metric in scope.metrics}
    assert scope.scope.name == "offbeat"
    assert set(values) >= {name.replace("/", ".") for name in NAMES}
    assert values["offbeat.step"] == 20
    assert values["accuracy"] == 0.25


def test_hydra_makes_a_strategy_of_a_file() -> None:
    hydra: Any = pytest.importorskip("hydra.utils")
    omegaconf: Any = pytest.importorskip("omegaconf")
    page = Path(__file__).parents[2] / "docs" / "your-script.md"
    (shown,) = re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    config = omegaconf.OmegaConf.merge(
        omegaconf.OmegaConf.create(shown), omegaconf.OmegaConf.from_dotlist(["strategy.period=8"])
    )
    made = hydra.instantiate(config.strategy)
    assert made == offbeat.LocalSGD(period=8, outer=offbeat.Outer())
