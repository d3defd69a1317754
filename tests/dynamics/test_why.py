"""Every rule on runs written by hand, each condition separately, hostile rows; and failures planted in real training.

A run written by hand is healthy except for the change of a test: four layers of two heads, observed every ten steps.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from glassformer.dynamics import Diagnosis, diagnose
from glassformer.dynamics.diagnosis import Cause
from glassformer.dynamics.records import LAST_STEP, read_records
from glassformer.dynamics.rules import OF_A_DEAD_LAYER, _roots_first
from glassformer.dynamics.watch import Moment
from glassformer.dynamics.weights import named_matrices
from glassformer.errors import RequestError
from glassformer.introspection import sites
from glassformer.model import Model
from glassformer.naming import preset
from glassformer.parts.core.base import to_plain
from glassformer.text import Batches, TextData, prepare
from glassformer.training import Callback, Recipe, train
from glassformer.training.objectives import base
from glassformer.training.overrides import with_recipe
from glassformer.training.progress import read_metrics
from glassformer.training.recipe import WATCH
from glassformer.training.state import Training
from tests.refused import refused

STEPS, EVERY, LAYERS, HEADS, VOCABULARY, RATE = 200, 10, 4, 2, 65, 1e-3
CONFIG = preset(f"llama@1m+layers={LAYERS}+d_model=32+heads={HEADS}+vocab_size={VOCABULARY}+context=32")
LARGE_EPS = {"kind": "adamw", "eps": 1e-2}
RECIPE: dict[str, Any] = {"optimizer": {"kind": "adamw", "eps": 1e-8}, "clip": 1.0, "weight_decay": 0.1}
MATRICES = {"mixer.q": HEADS, "mixer.k": HEADS, "mixer.v": HEADS, "mixer.out": 1, "ffn.up": 1, "ffn.down": 1}

Change = Callable[[str, str, int, int, float], float]
"""(statistic, where, step, head, healthy value) -> the value."""


def same(statistic: str, where: str, step: int, head: int, value: float) -> float:
    return value


def metrics(loss: Callable[[int, float], float] = lambda step, loss: loss, warm: bool = True) -> list[dict[str, Any]]:
    """Returns rows of a run whose loss falls from 4.2 to 2, with noise."""
    noise = np.random.default_rng(0).normal(size=STEPS + 1) * 0.05
    return [
        {"step": t, "loss": loss(t, 2 + 2.2 * math.exp(-t / 40) + noise[t]), "grad_norm": 0.9,
         "learning_rate": RATE * (min(1, t / 10) if warm else 1.0)}
        for t in range(1, STEPS + 1)
    ]  # fmt: skip


def records(
    change: Change = same, *events: dict[str, Any], steps: int = STEPS, every: int = EVERY
) -> list[dict[str, Any]]:
    """Returns the rows that a watch would have written."""
    noise = random.Random(0)

    def value(statistic: str, where: str, step: int, healthy: float, heads: int = 1) -> float | list[float]:
        values = [change(statistic, where, step, n, healthy * (1 + 0.05 * noise.gauss(0, 1))) for n in range(heads)]
        return values if heads > 1 else values[0]

    rows = []
    for step in [1, *range(every, steps + 1, every)]:
        grown = math.sqrt(1 + step / 20)
        found: dict[str, dict[str, Any]] = {}
        for where, heads in [
            *((f"layers.{n}.{name}", heads) for n in range(LAYERS) for name, heads in MATRICES.items()),
            ("embed", 1), ("head", 1),
        ]:  # fmt: skip
            for statistic, healthy in (
                ("weight_norm", grown), ("gradient_norm", 0.04), ("gradient_rms", 1e-3),
                ("update_ratio", 0.003 * min(1, step / 10)),
            ):  # fmt: skip
                found.setdefault(statistic, {})[where] = value(statistic, where, step, healthy, heads)
        for layer in range(LAYERS):
            at = f"layers.{layer}"
            for statistic, where, healthy, heads in (
                ("max_attention_logit", f"{at}.mixer", 2 * grown, HEADS),
                ("attention_entropy", f"{at}.mixer", 0.7, HEADS),
                ("token_cosine", f"{at}.resid_post", 0.4, 1), ("relative_residual", f"{at}.resid_post", 0.7, 1),
                ("residual_rms", f"{at}.resid_post", 0.1 * grown * (layer + 1), 1),
                ("activation_effective_rank", f"{at}.resid_post", 20.0, 1), ("dead_units", f"{at}.ffn.hidden", 0.05, 1),
            ):  # fmt: skip
                found.setdefault(statistic, {})[where] = value(statistic, where, step, healthy, heads)
        found["log_z"] = {"logits": value("log_z", "logits", step, math.log(VOCABULARY))}
        rows.append({"step": step, "statistics": found})
    return sorted([*rows, *events], key=lambda row: row["step"])


def named(diagnosis: Diagnosis, *words: str, layer: int | None = None, among: int = 3) -> bool:
    """Returns True if one of the first causes has one of these words in its name and is in that layer."""
    return any(
        any(word in cause.cause for word in words) and (layer is None or cause.layer == layer)
        for cause in diagnosis.causes[:among]
    )


# Healthy


def test_a_healthy_run_has_nothing_wrong():
    found = diagnose(metrics(), records(), CONFIG, RECIPE)
    assert found.to_dict() == {"verdict": "nothing wrong", "causes": [], "moved": [], "notes": []}
    assert "Nothing wrong was found in 200 steps; the loss went from 4.1" in found.paragraph()


def test_run_without_statistics_is_judged_by_its_loss_with_a_note():
    found = diagnose(metrics(), [], CONFIG, RECIPE)
    assert found.verdict == "nothing wrong"
    assert "--watch" in found.paragraph()
    assert "--watch" not in diagnose(metrics(), records(), CONFIG, RECIPE).paragraph()


def test_nothing_to_diagnose_is_refused():
    with refused(code="missing", field="steps"):
        diagnose([], [], CONFIG, RECIPE)


def test_small_passing_spike_is_reported_without_a_cause():
    found = diagnose(metrics(lambda t, loss: loss + 0.5 * (t == 150)), records(), CONFIG, RECIPE)
    assert found.verdict == "nothing wrong"
    assert "at step 150, passed without a trace" in found.paragraph()


NOISY = [
    {"step": t, "event": "spike", "what": "grad_norm", "value": 50.0, "sigmas": 60.0, "batch": ["x"]}
    for t in (90, 100, 110, 120, 130)
]
"""The gradient norm spiked."""


def test_spikes_of_the_gradient_norm_are_reported():
    found = diagnose(metrics(), records(same, *NOISY), CONFIG, RECIPE)
    assert found.verdict == "nothing wrong"
    said = "The gradient norm spiked at steps 90, 100, 110, 120 and 130, by up to 60.0 sigma; the loss did not follow."
    assert said in found.paragraph()
    assert said in found.to_dict()["notes"]
    followed = diagnose(metrics(lambda t, loss: loss + 0.5 * (t == 132)), records(same, *NOISY), CONFIG, RECIPE)
    assert "; the loss followed after 1 of them." in followed.paragraph()
    one = diagnose(metrics(lambda t, loss: loss + 0.5 * (t == 132)), records(same, NOISY[-1]), CONFIG, RECIPE)
    assert "The gradient norm spiked at step 130, by 60.0 sigma; the loss followed." in one.paragraph()


def test_spikes_of_the_gradient_norm_count_together_with_those_of_the_loss():
    """Updates as of a learning rate far too large, and three spikes: spikes of only the gradient norm prove nothing."""
    alone = diagnose(metrics(), records(per_step, *NOISY), CONFIG, RECIPE)
    assert alone.verdict == "nothing wrong"
    beside = metrics(lambda t, loss: loss + 0.5 * (t == 131))
    assert diagnose(beside, records(per_step), CONFIG, RECIPE).verdict == "nothing wrong"
    (cause,) = diagnose(beside, records(per_step, *NOISY), CONFIG, RECIPE).causes
    assert cause.cause == "learning rate above the stable edge"
    assert "the gradient norm spiked 5 times" in cause.why


def test_the_batch_of_a_spike_that_passed_is_shown():
    texts = ["the\ncat " * 50, "the dog"]
    spike = {"step": 150, "event": "spike", "what": "loss", "value": 2.6, "sigmas": 7.5, "batch": texts}
    found = diagnose(metrics(lambda t, loss: loss + 0.5 * (t == 150)), records(same, spike), CONFIG, RECIPE)
    assert found.verdict == "nothing wrong"
    assert 'the largest losses start with "the cat the cat' in found.paragraph()
    assert '"the dog".' in found.paragraph()
    assert len(found.paragraph()) < 500
    assert found.batch == tuple(texts)


# Every rule: all its conditions together, and each one separately


def at(statistic: str, where: str, value: float, since: int = 100, head: int | None = None) -> Change:
    def change(name: str, place: str, step: int, number: int, healthy: float) -> float:
        hit = name == statistic and place.endswith(where) and step >= since and head in (None, number)
        return value if hit else healthy

    return change


def both(*changes: Change) -> Change:
    def change(name: str, place: str, step: int, head: int, value: float) -> float:
        for one in changes:
            value = one(name, place, step, head, value)
        return value

    return change


def times(statistic: str, where: str, factor: float, since: int = 100, head: int | None = None) -> Change:
    def change(name: str, place: str, step: int, number: int, healthy: float) -> float:
        hit = name == statistic and where in place and step >= since and head in (None, number)
        return healthy * factor if hit else healthy

    return change


def per_step(name: str, place: str, step: int, head: int, value: float) -> float:
    """Returns update ratios as of a learning rate thirty times too large: 0.4 at step 1, then 0.05."""
    return {1: 0.4}.get(step, 0.05) if name == "update_ratio" else value


BLOWN = times("residual_rms", "", 10000, since=20)
HUGE, HUGE_ELSEWHERE = (at("max_attention_logit", "layers.2.mixer", 5e3, head=n) for n in (1, 0))
NARROW = at("attention_entropy", "layers.2.mixer", 0.01, head=1)
LARGE, NARROWER = at("max_attention_logit", "layers.1.mixer", 300), at("attention_entropy", "layers.1.mixer", 0.06)
STARVED = both(*(times("gradient_norm", f"layers.{n}.mixer.{m}", 1e-6, 1) for n in (2, 3) for m in "qk"))
ALIKE = both(at("token_cosine", "layers.1.resid_post", 0.99, 1), at("token_cosine", "layers.2.resid_post", 0.99, 1))
SILENT = at("dead_units", "layers.2.ffn.hidden", 1.0)
NO_FFN_GRADIENT = both(times("gradient_norm", "layers.2.ffn.up", 0.0), times("gradient_norm", "layers.2.ffn.down", 0.0))
NO_GRADIENT = times("gradient_norm", "layers.2.", 0.0)
LITTLE_GRADIENT = times("gradient_norm", "layers.2.", 1e-3)
FALLEN = times("weight_norm", "layers.2.", 0.2)
AS_IT_CAME = both(
    *(at(name, f"layers.{n}.resid_post", 0.5) for n in (1, 2)
      for name in ("residual_rms", "token_cosine", "relative_residual", "activation_effective_rank"))
)  # fmt: skip
SWALLOWED = both(times("gradient_rms", "", 1e-5, 1), times("gradient_norm", "", 1e-5, 1))
SLOW = times("update_ratio", "", 1e-2, 1)
FAR_LOG_Z = at("log_z", "logits", 15.0)
LARGE_HEAD = both(*(times("weight_norm", "head", 1.2 ** (n + 1) / 1.2**n, 60 + 10 * n) for n in range(14)))
FALLING = both(*(times("gradient_norm", f"layers.{n}.", 100.0 ** (n - 3), 1) for n in range(3)))
TINY = both(*(times("gradient_rms", f"layers.{n}.", 100.0 ** (n - 3), 1) for n in range(3)))
JUMP = times("weight_norm", "layers.2.mixer.q", 100, head=1)

RULES: dict[str, tuple[str, int | None, Change, list[Change]]] = {
    "entropy collapse": ("entropy collapse", 2, both(HUGE, NARROW), [HUGE, NARROW, both(HUGE_ELSEWHERE, NARROW)]),
    "logit growth": ("attention-logit growth", 1, both(LARGE, NARROWER), [LARGE, NARROWER]),
    "rank collapse": ("rank collapse", 2, both(ALIKE, STARVED), [ALIKE, STARVED]),
    "dead units": ("dead units", 2, both(SILENT, NO_FFN_GRADIENT), [SILENT, NO_FFN_GRADIENT]),
    "dead layer": ("dead layer", 2, NO_GRADIENT, []),
    "dead layer, nearly": ("dead layer", 2, both(LITTLE_GRADIENT, AS_IT_CAME), [LITTLE_GRADIENT, AS_IT_CAME]),
    "dead layer, revived a little": ("dead layer", 2, both(LITTLE_GRADIENT, FALLEN), []),
    "eps": ("gradient RMS near Adam's eps", None, both(SWALLOWED, SLOW), [SWALLOWED, SLOW]),
    "log Z": ("output-logit divergence", None, both(FAR_LOG_Z, LARGE_HEAD), [FAR_LOG_Z, LARGE_HEAD]),
    "vanishing": ("gradients vanish", 0, both(FALLING, TINY), [FALLING]),
    "one head": ("one head's weights moved by themselves", 2, JUMP, [times("weight_norm", "", 100)]),
    "one matrix": ("one matrix moved by itself", 1, times("weight_norm", "layers.1.ffn.down", 0.01), []),
    "learning rate": ("learning rate above", None, both(per_step, BLOWN), [per_step, BLOWN]),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_a_rule_finds_its_failure_first(name: str):
    cause, layer, change, _ = RULES[name]
    found = diagnose(metrics(), records(change), CONFIG, RECIPE)
    assert named(found, cause, layer=layer, among=1 if name != "logit growth" else 3), found.paragraph()
    assert cause in found.verdict or cause in found.paragraph()
    for one in (one for cause in found.causes for one in cause.tries):
        name, _, value = one.removeprefix("recipe.").partition("=")
        if one.startswith("recipe."):
            with_recipe(Recipe.of(tokens=1), {name: value})
        else:
            preset(f"gpt2@1m+relu+{one.removeprefix('+')}")
    assert found.causes[0].tries
    assert found.to_pandas()["cause"].tolist() == [one.cause for one in found.causes]
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.parametrize(("name", "part"), [(name, i) for name, rule in RULES.items() for i in range(len(rule[3]))])
def test_single_abnormal_value_is_not_an_alarm(name: str, part: int):
    found = diagnose(metrics(), records(RULES[name][3][part]), CONFIG, RECIPE)
    assert found.verdict == "nothing wrong", found.paragraph()


def test_matrices_initialised_at_zero_are_not_an_alarm():
    """Their first update is inf of them."""
    begun = both(times("update_ratio", "mixer.out", math.inf, 1), times("update_ratio", "ffn.down", math.inf, 1))
    first = [row for row in records(begun) if row["step"] == 1] + [row for row in records() if row["step"] > 1]
    assert diagnose(metrics(), first, CONFIG, RECIPE).verdict == "nothing wrong"
    found = diagnose(metrics(), records(both(per_step, begun, BLOWN)), CONFIG, RECIPE)
    assert named(found, "learning rate above", among=1)
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.parametrize("until", [60, 120])
def test_early_passing_symptoms_are_not_a_collapse(until: int):
    """Tokens alike and starved queries are common in the first third of healthy runs, and in a new run."""

    def early(name: str, place: str, step: int, head: int, value: float) -> float:
        return both(ALIKE, STARVED)(name, place, step, head, value) if step < until else value

    assert diagnose(metrics(), records(early), CONFIG, RECIPE).verdict == "nothing wrong"
    beginning = [row for row in records(both(ALIKE, STARVED)) if row["step"] <= EVERY]
    assert diagnose(metrics()[:15], beginning, CONFIG, RECIPE).verdict == "nothing wrong"


def test_jump_of_a_head_is_reported_with_site_step_and_sigma():
    (cause,) = diagnose(metrics(), records(JUMP), CONFIG, RECIPE).causes
    assert cause.to_dict() | {"confidence": 0, "sigmas": 0} == {
        "cause": "one head's weights moved by themselves", "layer": 2, "site": "layers.2.mixer.q",
        "statistic": "weight_norm[1]", "step": 100, "sigmas": 0, "confidence": 0, "try": ["recipe.seed=1"],
    }  # fmt: skip
    # by hand: the median and the MAD of the logarithms before, each step 1, 10, ..., 90
    norms = [row["statistics"]["weight_norm"]["layers.2.mixer.q"][1] for row in records(JUMP) if row["step"] <= 100]
    logs = np.log(norms)
    middle = np.median(logs[:-1])
    spread = 1.4826 * np.median(np.abs(logs[:-1] - middle))
    assert cause.sigmas == pytest.approx((logs[-1] - middle) / spread)


def test_going_back_is_offered_where_a_spike_would_have_made_it_act():
    for change in (JUMP, NO_GRADIENT):
        event = {"step": 101, "event": "spike", "what": "grad_norm", "value": 9.0, "sigmas": 20.0}
        assert "recipe.on_spike=roll_back" not in diagnose(metrics(), records(change), CONFIG, RECIPE).causes[0].tries
        assert (
            "recipe.on_spike=roll_back" in diagnose(metrics(), records(change, event), CONFIG, RECIPE).causes[0].tries
        )
        late = {**event, "step": 190}
        assert (
            "recipe.on_spike=roll_back"
            not in diagnose(metrics(), records(change, late), CONFIG, RECIPE).causes[0].tries
        )


def test_every_cause_offers_the_same_learning_rate():
    """Below the edge: first updates of four times the weights at the peak of 1e-3 become the usual 0.3."""
    sick = records(both(per_step, BLOWN, HUGE, NARROW, LARGE, NARROWER))
    found = diagnose(metrics(), sick, CONFIG, RECIPE)
    assert {"learning rate above the stable edge", "attention-entropy collapse", "attention-logit growth"} <= {
        cause.cause for cause in found.causes
    }
    rates = {one for cause in found.causes for one in cause.tries if one.startswith("recipe.learning_rate=")}
    assert rates == {"recipe.learning_rate=7e-5"}, rates


@pytest.mark.parametrize("every", [5, WATCH])
def test_a_layer_that_outgrows_the_next_is_named_and_not_the_next(every: int):
    """The FFN of layer 2 grows by 6 % a step from step 110 on; layer 3 then gets hardly any gradient, because layer 2
    dominates the stream."""

    def grow(name: str, place: str, step: int, head: int, value: float) -> float:
        times = 1.06 ** max(0, step - 110)
        if name == "weight_norm" and place.startswith("layers.2.ffn"):
            return value * times
        if name == "residual_rms" and place in ("layers.2.resid_post", "layers.3.resid_post"):
            return 0.4 * times
        if name in ("token_cosine", "relative_residual", "activation_effective_rank") and step > 125:
            return 0.5
        return value * times**-2 if name.startswith("gradient") and place.startswith("layers.3.") else value

    found = diagnose(metrics(), records(grow, every=every), CONFIG, RECIPE)
    assert found.causes[0].layer == 2, found.paragraph()
    assert found.causes[0].cause == "one matrix moved by itself"
    assert not named(found, "dead layer")


def test_clipping_queries_and_keys_is_not_corruption():
    shrunk = times("weight_norm", "layers.2.mixer.q", 0.1, head=1)
    assert named(
        diagnose(metrics(), records(shrunk), CONFIG, RECIPE), "one head's weights moved by themselves", layer=2
    )
    assert diagnose(metrics(), records(shrunk), CONFIG, {**RECIPE, "qk_clip": 100.0}).verdict == "nothing wrong"


def test_missing_warm_up_is_reported_only_for_post_norms():
    post = preset(f"gpt2@1m+post+layers={LAYERS}+d_model=32+heads={HEADS}+vocab_size={VOCABULARY}+context=32")
    sick = records(both(ALIKE, STARVED))
    found = diagnose(metrics(warm=False), sick, post, RECIPE)
    assert named(found, "warm-up missing", layer=LAYERS - 1, among=1)
    assert "recipe.warmup=0.1" in found.causes[0].tries
    assert not named(diagnose(metrics(warm=True), sick, post, RECIPE), "warm-up")
    assert not named(diagnose(metrics(warm=False), sick, CONFIG, RECIPE), "warm-up")
    assert diagnose(metrics(warm=False), records(), post, RECIPE).verdict == "nothing wrong"


def test_chosen_large_eps_is_called_too_large():
    found = diagnose(metrics(), records(SLOW), CONFIG, {**RECIPE, "optimizer": LARGE_EPS})
    assert found.causes[0].cause == "Adam's eps too large"
    assert found.causes[0].tries == ("recipe.adam_eps=1e-8",)


def test_a_bad_batch_is_shown():
    spike = {"step": 150, "event": "spike", "what": "loss", "value": 7.0, "sigmas": 90.0, "batch": ["@" * 99]}
    found = diagnose(metrics(lambda t, loss: loss + 5 * (t == 150)), records(same, spike), CONFIG, RECIPE)
    (cause,) = found.causes
    assert not found.moved
    assert (cause.cause, cause.step, cause.batch) == ("bad batch", 150, ("@" * 99,))
    assert cause.sigmas is not None
    assert cause.sigmas > 50
    assert "repeats itself" in cause.why


def test_spike_after_a_jump_of_weights_is_not_a_bad_batch():
    found = diagnose(
        metrics(lambda t, loss: loss + 5 * (t == 100)), records(both(JUMP, at("", "", 0))), CONFIG, RECIPE
    )  # fmt: skip
    assert found.causes[0].cause == "one head's weights moved by themselves"


@pytest.mark.parametrize(
    ("site", "layer", "place"),
    [
        ("layers.2.ffn.hidden", 2, "layers.2.ffn.hidden"),
        ("layers.1.mixer.q (its weights)", 1, "layers.1.mixer.q"),
        ("logits", None, "logits"),
        (None, None, None),
    ],
)
def test_nan_value_is_a_cause_with_its_site(site: str | None, layer: int | None, place: str | None):
    event = {"step": 201, "event": "not_finite", "what": "loss", "value": math.nan, "site": site}
    found = diagnose(metrics(), records(same, event), CONFIG, RECIPE)
    named = "weights that are not numbers at" if "weights" in str(site) else "not a number at"
    assert found.verdict.startswith(f"the loss became nan at step 201: {named}")
    cause = found.causes[0]
    assert (cause.layer, cause.site, cause.step) == (layer, place, 201)
    assert cause.confidence > 0.9


@pytest.mark.parametrize("finite", [True, False, None])
def test_precision_is_the_cause_if_the_step_is_finite_in_float32(finite: bool | None):
    event = {"step": 201, "event": "not_finite", "what": "loss", "value": math.nan, "site": "logits",
             **({} if finite is None else {"finite_in_float32": finite})}  # fmt: skip
    cause = diagnose(metrics(), records(same, event), CONFIG, RECIPE).causes[0]
    assert ("precision too low" in cause.cause) == bool(finite)
    assert ("recipe.dtype=float32" in cause.tries) == bool(finite)


@pytest.mark.parametrize("rate", [RATE, 3000 * RATE])
@pytest.mark.parametrize("steps", [4, 8])
def test_a_run_of_few_steps_that_climbed_before_the_end_is_not_called_calm(steps: int, rate: float):
    """A rate of 10 gives 4.6, 18, 74, 294, inf."""
    rows = [{**row, "loss": 4.6 * 4 ** (row["step"] - 1), "learning_rate": rate} for row in metrics()[:steps]]
    event = {"step": steps + 1, "event": "not_finite", "what": "grad_norm", "value": math.inf, "site": "embed"}
    found = diagnose(rows, [event], CONFIG, RECIPE)
    assert "calm" not in found.paragraph() and "dtype" not in found.paragraph()
    first = found.causes[0]
    assert (first.cause, first.confidence > 0.6) == ("learning rate above the stable edge", rate > RATE)


def test_skipped_nan_step_is_not_a_failure():
    event = {"step": 100, "event": "not_finite", "what": "loss", "value": math.nan, "site": "embed"}
    found = diagnose(metrics(), records(same, event, {"step": 100, "event": "skipped"}), CONFIG, RECIPE)
    assert found.verdict == "nothing wrong"
    assert "1 step was left out" in found.paragraph()


def test_divergence_without_a_known_cause_names_the_first_moved_statistic():
    """One matrix's spectrum drifts off from step 120, the loss from 140."""

    def change(name: str, place: str, step: int, head: int, value: float) -> float:
        moved = name == "gradient_norm" and place == "layers.3.ffn.up" and step >= 120
        return value * 50 if moved else value

    found = diagnose(RISING, records(change), CONFIG, RECIPE)
    (cause,) = found.causes
    assert cause.cause == "cause unknown"
    assert (cause.layer, cause.site, cause.statistic, cause.step) == (3, "layers.3.ffn.up", "gradient_norm", 120)
    assert "First to move was gradient_norm of layers.3.ffn.up, at step 120" in found.paragraph()
    assert found.verdict.startswith("the loss diverged from step 14")


RISING = metrics(lambda t, loss: loss + max(0, t - 140) * 0.1)
"""The loss leaves its curve from step 140."""


@pytest.mark.parametrize("every", [5, 10, 16, 20, WATCH])
def test_first_moved_statistic_is_found_at_any_interval(every: int):
    """At the default one, too, where the steps before a failure hold but a handful of looks."""
    moved = both(
        at("attention_entropy", "layers.2.mixer", 0.2, 125, 1),
        times("max_attention_logit", "layers.2.mixer", 9, 125, 1),
    )
    found = diagnose(RISING, records(moved, every=every), CONFIG, RECIPE)
    (cause,) = found.causes
    assert (cause.layer, cause.site, cause.head) == (2, "layers.2.mixer", 1), found.paragraph()
    assert cause.statistic in ("attention_entropy", "max_attention_logit")
    assert cause.step == -(-125 // every) * every
    assert cause.sigmas is not None
    assert abs(cause.sigmas) > 6
    assert "First to move was" in found.paragraph()
    told = found.to_dict()["moved"]
    assert {(one["site"], one["layer"], one["head"]) for one in told} == {("layers.2.mixer", 2, 1)}
    first = {"statistic": cause.statistic, "step": cause.step, "sigmas": round(cause.sigmas, 2)}
    assert {key: told[0][key] for key in first} == first


def test_moved_statistics_are_ranked_by_step_then_sigma_up_to_ten():
    changes = [
        times("gradient_norm", f"layers.{n}.ffn.{name}", factor, since)
        for n in range(LAYERS)
        for name, factor, since in (("up", 50, 130), ("down", 9, 120), ("out", 9, 1))
    ] + [times("gradient_norm", f"layers.{n}.mixer.v", 20, 140) for n in range(LAYERS)]
    moved = diagnose(RISING, records(both(*changes)), CONFIG, RECIPE).to_dict()["moved"]
    assert [one["step"] for one in moved] == [120] * 4 + [130] * 4 + [140] * 2
    assert {one["site"] for one in moved[:4]} == {f"layers.{n}.ffn.down" for n in range(LAYERS)}
    assert moved[0]["sigmas"] >= moved[1]["sigmas"] >= moved[2]["sigmas"] >= moved[3]["sigmas"] > 6


def test_cause_without_history_has_the_sigma_of_its_layers_moved_statistic():
    """A site with a NaN, whose gradient had grown before."""
    event = {"step": 201, "event": "not_finite", "what": "loss", "value": math.nan, "site": "layers.2.ffn.hidden"}
    grown = times("gradient_norm", "layers.2.ffn.up", 50, 180)
    cause = diagnose(metrics(), records(grown, event), CONFIG, RECIPE).causes[0]
    assert cause.to_dict()["sigmas"] > 6
    assert diagnose(metrics(), records(same, event), CONFIG, RECIPE).causes[0].sigmas is None


@pytest.mark.parametrize("every", [1, 5, WATCH])
@pytest.mark.parametrize("seed", range(3))
def test_drift_is_not_a_move(every: int, seed: int):
    """Series drift as weights do, each with another size of noise, before a failure that they do not announce."""
    random = np.random.default_rng(seed)
    slope, size = random.uniform(0, 0.01, 40), 10 ** random.uniform(-4, -2, 40)
    rows = [
        {"step": t, "statistics": {"weight_norm": {
            f"layers.{n}.mixer.q": float(np.exp(slope[n] * t + size[n] * random.normal())) for n in range(40)
        }}}
        for t in [1, *range(every, STEPS + 1, every)]
    ]  # fmt: skip
    (cause,) = diagnose(RISING, rows, CONFIG, RECIPE).causes
    assert (cause.cause, cause.site) == ("cause unknown", None), cause


def test_passing_move_is_not_reported():
    passing = both(
        at("attention_entropy", "layers.2.mixer", 0.2, 125), at("attention_entropy", "layers.2.mixer", 0.7, 145)
    )
    assert "First to move" not in diagnose(RISING, records(passing), CONFIG, RECIPE).paragraph()


def test_far_too_large_rate_is_found_from_only_the_loss():
    rough = metrics(lambda t, loss: loss + 2 * (t in (6, 7, 8)))
    for row in rough:
        row["learning_rate"] *= 100
    found = diagnose(rough, [], CONFIG, RECIPE)
    assert named(found, "learning rate above", among=1)
    assert found.causes[0].confidence <= 0.5, "a loss without statistics proves little"
    usual = diagnose(metrics(lambda t, loss: loss + 2 * (t in (6, 7, 8))), [], CONFIG, RECIPE)
    assert usual.causes[0].confidence < found.causes[0].confidence


def test_rows_rolled_back_do_not_count():
    sick = [row for row in records(both(HUGE, NARROW)) if row["step"] <= 150]
    well = [row for row in records() if row["step"] > 90]
    found = diagnose(metrics(), [*sick, {"step": 151, "event": "rolled_back", "to": 90}, *well], CONFIG, RECIPE)
    assert found.verdict == "nothing wrong"
    assert "rolled back" in found.paragraph()


# Rows from an untrusted file


NUMBER = st.one_of(st.floats(), st.sampled_from([0.0, -1.0, 1e-300, 1e300, math.nan, math.inf]), st.floats(1e-6, 1e6))
STATISTICS = [
    "weight_norm", "gradient_norm", "gradient_rms", "update_ratio", "max_attention_logit", "attention_entropy",
    "token_cosine", "residual_rms", "dead_units", "log_z", "relative_residual", "activation_effective_rank",
]  # fmt: skip
INSIDE = [*MATRICES, "mixer", "resid_post", "ffn.hidden"]
PLACES = ["embed", "head", "logits", *(f"layers.{n}.{name}" for n in (0, 1, 7) for name in INSIDE)]
VALUES = st.one_of(NUMBER, st.lists(NUMBER, max_size=3))
ROWS = st.fixed_dictionaries(
    {"step": st.one_of(st.integers(0, 40), st.just(LAST_STEP - 1))},
    optional={
        "statistics": st.dictionaries(
            st.sampled_from(STATISTICS), st.dictionaries(st.sampled_from(PLACES), VALUES, max_size=12), max_size=8
        ),
        "event": st.sampled_from(["spike", "not_finite", "diverged", "skipped", "rolled_back", "?"]),
        "value": NUMBER, "site": st.sampled_from(PLACES), "to": st.integers(-5, 40), "batch": st.lists(st.text()),
    },
)  # fmt: skip
METRICS = st.fixed_dictionaries(
    {"step": st.one_of(st.integers(-1, 60), st.just(10**30), st.just("1"), st.just(True))},
    optional={
        name: st.one_of(NUMBER, st.just("nan"), st.none(), st.just(10**400))
        for name in ("loss", "learning_rate", "grad_norm")
    },
)  # fmt: skip


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(METRICS, max_size=80), st.lists(ROWS, max_size=14), st.booleans())
def test_no_rows_break_the_diagnosis(rows: list[dict[str, Any]], recorded: list[dict[str, Any]], told: bool):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            found = diagnose(rows, recorded, CONFIG if told else None, RECIPE if told else None)
        except RequestError:
            return
    json.dumps(found.to_dict(), allow_nan=False)
    assert found.paragraph()
    assert all(0 < cause.confidence <= 1 for cause in found.causes)


WHOLE = json.dumps(records())


@pytest.mark.slow
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_damaged_numbers_do_not_break_it_either(data: st.DataObject):
    """A whole run with some numbers replaced: every rule is reached."""
    recorded, measured = json.loads(WHOLE), metrics()
    for _ in range(data.draw(st.integers(1, 30))):
        row = recorded[data.draw(st.integers(0, len(recorded) - 1))]
        statistic = row["statistics"][data.draw(st.sampled_from(sorted(row["statistics"])))]
        statistic[data.draw(st.sampled_from(sorted(statistic)))] = data.draw(VALUES)
        measured[data.draw(st.integers(0, STEPS - 1))]["loss"] = data.draw(NUMBER)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = diagnose(measured, recorded, CONFIG, RECIPE)
    json.dumps(found.to_dict(), allow_nan=False)


# Failures planted in real training


TRAINED, AT = 240, 150
"""Steps of a run, and the step after which a failure is planted."""
USUAL = 3e-3
"""The learning rate."""
SHAPE = "+layers=4+d_model=48+heads=4"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextData:
    return prepare("python-docs", "char", context=32, cache_dir=tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> TextData:
    folder = tmp_path_factory.mktemp("small")
    (folder / "text.txt").write_text(Path(argparse.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    return prepare(folder / "text.txt", "char", context=32, cache_dir=folder / "cache")


class After(Callback):
    """Does something to the model after a step, or after every step from then on."""

    def __init__(self, change: Callable[[Model], object], at: int = AT, always: bool = False):
        self.change, self.at, self.always = change, at, always

    def after_update(self, run: Training, moment: Moment) -> None:
        if moment.step == self.at or (self.always and moment.step > self.at):
            with torch.no_grad():
                self.change(moment.model)


def scaled(model: Model, where: str, factor: float, head: int | None = None) -> None:
    matrix = named_matrices(model)[where]
    rows = matrix.within(matrix.parameter)
    (rows if head is None else rows[head]).mul_(factor)


def not_a_number(model: Model, site: str) -> None:
    sites(model)[site].register_forward_hook(lambda module, given, value: value * math.nan)


def growing(model: Model) -> None:
    for name in ("layers.2.mixer.q", "layers.2.mixer.k"):
        scaled(model, name, 1.04)


@contextmanager
def batches_of(make: Callable[[int, Tensor], tuple[Tensor, Tensor]], patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replaces the batches of training, inside the block, by `make(step, tokens (b, context + 1))`: inputs and
    targets."""

    class Corrupted(Batches):
        def __getitem__(self, step: int) -> Any:
            batch = super().__getitem__(step)
            return type(batch)(*make(step, torch.cat([batch.inputs, batch.targets[:, -1:]], 1)))

    with patch.context() as patched:
        patched.setattr(base, "Batches", Corrupted)
        yield


def fit(
    text: TextData, folder: Path, expression: str, *observers: After, steps: int = TRAINED, **fields: Any
) -> Diagnosis:
    """Trains a run, and returns the diagnosis of its folder."""
    recipe = Recipe.of(
        **{"tokens": steps * 8 * 32, "batch_size": 8, "context": 32, "learning_rate": USUAL, "watch": 20, "threads": 1,
           "compile": False, "device": "cpu", "dtype": "float32", "evaluation_tokens": 512, **fields}
    )  # fmt: skip
    run = train(preset(expression), text, recipe, folder, callbacks=observers)
    return diagnose(
        read_metrics(folder / "metrics.jsonl"),
        read_records(folder / "dynamics.jsonl"),
        run.config,
        to_plain(recipe),
    )


def noise(tokens: Tensor) -> Tensor:
    return torch.randint(0, 90, tokens.shape, generator=torch.Generator().manual_seed(int(tokens.sum())))


def as_it_is(step: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
    return tokens[:, :-1], tokens[:, 1:]


def one_batch(change: Callable[[Tensor], Tensor]) -> Callable[[int, Tensor], tuple[Tensor, Tensor]]:
    """Returns a `make` for `batches_of` that changes the tokens of step AT + 1."""
    return lambda step, tokens: as_it_is(step, change(tokens) if step == AT else tokens)


def a_file_of_noise(step: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a batch with noise in one sequence of eight, on average, as from a folder with a binary file."""
    return as_it_is(step, torch.where(torch.arange(len(tokens))[:, None] == step % 4, noise(tokens), tokens))


def two_ahead(step: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a batch whose labels are shifted by one token too many."""
    return tokens[:, :-2], tokens[:, 2:]


def half_a_sum(model: Model, at: int = 8) -> None:
    """Makes a layer, from step `at` on, add up in float16 whenever autocast lowers the precision."""
    calls = 0

    def add_up(module: object, given: object, value: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        lower = torch.is_autocast_enabled("cpu")
        return (1e7 * value).half().to(value.dtype) / 1e7 if lower and calls > at else value

    sites(model)["layers.1.ffn.hidden"].register_forward_hook(add_up)


def damaged(model: Model) -> None:
    scaled(model, "layers.2.ffn.down", math.nan)


def in_bfloat16(model: Model) -> None:
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())


@dataclass
class Plant:
    """A run in which something is wrong, the cause that `why` must name first, and the place it must find."""

    cause: str
    place: dict[str, Any] = field(default_factory=dict)
    model: str = "llama@1m"
    steps: int = TRAINED
    after: Callable[[Model], object] | None = None
    """Done to the model after step `at`, or after every step from then on."""
    at: int = AT
    always: bool = False
    batches: Callable[[int, Tensor], tuple[Tensor, Tensor]] = as_it_is
    recipe: dict[str, Any] = field(default_factory=dict)

    def why(self, text: TextData, folder: Path, patch: pytest.MonkeyPatch, **fields: Any) -> Diagnosis:
        observers = [] if self.after is None else [After(self.after, self.at, self.always)]
        name, _, change = self.model.partition("+")
        with batches_of(self.batches, patch):
            return fit(text, folder, f"{name}{SHAPE}{change and '+'}{change}", *observers, steps=self.steps,
                       **{**self.recipe, **fields})  # fmt: skip


COLD = {"schedule": {"kind": "cosine", "warmup": 0}}
EARLY: dict[str, Plant] = {
    "rate 10": Plant("learning rate above", steps=60, recipe={"learning_rate": 10.0}),
    "rate 10, not clipped": Plant(
        "learning rate above", model="gpt2@1m", steps=60, recipe={"learning_rate": 10.0, "clip": None}
    ),
    "init x10": Plant("initialisation too large", {"step": 1}, "llama@1m+init.std=0.2", 12),
    "labels shifted": Plant("targets are not the next tokens", {"step": 1}, steps=8, batches=two_ahead),
    "weights of nan": Plant(
        "weights that are not numbers", {"layer": 2, "site": "layers.2.ffn.down", "step": 17}, steps=24, at=16,
        after=damaged,
    ),
    "float16 in a sum": Plant(
        "precision too low", {"layer": 1, "site": "layers.1.ffn.hidden"}, steps=16, at=1, after=half_a_sum,
        recipe={"dtype": "bfloat16"},
    ),
    "weights in bfloat16": Plant("weights kept in bfloat16", steps=12, at=1, always=True, after=in_bfloat16),
}  # fmt: skip
"""Plants that a few steps show, with statistics or without."""
LATE: dict[str, Plant] = {
    "rate x30": Plant("learning rate above", model="gpt2@1m", recipe={"learning_rate": 30 * USUAL}),
    "no warm-up after post-norms": Plant(
        "warm-up missing", {"layer": 7}, "gpt2@1m+post+layers=8", recipe={"learning_rate": 1e-2, **COLD}
    ),
    "a head's W_Q x100": Plant(
        "one head", {"layer": 2, "site": "layers.2.mixer.q", "head": 1},
        after=lambda m: scaled(m, "layers.2.mixer.q", 100, 1),
    ),
    "a batch of noise": Plant("bad batch", {"step": AT + 1}, batches=one_batch(noise)),
    "a batch of one token": Plant(
        "bad batch", {"step": AT + 1}, "gpt2@1m", batches=one_batch(lambda tokens: torch.full_like(tokens, 7))
    ),
    "a file of noise": Plant("rubbish in the data", batches=a_file_of_noise),
    "nan at a site": Plant(
        "not a number at layers.1.mixer.z", {"layer": 1, "site": "layers.1.mixer.z"},
        after=lambda m: not_a_number(m, "layers.1.mixer.z"),
    ),
    "a layer of zeros": Plant(
        "dead layer", {"layer": 2}, after=lambda model: [p.zero_() for p in model.layers[2].parameters()]
    ),
    "eps 1e-2": Plant("eps too large", {"statistic": "gradient_rms"}, recipe={"optimizer": LARGE_EPS}),
    "silent units": Plant(
        "dead units", {"layer": 1}, "gpt2@1m+relu", after=lambda model: model.layers[1].ffn.up_proj.bias.fill_(-20)
    ),
    "output x50": Plant(
        "one matrix moved by itself", {"site": "head", "step": AT + 1}, "llama@1m+untied",
        after=lambda m: scaled(m, "head", 50),
    ),
    "growing logits": Plant("attention-", {"layer": 2}, steps=320, always=True, after=growing),
    "deep post-norms": Plant(
        "rank collapse", {"statistic": "token_cosine"}, "gpt2@1m+post+layers=24", 150, recipe={"seed": 1}
    ),
}  # fmt: skip
"""Plants that need a run which has learned, and statistics."""


def test_small_gradients_are_an_effect_of_rank_collapse() -> None:
    """Noci et al. 2022, 2206.03126: tokens that are alike give queries and keys no gradient."""
    eps = Cause("gradient RMS near Adam's eps", 0.84, "", ())
    found = sorted(_roots_first([eps, Cause("rank collapse", 0.82, "", ())]), key=lambda one: -one.confidence)
    assert [one.cause for one in found] == ["rank collapse", eps.cause]
    assert _roots_first([eps]) == [eps]


@pytest.mark.parametrize("watch", [5, None])
@pytest.mark.parametrize("name", EARLY)
def test_the_first_guess_names_a_planted_cause(
    name: str, watch: int | None, small: TextData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant = EARLY[name]
    found = plant.why(small, tmp_path / "run", monkeypatch, watch=watch)
    assert found.causes and plant.cause in found.causes[0].cause, found.paragraph()
    assert plant.place.items() <= vars(found.causes[0]).items(), found.causes[0]
    assert "recipe.dtype=float32" not in found.causes[0].tries or "float" in name


@pytest.mark.slow
@pytest.mark.parametrize("name", LATE)
def test_the_first_guess_names_a_cause_planted_in_a_run_that_has_learned(
    name: str, text: TextData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant = LATE[name]
    found = plant.why(text, tmp_path / "run", monkeypatch)
    assert found.causes and plant.cause in found.causes[0].cause, found.paragraph()
    assert any(plant.place.items() <= vars(cause).items() for cause in found.causes[:3]), found.causes


def test_a_few_steps_are_diagnosed_too_watched_or_not(tmp_path: Path):
    (tmp_path / "text.txt").write_text(
        " ".join(random.Random(0).choices(["the", "cat", "sat", "on", "a", "mat"], k=2000))
    )
    text = prepare(tmp_path / "text.txt", "char", cache_dir=tmp_path / "cache")
    for watch in (5, None):
        found = fit(text, tmp_path / str(watch), f"llama@1m{SHAPE}", steps=12, watch=watch)
        assert found.verdict == "nothing wrong"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("expression", "fields"),
    [
        (f"llama@1m{SHAPE}", {"seed": 11}),
        (f"gpt2@1m{SHAPE}+relu", {"seed": 12, "learning_rate": 1e-2}),
        (f"bloom@1m{SHAPE}", {"seed": 13, "learning_rate": None}),
        (f"qwen3@1m{SHAPE}+gqa:2", {"seed": 14, "schedule": "wsd"}),
        (f"gpt2@1m{SHAPE}+post", {"seed": 15, "learning_rate": 1e-3, "schedule": {"kind": "cosine", "warmup": 0.2}}),
        (f"llama@1m{SHAPE}+layers=8", {"seed": 16, "steps": 500, "watch": 25}),
    ],
)
def test_nothing_is_wrong_with_healthy_runs(text: TextData, tmp_path: Path, expression: str, fields: dict[str, Any]):
    found = fit(text, tmp_path / "run", expression, **fields)
    assert found.verdict == "nothing wrong", found.paragraph()


def test_an_absurd_rate_explains_weights_that_moved():
    """A rate that is less sure does not."""
    moved = Cause(sorted(OF_A_DEAD_LAYER)[-1], 0.95, "", ())
    for sure, first in ((0.95, "learning rate above the stable edge"), (0.72, moved.cause)):
        rate = Cause("learning rate above the stable edge", sure, "", ())
        assert sorted(_roots_first([moved, rate]), key=lambda one: -one.confidence)[0].cause == first
