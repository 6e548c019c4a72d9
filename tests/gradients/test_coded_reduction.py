"""What a reduction in few bits owes."""

from __future__ import annotations

import numpy as np
import torch

from offbeat.codec.few_bits import SignValues
from offbeat.codec.tally import Tally
from offbeat.gradients.buckets import make_buckets
from offbeat.gradients.coded_reduction import CodedReduction
from offbeat.gradients.reductions import WeightedGradient, wait_for
from offbeat.transport.driver import Stream
from offbeat.transport.single_rank import SingleRank


def test_what_is_owed_to_a_frozen_parameter_does_not_fade() -> None:
    named = {name: torch.nn.Parameter(torch.zeros(8)) for name in ("frozen", "trained")}
    (bucket,) = make_buckets(named, cap_bytes=None)
    reduction = CodedReduction(bucket, SignValues(), SingleRank(), Stream(0), decay=0.5)
    draw = torch.Generator().manual_seed(1)

    def exchange() -> torch.Tensor:
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            view.zero_()
            if parameter.requires_grad:
                view.normal_(generator=draw)
        used = np.array([parameter.requires_grad for parameter in bucket.parameters])
        tally = Tally(weight=1.0, num_nonfinite=0, num_failed=0, used=used)
        reduction.launch(WeightedGradient(bucket.flat, tally, 1.0, grad_scale=1.0))
        wait_for([reduction])
        bucket.flat = reduction.commit()
        return reduction.additive_state()["residual/frozen"].clone()

    exchange()
    before = exchange()
    assert before.any()
    named["frozen"].requires_grad_(False)
    assert torch.equal(exchange(), before)
