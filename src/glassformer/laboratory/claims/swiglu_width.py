"""Two thirds of the width pay for the third matrix."""

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact
from glassformer.naming import preset

TOLERANCE = 0.01


def measure(bench: Bench) -> Outcome:
    width = 4096
    hidden = round(8 * width / 3)
    shape = f"llama@7b+d_model={width}"
    gated, plain = (preset(f"{shape}+{what}").num_params(embeddings=False) for what in
                    (f"swiglu:{hidden}", "relu+nobias"))  # fmt: skip
    figure = exact("parameters with SwiGLU of 8/3 d over those with ReLU of 4 d", gated / plain,
                   least=1 - TOLERANCE, most=1 + TOLERANCE, published=1)  # fmt: skip
    return Outcome(figures=(figure,), size=shape, sure=f"counted; within {TOLERANCE:.0%}")


CLAIM = Claim(
    name="swiglu-width",
    statement="A gated network of width 8/3 d has as many parameters as a plain one of 4 d.",
    source="2002.05202",
    published="equal",
    kind="exact",
    size="any",
    minutes=0.01,
    measure=measure,
)
