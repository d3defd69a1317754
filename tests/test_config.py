"""A model as a value: frozen, bounded, explained when wrong, and the same after its files."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn

from glassformer import config as module
from glassformer.architectures import PRESETS
from glassformer.config import MAX_FILE_BYTES, ModelConfig, flatten, read_tree
from glassformer.errors import RequestError
from glassformer.naming import preset
from glassformer.parts.core import base
from glassformer.parts.core.base import BuildContext
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.init import Init
from glassformer.parts.ffn import FFN, FFNConfig
from glassformer.parts.forward_pass import Pass
from glassformer.parts.linear import linear_cost
from glassformer.parts.norm import LayerNormConfig, Norm, NormConfig, RMSNormConfig
from tests.refused import refused

TINY = "layers=2+d_model=32+heads=4+vocab_size=61+context=64"
LLAMA = preset(f"llama@1m+{TINY}")


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Fails, rather than waits, where something huge is walked through."""

    def late(*_: object) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def changed(path: str, value: Any) -> dict[str, Any]:
    """Returns LLAMA's tree with one value set."""
    tree = LLAMA.to_dict()
    *way, last = [int(step) if step.isdecimal() else step for step in path.split(".")]
    node: Any = tree
    for step in way:
        node = node[step]
    node[last] = value
    return tree


def refusal(value: Any) -> str:
    """Returns the one-sentence error of an invalid tree."""
    with pytest.raises(RequestError) as refused:
        ModelConfig.from_dict(value).check()
    message = str(refused.value)
    assert message and "\n" not in message and len(message) < 700
    return message


# Values


def test_configs_are_frozen_values():
    for holder, name in (
        (LLAMA, "d_model"),
        (LLAMA.stack[0], "repeat"),
        (LLAMA.stack[0].blocks[0].mixer, "n_heads"),
    ):
        with pytest.raises(ValidationError):
            setattr(holder, name, 1)
    assert preset(f"llama@1m+{TINY}") == LLAMA
    assert LLAMA.replace(d_model=64) != LLAMA and LLAMA.d_model == 32
    assert hash(LLAMA.stack[0].blocks[0].norm) == hash(RMSNormConfig(eps=1e-6))


@pytest.mark.parametrize("name", list(PRESETS))
def test_published_models_survive_their_files(name: str, tmp_path: Path):
    config = PRESETS[name]()
    for file in ("a.yaml", "a.json", "a.yml"):
        config.save(tmp_path / file)
        assert ModelConfig.from_file(tmp_path / file) == config
    assert yaml.safe_load(config.to_yaml()) == json.loads(json.dumps(config.to_dict())) == config.to_dict()
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_choices_of_different_class_are_different_values():
    assert LayerNormConfig(eps=1e-5) != RMSNormConfig(eps=1e-5)
    a, b = preset(f"llama@1m+{TINY}"), preset(f"llama@1m+{TINY}+layernorm")
    assert a != b and a.diff(b)["final_norm.kind"] == ("rmsnorm", "layernorm")


def test_diff_names_every_path_and_is_the_other_way_round():
    a, b = LLAMA, LLAMA.replace(d_model=64, final_norm=None)
    assert a.diff(a) == {} and a.diff(b) == {path: (x, y) for path, (y, x) in b.diff(a).items()}
    assert a.diff(b) == {
        "d_model": (32, 64),
        "final_norm.kind": ("rmsnorm", None),
        "final_norm.affine": (True, None),
        "final_norm.eps": (1e-6, None),
        "final_norm.unit_offset": (False, None),
    }


def test_flatten():
    assert flatten({"a": {"b": [1, {"c": None}]}, "d": ()}) == {"a.b.0": 1, "a.b.1.c": None}


def test_layers_are_the_stages_unrolled():
    block = LLAMA.stack[0].blocks[0]
    other = block.replace(norm=LayerNormConfig())
    config = ModelConfig.from_dict(
        LLAMA.to_dict() | {"stack": [{"repeat": 2, "blocks": [block, other]}, {"repeat": 1, "blocks": [other]}]}
    )
    assert [type(layer.norm) for layer in config.layers()] == [RMSNormConfig, LayerNormConfig] * 2 + [LayerNormConfig]
    assert config.n_layers == 5 == len(config.build().layers)
    assert config.num_params() == sum(p.numel() for p in config.build().parameters())


def test_flops_count_all_keys_or_those_seen():
    full, seen = LLAMA.flops(64), LLAMA.flops(64, full=False)
    inner = LLAMA.num_params() - LLAMA.num_params(embeddings=False)
    matrices = LLAMA.num_params() - inner // 2 - 5 * 32  # neither the table that is looked up, nor the norms
    assert full == 2 * matrices + 2 * 4 * 32 * 64
    assert full - seen == 2 * 4 * 32 * (64 - 65 / 2)


def test_a_build_is_in_torchs_current_dtype():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert {p.dtype for p in LLAMA.build().parameters()} == {torch.bfloat16}
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("seed", [1.5, "a", [1], 1 << 63, float("nan"), torch.tensor(1.5)], ids=repr)
def test_a_seed_is_a_whole_number(seed: Any):
    with refused(code="range" if isinstance(seed, int) else "type", field="seed"):
        LLAMA.build(seed=seed)


def test_a_seed_may_come_from_an_array():
    one, other = LLAMA.build(seed=7), LLAMA.build(seed=np.int64(7))  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


# What is refused


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("d_modle", "d_model"),
        ("head.tide", "tied"),
        ("embedding.positon", "position"),
        ("init.sdt", "std"),
        ("final_norm.epps", "eps"),
        ("stack.0.repeats", "repeat"),
        ("stack.0.blocks.0.mixr", "mixer"),
        ("stack.0.blocks.0.mixer.n_head", "n_heads"),
        ("stack.0.blocks.0.mixer.position.bass", "base"),
        ("stack.0.blocks.0.mixer.visibility.windw", "unknown field"),
        ("stack.0.blocks.0.ffn.hiden", "hidden"),
        ("stack.0.blocks.0.residual.droput", "dropout"),
    ],
)
def test_unknown_keys_are_refused_at_every_level_with_near_ones(path: str, near: str):
    message = refusal(changed(path, 1))
    assert path.rpartition(".")[2] in message and near in message
    assert "did you mean" in message or near == "unknown field"
    parent = path.rpartition(".")[0]
    assert message.startswith(f"{parent}: " if parent else "unknown")


def test_an_unknown_key_is_refused_in_a_qk_norm():
    tree = preset(f"qwen3@1m+{TINY}").to_dict()
    tree["stack"][0]["blocks"][0]["mixer"]["qk_norm"]["ovr"] = "head"
    assert "'over'" in refusal(tree)


@pytest.mark.parametrize(
    ("path", "kind", "near"),
    [
        ("final_norm", "rmsnrom", "'rmsnorm'"),
        ("stack.0.blocks.0.ffn", "swiglu", "glu"),
        ("stack.0.blocks.0.mixer.position", "rotry", "'rotary'"),
        ("stack.0.blocks.0.mixer.position", "learned", "alibi"),  # a position, but of the embedding
        ("embedding.position", "rotary", "learned"),
        ("stack.0.blocks.0.mixer.visibility", "window", "'sliding_window'"),
        ("stack.0.blocks.0.residual", "prenorm", "pre"),
        ("init", "xavir", "'xavier'"),
    ],
)
def test_unknown_kinds_are_refused_with_near_ones(path: str, kind: str, near: str):
    for value in (kind, {"kind": kind}):
        message = refusal(changed(path, value))
        assert path in message and kind in message and near in message


@pytest.mark.parametrize("value", [3, True, [], {}, {"eps": 1e-5}, {"kind": 3}, {"kind": None}, {"kind": ["rmsnorm"]}])
def test_a_part_is_a_mapping_with_a_kind(value: Any):
    assert "final_norm" in refusal(changed("final_norm", value))


def test_a_missing_field_is_named():
    tree = LLAMA.to_dict()
    del tree["stack"][0]["blocks"][0]["mixer"]["n_heads"]
    assert refusal(tree) == "field stack.0.blocks.0.mixer.n_heads is missing"


NUMBERS = [
    "d_model",
    "vocab_size",
    "context",
    "stack.0.repeat",
    "stack.0.blocks.0.mixer.n_heads",
    "final_norm.eps",
    "stack.0.blocks.0.mixer.position.base",
    "stack.0.blocks.0.mixer.softcap",
    "stack.0.blocks.0.mixer.scale",
    "stack.0.blocks.0.mixer.dropout",
    "stack.0.blocks.0.ffn.hidden",
    "stack.0.blocks.0.residual.dropout",
    "embedding.scale",
    "embedding.dropout",
    "head.softcap",
    "init.std",
]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -1, "many"])
@pytest.mark.parametrize("path", NUMBERS)
def test_numbers_are_finite_and_in_range(path: str, value: Any):
    assert path in refusal(changed(path, value))


@pytest.mark.parametrize("path", [path for path in NUMBERS if "dropout" not in path and path != "init.std"])
def test_sizes_are_above_zero(path: str):
    assert path in refusal(changed(path, 0))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("vocab_size", 1 << 40),
        ("vocab_size", 10**400),
        ("d_model", 1 << 40),
        ("context", 1 << 60),
        ("stack.0.repeat", 10**9),
        ("stack.0.blocks.0.ffn.hidden", 1 << 60),
        ("stack.0.blocks.0.ffn.multiple_of", 1 << 60),
        ("stack.0.blocks.0.mixer.head_dim", 1 << 60),
        ("stack.0.blocks.0.mixer.n_heads", 1 << 40),
        ("stack.0.blocks.0.mixer.visibility", {"kind": "sliding_window", "window": 1 << 70}),
        ("embedding.position", {"kind": "learned", "length": 1 << 60}),
    ],
)
def test_huge_values_are_refused_before_anything_is_made(path: str, value: Any):
    with within(5):
        refusal(changed(path, value))


def test_huge_heads_are_refused_at_once():
    """The sentence that lists the divisors must not walk to a thousand million."""
    tree = changed("stack.0.blocks.0.mixer.n_heads", 10**9 + 7)
    tree["stack"][0]["blocks"][0]["mixer"] |= {"n_kv_heads": 2, "head_dim": 8}
    with within(5):
        assert "heads" in refusal(tree)


def test_many_stages_are_counted_together():
    tree = LLAMA.to_dict()
    tree["stack"] = [tree["stack"][0] | {"repeat": 4000}] * 2
    assert "8000 layers" in refusal(tree)
    assert "stack" in refusal(LLAMA.to_dict() | {"stack": []})
    assert "blocks" in refusal(changed("stack.0.blocks", []))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ("heads=6+kv_heads=4+head_dim=8", "n_kv_heads=4 does not divide n_heads=6; use 1, 2, 3 or 6"),
        ("heads=5", "n_heads=5 does not divide d_model=32"),
        ("d_model=33+heads=3+sinusoidal", "needs an even d_model"),
        ("head_dim=5", "an even number between 2 and 5"),
        ("head_dim=10+position.fraction=0.3", "turns 3 of head_dim=10"),
        ("position.fraction=0.01", "turns 0 of head_dim=8"),
        ("softcap:5+kernel=sdpa", "kernel=sdpa cannot apply a softcap, or another bias"),
        ("dropout:0.1+kernel=flex", "kernel=flex has no dropout"),
    ],
)
def test_parts_that_do_not_fit_are_refused_at_once(changes: str, words: str):
    with pytest.raises(RequestError) as refused:
        preset(f"llama@1m+{TINY}+{changes}")
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "scaling",
    [
        {"kind": "ntk", "factor": 2.0},
        {"kind": "dynamic_ntk", "factor": 2.0},
        {"kind": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0},
        {"kind": "yarn", "factor": 2.0, "beta_fast": 1.0, "beta_slow": 32.0},
    ],
)
def test_a_scaling_without_meaning_is_refused_before_it_divides_by_zero(scaling: dict):
    """r / (r - 2) at r = 2, and ramps that end before their start: a sentence, or at least finite logits."""
    tree = changed("stack.0.blocks.0.mixer.position.fraction", 0.25)  # r = 2
    tree["stack"][0]["blocks"][0]["mixer"]["position"]["scaling"] = scaling
    try:
        config = ModelConfig.from_dict(tree)
        config.check()
    except RequestError:
        return
    with torch.no_grad():
        logits = config.build()(torch.arange(61)[None].repeat(1, 2)[:, :100])
    assert logits.isfinite().all()


LONGROPE = {"kind": "longrope", "factor": 2.0, "short": [1.0] * 4, "long": [2.0] * 4}
POSITION = "stack.0.blocks.0.mixer.position"


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        *[({"kind": kind, "factor": 1e300}, "scaling.factor=1e+300") for kind in ("linear", "ntk", "dynamic_ntk")],
        *[({"kind": kind, "factor": 1e-300}, "scaling.factor=1e-300") for kind in ("linear", "ntk", "yarn", "llama3")],
        ({"kind": "yarn", "factor": 2.0, "beta_fast": 1e308}, "beta_fast=1e+308"),
        ({"kind": "yarn", "factor": 2.0, "beta_slow": 1e-320}, "beta_slow="),
        (
            {"kind": "yarn", "factor": 2.0, "beta_fast": 1.0, "beta_slow": 32.0},
            "beta_fast=1 must be at least beta_slow",
        ),
        ({"kind": "yarn", "factor": 2.0, "attention_factor": 1e308}, "attention_factor=1e+308"),
        ({"kind": "yarn", "factor": 2.0, "attention_factor": True}, "must be a number"),
        ({"kind": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}, "must be at most high"),
        ({"kind": "llama3", "factor": 2.0, "low_freq_factor": 1e-320}, "low_freq_factor="),
        (LONGROPE | {"original_context": 1}, "original_context, and that is 1"),
        (LONGROPE | {"short": [0.0] * 4}, "short.0=0.0"),
        (LONGROPE | {"long": [1.0, True, 1.0, 1.0]}, "long.1=True: must be a number"),
        (LONGROPE | {"long": [1.0, 1e300, 1.0, 1.0]}, "long.1=1e+300"),
        (LONGROPE | {"attention_factor": 1e308}, "attention_factor=1e+308"),
    ],
)
def test_numbers_of_a_scaling_are_bounded(scaling: dict, words: str):
    message = refusal(changed(f"{POSITION}.scaling", scaling))
    assert words in message and "scaling" in message


def test_longrope_from_a_context_of_one_token():
    """The magnitude is then the one given, or that of no growth: nothing divides by ln 1."""
    for more in ({"factor": 1.0}, {"attention_factor": 1.2}):
        config = ModelConfig.from_dict(changed(f"{POSITION}.scaling", LONGROPE | {"original_context": 1} | more))
        assert config.resolved().resolved() == config.resolved()
        assert config.build()(torch.arange(8)[None]).isfinite().all()
    tree = changed(f"{POSITION}.scaling", LONGROPE)
    assert "original_context, and that is 1" in refusal(tree | {"context": 1})


@pytest.mark.parametrize("kind", ["linear", "ntk", "dynamic_ntk", "yarn", "llama3", "longrope"])
@pytest.mark.parametrize("factor", [1e-3, 1.0, 1e6, float(1 << 28)])
def test_every_factor_that_is_taken_can_be_computed(kind: str, factor: float):
    scaling = {"kind": kind, "factor": factor, "original_context": 4}
    if kind == "longrope":
        scaling |= {"short": [1e-3] * 4, "long": [1e38] * 4}
    config = ModelConfig.from_dict(changed(f"{POSITION}.scaling", scaling))
    with torch.no_grad():
        assert config.build()(torch.arange(61)[None]).isfinite().all()


STRANGE = "a\ud800\x1b[31mb\u202e"


@pytest.mark.parametrize(
    "path", [STRANGE, f"head.{STRANGE}", "final_norm", "d_model", f"{POSITION}.pairing", "init.std"]
)
@pytest.mark.parametrize("value", [STRANGE, {STRANGE: 1}, {"kind": STRANGE}, {"kind": "rmsnorm", STRANGE: 1}])
def test_control_characters_are_escaped(path: str, value: Any):
    message = refusal(changed(path, value))
    assert message.isprintable() and message.encode()


# Files


def write(folder: Path, text: str, name: str = "model.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refused_file(path: Path) -> str:
    with within(20), pytest.raises(RequestError) as refused:
        ModelConfig.from_file(path)
    message = str(refused.value)
    assert "\n" not in message and len(message) < 700
    return message


def test_a_bomb_of_aliases_is_refused(tmp_path: Path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    assert "alias" in refused_file(write(tmp_path, "\n".join(lines)))


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 50_000, "- " * 50_000, "[" * 100_000 + "]" * 100_000])
def test_deep_nesting_is_refused(tmp_path: Path, text: str):
    refused_file(write(tmp_path, text))


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 100_000, '{"d_model": ' + "[" * 900 + "]" * 900 + "}"])
def test_deep_json_is_refused(tmp_path: Path, text: str):
    refused_file(write(tmp_path, text, "model.json"))


def test_deep_parts_are_refused():
    tree: Any = 1
    for _ in range(100_000):
        tree = {"kind": "rmsnorm", "eps": tree}
    refusal(LLAMA.to_dict() | {"final_norm": tree})
    for _ in range(100_000):
        tree = [tree]
    refusal(LLAMA.to_dict() | {"stack": tree})


def test_an_oversized_file_is_refused_unread(tmp_path: Path):
    path = tmp_path / "model.yaml"
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    assert "bytes" in refused_file(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3",
        "- 1\n- 2",
        "just words",
        "a: [",
        "a: b: c",
        "\tx: 1",
        "!!python/object/apply:os.system ['true']",
        "d_model: !!bool perhaps",
        "d_model: !!timestamp never",
        "d_model: !!int ''",
        "d_model: !!float ''",
        "d_model: !!binary '*'",
        "? [a]\n: b",
        "1: 2",
        "null: 3",
        "d_model: 2020-99-99",
        "%TAG",
        "a: !!set {x}",
        "\x00",
        "d_model: " + "9" * 5000,
        "<<: 3",
        "--- a\n--- b",
    ],
)
def test_broken_yaml_is_refused(tmp_path: Path, text: str):
    refused_file(write(tmp_path, text))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3",
        "[]",
        "{",
        '{"a": 1,}',
        "NaN",
        '{"d_model": NaN}',
        '{"d_model": 1e999}',
        "\x00",
        '{"d_model": ' + "9" * 5000 + "}",
    ],
)
def test_broken_json_is_refused(tmp_path: Path, text: str):
    refused_file(write(tmp_path, text, "model.json"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model.json", '{"d_model": 64, "context": 8, "d_model": 128}'),
        ("model.json", '{"head": {"d_model": 1, "d_model": 2}}'),
        ("model.yaml", "d_model: 64\ncontext: 8\nd_model: 128"),
        ("model.yaml", 'head: {d_model: 1, "d_model": 1}'),
        ("model.yml", "a: [{d_model: 1, d_model: 2}]"),
    ],
)
def test_a_key_that_is_given_twice_is_refused(tmp_path: Path, name: str, text: str):
    assert "d_model is given twice" in refused_file(write(tmp_path, text, name))


def test_config_file_that_is_not_text_is_refused(tmp_path: Path):
    path = tmp_path / "model.yaml"
    path.write_bytes(b"\xff\xfe\x00\x81")
    refused_file(path)
    assert "is missing" in refused_file(tmp_path / "absent.yaml")
    refused_file(tmp_path)  # a folder


@given(st.text(alphabet="!{}[]&*:- \n\t'\"#%|>?,0a.<~e@`", max_size=60))
def test_any_yaml_is_a_tree_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str):
    path = tmp_path_factory.mktemp("any", numbered=True) / "model.yaml"
    path.write_text(text, encoding="utf-8")
    try:
        read_tree(path)
    except RequestError as refused:
        assert "\n" not in str(refused)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.just("kind"), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    path=st.sampled_from(
        sorted(
            {
                *NUMBERS,
                *flatten(LLAMA.to_dict()),
                "stack",
                "stack.0",
                "head",
                "init",
                "final_norm",
                "stack.0.blocks.0",
                "stack.0.blocks.0.mixer",
            }
        )
    ),
    value=JSON_VALUES,
)
def test_any_value_is_taken_or_refused_in_a_sentence(path: str, value: Any):
    try:
        config = ModelConfig.from_dict(changed(path, value))
    except RequestError as refused:
        assert "\n" not in str(refused).replace(repr(value)[:80], "")
    else:
        assert ModelConfig.from_dict(config.to_dict()) == config


# The schema


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"].removeprefix("#/$defs/")
        for item in node.values():
            yield from references(item)
    elif isinstance(node, list):
        for item in node:
            yield from references(item)


def fits(schema: dict[str, Any], value: Any, defs: dict[str, Any], at: str = "") -> str | None:
    """Returns the reason why `value` violates the schema, None if it fits; knows the keywords that this schema uses."""
    if "$ref" in schema:
        return fits(defs[schema["$ref"].removeprefix("#/$defs/")], value, defs, at)
    for several in ("oneOf", "anyOf"):
        if several in schema:
            reasons = [fits(one, value, defs, at) for one in schema[several]]
            good = reasons.count(None)
            return None if good == 1 or (good and several == "anyOf") else f"{at}: {good} fit; {reasons}"
    if "const" in schema and value != schema["const"]:
        return f"{at}: not {schema['const']}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{at}: none of {schema['enum']}"
    kinds = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "null": type(None),
    }
    kind = schema.get("type")
    if kind and (not isinstance(value, kinds[kind]) or (isinstance(value, bool) and kind in ("integer", "number"))):
        return f"{at}: {value!r} is no {kind}"
    if kind == "object":
        known = schema.get("properties", {})
        if missing := [name for name in schema.get("required", ()) if name not in value]:
            return f"{at}: {missing} missing"
        if schema.get("additionalProperties") is False and set(value) - set(known):
            return f"{at}: unknown {set(value) - set(known)}"
        return next(filter(None, (fits(known[n], v, defs, f"{at}.{n}") for n, v in value.items() if n in known)), None)
    if kind == "array":
        return next(filter(None, (fits(schema["items"], v, defs, f"{at}.{i}") for i, v in enumerate(value))), None)
    if "exclusiveMinimum" in schema and not value > schema["exclusiveMinimum"]:
        return f"{at}: {value} not above {schema['exclusiveMinimum']}"
    return None


SCHEMA = ModelConfig.json_schema()


def test_the_schema_is_whole():
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA
    assert set(references(SCHEMA)) <= set(SCHEMA["$defs"])
    assert "x-axis" not in json.dumps(SCHEMA)
    bodies = {body.get("title"): body for body in (*SCHEMA["$defs"].values(), *SCHEMA["properties"].values())}
    for cls in base._CLASSES:
        if cls.__module__.startswith("glassformer.parts"):
            body = bodies[cls.__name__]
            assert body["properties"]["kind"] == {"const": cls.kind} and body["additionalProperties"] is False
            assert set(body["properties"]) == {"kind", *cls.model_fields}


@pytest.mark.parametrize("name", list(PRESETS))
def test_schema_accepts_written_configs(name: str):
    assert fits(SCHEMA, PRESETS[name]().to_dict(), SCHEMA["$defs"]) is None


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("stack.0.blocks.0.mixer.kernel", "naive"),
        ("stack.0.blocks.0.mixer.position", "rotary"),
        ("stack.0.blocks.0.mixer.position", None),
        ("stack.0.blocks.0.mixer.visibility", "sliding_window"),
        ("stack.0.blocks.0.mixer.visibility", {}),
        ("stack.0.blocks.0.mixer.visibility", {"window": 16}),
        ("stack.0.blocks.0.ffn", {"multiple_of": 8}),
        ("stack.0.blocks.0.mixer.visibility", "Causal"),
        ("stack.0.blocks.0.mixer", "attention"),
        ("stack.0.blocks.0.mixer", "mamba"),
        ("stack.0.blocks.0.mixer.position.scaling", "linear"),
        ("final_norm", "rmsnorm"),
        ("final_norm", "nope"),
        ("final_norm", {"eps": 1e-5}),
        ("final_norm", {"kind": "layernorm"}),
        ("embedding.position", "learned"),
        ("head", "head"),
        ("init", "xavier"),
    ],
)
def test_schema_accepts_exactly_what_the_loader_accepts(path: str, value: Any):
    """A part may be only its kind if it needs no fields; a mapping must have a kind."""
    tree = changed(path, value)
    try:
        ModelConfig.from_dict(tree)
    except RequestError:
        assert fits(SCHEMA, tree, SCHEMA["$defs"]) is not None
    else:
        assert fits(SCHEMA, tree, SCHEMA["$defs"]) is None


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("d_model", "x"),
        ("final_norm", {"kind": "nope"}),
        ("head.tide", True),
        ("final_norm.eps", 0),
        ("stack.0.blocks.0.mixer.kind", "glu"),
    ],
)
def test_schema_refuses_invalid_values(path: str, value: Any):
    assert fits(SCHEMA, changed(path, value), SCHEMA["$defs"]) is not None


@pytest.mark.slow
def test_a_validator_agrees():
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for name in PRESETS:
        jsonschema.validate(PRESETS[name]().to_dict(), SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(changed("head.tide", True), SCHEMA)


# A part from outside


class Doubled(Norm):
    """x -> gain x."""

    def __init__(self, gain: float = 2.0):
        super().__init__()
        self.start, self.gain = gain, nn.Parameter(torch.empty(()))

    @torch.no_grad()
    def init_weights(self, init: Init) -> None:
        self.gain.fill_(self.start)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


@pytest.fixture
def registry() -> Iterator[None]:
    before = list(base._CLASSES)
    yield
    base._CLASSES[:] = before


@pytest.fixture
def doubled(registry: None) -> type[NormConfig]:
    class DoubledConfig(NormConfig, kind="doubled"):
        gain: float = 2.0

        def build(self, ctx: BuildContext) -> Doubled:
            return Doubled(self.gain)

        def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
            return Cost.weights(1)

    return DoubledConfig


def test_a_part_from_outside_is_usable_by_its_kind(doubled: type[NormConfig], tmp_path: Path):
    tree = changed("final_norm", {"kind": "doubled", "gain": 3.0})
    config = ModelConfig.from_dict(tree)
    assert config.final_norm == doubled(gain=3.0)
    model = config.build()
    assert isinstance(model.final_norm, Doubled) and model.final_norm.gain == 3.0
    assert config.num_params() == sum(p.numel() for p in model.parameters())
    config.save(tmp_path / "model.yaml")
    assert ModelConfig.from_file(tmp_path / "model.yaml") == config
    assert preset(f"{tmp_path / 'model.yaml'}+final_norm.gain=4").final_norm.gain == 4.0  # type: ignore[union-attr]
    assert "'gain'" in refusal(changed("final_norm", {"kind": "doubled", "gian": 3.0}))
    assert "'doubled'" in refusal(changed("final_norm", {"kind": "double", "gain": 3.0}))


def test_unfilled_weights_of_user_parts_are_reset_or_refused(registry: None):
    """Never left as the allocator gave it."""

    class Plain(FFN):
        def __init__(self, d: int, spare: bool):
            super().__init__()
            self.up, self.down = nn.Linear(d, 3 * d), nn.Linear(3 * d, d)
            self.spare = nn.Parameter(torch.empty(2)) if spare else None

        def forward(self, x: Tensor, pass_: Pass) -> Tensor:
            return self.down(self.up(x).relu())

    class PlainConfig(FFNConfig, kind="plain"):
        spare: bool = False

        def width(self, ctx: BuildContext) -> int:
            return 3 * ctx.d_model

        def build(self, ctx: BuildContext) -> Plain:
            return Plain(ctx.d_model, self.spare)

        def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
            d = ctx.d_model
            maps = linear_cost(ctx, shape, d, 3 * d, bias=True) + linear_cost(ctx, shape, 3 * d, d, bias=True)
            return maps + Cost.weights(2 * self.spare)

    config = preset("llama@1m+layers=2+d_model=32+heads=4+vocab_size=61+ffn=plain")
    state = torch.get_rng_state()
    weights = [dict(config.build(seed=seed).named_parameters()) for seed in (0, 0, 1)]
    assert torch.equal(state, torch.get_rng_state())
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]) and weight.abs().max() <= 1.0, name
        if ".ffn." in name:
            assert weight.abs().max() <= 32**-0.5 and not torch.equal(weight, weights[2][name]), name
    assert not torch.equal(weights[0]["layers.0.ffn.up.weight"], weights[0]["layers.1.ffn.up.weight"])
    bare = preset("llama@1m+layers=2+d_model=32+heads=4+vocab_size=61+ffn=plain+ffn.spare=true")
    with refused(code="missing", field="layers.0.ffn.spare"):
        bare.build(seed=0)
    bare.build(seed=None)  # to be loaded


def test_weights_that_are_filled_through_their_data_are_filled(registry: None):
    class Halved(Norm):
        def __init__(self, width: int):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(width))

        def init_weights(self, init: Init) -> None:
            self.weight.data.fill_(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    class HalvedConfig(NormConfig, kind="halved"):
        def build(self, ctx: BuildContext) -> Halved:
            return Halved(ctx.d_model)

        def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
            return Cost.weights(ctx.d_model)

    config = preset("llama@1m+layers=1+d_model=32+heads=4+vocab_size=61").replace(final_norm=HalvedConfig())
    assert config.build(seed=0).final_norm.weight.unique().tolist() == [0.5]  # type: ignore[union-attr]


def test_a_part_from_outside_is_in_the_schema(doubled: type[NormConfig]):
    schema = ModelConfig.json_schema()
    assert schema["$defs"]["DoubledConfig"]["properties"]["kind"] == {"const": "doubled"}
    tree = changed("final_norm", {"kind": "doubled", "gain": 3.0})
    assert fits(schema, tree, schema["$defs"]) is None and fits(SCHEMA, tree, SCHEMA["$defs"]) is not None


def test_a_part_may_extend_another(registry: None):
    class LoudConfig(RMSNormConfig, kind="loud"):
        volume: float = 11.0

    config = ModelConfig.from_dict(changed("final_norm", {"kind": "loud", "volume": 7.0}))
    assert isinstance(config.final_norm, LoudConfig) and config.to_dict()["final_norm"]["kind"] == "loud"
    assert ModelConfig.from_dict(config.to_dict()) == config
    assert RMSNormConfig.kind == "rmsnorm" and ModelConfig.from_dict(LLAMA.to_dict()) == LLAMA


def test_a_part_of_another_axis_is_refused(doubled: type[NormConfig]):
    assert "ffn" in refusal(changed("stack.0.blocks.0.ffn", {"kind": "doubled"}))
    assert "ffn" in refusal(changed("stack.0.blocks.0.ffn", doubled()))


def test_a_key_that_is_given_the_same_value_twice_is_let_pass(tmp_path: Path):
    """Some published files repeat a key."""
    text = json.dumps(LLAMA.to_dict()).replace('"d_model":', f'"d_model": {LLAMA.d_model}, "d_model":', 1)
    assert text.count('"d_model"') == 2 and ModelConfig.from_file(write(tmp_path, text, "model.json")) == LLAMA


def test_limits_are_those_of_the_file_format():
    """Loosening them is a decision, not an accident."""
    assert (module.MAX_FILE_BYTES, module.MAX_LAYERS, module.MAX_PARAMETERS) == (4 << 20, 4096, 1 << 44)


def test_an_encoder_is_a_row_of_a_printed_config():
    config = preset("marian@1m")
    shown = str(config).splitlines()
    counts = [int(row[12:28].replace(",", "")) for row in shown[1:]]
    assert shown[1].startswith("encoder") and sum(counts[:-1]) == counts[-1] == config.num_params()
    assert "encoder" not in str(preset("llama@1m"))
