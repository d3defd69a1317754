"""Tokens and gradients of deep stacks, at the start of training."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from glassformer import dynamics
from glassformer.config import BlockConfig, ModelConfig, Stage
from glassformer.laboratory.evidence.bench import Bench
from glassformer.laboratory.evidence.claim import Claim
from glassformer.laboratory.evidence.figure import Outcome, Picture, curve, exact, sampled
from glassformer.model import Block
from glassformer.parts.core.init import XavierInitConfig
from glassformer.parts.ffn import Mlp, MlpConfig
from glassformer.parts.forward_pass import Pass
from glassformer.parts.mixer import Attention, AttentionConfig
from glassformer.parts.norm import Identity, IdentityConfig, LayerNorm, LayerNormConfig, NormConfig
from glassformer.parts.residual import (
    NoResidual,
    NoResidualConfig,
    Post,
    PostConfig,
    Pre,
    PreConfig,
    Residual,
    ResidualConfig,
)
from glassformer.parts.visibility import Bidirectional, Causal

TOKENS, WIDTH, HEADS, DEPTH = 64, 128, 4, 24
"""Shape of the stacks whose tokens are compared."""


def _bare(wiring: Callable[[Identity, Identity], Residual]) -> Callable[[int], Residual]:
    """Returns a function from a depth to the given residual wiring without norms."""
    return lambda depth: wiring(Identity(), Identity())


def _post(scale: float) -> Post:
    return Post(LayerNorm(WIDTH), LayerNorm(WIDTH), scale=scale)


VARIANTS: dict[str, tuple[Callable[[int], Residual], bool, bool]] = {
    "attention only": (_bare(NoResidual), False, False),
    "attention only, causal": (_bare(NoResidual), False, True),
    "attention + MLP, no skip": (_bare(NoResidual), True, False),
    "attention + skip, no norm": (_bare(Pre), False, False),
    "Post-LN": (lambda depth: _post(1.0), True, False),
    "Pre-LN": (lambda depth: Pre(LayerNorm(WIDTH), LayerNorm(WIDTH)), True, False),
    "Post-LN, scaled": (lambda depth: _post(depth**-0.5), True, False),
}
"""Name -> (wiring of a stack by its depth, True if an FFN follows attention, True if attention is causal). The branches
of the scaled one are multiplied by 1 / sqrt(L)."""

STACKS = ("Post-LN", "Pre-LN", "Post-LN, scaled")
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
    ("Post-LN, scaled", 3): (0.98, 0.031, 58.0),
    ("Post-LN, scaled", 12): (0.92, 0.142, 56.0),
    ("Post-LN, scaled", 24): (0.82, 0.310, 52.0),
}
"""(variant, layer) -> (mu, rho, effective rank) after the layer: one seed of an independent implementation in plain
PyTorch."""


def block(variant: str, depth: int, generator: torch.Generator) -> Block:
    """Builds a random layer of a variant (see `VARIANTS`), whose matrices preserve variance: N(0, 1/fan_in), twice that
    before the ReLU."""
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
    """Returns random tokens (1, T, d) and `depth` random layers of a variant (see `VARIANTS`)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, TOKENS, WIDTH, generator=generator)
    return x, [block(variant, depth, generator) for _ in range(depth)]


@torch.no_grad()
def collapse(variant: str, depth: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns three measures of rank collapse after each layer of a random stack, (depth, 3): mu, rho, effective
    rank."""
    x, blocks = stack(variant, depth, seed)
    x, found = x.to(dtype), []
    for layer in blocks:
        x = layer.to(dtype)(x, Pass.of(x))
        found.append([dynamics.relative_residual(x), dynamics.token_cosine(x), dynamics.effective_rank(x)])
    return torch.tensor(found)


def query_share(variant: str, depth: int, seed: int) -> Tensor:
    """Returns the gradient norms of W_Q relative to those of W_V by layer, ||dL/dW_Q|| / ||dL/dW_V||, (depth,), for L a
    random linear read-out of the last token."""
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


def agree(mine: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Returns True if two measurements (mu, rho, rank) agree within the spread of seeds: mu by a quarter, a small one
    by a factor of e; rho by 0.1; a rank by 10 % and 1."""
    near = abs(math.log(mine[0] / other[0])) < (0.25 if other[0] > 0.3 else 1.0)
    return near and abs(mine[1] - other[1]) < 0.1 and abs(mine[2] - other[2]) < (1 + 0.1 * other[2])


def rank_collapse(bench: Bench) -> Outcome:
    seeds = bench.runs(8)
    layers = {name: torch.stack([collapse(name, DEPTH, seed) for seed in seeds]) for name in VARIANTS}
    mu, rho = ({name: values[..., i] for name, values in layers.items()} for i in (0, 1))  # (seed, layer)
    cubes = torch.stack([collapse("attention only", 3, seed, torch.float64)[:, 0] for seed in seeds]).log()
    shares = {name: torch.stack([query_share(name, DEPTH, seed) for seed in seeds]) for name in STACKS}
    last = {
        name: torch.stack([torch.stack([collapse(name, depth, seed)[-1, 1] for depth in DEPTHS]) for seed in seeds])
        for name in STACKS
    }
    near = 0
    for (name, layer), other in REFERENCE.items():
        at = layers[name][:3, layer - 1]
        near += agree((at[:, 0].log().mean().exp().item(), *at[:, 1:].mean(0).tolist()), other)
    figures = (
        sampled("mu after 12 layers of attention only", mu["attention only"][:, 11].tolist(), most=1e-3, published=0),
        sampled("the same, Pre-LN", mu["Pre-LN"][:, 11].tolist(), least=0.1),
        sampled("mu after 3 layers of attention only", mu["attention only"][:, 2].tolist(), most=1e-5),
        sampled("the same, with an MLP", mu["attention + MLP, no skip"][:, 2].tolist(), most=1e-5),
        sampled("log mu of attention only after layer 3 over that after layer 2, fp64",
                (cubes[:, 2] / cubes[:, 1]).tolist(), least=3, published=3),
        sampled("mu after 24 layers, Pre-LN", mu["Pre-LN"][:, 23].tolist(), least=0.4),
        sampled("rho after 24 layers, Post-LN", rho["Post-LN"][:, 23].tolist(), least=0.99),
        sampled("the same, branches scaled by 1 / sqrt(24)", rho["Post-LN, scaled"][:, 23].tolist(), most=0.45),
        sampled("gradient of W_Q over that of W_V in layer 24, Post-LN", shares["Post-LN"][:, -1].tolist(), most=0.01),
        sampled("the same, scaled", shares["Post-LN, scaled"][:, -1].tolist(), least=0.1),
        sampled(f"largest rho of the last layer at depths {DEPTHS[0]} to {DEPTHS[-1]}, scaled",
                last["Post-LN, scaled"].amax(1).tolist(), most=0.5),
        exact(f"places of {len(REFERENCE)} where three draws agree with plain PyTorch", near, least=len(REFERENCE)),
    )  # fmt: skip
    of_layers = range(1, DEPTH + 1)
    pictures = (
        Picture(title="mu, the part of tokens that is not common to all", x="layer", log="y",
                curves=tuple(curve(name, of_layers, mu[name][:3].tolist()) for name in VARIANTS)),
        Picture(title="rho, mean cosine between tokens", x="layer",
                curves=tuple(curve(name, of_layers, rho[name][:3].tolist()) for name in VARIANTS)),
        Picture(title="gradient of W_Q over that of W_V", x="layer", log="y",
                curves=tuple(curve(name, of_layers, shares[name][:3].tolist()) for name in STACKS)),
        Picture(title="rho of the last layer", x="layers of the stack",
                curves=tuple(curve(name, DEPTHS, last[name][:3].tolist()) for name in STACKS)),
    )  # fmt: skip
    return Outcome(
        figures=figures, pictures=pictures, size=f"{DEPTH} layers of random weights, width {WIDTH}, {HEADS} heads",
        sure=f"{len(seeds)} draws, intervals of 95 %",
        notes=("mu is |X - mean token| / |X|, rho the mean cosine between tokens.",),
    )  # fmt: skip


SLIM, SHORT, BATCH, VOCABULARY = 64, 32, 8, 64
"""Width, context, batch and vocabulary of the models whose gradients are measured."""
MANY = 50
LADDER = (4, 8, 16, 32)
RESIDUAL, WITHOUT, BARE, AFTER = "residual, Pre-LN", "no residual", "no residual, no norms", "residual, Post-LN"
WIRINGS: dict[str, tuple[ResidualConfig, NormConfig]] = {
    RESIDUAL: (PreConfig(), LayerNormConfig()),
    WITHOUT: (NoResidualConfig(), LayerNormConfig()),
    BARE: (NoResidualConfig(), IdentityConfig()),
    AFTER: (PostConfig(), LayerNormConfig()),
}


def model_of(wiring: str, depth: int) -> ModelConfig:
    """Returns the config of a model of `depth` layers with this wiring and Xavier's initialization."""
    residual, norm = WIRINGS[wiring]
    ffn = MlpConfig(activation="relu", bias=False)
    block = BlockConfig(mixer=AttentionConfig(n_heads=4), ffn=ffn, norm=norm, residual=residual)
    return ModelConfig(
        vocab_size=VOCABULARY,
        d_model=SLIM,
        context=SHORT,
        stack=(Stage(repeat=depth, blocks=(block,)),),
        final_norm=None if residual.ends_in_norm else norm,
        init=XavierInitConfig(),
    )


def gradients(wiring: str, depth: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns the gradients of a new model by layer, at the first batch: ||dL/dW|| of the second matrix of the FFN,
    (depth,), and dL/dx of the stream before it, (depth, b, s, d)."""
    model = model_of(wiring, depth).build(seed=seed)
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(VOCABULARY, (2, BATCH, SHORT), generator=generator)
    streams = list[Tensor]()

    def keep(_: object, given: tuple[Tensor, ...]) -> None:
        streams.append(given[0])

    hooks = [layer.register_forward_pre_hook(keep) for layer in model.layers]
    loss = model.loss(tokens, targets)
    for hook in hooks:
        hook.remove()
    weights = [model.get_parameter(f"layers.{layer}.ffn.down_proj.weight") for layer in range(depth)]
    found = torch.autograd.grad(loss, [*weights, *streams])
    norms = torch.stack([dynamics.gradient_norm(gradient) for gradient in found[:depth]])
    return norms, torch.stack(found[depth:])


def slope(depths: tuple[int, ...], norms: list[float]) -> float:
    """Returns the exponent with which gradient norms grow with depth: the slope of log norm against log depth, by least
    squares."""
    x, y = (torch.tensor([math.log(value) for value in values]) for values in (depths, norms))
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def by_depth(bench: Bench) -> Outcome:
    seeds = bench.runs(16)
    depth = bench.scaled(MANY, 4)
    found = {name: torch.stack([gradients(name, depth, seed)[0] for seed in seeds]) for name in WIRINGS}
    ends = {name: (norms[:, 0] / norms[:, -1]).log10().tolist() for name, norms in found.items()}
    told = "gradient of the first layer's weights over that of the last's, log10"
    figures = (
        sampled(f"{told}, {WITHOUT}", ends[WITHOUT], most=-1),
        sampled(f"{told}, {RESIDUAL}", ends[RESIDUAL], least=-1),
        *(sampled(f"{told}, {name}", ends[name]) for name in (BARE, AFTER)),
        *(sampled(f"lowest gradient of a layer over the highest, log10, {name}",
                  (found[name].amin(1) / found[name].amax(1)).log10().tolist()) for name in WIRINGS),
    )  # fmt: skip
    curves = tuple(curve(name, range(1, depth + 1), found[name][:4].tolist()) for name in WIRINGS)
    return Outcome(
        figures=figures, size=_size(depth), sure=f"{len(seeds)} draws, intervals of 95 %",
        pictures=(Picture(title="gradient of the FFN's second matrix", x="layer", log="y", curves=curves),),
        notes=("A guide has .99 to the power of the depth, .6 after 50 layers: an assumption, not a measurement.",),
    )  # fmt: skip


def identity_path(bench: Bench) -> Outcome:
    seeds = bench.runs(4)
    depth = bench.scaled(MANY, 4)
    found = {}
    for name in WIRINGS:
        streams = [gradients(name, depth, seed)[1].flatten(1) for seed in seeds]
        found[name] = torch.stack([torch.cosine_similarity(one[:-1], one[1:]) for one in streams])
    medians = {name: cosines.median(1).values.tolist() for name, cosines in found.items()}
    told, half = "cosine of a layer's gradient with the next one's, median", 0.5**0.5
    figures = (
        sampled(f"{told}, {RESIDUAL}", medians[RESIDUAL], least=half),
        sampled(f"{told}, {WITHOUT}", medians[WITHOUT], most=half, published=0),
        *(sampled(f"{told}, {name}", medians[name]) for name in (BARE, AFTER)),
    )
    curves = tuple(curve(name, range(1, depth), cosines.tolist()) for name, cosines in found.items())
    return Outcome(
        figures=figures, size=_size(depth), sure=f"{len(seeds)} draws, intervals of 95 %",
        pictures=(Picture(title="cosine of gradients of neighbouring layers", x="layer", curves=curves),),
        notes=("A gradient is of the loss, by the stream that enters a layer. A square of the cosine above one half "
               "says that most of it has passed by the identity.",),
    )  # fmt: skip


def last_layer(bench: Bench) -> Outcome:
    seeds = bench.runs(8)
    depths = LADDER[: bench.scaled(len(LADDER), 2)]
    found = {
        name: torch.stack([torch.stack([gradients(name, depth, seed)[0][-1] for depth in depths]) for seed in seeds])
        for name in (RESIDUAL, AFTER)
    }
    slopes = {name: [slope(depths, norms.tolist()) for norms in of] for name, of in found.items()}
    figures = (
        sampled("slope of the last layer's log gradient against log L, Pre-LN", slopes[RESIDUAL], most=-0.3,
                published=-0.5),
        sampled("the same, Post-LN", slopes[AFTER], least=-0.15, published=0),
    )  # fmt: skip
    curves = tuple(curve(name, depths, norms.tolist()) for name, norms in found.items())
    return Outcome(
        figures=figures, size=_size(depths[-1]), sure=f"{len(seeds)} draws, intervals of 95 %",
        pictures=(Picture(title="gradient of the last layer", x="layers", log="xy", curves=curves),),
    )  # fmt: skip


def _size(depth: int) -> str:
    return f"{depth} layers of width {SLIM}, {BATCH} rows of {SHORT} random tokens, Xavier's initialization"


CLAIMS = [
    Claim(
        name="rank-collapse", kind="measured", minutes=0.5,
        statement="Attention without residual connections makes all tokens alike with depth, doubly exponentially; "
        "with them Pre-LN keeps tokens apart, and Post-LN where branches are scaled by 1 / sqrt(L).",
        source="2103.03404, theorem 2.2; 2206.03126", published="to rank 1, doubly exponentially",
        size="random weights",
        measure=rank_collapse,
    ),
    Claim(
        name="gradient-by-depth", kind="scoped", minutes=2,
        statement="Through 50 layers without residual connections the gradient falls to less than a tenth, and with "
        "them it does not.",
        source="1603.05027, section 3", published="exponentially small or large", size="50 layers at initialization",
        measure=by_depth,
    ),
    Claim(
        name="identity-path", kind="measured", minutes=0.5,
        statement="A residual connection hands the gradient of a layer down nearly unchanged, and without one nothing "
        "of its direction is left.",
        source="1603.05027, section 2, equation 5", published="the gradient of the last layer plus a sum over branches",
        size="50 layers at initialization",
        measure=identity_path,
    ),
    Claim(
        name="last-layer-gradient", kind="measured", minutes=0.5,
        statement="At the start of training the gradient of the last layer falls as L^-0.5 with the depth L under "
        "Pre-LN, and stays under Post-LN.",
        source="2002.04745, theorem 1", published="slopes of -0.5 and 0", size="4 to 32 layers at initialization",
        measure=last_layer,
    ),
]  # fmt: skip
