"""Measurements of a trained model."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import stdev
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.stats import entropy
from torch import Tensor

import glassformer as gf
from glassformer.machine import Settings
from glassformer.model import Model
from glassformer.runs.arm import company
from glassformer.runs.measure import scatter
from glassformer.runs.results import COMPANY, MachineRecord, Validation
from glassformer.text import Batch, evaluation_windows, prepare
from glassformer.training import Recipe, checkpoint, evaluate, frequency_loss, train
from glassformer.training.callbacks import Callback
from glassformer.training.evaluate import scored
from glassformer.training.objectives import NextTokenConfig


def test_the_scatter_of_timings_is_that_of_stretches_and_not_of_single_ones():
    steady = [1.0, 3.0, 2.0] * 16  # every stretch of six has the median 2
    assert scatter(steady) == 0
    drifting = [1.0 + i // 10 for i in range(80)]
    assert scatter(drifting) == pytest.approx(stdev(range(8)))
    assert scatter([1.0] * 15) is None and scatter([]) is None
    assert scatter([*drifting[:79], 1e9]) == scatter(drifting)  # one pause of the machine says nothing


def test_company_is_the_busy_time_of_others_over_the_time_that_passed():
    """3 s of 2 s, then of a count that the system does not keep."""
    assert company((10.0, 5.0), (12.0, 8.0)) == {COMPANY: 1.5}
    assert company((10.0, 5.0), (12.0, 4.9)) == {COMPANY: 0.0}
    assert company(None, (12.0, 8.0)) == company((10.0, 5.0), None) == {}
    assert MachineRecord({COMPANY: 1.5}).company == 1.5 and MachineRecord({}).company == 0.0


def test_the_loss_of_frequencies_is_their_entropy():
    """Against scipy's, over the targets of whole windows."""
    tokens = np.random.default_rng(0).zipf(1.5, 90).clip(max=20).astype(np.uint16)
    windows = evaluation_windows(tokens, 8, None, token_bytes=np.ones(21, np.int64), batch=3)
    counts = Counter(tokens[1:89].tolist())  # 11 windows of 8
    assert frequency_loss(windows) == pytest.approx(float(entropy(list(counts.values()))))
    assert frequency_loss(evaluation_windows(tokens * 0, 8, None, token_bytes=np.ones(1, np.int64), batch=3)) == 0


@pytest.mark.parametrize(("loss", "barely"), [(3.4, True), (2.71, True), (2.69, False)])
def test_a_model_has_barely_learned_if_context_saves_less_than_a_tenth(loss: float, barely: bool):
    fields = {"perplexity": 1.0, "bits_per_byte": None, "tokens": 1}
    assert Validation(loss=loss, frequency_loss=3.0, **fields).barely_learned is barely
    assert not Validation(loss=loss, **fields).barely_learned


def test_windows_that_training_has_read_are_not_read_again(monkeypatch: pytest.MonkeyPatch):
    text: Any = SimpleNamespace(validation=np.arange(16 * 21) % 23, token_bytes=np.ones(23, dtype=np.int64))
    model, how = gf.preset("llama@0.1m+vocab_size=23").build(seed=0), Settings("cpu", "float32", 1, False)
    loss, read = NextTokenConfig.loss, []

    def counting(self: NextTokenConfig, model: Model, batch: Batch, reduction: str = "mean") -> Tensor:
        read.append(len(batch.inputs))
        return loss(self, model, batch, reduction)

    monkeypatch.setattr(NextTokenConfig, "loss", counting)
    known = scored(model, NextTokenConfig().evaluation(text, 16, 4 * 16, 8, model.config), how)
    whole = evaluate(model, text, 16, how, max_tokens=16 * 16)
    assert read == [4, 8, 8]
    assert evaluate(model, text, 16, how, max_tokens=16 * 16, known=known) == pytest.approx(whole, rel=1e-12)
    assert read[3:] == [8, 4]
    other = replace(known, starts=known.starts | {3})  # of windows that are not among these
    assert evaluate(model, text, 16, how, max_tokens=16 * 16, known=other) == whole


class Returns(Callback):
    """Goes back to the checkpoint of step 5 at step 8, like a policy for spikes, when the time of the run is over."""

    def evaluated(self, run: Any) -> None:
        if run.step == 5:
            run.save(wait=True)

    def before_update(self, run: Any, moment: Any) -> None:
        if moment.step == 8:
            batch = run.step + run.shift
            run.restore(checkpoint.latest(run.folder))
            run.shift, run.seconds = batch + 1 - run.step, 300.0
            run.went_back(moment.step)


def test_a_run_that_went_back_has_no_sums_of_later_weights(tmp_path: Path):
    (tmp_path / "text.txt").write_text("a small text about cats and trees\n" * 400)
    text = prepare(tmp_path / "text.txt", "char", context=16, cache_dir=tmp_path)
    config = gf.preset("llama@1m+layers=1+d_model=16+heads=2+context=16")
    recipe = Recipe.of(
        minutes=5.0, batch_size=4, context=16, threads=1, dtype="float32", compile=False, evaluation_tokens=64,
        evaluate_every=5,
    )  # fmt: skip
    config = config.replace(vocab_size=text.tokenizer.vocab_size)
    run = train(config, text, recipe, tmp_path / "run", callbacks=[Returns()])
    assert run.steps == 5 and run.validation is not None and run.scored is None
