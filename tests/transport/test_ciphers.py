"""What AES-GCM seals opens for its receiver alone, once, and as it was."""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import ConfigError, WireError
from offbeat.transport.operations import Recv, Send
from offbeat.transport.peers import Peers
from offbeat.transport.protection import (
    CIPHER_VARIABLE,
    SALT_BYTES,
    Opener,
    Sealer,
    cipher_from_environment,
    connection_key,
)

SECRET = b"a secret of this test run only"
RECEIVER_SALT, SENDER_SALT = bytes(SALT_BYTES), b"s" * SALT_BYTES
PARTIES = {"generation": 3, "sender": 1, "receiver": 0}
needs_aes = pytest.mark.skipif(
    importlib.util.find_spec("cryptography") is None, reason="the extra aes is not installed"
)


def sealer() -> Sealer:
    key = connection_key(SECRET, receiver_salt=RECEIVER_SALT, sender_salt=SENDER_SALT, **PARTIES)
    return Sealer(key, salt=SENDER_SALT)


def opener(salt: bytes = RECEIVER_SALT, **others: int) -> Opener:
    return Opener(SECRET, salt=salt, **{**PARTIES, **others})


def views(frames: list[bytes]) -> list[memoryview]:
    return [memoryview(frame) for frame in frames]


FRAMES = st.lists(st.binary(max_size=50), min_size=1, max_size=4)


@needs_aes
@given(FRAMES, st.integers(0, 2**64 - 2), st.binary(min_size=1, max_size=60))
def test_what_is_sealed_opens_as_it_was(frames: list[bytes], sequence: int, header: bytes) -> None:
    sealed, parts = sealer().seal(sequence, header, views(frames))
    assert sealed.startswith(header)
    opened = opener().open(sequence, header, sealed[len(header) :], parts)
    assert bytes(opened) == b"".join(frames)


@needs_aes
@given(FRAMES, st.data())
def test_no_bit_may_change_and_nothing_may_be_missing_or_moved(
    frames: list[bytes], data: st.DataObject
) -> None:
    header = b"header"
    sealed, parts = sealer().seal(5, header, views(frames))
    pieces = [header, sealed[len(header) :], *parts]
    action = data.draw(st.sampled_from(["flip", "truncate", "swap", "another number"]))
    which = data.draw(st.integers(0, len(pieces) - 1))
    sequence = 5
    match action:
        case "flip":
            changed = bytearray(pieces[which])
            changed[data.draw(st.integers(0, len(changed) - 1))] ^= 1 << data.draw(
                st.integers(0, 7)
            )
            pieces[which] = bytes(changed)
        case "truncate":
            pieces[which] = pieces[which][: data.draw(st.integers(0, len(pieces[which]) - 1))]
        case "swap":
            if len(parts) < 2:
                return
            pieces[2], pieces[3] = pieces[3], pieces[2]
        case "another number":
            sequence = data.draw(st.integers(0, 2**64 - 1).filter(lambda number: number != 5))
    with pytest.raises(WireError, match="rank 1's was refused"):
        opener().open(sequence, pieces[0], pieces[1], pieces[2:])


@needs_aes
@pytest.mark.parametrize(
    "other",
    [
        {"salt": b"r" * SALT_BYTES},
        {"generation": 4},
        {"sender": 0, "receiver": 1},
        {"receiver": 2},
        {"sender": 2},
    ],
    ids=["played back later", "generation", "direction", "receiver", "sender"],
)
def test_what_was_sealed_for_another_connection_is_refused(other: dict[str, Any]) -> None:
    sealed, parts = sealer().seal(0, b"header", views([b"frame"]))
    with pytest.raises(WireError, match="its seal is broken"):
        opener(**other).open(0, b"header", sealed[len(b"header") :], parts)


@needs_aes
def test_every_connection_and_direction_has_a_key_of_its_own() -> None:
    keys = {
        connection_key(
            SECRET,
            receiver_salt=salt,
            sender_salt=SENDER_SALT,
            generation=generation,
            sender=sender,
            receiver=receiver,
        )
        for salt in (RECEIVER_SALT, SENDER_SALT)
        for generation in (0, 1)
        for sender, receiver in itertools.permutations(range(4), 2)
    }
    assert len(keys) == 2 * 2 * 12


@needs_aes
def test_a_sealer_refuses_a_number_that_it_has_used() -> None:
    one = sealer()
    one.seal(4, b"header", views([b"frame"]))
    with pytest.raises(AssertionError, match="a nonce would be used twice"):
        one.seal(4, b"header", views([b"frame"]))


@needs_aes
def test_ranks_use_no_nonce_twice_with_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    from cryptography.hazmat.primitives.ciphers import aead

    used: list[tuple[bytes, bytes]] = []

    class Noting:
        def __init__(self, key: bytes) -> None:
            self.key, self.inner = key, real(key)

        def encrypt(self, nonce: bytes, data: bytes, known: bytes | None) -> bytes:
            used.append((self.key, nonce))
            return self.inner.encrypt(nonce, data, known)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    real = aead.AESGCM
    monkeypatch.setattr(aead, "AESGCM", Noting)
    payloads = [b"", b"short", bytes(2_500_000)]
    for _ in range(2):  # the same ranks of the same generation, connected once more
        ranks = [
            Peers(rank, 3, address="127.0.0.1", secret=SECRET, cipher="aes-gcm")
            for rank in range(3)
        ]
        for rank in ranks:
            rank.connect([peer.endpoint for peer in ranks])
        for sender, receiver in itertools.permutations(range(3), 2):
            for payload in payloads:
                ranks[sender].start(Send(receiver, payload), 0)
            for payload in payloads:
                assert ranks[receiver].start(Recv(sender, 20.0), 0).wait() == payload
        for rank in ranks:
            rank.close()
    assert len(set(used)) == len(used)
    assert len({key for key, _ in used}) == 12


def test_what_is_no_cipher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CIPHER_VARIABLE, "rot13")
    with pytest.raises(ConfigError, match="OFFBEAT_CIPHER is 'rot13', allowed are curve, aes-gcm"):
        cipher_from_environment()


def test_a_cipher_that_the_machine_lacks_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv(CIPHER_VARIABLE, "aes-gcm")
    with pytest.raises(ConfigError, match=r"needs the package cryptography.*pip install"):
        cipher_from_environment()


@pytest.mark.parametrize("cipher", ["none", pytest.param("aes-gcm", marks=needs_aes)])
def test_who_has_another_secret_is_refused(cipher: Any) -> None:
    ours = Peers(0, 2, address="127.0.0.1", secret=SECRET, cipher=cipher)
    stranger = Peers(1, 2, address="127.0.0.1", secret=SECRET[::-1], cipher=cipher)
    stranger.connect([ours.endpoint, stranger.endpoint])
    assert "refused this rank" in stranger.wait_for_death(20.0)[0]
    stranger.close()
    ours.close()


@needs_aes
@pytest.mark.parametrize(("ours", "theirs"), [("aes-gcm", "curve"), ("curve", "aes-gcm")])
def test_ranks_with_different_ciphers_are_told(ours: Any, theirs: Any) -> None:
    ranks = [
        Peers(rank, 2, address="127.0.0.1", secret=SECRET, cipher=cipher)
        for rank, cipher in enumerate((ours, theirs))
    ]
    with pytest.raises(ConfigError, match="rank 1 listens with another cipher than rank 0"):
        ranks[0].connect([rank.endpoint for rank in ranks])
    for rank in ranks:
        rank.close()


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
