"""Models that write in the studio: the next token's distribution, and the API of `glassformer serve`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from glassformer.loaded import Loaded
from glassformer.serving.computing import Served
from glassformer.studio.models import distribution, read_next


def test_logits_after_a_text_are_those_of_a_whole_pass(tiny: Served, letters: Loaded) -> None:
    text = "the cat sat on the mat, and the dog"
    ids, logits = read_next(tiny, text)
    with torch.inference_mode():
        whole = letters.model(torch.tensor([ids]))[:, -1]
    assert torch.allclose(logits, whole, atol=1e-5)


@pytest.mark.parametrize(
    "given",
    [{}, {"temperature": 0.5}, {"temperature": 2.0, "top_k": 3}, {"top_p": 0.4}, {"min_p": 0.5}, {"temperature": 0}],
)
def test_distribution_is_that_of_the_published_warpers(tiny: Served, pages: Any, given: dict[str, Any]) -> None:
    """Against the warpers of transformers."""
    warpers = pytest.importorskip("transformers.generation.logits_process")
    found = distribution(pages.models().api, tiny, "the cat", {"temperature": 1.0, **given})
    _, logits = read_next(tiny, "the cat")
    steps = [
        (warpers.TemperatureLogitsWarper, given.get("temperature")), (warpers.TopKLogitsWarper, given.get("top_k")),
        (warpers.TopPLogitsWarper, given.get("top_p")), (warpers.MinPLogitsWarper, given.get("min_p")),
    ]  # fmt: skip
    expected = logits.float()
    for warper, value in steps:
        if value:
            expected = warper(value)(None, expected)
    p = expected.softmax(-1)[0]
    if given.get("temperature") == 0:
        p = torch.nn.functional.one_hot(logits.argmax(-1)[0], logits.shape[-1]).float()
    assert found["kept"] == int((p > 0).sum())
    shares = sorted((one["share"] for one in found["tokens"]), reverse=True)
    assert shares == pytest.approx(sorted(p.topk(len(shares)).values.tolist(), reverse=True), abs=1e-3)
    q = logits.float().softmax(-1)[0]
    assert float(found["entropy"]) == pytest.approx(float(-(q * q.log()).sum()), abs=0.006)


def test_text_that_cannot_be_read_is_refused(page: Any) -> None:
    for text, field in (("a" * 100, "text"), ("", "text")):
        response = page("/api/next", {"model": "tiny", "text": text})
        assert response.status_code == 400 and response.json()["error"]["param"] in (field, "prompt")
    for wrong in ({"temperature": -1}, {"top_p": 0}, {"top_k": 0}, {"seed": 1}):
        assert page("/api/next", {"model": "tiny", "text": "a", **wrong}).status_code == 400


def test_completions_carry_alternatives_and_one_can_be_taken(page: Any) -> None:
    body = {"model": "tiny", "prompt": "the ", "max_tokens": 5, "temperature": 0, "logprobs": 4}
    first = page("/v1/completions", body).json()["choices"][0]
    top = first["logprobs"]["top_logprobs"][0]
    assert len(top) == 4 and max(top, key=top.__getitem__) == first["text"][0]
    other = min(top, key=top.__getitem__)
    again = page("/v1/completions", {**body, "prompt": "the " + other}).json()["choices"][0]
    assert len(again["text"]) == 5 and math.isfinite(again["logprobs"]["token_logprobs"][0])


def test_list_and_description_of_models(page: Any) -> None:
    listed = [{"name": name, "kind": "own", "label": name} for name in ("tiny", "encoder")]
    assert page("/api/models").json() == {"models": ["tiny", "encoder"], "listed": listed, "loaded": ["tiny"]}
    older = page("/api/models?also=/x/comparisons/old/runs/gpt2-seed0/run&also=tiny&also=third").json()["listed"]
    assert older[2:] == [{"name": "/x/comparisons/old/runs/gpt2-seed0/run", "kind": "run", "label": "old: gpt2-seed0"}]
    about = page("/api/model", {"model": "tiny"}).json()
    assert about["generates"] and not about["chats"] and about["context"] == 64
