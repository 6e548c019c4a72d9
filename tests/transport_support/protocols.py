"""Protocols of a line or two, by which tests look at a driver."""

from __future__ import annotations

from collections.abc import Sequence

from offbeat.transport.operations import Collective, Now, Payload, Recv, Send


def send(peer: int, payloads: Sequence[Payload]) -> Collective[float]:
    for payload in payloads:
        yield Send(peer, payload)
    return (yield Now())


def clock() -> Collective[float]:
    return (yield Now())


def receive(
    peer: int, count: int, timeout_s: float | None = None
) -> Collective[list[tuple[float, bytes]]]:
    """The messages, each with the time at which it was taken."""
    taken = []
    for _ in range(count):
        payload = yield Recv(peer, timeout_s)
        taken.append(((yield Now()), bytes(payload)))
    return taken
