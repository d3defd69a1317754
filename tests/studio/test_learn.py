"""The walk through a forward pass: its numbers are the model's, and each line of arithmetic gives its number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import glassformer as gf
from glassformer import machine
from glassformer.lens.arithmetic import say
from glassformer.loaded import Loaded
from glassformer.studio import learn
from tests.refused import refused


def number_of(words: str) -> float:
    return float(words.replace("−", "-").replace("∞", "inf"))


def check_lines(step: dict[str, Any]) -> None:
    """Every line of arithmetic ends with the number in its cell, up to the rounding of what it is made from."""
    for table in step["tables"]:
        for row, lines in zip(table["texts"], table["worked"], strict=True):
            for text, line in zip(row, lines, strict=True):
                last = line.replace(";", " ").split()[-1]
                assert number_of(last) == pytest.approx(number_of(text), rel=0.02, abs=0.006), line


def test_three_tokens_are_those_of_the_guides_code() -> None:
    """Against the guide's program: randn by seed 42, softmax of q k^T / 2."""
    found = learn.three()
    torch.manual_seed(42)
    x = torch.eye(4)[:3]
    w_q, w_k, w_v = (torch.randn(4, 4) for _ in range(3))
    pattern = ((x @ w_q) @ (x @ w_k).T / 2).softmax(-1)
    steps = {(step["key"], step["masked"]): step["tables"][0]["texts"] for step in found["steps"]}
    assert steps["pattern", False] == [[say(one) for one in row] for row in pattern.tolist()]
    assert steps["z", False] == [[say(one) for one in row] for row in (pattern @ x @ w_v).tolist()]
    assert found["ours"] == "0.4071 0.0492 0.5437" != found["printed"]
    assert steps["pattern", True][0] == ["1.000", "0.000", "0.000"] and steps["mask", True][0][1:] == ["−∞", "−∞"]
    for step in found["steps"][1:]:
        check_lines(step)


def test_toy_is_whole_and_every_number_has_its_line() -> None:
    found = learn.toy("the cat sat on")
    keys = [step["key"] for step in found["steps"]]
    assert keys == ["tokens", "embedding", "embedding-position", "embed", "mixer_norm", "q", "k", "v", "scores",
                "mask", "pattern", "z", "out", "resid_mid", "ffn_norm", "ffn-up", "ffn-hidden", "ffn-out",
                "resid_post", "final_norm", "logits", "probabilities"]  # fmt: skip
    for step in found["steps"]:
        assert step["formula"] and all(table["left_out"] == 0 for table in step["tables"])
        check_lines(step) if step["key"] != "tokens" else None
    assert [len(step["tables"]) for step in found["steps"] if step["key"] in ("q", "scores", "pattern", "z")] == [2] * 4
    model = gf.preset(learn.TOY).build(seed=learn.TOY_SEED).eval()
    shares = model(torch.tensor([[0, 1, 2, 3]])).softmax(-1)[0]
    assert found["steps"][-1]["tables"][0]["texts"] == [[say(one) for one in row] for row in shares.tolist()]


def test_requests_are_bounded(page: Any, letters: Loaded) -> None:
    for body, field in (
        ({"chapter": "toy", "text": "the elephant"}, "text"),
        ({"chapter": "toy", "text": "the " * 9}, "text"),
        ({"chapter": "model", "model": "llama-7b", "text": "a"}, "model"),
        ({"chapter": "model", "model": "tiny", "text": "a" * 25}, "text"),
        ({"chapter": "model", "model": "tiny", "text": "abc", "layer": 9}, "layer"),
        ({"chapter": "model", "model": "tiny", "text": "abc", "head": 99}, "head"),
        ({"chapter": "model", "model": "/etc/passwd", "text": "abc"}, "expression"),
        ({"chapter": "model", "model": "t5@0.1m", "text": "abc"}, "model"),
        ({"chapter": "model", "text": "the cat"}, "model"),
        ({"chapter": "other"}, "chapter"),
    ):
        response = page("/api/learn", body)
        assert response.status_code == 400, body
        assert response.json()["error"]["param"] == field, response.text


def test_walk_of_a_served_model_has_its_numbers(page: Any, letters: Loaded) -> None:
    found = page("/api/learn", {"chapter": "model", "model": "tiny", "text": "the cat", "layer": 1, "head": 2}).json()
    assert letters.tokenizer is not None
    ids = letters.tokenizer.encode("the cat").tolist()
    pattern = gf.capture(letters.model, [ids], "layers.1.mixer.pattern")["layers.1.mixer.pattern"][0, 2]
    step = next(one for one in found["steps"] if one["key"] == "pattern")
    assert step["tables"][0]["head"] == 2 and found["trained"]
    assert step["tables"][0]["texts"] == [[say(one) for one in row] for row in pattern.tolist()]


def test_walk_of_a_listed_expression_without_weights_has_random_ones(
    page: Any, pages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = pages.models()
    monkeypatch.setattr(models, "names", ["llama@0.1m", *models.names])
    found = page("/api/learn", {"chapter": "model", "model": "llama@0.1m", "text": "the cat"})
    assert found.status_code == 200 and found.json()["trained"] is False


def test_walk_of_a_finished_run_is_that_of_its_weights(
    page: Any, pages: Any, letters: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 200)
    folder = tmp_path / "run"
    gf.train(letters.config, tmp_path / "text.txt", tokens=512, context=32, batch_size=2, out=folder,
             tokenizer=letters.tokenizer, progress=False)  # fmt: skip
    asked = {"chapter": "model", "model": str(folder), "text": "the cat"}
    assert page("/api/learn", asked).json()["error"]["param"] == "expression"  # a folder that the studio does not list
    models = pages.models()
    monkeypatch.setattr(models, "folder_of", {str(folder): folder}.get)
    assert page("/api/learn", asked).json()["trained"]
    del models.api.models[str(folder)]  # other tests list those that are loaded


def test_model_for_a_walk_needs_its_memory_and_one_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    first = learn.untrained("llama@0.1m")
    assert learn.untrained("llama@0.1m") is first
    learn.untrained("gpt2@0.1m")
    assert learn.untrained.cache_info().currsize == 1
    monkeypatch.setattr(machine, "free_memory", lambda *where: 1000)
    with refused(code="memory", field="model"):
        learn.untrained("llama@0.1m")
