"""What LocalSGD says of itself when it begins."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import offbeat
from offbeat.parts.workspace import Workspace, stream_counter


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "said"),
    [
        (offbeat.LocalSGD(period=7, warmup=20), 2, "only from step 140 on after every 7"),
        (offbeat.LocalSGD(period=7, warmup=0), 2, None),
        (offbeat.LocalSGD(period=1), 2, None),
        (offbeat.LocalSGD(outer="diloco"), 2, None),
        (offbeat.LocalSGD(), 1, None),
    ],
)
def test_a_period_that_grows_is_announced(
    strategy: offbeat.LocalSGD, num_ranks: int, said: str | None
) -> None:
    heard: list[str] = []
    workspace = Workspace(
        parameters=dict(torch.nn.Linear(2, 1).named_parameters()),
        driver=SimpleNamespace(rank=0, world_size=num_ranks),  # type: ignore[arg-type]  # it builds
        grad_scale=lambda: 1.0,
        has_scaler=False,
        new_stream=stream_counter(),
        notify=heard.append,
        inform=heard.append,
    )
    strategy.build(workspace)
    assert ("".join(heard) == "") if said is None else (said in heard[0])
