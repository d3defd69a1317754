"""What the output matrix has of a model."""

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact
from glassformer.naming import preset

CLAIMED, ROUNDED = 0.01, 0.005


def measure(bench: Bench) -> Outcome:
    config = preset("qwen3-8b")
    head = config.vocab_size * config.d_model + config.d_model
    figure = exact("share of the head and the final norm", head / config.num_params(), least=CLAIMED - ROUNDED,
                   most=CLAIMED + ROUNDED, published=CLAIMED)  # fmt: skip
    return Outcome(figures=(figure,), size=f"qwen3-8b, {config.num_params():,} parameters", sure="counted")


CLAIM = Claim(
    name="qwen3-head-share",
    statement="The head and the final norm of Qwen3-8B are about 1 % of its parameters.",
    source="a first lesson on language models, by the example of Qwen3-8B",
    published="1 %",
    kind="exact",
    size="any",
    minutes=0.01,
    measure=measure,
)
