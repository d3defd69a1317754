"""Divisors of rotary frequencies in a GGUF, for every family that declares them: as llama.cpp's own converter computes
them, out and back, and never without effect. tests/conversion/test_llama_cpp.py has llama.cpp itself turn by them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import glassformer as gf
from glassformer.config import ModelConfig
from glassformer.conversion.families import FAMILIES
from glassformer.conversion.fields import Fields
from glassformer.conversion.gguf import llama_cpp, write
from glassformer.errors import RequestError
from glassformer.model import Model
from glassformer.text import ByteTokenizer

torch.set_num_threads(1)

HEAD, BASE = 16, 5e5
SIZES = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
         "rope_theta": BASE}  # fmt: skip
SHORT, LONG = [1.0, 1.1, 1.3, 1.7, 2.5, 3.0, 4.0, 5.0], [1.0, 1.5, 2.0, 4.0, 8.0, 12.0, 14.0, 16.0]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
DECLARED = sorted(name for name, family in FAMILIES.items() if family.gguf and family.gguf.factors)
TOKENS = torch.randint(257, (1, 40), generator=torch.Generator().manual_seed(1))


OWN_WORDS: dict[str, dict[str, Any]] = {
    "phi3": {"head_dim": 2 * HEAD, "hidden_size": 4 * HEAD, "partial_rotary_factor": 0.5}
}
"""Family -> fields that make it llama.cpp's nearest family."""


def config_of(family: str, trained: int, **scaling: Any) -> ModelConfig:
    said = {"rope_scaling": scaling, "original_max_position_embeddings": trained}
    return FAMILIES[family].config(Fields({**SIZES, **OWN_WORDS.get(family, {}), **said}))


def longrope(family: str, trained: int = 24, **more: Any) -> ModelConfig:
    return config_of(family, trained, **{"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, **more})


def written(family: str, config: ModelConfig, path: Path) -> Model:
    model = config.build(seed=0)
    assert write(model, ByteTokenizer(), path, kind="F32") is FAMILIES[family]
    return model


def stored(path: Path) -> dict[str, list[float]]:
    return {tensor.name: tensor.data.tolist() for tensor in gguf.GGUFReader(path).tensors if "rope" in tensor.name}


def same(config: ModelConfig, back: ModelConfig) -> bool:
    """Returns True if the configs are equal, up to fractions that are equal in 32 bits."""
    pairs = config.resolved().diff(back.resolved()).values()
    return all(isinstance(mine, float) and np.float32(mine) == np.float32(theirs) for mine, theirs in pairs)


def taking_llama3() -> list[str]:
    """Returns the declared families whose config.json can express LLaMA 3 scaling."""
    found = []
    for family in DECLARED:
        try:
            config_of(family, 24, **LLAMA3)
            found.append(family)
        except RequestError:
            continue
    return found


def test_which() -> None:
    assert DECLARED == ["granite", "llama", "phi3"] and taking_llama3() == ["granite", "llama"]


@pytest.mark.parametrize("family", taking_llama3())
@pytest.mark.parametrize("trained", [24, 8192])
def test_llama3_as_their_converter_divides(family: str, trained: int, tmp_path: Path) -> None:
    """convert_hf_to_gguf.py, in wavelengths: short ones as they are, long ones by the factor, a blend between."""
    written(family, config_of(family, trained, **LLAMA3), tmp_path / "model.gguf")
    expected = []
    for i in range(HEAD // 2):
        wavelength = 2 * math.pi * BASE ** (2 * i / HEAD)
        smooth = (trained / wavelength - 1.0) / (4.0 - 1.0)
        blend = 1 / ((1 - smooth) / 8.0 + smooth)
        expected.append(1.0 if wavelength < trained / 4.0 else 8.0 if wavelength > trained / 1.0 else blend)
    name = gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.ROPE_FREQS]
    assert stored(tmp_path / "model.gguf") == {f"{name}.weight": pytest.approx(expected, rel=1e-5)}


@pytest.mark.parametrize("family", DECLARED)
def test_longrope_as_it_is_given(family: str, tmp_path: Path) -> None:
    """Both lists are written unchanged, and the paper's magnitude as metadata, without a factor."""
    written(family, longrope(family, factor=3.0), tmp_path / "model.gguf")
    short, long = (gguf.TENSOR_NAMES[gguf.MODEL_TENSOR[f"ROPE_FACTORS_{kind}"]] for kind in ("SHORT", "LONG"))
    approx = {f"{short}.weight": pytest.approx(SHORT), f"{long}.weight": pytest.approx(LONG)}
    assert stored(tmp_path / "model.gguf") == approx
    said = {key: field.contents() for key, field in gguf.GGUFReader(tmp_path / "model.gguf").fields.items()}
    scaling = {key.partition(".rope.scaling.")[2]: value for key, value in said.items() if ".rope.scaling." in key}
    magnitude = math.sqrt(1 + math.log(3.0) / math.log(24))
    assert scaling == {"type": "longrope", "original_context_length": 24, "attn_factor": pytest.approx(magnitude)}


@pytest.mark.parametrize("family", taking_llama3())
@given(factor=st.sampled_from([1.5, 4.0, 8.0, 32.0]), trained=st.sampled_from([24, 100, 8192, 65537]))
@settings(max_examples=8, deadline=None)
def test_llama3_comes_back(family: str, factor: float, trained: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    config = config_of(family, trained, **{**LLAMA3, "factor": factor})
    path = tmp_path_factory.mktemp("llama3") / "model.gguf"
    model = written(family, config, path)
    back = gf.load(path)
    assert same(config, back.config)
    torch.testing.assert_close(back.model(TOKENS), model(TOKENS), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", DECLARED)
@given(
    lists=st.lists(st.lists(st.floats(0.5, 64, width=32), min_size=8, max_size=8), min_size=2, max_size=2),
    trained=st.sampled_from([2, 24, 4096]),
    more=st.sampled_from([{}, {"factor": 3.0}, {"attention_factor": 1.3}, {"factor": 3.0, "attention_factor": 0.7}]),
)
@settings(max_examples=8, deadline=None)
def test_longrope_comes_back(
    family: str,
    lists: list[list[float]],
    trained: int,
    more: dict[str, float],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    config = longrope(family, trained, short_factor=lists[0], long_factor=lists[1], **more)
    path = tmp_path_factory.mktemp("longrope") / "model.gguf"
    model = written(family, config, path)
    back = gf.load(path)
    assert same(config, back.config)
    torch.testing.assert_close(back.model(TOKENS), model(TOKENS), rtol=0, atol=1e-5)


def changed(path: Path, name: str, pair: int, by: float) -> None:
    """Multiplies one frequency factor of a written file by `by`."""
    tensor = next(one for one in gguf.GGUFReader(path, "r+").tensors if one.name == name)
    tensor.data[pair] *= by
    tensor.data.flush()  # type: ignore[attr-defined]


@pytest.mark.parametrize("pair", (0, 3, 7))
@pytest.mark.parametrize(
    ("family", "name"),
    [
        *((family, "rope_freqs.weight") for family in taking_llama3()),
        *((family, f"rope_factors_{kind}.weight") for family in DECLARED for kind in ("short", "long")),
    ],
)
def test_a_wrong_divisor_is_seen(family: str, name: str, pair: int, tmp_path: Path) -> None:
    """Each pair's, by one percent, in the config that is read and in the logits of a text that meets it."""
    path = tmp_path / "model.gguf"
    config = config_of(family, 24, **LLAMA3) if "freqs" in name else longrope(family)
    model = written(family, config, path)
    changed(path, name, pair, 1.01)
    back = gf.load(path)
    assert not same(config, back.config)
    tokens = TOKENS[:, :20] if "short" in name else TOKENS
    assert not torch.equal(back.model(tokens), model(tokens))
    if "long" in name:  # a short text does not use the long factors
        assert torch.equal(back.model(TOKENS[:, :20]), model(TOKENS[:, :20]))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma", "olmo2", "starcoder2", "gpt_neox", "stablelm"])
def test_undeclared_factors_block_the_export(family: str) -> None:
    table = FAMILIES[family].gguf
    assert table is not None and not table.factors
    sizes = {name: value for name, value in SIZES.items() if family != "gpt_neox" or name != "num_key_value_heads"}
    config = FAMILIES[family].config(Fields({**sizes, "rope_scaling": LLAMA3}))
    assert not llama_cpp(config).supported


@pytest.mark.parametrize("family", taking_llama3())
def test_a_pair_that_does_not_turn_is_read(family: str, tmp_path: Path) -> None:
    """llama.cpp's word for it is a divisor of 1e30, more than a context can grow by."""
    path = tmp_path / "model.gguf"
    written(family, config_of(family, 24, **LLAMA3), path)
    changed(path, "rope_freqs.weight", 7, 1e30)
    scaling = gf.load(path).config.stack[0].blocks[0].mixer.position.scaling  # type: ignore[attr-defined]
    assert scaling.kind == "longrope" and scaling.long[7] == scaling.short[7] > 1e30
