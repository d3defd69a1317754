"""Answers to the questions of the pages: they are those of the library."""

from __future__ import annotations

import json
import pkgutil
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import glassformer as gf
import glassformer.studio
from experiments import gallery as cards
from glassformer.names.known import PRESETS, YEARS
from glassformer.studio.compose import PLACES, choices, compose, cost, with_change
from glassformer.studio.files import LANGUAGES, page_files
from glassformer.studio.gallery import AXES, gallery
from tests.refused import refused

PAGE = Path(str(files("glassformer.studio"))) / "page"


def test_stored_cards_equal_the_configs() -> None:
    assert cards.CARDS.read_text(encoding="utf-8") == cards.text(), "python -m experiments.gallery"


def test_every_preset_has_a_card_and_a_year() -> None:
    found = gallery()
    assert [card["name"] for card in found["cards"]] == PRESETS and set(YEARS) == set(PRESETS)
    assert all(card["parameters"] == gf.preset(card["name"]).num_params() for card in found["cards"])
    assert list(found["filters"]) == list(AXES)


@pytest.mark.parametrize(
    ("axis", "word", "names"),
    [
        ("mixer", "qknorm", {"qwen3-8b", "olmo-2-7b", "gemma-3-1b"}),
        ("position", "nope", {"jamba-v0.1"}),
        ("visibility", "window", {"mistral-7b", "gemma-2-2b"}),
        ("mixer", "gated_deltanet", {"qwen3-next-80b"}),
        ("mixer", "mla", {"deepseek-v3"}),
        ("position", "alibi", {"bloom-7b1", "mpt-7b"}),
    ],
)
def test_part_of_some_layers_is_found(axis: str, word: str, names: set[str]) -> None:
    having = {card["name"] for card in gallery()["cards"] if word in card["parts"][axis]}
    assert names <= having and "gpt2" not in having


def test_difference_is_that_of_inspect_and_plan(page: Any) -> None:
    found = page("/api/difference", {"first": "gpt2", "second": "llama-7b"}).json()
    rows = gf.inspect("gpt2", diff="llama-7b").to_dict()["ideas"]
    assert [(one["part"], one["first"]) for one in found["ideas"]] == [(one["part"], one["this"]) for one in rows]
    assert ["parameters", "124,439,808", "6,738,415,616"] in found["costs"][0]["rows"]
    assert all("gf-changed" in drawing for drawing in found["drawings"])


def test_difference_of_a_model_from_itself(page: Any) -> None:
    found = page("/api/difference", {"first": "gpt2", "second": "gpt2"}).json()
    assert found["ideas"] == [] and "gf-changed" not in found["drawings"][0]


@pytest.mark.parametrize("name", ["llama@1m", "jamba-v0.1", "t5-small", "mamba-130m", "gpt-1", "falcon-7b", "vit-base"])
def test_every_place_of_a_drawing_opens_choices(name: str) -> None:
    found = compose(name)
    places = re.findall(r'data-place="([^"]+)"', found["drawing"])
    assert {place.rpartition(".")[2] for place in places} <= set(PLACES)
    assert len(places) == len(set(places)) or name in ("gpt-1",) or "norm" in str(places)


def test_costs_of_a_choice_are_those_of_the_changed_model() -> None:
    found = {one["word"]: one for one in choices("llama@10m+gqa:2", "mixer")["choices"]}
    before, after = gf.preset("llama@10m+gqa:2"), gf.preset("llama@10m+mqa")
    share = (after.num_params() - before.num_params()) / before.num_params()
    assert found["mqa"]["parameters"]["share"] == f"{share:+.1%}".replace("-", "−")
    assert found["gqa"]["current"] and not found["mqa"]["current"]
    assert found["mamba"]["dropped"] == ["gqa:2"] and "refused" not in found["mamba"]
    sizes = {one["word"]: one for one in choices("llama@10m+gqa:2", "size")["choices"]}
    large = gf.preset("llama@70b+gqa:2").num_params() / before.num_params()
    assert sizes["@70b"]["parameters"]["share"] == f"× {large:,.0f}"


def test_choice_that_does_not_fit_has_its_reason() -> None:
    found = {one["word"]: one for one in choices("llama@10m", "visibility")["choices"]}
    assert "refused" not in found["window"]
    scaled = {one["word"]: one for one in choices("gpt2@1m", "rotary_scaling")["choices"]}
    assert "rotary" in scaled["yarn"]["refused"]


@pytest.mark.parametrize(
    ("expression", "change", "expected"),
    [
        ("llama@10m", "gqa:2", "llama@10m+gqa:2"),
        ("llama@10m+gqa:2", "gqa:3", "llama@10m+gqa:3"),
        ("llama@10m+gqa:2", "mha", "llama@10m"),
        ("llama@10m+layernorm", "rmsnorm", "llama@10m"),
        ("llama@10m", "rope", "llama@10m"),
        ("gpt2@10m+rope+rmsnorm", "alibi", "gpt2@10m+rmsnorm+alibi"),
        ("llama@10m+gqa:2", "mamba", "llama@10m+mamba"),
        ("llama@10m+norm.eps=1e-5", "norm.eps=1e-6", "llama@10m"),
    ],
)
def test_change_gives_the_shortest_expression(expression: str, change: str, expected: str) -> None:
    assert with_change(expression, change) == expected


def test_change_that_does_not_fit_is_refused() -> None:
    with refused(code="unsupported", field="position"):
        with_change("gpt2@1m", "yarn:4")
    with refused(code="unknown", field="axis"):
        choices("gpt2@1m", "nothing")


def test_cost_is_the_printed_plan(page: Any) -> None:
    body = {"expression": "llama-3-8b", "train": True, "machine": "h100:8", "batch": 64}
    found = page("/api/cost", body).json()
    planned = gf.plan("llama-3-8b", train=True, machine="h100:8", batch=64)
    for row in found["costs"][0]["rows"]:
        assert " ".join(row[-1].split()) in " ".join(str(planned).split())
    assert found["commands"] == ["glassformer plan llama-3-8b --train --machine h100:8 --batch 64"]
    assert found["python"] == ['gf.plan("llama-3-8b", train=True, machine="h100:8", batch=64)']


def test_options_of_a_plan_are_bounded(page: Any) -> None:
    for wrong in ({"batch": 0}, {"batch": 1 << 50}, {"machine": "/etc/passwd"}, {"machine": "h100:99999"},
                  {"weights": "int1"}, {"machines": "x"}):  # fmt: skip
        assert page("/api/cost", {"expression": "llama@1m", **wrong}).status_code == 400


def test_commands_of_a_panel_are_accepted(page: Any) -> None:
    from glassformer.cli import main

    for command in (*compose("llama@1m", "gpt2@1m")["commands"], *cost("llama@1m", batch=2)["commands"]):
        assert main([*command.split()[1:], "--json"]) == 0


def test_languages_have_the_same_words_and_every_word_that_is_used() -> None:
    pairs = {
        name: json.loads((PAGE / f"{name}.json").read_text(encoding="utf-8"), object_pairs_hook=list)
        for name in LANGUAGES
    }
    words = {name: dict(some) for name, some in pairs.items()}
    assert {name: len(some) for name, some in words.items()} == {name: len(some) for name, some in pairs.items()}
    code = "".join(text.decode() for name, text in page_files().items() if name.endswith(".js"))
    used = set(re.findall(r'\bt\("([\w-]+)"', code))
    for name in LANGUAGES:
        assert words[name].keys() == words["en"].keys() and used <= words[name].keys()
        for key, text in words[name].items():
            assert set(re.findall(r"\{\w+\}", text)) == set(re.findall(r"\{\w+\}", words["en"][key])), key
    axes = {*AXES, *(axis for some in PLACES.values() for axis in some)}
    assert {f"axis-{axis}" for axis in axes} | {f"place-{place}" for place in PLACES} <= words["en"].keys()


def test_modules_are_described_in_the_package() -> None:
    modules = {one.name for one in pkgutil.iter_modules(glassformer.studio.__path__)}
    described = {line.split()[0] for line in (glassformer.studio.__doc__ or "").splitlines()[2:] if line}
    assert described == modules | {"page"}


def test_first_page_needs_no_torch() -> None:
    code = (
        "import sys; from glassformer.studio.app import Pages, make_studio, open_routes; "
        "from glassformer.studio import server; open_routes(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_dry_start_checks_the_model_and_has_no_token() -> None:
    from glassformer.studio.server import start

    assert start("llama@1m", dry=True).to_dict() == {"address": "http://127.0.0.1:8600/", "expression": "llama@1m"}
    with refused(code="unknown", field="name"):
        start("lama@1m", dry=True)
    with refused(code="range", field="port"):
        start(port=70_000, dry=True)
