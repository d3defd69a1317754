"""Rank collapse: what keeps tokens apart as layers are stacked, at initialisation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from experiments.dynamics.common import Outcome, canvas
from glassformer import dynamics
from glassformer.model import Block
from glassformer.parts.ffn import Mlp
from glassformer.parts.forward_pass import Pass
from glassformer.parts.mixer import Attention
from glassformer.parts.norm import LayerNorm
from glassformer.parts.residual import Post, Pre, Residual
from glassformer.parts.residual.base import Branch
from glassformer.parts.visibility import Bidirectional, Causal

TOKENS, WIDTH, HEADS, DEPTH = 64, 128, 4, 24


class NoSkip(Residual):
    """x <- mixer(x); x <- ffn(x)."""

    def forward(self, x: Tensor, mixer: Branch, ffn: Branch | None) -> Tensor:
        return mixer(x) if ffn is None else ffn(mixer(x))


class NoNorm(Residual):
    """x <- x + mixer(x)."""

    def forward(self, x: Tensor, mixer: Branch, ffn: Branch | None) -> Tensor:
        return x + mixer(x)


def post(scale: float = 1.0) -> Post:
    return Post(LayerNorm(WIDTH), LayerNorm(WIDTH), scale=scale)


# name -> (wiring of a stack of so many layers, whether an ffn follows, whether attention is causal)
VARIANTS = {
    "attention only": (lambda depth: NoSkip(), False, False),
    "attention only, causal": (lambda depth: NoSkip(), False, True),
    "attention + MLP, no skip": (lambda depth: NoSkip(), True, False),
    "attention + skip, no norm": (lambda depth: NoNorm(), False, False),
    "Post-LN": (lambda depth: post(), True, False),
    "Pre-LN": (lambda depth: Pre(LayerNorm(WIDTH), LayerNorm(WIDTH)), True, False),
    "Post-LN, branches / sqrt(L)": (lambda depth: post(depth**-0.5), True, False),
}

STACKS = ("Post-LN", "Pre-LN", "Post-LN, branches / sqrt(L)")
DEPTHS = (6, 12, 24, 48)

REFERENCE = {
    ("attention only, causal", 3): (0.38, 0.972, 2.5),
    ("attention only, causal", 12): (3.3e-3, 1.0, 1.0),
    ("attention + skip, no norm", 3): (0.95, 0.085, 57.8),
    ("attention + skip, no norm", 12): (0.22, 0.951, 21.0),
    ("attention + skip, no norm", 24): (6.6e-3, 1.0, 1.3),
    ("Post-LN", 3): (0.68, 0.534, 45.0),
    ("Post-LN", 12): (0.033, 0.999, 2.6),
    ("Post-LN", 24): (7.7e-4, 1.0, 1.0),
    ("Pre-LN", 3): (0.81, 0.327, 51.0),
    ("Pre-LN", 12): (0.55, 0.699, 40.0),
    ("Pre-LN", 24): (0.45, 0.793, 35.0),
    ("Post-LN, branches / sqrt(L)", 3): (0.98, 0.031, 58.0),
    ("Post-LN, branches / sqrt(L)", 12): (0.92, 0.142, 56.0),
    ("Post-LN, branches / sqrt(L)", 24): (0.82, 0.310, 52.0),
}
"""(mu, rho, effective rank) after a layer: one seed of an independent implementation in plain PyTorch."""


def block(variant: str, depth: int, generator: torch.Generator) -> Block:
    """One layer whose every matrix keeps variance: N(0, 1/fan_in), twice that before the ReLU."""
    wiring, has_ffn, causal = VARIANTS[variant]
    attention = Attention(WIDTH, HEADS, visibility=Causal() if causal else Bidirectional())
    ffn = Mlp(WIDTH, 4 * WIDTH, "relu", bias=False) if has_ffn else None
    made = Block(attention, ffn, wiring(depth))
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.dim() == 2:
                gain = math.sqrt(2) if name == "ffn.up_proj.weight" else 1.0
                weight.normal_(0.0, gain * weight.shape[1] ** -0.5, generator=generator)
    return made


def stack(variant: str, depth: int, seed: int) -> tuple[Tensor, list[Block]]:
    """Random tokens (1, T, d) and so many layers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, TOKENS, WIDTH, generator=generator)
    return x, [block(variant, depth, generator) for _ in range(depth)]


@torch.no_grad()
def collapse(variant: str, depth: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """(depth, 3): mu, rho, effective rank after each layer."""
    x, blocks = stack(variant, depth, seed)
    x, found = x.to(dtype), []
    for layer in blocks:
        x = layer.to(dtype)(x, Pass.of(x))
        found.append([dynamics.relative_residual(x), dynamics.token_cosine(x), dynamics.effective_rank(x)])
    return torch.tensor(found)


def query_share(variant: str, depth: int, seed: int) -> Tensor:
    """(depth,): ||dL/dW_Q|| / ||dL/dW_V|| by layer, of a random linear read-out of the last token."""
    x, blocks = stack(variant, depth, seed)
    for layer in blocks:
        x = layer(x, Pass.of(x))
    readout = torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed + 1000))
    weights = [layer.get_parameter("mixer.qkv.weight") for layer in blocks]
    shares = []
    for gradient in torch.autograd.grad(x[0, -1] @ readout, weights):
        q, _, v = gradient.split(WIDTH)
        shares.append(dynamics.gradient_norm(q) / dynamics.gradient_norm(v))
    return torch.stack(shares)


def run(quick: bool = False) -> Outcome:
    outcome = Outcome(
        "rank_collapse",
        "Stacked attention makes all tokens the same, doubly exponentially; skips and norms delay it, branches scaled "
        "by 1/sqrt(L) prevent it, and where it has happened queries and keys get no gradient.",
        "Dong et al. 2021, arXiv 2103.03404; Noci et al. 2022, arXiv 2206.03126",
    )
    seeds = range(1 if quick else 3)
    layers = {name: torch.stack([collapse(name, DEPTH, seed) for seed in seeds]) for name in VARIANTS}
    found = {}
    for name, values in layers.items():
        for layer in (3, 12, 24):
            mu, rho, rank = values[:, layer - 1].unbind(-1)
            found[name, layer] = (mu.log().mean().exp().item(), rho.mean().item(), rank.mean().item())
            row = dict(zip(("mu", "rho", "effective rank"), found[name, layer], strict=True))
            spread = {"lowest rho": rho.min().item(), "highest rho": rho.max().item()}
            outcome.rows.append({"variant": name, "layer": layer, **row, **spread})

    alone = max(found["attention only", 3][0], found["attention + MLP, no skip", 3][0])
    outcome.check(alone < 1e-5, f"without skips mu is {alone:.0e} by layer 3")
    cubes = torch.stack([collapse("attention only", 3, seed, torch.float64)[:, 0] for seed in seeds]).log()
    faster = (cubes[:, 2] / cubes[:, 1]).min().item()
    outcome.check(faster > 3, f"doubly exponentially: log mu grows {faster:.1f}-fold from layer 2 to 3, in fp64")
    outcome.check(found["Pre-LN", 24][0] > 0.4, f"Pre-LN keeps mu at {found['Pre-LN', 24][0]:.2f} after 24 layers")
    plain, scaled = found["Post-LN", 24][1], found["Post-LN, branches / sqrt(L)", 24][1]
    outcome.check(plain > 0.99, f"Post-LN has rho {plain:.4f} after 24 layers")
    outcome.check(scaled < 0.45, f"with its branches scaled by 1/sqrt(24) it has {scaled:.2f}")
    shares = {name: torch.stack([query_share(name, DEPTH, seed) for seed in seeds]) for name in STACKS}
    gone, left = (shares[name][:, -1].mean().item() for name in ("Post-LN", "Post-LN, branches / sqrt(L)"))
    outcome.check(
        gone < 0.01 < 0.1 < left,
        f"||dL/dW_Q|| / ||dL/dW_V|| in layer 24 is {gone:.0e} where tokens have collapsed, and {left:.2f} with scaling",
    )
    if not quick:
        off = [place for place in REFERENCE if not agree(found[place], REFERENCE[place])]
        outcome.check(
            not off,
            f"mu, rho and effective rank agree with a plain-PyTorch implementation at {len(REFERENCE) - len(off)} of "
            f"{len(REFERENCE)} places{''.join(f'; not at layer {layer} of {name}' for name, layer in off)}",
        )
        last = {
            name: torch.stack([torch.stack([collapse(name, depth, seed)[-1, 1] for seed in seeds]) for depth in DEPTHS])
            for name in STACKS
        }
        growth = last["Post-LN, branches / sqrt(L)"].mean(1)
        outcome.check(
            growth.max() < 0.5,
            f"whatever the depth: scaled, rho of the last layer is {growth[0]:.2f} at L = {DEPTHS[0]} and "
            f"{growth[-1]:.2f} at L = {DEPTHS[-1]}",
        )
        draw(outcome, layers, shares, last)
    return outcome


def agree(mine: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Within what seeds differ by: mu by a quarter, a small one by a factor of e; rho by 0.1; a rank by 10 % and 1."""
    near = abs(math.log(mine[0] / other[0])) < (0.25 if other[0] > 0.3 else 1.0)
    return near and abs(mine[1] - other[1]) < 0.1 and abs(mine[2] - other[2]) < (1 + 0.1 * other[2])


def draw(outcome: Outcome, layers: dict[str, Tensor], shares: dict[str, Tensor], last: dict[str, Tensor]) -> None:
    figure, axes = canvas(2, 2, height=6.6)
    depths = torch.arange(1, DEPTH + 1)
    for i, title in enumerate(("mu = |X - 1 x̄| / |X| after each layer", "rho, mean cosine between tokens")):
        axis = axes[0][i]
        for name, values in layers.items():
            axis.plot(depths, values[..., i].mean(0), label=name)
            axis.fill_between(depths, values[..., i].amin(0), values[..., i].amax(0), alpha=0.15)
        axis.set(title=title, xlabel="layer")
    axes[0][0].set_yscale("log")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    for name, colour in zip(STACKS, ("C4", "C5", "C6"), strict=True):
        axes[1][0].plot(depths, shares[name].mean(0), label=name, color=colour)
        axes[1][1].plot(DEPTHS, last[name].mean(1), "o-", label=name, color=colour)
        axes[1][1].fill_between(DEPTHS, last[name].amin(1), last[name].amax(1), alpha=0.15, color=colour)
    axes[1][0].set(title="gradient of W_Q over that of W_V", xlabel="layer", yscale="log")
    axes[1][1].set(title="rho of the last layer", xlabel="layers L of the stack", ylim=(0, 1.03))
    outcome.draw(figure)
