"""One layer of linear attention can be one step of gradient descent."""

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact
from glassformer.laboratory.icl import exact_step

SIZES = ((5, 10), (10, 20), (3, 50))
TOLERANCE = 1e-10
"""Of answers of about 2, in fp64."""


def measure(bench: Bench) -> Outcome:
    found = [exact_step(dims, examples) for dims, examples in SIZES]
    figures = tuple(
        exact(f"largest difference, {one.examples} examples in {one.dims} dimensions", one.apart, most=TOLERANCE)
        for one in found
    )
    return Outcome(figures=figures, size="256 prompts of each size, fp64", sure=f"to {TOLERANCE:g}")


CLAIM = Claim(
    name="icl-gradient-step",
    statement="The weights of one layer of linear attention can be written down so that it answers a prompt of "
    "examples as one step of gradient descent does.",
    source="von Oswald et al. 2022, 2212.07677, proposition 1",
    published="equal",
    kind="exact",
    size="any",
    minutes=0.01,
    measure=measure,
)
