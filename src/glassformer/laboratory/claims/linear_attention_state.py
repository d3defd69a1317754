"""Attention without a softmax is a recurrence."""

import torch

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact
from glassformer.naming import preset

MODEL, LENGTH, WORDS, TOLERANCE = "llama@1m+linear_attention", 24, 64, 1e-4


@torch.no_grad()
def measure(bench: Bench) -> Outcome:
    config = preset(f"{MODEL}+vocab_size={WORDS}+context={LENGTH}")
    model = config.build(seed=0).eval()
    tokens = torch.randint(0, WORDS, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    state = model.init_state(1, LENGTH, torch.float32)
    steps = torch.cat([model(tokens[:, i : i + 1], state) for i in range(LENGTH)], dim=1)
    figures = (
        exact("largest difference of logits, at once and token by token", float((model(tokens) - steps).abs().max()),
              most=TOLERANCE, published=0),
        exact("bytes of the state after 65,536 tokens over those after 256",
              config.state_bytes(65536) / config.state_bytes(256), least=1, most=1, published=1),
    )  # fmt: skip
    return Outcome(figures=figures, size=f"{MODEL}, {LENGTH} tokens, fp32", sure=f"to {TOLERANCE:g}")


CLAIM = Claim(
    name="linear-attention-state",
    statement="Transformers with linear attention are recurrences with a state of fixed size.",
    source="2006.16236, section 3.4",
    published="equal",
    kind="exact",
    size="any",
    minutes=0.05,
    measure=measure,
)
