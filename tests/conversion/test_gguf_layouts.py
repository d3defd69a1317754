"""Tensors that families write into a GGUF: names that llama.cpp knows, layouts that `transformers` reads back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

import glassformer as gf
from glassformer.conversion.families import FAMILIES
from glassformer.conversion.fields import Fields
from glassformer.conversion.names import modules_of
from glassformer.conversion.storage import write_gguf
from glassformer.conversion.weights import tensors

from .cases import CASES
from .test_words import SIZES

transformers.logging.disable_progress_bar()
ARCHITECTURES = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}


def known(architecture: str, layers: int) -> set[str]:
    stems = [gguf.TENSOR_NAMES[kind] for kind in gguf.MODEL_TENSORS[ARCHITECTURES[architecture]]]
    names = {stem.format(bid=layer) for stem in stems for layer in range(layers)}
    return {f"{name}.{leaf}" for name in names for leaf in ("weight", "bias")}


@pytest.mark.parametrize("family", sorted(name for name, family in FAMILIES.items() if family.gguf))
def test_names(family: str) -> None:
    proven = []

    @settings(max_examples=10, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(fields=CASES[family].fields, seed=st.just(0))
    def run(fields: dict[str, Any], seed: int) -> None:
        table = FAMILIES[family].gguf
        assert table is not None
        said = CASES[family].model(fields, seed).config.to_dict()
        model = FAMILIES[family].config(Fields(said)).build(seed=None)
        try:
            written = {piece.name for _, _, pieces in table.names.pieces(modules_of(model)) for piece in pieces}
        except KeyError:  # a part that llama.cpp lacks
            return
        assert written <= known(table.architecture, model.config.n_layers)
        proven.append(fields)

    run()
    assert proven


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("llama", {}),
        ("phi3", {}),
        ("starcoder2", {}),
        ("stablelm", {"hidden_size": 48}),
        ("stablelm", {"hidden_size": 48, "use_parallel_residual": True, "use_qkv_bias": True}),
        ("gemma2", {"head_dim": 8}),
        ("gemma3_text", {"head_dim": 8}),
    ],
)
def test_layouts(family: str, said: dict[str, Any], tmp_path: Path) -> None:
    """`transformers` reads the file and undoes what llama.cpp's own converter does."""
    other = CASES[family].model({**SIZES, **said}, 0)
    other.save_pretrained(tmp_path)
    table = FAMILIES[family].gguf
    assert table is not None
    metadata: dict[str, Any] = {"general.architecture": table.architecture, "general.name": family}
    for key, value in (("block_count", 3), ("attention.head_count", 2), ("attention.head_count_kv", 1)):
        metadata[f"{table.architecture}.{key}"] = value
    mine = gf.load(tmp_path, dtype=torch.float32).model
    write_gguf(tmp_path / "model.gguf", metadata, tensors(mine, table.names, torch.float32))
    read = load_gguf_checkpoint(str(tmp_path / "model.gguf"), return_tensors=True, model_to_load=other)["tensors"]
    expected = dict(other.named_parameters())
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(read[name], tensor.detach(), rtol=0, atol=1e-6)  # norms moved by one and back
