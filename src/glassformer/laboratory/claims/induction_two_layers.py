"""Induction heads form at once, and take two layers."""

from glassformer.laboratory.claims.bench import Bench
from glassformer.laboratory.claims.claim import Claim, Figure, Outcome, sampled
from glassformer.laboratory.induction import MODEL, induction

SEEDS, STEPS, ALONE, TINY_STEPS = 3, 600, 1_000, 2
ONE = MODEL.replace("layers=2", "layers=1")


def measure(bench: Bench) -> Outcome:
    steps, alone = bench.scaled(STEPS, TINY_STEPS), bench.scaled(ALONE, TINY_STEPS)
    seeds = range(bench.seeds or bench.scaled(SEEDS, 2))
    two, one = ([induction(model, seed, n) for seed in seeds] for model, n in ((MODEL, steps), (ONE, alone)))
    figures: list[Figure] = [
        sampled("loss of what has stood before, two layers", [run.final for run in two], "nats", most=0.5),
        sampled("the same, one layer", [run.final for run in one], "nats", least=0.5),
        sampled("attention to the token before, strongest head", [run.previous.score for run in two], least=0.5),
        sampled("prefix match, strongest head", [run.prefix.score for run in two], least=0.5),
        sampled("prefix match, one layer", [run.prefix.score for run in one], most=0.5),
        sampled("layer of the head that matches prefixes", [run.prefix.layer for run in two], least=0.5),
    ]
    falls = [low - high for high, low in (run.fall for run in two) if high is not None and low is not None]
    if len(falls) == len(two):
        figures.append(
            sampled("steps from 90 to 10 % of a guess, over all", [fall / steps for fall in falls], most=0.5)
        )
    return Outcome(
        figures=tuple(figures), size=f"attention alone, width 64, {steps:,} steps; one layer {alone:,}",
        sure=f"{len(seeds)} seeds, intervals of 95 %",
    )  # fmt: skip


CLAIM = Claim(
    name="induction-two-layers",
    statement="Going on with what was read before forms in an abrupt change, by a head that looks at the token before "
    "and one above it that matches prefixes; a single layer has none.",
    source="Olsson et al. 2022, 2209.11895",
    published="a phase change, from two layers on",
    kind="measured",
    size="two layers of width 64",
    minutes=3,
    measure=measure,
)
