"""What a rank's trainer posts to its own member of a protocol, as `protocol_member` says."""

from __future__ import annotations

from offbeat.codec.model_wire import MessageKind, ModelMessage
from offbeat.transport.operations import Payload


def arrive(version: int, *, generation: int) -> Payload:
    return ModelMessage(kind=MessageKind.ARRIVE, generation=generation, version=version).to_bytes()


def fetch_model(peer: int | None, *, generation: int) -> Payload:
    """None: of every living peer."""
    return ModelMessage(
        kind=MessageKind.FETCH_MODEL, generation=generation, version=-1 if peer is None else peer
    ).to_bytes()


def stop_stepping(*, generation: int) -> Payload:
    return ModelMessage(kind=MessageKind.STOP_STEPPING, generation=generation).to_bytes()


def finish(*, generation: int) -> Payload:
    return ModelMessage(kind=MessageKind.FINISH, generation=generation).to_bytes()
