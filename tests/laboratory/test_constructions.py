"""Written transformers against the functions and algorithms that they compute."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from glassformer.laboratory import constructions as built
from glassformer.laboratory.evidence.constructions import longest_run, wrong_steps


@pytest.mark.parametrize(
    ("positions", "table"), [((0,), (1, 0)), ((3, 1), (0, 1, 1, 0)), ((4, 0, 2), (1, 1, 0, 1, 0, 0, 1, 0))]
)
def test_sparse_function_is_computed_on_every_input(positions: tuple[int, ...], table: tuple[int, ...]) -> None:
    x = built.every_input(5)
    function = built.Sparse(5, positions, table)
    wanted = [table[sum(int(row[place]) << h for h, place in enumerate(positions))] for row in x]
    assert function(x).tolist() == wanted
    logits = built.asked(built.sparse_function(function, 40.0), x)
    assert logits.argmax(-1).tolist() == wanted
    np.testing.assert_allclose(logits[:, 1], wanted, atol=1e-12)


def test_error_of_a_selection_is_within_its_bound() -> None:
    function, x = built.Sparse(6, (5, 2), (0, 1, 0, 1)), built.every_input(6)
    for sharpness in (2.0, 4.0, 8.0):
        error = built.asked(built.sparse_function(function, sharpness), x)[:, 1].numpy() - function(x)
        assert 0 < np.abs(error).max() <= 3 * 6 * math.exp(-sharpness)


def test_attention_falls_on_the_positions_of_the_function() -> None:
    import glassformer as gf

    model = built.sparse_function(built.Sparse(4, (2, 0), (0, 1, 1, 0)), 40.0)
    pattern = gf.capture(model, torch.tensor([[0, 1, 1, 0, 2]]), "layers.0.mixer.pattern")
    (found,) = pattern.values()
    assert found[0, :, -1].argmax(-1).tolist() == [2, 0]


@pytest.mark.parametrize(("dims", "examples", "ridge"), [(3, 6, 0.25), (4, 2, 1.0), (1, 1, 0.01)])
def test_layers_answer_as_ridge_regression(dims: int, examples: int, ridge: float) -> None:
    draw = np.random.default_rng(0)
    x, y = draw.standard_normal((32, examples + 1, dims)), draw.standard_normal((32, examples + 1))
    wanted = [  # least squares of the examples and rows sqrt(ridge) e_i, by LAPACK
        row[-1] @ np.linalg.lstsq(
            np.concatenate([row[:-1], ridge**0.5 * np.eye(dims)]), np.pad(of[:-1], (0, dims)), rcond=None
        )[0]
        for row, of in zip(x, y, strict=True)
    ]  # fmt: skip
    np.testing.assert_allclose(built.ridge_answers(x, y, ridge), wanted, rtol=1e-9, atol=1e-12)
    prompt = torch.from_numpy(built.ridge_prompt(x, y, ridge))
    few, many = (built.ridge_layers(dims, examples, ridge, n)(prompt)[:, -1, 0].numpy() for n in (2, 16))
    np.testing.assert_allclose(many, wanted, rtol=1e-9, atol=1e-12)
    assert np.abs(few - wanted).max() > 1e-3


def test_answer_does_not_depend_on_that_of_the_question() -> None:
    x, y = np.ones((1, 3, 2)), np.ones((1, 3))
    other = y.copy()
    other[0, -1] = 9
    assert np.array_equal(built.ridge_prompt(x, y, 1.0), built.ridge_prompt(x, other, 1.0))


def test_decoder_writes_the_steps_of_a_machine_by_itself() -> None:
    """Greedy decoding, from the first token only."""
    machine = built.random_machine(4, np.random.default_rng(3))
    model, text = built.counter_machine(machine, 1e6), [0]
    for _ in range(40):
        text.append(built.predicted(model, text)[-1])
    assert text[1:] == [built.token_of(step) for step in machine.run(40)[0]]


def test_doubling_machine_reaches_powers_of_two() -> None:
    machine = built.doubling()
    seen, counters = set(), (0, 0)
    for _, first, second in machine.run(600)[0]:
        counters = (counters[0] + first, counters[1] + second)
        seen |= {counters[0]} if counters[1] == 0 else set()
    assert {1, 2, 4, 8, 16, 32} <= seen and min(counters) >= 0
    assert not wrong_steps(machine, 600, 1e6)


def test_softmax_attention_errs_at_the_predicted_step() -> None:
    """A machine whose counters stay 0: the first token gets half of the weight at s = 2 t ln(t - 1)."""
    idle = built.CounterProgram(
        ((0, 0, 0), (0, 0, 0), (0, 0, 0), (1, 0, 0), (1, 0, 0), (1, 0, 0), (1, 0, 0), (0, 0, 0))
    )
    lasts = longest_run(300.0)
    assert 2 * lasts * math.log(lasts - 1) < 300 < 2 * (lasts + 1) * math.log(lasts)
    wrong = wrong_steps(idle, 2 * lasts, 300.0)
    assert wrong and wrong[0] == lasts + 1
