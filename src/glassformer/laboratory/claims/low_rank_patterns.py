"""The singular values of the patterns of a trained model."""

from __future__ import annotations

import torch
from torch import Tensor

from glassformer.introspection import capture
from glassformer.laboratory.claims.bench import TINY_CONTEXT, Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, sampled
from glassformer.model import Model
from glassformer.naming import preset

MODEL, TOKENS, CONTEXT, SEEDS, TEXTS = "llama@1m", 400_000, 256, 3, 8
QUARTER = 4
"""Of 512 singular values the source keeps 128."""


def held(patterns: Tensor) -> Tensor:
    """(..., n, n) -> (...): the share of the sum of singular values that the first quarter of them has."""
    values = torch.linalg.svdvals(patterns.double())
    return values[..., : values.shape[-1] // QUARTER].sum(-1) / values.sum(-1)


def shares(model: Model, tokens: Tensor) -> Tensor:
    """(layers, heads), means over texts."""
    model.eval()
    found = capture(model, tokens, ["layers.*.mixer.pattern"])
    return torch.stack([held(pattern).mean(0) for pattern in found.values()])


def measure(bench: Bench) -> Outcome:
    context = bench.scaled(CONTEXT, TINY_CONTEXT)
    trained, drawn, least = [], [], []
    for seed in range(bench.seeds or bench.scaled(SEEDS, 2)):
        run = bench.train(MODEL, TOKENS, seed, CONTEXT)
        ids = bench.text.prepared.validation.tokens[: TEXTS * context].astype("int64")
        tokens = torch.from_numpy(ids).view(TEXTS, context)
        found = shares(run.model, tokens)
        trained.append(float(found.mean()))
        least.append(float(found.min()))
        drawn.append(float(shares(run.config.build(seed=seed), tokens).mean()))
    figures = (
        sampled("share of the first quarter of singular values, trained", trained, least=0.9, published=0.9),
        sampled("the same of the head that has least", least),
        sampled("the same before training", drawn),
    )
    return Outcome(
        figures=figures,
        size=f"{MODEL}, {preset(MODEL).n_layers} layers, {TOKENS:,} tokens, {TEXTS} texts of {context} characters",
        sure=f"{len(trained)} seeds, intervals of 95 %",
        notes=("The source looks at an encoder that sees both ways: patterns here are triangular, whose diagonal alone "
               "gives them full rank.",),
    )  # fmt: skip


CLAIM = Claim(
    name="low-rank-patterns",
    statement="The patterns of trained attention are nearly of low rank: a quarter of their singular values has nine "
    "tenths of the sum.",
    source="2006.04768, section 3 and figure 1",
    published="about 0.9, read off a figure, for 128 of 512 in RoBERTa",
    kind="scoped",
    size="1M parameters, 400k tokens",
    minutes=3,
    measure=measure,
)
