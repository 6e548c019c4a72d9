"""Ranks that were not given the same secret, as real processes."""

from __future__ import annotations

import os
import re

import pytest
import torch

import offbeat
from offbeat.errors import OffbeatError
from rank_jobs.regression import make_net
from ranks_support.launch import RunRanks

pytestmark = pytest.mark.ranks

SECRET = "a secret of this test run only"
OTHERS = [
    ([SECRET, SECRET, SECRET + "!"], "OFFBEAT_RUN_SECRET of rank 2 is not that of rank 0"),
    ([SECRET, "short", "other"], "OFFBEAT_RUN_SECRET of ranks 1, 2 is not that of rank 0"),
    ([SECRET, "", SECRET], r"set on some ranks but not on \[1\]"),
    (["too short"] * 3, "has 9 bytes, needed are 16 or more"),
]


def attach_with(rank: int, world_size: int) -> list[tuple[str, str]]:
    """What a rank is told, for each case."""
    told = []
    for secrets, _ in OTHERS:
        os.environ["OFFBEAT_RUN_SECRET"] = secrets[rank]
        net = make_net()
        try:
            with offbeat.attach(net, torch.optim.SGD(net.parameters(), 0.1), offbeat.AllReduce()):
                told.append(("", "attached"))
        except OffbeatError as error:
            told.append((type(error).__name__, str(error)))
        finally:
            del os.environ["OFFBEAT_RUN_SECRET"]
    return told


def test_a_rank_with_another_secret_is_named_on_all_ranks(run_ranks: RunRanks) -> None:
    for told in run_ranks(attach_with, 3):
        for (kind, text), (_, message) in zip(told, OTHERS, strict=True):
            assert kind == "ConfigError", text
            assert re.search(message, text), text


CIPHERS = [
    (["none", "none"], "^trained: messages between ranks are neither encrypted nor authenticated"),
    (["curve", "none"], "OFFBEAT_CIPHER is none on rank 1 and curve on rank 0"),
    (["curve", "rot13"], "OFFBEAT_CIPHER is 'rot13', allowed are curve, none"),
]


def train_with_ciphers(rank: int, world_size: int) -> list[str]:
    """What becomes of a session, for each pair of ciphers."""
    told = []
    for ciphers, _ in CIPHERS:
        os.environ["OFFBEAT_CIPHER"] = ciphers[rank]
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        try:
            with offbeat.attach(net, optimizer, offbeat.WAGMA(period=2)) as session:
                for _ in range(4):
                    net(torch.ones(2, 6)).square().mean().backward()
                    optimizer.step()
                said = [notice for notice in session.notices if "encrypted" in notice]
            told.append(": ".join(["trained", *said]))
        except OffbeatError as error:
            told.append(str(error))
        finally:
            del os.environ["OFFBEAT_CIPHER"]
    return told


def test_ranks_train_with_any_cipher_that_all_of_them_have(run_ranks: RunRanks) -> None:
    for told in run_ranks(train_with_ciphers, 2):
        for text, (_, expected) in zip(told, CIPHERS, strict=True):
            assert re.search(expected, text), text
