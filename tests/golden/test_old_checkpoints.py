"""Checkpoints of the first layout, written by 0.1.0, are read by the code of today.

`write_checkpoints.py` wrote them and says what is in them. Each is loaded into a net of other
weights: everything is in place, and further steps end where those of the session that wrote it did.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

import offbeat
from golden import old_checkpoint_jobs as jobs
from golden.write_checkpoints import (
    FAMILIES,
    HERE,
    NUM_SAMPLES,
    SAVED_AT,
    WORLD_SIZE,
    batch_of,
    begin,
    make_net,
    parameters_of,
    train_step,
)
from offbeat.errors import CheckpointError
from offbeat.session.checkpoint import latest, verify
from ranks_support.launch import RunRanks

LOADERS = sorted(name for name, family in FAMILIES.items() if family.loader is not None)
REPEATING = sorted(name for name, family in FAMILIES.items() if family.repeats)
AVERAGED_BESIDE = ["adpsgd", "wagma"]


def expected(family: str) -> list[dict[str, Any]]:
    ranks: list[dict[str, Any]] = json.loads((HERE / family / "expected.json").read_text())
    return ranks


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_files_are_whole(family: str) -> None:
    manifest = latest(HERE / family)
    verify(manifest)
    assert (manifest.step, manifest.world_size) == (SAVED_AT, WORLD_SIZE)


@pytest.mark.ranks
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_session_goes_on_from_it(run_ranks: RunRanks, family: str) -> None:
    ranks = run_ranks(jobs.resumed, WORLD_SIZE, family=family)
    assert [rank["lost"] for rank in ranks] == [[]] * WORLD_SIZE
    for mine, wanted in zip(ranks, expected(family), strict=True):
        if family in REPEATING:
            np.testing.assert_allclose(mine["parameters"], wanted["parameters"], atol=1e-6)
        assert np.isfinite(mine["parameters"]).all()
    if family in LOADERS:
        before = [index for rank in expected(family) for index in rank["seen_before"]]
        seen = [index for rank in ranks for index in rank["seen"]]
        assert sorted(before + seen) == list(range(NUM_SAMPLES))
    if family in AVERAGED_BESIDE:
        for rank in ranks:
            np.testing.assert_allclose(rank["averaged"], mean_after_a_step(family), atol=1e-6)


def mean_after_a_step(family: str) -> list[float]:
    """The mean of what the ranks' own steps from the checkpoint lead to, which averaging keeps."""
    models = []
    for rank in range(WORLD_SIZE):
        tree, net = jobs.read(family, rank), make_net(0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=FAMILIES[family].momentum)
        net.load_state_dict(tree["model"])
        optimizer.load_state_dict(tree["optimizer"])
        train_step(net, optimizer, *batch_of(rank, SAVED_AT))
        models.append(parameters_of(net))
    mean: list[float] = np.mean(models, axis=0).tolist()
    return mean


@pytest.mark.parametrize("family", ["eagersgd", "gtopk", "topk"])
def test_what_is_owed_is_kept_with_another_number_of_ranks(family: str) -> None:
    states = [jobs.read(family, rank)["session"] for rank in range(WORLD_SIZE)]
    _, _, session, _ = begin(FAMILIES[family], seed=3)
    with session:
        session.load_state_dict(offbeat.reshard(states, 1, 0))
        kept = additive(session.state_dict())
    for name, tensor in kept.items():
        torch.testing.assert_close(tensor, sum(additive(state)[name] for state in states))
    assert any(bool(tensor.any()) for tensor in kept.values())


def additive(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What is summed over ranks, of all parts, by name."""
    parts = state["parts"].values()
    return {name: tensor for part in parts for name, tensor in part.get("additive", {}).items()}


def test_a_state_of_another_strategy_is_refused() -> None:
    state = jobs.read("localsgd", 0)["session"] | {"world_size": 1}
    _, _, session, _ = begin(FAMILIES["gtopk"], seed=3)
    with session, pytest.raises(CheckpointError, match="strategy 'localsgd'"):
        session.load_state_dict(state)


def test_a_state_of_other_options_is_refused() -> None:
    """A part is missing, and which one is said."""
    state = jobs.read("allreduce", 0)["session"] | {"world_size": 1}
    names = [name for name in state["parts"] if name != "LockstepLoader"]
    _, _, session, _ = begin(FAMILIES["allreduce"], seed=3)
    with session, pytest.raises(CheckpointError, match="the state lacks"):
        session.load_state_dict(state | {"parts": {name: state["parts"][name] for name in names}})
