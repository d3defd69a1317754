"""A cache changes the cost and not the answer."""

import torch

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact
from glassformer.naming import preset

MODELS = ("gpt2@1m", "llama@1m+gqa:2", "mamba@1m")
LENGTH, WORDS, TOLERANCE = 24, 64, 1e-4


@torch.no_grad()
def largest_difference(name: str) -> float:
    model = preset(f"{name}+vocab_size={WORDS}+context={LENGTH}").build(seed=0).eval()
    tokens = torch.randint(0, WORDS, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    whole = model(tokens)
    state = model.init_state(1, LENGTH, torch.float32)
    cached = torch.cat([model(tokens[:, i : i + 1], state) for i in range(LENGTH)], dim=1)
    return float((whole - cached).abs().max())


def measure(bench: Bench) -> Outcome:
    figures = [exact(f"largest difference of logits, {name}", largest_difference(name), most=TOLERANCE, published=0)
               for name in MODELS]  # fmt: skip
    return Outcome(figures=tuple(figures), size=f"{', '.join(MODELS)}, {LENGTH} tokens, fp32", sure=f"to {TOLERANCE:g}")


CLAIM = Claim(
    name="cached-decoding",
    statement="Decoding from a cache gives the logits of the whole forward pass.",
    source="a guide to the mathematics of transformers",
    published="equal",
    kind="exact",
    size="any",
    minutes=0.05,
    measure=measure,
)
