"""Uptraining, in full: what docs/uptraining.md shows.

>>> python -m experiments.uptraining --out build/uptraining       # ten minutes of one core; can be resumed
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

from glassformer import machine
from glassformer.laboratory.evidence.timing import MODEL as WIDE
from glassformer.laboratory.evidence.timing import Race, decoding
from glassformer.laboratory.uptraining import (
    MODEL,
    WAYS,
    Curve,
    UptrainingPlan,
    all_uptrained,
    base,
    closed,
    gaps,
    tiny,
)
from glassformer.naming import preset
from glassformer.text import Tokens, prepare

PAGE = Path(__file__).parents[1] / "docs" / "uptraining.md"
CHANGES = ("gqa:2", "mqa")
AFTER = 4096
"""Tokens in the cache where decoding is timed."""
GROUPS = {"+mha": 12, "+gqa:4": 4, "+mqa": 1}
"""KV heads of the model that is timed."""
BEGIN = """\
# Uptraining: fewer KV heads for a model that is trained

```python
single = gf.load("RUN+mqa")  # or smollm2+gqa:1: each head the mean of those whose queries it now serves
```

```console
$ glassformer train RUN+mqa --pretrained --data my_text.txt --steps 100 --out uptrained
$ glassformer compare RUN RUN+gqa:2 RUN+mqa --pretrained --allow-unmatched --data my_text.txt --steps 100 --seeds 3
```

A model with one KV head per query head becomes one with fewer by taking the **mean** of each group's heads, and a
little training closes most of the gap in loss (Ainslie et al. 2023,
[2305.13245](https://arxiv.org/abs/2305.13245)). To get more KV heads, the heads are repeated, which does not change the
model's function. Other conversions, from `glassformer.conversion.heads`: the **first** head of each group, or **new**
heads.
"""


def page(
    curves: Sequence[Curve], plan: UptrainingPlan, speed: Sequence[tuple[str, float, float, float]], measured: str
) -> str:
    """Returns the page."""
    steps = [step for step in curves[0].losses if step in shown(plan)]
    seeds = len({curve.seed for curve in curves})
    kept = [fmean(c.losses[step] for c in curves if not c.change) for step in steps]
    told = [
        BEGIN, "## What is repaired, and when", "",
        f"`{MODEL}` (4 heads), trained on {plan.tokens:,} tokens of python-docs in characters at a constant rate, then",
        f"converted and trained for {plan.steps} steps more, {plan.share:.0%} of its training, while the rate falls.",
        "The gap is the loss of a conversion minus that of the unchanged model at the same step on the same text, in",
        f"nats per character; means of {seeds} seeds, which differ in the order of the text. In brackets the share of",
        "the first gap that is closed.", "",
        "| KV heads | made of | " + " | ".join(f"{step} steps" for step in steps) + " |",
        "|---|---|" + "---|" * len(steps),
        "| 4, unchanged: the loss itself | - | " + " | ".join(f"{loss:.4f}" for loss in kept) + " |",
    ]  # fmt: skip
    for change in CHANGES:
        for way in WAYS:
            gap = gaps(curves, change, way)
            gone = closed(gap)
            cells = [f"{fmean(gap[s]):+.4f}" + (f" ({gone[s]:.0%})" if s else "") for s in steps]
            told.append(f"| {1 if change == 'mqa' else 2} | {way} | " + " | ".join(cells) + " |")
    told += [
        "", *findings(curves, steps), "", "## What is saved", "",
        f"The decode state is counted. The times are of `{WIDE}`",
        f"(12 heads), one thread, {AFTER:,} tokens in the cache, eight tokens a round: the geometric mean of ratios",
        "of nine rounds in turn, with its interval. **They were measured on a loaded machine.**", "",
        f"| KV heads | state of {AFTER:,} tokens, fp32 | over that of 12 heads | time of a token over theirs |",
        "|---|---|---|---|",
    ]  # fmt: skip
    whole = preset(WIDE + "+mha").state_bytes(AFTER)
    times = {change: f"{ratio:.2f} ({low:.2f} to {high:.2f})" for change, ratio, low, high in speed}
    for change, groups in GROUPS.items():
        size = preset(WIDE + change).state_bytes(AFTER)
        told.append(f"| {groups} | {size / 2**20:.1f} MiB | {size / whole:.3f} | {times.get(change, '1')} |")
    told += ["", f"{measured} Repeat it with `python -m experiments.uptraining`; the claim is "
             "[uptraining-repairs](claims.md).", ""]  # fmt: skip
    return "\n".join(told)


def shown(plan: UptrainingPlan) -> list[int]:
    """Returns the steps that have a column."""
    return [0, plan.every, *(plan.steps * n // 4 for n in (1, 2, 4))]


def findings(curves: Sequence[Curve], steps: Sequence[int]) -> list[str]:
    """Returns, for each change, a sentence with the order of its gaps before and after training."""
    told = []
    for change in CHANGES:
        before, after = ({way: fmean(gaps(curves, change, way)[at]) for way in WAYS} for at in (steps[0], steps[-1]))
        order = [" < ".join(sorted(values, key=values.__getitem__)) for values in (before, after)]
        told.append(f"- `{change}`: gaps before are {order[0]}, after the last step {order[1]}.")
    return told


def speeds() -> list[tuple[str, float, float, float]]:
    """Returns, for each change, (change, ratio, low, high): the time of decoding a token over that of multi-head
    attention, with its interval."""
    found = []
    for change in list(GROUPS)[1:]:

        def sides(scale: int, change: str = change):
            return decoding(change, AFTER), decoding("+mha", AFTER)

        figure = Race(change, sides).figure(9, 1)
        assert figure.low is not None and figure.high is not None
        found.append((change, figure.value, figure.low, figure.high))
    return found


def measure(text: Tokens, folder: Path, plan: UptrainingPlan, seeds: int) -> list[Curve]:
    run = base(text, folder / "base", plan)
    return all_uptrained(run, text, folder, plan, CHANGES, range(seeds))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.uptraining", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("build/uptraining"), help="the folder of the runs")
    parser.add_argument("--data", default="python-docs")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--tiny", action="store_true", help="a few steps, to see that it runs")
    given = parser.parse_args(arguments)
    plan = tiny(UptrainingPlan()) if given.tiny else UptrainingPlan()
    curves = measure(prepare(given.data, "char"), given.out, plan, given.seeds)
    here = machine.machine()
    when = datetime.now(UTC).date().isoformat()
    measured = f"Measured {when}: {here['processor']}, torch {here['torch']}."
    given.page.write_text(page(curves, plan, [] if given.tiny else speeds(), measured), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
