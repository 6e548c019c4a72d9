"""What a megabyte costs the processor to send and to receive, by cipher: two ranks of one process
on loopback, messages of 1 MB, the time of all threads of the process.

    with encryption at most 1.2 ms; without at most 0.7

The ciphers take turns.

python benchmarks/studies/messages.py [--json]
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import _benchmarks  # noqa: F401
from _measure import Ratio, interleave, main
from offbeat.transport.operations import Recv, Send
from offbeat.transport.peers import Peers
from offbeat.transport.protection import Cipher
from offbeat_lab.statistics import estimate

NUM_BYTES = 1_000_000
MESSAGES = 100
NUM_ROUNDS = 15
GOALS: dict[Cipher, float] = {"curve": 1.2, "none": 0.7}


def pair(cipher: Cipher, stack: ExitStack) -> Callable[[], float]:
    """Two connected ranks; measures the milliseconds of a megabyte."""
    secret = secrets.token_bytes(32)
    ranks = [Peers(rank, 2, address="127.0.0.1", secret=secret, cipher=cipher) for rank in (0, 1)]
    for rank in ranks:
        rank.connect([peer.endpoint for peer in ranks])
        stack.callback(rank.close)
    payload = secrets.token_bytes(NUM_BYTES)

    def measure() -> float:
        begin_s = time.process_time()
        for _ in range(MESSAGES):
            ranks[0].start(Send(1, payload), 0)
            ranks[1].start(Recv(0, 60.0), 0).wait()
        return 1e3 * (time.process_time() - begin_s) / (MESSAGES * NUM_BYTES / 1e6)

    return measure


def by_cipher() -> Iterator[Ratio]:
    with ExitStack() as stack:
        measured = interleave(
            {cipher: pair(cipher, stack) for cipher in GOALS}, num_rounds=NUM_ROUNDS
        )
    for cipher, goal in GOALS.items():
        found = estimate(measured[cipher])
        low, high = found.low or 0.0, found.high or 0.0
        yield Ratio(
            case=f"a megabyte sent and received, {cipher}",
            value=found.median or 0.0,
            unit="ms",
            goal=f"at most {goal:g}",
            holds="undecided" if low <= goal < high else high <= goal,
            bound=0.0,
            interval=(low, high),
        )


if __name__ == "__main__":
    main({"by cipher": by_cipher})
