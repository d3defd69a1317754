"""Untrusted folders: for any content of config.json and its neighbours, one sentence, soon, and little memory."""

from __future__ import annotations

import copy
import json
import resource
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import glassformer as gf
from glassformer.conversion import read_config
from glassformer.conversion.families import FAMILIES
from glassformer.conversion.families.own import OWN
from glassformer.conversion.family import complaints
from glassformer.conversion.fields import Fields
from glassformer.conversion.gguf import write as write_model
from glassformer.conversion.storage import open_tensors, write_gguf
from glassformer.errors import RequestError
from glassformer.model import Model
from glassformer.text import ByteTokenizer
from tests.refused import refused

from .cases import CASES
from .test_words import LONG, SHORT, SIZES

NASTY = st.one_of(
    st.sampled_from(
        [0, -1, 1, 7, 1 << 31, 1 << 60, 10**400, 0.0, -1.5, 1e-320, 1e308, True, False, None, "", "silu", "x" * 300]
    ),
    st.sampled_from([[], [1], ["full_attention"], {}, {"rope_type": "yarn"}, {"factor": -1, "type": "linear"}]),
    st.recursive(st.integers() | st.text(max_size=4), lambda inner: st.lists(inner, max_size=3), max_leaves=6),
)


def sentence(problem: pytest.ExceptionInfo[RequestError]) -> str:
    text = str(problem.value)
    assert text and "\n" not in text and len(text) < 700
    return text


@pytest.mark.parametrize("changes", [10, pytest.param(120, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", sorted(CASES))
def test_configs(family: str, changes: int) -> None:
    """Any value in any field: a model, or one sentence."""
    base = CASES[family]

    @settings(max_examples=changes, deadline=None, database=None, derandomize=True,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(fields=base.fields, data=st.data())
    def run(fields: dict[str, Any], data: st.DataObject) -> None:
        fields = copy.deepcopy(fields)
        for _ in range(data.draw(st.integers(1, 3))):
            place = fields
            while isinstance(inner := place.get(name := data.draw(st.sampled_from(sorted(place)))), dict) and inner:
                place = inner
            place[data.draw(st.sampled_from([name, "x\ny"]))] = copy.deepcopy(data.draw(NASTY))
        begun, said = time.monotonic(), Fields(fields)
        try:
            config = FAMILIES[family].config(said)
            config.num_params()
            config.resolved()
            config.outline()
            assert not any("\n" in name for name in said.unread())
        except RequestError as problem:
            assert "\n" not in str(problem)
        assert time.monotonic() - begun < 2

    run()


OWN_BASES = [
    gf.preset(f"{name}+layers=2").to_dict()
    for name in ("llama@1m+alibi+moe:4:2", "gpt2@1m+deepnorm+sigmareparam", "llama@1m+mamba", "qwen3@1m+window:8+mup")
]


@settings(max_examples=250, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(tree=st.sampled_from(OWN_BASES), data=st.data())
def test_own_configs(tree: dict[str, Any], data: st.DataObject) -> None:
    """A damaged config of Glassformer's format, a tree of parts, gives a model or one sentence that names the file."""
    tree = copy.deepcopy(tree)
    for _ in range(data.draw(st.integers(1, 3))):
        place: Any = tree
        while True:
            names = sorted(place) if isinstance(place, dict) else range(len(place))
            name = data.draw(st.sampled_from(names))
            if not isinstance(place[name], (dict, list)) or not place[name] or data.draw(st.integers(0, 5)) == 0:
                break
            place = place[name]
        if isinstance(place, dict):
            name = data.draw(st.sampled_from([name, name, "x\ny", "kind"]))
        place[name] = copy.deepcopy(data.draw(NASTY | st.sampled_from(["x\ny" * 300, {"kind": "x\ny"}, {"x\ny": 1}])))
    begun, said = time.monotonic(), Fields({"model_type": "glassformer", "glassformer": tree}, "our/config.json")
    try:
        with complaints(said.where):
            config = OWN.config(said)
            config.num_params()
            config.resolved()
            config.outline()
    except RequestError as problem:
        text = str(problem)
        assert text.startswith("our/config.json: ") and "\n" not in text and len(text) < 700
    assert time.monotonic() - begun < 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tree: tree["stack"][0].update({"x\ny": 1}), "stack.0: unknown field x y; known here"),
        (lambda tree: tree["stack"][0]["blocks"][0]["mixer"].update(n_heads=7), "n_heads=7 does not divide"),
        (lambda tree: tree.update(d_model="wide"), "d_model='wide'"),
        (lambda tree: tree.pop("vocab_size"), "field vocab_size is missing"),
    ],
)
def test_error_in_our_config_names_its_file(change: Any, says: str, tmp_path: Path) -> None:
    gf.save(gf.preset("llama@1m+alibi+layers=1+vocab_size=257").build(), ByteTokenizer(), tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    change(fields["glassformer"])
    path.write_text(json.dumps(fields))
    with pytest.raises(RequestError) as problem:
        gf.load(tmp_path)
    assert sentence(problem).startswith(f"{path}: {says}")
    plain = tmp_path / "plain.yaml"
    plain.write_text(json.dumps(fields["glassformer"]))
    with pytest.raises(RequestError) as problem:
        gf.preset(str(plain))
    assert says in sentence(problem)
    if "n_heads" not in says:
        assert sentence(problem).startswith(f"{plain}: ")


@pytest.mark.parametrize(
    ("said", "says"), [({"alphabet": ""}, "needs an alphabet"), ({"alphabet": "a\ud800"}, "lone surrogate")]
)
def test_error_in_our_tokenizer_names_its_file(said: dict[str, str], says: str, tmp_path: Path) -> None:
    gf.save(gf.preset("llama@1m+layers=1+vocab_size=257").build(), ByteTokenizer(), tmp_path)
    path = tmp_path / "glassformer_tokenizer.json"
    base = {"glassformer_tokenizer": 1, "kind": "char", "unknown": False, "separator": False}
    path.write_text(json.dumps({**base, **said}))
    with pytest.raises(RequestError) as problem:
        gf.load(tmp_path)
    assert sentence(problem).startswith(f"{path}: ") and says in sentence(problem)


def folder(place: Path, **changes: Any) -> Path:
    """Writes a valid tiny folder with changes of its config; returns its path."""
    model = gf.preset("llama@1m+vocab_size=64").build()
    gf.save(model, None, place)
    path = place / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return place


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "lama"}, "did you mean 'llama'"),
        ({"model_type": None}, "known are"),
        ({"model_type": "x" * 5000}, f"model_type={'x' * 80!r} is not a known family"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config="),
        ({"is_encoder_decoder": True}, "is_encoder_decoder='True': only False"),
        ({"num_hidden_layers": 10**9}, "at most 4096 layers"),
        ({"num_hidden_layers": 4096}, "tensors"),
        ({"num_hidden_layers": 5}, "has no tensor"),
        ({"num_hidden_layers": 3}, "that the config's model does not have"),
        ({"hidden_size": 1 << 60}, "hidden_size"),
        ({"hidden_size": "256"}, "a positive whole number"),
        ({"vocab_size": 65}, "has shape (64, 128), and the config asks for (65, 128)"),
        ({"hidden_act": "exec"}, "hidden_act='exec'"),
        ({"rope_scaling": {"rope_type": "warp"}}, "rope_type='warp'"),
        ({"rms_norm_eps": -1.0}, "greater than 0"),
        ({"rms_norm_eps": float("nan")}, "eps"),
    ],
)
def test_false_sizes_in_a_config_are_refused_quickly(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    place = folder(tmp_path, **changes)
    begun = time.monotonic()
    with pytest.raises(RequestError) as problem, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gf.load(place)
    assert says in sentence(problem)
    assert time.monotonic() - begun < 2


@pytest.mark.parametrize("count", [1, 3, 5])
def test_a_list_has_an_entry_for_each_layer(count: int) -> None:
    """Llama 4 says of each layer whether it turns queries and keys."""
    fields = {"model_type": "llama4_text", "num_hidden_layers": 4, "no_rope_layers": [1] * count, "vocab_size": 64,
              "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}  # fmt: skip
    with refused(code="unsupported", field="no_rope_layers"):
        FAMILIES["llama4_text"].config(Fields(fields))


def test_huge_false_sizes_take_no_memory(tmp_path: Path) -> None:
    """A config of 4096 layers and a hidden size of a million over a small file."""
    place = folder(tmp_path, num_hidden_layers=4096, hidden_size=1 << 20, intermediate_size=1 << 24)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RequestError):
        gf.load(place)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 200e6


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_a_pickle_is_never_unpickled(name: str, tmp_path: Path) -> None:
    """Neither a model.pt in a folder, nor a pytorch_model.bin older than archives."""
    place = folder(tmp_path)
    (place / "model.safetensors").unlink()
    torch.save({"x": torch.ones(2)}, place / name, _use_new_zipfile_serialization=name == "model.pt")
    with pytest.raises(RequestError) as problem:
        gf.load(place)
    assert "weights_only=True" in sentence(problem)  # how to convert it
    with pytest.raises(RequestError) as problem:
        gf.load(place / name)
    assert "weights_only=True" in sentence(problem)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not a valid json"),
        ("[1]", "mapping"),
        ("[" * 100_000, "not a valid json"),
        ('{"model_type": "llama"}', "has no"),
    ],
)
def test_broken_configs(text: str, says: str, tmp_path: Path) -> None:
    folder(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(RequestError) as problem:
        read_config(str(tmp_path))
    assert says in sentence(problem)


def test_unknown_field_is_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="attention_twist"):
        gf.load(folder(tmp_path, attention_twist=2))


LINEAR = {"rope_type": "linear", "factor": 2.0}
LONGROPE = {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
BETAS = {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}


@pytest.mark.parametrize(
    ("family", "said", "unread"),
    [
        ("llama", {"rope_scaling": {**LINEAR, "twist": 1}}, ["rope_scaling.twist"]),
        ("llama", {"rope_scaling": LINEAR, "twist": 1}, ["twist"]),
        ("gpt_neox", {"rope_parameters": {**LINEAR, "b": 1, "a": None}}, ["rope_parameters.a", "rope_parameters.b"]),
        ("qwen3", {"rope_parameters": {**LINEAR, "low_freq_factor": 1.0}}, ["rope_parameters.low_freq_factor"]),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 9.0}}, ["rope_scaling.alpha"]),
        ("llama", {"rope_scaling": LINEAR, "rope_parameters": {"twist": 1}}, []),  # which does not count
        ("phi3", {"rope_scaling": {**LONGROPE, "short_mscale": 1.2}}, ["rope_scaling.short_mscale"]),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {"twist": 1}}},
            ["rope_parameters.full_attention.twist"],
        ),
        ("gemma3_text", {"rope_scaling": {"factor": 8.0, "twist": 1}}, ["rope_scaling.twist"]),
        # As published: DeepSeek Coder, InternLM 2, Qwen 2.5, DeepSeek 2, Llama 3.1, Phi-3 mini 128k, Gemma 3.
        ("llama", {"rope_scaling": {"factor": 4.0, "type": "linear"}}, []),
        ("llama", {"rope_scaling": {"factor": 2.0, "type": "dynamic"}}, []),
        ("qwen2", {"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 12, "type": "yarn"}}, []),
        (
            "llama",
            {"rope_scaling": {**BETAS, "factor": 40, "original_max_position_embeddings": 12, "type": "yarn"}},
            [],
        ),
        ("llama", {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 12}}, []),
        ("phi3", {"rope_scaling": LONGROPE, "original_max_position_embeddings": 12}, []),
        ("gemma3_text", {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "rope_parameters": None}, []),
    ],
)
def test_fields_inside_a_field(family: str, said: dict[str, Any], unread: list[str]) -> None:
    sizes = {name: value for name, value in SIZES.items() if family != "gpt_neox" or name != "num_key_value_heads"}
    fields = Fields({**sizes, **said})
    FAMILIES[family].config(fields)
    assert fields.unread() == unread


def test_unknown_nested_field_is_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"may matter: rope_scaling\.twist$"):
        gf.load(folder(tmp_path, rope_scaling={**LINEAR, "twist": 2}))


def test_the_hub_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("hf:owner/name-that-is-not-here", "hf:nothing", "hf:../../etc/passwd"):
        with pytest.raises(RequestError) as problem:
            gf.load(name)
        assert name in sentence(problem)


def gguf_file(place: Path, **changes: Any) -> tuple[Model, Path]:
    """Writes a valid tiny llama as GGUF with changes of its metadata; returns the model and the path."""
    model = gf.preset("llama@1m+layers=2+d_model=32+heads=4+kv_heads=2+vocab_size=257").build(seed=3)
    write_model(model, ByteTokenizer(), place / "sound.gguf", "F32")
    with open_tensors(place / "sound.gguf") as file:
        metadata, tensors = file.metadata, {name: file.tensor(name).clone() for name in file.entries}
    write_gguf(place / "model.gguf", {**metadata, **changes}, tensors)
    return model, place / "model.gguf"


@pytest.mark.parametrize("kind", [list, np.array])
def test_gguf_may_repeat_an_equal_value_for_each_layer(kind: Any, tmp_path: Path) -> None:
    model, path = gguf_file(tmp_path, **{"llama.attention.head_count_kv": kind([2, 2])})
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        torch.testing.assert_close(gf.load(path).model(tokens), model(tokens))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.head_count_kv", [2, 4]),
        ("feed_forward_length", np.array([], dtype="<u4")),
        ("rope.scaling.type", ["yarn", "none"]),
        ("rope.freq_base", [2.0] * 5000),
    ],
)
def test_a_gguf_whose_layers_differ_is_refused_by_the_name_of_the_key(key: str, value: Any, tmp_path: Path) -> None:
    _, path = gguf_file(tmp_path, **{f"llama.{key}": value})
    with pytest.raises(RequestError) as problem:
        gf.load(path)
    assert f"llama.{key}=" in sentence(problem) and "one value for all layers" in sentence(problem)
