"""What a token meets of a mixture of experts."""

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact
from glassformer.naming import preset

MODELS = {"mixtral-8x7b": (46.7e9, 12.9e9), "deepseek-v3": (671e9, 37e9)}
"""Published parameters, and those that a token meets."""
TOLERANCE = 0.02


def measure(bench: Bench) -> Outcome:
    figures = []
    for name, published in MODELS.items():
        config = preset(name)
        for what, found, said in zip(
            ("parameters", "active parameters"), (config.num_params(), config.active_params()), published, strict=True
        ):
            figures.append(exact(f"{what} of {name}", found, least=said * (1 - TOLERANCE), most=said * (1 + TOLERANCE),
                                 published=said))  # fmt: skip
    return Outcome(figures=tuple(figures), size=", ".join(MODELS), sure=f"counted; within {TOLERANCE:.0%}")


CLAIM = Claim(
    name="experts-active",
    statement="Of a mixture of experts a token meets few: 12.9B of 46.7B in Mixtral, 37B of 671B in DeepSeek-V3.",
    source="2401.04088; 2412.19437",
    published="12.9B of 46.7B, 37B of 671B",
    kind="exact",
    size="any",
    minutes=0.01,
    measure=measure,
)
