"""Checkpoints of the bare model, saved without its head: their tensors lack the prefix of the whole one's."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import glassformer as gf
from glassformer.conversion.families import FAMILIES
from tests.refused import refused

from .cases import CASES, TWO_TOWERS
from .test_words import SIZES

torch.set_num_threads(1)

PLAIN = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
OWN_WORDS: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 61, "n_embd": 24, "n_layer": 3, "n_head": 2, "n_positions": 24},
    "bloom": {"vocab_size": 61, "hidden_size": 24, "n_layer": 3, "n_head": 2},
    "mpt": {"vocab_size": 61, "d_model": 24, "n_layers": 3, "n_heads": 2},
    "falcon": {name: value for name, value in PLAIN.items() if name != "intermediate_size"},
    "gpt_neox": {**PLAIN, "rotary_pct": 0.5},
    "opt": {name: value for name, value in PLAIN.items() if name != "intermediate_size"} | {"word_embed_proj_dim": 24},
    "mamba": {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 3},
    "mamba2": {
        "vocab_size": 61,
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "num_heads": 12,
        "head_dim": 4,
        "n_groups": 2,
    },
    "bamba": {**SIZES, "mamba_n_heads": 4, "mamba_d_state": 8, "attn_layer_indices": [1]},
    "deepseek_v2": {**SIZES, "num_key_value_heads": 2, "num_experts_per_tok": 2},
    "deepseek_v3": {**SIZES, "num_key_value_heads": 2},
    "stablelm": {**SIZES, "hidden_size": 48},
}


def saved(family: str, place: Path, **more: Any) -> tuple[Path, Path]:
    """Returns the whole model's folder and the bare one's, both as `transformers` writes them."""
    whole = CASES[family].model({**OWN_WORDS.get(family, SIZES), "tie_word_embeddings": True, **more}, 0)
    whole.save_pretrained(place / "whole")
    body = (
        whole.base_model if whole.base_model is not whole else whole.model
    )  # Llama 4's text has it under no base name
    body.save_pretrained(place / "bare")
    return place / "whole", place / "bare"


def keys(folder: Path) -> set[str]:
    return set(load_file(folder / "model.safetensors"))


HEADED = {"bert", "roberta", "distilbert", "modernbert", "longformer", "big_bird", "vit"}
"""Families whose heads have separate weights, which the bare model lacks."""


@pytest.mark.parametrize("family", sorted(set(CASES) - {"phi"} - TWO_TOWERS - HEADED))
def test_bare_is_whole(family: str, tmp_path: Path) -> None:
    paths = saved(family, tmp_path)
    names = FAMILIES[family].names_of(gf.load(paths[0]).config)
    assert names.prefix and all(name.startswith(names.prefix) for name in keys(paths[0]))
    assert keys(paths[1]) == {name.removeprefix(names.prefix) for name in keys(paths[0])}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole, bare = (gf.load(path).model for path in paths)
    assert whole.state_dict().keys() == bare.state_dict().keys()
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, bare.state_dict()[name]), name


def change(folder: Path, **more: torch.Tensor) -> None:
    """Adds tensors to a folder's file."""
    path = folder / "model.safetensors"
    save_file({**load_file(path), **more}, path, {"format": "pt"})


def test_masks_and_frequencies_of_old_files_are_ignored(tmp_path: Path) -> None:
    """GPT-2 itself is published so: bare, with a mask in every layer."""
    _, bare = saved("gpt2", tmp_path)
    change(bare, **{f"h.{i}.attn.bias": torch.ones(1, 1, 24, 24) for i in range(3)})
    gf.load(bare)
    _, bare = saved("llama", tmp_path)
    change(bare, **{"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)})
    gf.load(bare)
    change(bare, **{"layers.0.self_attn.twist": torch.ones(6)})
    with refused(code="unknown", field="tensor layers.0.self_attn.twist"):
        gf.load(bare)


@pytest.mark.parametrize("family", ["llama", "bloom", "phi"])
def test_a_bare_file_lacks_an_untied_head(family: str, tmp_path: Path) -> None:
    whole, bare = saved(family, tmp_path, tie_word_embeddings=False)
    with refused(code="missing", field="tensor lm_head.weight"):
        gf.load(bare)
    head = {name: value for name, value in load_file(whole / "model.safetensors").items() if "lm_head" in name}
    change(bare, **head)  # a bare body, with the head in the same file
    tokens = torch.arange(9)[None]
    assert torch.equal(gf.load(bare).model(tokens), gf.load(whole).model(tokens))


def test_names_half_with_the_prefix_are_refused(tmp_path: Path) -> None:
    _, bare = saved("llama", tmp_path)
    change(bare, **{"model.norm.weight": torch.ones(24)})
    with refused(code="missing", field="tensor model.embed_tokens.weight"):
        gf.load(bare)
