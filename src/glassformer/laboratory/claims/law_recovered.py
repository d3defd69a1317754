"""Whether a fit finds the law that the points were made of."""

import numpy as np

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Outcome, exact
from glassformer.laboratory.law import fit_scaling_law

LAW = {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.3392, "beta": 0.2849}
TOLERANCE = 1e-5


def measure(bench: Bench) -> Outcome:
    sizes, tokens = (grid.ravel() for grid in np.meshgrid(np.geomspace(1e7, 1e10, 6), np.geomspace(1e9, 1e12, 6)))
    loss = LAW["E"] + LAW["A"] * sizes ** -LAW["alpha"] + LAW["B"] * tokens ** -LAW["beta"]
    law = fit_scaling_law({"params": sizes.tolist(), "tokens": tokens.tolist(), "loss": loss.tolist()})
    figures = [
        exact(f"{name}, relative error", abs(float(law.values[name]) / value - 1), most=TOLERANCE, published=0)
        for name, value in LAW.items()
    ]
    return Outcome(figures=tuple(figures), size="36 runs without noise", sure=f"to {TOLERANCE:g}")


CLAIM = Claim(
    name="law-recovered",
    statement="Losses of a grid of runs determine the five numbers of Chinchilla's law.",
    source="2203.15556, section 3.3",
    published="E 1.69, A 406.4, B 410.7, 0.34, 0.28",
    kind="exact",
    size="36 runs without noise",
    minutes=0.1,
    measure=measure,
)
