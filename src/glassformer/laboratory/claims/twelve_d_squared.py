"""The rule of thumb for the parameters of layers."""

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact
from glassformer.naming import SIZES, preset

MODELS = ("gpt2@124m", "gpt2@1.5b", "gpt2@7b", "llama-7b")
TOLERANCE = 0.02


def measure(bench: Bench) -> Outcome:
    shapes = {"llama-7b": SIZES["7b"]}
    figures = []
    for name in MODELS:
        layers, width, _ = shapes.get(name) or SIZES[name.partition("@")[2]]
        found = preset(name).num_params(embeddings=False) / (layers * width**2)
        low, high = 12 * (1 - TOLERANCE), 12 * (1 + TOLERANCE)
        figures.append(exact(f"parameters of {name} over d^2 L", found, least=low, most=high, published=12))
    return Outcome(figures=tuple(figures), size=", ".join(MODELS), sure=f"counted; within {TOLERANCE:.0%}")


CLAIM = Claim(
    name="twelve-d-squared",
    statement="The layers of a decoder have 12 d^2 L parameters.",
    source="2001.08361, section 2.1",
    published="12",
    kind="exact",
    size="any",
    minutes=0.01,
    measure=measure,
)
