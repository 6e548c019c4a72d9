"""What may take Adam's place where only the largest entries of gradients travel, or where ranks
step alone: each rule with each learning rate, against Adam on the mean gradient.

Four simulated ranks train a small transformer on characters. All runs of a case are one batch on
one device, since each alone is tiny: so the rules are written here once more, in a few lines each,
and the library's own are compared with them in `tests/gradients/test_optimizer_scaling.py` and
`tests/averaging/test_state_intervals.py`. A GPU takes 0.25 s a run, two cores two minutes.

    python benchmarks/studies/adam_rules.py --text FILE [--cases NAMES] [--rules NAMES] [--seeds N]
        [--results DIR]
"""

from __future__ import annotations

import argparse
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

import _benchmarks  # noqa: F401
from _measure import origin
from _results import Figure, ResultFile
from offbeat_lab.tasks.corpus import cut, held_out_blocks, read_text

RANKS, DENSITY = 4, 0.01
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH, HEADS, LAYERS, VOCABULARY = 64, 4, 2, 256


class Model:
    """The transformer of `charlm`, or the tied one of `text`, for many sets of parameters at once.

    Args:
        tied: whether it is that of `text`.
        window: tokens that it sees.
    """

    def __init__(self, *, tied: bool, window: int) -> None:
        self.tied = tied
        inner = 4 * WIDTH
        shapes: dict[str, tuple[int, ...]] = {
            "emb": (VOCABULARY, WIDTH),
            "pos": (window, WIDTH),
        }
        for layer in range(LAYERS):
            blocks: dict[str, tuple[int, ...]] = {
                "in_w": (3 * WIDTH, WIDTH),
                "in_b": (3 * WIDTH,),
                "out_w": (WIDTH, WIDTH),
                "out_b": (WIDTH,),
                "f1_w": (inner, WIDTH),
                "f1_b": (inner,),
                "f2_w": (WIDTH, inner),
                "f2_b": (WIDTH,),
                **dict.fromkeys(("n1_w", "n1_b", "n2_w", "n2_b"), (WIDTH,)),
            }
            shapes |= {f"{layer}.{name}": shape for name, shape in blocks.items()}
        shapes |= {"n_w": (WIDTH,), "n_b": (WIDTH,)}
        if not tied:
            shapes |= {"sc_w": (VOCABULARY, WIDTH), "sc_b": (VOCABULARY,)}
        self.shapes = shapes
        self.sizes = [math.prod(shape) for shape in shapes.values()]

    def first(self, seed: int) -> Tensor:
        """Parameters, flat, drawn as torch's layers draw theirs."""
        draw = torch.Generator().manual_seed(seed)
        parts = [self._drawn(name, shape, draw) for name, shape in self.shapes.items()]
        return torch.cat([part.flatten() for part in parts])

    def _drawn(self, name: str, shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
        kind = name.rpartition(".")[2]
        fan_in = 4 * WIDTH if kind in ("f2_w", "f2_b") else WIDTH
        if kind in ("n1_w", "n2_w", "n_w"):
            return torch.ones(shape)
        if self.tied and len(shape) > 1:
            into_stream = kind in ("out_w", "f2_w")
            scale: float = 0.02 * ((2 * LAYERS) ** -0.5 if into_stream else 1.0)
            return torch.randn(shape, generator=draw) * scale
        if kind in ("emb", "pos"):
            return torch.randn(shape, generator=draw) * (1.0 if kind == "emb" else 0.02)
        is_zero = ("n1_b", "n2_b", "n_b") if self.tied else ("in_b", "out_b", "n1_b", "n2_b", "n_b")
        if kind in is_zero:
            return torch.zeros(shape)
        bound: float = (6 / (4 * WIDTH)) ** 0.5 if kind == "in_w" else fan_in**-0.5
        return (torch.rand(shape, generator=draw) * 2 - 1) * bound

    def loss(self, flat: Tensor, tokens: Tensor) -> Tensor:
        """Of each row of `flat` with its windows, shape (rows, windows, length + 1)."""
        parts = flat.split(self.sizes, 1)
        rows, count, time = *tokens.shape[:2], tokens.shape[2] - 1
        p: dict[str, Tensor] = {
            name: part.view(rows, *shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

        def norm(x: Tensor, name: str) -> Tensor:
            scaled = functional.layer_norm(x, (WIDTH,)) * p[f"{name}_w"][:, None]
            return scaled + p[f"{name}_b"][:, None]

        def linear(x: Tensor, name: str) -> Tensor:
            weight, bias = p[f"{name}_w"], p[f"{name}_b"]
            return torch.baddbmm(bias[:, None], x, weight.transpose(1, 2))

        inputs, targets = tokens[..., :-1], tokens[..., 1:]
        first = (torch.arange(rows, device=flat.device) * VOCABULARY)[:, None]
        x = functional.embedding(inputs.reshape(rows, -1) + first, p["emb"].reshape(-1, WIDTH))
        x = x.view(rows, count, time, WIDTH) + p["pos"][:, None]
        x = x.view(rows, count * time, WIDTH)
        for layer in range(LAYERS):
            projected = linear(norm(x, f"{layer}.n1"), f"{layer}.in")
            heads = projected.view(rows * count, time, 3, HEADS, WIDTH // HEADS)
            query, key, value = heads.permute(2, 0, 3, 1, 4).unbind()
            seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            seen = seen.transpose(1, 2).reshape(rows, count * time, WIDTH)
            x = x + linear(seen, f"{layer}.out")
            hidden = linear(norm(x, f"{layer}.n2"), f"{layer}.f1")
            hidden = functional.gelu(hidden) if self.tied else functional.relu(hidden)
            x = x + linear(hidden, f"{layer}.f2")
        x = norm(x, "n")
        scores = x @ p["emb"].transpose(1, 2) if self.tied else linear(x, "sc")
        losses = functional.cross_entropy(
            scores.reshape(-1, VOCABULARY), targets.reshape(-1), reduction="none"
        )
        return losses.view(rows, -1).mean(1)


# The rules. Shapes are (runs, elements), or with ranks (runs, ranks, elements).


def with_noise(mean: Tensor, square: Tensor, factor: float) -> Tensor:
    """As of `offbeat.gradients.optimizer_scaling`."""
    noise = (1 - BETA1) / (1 + BETA1)
    signal = ((mean * mean - noise * square) / (1 - noise)).clamp_min(0)
    return signal + (square - signal) * factor


def take_largest(owed: Tensor, k: int) -> Tensor:
    """Cut the k largest elements of each rank out of what it owes."""
    flat = owed.abs().flatten(0, 1)
    places = flat.topk(k, dim=1, sorted=False).indices.view(*owed.shape[:2], k)
    sent = torch.zeros_like(owed).scatter_(2, places, owed.gather(2, places))
    owed.scatter_(2, places, 0.0)
    return sent


class Rule:
    """What all runs of one rule do with the ranks' gradients."""

    is_alone = False
    """Whether ranks step alone."""

    def begin(self, num_runs: int, num_elements: int) -> None:
        self.size = num_elements
        ranks, one = (num_runs, RANKS, num_elements), (num_runs, num_elements)
        self.m, self.v, self.owed, self.slow = (torch.zeros(ranks, device=DEVICE) for _ in "1234")
        self.mean_m, self.mean_v, self.after = (torch.zeros(one, device=DEVICE) for _ in "123")

    def remember(self, gradient: Tensor) -> Tensor:
        mean = gradient.mean(1)
        for m, v, g in ((self.m, self.v, gradient), (self.mean_m, self.mean_v, mean)):
            m.lerp_(g, 1 - BETA1)
            v.mul_(BETA2).addcmul_(g, g, value=1 - BETA2)
        return mean

    @abstractmethod
    def step(self, gradient: Tensor, t: int, lr: Tensor, parameters: Tensor) -> Tensor | None:
        """What is subtracted from the parameters in step t >= 1, None where they have been moved;
        `lr` has shape (runs, 1).
        """


class AllReduce(Rule):
    """Adam on the mean."""

    @override
    def step(self, gradient: Tensor, t: int, lr: Tensor, parameters: Tensor) -> Tensor | None:
        self.remember(gradient)
        root = (self.mean_v / (1 - BETA2**t)).sqrt() + EPS
        return lr * self.mean_m / (1 - BETA1**t) / root


@dataclass
class Scaled(Rule):
    """Each rank scales its gradient, and owes what it does not send in units of the step.

    Attributes:
        start: steps of Adam itself, with all of the mean.
        density: of what is sent.
        square: which v divides: the "rank"'s estimate of the mean's, the one that "means" of all
            ranks' m and v give, the mean's own ("true"), or where what was "sent" tells the signal.
        momentum: "before" what is owed, or "after" the exchange.
        limit: of a scaled element.
        keeps_largest: whether only as many entries of the sum are applied as a rank sends.
    """

    start: int = 0
    density: float = DENSITY
    square: str = "rank"
    momentum: str = ""
    limit: float = math.inf
    keeps_largest: bool = False
    last_lr: Tensor | None = None
    slow_weight: float = 0.0

    @override
    def step(self, gradient: Tensor, t: int, lr: Tensor, parameters: Tensor) -> Tensor | None:
        if self.last_lr is not None:
            self.owed.mul_((self.last_lr / lr)[:, None])
        self.last_lr = lr.clone()
        mean = self.remember(gradient)
        grown = 1 - BETA1**t, 1 - BETA2**t
        if t <= self.start:
            self.slow.lerp_(mean[:, None].expand_as(self.slow), 0.02)
            self.slow_weight = 1 - 0.98**t
            return lr * (self.mean_m / grown[0]) / ((self.mean_v / grown[1]).sqrt() + EPS)
        divisor = self._square(grown).sqrt() + EPS
        unscaled = self.m / grown[0] if self.momentum == "before" else gradient
        self.owed += (unscaled / divisor).clamp(-self.limit, self.limit)
        k = max(1, round(self.density * self.size))
        sent = take_largest(self.owed, k)
        if self.keeps_largest:
            total = sent.sum(1, keepdim=True)
            kept = take_largest(total, k) != 0
            self.owed += torch.where(kept, 0.0, sent)
            sent = torch.where(kept, sent, 0.0)
        arrived = sent.mean(1)
        self.slow.lerp_(arrived[:, None] * divisor, 0.02)
        self.slow_weight = 0.98 * self.slow_weight + 0.02
        if self.momentum == "after":
            self.after.lerp_(arrived, 1 - BETA1)
            return lr * self.after / grown[0]
        return lr * arrived

    def _square(self, grown: tuple[float, float]) -> Tensor:
        m, v = self.m / grown[0], self.v / grown[1]
        if self.square == "true":
            return (self.mean_v / grown[1])[:, None]
        if self.square == "means":
            return with_noise(m.mean(1, keepdim=True), v.mean(1, keepdim=True), 1 / RANKS)
        if self.square == "sent":
            slow = self.slow / self.slow_weight if self.slow_weight else self.slow
            signal = torch.minimum(slow * slow, v)
            return signal + (v - signal) / RANKS
        return with_noise(m, v, 1 / RANKS)


@dataclass
class Behind(Rule):
    """Adam on what was sent, of which the rest is owed in units of the gradient."""

    density: float = DENSITY

    @override
    def step(self, gradient: Tensor, t: int, lr: Tensor, parameters: Tensor) -> Tensor | None:
        self.owed += gradient
        arrived = take_largest(self.owed, round(self.density * self.size)).mean(1)
        self.mean_m.lerp_(arrived, 1 - BETA1)
        self.mean_v.mul_(BETA2).addcmul_(arrived, arrived, value=1 - BETA2)
        root = (self.mean_v / (1 - BETA2**t)).sqrt() + EPS
        return lr * self.mean_m / (1 - BETA1**t) / root


@dataclass
class Alone(Rule):
    """Each rank takes Adam's steps alone; weights are averaged as LocalSGD or WAGMA do.

    Attributes:
        groups: whether pairs average after each step and all after ten, as WAGMA; else all after a
            period that grows to ten, and Adam's state with the weights.
        square: "own"; the "rank"'s estimate of the mean's in each step; "merged": that estimate of
            what squares have gained, at each average.
        times: multiplies the learning rate.
    """

    is_alone = True
    groups: bool = False
    square: str = "own"
    times: float = 1.0
    last: int = 0

    @override
    def step(self, gradient: Tensor, t: int, lr: Tensor, parameters: Tensor) -> Tensor | None:
        self.m.lerp_(gradient, 1 - BETA1)
        self.v.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        mean, square = self.m / (1 - BETA1**t), self.v / (1 - BETA2**t)
        if self.square == "rank":
            square = with_noise(mean, square, 1 / RANKS)
        parameters -= self.times * lr[:, None] * mean / (square.sqrt() + EPS)
        if self.groups:
            if t % 10 == 0:
                _average_(parameters)
            else:
                others = [1, 0, 3, 2] if t % 2 else [2, 3, 0, 1]
                parameters.copy_((parameters + parameters[:, others]) / 2)
        elif t - self.last >= min(10, max(1, t // 40)):
            for each in (parameters, self.m, self.v):
                _average_(each)
            if self.square == "merged":
                kept = BETA2 ** (t - self.last)
                gained = (self.v - kept * self.slow) / (1 - kept)
                gained = with_noise(self.m / (1 - BETA1**t), gained, 1 / RANKS).clamp_min(0)
                self.v = kept * self.slow + (1 - kept) * gained
                self.slow.copy_(self.v)
            self.last = t
        return None


def _average_(tensor: Tensor) -> None:
    tensor.copy_(tensor.mean(1, keepdim=True).expand_as(tensor))


BASELINE = "AllReduce"
RULES: dict[str, Callable[[], Rule]] = {
    BASELINE: AllReduce,
    "at once": Scaled,
    "after 10 steps of Adam": lambda: Scaled(start=10),
    "after 20 steps of Adam": lambda: Scaled(start=20),
    "after 30 steps of Adam": lambda: Scaled(start=30),
    "20, squares by means of all": lambda: Scaled(start=20, square="means"),
    "20, squares by what was sent": lambda: Scaled(start=20, square="sent"),
    "20, the same, limited to 5": lambda: Scaled(start=20, square="sent", limit=5.0),
    "20, k entries of the sum": lambda: Scaled(start=20, keeps_largest=True),
    "at once, true squares": lambda: Scaled(square="true"),
    "at once, squares by means of all": lambda: Scaled(square="means"),
    "at once, momentum before": lambda: Scaled(momentum="before"),
    "at once, momentum after": lambda: Scaled(momentum="after"),
    "at once, k entries of the sum": lambda: Scaled(keeps_largest=True),
    "at once, density 0.05": lambda: Scaled(density=0.05),
    "at once, density 0.001": lambda: Scaled(density=0.001),
    "20, density 0.001": lambda: Scaled(start=20, density=0.001),
    "Adam on what was sent": Behind,
    "Adam on what was sent, density 0.2": lambda: Behind(0.2),
    "LocalSGD, plain mean of squares": Alone,
    "LocalSGD": lambda: Alone(square="merged"),
    "LocalSGD, squares corrected in each step": lambda: Alone(square="rank"),
    "WAGMA": lambda: Alone(groups=True),
    "WAGMA, rate times 1.4": lambda: Alone(groups=True, times=2**0.5),
    "WAGMA, rate times 2": lambda: Alone(groups=True, times=2.0),
    "WAGMA, squares corrected in each step": lambda: Alone(groups=True, square="rank"),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One task. The middle one of `rates` is the task's own, and AllReduce's best is among them."""

    text: str
    tied: bool = False
    steps: int = 400
    batch: int = 32
    window: int = 64
    warmup: float = 0.0
    cosine: bool = False
    clip: float = math.inf
    rates: Sequence[float] = (0.003, 0.006, 0.012)

    def factor(self, t: int) -> float:
        progress = (t - 0.5) / self.steps
        if progress < self.warmup:
            return progress / self.warmup
        rest = (progress - self.warmup) / (1 - self.warmup)
        return (1 + math.cos(math.pi * rest)) / 2 if self.cosine else 1.0


_GPT = Case(
    text="given", tied=True, steps=800, batch=8, window=32, clip=1.0, rates=(0.0015, 0.003, 0.006)
)
CASES: dict[str, Case] = {
    "charlm, Shakespeare": Case(text="given"),
    "charlm, Python": Case(text="python"),
    "charlm, Shakespeare, warm-up, cosine": Case(text="given", warmup=0.1, cosine=True),
    "text, Shakespeare, warm-up, cosine": replace(_GPT, warmup=0.0625, cosine=True),
    "text, Shakespeare": _GPT,
}
_CHUNK = 64 if DEVICE == "cuda" else 1


def windows_of(path: Path | None, length: int) -> tuple[Tensor, Tensor]:
    text = np.frombuffer(read_text(path, 2_000_000), dtype=np.uint8)
    held_out = held_out_blocks(len(text))
    train, test = (cut(text[where], length) for where in (~held_out, held_out))
    test = test[np.linspace(0, len(test) - 1, min(len(test), 512)).astype(np.int64)]
    found = [torch.from_numpy(part.astype(np.int64)).to(DEVICE) for part in (train, test)]
    return found[0], found[1]


def batches_of(case: Case, windows: Tensor, seed: int) -> Iterator[Tensor]:
    """Of all ranks, shape (ranks, batch, length), as the lab's tasks deal them."""
    size, epoch = RANKS * case.batch, 0
    while True:
        order = np.random.default_rng((seed, epoch)).permutation(len(windows))
        for step in range(len(windows) // size):
            chosen = torch.from_numpy(order[step * size : (step + 1) * size]).to(DEVICE)
            yield windows[chosen].view(RANKS, case.batch, -1)
        epoch += 1


def measured(case: Case, rule: Rule, seeds: Sequence[int], path: Path | None) -> list[list[float]]:
    """Bits of each seed, by rate: the mean of three measurements at the end."""
    model = Model(tied=case.tied, window=case.window)
    train, test = windows_of(path, case.window + 1)
    runs = [(rate, seed) for rate in case.rates for seed in seeds]
    dealt = {seed: batches_of(case, train, seed) for seed in seeds}
    first = torch.stack([model.first(seed) for _, seed in runs]).to(DEVICE)
    parameters = first[:, None].repeat(1, RANKS, 1)
    rates = torch.tensor([rate for rate, _ in runs], device=DEVICE)[:, None]
    rule.begin(len(runs), first.shape[1])
    measured_at = {case.steps - case.steps // 20 * back for back in range(3)}
    bits = torch.zeros(len(runs), device=DEVICE)
    for t in range(1, case.steps + 1):
        now = {seed: next(batches) for seed, batches in dealt.items()}
        gradient = torch.empty_like(parameters)
        for begin in range(0, len(runs), _CHUNK):
            part = slice(begin, begin + _CHUNK)
            flat = parameters[part].flatten(0, 1).detach().requires_grad_()
            tokens = torch.cat([now[seed] for _, seed in runs[part]])
            (found,) = torch.autograd.grad(model.loss(flat, tokens).sum(), flat)
            gradient[part] = found.view_as(gradient[part])
        lr = rates * case.factor(t)
        step = rule.step(_clipped(gradient, rule, case.clip), t, lr, parameters)
        if step is not None:
            parameters -= step[:, None]
        if t in measured_at:
            with torch.no_grad():
                for number, mean in enumerate(parameters.mean(1)):
                    bits[number] += model.loss(mean[None], test[None])[0] / math.log(2) / 3
    return bits.view(len(case.rates), len(seeds)).tolist()


def _clipped(gradient: Tensor, rule: Rule, limit: float) -> Tensor:
    """As the strategies clip: the mean, or what is the rank's own."""
    if limit == math.inf:
        return gradient
    if isinstance(rule, AllReduce):
        norm: Tensor = gradient.mean(1).norm(dim=1)[:, None, None]
    else:
        norm = gradient.norm(dim=2, keepdim=True)
        if not rule.is_alone:
            norm = norm / RANKS**0.5
    return gradient * (limit / (norm + 1e-6)).clamp(max=1)


def rows_of(case: str, rule: str, bits: Sequence[Sequence[float]]) -> list[Figure]:
    """One for each rate."""
    return [
        Figure(case=rule, table=case, column=f"lr {rate:g}", value=tuple(by_seed), decimals=4)
        for rate, by_seed in zip(CASES[case].rates, bits, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="a text")
    parser.add_argument("--cases", default="", help="separated by semicolons; default: all")
    parser.add_argument("--rules", default="", help="separated by semicolons; default: all")
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--results", type=Path, metavar="DIR", help="where to keep figures")
    asked: Any = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    kept = None if asked.results is None else ResultFile(asked.results / "adam_rules.jsonl")
    for name in asked.cases.split("; ") if asked.cases else CASES:
        for label in asked.rules.split("; ") if asked.rules else RULES:
            path = asked.text if CASES[name].text == "given" else None
            found = measured(CASES[name], RULES[label](), range(asked.seeds), path)
            print(name, label, found, flush=True)
            if kept is not None:
                kept.replace(f"{name}, {label}", rows_of(name, label, found), origin(asked.seeds))


if __name__ == "__main__":
    main()
