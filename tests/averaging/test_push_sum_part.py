"""What the model sees of push-sum when its weight is not 1, and what half precision
does not lose.
"""

from __future__ import annotations

import torch

import offbeat
from offbeat import reshard


def make_net(dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    net = torch.nn.Linear(4, 3).to(dtype)
    return net, torch.optim.SGD(net.parameters(), lr=1.0)


def test_the_optimizer_moves_x_and_the_model_holds_x_over_w() -> None:
    net, optimizer = make_net()
    with offbeat.attach(net, optimizer, offbeat.SGP()) as session:
        z = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
        state = session.state_dict()
        beyond = {f"beyond/{name}": 0.5 * tensor - tensor for name, tensor in z.items()}
        state["callbacks"]["push_sum"]["local"] = {"weight": 0.5, **beyond}
        session.load_state_dict(state)
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, -0.125)
        optimizer.step()
        for name, parameter in net.named_parameters():
            torch.testing.assert_close(parameter.detach(), (0.5 * z[name] + 0.125) / 0.5)
        again = session.state_dict()
        assert again["callbacks"]["push_sum"]["local"]["weight"] == 0.5
        for name, parameter in net.named_parameters():
            x = parameter.detach() + again["callbacks"]["push_sum"]["local"][f"beyond/{name}"]
            torch.testing.assert_close(x, 0.5 * z[name] + 0.125)


def test_in_another_world_every_rank_begins_anew() -> None:
    net, optimizer = make_net()
    with offbeat.attach(net, optimizer, offbeat.SGP()) as session:
        z = [parameter.detach().clone() for parameter in net.parameters()]
        state = session.state_dict()
        state["callbacks"]["push_sum"]["local"] = {
            "weight": 0.5,
            "beyond/weight": torch.ones(3, 4),
            "beyond/bias": torch.ones(3),
        }
        state["callbacks"]["push_sum"]["replicated"]["world_size"] = 4
        session.load_state_dict(reshard([state] * 4, 1, 0))
        optimizer.step()
        torch.testing.assert_close(
            [parameter.detach() for parameter in net.parameters()], z, rtol=0, atol=0
        )
        assert session.state_dict()["callbacks"]["push_sum"]["local"] == {"weight": 1.0}


def test_x_keeps_what_z_rounds_off() -> None:
    """A weight that half precision cannot hold is pushed on as it is."""
    net, optimizer = make_net(torch.bfloat16)
    with offbeat.attach(net, optimizer, offbeat.SGP()) as session:
        state = session.state_dict()
        small = {
            f"beyond/{name}": torch.full(parameter.shape, 2**-20)
            for name, parameter in net.named_parameters()
        }
        state["callbacks"]["push_sum"]["local"] = {"weight": 1.0, **small}
        session.load_state_dict(state)
        z = [parameter.detach().clone() for parameter in net.parameters()]
        for _ in range(3):
            optimizer.step()
        kept = session.state_dict()["callbacks"]["push_sum"]["local"]
        for name, before, parameter in zip(["weight", "bias"], z, net.parameters(), strict=True):
            x = parameter.detach().double() + kept[f"beyond/{name}"].double()
            torch.testing.assert_close(x, before.double() + 2**-20, rtol=0, atol=2**-24)
