"""The optimizer's state where ranks' optimizers hold different parameters."""

from __future__ import annotations

import torch
from typing_extensions import override

from offbeat.weights.optimizer_state import OptimizerStates, notice_of_local_states


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


class Quantised(torch.optim.SGD):
    """Keeps codes beside its momentum, and how many steps it has taken."""

    @override
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                codes = torch.zeros(3, dtype=torch.uint8)
                self.state[parameter] |= {"codes": codes, "num_steps": 1}


def stepped(optimizer: torch.optim.Optimizer, net: torch.nn.Module) -> torch.optim.Optimizer:
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_states_that_stay_local_are_named() -> None:
    net = torch.nn.Linear(3, 2)
    parameters = dict(net.named_parameters())
    quantised = stepped(Quantised(net.parameters(), momentum=0.9), net)
    remark = notice_of_local_states(quantised, parameters)
    assert remark is not None
    assert remark.startswith("of Quantised's state 'codes', 'num_steps' stay each rank's own")
    for whole in (
        torch.optim.SGD(net.parameters(), momentum=0.9),
        torch.optim.SGD(net.parameters()),
        torch.optim.Adafactor(net.parameters()),
        torch.optim.Muon([net.weight]),
    ):
        assert notice_of_local_states(stepped(whole, net), parameters) is None


def test_a_rank_that_had_no_state_is_given_adafactors_of_its_shapes() -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 5), torch.nn.Linear(4, 1))
    tensors = list(net.parameters())
    everywhere = stepped(torch.optim.Adafactor(tensors), net)
    peer, nobody = OptimizerStates(everywhere, tensors), torch.optim.Adafactor(tensors)
    present = peer.presence()
    newcomer = OptimizerStates(nobody, tensors)
    for name in present:
        assert [state.shape for state in newcomer.zeros(name)] == [
            state.shape for state in peer.tensors(name)
        ]
    newcomer.take({name: peer.tensors(name) for name in present}, present)
    torch.testing.assert_close(nobody.state_dict()["state"], everywhere.state_dict()["state"])
