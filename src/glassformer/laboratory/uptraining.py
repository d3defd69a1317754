"""Uptraining: a model with one KV head per query head, converted to fewer KV heads and trained for a short while
(Ainslie et al. 2023, 2305.13245).

The base is trained at a constant learning rate, so that its training can continue; every conversion of it, and the base
itself, are then trained for an equal number of steps on the same text with a decaying rate. A gap is the loss of a
conversion minus that of the base at the same step: the cost of fewer heads without the gain of longer training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from glassformer.conversion import adapt
from glassformer.conversion.heads import OfHeads, first, mean, new
from glassformer.loaded import Loaded
from glassformer.naming import preset
from glassformer.naming.changes import change_of
from glassformer.text import Tokens
from glassformer.training import Pretrained, Run, evaluate, train
from glassformer.training.checkpoint import latest

MODEL = "llama@1m+mha"
WAYS: dict[str, OfHeads] = {"mean": mean, "first": first, "new": new}
"""Name of a conversion -> function that makes the remaining KV heads from the old ones."""
KEPT = "base"
"""Name of the arm whose KV heads are unchanged."""


@dataclass(frozen=True)
class UptrainingPlan:
    """Options of an uptraining experiment: lengths of training, and steps between evaluations."""

    tokens: int = 1_000_000
    """Training tokens of the base."""
    steps: int = 48
    every: int = 6
    context: int = 256
    batch_size: int = 16
    evaluation_tokens: int = 32768
    options: dict[str, Any] | None = None
    """Further options of every recipe."""

    @property
    def share(self) -> float:
        """Length of uptraining as a share of the base's training."""
        return self.steps * self.context * self.batch_size / self.tokens

    def recipe(self, seed: int, **own: Any) -> dict[str, Any]:
        common = {"context": self.context, "batch_size": self.batch_size, "evaluation_tokens": self.evaluation_tokens}
        return {**common, **(self.options or {}), "seed": seed, **own}


@dataclass(frozen=True)
class Curve:
    """Loss curve of one uptrained model: held-out loss by steps, from step 0."""

    change: str
    """Change of the heads, `gqa:2` or `mqa`; empty for the base."""
    way: str
    seed: int
    losses: dict[int, float]


def base(text: Tokens, folder: Path, plan: UptrainingPlan, seed: int = 0, model: str = MODEL) -> Run:
    """Trains the base model, which conversions of its heads start from; resumes if interrupted."""
    recipe = plan.recipe(seed, tokens=plan.tokens, schedule={"kind": "constant"})
    return train(preset(model), text, recipe, folder, latest(folder) is not None)


def uptrained(
    run: Run, text: Tokens, folder: Path, plan: UptrainingPlan, change: str = "", way: str = KEPT, seed: int = 0
) -> Curve:
    """Converts the KV heads of the base `run` and continues its training; returns the loss curve."""
    start = Loaded(run.model, run.config, run.tokenizer)
    if change:
        start = adapt(start, change_of(change)(run.config), WAYS[way])
    begun = evaluate(start.model, text, plan.context, run.how, plan.evaluation_tokens, plan.batch_size)
    recipe = plan.recipe(
        seed, steps=plan.steps, learning_rate=run.learning_rate, evaluate_every=plan.every,
        schedule={"kind": "wsd", "warmup": 0.05, "decay": 0.5, "shape": "linear"},
    )  # fmt: skip
    name = f"{change.replace(':', '') or KEPT}-{way}-seed{seed}"
    place = folder / name
    done = train(
        start.config, text, recipe, place, latest(place) is not None, vocab_size=start.config.vocab_size,
        pretrained=Pretrained.of(start.model, name),
    )  # fmt: skip
    looks = {row["step"]: row["validation"]["loss"] for row in done.metrics if "validation" in row}
    return Curve(change, way, seed, {0: begun["loss"], **looks})


def all_uptrained(
    run: Run,
    text: Tokens,
    folder: Path,
    plan: UptrainingPlan,
    changes: Sequence[str] = ("gqa:2", "mqa"),
    seeds: Sequence[int] = (0, 1),
) -> list[Curve]:
    """Returns, for every seed, the curves of the base and of each change in `changes` by each conversion in `WAYS`."""
    arms = [("", KEPT), *((change, way) for change in changes for way in WAYS)]
    return [uptrained(run, text, folder, plan, change, way, seed) for seed in seeds for change, way in arms]


def gaps(curves: Sequence[Curve], change: str, way: str) -> dict[int, list[float]]:
    """Returns {step: losses of a converted model minus those of the base at this step, by seed}."""
    kept = {curve.seed: curve.losses for curve in curves if curve.way == KEPT}
    own = [curve for curve in curves if (curve.change, curve.way) == (change, way)]
    return {step: [curve.losses[step] - kept[curve.seed][step] for curve in own] for step in own[0].losses}


def closed(gap: dict[int, list[float]]) -> dict[int, float]:
    """Returns {step: share of the initial gap, that before uptraining, which training has closed}."""
    whole = fmean(gap[0])
    return {step: 1 - fmean(values) / whole for step, values in gap.items()}


def tiny(plan: UptrainingPlan) -> UptrainingPlan:
    """Returns the plan shortened to a few steps, to test that it runs."""
    return replace(plan, tokens=64, steps=2, every=1, context=8, batch_size=2, evaluation_tokens=64)
