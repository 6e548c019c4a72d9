"""Trees survive a round trip exactly, and nothing damaged or half-written is ever read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
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


def same(left: object, right: object) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right or (isinstance(left, float) and math.isnan(left) and math.isnan(right))


def tensors(dtype: torch.dtype) -> st.SearchStrategy[torch.Tensor]:
    return st.lists(st.integers(-100, 100), max_size=5).map(
        lambda numbers: torch.tensor(numbers, dtype=dtype)
    )


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(
        [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8]
    ).flatmap(tensors)
    | st.just(torch.tensor(True))
    | st.just(np.arange(6, dtype=np.uint16).reshape(2, 3))
    | st.just(np.array(1.5))
)
trees = st.recursive(
    leaves,
    lambda children: (
        st.lists(children, max_size=3)
        | st.lists(children, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(-3, 3), children, max_size=3)
    ),
    max_leaves=8,
)


@given(tree=trees)
def test_any_tree_comes_back_exactly(
    tree: object, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("tree")
    save(directory, "part", tree, metadata={"note": "x"})
    assert same(load(directory, "part").tree, tree)
    assert load(directory, "part").metadata == {"note": "x"}


def test_a_directory_may_be_named_by_a_string(tmp_path: Path) -> None:
    directory = str(tmp_path)
    save(directory, "part", {"a": 1})
    assert load(directory, "part").tree == {"a": 1}


def test_views_of_one_buffer_and_transposed_tensors_are_stored(tmp_path: Path) -> None:
    flat = torch.arange(6.0)
    tree = {"a": flat[:3], "b": flat[2:], "again": flat, "t": flat.view(2, 3).t()}
    save(tmp_path, "views", tree)
    assert same(load(tmp_path, "views").tree, tree)


@pytest.mark.parametrize(
    "make",
    [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.AdamW(p, lr=0.1)],
)
def test_an_optimizer_goes_on_as_if_never_stored(make: object, tmp_path: Path) -> None:
    def trained(num_steps: int, interrupt: bool) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 5))
        optimizer = make([weight])
        for step in range(num_steps):
            if interrupt and step == 3:
                save(tmp_path, "optimizer", optimizer.state_dict())
                optimizer = make([weight])
                optimizer.load_state_dict(load(tmp_path, "optimizer").tree)
            (weight**2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weight.detach()

    assert torch.equal(trained(6, interrupt=False), trained(6, interrupt=True))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": [object()]}, r"\.a\[0\]"),
        ({(1, 2): 3}, "keys"),
        ({True: 3}, "keys"),
        ({"a": torch.ones(2).to_sparse()}, r"sparse tensor at \.a; convert it with to_dense"),
    ],
)
def test_what_cannot_be_stored_is_named(tree: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path, "part", tree)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_an_error_of_ours_and_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path, "part", {"x": 1})
    (tmp_path / ".part.safetensors.tmp").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match="cannot write .* No space left .* make room"):
        save(tmp_path, "part", {"x": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["part.safetensors"]
    assert load(tmp_path, "part").tree == {"x": 1}


@given(garbage=st.binary(max_size=60))
def test_foreign_bytes_are_refused(
    garbage: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("foreign")
    (directory / "part.safetensors").write_bytes(garbage)
    with pytest.raises(CheckpointError):
        load(directory, "part")


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
