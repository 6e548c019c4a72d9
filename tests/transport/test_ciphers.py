"""Without a cipher strangers are refused all the same, and accidents are found."""

from __future__ import annotations

import pytest

from offbeat.errors import ConfigError, WireError
from offbeat.transport.operations import Recv, Send
from offbeat.transport.peers import Peers
from offbeat.transport.protection import CIPHER_VARIABLE, cipher_from_environment

SECRET = b"a secret of this test run only"


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
