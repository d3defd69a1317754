"""llama.cpp runs what is written for it: its log-probabilities on tiny models of every family it has.

It runs in a separate process, because it aborts if a file is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import glassformer as gf
from glassformer.conversion import gguf
from glassformer.conversion.families import FAMILIES
from glassformer.conversion.fields import Fields
from glassformer.conversion.storage import open_tensors, write_gguf
from glassformer.model import Model
from glassformer.parts.linear import Linear
from glassformer.text import ByteTokenizer
from tests.refused import refused

if find_spec("xllamacpp") is None:
    pytest.skip("llama.cpp is not installed (xllamacpp)", allow_module_level=True)

CONTEXT, VOCAB, TOP = 128, 257, 20
LENGTHS = (1, 7, 40)

PROBE = """
import json, sys
import xllamacpp as x
path, prompts, top = json.loads(sys.argv[1])
p = x.CommonParams()
p.model.path, p.n_ctx, p.n_parallel, p.warmup, p.verbosity = path, 128, 1, False, -1
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 1
p.cache_type_k = p.cache_type_v = x.ggml_type.GGML_TYPE_F32
p.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server, found = x.Server(p), []
for prompt in prompts:
    asked = {"prompt": prompt, "n_predict": 1, "n_probs": top, "temperature": 0.0, "cache_prompt": False}
    said = server.handle_completions(asked)
    said = json.loads(said) if isinstance(said, str) else said
    found.append([[one["id"], one["logprob"]] for one in said["choices"][0]["logprobs"]["content"][0]["top_logprobs"]])
print("FOUND" + json.dumps(found))
"""

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LIKE_LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
OWN_WORDS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT},
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4, "seq_length": CONTEXT},
    "falcon": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": CONTEXT},
    "gpt_neox": {**LIKE_LLAMA, "rotary_pct": 0.25, "num_key_value_heads": None, "hidden_act": "gelu"},
    "mpt": {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": CONTEXT},
    "gemma": {**LIKE_LLAMA, "head_dim": 16},
    "gemma2": {**LIKE_LLAMA, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8},
    "gemma3_text": {
        **LIKE_LLAMA,
        "num_hidden_layers": 7,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 8,
    },
    "starcoder2": {**LIKE_LLAMA, "sliding_window": None},
    "stablelm": {**LIKE_LLAMA, "partial_rotary_factor": 0.5},
    "phi3": {**LIKE_LLAMA, "partial_rotary_factor": 0.5},  # turned whole it would be written as llama
    "phi": {**LIKE_LLAMA, "num_key_value_heads": 4, "hidden_act": "gelu_new"},
}
EXACT, TABLED, ROUNDED = 1e-4, 2e-2, 3e-2
"""Errors of log-probabilities: in fp32; if llama.cpp takes GELU from a table in 16 bits; and if it rounds the inputs of
matmuls to 8 bits, where a value between two steps may be rounded up or down (at most 0.020 over five texts; weights
that are wrong by 0.2 % give 0.04 to 0.08, a block with the wrong sign 0.26)."""


def model_of(family: str, **more: Any) -> Model:
    fields = {"vocab_size": VOCAB, **OWN_WORDS.get(family, LIKE_LLAMA), **more}
    config = FAMILIES[family].config(Fields(fields))
    model, draw = config.build(seed=0), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=draw)
            if weight.dim() == 1 or "norm" in name:
                weight.add_(noise * 0.2)
            else:
                weight.copy_(noise * (0.5 if "embedding" in name else 1.2 / weight.shape[-1] ** 0.5))
            if weight.shape[0] == VOCAB:  # the next byte shall be ASCII, because llama.cpp reports no half characters
                weight[128:] *= 0.01
    return model.eval()


def llama_cpp(path: Path, prompts: list[list[int]]) -> list[list[tuple[int, float]]]:
    asked = json.dumps([str(path), prompts, TOP])
    done = subprocess.run([sys.executable, "-c", PROBE, asked], capture_output=True, text=True, timeout=120)
    answer = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    assert answer, done.stderr[-800:]
    return json.loads(answer[0].removeprefix("FOUND"))


def compare(model: Model, path: Path) -> float:
    """Returns the largest difference between our and llama.cpp's log-probabilities."""
    tokens = torch.randint(1, 128, (1, max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    found = llama_cpp(path, [tokens[0, :t].tolist() for t in LENGTHS])
    worst = 0.0
    for t, top in zip(LENGTHS, found, strict=True):
        with torch.no_grad():
            mine = model(tokens[:, :t])[0, -1].log_softmax(-1)
        worst = max(worst, *(abs(float(mine[token]) - theirs) for token, theirs in top))
    return worst


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.gguf])
def test_families(family: str, tmp_path: Path) -> None:
    model = model_of(family)
    path = tmp_path / "model.gguf"
    assert gguf.write(model, ByteTokenizer(), path, kind="F32") is FAMILIES[family]
    assert gf.load(path).config.resolved() == model.config.resolved()
    tabled = "gelu" in getattr(next(model.config.layers()).ffn, "activation", "")
    assert compare(model, path) < (TABLED if tabled else EXACT)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 32},
        YARN,
        {**YARN, "attention_factor": 1.0},
        {**YARN, "attention_factor": 1.3},
        {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    ],
    ids=str,
)  # fmt: skip
def test_scalings(scaling: dict[str, Any], tmp_path: Path) -> None:
    """A magnitude of YaRN's own is one factor in config.json and the share of another in a GGUF."""
    model = model_of("llama", rope_scaling=scaling)
    gguf.write(model, ByteTokenizer(), tmp_path / "model.gguf", kind="F32")
    back = gf.load(tmp_path / "model.gguf").model
    tokens = torch.arange(100)[None]
    torch.testing.assert_close(back(tokens), model(tokens), rtol=1e-4, atol=1e-4)
    assert compare(model, tmp_path / "model.gguf") < EXACT


def rewritten(path: Path, **changes: Any) -> Path:
    """Returns the file with more metadata of its architecture."""
    with open_tensors(path) as file:
        metadata = file.metadata | {f"llama.{key.replace('__', '.')}": value for key, value in changes.items()}
        write_gguf(path.with_name("changed.gguf"), metadata, {name: file.tensor(name) for name in file.entries})
    return path.with_name("changed.gguf")


@pytest.mark.parametrize(
    "changes",
    [
        {"rope__scale_linear": 4.0},
        {"rope__scaling__factor": 4.0},
        {"rope__scaling__factor": 4.0, "rope__scaling__type": "none"},
        {"rope__scaling__factor": 4.0, "rope__scaling__type": "linear", "rope__scale_linear": 2.0},
        {"rope__scaling__attn_factor": 1.0},
    ],
    ids=str,
)
def test_metadata_that_scales_positions(changes: dict[str, Any], tmp_path: Path) -> None:
    gguf.write(model_of("llama"), ByteTokenizer(), tmp_path / "model.gguf", kind="F32")
    path = rewritten(tmp_path / "model.gguf", **changes)
    assert compare(gf.load(path).model, path) < EXACT


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rope__scaling__attn_factor": 1.3}, "rope.scaling.attn_factor"),
        ({"rope__scaling__attn_factor": 1.3, "rope__scaling__type": "linear"}, "rope.scaling.attn_factor"),
        ({"attention__causal": False}, "llama.attention.causal"),
        ({"attention__value_length": 8}, "attention.value_length"),
        ({"expert_count": 8}, "llama.expert_count"),
    ],
    ids=str,
)
def test_metadata_that_is_obeyed_there_and_not_here_is_refused(
    changes: dict[str, Any], field: str, tmp_path: Path
) -> None:
    gguf.write(model_of("llama"), ByteTokenizer(), tmp_path / "model.gguf", kind="F32")
    with refused(code="unsupported", field=field):
        gf.load(rewritten(tmp_path / "model.gguf", **changes))


def test_metadata_that_is_unknown_is_named(tmp_path: Path) -> None:
    gguf.write(model_of("llama"), ByteTokenizer(), tmp_path / "model.gguf", kind="F32")
    with pytest.warns(UserWarning, match="attention.of_tomorrow"):
        gf.load(rewritten(tmp_path / "model.gguf", attention__of_tomorrow=1.5))


LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0, 1.1, 1.3, 1.7, 2.5, 3.0, 4.0, 5.0],
            "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 12.0, 14.0, 16.0]}  # fmt: skip
HALF = {name: value[:4] if isinstance(value, list) else value for name, value in LONGROPE.items()}
"""LongRope for heads with half of their dimensions rotated."""


@pytest.mark.parametrize(
    ("family", "scaling", "trained", "tensor"),
    [
        ("llama", LLAMA3, 32, gguf.FREQS),
        ("granite", LLAMA3, 32, gguf.FREQS),
        # llama.cpp decides by the context it is started with, here 256, and not by the length of the text.
        *((name, LONGROPE, 256, gguf.SHORT) for name in ("llama", "granite")),
        *((name, LONGROPE, 4, gguf.LONG) for name in ("llama", "granite")),
        ("phi3", HALF, 256, gguf.SHORT),
        ("phi3", HALF, 4, gguf.LONG),
    ],
)
def test_divisors_of_frequencies(
    family: str, scaling: dict[str, Any], trained: int, tensor: str, tmp_path: Path
) -> None:
    """Every family that declares them; a wrong one is seen there, and read here as it is there."""
    table, path = FAMILIES[family].gguf, tmp_path / "model.gguf"
    assert table is not None and table.factors
    contexts = {"original_max_position_embeddings": trained, "max_position_embeddings": 512}
    model = model_of(family, rope_scaling=scaling, **contexts)
    assert gguf.write(model, ByteTokenizer(), path, kind="F32") is FAMILIES[family]
    assert compare(model, path) < EXACT
    with open_tensors(path) as file:
        entry, divisors = file.entries[tensor], file.tensor(tensor).clone()
    divisors[2] *= 1.25
    data = bytearray(path.read_bytes())
    data[entry.offset : entry.offset + entry.nbytes] = divisors.numpy().tobytes()
    path.write_bytes(data)
    assert compare(model, path) > 100 * EXACT
    assert compare(gf.load(path).model, path) < EXACT


def eight_bits(x: Tensor) -> Tensor:
    """Returns x (..., 32 k) rounded as llama.cpp rounds inputs of Q8_0 matmuls: to multiples of max|block of 32| / 127
    in 16 bits."""
    blocks = x.unflatten(-1, (-1, 32))
    step = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return ((blocks / step).round() * step.half()).flatten(-2)


def test_eight_bits(tmp_path: Path) -> None:
    """The weights of the file, and inputs rounded as there."""
    gguf.write(model_of("llama"), ByteTokenizer(), tmp_path / "model.gguf", kind="Q8_0")
    model = gf.load(tmp_path / "model.gguf").model
    for module in model.modules():
        if isinstance(module, Linear):
            module.register_forward_pre_hook(lambda _, given: (eight_bits(given[0]), *given[1:]))
    assert compare(model, tmp_path / "model.gguf") < ROUNDED


@pytest.mark.parametrize(
    ("family", "more", "field"),
    [
        ("llama", {"hidden_act": "gelu"}, "ffn.activation"),  # GGUF says nothing of it
        ("mistral", {"sliding_window": 8}, "mixer.visibility"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "config"),
    ],
)
def test_models_that_llama_cpp_computes_otherwise_are_refused(
    family: str, more: dict[str, Any], field: str, tmp_path: Path
) -> None:
    with refused(code="unsupported", field=field):
        gguf.write(model_of(family, **more), ByteTokenizer(), tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()
