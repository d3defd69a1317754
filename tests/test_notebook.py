"""What configs and models show of themselves in a notebook."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
import torch

import glassformer as gf
from glassformer.model import Model


def rows(shown: str) -> list[list[str]]:
    """The cells of the table, which must be well-formed."""
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


def test_many_blocks_are_cut_short_and_still_add_up():
    tree = gf.preset("llama@1m").to_dict()
    tree["stack"] = [{"repeat": 1, "blocks": tree["stack"][0]["blocks"]}] * 40
    config = gf.ModelConfig.from_dict(tree)
    shown = rows(config._repr_html_())
    assert len(shown) < 50 and any("28 blocks more" in row[0] for row in shown)
    assert sum(int(row[2].replace(",", "")) for row in shown[1:-1]) == config.num_params()


def test_what_is_not_as_by_default_is_told():
    shown = gf.preset("llama@1m+gqa:2+window:64")._repr_html_()
    assert "n_kv_heads 2" in shown and "sliding_window (window 64)" in shown and "rmsnorm" in shown


def test_a_model_shows_its_config_and_without_one_nothing():
    config = gf.preset("gpt2@1m")
    with torch.device("meta"):
        model = config.build(seed=None)
    assert model._repr_html_() == config._repr_html_()
    assert Model(model.embedding, [], None, model.head)._repr_html_() is None
