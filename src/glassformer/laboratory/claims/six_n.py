"""FLOPs of training, by the rule and by a counter."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact
from glassformer.naming import preset

MODEL = "gpt2@10m+kernel=naive"
WORDS = 4096
TOLERANCE = 0.02


def measure(bench: Bench) -> Outcome:
    context = bench.scaled(256, 32)
    config = preset(f"{MODEL}+vocab_size={WORDS}+context={context}")
    tokens = torch.zeros(1, context, dtype=torch.int64)
    model = config.build(seed=0)
    with FlopCounterMode(display=False) as counted:
        model.loss(tokens, tokens).backward()
    weights = config.num_params(embeddings=False) + config.vocab_size * config.d_model
    width, layers = config.d_model, config.n_layers
    rule = 6 * weights + 12 * layers * width * context
    found = counted.get_total_flops() / context
    figures = (
        exact("counted FLOPs of a token over the rule", found / rule, least=1 - TOLERANCE, most=1 + TOLERANCE,
              published=1),
        exact("our own count over the counter's", 3 * config.flops(context) / found, least=1 - 1e-9, most=1 + 1e-9),
    )  # fmt: skip
    return Outcome(figures=figures, size=f"{MODEL}, context {context}", sure=f"counted; within {TOLERANCE:.0%}")


CLAIM = Claim(
    name="six-n",
    statement="Training takes 6 N + 12 L d s FLOPs for each token.",
    source="2001.08361; 2204.02311",
    published="6 N T, and attention",
    kind="exact",
    size="any",
    minutes=0.1,
    measure=measure,
)
