"""Condensation: from a small initialisation the neurons line up first, and queries and keys lose their rank."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.dynamics.common import Outcome, canvas
from glassformer import dynamics
from glassformer.model import Block
from glassformer.parts.ffn import Mlp
from glassformer.parts.mixer import Attention
from glassformer.parts.position import Positions
from glassformer.parts.residual import Residual
from glassformer.parts.residual.base import Branch

WIDTH, TOKENS, BATCH = 128, 10, 256
ANCHORS, WORDS, VOCABULARY = (1, 5), (5, 101), 102
STEPS, EVERY = 600, 20
GAMMAS = {"std d^-0.85": 0.85, "std d^-0.5 (control)": 0.5}


class Skip(Residual):
    """x <- x + mixer(x); x <- x + ffn(x): the paper's layer has no norm."""

    def forward(self, x: Tensor, mixer: Branch, ffn: Branch | None) -> Tensor:
        x = x + mixer(x)
        return x if ffn is None else x + ffn(x)


class Anchored(nn.Module):
    """One layer with one head and a tanh ffn between a frozen embedding and a frozen head; logits of the last token."""

    def __init__(self, gamma: float, generator: torch.Generator):
        super().__init__()
        ffn = Mlp(WIDTH, 4 * WIDTH, bias=False)
        ffn.activation = torch.tanh
        self.attention = Attention(WIDTH, 1)
        self.ffn = ffn
        self.block = Block(self.attention, ffn, Skip())
        for weight in self.parameters():
            nn.init.normal_(weight, 0.0, WIDTH**-gamma, generator=generator)
        self.embedding = torch.randn(VOCABULARY, WIDTH, generator=generator)
        self.position = torch.randn(TOKENS, WIDTH, generator=generator)
        self.head = torch.randn(VOCABULARY, WIDTH, generator=generator) * WIDTH**-0.5

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding[tokens] + self.position
        return self.block(x, Positions.of(x))[:, -1] @ self.head.T


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Words with one anchor a among them; the target is the word after it, plus a mod 2."""
    tokens = torch.randint(*WORDS, (BATCH, TOKENS), generator=generator)
    anchors = torch.randint(*ANCHORS, (BATCH, 1), generator=generator)
    at = torch.randint(TOKENS - 1, (BATCH, 1), generator=generator)
    tokens.scatter_(1, at, anchors)
    return tokens, (tokens.gather(1, at + 1) + anchors % 2).squeeze(1)


@torch.no_grad()
def measure(model: Anchored, loss: float) -> dict[str, float]:
    q, k, v = model.attention.qkv.weight.unflatten(0, (3, 1, -1))
    return {
        "loss": loss,
        "W_Q W_K^T": dynamics.effective_rank_of(dynamics.product_spectrum(q, k)).item(),
        "W_V": dynamics.effective_rank(v).item(),
        "W_1": dynamics.effective_rank(model.ffn.up_proj.weight).item(),
        "|cos| of W_Q": dynamics.row_cosine(q).item(),
        "|cos| of W_V": dynamics.row_cosine(v).item(),
    }


def train(gamma: float, steps: int, seed: int = 0) -> tuple[list[dict[str, float]], Tensor]:
    """What was measured every so many steps, and the last W_Q."""
    generator = torch.Generator().manual_seed(seed)
    model, found = Anchored(gamma, generator), []
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    for step in range(steps + 1):
        tokens, targets = batch(generator)
        loss = F.cross_entropy(model(tokens), targets)
        if step % EVERY == 0:
            found.append({"step": step, **measure(model, loss.item())})
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return found, model.attention.qkv.weight.detach()[:WIDTH]
