"""Entries of the store that somebody else wrote are read or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from fuzz_support import LONG_NUMBER, NESTED, altered_text, succeeds_or_refuses
from offbeat.errors import OffbeatError
from offbeat.membership.agreement import Membership
from offbeat.transport.network import create_network, find_network

SECRET = b"a secret of this test run only"
WITH_INFINITY = '{"version": 1, "rank": 1e400}'
ENTRIES: dict[str, Any] = {
    "founded": {"version": 1, "description": "a model"},
    "generation/0": {
        "version": 1,
        "number": 0,
        "members": [[0, 0], [1, 0]],
        "newcomers": [1],
        "tickets": 0,
    },
    "request/1": {"version": 1, "rank": 3},
    "endpoint/0/1": {"version": 1, "endpoint": "tcp://127.0.0.1:1"},
    "beat/0/0": 1,
}


def read_all(store: HashStore) -> None:
    membership = Membership(store)
    membership.description()
    generation = membership.latest()
    membership.waiting(generation)
    membership.endpoints(generation)
    membership.silent_s(generation)


@given(data=st.data())
def test_entries_of_the_membership_are_read_or_refused(data: st.DataObject) -> None:
    store = HashStore()
    for key, entry in ENTRIES.items():
        store.set(key, json.dumps(entry))
    key = data.draw(st.sampled_from(sorted(ENTRIES)))
    store.set(key, data.draw(altered_text(ENTRIES[key])).decode(errors="replace"))
    succeeds_or_refuses(lambda: read_all(store))


@pytest.mark.parametrize("key", sorted(ENTRIES))
@pytest.mark.parametrize(
    "said", [NESTED, LONG_NUMBER, "[]", "1e400", '{"version": 1, "rank": 1e400}']
)
def test_an_entry_that_is_something_else_is_read_or_refused(key: str, said: str) -> None:
    store = HashStore()
    for name, entry in ENTRIES.items():
        store.set(name, json.dumps(entry))
    store.set(key, said)
    succeeds_or_refuses(lambda: read_all(store))


@given(data=st.data())
def test_the_entry_of_a_network_is_read_or_refused(data: st.DataObject) -> None:
    store = HashStore()
    create_network(store, token="token", rank=0, world_size=2, address="127.0.0.1", secret=SECRET)
    (key,) = [name for name in ("offbeat/network",) if store.check([name])]
    said = data.draw(altered_text(json.loads(store.get(key))))
    store.set(key, said.decode(errors="replace"))
    succeeds_or_refuses(lambda: find_network(store, rank=1, address="127.0.0.1", secret=SECRET))


@pytest.mark.parametrize(
    "entry",
    [
        {"token": "\ud800", "world_size": 2, "proof": "00"},
        {"token": "a", "world_size": 2, "proof": "\ud800"},
        {"token": "a", "world_size": float("inf"), "proof": "00"},
        {"token": [], "world_size": 2, "proof": "00"},
    ],
)
def test_an_entry_of_a_network_with_other_types_is_refused(entry: dict[str, Any]) -> None:
    store = HashStore()
    store.set("offbeat/network", json.dumps({"version": 1, **entry}))
    with pytest.raises(OffbeatError, match="is damaged"):
        find_network(store, rank=1, address="127.0.0.1", secret=SECRET)
