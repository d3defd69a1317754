"""Norms, residual streams, and how blocks are wired."""

from collections.abc import Callable

import torch

from glassformer.laboratory.evidence.bench import Bench
from glassformer.laboratory.evidence.claim import Claim, credit
from glassformer.laboratory.evidence.contrast import BRIEF, LONG, SHORT, Gap, alike, contrast
from glassformer.laboratory.evidence.figure import Outcome, exact
from glassformer.laboratory.evidence.timing import Passes, Race, each, races
from glassformer.naming import preset
from glassformer.parts.core.cost import Shape
from glassformer.parts.norm import LayerNorm, Norm, RMSNorm


def rmsnorm_parameters(bench: Bench) -> Outcome:
    width = 4096
    rms, layer = (sum(p.numel() for p in norm.parameters()) for norm in (RMSNorm(width), LayerNorm(width)))
    figure = exact("parameters of RMSNorm over those of LayerNorm", rms / layer, least=0.5, most=0.5, published=0.5)
    return Outcome(figures=(figure,), size=f"width {width:,}", sure="counted")


def norms(scale: int) -> tuple[Passes, Passes]:
    """Returns two pieces of work to time, LayerNorm and RMSNorm, on 2,048 tokens of width 4,096, with the gradient of
    the scale; `scale` divides the number of tokens."""
    tokens, width = 2048 // scale, 4096

    def passes(norm: Norm) -> Passes:
        x = torch.randn(tokens, width, requires_grad=True)
        return Passes(lambda x, *_: norm(x), (x, *norm.parameters()))

    return passes(LayerNorm(width)), passes(RMSNorm(width))


def gpt2_post_norm(bench: Bench) -> Outcome:
    layers = list(preset("gpt2").layers())
    post = sum(block.residual.kind == "post" for block in layers)
    figure = exact("layers that norm after the addition", post, least=len(layers), most=len(layers),
                   published=len(layers))  # fmt: skip
    return Outcome(figures=(figure,), size=f"gpt2, {len(layers)} layers, whose weights load and agree in every logit",
                   sure="read off the published model")  # fmt: skip


def warm_up(change: str, least: float, most: float | None = None) -> Callable[[Bench], Outcome]:
    """Returns a claim's measuring function: by how much the loss of a model of 6 layers with this change rises if it is
    trained without warm-up."""
    warm = f"gpt2@1m+layers=6{change}"
    gap = Gap(warm, f"{warm}+recipe.warmup=0", least, most)
    return contrast(gap, tokens=500 * 16 * 64, batch_size=16, context=64, learning_rate=1e-3)


def bloom_parallel(bench: Bench) -> Outcome:
    layers = list(preset("bloom-7b1").layers())
    parallel = sum(block.residual.kind.startswith("parallel") for block in layers)
    figure = exact("layers that run attention parallel to the FFN", parallel, least=len(layers), most=len(layers),
                   published=len(layers))  # fmt: skip
    return Outcome(figures=(figure,), size=f"bloom-7b1, {len(layers)} layers", sure="read off the published model")


def falcon_parallel(bench: Bench) -> Outcome:
    tokens = 1024
    config = preset("falcon-7b")
    layers = list(config.layers())
    parallel = sum(block.residual.kind.startswith("parallel") for block in layers)
    whole = preset("falcon-7b+mha").costs(Shape(s=1, t=tokens, phase="decode")).state_bytes
    shared = config.costs(Shape(s=1, t=tokens, phase="decode")).state_bytes
    heads = round(whole / shared)
    figures = (
        exact("layers that run attention parallel to the FFN", parallel, least=len(layers), most=len(layers),
              published=len(layers)),
        exact("heads that share one KV head", heads, least=71, most=71, published=71),
    )  # fmt: skip
    return Outcome(figures=figures, size=f"falcon-7b, {len(layers)} layers", sure="read off the published model")


CLAIMS = [
    Claim(
        name="rmsnorm-loses-nothing", kind="scoped", minutes=18,
        statement="RMSNorm ends at the loss of LayerNorm.",
        source="1910.07467, section 6", published="comparable",
        size="1M parameters, 1.5M tokens, 5 seeds: within 0.5 %",
        measure=contrast(alike("gpt2@1m", "gpt2@1m+rmsnorm"), tokens=LONG, seeds=5),
    ),
    Claim(
        name="rmsnorm-parameters", kind="exact", minutes=0.01,
        statement="RMSNorm has half the parameters of LayerNorm.",
        source="1910.07467", published="half", size="any",
        measure=rmsnorm_parameters,
    ),
    Claim(
        name="rmsnorm-is-faster", kind="measured", minutes=1,
        statement="RMSNorm of 4,096 values takes half the time of LayerNorm, forward and backward.",
        source=credit("architecture") + "; 1910.07467 has 7 to 64 % for whole models",
        published="1.9 and 1.8 times",
        size="2,048 tokens of width 4,096",
        measure=races(
            Race("forward pass, LayerNorm over RMSNorm", each(Passes.forward, norms), least=1.8, published=1.9),
            Race("backward pass, LayerNorm over RMSNorm", each(Passes.backward, norms), least=1.7, published=1.8),
        ),
    ),
    Claim(
        name="qk-norm-holds-high-rates", kind="scoped", minutes=6,
        statement="At a learning rate nine times the usual one, norms on queries and keys lower the loss.",
        source="2309.14322, section 3.1; 2302.05442", published="stable over a wider range of rates",
        size="1M parameters, 400k tokens",
        measure=contrast(Gap("gpt2@1m", "gpt2@1m+qknorm", most=0.0), tokens=SHORT, learning_rate=1.2e-2),
    ),
    Claim(
        name="gpt2-post-norm", kind="exact", minutes=0.01,
        statement="GPT-2 is a Post-LN transformer.",
        source=credit("architecture"), published="Post-LN", size="any",
        measure=gpt2_post_norm,
    ),
    Claim(
        name="post-norm-needs-warmup", kind="scoped", minutes=6,
        statement="Post-LN transformers need a warm-up: without one they lose more than half a nat.",
        source="2002.04745, section 3", published="BLEU 8.45 without, about 34 with",
        size="6 layers, 500 steps at a rate of 0.001",
        measure=warm_up("+post", least=0.5),
    ),
    Claim(
        name="pre-norm-needs-no-warmup", kind="scoped", minutes=6,
        statement="Pre-LN transformers need no warm-up: without one the loss is the same within 0.05 nats.",
        source="2002.04745, section 4", published="no loss", size="6 layers, 500 steps at a rate of 0.001",
        measure=warm_up("", least=-0.05, most=0.05),
    ),
    Claim(
        name="norms-lower-loss", kind="scoped", minutes=2,
        statement="Without norms a small model ends at a higher loss than with them.",
        source="1502.03167, section 4.2.2", published="parameters reach infinity at the rate that norms allow",
        size="1M parameters, 50k tokens",
        measure=contrast(Gap("gpt2@1m", "gpt2@1m+nonorm", least=0.0), tokens=BRIEF, batch_size=8, context=64),
    ),
    Claim(
        name="residuals-lower-loss", kind="scoped", minutes=2,
        statement="Without residual connections a small model ends at a higher loss than with them.",
        source="1603.05027, table 1", published="training fails without them, at 110 layers",
        size="1M parameters, 50k tokens",
        measure=contrast(Gap("gpt2@1m", "gpt2@1m+noresidual", least=0.0), tokens=BRIEF, batch_size=8, context=64),
    ),
    Claim(
        name="parallel-loses-nothing", kind="scoped", minutes=18,
        statement="Blocks with attention parallel to the FFN end at the loss of sequential ones.",
        source="2204.02311, section 2: small loss at 8B, none at 62B", published="none at 62B",
        size="1M parameters, 1.5M tokens, 5 seeds: within 0.5 %",
        measure=contrast(alike("gpt2@1m", "gpt2@1m+parallel"), tokens=LONG, seeds=5),
    ),
    Claim(
        name="bloom-parallel", kind="exact", minutes=0.01,
        statement="BLOOM runs attention and the FFN side by side.",
        source=credit("architecture"), published="parallel", size="any",
        measure=bloom_parallel,
    ),
    Claim(
        name="falcon-parallel", kind="exact", minutes=0.01,
        statement="Falcon-7B runs attention parallel to the FFN, and its 71 heads share one KV head.",
        source="2311.16867", published="parallel, multi-query", size="any",
        measure=falcon_parallel,
    ),
]  # fmt: skip
