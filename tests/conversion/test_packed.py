"""Weights that stay packed compute what unpacked ones do. The `gguf` package packs, and unpacks for the comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file

import glassformer as gf
from glassformer.conversion.families import FAMILIES
from glassformer.conversion.fields import Fields
from glassformer.conversion.gguf import write
from glassformer.conversion.storage import open_tensors, write_gguf
from glassformer.conversion.weights import PackedLinear, fill, tensors
from glassformer.model import Model
from glassformer.text.subword import BPETokenizer

torch.set_num_threads(1)

TOKENIZER = BPETokenizer.train(["the cat sat on the mat\n"] * 9, 270)  # the package writes no empty list of merges
WIDE = {"vocab_size": TOKENIZER.vocab_size, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1,
        "num_attention_heads": 4, "max_position_embeddings": 32}  # fmt: skip
LLAMA = {**WIDE, "num_key_value_heads": 2}
TYPES = gguf.GGMLQuantizationType
TOKENS = torch.randint(TOKENIZER.vocab_size, (2, 9), generator=torch.Generator().manual_seed(1))


def model_of(family: str, fields: dict[str, Any]) -> Model:
    return FAMILIES[family].config(Fields(fields)).build(seed=0)


def packed(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Returns packed values; for Q4_K, which the package cannot pack, random blocks with two small scales (halves)."""
    if kind != TYPES.Q4_K:
        return quantize(values, kind)
    blocks = np.random.default_rng(0).integers(0, 256, (values.size // 256, 144), dtype=np.uint8)
    blocks[:, :4] = np.array([1e-4, 7e-4], np.float16).view(np.uint8)
    return blocks.reshape(len(values), -1)


def repack(plain: Path, to: Path, kind: gguf.GGMLQuantizationType, unpack: bool = False) -> int:
    """Writes a copy of a GGUF file with its matrices packed, or packed and unpacked again; returns their number."""
    reader, count = gguf.GGUFReader(plain), 0
    writer = gguf.GGUFWriter(to, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        values = tensor.data
        if values.ndim == 2:
            count += 1
            values = packed(values, kind)
            values = dequantize(values, kind) if unpack else values
        writer.add_tensor(tensor.name, values, raw_dtype=None if unpack or tensor.data.ndim < 2 else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return count


def logits(model: Model) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K"])
@pytest.mark.parametrize(
    ("family", "fields", "theirs"),
    [
        ("llama", LLAMA, {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"}),  # Paired
        ("phi3", {**LLAMA, "partial_rotary_factor": 0.5}, {"attn_qkv", "attn_output", "ffn_up", "ffn_down"}),  # Part
        ("gpt_neox", WIDE, {"attn_qkv", "attn_output", "ffn_up", "ffn_down"}),
    ],
)
def test_packed_is_unpacked(family: str, fields: dict[str, Any], theirs: set[str], kind: str, tmp_path: Path) -> None:
    plain, small, again = (tmp_path / f"{name}.gguf" for name in ("plain", "small", "again"))
    write(model_of(family, fields), TOKENIZER, plain, kind="F32")
    for path in (small, again):
        assert repack(plain, path, TYPES[kind], unpack=path == again) == len(theirs) + 2  # embedding and head
    kept = gf.load(small, quantize="keep").model
    held = [module for module in kept.modules() if isinstance(module, PackedLinear)]
    names = {piece.name.split(".")[-2] for module in held for piece, _ in module.packed}
    assert names == theirs
    assert {name for name, weight in kept.named_parameters() if weight.dim() == 2} == {
        "embedding.weight",
        "head.weight",
    }
    assert torch.equal(logits(kept), logits(gf.load(small).model))
    assert torch.equal(logits(kept), logits(gf.load(again).model))
    assert not torch.equal(logits(kept), logits(gf.load(plain).model))
    half = [gf.load(small, dtype=torch.bfloat16, quantize=quantize).model for quantize in ("keep", None)]
    assert torch.equal(*map(logits, half))


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K"])
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("gpt_neox", WIDE),
        ("falcon", {**WIDE, "new_decoder_architecture": True, "num_kv_heads": 2}),  # groups of several queries
    ],
)
def test_fused_by_groups(family: str, fields: dict[str, Any], kind: str, tmp_path: Path) -> None:
    """A layout of q, k and v that no GGUF of llama.cpp has: the tensors of the published folder, packed."""
    model = model_of(family, fields)
    names = FAMILIES[family].names_of(model.config)
    write_gguf(tmp_path / "plain.gguf", {"general.architecture": family}, tensors(model, names))
    repack(tmp_path / "plain.gguf", tmp_path / "small.gguf", TYPES[kind])
    with open_tensors(tmp_path / "small.gguf") as file:
        kept, unpacked = (fill(model.config, names, file, keep=keep) for keep in (True, False))
    assert isinstance(kept.layers[0].mixer.qkv, PackedLinear)
    assert torch.equal(logits(kept), logits(unpacked))
    assert not torch.equal(logits(kept), logits(model))


def test_rows_of_partial_blocks_are_not_packed(tmp_path: Path) -> None:
    """Rows of 48 and 80 are not multiples of 32; the attention's output projection has rows of 4 heads of 16."""
    model = model_of("llama", {**LLAMA, "hidden_size": 48, "head_dim": 16, "intermediate_size": 80})
    write(model, TOKENIZER, tmp_path / "model.gguf", kind="Q8_0")
    kept = gf.load(tmp_path / "model.gguf", quantize="keep").model
    held = {name for name, module in kept.named_modules() if isinstance(module, PackedLinear)}
    assert held == {"layers.0.mixer.output"}
    assert torch.equal(logits(kept), logits(gf.load(tmp_path / "model.gguf").model))


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_weights_have_equal_logits(kind: torch.dtype, tmp_path: Path) -> None:
    """Matrices in float8, norms in bfloat16: torch's own conversion gives the values, `transformers` the logits."""
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).eval()
    small = {name: value.to(kind if value.dim() > 1 else torch.bfloat16) for name, value in theirs.state_dict().items()}
    theirs.config.save_pretrained(tmp_path / "in")
    save_file(small, tmp_path / "in" / "model.safetensors")
    theirs.load_state_dict({name: value.float() for name, value in small.items()})
    loaded = gf.load(tmp_path / "in")
    assert loaded.model.dtype == torch.float32 and loaded.unpacked.startswith("F8_E")
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(TOKENS), theirs(TOKENS).logits, rtol=0, atol=2e-5)
        gf.convert(tmp_path / "in", tmp_path / "out", progress=False)
        torch.testing.assert_close(gf.load(tmp_path / "out").model(TOKENS), theirs(TOKENS).logits, rtol=0, atol=2e-5)
