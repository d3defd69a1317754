"""Large learning rates: attention logits run away and entropy collapses, but not with QK-norm or sigma-reparam."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from experiments.dynamics.common import COLOURS, Outcome, canvas
from glassformer import dynamics, preset
from glassformer.dynamics.qk_clip import QKClip
from glassformer.introspection import capture
from glassformer.parts.mup import parameter_groups

VOCABULARY, TOKENS, BATCH = 64, 64, 32
SHARPNESS = 1.7
"""Standard deviation of the source's logits: a next token costs 2.7 nats where the last one tells all there is."""
MODEL = (
    f"gpt2@1m+layers=2+d_model=64+heads=2+vocab_size={VOCABULARY}+context={TOKENS}"
    "+untied+nobias+init.std=0.125+init.depth_scaled=false"
)
ARMS = {
    "plain": MODEL,
    "QK-LN": f"{MODEL}+qknorm+qk_norm.norm=layernorm",
    "sigma-reparam": f"{MODEL}+sigmareparam",
    "QK-clip": MODEL,
}
CLIPPED = {"QK-clip": 100.0}
CURES = ("QK-LN", "sigma-reparam")
RATES = (1e-3, 1e-2, 3e-2, 1e-1, 3e-1)
STEPS, WARMUP, LOOK = 300, 30, 10


@dataclass
class Trace:
    """What was seen on the way: every `LOOK` steps, and at the last."""

    steps: list[int]
    logits: list[float]
    """The largest |score|, any head."""
    entropies: list[float]
    """Normalised, of the worst layer."""
    losses: list[float]


def texts(generator: torch.Generator) -> Iterator[Tensor]:
    """Batches (b, t + 1): half a text from a chain of pairs, and the same half again."""
    chain = torch.softmax(SHARPNESS * torch.randn(VOCABULARY, VOCABULARY, generator=generator), -1)
    while True:
        tokens = [torch.randint(VOCABULARY, (BATCH,), generator=generator)]
        while len(tokens) < TOKENS // 2:
            tokens.append(torch.multinomial(chain[tokens[-1]], 1, generator=generator)[:, 0])
        half = torch.stack(tokens, 1)
        yield torch.cat([half, half, half[:, :1]], 1)


def train(arm: str, rate: float, steps: int = STEPS, seed: int = 0) -> Trace:
    """AdamW (0.9, 0.95) without decay of weights, gradients clipped to 1, a warm-up of a tenth, then linear to zero."""
    generator = torch.Generator().manual_seed(seed)
    model = preset(ARMS[arm]).build(seed=seed)
    groups = parameter_groups(model, rate, 0.0, model.config.rates)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    clip = QKClip(model, CLIPPED.get(arm))
    warmup = steps * WARMUP // STEPS
    trace = Trace([], [], [], [])
    for step, text in zip(range(1, steps + 1), texts(generator), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = rate * group["scale"] * min(step / warmup, (steps - step + 1) / (steps - warmup))
        with clip.looking():
            loss = model.loss(text[:, :-1], text[:, 1:])
            optimizer.zero_grad()
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        clip.after_update()
        if step % LOOK == 0 or step == steps:
            model.eval()
            seen = capture(model, text[:8, :-1], ["layers.*.mixer.scores", "layers.*.mixer.pattern"])
            model.train()
            scores = [x for site, x in seen.items() if site.endswith("scores")]
            patterns = [x for site, x in seen.items() if site.endswith("pattern")]
            trace.steps.append(step)
            trace.logits.append(max(dynamics.max_attention_logit(x).max().item() for x in scores))
            trace.entropies.append(min(dynamics.attention_entropy(x, normalised=True).mean().item() for x in patterns))
            trace.losses.append(loss.item())
    return trace


def run(quick: bool = False) -> Outcome:
    outcome = Outcome(
        "logit_growth",
        "At learning rates from 0.1 up attention logits pass a thousand and entropy collapses; with QK-norm or "
        "sigma-reparametrised maps neither happens.",
        "Wortsman et al. 2023, arXiv 2309.14322, section 3.1; Zhai et al. 2023, arXiv 2303.06296",
    )
    rates, steps, most, least = ((3e-1,), 40, 1e3, 0.05) if quick else (RATES, STEPS, 100, 0.1)
    traces = {(arm, rate): train(arm, rate, steps) for rate in rates for arm in ARMS}
    for (arm, rate), trace in traces.items():
        last = {"max logit": trace.logits[-1], "entropy": trace.entropies[-1], "loss": trace.losses[-1]}
        outcome.rows.append({"learning rate": rate, "arm": arm, **last})
    for rate in (rate for rate in rates if rate >= 0.1):
        plain = traces["plain", rate]
        outcome.check(
            plain.logits[-1] > 1e3 and plain.entropies[-1] < 0.05,
            f"at {rate:g} the plain model has a logit of {plain.logits[-1]:.3g} > 1e3 and an entropy of "
            f"{plain.entropies[-1]:.3f} < 0.05",
        )
        for arm in CURES:
            cured = traces[arm, rate]
            outcome.check(
                cured.logits[-1] < most and cured.entropies[-1] > least,
                f"at {rate:g} {arm} keeps logits at {cured.logits[-1]:.3g} < {most:g} and entropy at "
                f"{cured.entropies[-1]:.2f} > {least:g}",
            )
        clipped = traces["QK-clip", rate]
        outcome.check(
            clipped.logits[-1] < plain.logits[-1] / 2,
            f"at {rate:g} QK-clip at 100 ends at {clipped.logits[-1]:.3g}, below half of the plain model's",
        )
    if not quick:
        for arm in CURES:
            gain = traces["plain", 0.3].losses[-1] - traces[arm, 0.3].losses[-1]
            outcome.check(gain > 0.7, f"at 0.3 {arm} ends {gain:.2f} nats better than the plain model (> 0.7)")
        outcome.note("a low entropy alone is no alarm: at 0.01 heads that copy have one, and the loss is at its best")
        outcome.note("the cures bound logits; they do not make a learning rate of 0.1 as good as one of 0.01")
        _draw(outcome, traces)
    return outcome


def _draw(outcome: Outcome, traces: dict[tuple[str, float], Trace]) -> None:
    figure, axes = canvas(1, 3, width=10.0)
    drawn = (("largest |logit|", "logits"), ("normalised entropy, worst layer", "entropies"), ("loss", "losses"))
    for place, (title, name) in zip(axes[0], drawn, strict=True):
        for arm, colour in zip(ARMS, COLOURS, strict=False):
            ends = [getattr(traces[arm, rate], name)[-1] for rate in RATES]
            place.plot(RATES, ends, "o-", color=colour, label=arm)
        place.set(title=title, xlabel="learning rate", xscale="log")
    axes[0][0].set_yscale("log")
    axes[0][0].axhline(1e3, color="#888888", lw=0.8, ls="--")
    axes[0][0].legend()
    axes[0][1].axhline(0.05, color="#888888", lw=0.8, ls="--")
    outcome.draw(figure)
