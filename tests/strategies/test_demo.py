"""DeMo against its paper's algorithm in one process."""

from __future__ import annotations

import pytest
import scipy.fft
import torch

import offbeat
from offbeat.gradients.buckets import make_buckets
from offbeat.strategies.demo import blocks_of, transform_
from thread_support.world import ThreadDriver, results_of, session_on

HEIGHT, WIDTH, NUM_STEPS, DECAY, NUM_KEPT = 128, 130, 4, 0.9, 5  # blocks of 64 x 26


def gradient_of(rank: int, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(HEIGHT, WIDTH, generator=draw, dtype=torch.float64)


def kept_and_left(momentum: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest coefficients of each block, back in the matrix, and what is left."""
    kept = torch.zeros_like(momentum)
    for row in range(0, HEIGHT, 64):
        for column in range(0, WIDTH, 26):
            block = momentum[row : row + 64, column : column + 26]
            coefficients = scipy.fft.dctn(block.numpy(), norm="ortho")
            flat = torch.from_numpy(coefficients).flatten()
            few = torch.zeros_like(flat)
            places = flat.abs().topk(NUM_KEPT).indices
            few[places] = flat[places]
            back = scipy.fft.idctn(few.view(block.shape).numpy(), norm="ortho")
            kept[row : row + 64, column : column + 26] = torch.from_numpy(back)
    return kept, momentum - kept


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_steps_are_those_of_the_paper(num_ranks: int) -> None:
    density = NUM_KEPT / (64 * 26)

    def job(driver: ThreadDriver) -> list[torch.Tensor]:
        model = torch.nn.Linear(WIDTH, HEIGHT, bias=False).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        strategy = offbeat.DeMo(density=density, decay=DECAY, sign=False)
        means = []
        with session_on(driver, model, optimizer, strategy):
            for step in range(NUM_STEPS):
                (model.weight * gradient_of(driver.rank, step)).sum().backward()
                means.append(model.weight.grad.clone())
                optimizer.step()
                optimizer.zero_grad()
        return means

    results = results_of(num_ranks, job)
    left = [torch.zeros(HEIGHT, WIDTH, dtype=torch.float64) for _ in range(num_ranks)]
    for step in range(NUM_STEPS):
        kept = []
        for rank in range(num_ranks):
            few, left[rank] = kept_and_left(DECAY * left[rank] + gradient_of(rank, step))
            kept.append(few)
        for means in results:
            torch.testing.assert_close(means[step], sum(kept) / num_ranks, rtol=1e-9, atol=1e-9)
            assert torch.equal(means[step], results[0][step])


def test_the_optimizer_gets_signs() -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with offbeat.attach(model, optimizer, offbeat.DeMo(density=1.0)):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert torch.equal(model.weight.grad, torch.ones(3, 4))


@pytest.mark.parametrize("fused", [False, True])
def test_clipping_several_passes_and_a_scaler_leave_signs_as_they_are(fused: bool) -> None:
    model = torch.nn.Linear(4, 3)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, fused=fused)
    scaler = torch.amp.GradScaler("cpu")
    strategy = offbeat.DeMo(density=1.0)
    with offbeat.attach(model, optimizer, strategy, scaler=scaler) as session:
        for unscales in (False, True):
            for _ in range(2):
                scaler.scale(model(torch.ones(2, 4)).sum()).backward()
            if unscales:
                scaler.unscale_(optimizer)
                session.clip_grad_norm_(0.01)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert torch.equal(model.weight, before - 0.25 - 0.25)


def test_coefficients_keep_lengths_and_come_back() -> None:
    parameters = {
        "conv": torch.nn.Parameter(torch.empty(6, 3, 5, 5)),
        "nothing": torch.nn.Parameter(torch.empty(0, 3)),
        "scale": torch.nn.Parameter(torch.empty(130)),
    }
    (bucket,) = make_buckets(parameters, cap_bytes=None)
    before = torch.randn(bucket.num_elements, dtype=torch.float64)
    flat, blocks = before.clone(), blocks_of(bucket)
    transform_(flat, blocks)
    assert not torch.allclose(flat, before)
    torch.testing.assert_close(flat.norm(), before.norm())
    transform_(flat, blocks, inverse=True)
    torch.testing.assert_close(flat, before)


def test_buckets_have_the_size_that_is_asked_for_and_change_nothing() -> None:
    weights, num_buckets = [], []
    for bucket_mib in (None, 1e-6):
        net = torch.nn.Linear(8, 4)
        torch.nn.init.ones_(net.weight)
        torch.nn.init.zeros_(net.bias)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with offbeat.attach(net, optimizer, offbeat.DeMo(), bucket_mib=bucket_mib) as session:
            for step in range(3):
                (net(torch.ones(1, 8)) * gradient_of(0, step).flatten()[:4]).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            local = session.state_dict()["callbacks"]["gradients"]["local"]
        num_buckets.append(sum(name.startswith("weight/") for name in local))
        weights.append(net.weight.detach().clone())
    assert num_buckets == [1, 2]
    assert torch.equal(*weights)
