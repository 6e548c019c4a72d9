"""Plain values from every rank to every rank: to agree on something, not to train."""

from __future__ import annotations

import json
from typing import Any

from offbeat.transport.operations import AllGather, Collective


def gather_values(value: Any) -> Collective[list[Any]]:
    """Every rank's `value`, of JSON's kinds, by rank."""
    payloads = yield AllGather(json.dumps(value).encode())
    return [json.loads(bytes(payload)) for payload in payloads]
