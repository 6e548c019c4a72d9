"""The optimizer's state where ranks' optimizers hold different parameters."""

from __future__ import annotations

import torch

from offbeat.weights.optimizer_state import OptimizerStates


def test_a_parameter_that_the_optimizer_does_not_step_is_given_no_state() -> None:
    mine, only_peers = torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)
    tensors = [*mine.parameters(), *only_peers.parameters()]
    everywhere = torch.optim.Adam(tensors)
    for tensor in tensors:
        tensor.grad = torch.ones_like(tensor)
    everywhere.step()
    peer = OptimizerStates(everywhere, tensors)
    present = peer.presence()
    merged = {name: peer.tensors(name) for name in present}
    optimizer = torch.optim.Adam(mine.parameters())
    OptimizerStates(optimizer, tensors).take(merged, present)
    assert set(optimizer.state) == set(mine.parameters())
    assert set(optimizer.state_dict()["state"]) == {0, 1}
