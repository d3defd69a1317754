"""Uptraining in a tiny form: the meaning of its gaps, and its continuation after an interruption."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import glassformer as gf
from experiments.uptraining import page
from glassformer.conversion import adapt
from glassformer.conversion.heads import first
from glassformer.laboratory.uptraining import KEPT, Curve, UptrainingPlan, base, closed, gaps, tiny, uptrained
from glassformer.loaded import Loaded
from glassformer.text import Tokens, prepare
from glassformer.training import evaluate

MODEL = "llama+layers=1+d_model=16+heads=4+head_dim=4+hidden=16"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    words = random.Random(0)
    path.write_text(" ".join(words.choice(["a", "bee", "sees", "the", "sea", "ease"]) for _ in range(1000)))
    return prepare(path, "char")


def test_curve_starts_at_the_loss_of_the_converted_model(text: Tokens, tmp_path: Path) -> None:
    plan = tiny(UptrainingPlan())
    run = base(text, tmp_path / "base", plan, model=MODEL)
    found = uptrained(run, text, tmp_path, plan, "mqa", "first")
    single = adapt(Loaded(run.model, run.config, None), gf.preset(f"{tmp_path / 'base'}+mqa"), first)
    score = evaluate(single.model, text, plan.context, run.how, plan.evaluation_tokens, plan.batch_size)
    assert found.losses[0] == pytest.approx(score["loss"], rel=1e-6) and sorted(found.losses) == [0, 1, 2]
    with pytest.warns(UserWarning, match="is finished"):
        assert uptrained(run, text, tmp_path, plan, "mqa", "first") == found


def test_gaps_are_to_the_base_of_the_same_seed() -> None:
    curves = [Curve("", KEPT, seed, {0: 2.0 + seed, 4: 1.0 + seed}) for seed in (0, 1)]
    ways = {"mean": 0.5, "first": 1.0, "new": 2.0}
    curves += [
        Curve(change, way, seed, {0: 2.0 + seed + gap, 4: 1.0 + seed + gap / 4})
        for change in ("gqa:2", "mqa") for way, gap in ways.items() for seed in (0, 1)
    ]  # fmt: skip
    assert gaps(curves, "mqa", "first") == {0: [1.0, 1.0], 4: [0.25, 0.25]}
    assert closed(gaps(curves, "mqa", "first")) == {0: 0.0, 4: 0.75}
    told = page(curves, UptrainingPlan(steps=4, every=4), [], "Measured never.")
    assert "| 2 | new | +2.0000 | +0.5000 (75%) |" in told and "`mqa`: gaps before are mean < first < new" in told
