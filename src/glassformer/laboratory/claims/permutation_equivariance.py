"""What attention knows of order."""

import torch

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact
from glassformer.naming import preset

MODEL, LENGTH, WORDS, TOLERANCE = "gpt2@1m+nope", 32, 64, 1e-4


@torch.no_grad()
def change(name: str) -> float:
    """Of what a model makes of each token when all are permuted, over the size of it."""
    model = preset(f"{name}+vocab_size={WORDS}+context={LENGTH}").build(seed=0).eval()
    made = torch.Generator().manual_seed(0)
    tokens, order = torch.randint(0, WORDS, (1, LENGTH), generator=made), torch.randperm(LENGTH, generator=made)
    plain, permuted = model(tokens)[:, order], model(tokens[:, order])
    return float((plain - permuted).abs().max() / plain.abs().max())


def measure(bench: Bench) -> Outcome:
    figures = (
        exact("change of outputs, seeing both ways and without positions", change(f"{MODEL}+bidirectional"),
              most=TOLERANCE, published=0),
        exact("the same under a causal mask", change(MODEL)),
        exact("the same with learned positions", change("gpt2@1m+bidirectional")),
    )  # fmt: skip
    return Outcome(figures=figures, size=f"{MODEL}, {LENGTH} tokens, fp32", sure=f"to {TOLERANCE:g}")


CLAIM = Claim(
    name="permutation-equivariance",
    statement="Without positions and without a mask, permuting the tokens permutes what a transformer makes of them.",
    source="1912.10077, section 2",
    published="exact",
    kind="exact",
    size="any",
    minutes=0.05,
    measure=measure,
)
