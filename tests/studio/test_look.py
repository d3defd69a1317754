"""The inside of a model in the studio is what the lens says, and removed components are those of the edits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import glassformer as gf
from glassformer.loaded import Loaded
from glassformer.studio.kept import KEPT, PageShelf

TEXT = "the cat sat on the mat"


def loss_of(letters: Loaded, text: str) -> float:
    ids = torch.tensor([letters.tokenizer.encode(text).tolist()])  # type: ignore[union-attr]
    with torch.no_grad():
        return float(letters.model.loss(ids[:, :-1], ids[:, 1:]))


def test_losses_are_those_of_the_model_with_and_without_a_head(page: Any, letters: Loaded) -> None:
    removed = ["layers.1.heads.2", "layers.0.ffn"]
    whole, without = page("/api/look", {"model": "tiny", "text": TEXT, "ablate": removed}).json()["answers"]
    assert float(whole["loss"]) == pytest.approx(loss_of(letters, TEXT), abs=1e-3)

    def zero(z: torch.Tensor) -> torch.Tensor:
        z = z.clone()
        z[:, :, 2] = 0
        return z

    with gf.edit(letters.model, {"layers.1.mixer.z": zero, "layers.0.ffn.out": torch.zeros_like}):
        assert float(without["loss"]) == pytest.approx(loss_of(letters, TEXT), abs=1e-3)
    assert whole["loss"] != without["loss"] and without["name"].endswith("without layers.1.heads.2, layers.0.ffn")
    assert float(whole["loss"]) == pytest.approx(loss_of(letters, TEXT), abs=1e-3)  # nothing stays removed


def test_page_is_that_of_inspect_and_may_run_only_its_script(page: Any) -> None:
    found = page("/api/look", {"model": "tiny", "text": TEXT}).json()
    assert [len(one["heads"]) for one in found["layers"]] == [4, 4] and found["commands"][0].startswith(
        "glassformer inspect"
    )
    response = page(f"/api/pages/{found['page']}")
    assert response.status_code == 200 and response.text.startswith("<!doctype html>") and "tiny" in response.text
    policy = response.headers["content-security-policy"]
    assert policy == "sandbox allow-scripts; frame-ancestors 'self'" and "default-src &#x27;none&#x27;" in response.text


@pytest.mark.parametrize("name", ["x", "..", "%2e%2e", "../start"])
def test_no_other_page_is_sent(page: Any, studio: Any, name: str) -> None:
    assert page(f"/api/pages/{name}").status_code in (200, 404)
    assert "<!doctype" not in page(f"/api/pages/{name}").text
    assert studio.get("/api/pages/x").status_code == 401


def test_missing_component_is_refused(page: Any) -> None:
    for name in ("layers.9.ffn", "layers.0.heads.9", "embed", "layers.0.heads.x", "../x"):
        response = page("/api/look", {"model": "tiny", "text": TEXT, "ablate": [name]})
        assert response.status_code == 400, name


def test_oldest_page_goes_first() -> None:
    kept = PageShelf()
    names = [kept.put(str(i)) for i in range(KEPT + 2)]
    assert kept.get(names[0]) is None and kept.get(names[-1]) == str(KEPT + 1) and len(set(names)) == KEPT + 2
