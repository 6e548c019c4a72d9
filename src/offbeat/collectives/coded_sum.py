"""The sum of vectors in few bits, by owners; what rounding loses is owed.

    cut the vector into one region a rank, its owner's
    send every owner my part of its region, coded              I owe what coding has lost of it
    an owner adds up what it gets, and its own part as it is
    it sends the sum of its region to all, coded               it owes what coding has lost of it
    every rank takes what it reads, the owner too

With signs this is the exchange of 1-bit Adam (arXiv 2102.02888, section 4.1). Difference: the
errors of both roundings are owed in one vector, where the paper keeps one of the worker and one of
the server: an owner's error is part of its own next contribution, so it reaches the same sum, and a
run may resume with another number of ranks.

Cost per step: 2(P-1) messages of n / P coded values and 2(P-1)/P n values sent by each rank; two
messages in sequence.
"""

from __future__ import annotations

from functools import reduce

import torch

from offbeat.codec.dense_wire import DenseWire
from offbeat.codec.tally import Tally
from offbeat.collectives.base import Exchanged
from offbeat.collectives.weighted_mean import regions_of
from offbeat.transport.operations import Collective, Recv, Send


def coded_sum(
    rank: int,
    world_size: int,
    mine: torch.Tensor,
    tally: Tally,
    wire: DenseWire,
    *,
    kept: torch.Tensor,
) -> Collective[Exchanged[torch.Tensor]]:
    """Sum every rank's vector. What is owed is in the memory of `mine`.

    Args:
        rank: this rank, 0 <= rank < world_size.
        world_size: number of ranks, >= 1.
        mine: this rank's, finite, float32 or float64, shape (n,). It is overwritten.
        tally: this rank's.
        wire: how parts of vectors are written, the same on all ranks.
        kept: takes the result; of the same kind, of another memory.

    Raises:
        WireError: a message is damaged, or from a rank with another model or options.
        PeerError: a rank has failed.
    """
    regions = regions_of(0, mine.numel(), world_size)
    # Each rank begins with its successor, so that not all send to the same receiver at once.
    peers = [(rank + hop) % world_size for hop in range(1, world_size)]
    tallies = [tally] * world_size
    for owner in peers:
        yield Send(owner, wire.encode_(mine[regions[owner]], tally))
    own = mine[regions[rank]]
    for sender in reversed(peers):  # in the order in which they send to this rank
        tallies[sender] = wire.decode_to((yield Recv(sender)), own, adds=True)
    payload = wire.encode_(own, tally)
    for peer in peers:
        yield Send(peer, payload)
    wire.decode_to(payload, kept[regions[rank]])
    for owner in reversed(peers):
        wire.decode_to((yield Recv(owner)), kept[regions[owner]])
    # In the order of ranks: sums of weights depend on it.
    return Exchanged(kept=kept, owed=mine, tally=reduce(Tally.merge, tallies))
