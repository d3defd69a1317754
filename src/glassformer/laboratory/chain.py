"""A small model on a synthetic language, trained in this process while its attention is measured.

A text is a Markov chain of pairs that repeats itself after half its length: a model that predicts from the last token
reaches 2.7 nats, one that copies less. The setting is that of Wortsman et al. 2023 (2309.14322) scaled down: AdamW,
gradients clipped to 1, a warm-up of a tenth, then a linear decay to zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from glassformer import dynamics
from glassformer.dynamics.qk_clip import QKClip
from glassformer.introspection import capture
from glassformer.model import Model
from glassformer.naming import preset
from glassformer.parts.mup import parameter_groups

VOCABULARY, TOKENS, BATCH = 64, 64, 32
SHARPNESS = 1.7
"""Standard deviation of the source's logits: 2.7 nats per token if only the last token is known."""
MODEL = (
    f"gpt2@1m+layers=2+d_model=64+heads=2+vocab_size={VOCABULARY}+context={TOKENS}"
    "+untied+nobias+init.std=0.125+init.depth_scaled=false"
)


@dataclass(frozen=True)
class Setting:
    """Options for training a model on the synthetic language; `every`: steps between two measurements, `clip`:
    threshold of QK-clip."""

    model: str = MODEL
    rate: float = 1e-2
    steps: int = 300
    warmup: int = 30
    decay: float = 0.0
    clip: float | None = None
    every: int = 20
    batch: int = BATCH

    def at(self, step: int) -> float:
        """Returns the learning rate at a step, counted from 1."""
        rise = step / self.warmup if self.warmup else 1.0
        return self.rate * min(rise, (self.steps - step + 1) / (self.steps - self.warmup))


@dataclass
class Trace:
    """Measurements of a model's attention during training: every `Setting.every` steps, and at the last."""

    steps: list[int] = field(default_factory=list)
    logits: list[float] = field(default_factory=list)
    """Largest attention logit over all heads."""
    entropies: list[float] = field(default_factory=list)
    """Attention entropy divided by that of uniform attention, minimum over the layers."""
    losses: list[float] = field(default_factory=list)

    @torch.no_grad()
    def add(self, step: int, loss: float, model: Model, tokens: Tensor) -> None:
        """Measures a model on tokens (b, s) at a step, and appends the results."""
        seen = capture(model, tokens, ["layers.*.mixer.scores", "layers.*.mixer.pattern"])
        scores = [x for site, x in seen.items() if site.endswith("scores")]
        patterns = [x for site, x in seen.items() if site.endswith("pattern")]
        self.steps.append(step)
        self.logits.append(max(dynamics.max_attention_logit(x).max().item() for x in scores))
        self.entropies.append(min(dynamics.attention_entropy(x, normalised=True).mean().item() for x in patterns))
        self.losses.append(loss)

    @property
    def final(self) -> float:
        """Mean loss of the last fifth of the measurements."""
        last = self.losses[-max(1, len(self.losses) // 5) :]
        return sum(last) / len(last)


def texts(generator: torch.Generator, batch: int = BATCH) -> Iterator[Tensor]:
    """Yields batches of random texts (b, t + 1): half a text from a Markov chain of pairs, and the same half again."""
    chain = torch.softmax(SHARPNESS * torch.randn(VOCABULARY, VOCABULARY, generator=generator), -1)
    while True:
        tokens = [torch.randint(VOCABULARY, (batch,), generator=generator)]
        while len(tokens) < TOKENS // 2:
            tokens.append(torch.multinomial(chain[tokens[-1]], 1, generator=generator)[:, 0])
        half = torch.stack(tokens, 1)
        yield torch.cat([half, half, half[:, :1]], 1)


def trained(how: Setting, seed: int, look: Callable[[int, float, Model, Tensor], None]) -> Model:
    """Trains a model on the synthetic language; `look(step, loss, model, tokens)` is called every `how.every` steps and
    at the last, with the loss before the step and the model after it."""
    generator = torch.Generator().manual_seed(seed)
    model = preset(how.model).build(seed=seed)
    groups = parameter_groups(model, how.rate, how.decay, model.config.rates)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    clip = QKClip(model, how.clip)
    for step, text in zip(range(1, how.steps + 1), texts(generator, how.batch), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = how.at(step) * group["scale"]
        with clip.looking():
            loss = model.loss(text[:, :-1], text[:, 1:])
            optimizer.zero_grad()
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        clip.after_update()
        if step % how.every == 0 or step == how.steps:
            model.eval()
            look(step, loss.item(), model, text[:8, :-1])
            model.train()
    return model


def traced(how: Setting, seed: int) -> Trace:
    """Trains a model on the synthetic language, and returns its attention measurements over the steps."""
    trace = Trace()
    trained(how, seed, trace.add)
    return trace


def shorter(how: Setting, steps: int) -> Setting:
    """Returns the training options with fewer steps and a warm-up in proportion."""
    return replace(how, steps=steps, warmup=how.warmup * steps // how.steps)
