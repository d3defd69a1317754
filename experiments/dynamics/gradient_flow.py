"""Gradient flow at initialisation: where the norm stands decides how gradients depend on depth."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from experiments.dynamics.common import Outcome, canvas
from glassformer import dynamics
from glassformer.config import BlockConfig, ModelConfig, Stage
from glassformer.parts.core.init import XavierInitConfig
from glassformer.parts.ffn import MlpConfig
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.norm import LayerNormConfig
from glassformer.parts.residual import PostConfig, PreConfig

WIDTH, TOKENS, BATCH, VOCABULARY = 64, 32, 8, 64
DEPTHS = (4, 8, 16, 32)
WIRINGS = {"Pre-LN": PreConfig(), "Post-LN": PostConfig()}


def config(wiring: str, depth: int) -> ModelConfig:
    block = BlockConfig(
        mixer=AttentionConfig(n_heads=4),
        ffn=MlpConfig(activation="relu", bias=False),
        norm=LayerNormConfig(),
        residual=WIRINGS[wiring],
    )
    return ModelConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        context=TOKENS,
        stack=(Stage(repeat=depth, blocks=(block,)),),
        final_norm=LayerNormConfig() if wiring == "Pre-LN" else None,  # Post-LN ends with one already
        init=XavierInitConfig(),
    )


def gradients(wiring: str, depth: int, seed: int) -> Tensor:
    """(depth,): ||dL/dW|| of the second matrix of each layer's ffn, at the first batch."""
    model = config(wiring, depth).build(seed=seed)
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(VOCABULARY, (2, BATCH, TOKENS), generator=generator)
    model.loss(tokens, targets).backward()
    weights = [model.get_parameter(f"layers.{layer}.ffn.down_proj.weight") for layer in range(depth)]
    return torch.stack([dynamics.gradient_norm(weight.grad) for weight in weights if weight.grad is not None])


def slope(depths: tuple[int, ...], norms: list[float]) -> float:
    """Of log norm against log depth, by least squares."""
    x, y = (torch.tensor([math.log(value) for value in values]) for values in (depths, norms))
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def run(quick: bool = False) -> Outcome:
    outcome = Outcome(
        "gradient_flow",
        "At initialisation the gradient of the last layer falls like L^-0.5 with depth under Pre-LN and not at all "
        "under Post-LN, which therefore wants a warm-up.",
        "Xiong et al. 2020, arXiv 2002.04745, theorem 1",
    )
    depths, seeds = (DEPTHS[:3], range(1)) if quick else (DEPTHS, range(3))
    found = {
        (wiring, depth): torch.stack([gradients(wiring, depth, seed) for seed in seeds])
        for wiring in WIRINGS
        for depth in depths
    }
    slopes = {}
    for wiring in WIRINGS:
        last = [found[wiring, depth][:, -1].mean().item() for depth in depths]
        slopes[wiring] = slope(depths, last)
        row: dict[str, object] = {f"L={depth}": norm for depth, norm in zip(depths, last, strict=True)}
        first = found[wiring, depths[-1]][:, 0].mean().item()
        outcome.rows.append({"wiring": wiring, **row, "slope": slopes[wiring], "last / first layer": last[-1] / first})
    outcome.check(slopes["Pre-LN"] < -0.3, f"Pre-LN: slope {slopes['Pre-LN']:+.2f} against log L (theory -0.5)")
    outcome.check(slopes["Post-LN"] > -0.15, f"Post-LN: slope {slopes['Post-LN']:+.2f} (theory 0)")
    if not quick:
        draw(outcome, found)
    return outcome


def draw(outcome: Outcome, found: dict[tuple[str, int], Tensor]) -> None:
    figure, axes = canvas(1, 2)
    for wiring in WIRINGS:
        last = torch.stack([found[wiring, depth][:, -1] for depth in DEPTHS])
        axes[0][0].plot(DEPTHS, last.mean(1), "o-", label=wiring)
        axes[0][0].fill_between(DEPTHS, last.amin(1), last.amax(1), alpha=0.15)
        every = found[wiring, DEPTHS[-1]]
        axes[0][1].plot(range(DEPTHS[-1]), every.mean(0), label=wiring)
        axes[0][1].fill_between(range(DEPTHS[-1]), every.amin(0), every.amax(0), alpha=0.15)
    start = found["Pre-LN", DEPTHS[0]][:, -1].mean()
    axes[0][0].plot(DEPTHS, [start * (depth / DEPTHS[0]) ** -0.5 for depth in DEPTHS], "k:", label="L^-0.5")
    axes[0][0].set(title="gradient of the last layer", xlabel="layers L", xscale="log", yscale="log")
    axes[0][0].set_xticks(DEPTHS, [str(depth) for depth in DEPTHS])
    axes[0][0].set_xticks([], minor=True)
    axes[0][0].legend()
    axes[0][1].set(title=f"gradient by layer, L = {DEPTHS[-1]}", xlabel="layer", yscale="log")
    outcome.draw(figure)
