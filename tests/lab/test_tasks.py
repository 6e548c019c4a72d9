"""Tasks give every rank its share of the same data, refuse what they cannot use, and
can be learnt.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import ConfigError
from offbeat_lab.tasks import TASKS, Task, build_task, images
from offbeat_lab.tasks.gpt import Gpt
from offbeat_lab.tasks.image_task import label_shares

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
    [
        ("digits", {}),
        ("mnist", {}),
        ("images", {}),
        ("images", {"model": "resnet"}),
        ("charlm", {}),
        ("charlm", {"model": "transformer"}),
        ("text", {}),
        ("sequences", {}),
    ],
)
def test_sizes_are_what_they_say(name: str, options: dict[str, str], size: str, npz: Path) -> None:
    extra = {"path": npz} if name in ("mnist", "images") else {}
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
        ("images", {"model": "resnet"}),
        ("images", {"model": "cnn", "augment": "none", "optimizer": "adamw", "lr": "0.01"}),
        ("text", {"window": "16"}),
        ("text", {"window": "16", "tokens": "words", "vocabulary": "12"}),
        ("sequences", {"longest": "64", "bucketed": "false"}),
        ("charlm", {"window": "16"}),
        ("charlm", {"model": "transformer", "window": "16"}),
        ("charlm", {"optimizer": "sgd", "lr": "0.5", "window": "16"}),
    ],
)
def test_training_lowers_the_loss(
    name: str, options: dict[str, str], npz: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog.\n\n" * 40)
    task = build_task(
        name,
        options | {"path": str(npz if name in ("mnist", "images") else text), "batch_size": "8"},
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


def test_digits_are_those_of_scikit_learn_which_is_not_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = build_task("digits", {}).data
    monkeypatch.setattr(images, "find_spec", lambda name: None)  # as if its file had moved
    monkeypatch.setattr(images, "bundled_table", images.bundled_table.__wrapped__)  # read anew
    loaded = build_task("digits", {}).data
    for field in fields(read):
        assert torch.equal(getattr(read, field.name), getattr(loaded, field.name))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "digit",
            {},
            "no task 'digit'; allowed are digits, images, .*xmc; did you mean 'digits'",
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
        (
            "digits",
            {"nesterov": "true", "momentum": "0"},
            "^options of task 'digits': nesterov=true needs optimizer=sgd and momentum above 0$",
        ),
        ("sequences", {"shortest": "40", "longest": "30"}, "shortest must be less"),
        ("images", {"path": "x.npz", "hidden": "3"}, "hidden=3 is for model=plain"),
        ("mnist", {"path": "x.npz", "width": "3"}, "width=3 is for model=cnn"),
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
        ({"y_train": np.full(64, -1)}, "whole numbers from 0 to"),
        ({"y_train": np.zeros(64)}, "dtype float64"),
        ({"x_test": np.zeros((10, 28, 30))}, "both must be equal"),
        ({"x_train": np.full((64, 28, 28), 256)}, "from 256 to 256"),
        ({"y_test": np.zeros(3)}, r"allowed is \(10,\)"),
        (
            {"x_test": np.array(["a"] * 10, dtype=object)},
            "when allow_pickle=False",
        ),
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


def colours(path: Path, **changes: np.ndarray) -> Path:
    """An npz of coloured images, three bright classes that differ in their channel."""
    random = np.random.default_rng(1)
    labels = np.arange(48) % 3
    images = random.integers(0, 60, (48, 12, 16, 3), dtype=np.uint8)
    images[np.arange(48), :, :, labels] += 150
    arrays = {
        "x_train": images,
        "y_train": labels,
        "x_test": images[:9],
        "y_test": labels[:9],
    }
    np.savez(path, **(arrays | changes))
    return path


def test_coloured_images_of_any_shape_are_learnt(tmp_path: Path) -> None:
    task = build_task(
        "images", {"path": colours(tmp_path / "colours.npz"), "batch_size": "12", "lr": "0.02"}
    )
    model = task.build_model(0)
    assert model(task.batch(np.arange(4))[0]).shape == (4, 3)
    optimizer = task.optimizer(model)
    for epoch in range(10):
        for batch in task.batches(seed=0, epoch=epoch, rank=0, world_size=1):
            optimizer.zero_grad()
            task.loss(model, batch).backward()
            optimizer.step()
    model.eval()
    assert task.evaluate(model) == 1.0


def test_images_are_centred_by_channel(tmp_path: Path) -> None:
    task = build_task("images", {"path": colours(tmp_path / "colours.npz")})
    images = task.batch(np.arange(48))[0]
    torch.testing.assert_close(images.mean(dim=(0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(images.std(dim=(0, 2, 3)), torch.ones(3), atol=1e-4, rtol=0)


def test_images_are_changed_at_random_but_alike_after_a_resume(tmp_path: Path) -> None:
    task = build_task("images", {"path": colours(tmp_path / "colours.npz")})
    numbers = np.arange(12)
    plain = task.batch(numbers)[0]
    first, again, later = (
        task.training_batch(numbers, seed=0, epoch=epoch)[0] for epoch in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    assert not torch.equal(first, plain)
    # Shifted images lose pixels at an edge, so no pixel is new but the zeros that fill in.
    assert set(first.unique().tolist()) <= set(plain.unique().tolist()) | {0.0}


def test_a_changed_image_is_a_shifted_one_or_its_mirror_image(tmp_path: Path) -> None:
    task = build_task("images", {"path": colours(tmp_path / "colours.npz")})
    plain = task.batch(np.arange(12))[0]
    changed = task.training_batch(np.arange(12), seed=0, epoch=0)[0]
    padded = torch.nn.functional.pad(plain, (2, 2, 1, 1))
    shifted = [
        padded[:, :, top : top + 12, left : left + 16] for top in range(3) for left in range(5)
    ]
    for number, image in enumerate(changed):
        unflipped = any(torch.equal(image, one[number]) for one in shifted)
        flipped = any(torch.equal(image, one[number].flip(-1)) for one in shifted)
        assert unflipped or flipped


def test_the_channels_of_an_image_stay_where_they_are(tmp_path: Path) -> None:
    images = np.zeros((48, 12, 16, 3), dtype=np.uint8)
    images[:, :4, :, 2] = 255
    path = colours(tmp_path / "colours.npz", x_train=images)
    batch, _ = build_task("images", {"path": path, "normalize": "false"}).batch(np.arange(2))
    assert batch.shape == (2, 3, 12, 16)
    assert batch[:, 2, :4].min() == 1.0
    assert batch.sum() == 2 * 4 * 16


def test_a_smaller_image_holds_means_of_pixels(tmp_path: Path) -> None:
    images = np.zeros((48, 16, 20, 3), dtype=np.uint8)
    images[:, 0, 0], images[:, 1, 1] = 100, 20
    held_out = np.zeros((9, 16, 20, 3), dtype=np.uint8)
    path = colours(tmp_path / "colours.npz", x_train=images, x_test=held_out)
    batch, _ = build_task("images", {"path": path, "normalize": "false", "shrink": "2"}).batch(
        np.arange(2)
    )
    assert batch.shape == (2, 3, 8, 10)
    torch.testing.assert_close(batch[:, :, 0, 0], torch.full((2, 3), 30 / 255))
    assert batch[:, :, 1:].sum() == 0


@pytest.mark.parametrize("skew", [0.05, 0.3, 100.0])
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_skewed_labels_use_up_the_data(skew: float, world_size: int) -> None:
    labels = np.random.default_rng(0).integers(0, 5, 1000)
    shares = label_shares(labels, skew, world_size=world_size, seed=1)
    assert [len(share) for share in shares] == [1000 // world_size] * world_size
    dealt = np.concatenate(shares)
    assert len(np.unique(dealt)) == dealt.size
    again = label_shares(labels, skew, world_size=world_size, seed=1)
    assert all(np.array_equal(one, other) for one, other in zip(shares, again, strict=True))


def test_the_smaller_the_skew_the_more_unequal_the_labels() -> None:
    labels = np.random.default_rng(0).integers(0, 5, 4000)

    def inequality(skew: float) -> float:
        shares = label_shares(labels, skew, world_size=4, seed=1)
        counts = np.array([np.bincount(labels[share], minlength=5) for share in shares])
        return float(np.abs(counts / 1000 - np.bincount(labels) / 4000).sum() / 4)

    assert inequality(0.1) > inequality(1.0) > inequality(100.0)
    assert inequality(0.1) > 0.7
    assert inequality(100.0) < 0.15


def test_a_rank_keeps_its_skewed_share_from_epoch_to_epoch() -> None:
    task = build_task("digits", {"skew": "0.3", "batch_size": "8"})
    first, second = (samples_of(task, epoch) for epoch in (0, 1))
    quota = task.num_samples // 4
    assert first.shape == second.shape == (task.num_samples // 32, 4, 8)
    for rank in range(4):
        own = set(first[:, rank].ravel().tolist())
        both = own | set(second[:, rank].ravel().tolist())
        assert len(own) == first[:, rank].size
        assert len(both) <= quota
    assert not np.array_equal(first, second)


def samples_of(task: Task, epoch: int) -> np.ndarray:
    return task.samples(seed=3, epoch=epoch, world_size=4)


def test_the_learning_rate_rises_and_falls() -> None:
    options = {"lr": "0.4", "lr_warmup": "0.2"}
    linear = build_task("digits", options | {"lr_schedule": "linear"})
    cosine = build_task("digits", options | {"lr_schedule": "cosine"})
    constant = build_task("digits", options)
    assert [linear.lr_at(at) for at in (0.1, 0.2, 0.6)] == pytest.approx([0.2, 0.4, 0.2])
    assert [cosine.lr_at(at) for at in (0.1, 0.2, 0.6, 1.0)] == pytest.approx([0.2, 0.4, 0.2, 0.0])
    assert [constant.lr_at(at) for at in (0.1, 0.2, 0.9)] == pytest.approx([0.2, 0.4, 0.4])
    assert build_task("digits", {"lr": "0.4"}).lr_at(0.0) == 0.4


def test_weight_decay_leaves_vectors_alone() -> None:
    task = build_task("digits", {"weight_decay": "0.5", "lr": "0.1", "momentum": "0"})
    model = task.build_model(0)
    before = {name: value.clone() for name, value in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    task.optimizer(model).step()
    for name, after in model.named_parameters():
        expected = before[name] * (1 - 0.1 * 0.5) if after.dim() > 1 else before[name]
        torch.testing.assert_close(after, expected)


def test_words_are_numbered_by_frequency(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"b a a, " * 500 + b"rare word here " + b"b a a, " * 500)
    task = build_task(
        "text", {"path": str(text), "tokens": "words", "vocabulary": "5", "window": "8"}
    )
    train, test = task.windows
    # A blank, "a" and the mark "," are as frequent as it gets; what is rare is 0.
    assert train.max() == test.max() == 4
    assert (train == 0).sum() == 3


def test_the_metric_of_sequences_counts_no_padding(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"\n\n".join(bytes([97 + n % 26]) * (20 + 7 * n) for n in range(60)))
    task = build_task("sequences", {"path": str(text)})

    class Clueless(torch.nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return torch.zeros(*inputs.shape, 256)

    assert task.evaluate(Clueless()) == pytest.approx(8.0)
    assert task.loss(Clueless(), task.batch(np.arange(9))).item() == pytest.approx(np.log(256))


def test_batches_of_sequences_hold_similar_lengths(tmp_path: Path) -> None:
    text = tmp_path / "text"
    random = np.random.default_rng(0)
    text.write_bytes(b"\n\n".join(b"a" * int(n) for n in random.integers(20, 400, 700)))

    def spread(bucketed: str) -> float:
        """Mean difference of lengths within a batch, in bytes."""
        task = build_task("sequences", {"path": str(text), "bucketed": bucketed, "batch_size": "8"})
        dealt = task.samples(seed=0, epoch=0, world_size=2)
        assert len(np.unique(dealt)) == dealt.size
        return float(np.ptp(task.lengths[dealt], axis=2).mean())

    assert spread("true") < 60 < 250 < spread("false")


def test_the_scores_of_a_gpt_do_not_depend_on_what_comes_later() -> None:
    model = Gpt(11, 16, 2, 2, window=8)
    tokens = torch.randint(0, 11, (3, 8))
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])
    assert model.scores.weight is model.embedding.weight
