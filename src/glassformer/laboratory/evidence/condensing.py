"""Condensation: from a small initialisation neurons align, and queries and keys lose their rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer import dynamics
from glassformer.laboratory.evidence.bench import Bench
from glassformer.laboratory.evidence.claim import Claim
from glassformer.laboratory.evidence.figure import Outcome, Picture, curve, sampled
from glassformer.parts.ffn import Mlp
from glassformer.parts.mixer import Attention

WIDTH, TOKENS, BATCH = 128, 10, 256
ANCHORS, WORDS, VOCABULARY = (1, 5), (5, 101), 102
STEPS, EVERY = 400, 20
TABLES = 0.3
"""Standard deviation of the frozen embedding tables."""
SMALL, CONTROL = "std d^-0.85", "std d^-0.5"
GAMMAS = {SMALL: 0.85, CONTROL: 0.5}
Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Anchored(nn.Module):
    """Small model of one attention head and a tanh FFN without norms, between frozen embeddings; outputs the logits of
    the last token. `skip` adds residual connections."""

    def __init__(self, gamma: float, generator: torch.Generator, skip: bool = True):
        super().__init__()
        self.skip = skip
        self.attention, self.ffn = Attention(WIDTH, 1), Mlp(WIDTH, 4 * WIDTH, bias=False)
        self.ffn.phi = torch.tanh
        for weight in self.parameters():
            nn.init.normal_(weight, 0.0, WIDTH**-gamma, generator=generator)
        self.embedding, self.position, self.head = (
            TABLES * torch.randn(rows, WIDTH, generator=generator) for rows in (VOCABULARY, TOKENS, VOCABULARY)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits (b, v) of tokens (b, s)."""
        x = self.embedding[tokens] + self.position
        mixed = (x + self.attention(x) if self.skip else self.attention(x))[:, -1]
        fed = mixed + self.ffn(mixed) if self.skip else self.ffn(mixed)
        return fed @ self.head.T

    def matrices(self) -> dict[str, Tensor]:
        """Returns {name: trained matrix of the model}."""
        q, k, v = (self.attention.matrices()[name].applied().flatten(0, 1) for name in "qkv")
        return {"W_Q": q, "W_K": k, "W_V": v, "W_1": self.ffn.up_proj.weight}


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns a random batch (tokens, targets): rows of random words with one anchor a; the target is the word after a,
    plus a mod 2."""
    tokens = torch.randint(*WORDS, (BATCH, TOKENS), generator=generator)
    anchors = torch.randint(*ANCHORS, (BATCH, 1), generator=generator)
    at = torch.randint(TOKENS - 1, (BATCH, 1), generator=generator)
    tokens.scatter_(1, at, anchors)
    return tokens, (tokens.gather(1, at + 1) + anchors % 2).squeeze(1)


def train(model: Anchored, optimizer: torch.optim.Optimizer, steps: int, generator: torch.Generator,
          look: Callable[[Anchored, float], None], warmup: int = 0) -> None:  # fmt: skip
    """Trains a model on random batches; `look(model, loss)` is called before every `EVERY`-th step."""
    rate = optimizer.param_groups[0]["lr"]
    for step in range(steps + 1):
        tokens, targets = batch(generator)
        loss = F.cross_entropy(model(tokens), targets)
        if step % EVERY == 0:
            look(model, loss.item())
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / warmup) if warmup else rate
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def spectra(found: list[list[float]], model: Anchored, loss: float) -> None:
    """Measures a model and appends to `found`: effective ranks of W_Q W_K^T and W_V, the mean |cosine| of rows of W_Q,
    and the loss."""
    of = model.matrices()
    product = dynamics.effective_rank_of(dynamics.product_spectrum(of["W_Q"][None], of["W_K"][None])[0])
    values = [product, dynamics.effective_rank(of["W_V"]), dynamics.row_cosine(of["W_Q"])]
    found.append([*(float(value) for value in values), loss])


def condensation(bench: Bench) -> Outcome:
    seeds, steps = bench.runs(3), bench.scaled(STEPS, EVERY)
    runs = {}
    for name, gamma in GAMMAS.items():
        rows = []
        for seed in seeds:
            generator, found = torch.Generator().manual_seed(seed), list[list[float]]()
            model = Anchored(gamma, generator)
            train(model, torch.optim.Adam(model.parameters(), lr=3e-4), steps, generator, partial(spectra, found))
            rows.append(found)
        runs[name] = torch.tensor(rows)  # (seed, row, measure)
    small, control = runs.values()
    figures = (
        sampled("effective rank of W_Q W_K^T at the end, over that of the control",
                (small[:, -1, 0] / control[:, -1, 0]).tolist(), most=0.2),
        sampled("mean |cosine| of the rows of W_Q", small[:, -1, 2].tolist(), least=0.3),
        sampled("the same, control", control[:, -1, 2].tolist(), most=0.1),
        sampled("effective rank of W_V at the end, over that at the start",
                (small[:, -1, 1] / small[:, 0, 1]).tolist(), least=0.5),
    )  # fmt: skip
    at = [row * EVERY for row in range(small.shape[1])]
    titles = ("effective rank of W_Q W_K^T", "effective rank of W_V", "mean |cosine| of rows of W_Q", "loss, nats")
    pictures = tuple(
        Picture(title=title, x="step", curves=tuple(curve(name, at, of[..., i].tolist()) for name, of in runs.items()))
        for i, title in enumerate(titles)
    )
    return Outcome(figures=figures, pictures=pictures, size=f"{_size(steps)}, with residual connections and Adam",
                   sure=f"{len(seeds)} seeds, intervals of 95 %")  # fmt: skip


OUTER, INNER = ("W_V", "W_1"), ("W_Q", "W_K")
MOVED = 0.5
"""Smallest change of a matrix that counts as moved, relative to its initial norm."""


def stages(bench: Bench, optimizer: Optimizer, words: str, steps: int, warmup: int) -> Outcome:
    """Trains models without residual connections, and measures the order in which their matrices move and lose rank."""
    seeds, steps = bench.runs(3), bench.scaled(steps, EVERY)
    moves, ranks, losses = list[Tensor](), list[Tensor](), list[list[float]]()
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        model = Anchored(GAMMAS[SMALL], generator, skip=False)
        first = {name: weight.detach().clone() for name, weight in model.matrices().items()}
        rows = list[tuple[list[float], list[float], float]]()

        @torch.no_grad()
        def look(
            model: Anchored, loss: float, first: dict[str, Tensor] = first,
            rows: list[tuple[list[float], list[float], float]] = rows,
        ) -> None:  # fmt: skip
            of = model.matrices()
            moved = [float((of[name] - old).norm() / old.norm()) for name, old in first.items()]
            rank = [float(dynamics.effective_rank(of[name]) / dynamics.effective_rank(old)) for name, old in
                    first.items()]  # fmt: skip
            rows.append((moved, rank, loss))

        train(model, optimizer(model.parameters()), steps, generator, look, warmup)
        moves.append(torch.tensor([row[0] for row in rows]))
        ranks.append(torch.tensor([row[1] for row in rows]))
        losses.append([row[2] for row in rows])
    names = list(first)
    later = [_reached(one, names, INNER) - _reached(one, names, OUTER) for one in moves]
    calm = [one[_reached(one, names, OUTER) // EVERY][[names.index(name) for name in INNER]].max().item() for one in
            moves]  # fmt: skip
    last = torch.stack(ranks)[:, -1]
    figures = (
        sampled("steps from the move of W_V and W_1 to that of W_Q and W_K", later, least=EVERY),
        sampled("change of W_Q and W_K at that time, in shares of their norms", calm, most=MOVED / 2),
        *(sampled(f"effective rank of {name} at the end, over that at the start", last[:, i].tolist())
          for i, name in enumerate(names)),
        sampled("loss at the end", [of[-1] for of in losses], "nats"),
    )  # fmt: skip
    at = [row * EVERY for row in range(len(losses[0]))]
    pictures = (
        *(Picture(title=title, x="step", curves=tuple(
            curve(name, at, [one[:, i].tolist() for one in of]) for i, name in enumerate(names)))
          for title, of in (("change, in shares of the initial norm", moves),
                            ("effective rank, in shares of the initial one", ranks))),
        Picture(title="loss, nats", x="step", curves=(curve("loss", at, losses),)),
    )  # fmt: skip
    return Outcome(
        figures=figures, pictures=pictures, size=f"{_size(steps)}, without residual connections, {words}",
        sure=f"{len(seeds)} seeds, intervals of 95 %",
        notes=(f"A matrix has moved once it differs from its start by {MOVED:g} of its norm; a run in which one never "
               "does counts its last step.",),
    )  # fmt: skip


def _reached(moved: Tensor, names: list[str], wanted: tuple[str, ...]) -> int:
    """Returns the index of the first measurement at which all matrices of `wanted` have moved; `moved`: their changes
    (rows, names)."""
    enough = (moved[:, [names.index(name) for name in wanted]] >= MOVED).all(1).tolist()
    return EVERY * (enough.index(True) if True in enough else len(enough) - 1)


def _size(steps: int) -> str:
    return f"one head of width {WIDTH} and a tanh FFN, {steps} steps of {BATCH} rows of the anchor task"


class EvenDescent(torch.optim.SGD):
    """Optimizer for gradient descent with steps of constant length `lr`: small ones follow the path of the gradient
    flow, at a speed independent of the gradient."""

    def step(self, closure: Any = None) -> Any:
        """Moves the weights by one step of length `lr` against the gradient."""
        gradients = [weight.grad for group in self.param_groups for weight in group["params"]]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.div_(norm)
        return super().step(closure)


ADAMW, DESCENT = partial(torch.optim.AdamW, lr=3e-4), partial(EvenDescent, lr=0.2)

CLAIMS = [
    Claim(
        name="condensation", kind="scoped", minutes=4,
        statement="From a small initialization W_Q and W_K collapse to a few directions, their rows on common lines, "
        "and from the usual one they do not.",
        source="2510.06954, figures 1 to 3", published="rank collapse of W_Q and W_K", size="width 128, 400 steps",
        measure=condensation,
    ),
    Claim(
        name="condensation-stages", kind="scoped", minutes=3,
        statement="Trained by AdamW from a small initialization, W_V and the FFN condense first while W_Q and W_K "
        "rest, and W_Q and W_K collapse afterwards.",
        source="2510.06954, section 5", published="condensation, then collapse of W_Q and W_K",
        size="width 128, 400 steps",
        measure=partial(stages, optimizer=ADAMW, words="AdamW with a warm-up of a third", steps=400, warmup=133),
    ),
    Claim(
        name="condensation-by-descent", kind="scoped", minutes=3,
        statement="Under gradient descent from a small initialization W_V and the FFN move first while W_Q and W_K "
        "rest.",
        source="2510.06954, theorems 1 to 3", published="two stages of the gradient flow", size="width 128, 600 steps",
        measure=partial(stages, optimizer=DESCENT, words="gradient descent by steps of 0.2", steps=600, warmup=0),
    ),
]  # fmt: skip
