"""The hosts of a run meet at a store that anybody on their network can read."""

from __future__ import annotations

import socket

import pytest

from offbeat.errors import ConfigError
from offbeat.run.coordination import LOOPBACK, serve_store
from offbeat.run.supervise import Meeting, meet
from offbeat.transport.connect import SECRET_VARIABLE

CHOSEN = "a secret that the user chose"
IN_STORE = "offbeat-hosts/secret"


@pytest.mark.parametrize("chosen", [CHOSEN, None])
def test_a_secret_that_the_user_chose_stays_out_of_the_store(
    chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", LOOPBACK)
    monkeypatch.setenv(SECRET_VARIABLE, chosen or "")
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    own = meet(Meeting(host=LOOPBACK, port=port, num_nodes=1, node_rank=0), workers=2)
    stored = own.store.store.get(IN_STORE).decode()
    assert stored == ("" if chosen else own.secret)
    assert own.secret == (chosen or stored)
    assert len(own.secret) >= 16


def test_a_host_without_the_secret_of_the_first_one_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", LOOPBACK)
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    server = serve_store()
    for key, value in ((IN_STORE, ""), ("offbeat-hosts/0", "2")):
        server.store.set(key, value)
    where = Meeting(host=LOOPBACK, port=server.port, num_nodes=2, node_rank=1)
    with pytest.raises(ConfigError, match=f"{SECRET_VARIABLE} is set on the first host"):
        meet(where, workers=2)
