"""Trees and states that are damaged, or were made by somebody else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

import offbeat
from fuzz_support import (
    JSON,
    NESTED,
    altered_bytes,
    altered_text,
    places_in,
    succeeds_or_refuses,
)
from offbeat import reshard
from offbeat.errors import CheckpointError
from offbeat.session.checkpoint import load, save

TREE = {"model": {"weight": torch.ones(2, 3)}, "step": 3, "pair": (1, None), "more": [float("inf")]}


@given(data=st.data())
def test_a_tree_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("shard")
    content = save(directory, "whole", TREE).read_bytes()
    (directory / "shard.safetensors").write_bytes(data.draw(altered_bytes(content)))
    succeeds_or_refuses(lambda: load(directory, "shard"))


STRUCTURE = {"dict": [["a", {"tensor": "t"}], [1, {"tuple": [{"array": "t"}, {"float": "nan"}]}]]}
TENSORS = {"t": torch.ones(3, dtype=torch.bfloat16), "u": torch.ones(2)}


@given(data=st.data())
def test_the_structure_of_a_tree_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    structure = data.draw(altered_text(STRUCTURE)).decode(errors="replace")
    metadata = data.draw(JSON.map(json.dumps) | st.sampled_from([NESTED, "{}"]))
    header = {"schema": "1", "structure": structure, "metadata": metadata}
    directory = tmp_path_factory.mktemp("shard")
    content = safetensors.torch.save(TENSORS, header)
    (directory / "shard.safetensors").write_bytes(content)
    succeeds_or_refuses(lambda: load(directory, "shard"))


@pytest.mark.parametrize("text", [NESTED, '{"dict": ' * 400 + "1" + "}" * 400])
def test_a_nested_structure_is_refused(tmp_path: Path, text: str) -> None:
    header = {"schema": "1", "structure": text, "metadata": "{}"}
    (tmp_path / "shard.safetensors").write_bytes(safetensors.torch.save(TENSORS, header))
    with pytest.raises(CheckpointError, match="is damaged"):
        load(tmp_path, "shard")


STRATEGIES = [
    offbeat.AllReduce(),
    offbeat.GTopK(),
    offbeat.EF21(density=0.5),
    offbeat.LocalSGD(),
    offbeat.SGP(),
    offbeat.WAGMA(),
    offbeat.EagerSGD(),
    offbeat.AdaptiveSGD(mega_batch=8, warmup=0),
    offbeat.ElasticSGD(mega_batch=8),
    offbeat.SPDKFAC(),
]


@pytest.fixture(scope="module", params=STRATEGIES, ids=lambda strategy: strategy.name)
def saved(request: pytest.FixtureRequest) -> Iterator[tuple[offbeat.Session, dict[str, Any]]]:
    """A session, and its state."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with offbeat.attach(model, optimizer, request.param) as session:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        yield session, session.state_dict()


@given(data=st.data())
def test_a_state_is_loaded_or_refused(
    saved: tuple[offbeat.Session, dict[str, Any]], data: st.DataObject
) -> None:
    session, state = saved[0], deepcopy(saved[1])
    *path, key = data.draw(st.sampled_from(places_in(state)[1:]))
    holder: Any = state
    for name in path:
        holder = holder[name]
    if data.draw(st.booleans()):
        holder[key] = data.draw(JSON | st.just(torch.ones(5)))
    else:
        del holder[key]
    succeeds_or_refuses(lambda: reshard([state, state], 3, 1))
    succeeds_or_refuses(lambda: session.load_state_dict(state))
