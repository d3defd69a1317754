"""How much more memory training takes than reading."""

import torch

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact
from glassformer.naming import preset
from glassformer.parts.cost import Shape

LOW, HIGH = 12.0, 16.0
STATES = 16
"""Bytes of a weight in training with AdamW: fp32 weight, gradient and two moments."""
INFERENCE = 2


def measure(bench: Bench) -> Outcome:
    figures = []
    for name, batch, tokens in (("llama-3-8b", 1, 2048), ("gpt2@10m", 16, 256)):
        config = preset(name)
        cost = config.costs(Shape.training(batch, tokens, products=torch.bfloat16))
        weights = config.num_params()
        took = (STATES * weights + cost.kept) / (INFERENCE * weights)
        figures.append(exact(f"training over weights in 16 bits, {name} at {batch} x {tokens:,}", took, "times",
                             least=LOW, most=HIGH))  # fmt: skip
    return Outcome(figures=tuple(figures), size="states and what is kept for the backward pass, without logits' copies",
                   sure="counted")  # fmt: skip


CLAIM = Claim(
    name="training-memory",
    statement="Training takes 12 to 16 times the memory of inference.",
    source="guide",
    published="12 to 16 times",
    kind="exact",
    size="any",
    minutes=0.01,
    measure=measure,
)
