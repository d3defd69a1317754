"""Condensation: from a small initialisation neurons line up first, and queries and keys lose their rank."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.dynamics.common import COLOURS, Outcome, canvas
from glassformer import dynamics
from glassformer.parts.ffn import Mlp
from glassformer.parts.mixer import Attention

WIDTH, TOKENS, BATCH = 128, 10, 256
ANCHORS, WORDS, VOCABULARY = (1, 5), (5, 101), 102
STEPS, EVERY = 400, 20
TABLES = 0.3
"""Standard deviation of the frozen tables."""
SMALL, CONTROL = "std d^-0.85", "std d^-0.5"
GAMMAS = {SMALL: 0.85, CONTROL: 0.5}


class Anchored(nn.Module):
    """One head and a tanh ffn, both with skips and without norms, between frozen tables; logits of the last token."""

    def __init__(self, gamma: float, generator: torch.Generator):
        super().__init__()
        self.attention, self.ffn = Attention(WIDTH, 1), Mlp(WIDTH, 4 * WIDTH, bias=False)
        self.ffn.phi = torch.tanh
        for weight in self.parameters():
            nn.init.normal_(weight, 0.0, WIDTH**-gamma, generator=generator)
        self.embedding, self.position, self.head = (
            TABLES * torch.randn(rows, WIDTH, generator=generator) for rows in (VOCABULARY, TOKENS, VOCABULARY)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding[tokens] + self.position
        x = (x + self.attention(x))[:, -1]
        return (x + self.ffn(x)) @ self.head.T


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Words with an anchor a among them; the target is the word after it, plus a mod 2."""
    tokens = torch.randint(*WORDS, (BATCH, TOKENS), generator=generator)
    anchors = torch.randint(*ANCHORS, (BATCH, 1), generator=generator)
    at = torch.randint(TOKENS - 1, (BATCH, 1), generator=generator)
    tokens.scatter_(1, at, anchors)
    return tokens, (tokens.gather(1, at + 1) + anchors % 2).squeeze(1)


MEASURED = ("erank W_Q W_K^T", "erank W_V", "erank W_1", "|cos| W_Q", "loss")


@torch.no_grad()
def measure(model: Anchored, loss: Tensor) -> Tensor:
    q, k, v = (model.attention.matrices()[name].applied().flatten(0, 1) for name in "qkv")
    spectrum = dynamics.product_spectrum(q[None], k[None])[0]
    ranks = [dynamics.effective_rank(w) for w in (v, model.ffn.up_proj.weight)]
    return torch.stack([dynamics.effective_rank_of(spectrum), *ranks, dynamics.row_cosine(q), loss])


def train(gamma: float, steps: int, seed: int) -> tuple[Tensor, Tensor]:
    """What was measured every so many steps (rows, measures), and W_Q at the end."""
    generator = torch.Generator().manual_seed(seed)
    model = Anchored(gamma, generator)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    found = []
    for step in range(steps + 1):
        tokens, targets = batch(generator)
        loss = F.cross_entropy(model(tokens), targets)
        if step % EVERY == 0:
            found.append(measure(model, loss))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.stack(found), model.attention.matrices()["q"].applied().flatten(0, 1).detach()


def run(quick: bool = False) -> Outcome:
    outcome = Outcome(
        "condensation",
        "From a small initialisation W_Q and W_K collapse to a few directions, their rows on common lines, before the "
        "loss falls far; from the usual one they do not.",
        "Chen & Luo 2025, arXiv 2510.06954, figures 1 to 3 (synthetic anchor task)",
    )
    seeds, steps = (range(1), 60) if quick else (range(3), STEPS)
    runs = {name: [train(gamma, steps, seed) for seed in seeds] for name, gamma in GAMMAS.items()}
    found = {
        name: torch.stack([measured for measured, _ in some]) for name, some in runs.items()
    }  # (seed, row, measure)
    for name, values in found.items():
        for row in range(0, values.shape[1], 3 if quick else 5):
            numbers = dict(zip(MEASURED, values[:, row].mean(0).tolist(), strict=True))
            outcome.rows.append({"init": name, "step": row * EVERY, **numbers})

    ranks = {name: values[:, -1, 0] for name, values in found.items()}
    ratio = (ranks[SMALL] / ranks[CONTROL]).max().item()
    limit = 0.8 if quick else 0.2
    outcome.check(
        ratio < limit,
        f"effective rank of W_Q W_K^T ends at {ranks[SMALL].mean():.0f} against {ranks[CONTROL].mean():.0f}: in every "
        f"seed less than {limit:g} of the control ({ratio:.2f} at most)",
    )
    lined, loose = found[SMALL][:, -1, 3].min().item(), found[CONTROL][:, -1, 3].max().item()
    outcome.check(
        lined > (0.1 if quick else 0.3) and loose < 0.1,
        f"mean |cos| of the rows of W_Q: {lined:.2f} or more against {loose:.2f} or less",
    )
    kept = (found[SMALL][:, -1, 1] / found[SMALL][:, 0, 1]).min().item()
    outcome.check(kept > 0.5, f"W_V keeps {kept:.0%} of its effective rank: the collapse is of queries and keys")
    outcome.note(
        "the paper's order of stages (W_V and the ffn condense first, W_Q and W_K collapse later) is not seen here: a "
        "skip around each branch and Adam let queries and keys move from the start"
    )
    if not quick:
        draw(outcome, found, {name: some[0][1] for name, some in runs.items()})
    return outcome


def draw(outcome: Outcome, found: dict[str, Tensor], w_q: dict[str, Tensor]) -> None:
    figure, axes = canvas(2, 2, height=7.2)
    steps = torch.arange(STEPS // EVERY + 1) * EVERY
    for (name, values), colour in zip(found.items(), COLOURS, strict=False):
        for measure_at, axis, style, label in (
            (0, axes[0][0], "-", "W_Q W_K^T"),
            (1, axes[0][0], "--", "W_V"),
            (3, axes[0][1], "-", "W_Q"),
        ):
            axis.plot(steps, values[..., measure_at].mean(0), style, color=colour, label=f"{label}, {name}")
            low, high = values[..., measure_at].amin(0), values[..., measure_at].amax(0)
            axis.fill_between(steps, low, high, color=colour, alpha=0.15)
    axes[0][0].set(title="effective rank", xlabel="step", ylim=(0, None))
    axes[0][1].set(title="mean |cos| between rows", xlabel="step", ylim=(0, 1))
    axes[0][0].legend(loc="center right")
    axes[0][1].legend()
    for (name, w), axis in zip(w_q.items(), axes[1], strict=True):
        picture = axis.imshow(dynamics.cosine_map(w).cosines, vmin=-1, vmax=1, cmap="RdBu_r", interpolation="nearest")
        axis.set(title=f"cosines of rows of W_Q, re-ordered: {name}", xticks=[], yticks=[])
        axis.grid(False)
    figure.colorbar(picture, ax=axes[1], shrink=0.8)
    outcome.draw(figure)
