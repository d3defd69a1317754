"""States, experts and patches in the studio are those of the library."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import glassformer as gf
from glassformer.lens.arithmetic import say
from glassformer.loaded import Loaded
from glassformer.serving.computing import Served
from glassformer.studio.inside import kept
from glassformer.studio.patching import patched
from glassformer.text import ByteTokenizer
from tests.refused import refused

TEXT, OTHER = "the cat sat", "the dog sat"


def served_as(expression: str) -> Served:
    config = gf.preset(f"{expression}+vocab_size=257+context=64")
    return Served("x", Loaded(config.build(seed=1).eval(), config, ByteTokenizer()), 2, 64)


@pytest.mark.parametrize("mixer", ["mamba", "lstm", "retention", "rglru", "conv"])
def test_states_are_those_after_reading_the_text_at_once(mixer: str) -> None:
    served = served_as(f"llama@0.1m+{mixer}")
    found = kept(served, TEXT)["states"]
    state = served.loaded.model.init_state(1, len(TEXT))
    with torch.no_grad():
        served.loaded.model.hidden_states(torch.tensor([list(TEXT.encode())]), state)
    assert found["layers"] == [0, 1] and len(found["sizes"]["texts"]) == len(TEXT)
    for at, layer in enumerate(state.layers):
        flat = torch.cat([one.float().flatten() for one in layer.tensors().values()])
        last = float(found["sizes"]["texts"][-1][at].replace("−", "-"))
        assert last == pytest.approx(float(flat.square().mean().sqrt()), rel=0.05, abs=1e-3)


def test_experts_are_those_of_the_reading() -> None:
    served = served_as("llama@0.1m+moe:4:2")
    found = kept(served, TEXT, 1)
    assert found["states"] is None and found["experts"]["layer"] == 1
    reading = gf.lens.expert_routing(served.loaded.model, torch.tensor([list(TEXT.encode())]), 1)
    assert found["experts"]["weights"]["texts"] == [[say(one) for one in row] for row in reading.weights.tolist()]
    assert len(found["experts"]["load"]["texts"]) == 2


def test_attention_with_one_network_has_neither(page: Any) -> None:
    found = page("/api/states", {"model": "tiny", "text": TEXT}).json()
    assert found["states"] is None and found["experts"] is None


def test_stream_of_all_tokens_brings_the_whole_answer_back() -> None:
    served = served_as("llama@0.1m")
    differ = [i for i, (a, b) in enumerate(zip(TEXT, OTHER, strict=True)) if a != b]
    found = patched(served, TEXT, OTHER, "resid_pre", [(0, at) for at in differ], False)
    assert found["answers"][2] == found["answers"][0] != found["answers"][1]
    nothing = patched(served, TEXT, OTHER, "resid_pre", [(0, 0)], False)  # both texts have this token
    assert nothing["answers"][2] == nothing["answers"][1]
    plain = patched(served, TEXT, OTHER, "resid_pre", [], False)
    assert len(plain["answers"]) == 2 and plain["restored"] is None


def test_every_place_is_the_reading() -> None:
    served, other = served_as("llama@0.1m"), "the cat sap"
    model = served.loaded.model
    found = patched(served, TEXT, other, "mixer.out", [], True)["every"]
    clean, corrupt = (torch.tensor([list(text.encode())]) for text in (TEXT, other))
    with torch.no_grad():
        a, b = (int(model(one)[0, -1].argmax()) for one in (clean, corrupt))
    columns = list(range(found["first"], len(TEXT)))
    reading = gf.lens.activation_patching(
        model, clean, corrupt, lambda logits: logits[:, -1, a] - logits[:, -1, b], ["mixer.out"], columns
    )
    assert found["texts"] == [[say(one) for one in row] for row in reading.grids["mixer.out"].tolist()]


def test_patches_are_bounded(page: Any) -> None:
    body = {"model": "tiny", "text": TEXT, "other": OTHER}
    assert page("/api/patch", body).status_code == 200
    for wrong, field in (
        ({"other": "the dogs sat"}, "other"), ({"places": [[9, 0]]}, "places"), ({"places": [[0, 99]]}, "places"),
        ({"text": "a" * 40}, "text"), ({"site": "embed"}, "site"), ({"places": [[0, 0]] * 65}, "places"),
    ):  # fmt: skip
        response = page("/api/patch", {**body, **wrong})
        assert response.status_code == 400 and response.json()["error"]["param"].startswith(field), wrong
    assert page("/api/states", {"model": "tiny", "text": "a" * 65}).status_code == 400
    assert page("/api/states", {"model": "tiny", "text": TEXT, "layer": 9}).json()["error"]["param"] == "layer"


def test_search_between_texts_with_one_continuation_is_refused() -> None:
    served = served_as("llama@0.1m")
    with refused(code="conflict", field="other"):
        patched(served, TEXT, TEXT, "resid_pre", [], True)
