"""The conditions of a verdict: size, budget, text and learning rate. Under other conditions the result may differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from glassformer.figures import si
from glassformer.runs.results import Results, RunResult
from glassformer.runs.wording import UNITS
from glassformer.thresholds import WORTH_SAYING
from glassformer.training import Recipe


def terms(results: Results, runs: Sequence[RunResult], names: Sequence[str]) -> str:
    """Returns the conditions as text: `at 793k parameters in layers, 200k tokens of python-docs, lr 1.3e-3`. If two
    arms differ in a value, both are given in the order of `names`. Arms that have barely learned add `barely
    trained`."""
    barely = "barely trained" if barely_learned(runs, names) else ""
    parts = [_sizes(runs, names), _budget(results), _rates(results, names), barely]
    return "at " + ", ".join(part for part in parts if part)


def barely_learned(runs: Sequence[RunResult], names: Iterable[str]) -> list[str]:
    """Returns the names of the arms for which most runs have barely learned from context."""
    found = []
    for name in names:
        ended = [run.validation.barely_learned for run in runs if run.name == name and run.validation is not None]
        if 2 * sum(ended) > len(ended):
            found.append(name)
    return found


def unit(runs: Sequence[RunResult]) -> str:
    """Returns the unit of the held-out loss as text; empty if the objective is not in nats."""
    return UNITS["validation.loss"] if Recipe.of(**runs[0].recipe).objective.in_nats else ""


def _sizes(runs: Sequence[RunResult], names: Sequence[str]) -> str:
    """Returns the models' sizes as text: without the vocabulary's parameters, as in scaling laws, if every run records
    that number."""
    arms = [next((run for run in runs if run.name == name), None) for name in names]
    inner = [run.parameters_without_embeddings for run in arms if run is not None]
    whole = [run.parameters for run in arms if run is not None]
    sizes = [n for n in (whole if None in inner else inner) if n]
    if not sizes:
        return ""
    unit = "parameters" if None in inner else "parameters in layers"
    if max(sizes) <= (1 + WORTH_SAYING) * min(sizes):
        return f"{si(fmean(sizes))} {unit}"
    return f"{' and '.join(si(n) for n in sizes)} {unit}"


def _budget(results: Results) -> str:
    budget = results.budget
    text = f" of {results.data.name}" if results.data.name else ""
    if budget.match == "flops" and budget.tokens is not None:
        return f"the FLOPs of {si(budget.tokens)} tokens{text}"
    minutes = "minute" if budget.minutes == 1 else "minutes"
    units = (("tokens", "tokens"), ("minutes", minutes), ("flops", "training FLOPs"))
    return next((f"{si(n)} {u}{text}" for key, u in units if (n := getattr(budget, key)) is not None), text.strip())


def _rates(results: Results, names: Sequence[str]) -> str:
    given = [rate for name in names if (rate := results.budget.learning_rates.get(name)) is not None]
    rates = list(dict.fromkeys(rate_words(rate) for rate in given))
    return f"lr {' and '.join(rates)}" if rates else ""


def rate_words(rate: float) -> str:
    """Returns a learning rate as text: 0.0013 is `1.3e-3`."""
    mantissa, exponent = f"{rate:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
