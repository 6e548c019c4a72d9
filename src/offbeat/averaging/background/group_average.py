"""Wait-avoiding group averaging, the protocol of WAGMA-SGD (arXiv 2005.00124, algorithm 2): nobody
waits for who computes.

    a rank arrives at version t:        it contributes its model, fresh, and tells its group
    a message of version t reaches one  it contributes the last snapshot of its model, stale, and
    computes on;
    that has not contributed:           arriving later it sends nothing and finds the average
    waiting
    all contributions are here:         they are averaged, by weight, and merged

One collective a rank, `serve`, runs beside training for as long as the membership lasts and answers
for its rank at any time. What it averages, and what becomes of averages, is the business of the
`Replica` that it is given.

Differences from the paper:
- any world and group size, members that come late, stop or die; every average says what it is made
  of (`Piece.notes`) and is divided by the sum of those weights;
- a version is begun within its group alone, not by a tree over all ranks, so groups do not hold
  each other up and ranks may be at different versions;
- the whole model is averaged in one version, as one contribution;
- `Meeting.min_fresh` says for how many arrivals the others' snapshots are held back. Group averages
  hold back for none; the periodic average of everyone waits for a quorum, or for all as in the
  paper. The word of an arrival goes ahead of the model, so that trainers need not wait for the
  network (`Replica.gathered`).

Who does not answer within a deadline learned from earlier answers is *suspected*: nobody waits for
it and it is sent no values, until it is heard of again. Who is *dead*, says the driver, is left out
for good. A late contribution is ignored and counted; a late average is merged when it comes
(`Replica.amend`), so that suspicion costs time and mixing but no weight.

Bytes a rank and version, for models of N bytes and groups of S: at most 2 N (S-1) / S, or (S-1) N
where the model is small; 80 bytes a message, 24 a member and average, and 8 a counter on top, and
80 a peer for the word of an arrival.
"""

from __future__ import annotations

from offbeat.averaging.background.group_base import Happenings, Replica, Terms
from offbeat.averaging.background.round_manager import Attendant
from offbeat.averaging.background.round_member import attend
from offbeat.codec.model_wire import Kind, ModelMessage
from offbeat.transport.operations import Collective


def arrive(version: int, *, generation: int) -> bytes:
    """What a rank posts to its own `serve` when it has come to the end of a step and
    `Replica.contribute` will be fresh.
    """
    return ModelMessage(kind=Kind.ARRIVE, generation=generation, version=version).to_bytes()


def ask(peer: int | None, *, generation: int) -> bytes:
    """What a rank posts to be sent the model of member `peer`, or of every other living member:
    `Replica.receive`.

    Where the one asked is dead, or is no member, `Replica.bury` is all there is to hear of it.
    Asked before `finish`, `serve` does not return before the answers are here.
    """
    return ModelMessage(
        kind=Kind.SEEK, generation=generation, version=-1 if peer is None else peer
    ).to_bytes()


def rest(*, generation: int) -> bytes:
    """What a rank posts when it will not arrive any more. `serve` goes on answering, and nobody
    waits for it to arrive.
    """
    return ModelMessage(kind=Kind.REST, generation=generation).to_bytes()


def finish(*, generation: int) -> bytes:
    """What a rank posts last; it rests, too. `serve` goes on answering, and returns when all
    members have finished or died.
    """
    return ModelMessage(kind=Kind.FINISH, generation=generation).to_bytes()


def serve(
    rank: int, terms: Terms, replica: Replica, happenings: Happenings | None = None
) -> Collective[Happenings]:
    """Answer for `rank` throughout a generation. Close the driver when it has returned: who was cut
    off may still wait.

    Args:
        rank: one of `terms.members`.
        terms: what the members agree on.
        replica: this rank's model.
        happenings: counted into, to be looked at meanwhile.

    Raises:
        WireError: a message is corrupt, or its sender trains another model. No average was merged
            because of it.
    """
    return attend(Attendant(rank, terms, replica, happenings or Happenings()))
