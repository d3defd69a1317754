"""How much more memory training takes than reading."""

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact
from glassformer.naming import preset
from glassformer.planning import plan

LOW, HIGH = 12.0, 16.0
STEPS = (("llama-3-8b", 1, 2048), ("gpt2", 16, 1024))
"""Models, sequences and tokens of a step."""
INFERENCE = 2
"""Bytes of a weight."""


def measure(bench: Bench) -> Outcome:
    figures = []
    for name, batch, tokens in STEPS[: bench.scaled(len(STEPS), 1)]:
        config = preset(name)
        took = plan(config, train=True, batch=batch, context=tokens).peak.total / (INFERENCE * config.num_params())
        figures.append(exact(f"training over weights in 16 bits, {name} at {batch} x {tokens:,}", took, "times",
                             least=LOW, most=HIGH))  # fmt: skip
    return Outcome(figures=tuple(figures), size="one rank, AdamW with weights in fp32, nothing recomputed",
                   sure="planned: the peak of a step", notes=("It depends on the tokens of a step.",))  # fmt: skip


CLAIM = Claim(
    name="training-memory",
    statement="Training takes 12 to 16 times the memory of inference.",
    source="a guide to the mathematics of transformers",
    published="12 to 16 times",
    kind="exact",
    size="any",
    minutes=0.02,
    measure=measure,
)
