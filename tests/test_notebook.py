"""The HTML of configs, models and diagnoses in a notebook."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
import torch

import glassformer as gf
from glassformer.dynamics import Cause, Diagnosis
from glassformer.loaded import Loaded
from glassformer.model import Model
from glassformer.text import ByteTokenizer


def rows(shown: str) -> list[list[str]]:
    """Returns the cells of the table, which must be well-formed."""
    return [["".join(cell.itertext()) for cell in row] for row in ET.fromstring(shown).iter("tr")]


@pytest.mark.parametrize("name", ["gpt2", "llama@10m+gqa:2", "bloom@1m", "falcon-7b"])
def test_the_parts_add_up_to_the_whole(name: str):
    config = gf.preset(name)
    heading, *parts, whole = rows(config._repr_html_())
    assert heading == ["", "part", "parameters"]
    counts = [int(part[2].replace(",", "")) for part in parts]
    assert sum(counts) == int(whole[2].replace(",", "")) == config.num_params()


def test_a_published_count():
    assert rows(gf.preset("gpt2")._repr_html_())[-1] == ["all", "", "124,439,808"]
    assert str(gf.preset("gpt2")).splitlines()[-1].split() == ["all", "124,439,808"]


def test_many_blocks_are_cut_short_and_still_add_up():
    tree = gf.preset("llama@1m").to_dict()
    tree["stack"] = [{"repeat": 1, "blocks": tree["stack"][0]["blocks"]}] * 40
    config = gf.ModelConfig.from_dict(tree)
    shown = rows(config._repr_html_())
    assert len(shown) < 50 and any("28 blocks more" in row[0] for row in shown)
    assert sum(int(row[2].replace(",", "")) for row in shown[1:-1]) == config.num_params()


def test_non_default_settings_are_shown():
    shown = gf.preset("llama@1m+gqa:2+window:64")._repr_html_()
    assert "n_kv_heads 2" in shown and "sliding_window (window 64)" in shown and "rmsnorm" in shown


def test_a_model_shows_its_config_and_without_one_nothing():
    config = gf.preset("gpt2@1m")
    with torch.device("meta"):
        model = config.build(seed=None)
    assert model._repr_html_() == config._repr_html_()
    assert Model(model.embedding, [], None, model.head)._repr_html_() is None


def test_loaded_model_shows_its_parts_and_tokenizer():
    config = gf.preset("llama@1m")
    with torch.device("meta"):
        model = config.build(seed=None)
    shown = Loaded(model, config, ByteTokenizer(), fresh=("a", "b"))._repr_html_()
    assert rows(shown) == rows(config._repr_html_())
    assert (
        "".join(ET.fromstring(shown)[-1].itertext())
        == "ByteTokenizer of 257 tokens; 2 parameters are newly initialised"
    )
    assert "<p>no tokenizer</p>" in Loaded(model, config, None)._repr_html_()


def test_a_diagnosis_shows_its_causes():
    cause = Cause("logit growth", 0.85, "q <grew>", ("+qknorm", "recipe.qk_clip=100"), 2, "layers.2.mixer.q",
                  "max_attention_logit", 1, 1200, 7.25)  # fmt: skip
    shown = Diagnosis("diverged at step 1300: logit growth", (cause,), ("It <diverged>.", "Try +qknorm."))._repr_html_()
    assert rows(shown)[1] == ["logit growth", "85%", "layers.2.mixer.q, head 1", "max_attention_logit", "1,200", "+7.2",
                              "+qknorm, recipe.qk_clip=100"]  # fmt: skip
    assert "It &lt;diverged&gt;. Try +qknorm." in shown and "diverged at step 1300" in shown
    healthy = Diagnosis("nothing wrong", (), ("All is well.",))._repr_html_()
    assert len(rows(healthy)) == 1 and "nothing wrong" in healthy


def test_a_cosine_map_shows_how_alike_rows_are():
    """Three rows on one line and one across: 6 of 12 ordered pairs have |cos| 1."""
    w = torch.tensor([[1.0, 0.0], [-2.0, 0.0], [3.0, 0.0], [0.0, 1.0]])
    found = gf.dynamics.cosine_map(torch.stack([w, torch.eye(2).repeat(2, 1)]))
    assert rows(found._repr_html_())[1:] == [["0", "4", "0.500", "50.0%"], ["1", "4", "0.333", "33.3%"]]
    many = gf.dynamics.cosine_map(torch.ones(20, 3, 2))._repr_html_()
    assert len(rows(many)) == 13 and "the first 12" in many
    assert rows(gf.dynamics.cosine_map(torch.ones(1, 4))._repr_html_())[1] == ["0", "1", "0.000", "0.0%"]
