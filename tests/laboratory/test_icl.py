"""Learning in context: closed forms, the written layer, and tiny forms of what experiments.icl trains in full."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from glassformer.laboratory import icl
from glassformer.laboratory.copying import copying
from glassformer.laboratory.induction import MODEL, induction
from glassformer.naming import preset
from glassformer.text.tasks import Induction, Regression, SelectiveCopy
from tests.refused import refused


def test_the_best_step_has_the_published_error() -> None:
    """Zhang, Frei and Bartlett 2023: 1.875 of 10 examples in 5 dimensions; and what is drawn has it."""
    assert icl.one_step_error(5, 10) == pytest.approx(1.875) and icl.one_step_error(10, 20) == pytest.approx(110 / 31)
    draw = np.random.default_rng(0)
    for dims, n, rate in ((5, 10, 0.625), (3, 7, 1.2), (2, 30, 0.3)):
        x, _, y = Regression(dims=dims, examples=n).functions(200_000, draw)
        errors = (icl.descended(x, y, rate) - y[:, -1]) ** 2
        near = 4 * errors.std() / math.sqrt(len(errors))
        assert errors.mean() == pytest.approx(icl.step_error(dims, n, rate), abs=near)
        assert all(icl.step_error(dims, n, rate) >= icl.one_step_error(dims, n) for rate in np.linspace(0, 2, 41))


@pytest.mark.parametrize(("dims", "examples", "rate"), [(5, 10, None), (10, 20, 0.3), (1, 1, 2.0), (3, 50, -1.0)])
def test_the_written_layer_is_one_step(dims: int, examples: int, rate: float | None) -> None:
    found = icl.exact_step(dims, examples, rate, prompts=64)
    assert found.apart < 1e-12 * max(1.0, found.size) and found.size > 0


def test_the_step_is_the_gradient_of_the_squared_error() -> None:
    """-grad of mean (y - w x)^2 / 2 at w = 0, by autograd."""
    task = Regression(dims=4, examples=6)
    x, _, y = task.functions(1, np.random.default_rng(0))
    w = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    (torch.from_numpy(y[0, :-1]) - torch.from_numpy(x[0, :-1]) @ w).square().mean().div(2).backward()
    assert w.grad is not None
    assert icl.descended(x, y, 0.7)[0] == pytest.approx(float(-0.7 * w.grad @ torch.from_numpy(x[0, -1])))


def test_posterior_mean_is_that_of_bayes_rule() -> None:
    """Densities by the formula of the normal distribution, prompt by prompt."""
    draw = np.random.default_rng(0)
    x, y, asked, functions = (draw.standard_normal(size) for size in ((5, 3, 2), (5, 3), (5, 2), (4, 2)))
    for k in (0, 3):
        found = icl.posterior_mean(
            *map(torch.from_numpy, (x[:, :k], y[:, :k], asked)), 0.7, torch.from_numpy(functions)
        )  # fmt: skip
        for row in range(5):
            densities = [
                math.prod(
                    math.exp(-(((y[row, i] - w @ x[row, i]) / 0.7) ** 2) / 2) / (0.7 * math.sqrt(2 * math.pi))
                    for i in range(k)
                )
                for w in functions
            ]
            wanted = sum(p * (w @ asked[row]) for p, w in zip(densities, functions, strict=True)) / sum(densities)
            assert float(found[row]) == pytest.approx(wanted, rel=1e-12)


def test_posterior_mean_errs_least_on_its_mixture() -> None:
    tiny: dict[str, Any] = {"steps": 2, "expression": "gpt2+layers=1+d_model=8+heads=1", "batch": 4}
    errors = dict(icl.softmax(2, 1.0, prompts=2_000, mixture=4, **tiny).errors)
    best = errors.pop(icl.POSTERIOR)
    assert all(best[k] < of[k] for of in errors.values() for k in range(5))
    assert icl.POSTERIOR not in icl.softmax(2, prompts=8, **tiny).errors


def test_a_layer_learns_something_of_it_and_draws_it() -> None:
    found = icl.one_step(steps=40, batch=64, prompts=500)
    assert len(found.curve) == 40 and found.published == 1.875 and -1 <= found.cosine <= 1
    assert found.descent == pytest.approx(found.published, rel=0.3) and found.error < 20
    assert [length.examples for length in found.lengths] == [5, 20, 40]
    assert "one step" in found.draw() and found.crossing > 0
    again = icl.one_step(steps=40, batch=64, prompts=500)
    assert again.error == found.error


@pytest.mark.slow
def test_a_trained_layer_is_one_step() -> None:
    """Within 5 %: half a minute."""
    found = icl.one_step(steps=3_000)
    assert found.error == pytest.approx(found.published, rel=0.05) and found.apart < 0.05 and found.cosine > 0.999


def test_answers_from_statistics() -> None:
    """Without noise and with enough examples least squares and ridge are exact; ridge is the best there is."""
    exact = Regression(dims=3, examples=6, layout="apart")
    model = preset("gpt2+layers=1+d_model=8+heads=2+vectors:3+vocab_size=1+context=13").build(seed=0).eval()
    errors, distances = icl.compared(model, exact, 400, np.random.default_rng(0))
    assert max(errors["least squares"][3:]) < 1e-6 and max(errors["ridge"][3:]) < 1e-3
    assert errors["transformer"][0] == pytest.approx(1, rel=0.3) and len(errors["one step"]) == 7
    noisy, _ = icl.compared(
        model, Regression(dims=3, examples=6, noise=0.5, layout="apart"), 4_000, np.random.default_rng(0)
    )
    for k in range(1, 7):
        assert noisy["ridge"][k] <= min(noisy[name][k] for name in noisy) + 1e-9
    assert noisy["least squares"][3] > 5 * noisy["ridge"][3]
    with refused(code="conflict", field="layout"):
        icl.compared(model, Regression(dims=3), 4, np.random.default_rng(0))
    assert set(distances) == set(icl.ANSWERS)


def test_a_transformer_is_compared_with_them() -> None:
    found = icl.softmax(dims=2, steps=8, expression="gpt2+layers=1+d_model=16+heads=2", batch=8, prompts=64)
    assert found.parameters > 0 and len(found.likest) == 4 and "transformer" in found.draw()


def test_induction_study_measures_a_model_during_training() -> None:
    task = Induction(symbols=8, row=16, least=3, most=6)
    small = MODEL.replace("d_model=64+heads=4", "d_model=16+heads=2")
    found = induction(small, steps=50, batch=8, task=task)
    assert [look.step for look in found.looks] == [0, 25, 50] and found.guess == math.log(8)
    assert found.looks[0].loss == pytest.approx(math.log(9), rel=0.05)  # 8 symbols and an end
    assert found.first is None and found.fall[1] is None and math.isnan(found.share_of("prefix"))
    assert 0 <= found.prefix.score <= 1 and found.previous.layer in (0, 1) and "prefix match" in found.draw()


@pytest.mark.slow
def test_two_layers_learn_to_repeat_and_one_does_not() -> None:
    """The previous token in the first layer, the prefix in the second: a minute."""
    two = induction(steps=600)
    assert two.first is not None and two.final < 0.2
    assert (two.previous.layer, two.prefix.layer) == (0, 1) and min(two.previous.score, two.prefix.score) > 0.6
    assert induction(MODEL.replace("layers=2", "layers=1"), steps=600).final > 2


def test_copying_is_scored_by_symbols_and_rows() -> None:
    task = SelectiveCopy(symbols=2, row=6, kept=2)
    found = copying("gpt2+layers=1+d_model=16+heads=2", steps=5, batch=8, task=task, rows=64)
    assert 0 <= found.whole <= found.accuracy <= 1 and found.guess == 0.5 and found.loss > 0
