"""Which collective is the cheapest here: measured by all ranks together, agreed on, and remembered
across a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final

import torch
from typing_extensions import override

from offbeat.arithmetic.costs import LinkCost, NetworkCosts, cheapest
from offbeat.callbacks.callback import Callback
from offbeat.codec.residual import ErrorFeedback
from offbeat.codec.selectors import Exact, Selector
from offbeat.codec.topk_codec import TopKCodec
from offbeat.codec.wire import pair_bytes
from offbeat.collectives import dense, gtopk_tree, sparse_reduce_scatter, topk_allgather
from offbeat.collectives.base import CostOf, SparseCollective
from offbeat.collectives.probe import probe
from offbeat.transport.driver import Driver, Stream

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


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketKind:
    """What the cost of a bucket's exchange depends on.

    Attributes:
        num_elements: of the bucket.
        element_bytes: of a dense element.
        codec: how entries travel.
    """

    num_elements: int
    element_bytes: int
    codec: TopKCodec = field(default_factory=TopKCodec)

    def pair_bytes(self, k: int) -> float:
        """Of an entry in a message of `k` entries."""
        codec = self.codec
        return pair_bytes(codec.values, codec.indices, k=k, num_elements=self.num_elements)


def _ignore(remark: str) -> None:
    """For a caller that only asks for costs."""


class CheapestCollective(Callback):
    """The callback behind `collective="auto"`.

    The choice steers the numbers that training sees, so it is state: a resumed run uses the
    measurements of the first one.

    Args:
        network: what the links were measured to cost.
        world_size: number of ranks.
        among: names of the collectives to choose from, "dense" among them.
        notify: is told that dense was chosen.
        inform: is told which sparse collective was chosen.
    """

    state_key: ClassVar[str] = "collective_choice"

    def __init__(
        self,
        network: NetworkCosts,
        *,
        world_size: int,
        among: Collection[str] = BY_ITSELF,
        notify: Callable[[str], None] = _ignore,
        inform: Callable[[str], None] = _ignore,
    ) -> None:
        self.network = network
        self._world_size = world_size
        self._among = among
        self._notify = notify
        self._inform = inform
        self._told: set[tuple[int, str]] = set()

    @classmethod
    def measure(
        cls,
        driver: Driver,
        stream: Stream,
        *,
        sample: torch.Tensor,
        selector: Selector = Exact(),  # which never changes
        among: Collection[str] = BY_ITSELF,
        notify: Callable[[str], None] = _ignore,
        inform: Callable[[str], None] = _ignore,
    ) -> CheapestCollective:
        """Probe the links. Collective.

        Args:
            driver: carries the probe out.
            stream: channels for it.
            sample: any tensor of the gradients' dtype and device.
            selector: picks entries.
            among, notify, inform: as of the class.
        """
        work = probe(
            driver.rank,
            driver.world_size,
            select_s_per_element=_select_s_per_element(
                sample, selector, partial(driver.now_s, stream.next())
            ),
            device=sample.device,
        )
        return cls(
            driver.run(work, stream.next()),
            world_size=driver.world_size,
            among=among,
            notify=notify,
            inform=inform,
        )

    def costs_s(self, bucket: BucketKind, k: int) -> dict[str, float]:
        """Expected seconds of one exchange, by collective."""
        select_s = self.network.select_s_per_element * bucket.num_elements
        costs = {
            name: (
                select_s
                + cost(
                    world_size=self._world_size,
                    k=k,
                    pair_bytes=bucket.pair_bytes(k),
                    network=self.network,
                )
            )
            for name, cost in COSTS.items()
            if name in self._among
        }
        num_bytes = bucket.num_elements * bucket.element_bytes
        costs["dense"] = dense.cost_s(
            world_size=self._world_size, num_bytes=num_bytes, network=self.network
        )
        return costs

    def choose(self, bucket: BucketKind, k: int) -> str:
        """The cheapest collective's name. Says so, once for each name and size of bucket."""
        costs = self.costs_s(bucket, k)
        name = cheapest(costs)
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
                self._notify(
                    f"{choice}. On these links, at this size, plain S-SGD is the better choice; it"
                    " is what is trained with then, so the accuracy is AllReduce's and says"
                    " nothing of sparse messages. To see what those do, pass"
                    f' collective="{sparse}"'
                )
            else:
                self._inform(choice)
        return name

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"replicated": {"world_size": self._world_size, "network": self.network.to_dict()}}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = state["replicated"]
        if (
            saved["world_size"] == self._world_size
        ):  # otherwise the old figures say nothing about the new ranks
            network = saved["network"]
            self.network = NetworkCosts(
                messages=LinkCost(**network["messages"]),
                dense=LinkCost(**network["dense"]),
                select_s_per_element=network["select_s_per_element"],
            )


def _select_s_per_element(
    sample: torch.Tensor, selector: Selector, now_s: Callable[[], float]
) -> float:
    """Local cost of residual and selection at density 0.001, measured on noise."""
    feedback = ErrorFeedback(
        SAMPLE_ELEMENTS, dtype=sample.dtype, device=sample.device, selector=selector
    )
    device = sample.device if sample.is_cuda else "cpu"
    generator = torch.Generator(device=device).manual_seed(0)
    durations_s = []
    for _ in range(3):
        gradient = sample.new_empty(SAMPLE_ELEMENTS).normal_(generator=generator)
        if sample.is_cuda:
            torch.cuda.synchronize(sample.device)
        begin_s = now_s()
        # This ends on the host, so what it took on a GPU is over too.
        feedback.stage(gradient, SAMPLE_ELEMENTS // 1000)
        durations_s.append(now_s() - begin_s)
        feedback.discard()
    return min(durations_s) / SAMPLE_ELEMENTS
