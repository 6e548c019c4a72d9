"""Tasks give every rank its share of the same data, refuse what they cannot use, and
can be learnt.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import ConfigError
from offbeat.lab.tasks import TASKS, Task, build_task

LIMITS = {
    "tiny": (0.08e6, 0.2e6),
    "small": (0.8e6, 1.2e6),
    "medium": (4.5e6, 5.5e6),
    "large": (24e6, 26e6),
}


class Counted(TASKS["digits"]):  # type: ignore[misc, valid-type]
    """Digits without the digits: a batch is the numbers of its samples."""

    num_samples = 1000

    def batch(self, samples: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(samples), torch.zeros(len(samples))


def counted(batch_size: int) -> Counted:
    return Counted(Counted.options_type(batch_size=batch_size))


def samples(task: Task, world_size: int, epoch: int = 0, start_step: int = 0) -> np.ndarray:
    """Sample numbers of shape (steps, world_size, batch_size)."""
    per_rank = [
        [
            batch[0]
            for batch in task.batches(
                seed=3, epoch=epoch, rank=rank, world_size=world_size, start_step=start_step
            )
        ]
        for rank in range(world_size)
    ]
    return torch.stack([torch.stack(batches) for batches in per_rank], dim=1).numpy()


@given(world_size=st.integers(1, 9), batch_size=st.integers(1, 100))
def test_ranks_share_an_epoch_out_without_overlap(world_size: int, batch_size: int) -> None:
    task = counted(batch_size)
    dealt = samples(task, world_size)
    assert dealt.shape == (task.steps_per_epoch(world_size), world_size, batch_size)
    assert len(np.unique(dealt)) == dealt.size
    assert 1000 - dealt.size < world_size * batch_size


@given(world_size=st.integers(1, 5), start_step=st.integers(0, 10))
def test_an_epoch_left_in_the_middle_goes_on_with_the_same_batches(
    world_size: int, start_step: int
) -> None:
    task = counted(17)
    assert np.array_equal(
        samples(task, world_size)[start_step:], samples(task, world_size, start_step=start_step)
    )


def test_the_samples_of_a_step_do_not_depend_on_how_many_share_them() -> None:
    assert np.array_equal(samples(counted(8), 1).ravel(), samples(counted(2), 4).ravel())


def test_each_epoch_has_another_order() -> None:
    assert not np.array_equal(samples(counted(10), 2, epoch=0), samples(counted(10), 2, epoch=1))


def test_too_many_workers_for_the_data_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"40 workers with batches of 32 need 1280 samples a step.*has 1000; use fewer",
    ):
        counted(32).steps_per_epoch(40)


@pytest.mark.parametrize("size", LIMITS)
@pytest.mark.parametrize(
    ("name", "options"),
    [("digits", {}), ("mnist", {}), ("charlm", {}), ("charlm", {"model": "transformer"})],
)
def test_sizes_are_what_they_say(name: str, options: dict[str, str], size: str, npz: Path) -> None:
    extra = {"path": npz} if name == "mnist" else {}
    with torch.device("meta"):
        model = build_task(name, options | extra | {"size": size}).model()
    least, most = LIMITS[size]
    assert least <= sum(parameter.numel() for parameter in model.parameters()) <= most


def test_a_seed_determines_the_model_and_leaves_the_generator_alone(npz: Path) -> None:
    task = build_task("mnist", {"path": npz})
    before = torch.get_rng_state()
    first, again, other = (task.build_model(seed).state_dict()["0.weight"] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mnist", {}),
        ("charlm", {"window": "16"}),
        ("charlm", {"model": "transformer", "window": "16"}),
        ("charlm", {"optimizer": "sgd", "lr": "0.5", "window": "16"}),
    ],
)
def test_training_lowers_the_loss(
    name: str, options: dict[str, str], npz: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 40)
    task = build_task(
        name, options | {"path": str(npz if name == "mnist" else text), "batch_size": "8"}
    )
    model = task.build_model(0)
    optimizer = task.optimizer(model)
    batch = next(task.batches(seed=0, epoch=0, rank=0, world_size=1))
    losses = []
    for _ in range(8):
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert 0 <= task.evaluate(model) < 10


def test_the_metric_of_charlm_is_in_bits(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 20)
    task = build_task("charlm", {"path": str(text), "window": "16"})

    class Clueless(torch.nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return torch.zeros(*inputs.shape, 256)

    assert task.evaluate(Clueless()) == pytest.approx(8.0)


def test_charlm_holds_text_out(tmp_path: Path) -> None:
    blocks = [bytes([number]) * 16_384 for number in range(40)]
    directory = tmp_path / "texts"
    directory.mkdir()
    for number, block in enumerate(blocks):
        (directory / f"{number:02d}.txt").write_bytes(block)
    train, test = build_task("charlm", {"path": str(directory)}).windows
    assert set(test.unique().tolist()) == {19, 39}
    assert set(train.unique().tolist()) == set(range(40)) - {19, 39}


def test_digits_holds_a_fifth_out() -> None:
    data = build_task("digits", {}).data
    assert (len(data.train_labels), len(data.test_labels)) == (1437, 360)
    assert data.train_images.shape[1:] == (1, 8, 8)
    assert 0.0 == data.train_images.min() < data.train_images.max() == 1.0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "digit",
            {},
            "no task 'digit'; allowed are digits, charlm, mnist, xmc; did you mean 'digits'",
        ),
        (
            "digits",
            {"bach_size": "3"},
            "no option 'bach_size'; allowed are .*did you mean 'batch_size'",
        ),
        ("digits", {"size": "huge"}, "option size of task 'digits': got 'huge'; .*'tiny'"),
        (
            "digits",
            {"batch_size": "0"},
            "option batch_size .* got '0'; .*greater than or equal to 1",
        ),
        ("digits", {"lr": "fast"}, "option lr .* got 'fast'; .*number"),
        ("mnist", {}, "needs --set path="),
        ("mnist", {"path": "nowhere.npz"}, r"no data at .*nowhere.npz; give"),
        ("charlm", {"path": "nowhere.txt"}, r"no text at .*nowhere.txt; give"),
    ],
)
def test_what_cannot_be_used_is_refused_at_once(
    name: str, options: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_task(name, options)


@pytest.mark.parametrize("content", [b"", b"no zip", b"PK\x03\x04 torn"])
def test_a_file_that_is_no_npz_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"is not an npz file"):
        build_task("mnist", {"path": path})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_train": np.zeros((64, 3, 3))}, r"shape \(64, 3, 3\)"),
        ({"y_train": np.full(64, 10)}, "values 0 to 9"),
        ({"y_test": np.zeros(3)}, r"allowed is \(10,\)"),
        ({"x_test": np.array(["a"] * 10, dtype=object)}, "cannot read the arrays"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    change: dict[str, np.ndarray], message: str, npz: Path
) -> None:
    with np.load(npz) as arrays:
        np.savez(npz, **(dict(arrays) | change))
    with pytest.raises(ConfigError, match=message):
        _ = build_task("mnist", {"path": npz}).num_samples


def test_missing_arrays_are_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "half.npz", x_train=np.zeros((1, 28, 28)))
    with pytest.raises(ConfigError, match="has no y_train, x_test, y_test"):
        build_task("mnist", {"path": tmp_path / "half.npz"})
