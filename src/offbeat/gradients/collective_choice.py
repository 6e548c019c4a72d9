"""Which collective is the cheapest here: measured by all ranks together, agreed on, and remembered
across a resume.

Measured is what messages and dense all-reduces cost between the ranks. Everyone sends to the next
rank and receives from the one before, at once, as the sparse collectives do. The slowest rank's
figures count. Two message sizes give alpha and beta.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, astuple
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import torch
from typing_extensions import override

from offbeat.arithmetic.costs import LinkCost, NetworkCosts
from offbeat.callbacks.callback import Callback
from offbeat.callbacks.context import Notices
from offbeat.codec.device_copies import numpy_dtype
from offbeat.codec.selectors import Exact, Selector
from offbeat.codec.sparse import Sparse
from offbeat.codec.tally import Tally
from offbeat.codec.topk_codec import TopKCodec
from offbeat.codec.wire import pair_bytes
from offbeat.collectives import dense, gtopk_tree, sparse_reduce_scatter, topk_allgather
from offbeat.collectives.base import CostOf, SparseCollective
from offbeat.transport.driver import Driver, Stream
from offbeat.transport.operations import AllGather, AllReduceTensor, Collective, Now, Recv, Send

COLLECTIVES: Final[Mapping[str, SparseCollective | None]] = {
    "reduce_scatter": sparse_reduce_scatter.sparse_reduce_scatter,
    "all_gather": topk_allgather.topk_sum,
    "global": topk_allgather.global_topk,
    "tree": gtopk_tree.gtopk_tree,
    "paper": partial(gtopk_tree.gtopk_tree, variant="paper"),
    "dense": None,
}
"""By the names that options use for them; None: everything is sent, densely."""

COSTS: Final[Mapping[str, CostOf]] = {
    "reduce_scatter": sparse_reduce_scatter.cost_s,
    "all_gather": topk_allgather.cost_s,
    "global": topk_allgather.cost_s,
    "tree": gtopk_tree.cost_s,
    "paper": gtopk_tree.cost_s,
}
"""Of those that are sparse."""

BY_ITSELF: Final = frozenset({"reduce_scatter", "all_gather", "dense"})
"""What `collective="auto"` chooses among."""

SAMPLE_ELEMENTS = 1 << 20
SAMPLE_SHARES = (1000, 10)
"""Of which one in so many is selected: how long that takes gives the cost of an element and that of
an entry.
"""

SMALL_BYTES: Final = 64
LARGE_BYTES: Final = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
"""Of the messages and tensors that are measured. The larger one is the first whose bytes take
`_LONG_S`, and as long as the latency: with fewer, latency hides what bytes cost, and more would
take as long as many steps. More than the usual number is sent only where bytes take less than the
latency even so, as on links between continents.
"""
_LONG_S: Final = 0.02
_USUAL_BYTES: Final = 1 << 20
_USUAL_TENSOR_BYTES: Final = 1 << 22
"""Gradients do not fit into a cache, so neither should a tensor, unless links are slow."""

REPEATS: Final = 3
"""How often each is measured; the fastest counts, since everything else is disturbance."""


class BucketKind(NamedTuple):
    """What the cost of a bucket's exchange depends on.

    Attributes:
        num_elements: of the bucket.
        element_bytes: of a dense element.
    """

    num_elements: int
    element_bytes: int


class CheapestCollective(Callback):
    """The callback behind `collective="auto"`.

    The choice steers the numbers that training sees, so it is state: a resumed run uses the
    measurements of the first one.

    Args:
        network: what the links were measured to cost.
        world_size: number of ranks.
        codec: how entries travel.
        among: names of the collectives to choose from, "dense" among them.
        notices: say what was chosen; None: the caller only asks for costs.
    """

    state_key: ClassVar[str] = "collective_choice"

    def __init__(
        self,
        network: NetworkCosts,
        *,
        world_size: int,
        codec: TopKCodec | None = None,
        among: Collection[str] = BY_ITSELF,
        notices: Notices | None = None,
    ) -> None:
        self.network = network
        self._world_size, self._codec = world_size, codec or TopKCodec()
        self._among, self._notices = among, notices or Notices(0)
        self._told: set[tuple[int, str]] = set()

    def costs_s(self, bucket: BucketKind, k: int) -> dict[str, float]:
        """Expected seconds of one exchange, by collective."""
        codec, num_elements = self._codec, bucket.num_elements
        of_pair = pair_bytes(codec.values, codec.indices, k=k, num_elements=num_elements)
        select_s = self.network.select_s_per_element * num_elements
        costs = {
            name: (
                select_s
                + cost(world_size=self._world_size, k=k, pair_bytes=of_pair, network=self.network)
            )
            for name, cost in COSTS.items()
            if name in self._among
        }
        num_bytes = num_elements * bucket.element_bytes
        costs["dense"] = dense.cost_s(
            world_size=self._world_size, num_bytes=num_bytes, network=self.network
        )
        return costs

    def choose(self, bucket: BucketKind, k: int) -> str:
        """The cheapest collective's name. Says so, once for each name and size of bucket."""
        costs = self.costs_s(bucket, k)
        name = min(costs, key=costs.__getitem__)
        if (bucket.num_elements, name) not in self._told:
            self._told.add((bucket.num_elements, name))
            others = ", ".join(
                f"{other} {cost * 1e3:.2f} ms" for other, cost in costs.items() if other != name
            )
            choice = (
                f'collective="auto" chose {name} for {bucket.num_elements:,} elements at k={k:,}:'
                f" {costs[name] * 1e3:.2f} ms expected against {others}"
            )
            if name == "dense":
                sparse = min((other for other in costs if other != name), key=costs.__getitem__)
                self._notices.notify(
                    f"{choice}. On these links, at this size, plain S-SGD is the better choice; it"
                    " is what is trained with then, so the accuracy is AllReduce's and says"
                    " nothing of sparse messages. To see what those do, pass"
                    f' collective="{sparse}"'
                )
            else:
                self._notices.inform(choice)
        return name

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"replicated": {"world_size": self._world_size, "network": asdict(self.network)}}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = state["replicated"]
        if (
            saved["world_size"] == self._world_size
        ):  # otherwise the old figures say nothing about the new ranks
            links = {name: LinkCost(**saved["network"][name]) for name in ("messages", "dense")}
            self.network = NetworkCosts(**{**saved["network"], **links})


def measured_costs(
    driver: Driver,
    stream: Stream,
    *,
    sample: torch.Tensor,
    selector: Selector = Exact(),  # which never changes
) -> NetworkCosts:
    """Probe the links. Collective.

    Args:
        driver: carries the probe out.
        stream: channels for it.
        sample: any tensor of the gradients' dtype and device.
        selector: picks entries.
    """
    clock = partial(driver.now_s, stream.next())
    select_s_per_element, entry_s = _local_costs_s(sample, selector, clock)
    work = probe(
        driver.rank,
        driver.world_size,
        select_s_per_element=select_s_per_element,
        entry_s=entry_s,
        device=sample.device,
    )
    return driver.run(work, stream.next())


def _local_costs_s(
    sample: torch.Tensor, selector: Selector, now_s: Callable[[], float]
) -> tuple[float, float]:
    """Of residual and selection, for each element; and of each entry that is selected, dealt to an
    owner, written, read and added. Measured on noise.
    """
    kept = torch.float64 if sample.dtype == torch.float64 else torch.float32
    dtype = numpy_dtype(kept)
    residual = sample.new_zeros(SAMPLE_ELEMENTS, dtype=kept)
    wire = TopKCodec().wire(SAMPLE_ELEMENTS, num_parameters=1, dtype=dtype)
    tally = Tally.of_nobody(1)
    device = sample.device if sample.is_cuda else "cpu"
    generator = torch.Generator(device=device).manual_seed(0)

    def seconds(k: int) -> float:
        entries = Sparse(
            indices=np.arange(k) * (SAMPLE_ELEMENTS // k),
            values=np.ones(k, dtype),
            num_elements=SAMPLE_ELEMENTS,
        )
        gradient = sample.new_empty(SAMPLE_ELEMENTS).normal_(generator=generator)
        if sample.is_cuda:
            torch.cuda.synchronize(sample.device)
        begin_s = now_s()
        # This ends on the host, so what it took on a GPU is over too.
        selector.select(
            gradient.to(kept), residual, k=k, weight=1.0, state=selector.initial_state()
        )
        sums = wire.empty()
        for part in wire.partition(entries, 2):
            sums = wire.add(sums, wire.decode(wire.encode(part, tally)[0])[0])
        return now_s() - begin_s

    few, many = (SAMPLE_ELEMENTS // share for share in SAMPLE_SHARES)
    few_s, many_s = (min(seconds(k) for _ in range(REPEATS)) for k in (few, many))
    return few_s / SAMPLE_ELEMENTS, max(0.0, many_s - few_s) / (many - few)


def probe(
    rank: int, world_size: int, *, select_s_per_element: float, entry_s: float, device: torch.device
) -> Collective[NetworkCosts]:
    """The network as the slowest rank sees it; the same on every rank. About 26 MiB each way,
    2 MiB where links are slow, and more where they are long.

    Args:
        rank: this rank.
        world_size: number of ranks.
        select_s_per_element, entry_s: this rank's own costs, to be agreed on with the rest.
        device: of the gradients: a dense all-reduce of CUDA tensors goes another way than one of
            CPU tensors.
    """
    passes = partial(_pass_on, rank, world_size)
    large_bytes, small_s, large_s = yield from _timed_until_long(passes)
    messages = fit_cost(small_s, large_s, SMALL_BYTES, large_bytes)
    tensor_bytes, small_s, large_s = yield from _timed_until_long(
        partial(_reduce, device), at_least=large_bytes, usual_bytes=_USUAL_TENSOR_BYTES
    )
    hops = max(2 * (world_size - 1), 1)
    reduced = fit_cost(
        small_s / hops, large_s / hops, SMALL_BYTES / world_size, tensor_bytes / world_size
    )
    mine = [*astuple(messages), *astuple(reduced), select_s_per_element, entry_s]
    slowest = list(map(max, zip(*(yield from dense.gather_values(mine)), strict=True)))
    return NetworkCosts(
        messages=LinkCost(alpha_s=slowest[0], beta_s_per_byte=slowest[1]),
        dense=LinkCost(alpha_s=slowest[2], beta_s_per_byte=slowest[3]),
        select_s_per_element=slowest[4],
        entry_s=slowest[5],
    )


def _timed_until_long(
    make: Callable[[int], Collective[None]], *, at_least: int = 0, usual_bytes: int = _USUAL_BYTES
) -> Collective[tuple[int, float, float]]:
    """The least of `LARGE_BYTES` whose bytes take long enough, the same on every rank; and the
    seconds that `SMALL_BYTES` and so many take.
    """
    small_s = yield from _timed(partial(make, SMALL_BYTES))
    for num_bytes in (n for n in LARGE_BYTES if n >= at_least):
        large_s = yield from _timed(partial(make, num_bytes))
        reports = yield from dense.gather_values([large_s - small_s, small_s])
        bytes_s, latency_s = map(max, zip(*reports, strict=True))
        if bytes_s >= latency_s and (bytes_s >= _LONG_S or num_bytes >= usual_bytes):
            break
    return num_bytes, small_s, large_s


def probe_pairs(rank: int, world_size: int) -> Collective[dict[int, LinkCost]]:
    """What a message costs to this rank, by the rank that it comes from: those 1, 2, 4, ... before
    it. Every rank receives one from as far away at once. The rest is as of `probe`.
    """
    found = dict[int, LinkCost]()
    passes = partial(_pass_on, rank, world_size)
    large_bytes, _, _ = yield from _timed_until_long(passes)
    for distance in (1 << bit for bit in range((world_size - 1).bit_length())):
        small_s = yield from _timed(partial(passes, SMALL_BYTES, distance))
        large_s = yield from _timed(partial(passes, large_bytes, distance))
        found[(rank - distance) % world_size] = fit_cost(small_s, large_s, SMALL_BYTES, large_bytes)
    return found


def _timed(make: Callable[[], Collective[None]]) -> Collective[float]:
    """Seconds that it takes, where all ranks begin at once. They are those of the repeat whose
    slowest rank was the fastest, the same on all ranks: of messages that share a line another one
    is the first each time.
    """
    mine = list[float]()
    for _ in range(REPEATS):
        yield AllGather(b".")  # nobody is at another message any more
        begin_s = yield Now()
        yield from make()
        mine.append((yield Now()) - begin_s)
    slowest_s = list(map(max, zip(*(yield from dense.gather_values(mine)), strict=True)))
    return mine[slowest_s.index(min(slowest_s))]


def _pass_on(rank: int, world_size: int, num_bytes: int, distance: int = 1) -> Collective[None]:
    if world_size > 1:
        yield Send((rank + distance) % world_size, bytes(num_bytes))
        yield Recv((rank - distance) % world_size)


def _reduce(device: torch.device, num_bytes: int) -> Collective[None]:
    total = yield AllReduceTensor(torch.zeros(num_bytes // 4, device=device))
    float(total[0])  # on a GPU the sum is over only when the host can read it


def fit_cost(small_s: float, large_s: float, small_bytes: float, large_bytes: float) -> LinkCost:
    """The line through both points.

    If the measurement of the small one was disturbed, the line would be flat, and any number of
    bytes would seem to cost nothing: so at least half of the large one's time is put down to its
    bytes.

    Args:
        small_s: seconds that `small_bytes` took, > 0.
        large_s: seconds that `large_bytes` took, > 0.
        small_bytes: >= 0.
        large_bytes: more than `small_bytes`.
    """
    beta = max((large_s - small_s) / (large_bytes - small_bytes), large_s / large_bytes / 2)
    return LinkCost(alpha_s=max(small_s - small_bytes * beta, 0.0), beta_s_per_byte=beta)
