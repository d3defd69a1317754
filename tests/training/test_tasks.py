"""Objectives `task` and `regression`: rows that are drawn, asked where the task asks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import glassformer as gf
from glassformer.errors import RequestError
from glassformer.text import TextData, Tokens, prepare
from glassformer.training.objectives import RegressionConfig, TaskConfig
from tests.refused import refused

SMALL = "gpt2+layers=1+d_model=16+heads=2"
QUICK = {"steps": 4, "batch_size": 8, "threads": 1, "evaluation_tokens": 720}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextData]:
    cache = tmp_path_factory.mktemp("cache")
    names = ("induction", "selective-copy", "icl-regression", "icl-regression:layout=apart")
    return {name: prepare(name, cache_dir=cache) for name in names}


def test_batches_are_a_function_of_seed_and_step(texts: dict[str, TextData]) -> None:
    for name, objective in (("induction", TaskConfig()), ("icl-regression", RegressionConfig())):
        text = texts[name]
        batches = objective.batches(text, 8, 64, 0)
        again = objective.batches(text, 8, 64, 0)
        assert all(torch.equal(a, b) for a, b in zip(batches[3], again[3], strict=True))
        assert not torch.equal(batches[3].inputs, batches[4].inputs)
        assert not torch.equal(batches[3].inputs, objective.batches(text, 8, 64, 1)[3].inputs)
        held = [batch.batch for batch in objective.evaluation(text, 64, 640, 4)]
        whole = [batch.batch for batch in objective.evaluation(text, 64, 640, 64)]
        assert torch.equal(torch.cat([one.inputs for one in held]), whole[0].inputs)
        seen = {tuple(row) for step in range(20) for row in batches[step].inputs.flatten(1).tolist()}
        assert not seen & {tuple(row) for row in whole[0].inputs.flatten(1).tolist()}


def test_task_loss_covers_only_the_answers(texts: dict[str, TextData]) -> None:
    text, objective = texts["selective-copy"], TaskConfig()
    model = gf.preset(f"{SMALL}+vocab_size={text.tokenizer.vocab_size}+context=72").build(seed=0).eval()
    batch = objective.batches(text, 8, 72, 0)[0]
    decoded = text.tokenizer.decode(batch.inputs[0].tolist())
    answers = text.tokenizer.decode(batch.targets[0, 64:].tolist())
    assert decoded[:64].replace(".", "") == answers and decoded[64:] == "\t" * 8
    wanted = F.cross_entropy(model(batch.inputs)[:, 64:].flatten(0, 1), batch.targets[:, 64:].flatten())
    torch.testing.assert_close(objective.loss(model, batch), wanted)


def test_a_regression_is_scored_by_its_squares(texts: dict[str, TextData]) -> None:
    text, objective = texts["icl-regression:layout=apart"], RegressionConfig()
    model = gf.preset(f"{SMALL}+vectors:5+context=32").build(seed=0).eval()
    batch = objective.batches(text, 8, 32, 0)[0]
    errors = (model(batch.inputs)[:, 0::2, 0] - batch.targets[:, 0::2]).square()
    torch.testing.assert_close(objective.loss(model, batch), errors.mean())
    each = objective.loss(model, batch, reduction="none")
    torch.testing.assert_close(each[:, 0::2], errors)
    assert not each[:, 1::2].any()


@pytest.mark.parametrize(
    ("data", "expression", "objective", "context"),
    [("induction", SMALL, "task", 64), ("selective-copy", SMALL, "task", 80),
     ("icl-regression", f"{SMALL}+vectors:6", "regression", 11),
     ("icl-regression", f"{SMALL}+linear_attention+bidirectional+vectors:6", "regression", 16)],
)  # fmt: skip
def test_it_is_an_ordinary_run(
    data: str, expression: str, objective: str, context: int, texts: dict[str, TextData], tmp_path: Path
) -> None:
    """Written, watched, and loaded."""
    recipe = {**QUICK, "context": context, "objective": objective, "watch": 2}
    run = gf.train(gf.preset(expression), texts[data], recipe, out=tmp_path / "run")
    assert run.status == "ok" and run.validation is not None and run.validation["bits_per_byte"] is None
    assert run.validation["tokens"] > 0 and np.isfinite(run.validation["loss"])
    loaded = gf.load(tmp_path / "run").model
    weights = zip(run.model.parameters(), loaded.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in weights)


def test_squares_may_climb(texts: dict[str, TextData]) -> None:
    """With one prompt a step, squared errors differ by far more than a nat from step to step."""
    recipe = {**QUICK, "context": 11, "objective": "regression", "steps": 40, "batch_size": 1}
    run = gf.train(gf.preset(f"{SMALL}+vectors:6"), texts["icl-regression"], recipe)
    losses = [row["loss"] for row in run.metrics if "loss" in row]
    assert run.status == "ok" and max(np.convolve(losses, np.ones(12) / 12, "valid")) > min(losses) + 1


def test_task_objective_refuses_unfit_data_and_models(texts: dict[str, TextData], tmp_path: Path) -> None:
    def complaint(data: str, expression: str, **fields: object) -> str:
        with pytest.raises(RequestError) as caught:
            gf.train(gf.preset(expression), texts[data], {**QUICK, "context": 64, **fields})
        return str(caught.value)

    assert "this data is icl-regression; give --data induction or selective-copy" in complaint(
        "icl-regression", SMALL, objective="task"
    )
    assert "give --data icl-regression" in complaint("induction", f"{SMALL}+vectors:6", objective="regression")
    assert "use --context 72" in complaint("selective-copy", SMALL, objective="task")
    assert "use +vectors:6" in complaint("icl-regression", f"{SMALL}+vectors:5", objective="regression")
    assert "use +vectors:R" in complaint("icl-regression", SMALL, objective="regression")
    both = f"{SMALL}+vectors:5+bidirectional"
    assert "not causal" in complaint("icl-regression:layout=apart", both, objective="regression")
    assert "not causal" in complaint("induction", f"{SMALL}+bidirectional", objective="task")
    assert "this model's head gives values" in complaint("induction", f"{SMALL}+vectors:6", objective="next_token")
    assert "budget" in complaint("induction", SMALL, objective="task", steps=None, flops=1e9)
    (tmp_path / "a.txt").write_text("no task, a text\n" * 50)
    plain = prepare(tmp_path / "a.txt", cache_dir=tmp_path / "cache")
    with refused(code="conflict", field="data"):
        gf.train(gf.preset(SMALL), plain, {**QUICK, "context": 64, "objective": "task"})


def test_another_process_knows_the_task(texts: dict[str, TextData], tmp_path: Path) -> None:
    opened = Tokens.open(**texts["induction"].places(tmp_path))
    ours, theirs = (TaskConfig().batches(text, 4, 64, 0)[2] for text in (texts["induction"], opened))
    assert torch.equal(ours.inputs, theirs.inputs)


@pytest.mark.slow
def test_a_comparison_of_two_models_on_a_task(tmp_path: Path) -> None:
    found = gf.compare(
        [SMALL, f"{SMALL}+rope"], "induction:row=16,most=8,least=4", tokens=1_000, seeds=1, batch_size=8, context=16,
        objective="task", out=tmp_path / "comparison",
    )  # fmt: skip
    assert [run.status for run in found.runs] == ["ok", "ok"]
