"""Training beside what people use with GPUs: mixed precision, a compiler, other streams; and
how often the host waits for the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import offbeat
from gpu_support import DEVICE
from offbeat.strategies.base import Strategy
from offbeat.torch_private import new_gloo_backend, new_nccl_backend
from offbeat.transport.backends import WAIT_LIMIT, gloo_device
from offbeat.transport.operations import AllReduceTensor
from offbeat.transport.routed import C10d

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "allreduce": lambda: offbeat.AllReduce(),
    "gtopk": lambda: offbeat.GTopK(density=0.1, collective="reduce_scatter", warmup=None),
    "powersgd": lambda: offbeat.PowerSGD(rank=2),
    "localsgd": lambda: offbeat.LocalSGD(period=2),
}

ALLOW_A_SCALER = ("allreduce", "gtopk", "powersgd")
"""The others count optimizer steps, which a scaler skips on one rank alone."""


@pytest.fixture
def sync_debug_mode() -> Iterator[Callable[[str], None]]:
    """Sets what PyTorch does where the host waits for the device: "error", "warn" or "default"."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        yield torch.cuda.set_sync_debug_mode
        torch.cuda.set_sync_debug_mode("default")


def net(device: torch.device) -> torch.nn.Sequential:
    torch.manual_seed(1)
    layers = [torch.nn.Linear(64, 64), torch.nn.ReLU()] * 1 + [torch.nn.Linear(64, 64)]
    return torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(64, 8)).to(device)


def batches(device: torch.device, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        inputs = torch.randn(32, 64, generator=draw)
        yield inputs.to(device), inputs[:, :8].to(device)


@pytest.mark.parametrize("name", ALLOW_A_SCALER if DEVICE == "cuda" else ["gtopk"])
def test_half_precision_with_a_scaler_learns(device: torch.device, name: str) -> None:
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    half = torch.float16 if device.type == "cuda" else torch.bfloat16
    scaler = torch.amp.GradScaler(device.type)
    losses = []
    with offbeat.attach(model, optimizer, STRATEGIES[name](), scaler=scaler):
        for inputs, wanted in batches(device, 40):
            optimizer.zero_grad()
            with torch.autocast(device.type, half):
                loss = (model(inputs) - wanted).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("name", STRATEGIES if DEVICE == "cuda" else ["allreduce"])
def test_a_bfloat16_model_learns(device: torch.device, name: str) -> None:
    model = net(device).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    with offbeat.attach(model, optimizer, STRATEGIES[name]()):
        for inputs, wanted in batches(device, 30):
            optimizer.zero_grad()
            loss = (model(inputs.bfloat16()) - wanted).float().square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


@pytest.mark.needs_gpu
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # PyTorch's compiler
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_compiled_model_on_a_stream_of_its_own_trains_as_a_plain_one(
    device: torch.device, name: str
) -> None:
    ended = []
    for special in (False, True):
        model = net(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        call = torch.compile(model) if special else model
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with (
            torch.cuda.stream(stream if special else torch.cuda.current_stream(device)),
            offbeat.attach(model, optimizer, STRATEGIES[name]()),
        ):
            for inputs, wanted in batches(device, 8):
                optimizer.zero_grad()
                (call(inputs) - wanted).square().mean().backward()
                optimizer.step()
        torch.cuda.synchronize(device)
        ended.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(ended[0], ended[1], rtol=1e-3, atol=1e-4)


@pytest.mark.needs_gpu
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_host_never_waits_for_the_device_within_backward(
    device: torch.device, name: str, sync_debug_mode: Callable[[str], None]
) -> None:
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = batches(device, 4)
    with offbeat.attach(model, optimizer, STRATEGIES[name]()):
        for step, (inputs, wanted) in enumerate(steps):
            loss = (model(inputs) - wanted).square().mean()
            last = next(iter(model.parameters()))
            # This gradient is among the last, so what comes after it is the end of the pass.
            hook = last.register_hook(lambda grad: sync_debug_mode("default"))
            try:
                if step > 1:
                    sync_debug_mode("error")
                loss.backward()
            finally:
                sync_debug_mode("default")
                hook.remove()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.needs_gpu
@pytest.mark.parametrize(
    ("name", "most"), [("allreduce", 1), ("powersgd", 1), ("localsgd", 12), ("gtopk", 4)]
)
def test_the_host_waits_so_many_times_a_step(
    device: torch.device, name: str, most: int, sync_debug_mode: Callable[[str], None]
) -> None:
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.attach(model, optimizer, STRATEGIES[name]()):
        for step, (inputs, wanted) in enumerate(batches(device, 5)):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                sync_debug_mode("warn" if step > 1 else "default")
                (model(inputs) - wanted).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                sync_debug_mode("default")
            waits = [each for each in caught if "called a synchronizing" in str(each.message)]
            assert len(waits) <= most, [f"{each.filename}:{each.lineno}" for each in waits]


@pytest.mark.needs_gpu
def test_nccl_sums_and_can_be_aborted(device: torch.device) -> None:
    backend = new_nccl_backend(dist.HashStore(), 0, 1, wait_limit=WAIT_LIMIT)
    tensor = torch.arange(4.0, device=device)
    work = backend.allreduce([tensor], dist.AllreduceOptions())
    work.wait(timedelta(seconds=0.25))
    torch.cuda.current_stream().synchronize()
    assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0]
    backend.abort()


@pytest.fixture
def one_rank(device: torch.device, tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{tmp_path / 'store'}",
        rank=0,
        world_size=1,
    )
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_island_that_fully_shard_divides_trains_as_a_plain_model(
    device: torch.device, name: str, one_rank: None
) -> None:
    ended = []
    for is_divided in (False, True):
        model = net(device)
        mesh = init_device_mesh(device.type, (1, 1), mesh_dim_names=("replicate", "shard"))
        if is_divided:
            for layer in (model[0], model[2]):
                fully_shard(layer, mesh=mesh["shard"])
            fully_shard(model, mesh=mesh["shard"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        given = {"mesh": mesh["replicate"]} if is_divided else {}
        with offbeat.attach(model, optimizer, STRATEGIES[name](), **given):
            for inputs, wanted in batches(device, 6):
                optimizer.zero_grad()
                (model(inputs) - wanted).square().mean().backward()
                optimizer.step()
        whole = [p.full_tensor() if is_divided else p for p in model.parameters()]  # type: ignore[operator]
        ended.append(torch.cat([p.detach().flatten() for p in whole]))
    torch.testing.assert_close(ended[0], ended[1], rtol=1e-4, atol=1e-5)


@pytest.mark.needs_gpu
def test_a_sum_over_nccl_may_be_launched_long_before_its_turn(device: torch.device) -> None:
    store = dist.HashStore()
    cpu = new_gloo_backend(
        dist.PrefixStore("gloo", store),
        0,
        1,
        device=gloo_device("127.0.0.1").handle,
        connect_limit=timedelta(seconds=30),
        wait_limit=WAIT_LIMIT,
    )
    cuda = new_nccl_backend(dist.PrefixStore("nccl", store), 0, 1, wait_limit=WAIT_LIMIT)
    driver = C10d(cpu, cuda)
    matrix = torch.randn(8192, 8192, dtype=torch.float64, device=device)
    for _ in range(60):  # more than a second for the device, and nothing for the host
        matrix @ matrix
    tensor = torch.ones(4, device=device)
    driver.start(AllReduceTensor(tensor), 0).wait()
    assert tensor.tolist() == [1.0] * 4
    driver.close()
