"""The exact messages of each sparse collective, by rank: who sends to whom, in which order.

A change here changes what old and new versions expect of each other on the wire.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from offbeat.codec.sparse import Sparse
from offbeat.codec.tally import Tally
from offbeat.codec.wire import Wire
from offbeat.collectives.base import SparseCollective
from offbeat.collectives.gtopk_tree import gtopk_tree
from offbeat.collectives.sparse_reduce_scatter import sparse_reduce_scatter
from offbeat.collectives.topk_allgather import global_topk
from offbeat.simulation.virtual import VirtualCluster
from offbeat.transport.driver import Driver
from transport_support.wrappers import RecordingDriver

TREE_OF_5 = {
    0: "<1 <2 <4 >4 >2 >1",
    1: ">0 <0",
    2: "<3 >0 <0 >3",
    3: ">2 <2",
    4: ">0 <0",
}
ALL_GATHER_OF_5 = {
    0: ">4 <1 >3 <2 >1 <4",
    1: ">0 <2 >4 <3 >2 <0",
    2: ">1 <3 >0 <4 >3 <1",
    3: ">2 <4 >1 <0 >4 <2",
    4: ">3 <0 >2 <1 >0 <3",
}
REDUCE_SCATTER_OF_5 = {
    rank: " ".join(
        [f">{(rank + distance) % 5}" for distance in range(1, 5)]
        + [f"<{(rank - distance) % 5}" for distance in range(1, 5)]
        + [ALL_GATHER_OF_5[rank]] * 2
    )
    for rank in range(5)
}


@pytest.mark.parametrize(
    ("collective", "golden"),
    [
        (gtopk_tree, TREE_OF_5),
        (partial(gtopk_tree, variant="paper"), TREE_OF_5),
        (global_topk, ALL_GATHER_OF_5),
        (sparse_reduce_scatter, REDUCE_SCATTER_OF_5),
    ],
)
def test_who_sends_to_whom_in_which_order(
    collective: SparseCollective, golden: dict[int, str]
) -> None:
    wire = Wire(num_elements=1000, num_parameters=1, dtype=np.dtype(np.float32))
    tally = Tally(weight=1.0, num_nonfinite=0, num_failed=0, used=np.ones(1, dtype=np.bool_))
    mine = Sparse(
        indices=np.arange(0, 1000, 50), values=np.ones(20, dtype=np.float32), num_elements=1000
    )
    recordings: list[RecordingDriver] = []

    def record(driver: Driver) -> Driver:
        recordings.append(RecordingDriver(driver))
        return recordings[-1]

    VirtualCluster(5).run(
        [collective(rank, 5, mine, tally, 20, wire) for rank in range(5)], wrap=record
    )
    for rank, recording in enumerate(recordings):
        messages = [f"{'>' if op.kind == 'Send' else '<'}{op.peer}" for op in recording.operations]
        assert " ".join(messages) == golden[rank], f"rank {rank}"
