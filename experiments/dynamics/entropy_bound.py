"""Entropy collapse: the norm of W_Q W_K^T bounds attention entropy from below, and entropy falls as it grows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import glassformer as gf
from experiments.dynamics.common import Outcome, canvas
from glassformer import dynamics
from glassformer.config import BlockConfig, ModelConfig, Stage
from glassformer.model import Model
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import MlpConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.position import LearnedConfig

LAYERS, WIDTH, HEADS, TOKENS, VOCABULARY, BATCH = 2, 64, 2, 64, 64, 16
STEPS, WARMUP, EVERY = 300, 30, 10
RATES = {"learning rate 0.01": 1e-2, "learning rate 0.1": 1e-1}
ROUNDING = 1e-9


def config() -> ModelConfig:
    """Scores are x W_Q W_K^T x^T / sqrt(h), and nothing else: positions are learned, at the embedding."""
    block = BlockConfig(mixer=AttentionConfig(n_heads=HEADS), ffn=MlpConfig(), norm=LayerNormConfig())
    return ModelConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        context=TOKENS,
        embedding=EmbeddingConfig(position=LearnedConfig()),
        stack=(Stage(repeat=LAYERS, blocks=(block,)),),
        final_norm=LayerNormConfig(),
    )


def batches(seed: int, steps: int) -> Tensor:
    """(steps, b, s + 1): words of a random bigram language, whose second half repeats the first."""
    generator = torch.Generator().manual_seed(seed)
    follows = (1.7 * torch.randn(VOCABULARY, VOCABULARY, generator=generator)).softmax(-1)
    words = torch.randint(VOCABULARY, (steps * BATCH, 1), generator=generator)
    for _ in range(TOKENS // 2 - 1):
        words = torch.cat([words, torch.multinomial(follows[words[:, -1]], 1, generator=generator)], 1)
    return torch.cat([words, words, words[:, :1]], 1).unflatten(0, (steps, BATCH))


class Log:
    """What is measured of one run, a list over the logged steps."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.losses: list[float] = []
        self.sigmas: list[Tensor] = []  # (l, n)
        self.entropies: list[Tensor] = []  # (l, n), normalised
        self.logits: list[Tensor] = []  # (l, n), the largest
        self.points: list[Tensor] = []  # (2, rows): norm of the logits and entropy of queries that see all tokens
        self.rows = self.violations = 0

    @torch.no_grad()
    def add(self, step: int, loss: float, model: Model, tokens: Tensor) -> None:
        self.steps.append(step)
        self.losses.append(loss)
        seen = gf.capture(model, tokens, ["layers.*.resid_pre", "layers.*.mixer.scores", "layers.*.mixer.pattern"])
        sigmas, entropies, logits = [], [], []
        layers: Any = model.layers
        for i, layer in enumerate(layers):
            scores, pattern = (seen[f"layers.{i}.mixer.{site}"] for site in ("scores", "pattern"))
            q, k, _ = layer.mixer.qkv.weight.unflatten(0, (3, HEADS, -1))
            sigma = dynamics.product_spectrum(q, k)[:, 0]
            self.compare(scores.double(), layer.residual.mixer_norm(seen[f"layers.{i}.resid_pre"]).double(), sigma)
            sigmas.append(sigma)
            entropies.append(dynamics.attention_entropy(pattern, normalised=True))
            logits.append(dynamics.max_attention_logit(scores))
        self.sigmas.append(torch.stack(sigmas))
        self.entropies.append(torch.stack(entropies))
        self.logits.append(torch.stack(logits))

    def compare(self, scores: Tensor, x: Tensor, sigma: Tensor) -> None:
        """Every row's entropy against the bound at its norm, and at what is above it, |x_i| sigma |X|_2 / sqrt(h)."""
        entropy = torch.special.entr(scores.softmax(-1)).sum(-1)  # (b, n, s)
        keys = dynamics.causal_counts(scores)
        hidden = scores.isinf()
        centred = scores - scores.masked_fill(hidden, 0).sum(-1, keepdim=True) / keys[:, None]
        norms = centred.masked_fill(hidden, 0).norm(dim=-1)
        reach = x.norm(dim=-1) * dynamics.spectral_norm(x)[:, None] / math.sqrt(WIDTH / HEADS)  # (b, s)
        for s in (norms, reach[:, None] * sigma[:, None]):
            self.violations += int((entropy < dynamics.entropy_bound(s, keys) - ROUNDING).sum())
            self.rows += entropy.numel()
        self.points.append(torch.stack([norms[:2, :, -1].flatten(), entropy[:2, :, -1].flatten()]))


def train(rate: float, steps: int, seed: int = 0) -> Log:
    """AdamW with warm-up and clipping, no cure for large logits; measured every ten steps."""
    model, log = config().build(seed=seed), Log()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    for step, batch in enumerate(batches(seed, steps)):
        optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / WARMUP)
        loss = model.loss(batch[:, :-1], batch[:, 1:])
        if step % EVERY == 0 or step == steps - 1:
            log.add(step, loss.item(), model, batch[:4, :-1])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return log


def closed_forms(outcome: Outcome) -> None:
    keys, generator = 16, torch.Generator().manual_seed(0)
    for s in (1.0, 4.0, 8.0):
        tight = torch.full((keys,), -1 / (keys - 1), dtype=torch.float64)
        tight[0] = 1.0
        rows = torch.randn(2000, keys, generator=generator, dtype=torch.float64)
        least, attained = (
            torch.special.entr((s * one / one.norm(dim=-1, keepdim=True)).softmax(-1)).sum(-1).min().item()
            for one in (rows, tight)
        )
        bound = dynamics.entropy_bound(s, keys).item()
        outcome.rows.append(
            {"norm s of 16 logits": s, "bound": bound, "one large logit": attained, "2,000 random": least}
        )
        outcome.check(
            abs(bound - attained) < 1e-9 < least - bound,
            f"s = {s:g}: the bound {bound:.4f} is attained, and not passed",
        )


def run(quick: bool = False) -> Outcome:
    outcome = Outcome(
        "entropy_bound",
        "The norm of a row's logits, so ||W_Q W_K^T||_2, bounds the entropy of its attention from below; where that "
        "norm runs away, entropy collapses and the loss stalls.",
        "Zhai et al. 2023, arXiv 2303.06296, theorem 3.1",
    )
    closed_forms(outcome)
    logs = {name: train(rate, 20 if quick else STEPS) for name, rate in RATES.items()}
    for name, log in logs.items():
        outcome.rows.append(
            {"run": name, "sigma first": log.sigmas[0].max().item(), "sigma last": log.sigmas[-1].max().item(),
             "largest logit": torch.stack(log.logits).max().item(),
             "entropy of the worst head": log.entropies[-1].min().item(), "loss": log.losses[-1]}
        )  # fmt: skip
        outcome.check(not log.violations, f"{name}: {log.violations} of {log.rows:,} rows fall below the bound")
    if not quick:
        well, ill = logs.values()
        outcome.check(
            well.entropies[-1].min() > 0.15 and max(one.max() for one in well.logits) < 100,
            f"0.01: entropy of the worst head ends at {well.entropies[-1].min():.2f}, largest logit "
            f"{torch.stack(well.logits).max():.0f}, loss {well.losses[-1]:.2f}",
        )
        times = (ill.sigmas[-1].max() / well.sigmas[-1].max()).item()
        outcome.check(
            ill.entropies[-1].min() < 0.05 and times > 10,
            f"0.1: entropy collapsed to {ill.entropies[-1].min():.3f}, largest logit "
            f"{torch.stack(ill.logits).max():,.0f}, sigma {times:.0f} times that of the healthy run, loss "
            f"{ill.losses[-1]:.2f}",
        )
        draw(outcome, logs)
    return outcome


def draw(outcome: Outcome, logs: dict[str, Log]) -> None:
    figure, axes = canvas(1, 3, width=11)
    for name, log in logs.items():
        axes[0][0].plot(log.steps, [one.max() for one in log.sigmas], label=name)
        axes[0][1].plot(log.steps, [one.min() for one in log.entropies], label=name)
        points = torch.cat(log.points, 1)
        axes[0][2].plot(points[0], points[1], ".", markersize=2.5, alpha=0.5)
    axes[0][0].set(title="largest ||W_Q W_K^T||_2 of a head", xlabel="step", yscale="log")
    axes[0][1].set(title="entropy / log(keys), worst head", xlabel="step", ylim=(0, 1))
    axes[0][1].legend()
    norms = torch.logspace(-1, 4.5, 300)
    axes[0][2].plot(norms, dynamics.entropy_bound(norms, TOKENS), "k", label="the bound")
    axes[0][2].set(title=f"rows of {TOKENS} keys", xlabel="norm of the logits", ylabel="entropy (nats)", xscale="log")
    axes[0][2].legend()
    outcome.draw(figure)
