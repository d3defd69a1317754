"""States, experts and patches in the studio are those of the library."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import glassformer as gf
from glassformer.lens.arithmetic import say
from glassformer.loaded import Loaded
from glassformer.serving.computing import Served
from glassformer.studio.files import LANGUAGES, page_files
from glassformer.studio.inside import kept
from glassformer.studio.patching import MOST, patched
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


def ran(lines: list[str], served: Served, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Runs the lines that a panel offers; returns the names that they leave, and the value of the last line as "_"."""
    monkeypatch.setattr(gf, "load", lambda name: served.loaded)
    names: dict[str, Any] = {"gf": gf}
    *before, last = lines
    for line in before:
        exec(line, names)
    try:
        names["_"] = eval(last, names)
    except SyntaxError:
        exec(last, names)
    return names


@pytest.mark.parametrize("site", ["resid_pre", "mixer.out"])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_lines_of_python_patch_what_the_panel_does(site: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    served = served_as("llama@0.1m")
    places = [(layer, at) for at in (4, 5, 6, 9) for layer in (0, 1)][:count]
    found = patched(served, TEXT, OTHER, site, places, False)
    logits = ran(found["python"], served, monkeypatch)["logits"][0, -1].detach()
    shown = [float(one["probability"].removesuffix(" %")) for one in found["answers"][-1 if places else 1]]
    assert shown == pytest.approx((100 * logits.softmax(-1).topk(len(shown)).values).tolist(), abs=0.06)
    with torch.no_grad():
        plain = served.loaded.model(torch.tensor([list(OTHER.encode())]))[0, -1]
    assert torch.allclose(logits, plain, atol=1e-5) == (count == 0)


@pytest.mark.parametrize("expression", ["llama@0.1m+mamba", "llama@0.1m+moe:4:2", "llama@0.1m+retention+moe:4:2"])
def test_lines_of_python_read_what_the_panel_does(expression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served = served_as(expression)
    found = kept(served, TEXT, 1)
    names = ran(found["python"], served, monkeypatch)
    if found["states"] is not None:
        tensors = found["states"]["tensors"]
        assert [one["name"] for one in tensors] == list(names["_"])
        for shown, x in zip(tensors, names["_"].values(), strict=True):
            corner = x[0].detach().float().reshape(-1, x.shape[-1])[:12, :12]
            for row, expected in zip(shown["texts"], corner.tolist(), strict=True):
                assert [float(one.replace("−", "-")) for one in row] == pytest.approx(expected, rel=0.06, abs=1e-3)
    if found["experts"] is not None:
        line = next(one for one in found["python"] if "expert_routing" in one)
        weights = eval(line, names).weights
        assert found["experts"]["weights"]["texts"] == [[say(one) for one in row] for row in weights.tolist()]


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


@pytest.mark.parametrize("language", LANGUAGES)
def test_page_names_the_largest_number_of_tokens_of_a_patch(language: str) -> None:
    assert str(MOST) in json.loads(page_files()[f"{language}.json"])["patch-lead"]
