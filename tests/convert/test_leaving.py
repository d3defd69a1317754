"""A folder comes in and leaves with all that it said: its own head, where an answer ends, how it is drawn."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

import glassformer as gf

SHAPE = "layers=2+d_model=32+heads=2+vocab_size=64+context=32"
FAMILIES = {"llama": "model.embed_tokens.weight", "gpt2": "transformer.wte.weight"}
"""Preset -> what the family calls its embedding."""


def tied(family: str, place: Path, head: str, bare: bool = False) -> Path:
    """A folder whose config ties the head, and whose file has one besides the embedding."""
    gf.save(gf.preset(f"{family}@1m+{SHAPE}+tied").build(seed=1), None, place)
    weights = load_file(place / "model.safetensors")
    weights["lm_head.weight"] = weights[FAMILIES[family]].clone()
    if head == "another":
        weights["lm_head.weight"][-1, -1] += 0.5
    if bare:
        weights = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
    save_file(weights, place / "model.safetensors", {"format": "pt"})
    return place


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_kept(family: str, tmp_path: Path) -> None:
    place = tied(family, tmp_path, "another")
    with pytest.warns(UserWarning, match="untied") as said:
        mine = gf.load(place)
    assert len(said) == 1 and "lm_head.weight" in str(said[0].message)
    assert not mine.config.head.tied and mine.model.config == mine.config
    assert mine.model.head.weight is not None and not torch.equal(mine.model.head.weight, mine.model.embedding.weight)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(place)
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(mine.model(tokens), theirs(tokens).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_that_repeats_the_embedding_is_dropped(family: str, tmp_path: Path) -> None:
    place = tied(family, tmp_path, "same", bare=family == "gpt2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine = gf.load(place)
    assert mine.config.head.tied and mine.model.head.weight is None


def test_a_difference_below_the_dtype_is_none(tmp_path: Path) -> None:
    """`transformers` compares what it has read, in the dtype it was asked for."""
    place = tied("llama", tmp_path, "same")
    weights = load_file(place / "model.safetensors")
    weights["lm_head.weight"] *= 1 + 1e-6
    save_file(weights, place / "model.safetensors", {"format": "pt"})
    assert gf.load(place, dtype=torch.bfloat16).config.head.tied
    with pytest.warns(UserWarning, match="untied"):
        assert not gf.load(place).config.head.tied


class Converted(TorchDispatchMode):
    """The sizes of what is converted to another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if "_to_copy" in str(func):
            self.sizes.append(made.numel())
        return made


def test_comparing_copies_no_whole_tensor(tmp_path: Path) -> None:
    """bf16 weights asked for in fp32: the pieces that are compared are converted, never a matrix."""
    v, d = 1 << 16, 128
    gf.save(gf.preset(f"llama@1m+vocab_size={v}+layers=1+tied").build(), None, tmp_path, dtype=torch.bfloat16)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with Converted() as converted:
        assert gf.load(tmp_path, dtype=torch.float32).config.head.tied
    assert sum(converted.sizes) >= 2 * v * d and max(converted.sizes) <= v * d // 4
