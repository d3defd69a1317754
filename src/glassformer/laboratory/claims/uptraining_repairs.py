"""What fewer heads of keys are made of, and what a little training then repairs."""

from __future__ import annotations

from glassformer.laboratory.claims.bench import POOL, Bench
from glassformer.laboratory.claims.claim import Claim, Figure, Outcome, sampled
from glassformer.laboratory.uptraining import KEPT, MODEL, WAYS, Curve, UptrainingPlan, all_uptrained, base, gaps, tiny

TOKENS, STEPS, SEEDS = 1_000_000, 12, 3
CLOSE = 0.02
"""Nats: what a gap may be that is called closed."""


def measure(bench: Bench) -> Outcome:
    plan = UptrainingPlan(tokens=TOKENS, steps=STEPS, every=STEPS)
    plan = tiny(plan) if bench.tiny else plan
    curves: list[Curve] = []
    seeds = range(bench.seeds or bench.scaled(SEEDS, 2))
    for seed in seeds:
        name = f"uptraining-{plan.tokens}-{seed}"
        run = base(bench.text.prepared, bench.folder.with_name(POOL) / name, plan, seed)
        curves += all_uptrained(run, bench.text.prepared, bench.folder, plan, seeds=[seed])
    single = {way: gaps(curves, "mqa", way) for way in WAYS}
    before, after = 0, plan.steps

    def worse(one: str, other: str) -> Figure:
        pairs = zip(single[one][after], single[other][after], strict=True)
        return sampled(f"one head, {one} less {other}, after", [a - b for a, b in pairs], "nats", least=0.0)

    figures = [
        worse("first", "mean"), worse("new", "first"),
        sampled("gap of two heads from their means, after", gaps(curves, "gqa:2", "mean")[after], "nats", most=CLOSE),
        *(sampled(f"gap of one head, {way}, {when}", single[way][at], "nats")
          for way in WAYS for when, at in (("before", before), ("after", after))),
        sampled("loss with all four heads, after", [c.losses[after] for c in curves if c.way == KEPT], "nats"),
    ]  # fmt: skip
    return Outcome(
        figures=tuple(figures),
        size=f"{MODEL}, {plan.tokens:,} tokens and {plan.steps} steps more ({plan.share:.0%}), 4 heads to 2 and 1",
        sure=f"{len(seeds)} seeds, each of a base of its own, intervals of 95 %",
    )


CLAIM = Claim(
    name="uptraining-repairs",
    statement="Fewer heads of keys lose least where they are the means of those there were, more as the first of them, "
    "most as new ones; a twentieth of the training closes the gap of grouped heads.",
    source="2305.13245, sections 2.1 and 3.3, table 1 and figure 4",
    published="47.1 with 8 groups against 47.2 with all heads; mean, first, random in this order",
    kind="scoped",
    size="1M parameters, 1M tokens",
    minutes=15,
    measure=measure,
)
