"""Keys of ranks, and what is found without a cipher: strangers are refused all the same."""

from __future__ import annotations

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import z85

from offbeat.errors import ConfigError, WireError
from offbeat.transport.operations import Recv, Send
from offbeat.transport.peers import Peers
from offbeat.transport.protection import (
    CIPHER_VARIABLE,
    PROTECTIONS,
    CurveProtection,
    cipher_from_environment,
    key_pair,
)

SECRET = bytes(range(32))


@given(st.binary(min_size=16, max_size=64), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_a_key_pair_belongs_together_and_can_be_derived_again(
    secret: bytes, generation: int, rank: int
) -> None:
    pair = key_pair(secret, generation=generation, rank=rank)
    assert pair == key_pair(secret, generation=generation, rank=rank)
    assert pair.public == zmq.curve_public(pair.secret)
    assert len(z85.decode(pair.secret)) == 32


def test_secret_generation_and_rank_all_change_the_keys() -> None:
    pairs = [
        key_pair(secret, generation=generation, rank=rank)
        for secret in (SECRET, SECRET[::-1])
        for generation in (0, 1)
        for rank in (0, 1)
    ]
    assert len({pair.public for pair in pairs}) == 8


def test_a_secret_too_short_to_be_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="has 15 bytes, needed are 16"):
        key_pair(b"x" * 15, generation=0, rank=0)


def test_printing_a_key_pair_does_not_show_its_secret() -> None:
    pair = key_pair(SECRET, generation=0, rank=0)
    assert pair.secret.decode() not in repr(pair)


def test_a_rank_knows_the_keys_of_its_peers_and_nobody_elses() -> None:
    protection = CurveProtection(run_secret=SECRET, generation=3, world_size=4, rank=0)
    for rank in range(4):
        pair = key_pair(SECRET, generation=3, rank=rank)
        assert protection.rank_of(pair.public) == rank
    for stranger in (
        key_pair(SECRET, generation=2, rank=0),
        key_pair(SECRET, generation=3, rank=4),
    ):
        assert protection.rank_of(stranger.public) is None


def test_what_is_no_cipher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CIPHER_VARIABLE, "rot13")
    with pytest.raises(ConfigError, match="OFFBEAT_CIPHER is 'rot13', allowed are curve, none"):
        cipher_from_environment()


def test_without_a_cipher_who_has_another_secret_is_refused() -> None:
    ours = Peers(0, 2, address="127.0.0.1", secret=SECRET, cipher="none")
    stranger = Peers(1, 2, address="127.0.0.1", secret=SECRET[::-1], cipher="none")
    stranger.connect([ours.endpoint, stranger.endpoint])
    assert "refused this rank" in stranger.wait_for_death(20.0)[0]
    stranger.close()
    ours.close()


def test_without_a_cipher_an_accident_is_still_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [Peers(rank, 2, address="127.0.0.1", secret=SECRET, cipher="none") for rank in range(2)]
    for rank in ranks:
        rank.connect([peer.endpoint for peer in ranks])
    content = bytearray(b"as it was sent" * 100_000)
    ranks[0].start(Send(1, bytes(content)), 0)
    assert ranks[1].start(Recv(0, 20.0), 0).wait() == content
    monkeypatch.setattr("zlib.crc32", lambda payload: 5)
    ranks[0].start(Send(1, bytes(content)), 0)
    monkeypatch.undo()
    with pytest.raises(WireError, match="its bytes changed on the way"):
        ranks[1].start(Recv(0, 20.0), 0).wait()
    for rank in ranks:
        rank.close()


class Name(bytes):
    """Counts with how many others it is compared."""

    num_compared = 0
    __hash__ = bytes.__hash__

    def __eq__(self, other: object) -> bool:
        Name.num_compared += 1
        return bytes(self) == other


def test_a_rank_is_known_by_its_name_without_a_look_at_all_others() -> None:
    protection = PROTECTIONS["none"](run_secret=SECRET, generation=0, world_size=1024, rank=0)
    assert protection.rank_of(Name(b"1023")) == 1023
    assert Name.num_compared < 10
    assert protection.rank_of(b"1024") is None
    assert protection.rank_of(b"007") is None
