"""Export targets: `transformers` loads every model that a family is reported to support, and computes the same."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers

import glassformer as gf
from glassformer.architectures import PRESETS
from glassformer.config import ModelConfig
from glassformer.conversion.exports import ExportTarget, export_target, export_targets, family_of
from glassformer.conversion.families import FAMILIES
from glassformer.conversion.fields import Fields
from glassformer.errors import RequestError
from glassformer.model import Model
from tests.parity.published import CONFIGS, NO_CLASS
from tests.refused import refused

torch.set_num_threads(1)

TINY = "layers=2+d_model=32+heads=4+vocab_size=61+context=48"
BASES = [
    f"{name}@1m+{TINY}"
    for name in ("gpt2", "llama", "mistral", "qwen3", "bloom", "falcon", "falcon-40b", "gpt-neox", "mpt")
]
CHANGES = (
    *("", "rope", "alibi", "learned", "nope", "rmsnorm", "layernorm", "post", "sandwich", "respost", "parallel"),
    *("parallel2", "relu", "gelu", "gelu_tanh", "swiglu", "geglu", "mqa", "gqa:2", "window:7", "qknorm", "qknorm:full"),
    *("qknorm:each_head", "softcap:5", "head.softcap=3", "head.scale=0.5", "residual.scale=0.5", "embedding.scale=3"),
    *("mixer.scale=0.3", "mixer.clip=0.4", "bias", "nobias", "tied", "untied", "embednorm", "norm.bias=false"),
    *("position.pairing=interleaved", "position.fraction=0.5", "norm.eps=1e-3", "head_dim=12", "head.bias=true"),
    "norm.unit_offset=true",
)


@cache
def config_of(expression: str) -> ModelConfig | None:
    """Returns the config of an expression; None if the change does not fit the model."""
    try:
        return gf.preset(expression)
    except RequestError:
        return None


def supporting(config: ModelConfig) -> list[ExportTarget]:
    return [one for one in export_targets(config) if one.supported]


def loud(config: ModelConfig) -> Model:
    """Returns a model with noise on all weights, so that every part changes the output."""
    model = config.build(seed=0)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=draw) * (0.3 if weight.dim() == 1 else 0.1))
    return model.eval()


QUICK = 1
"""Number of base models that the default run of the tests exports."""


@pytest.mark.parametrize(
    "base",
    [*BASES[:QUICK], *(pytest.param(base, marks=pytest.mark.slow) for base in BASES[QUICK:])],
    ids=lambda name: name.split("@")[0],
)
def test_supported_families_load_and_compute_the_same(base: str, tmp_path: Path) -> None:
    """One change at a time to each published wiring, and every family that then claims to hold it."""
    tokens = torch.randint(61, (2, 23), generator=torch.Generator().manual_seed(0))
    found = 0
    for change in CHANGES:
        config = config_of(f"{base}+{change}" if change else base)
        for one in supporting(config) if config is not None else []:
            model, place = loud(config), tmp_path / f"{found}"
            gf.save(model, None, place, family=one.family.model_type)
            other = transformers.AutoModelForCausalLM.from_pretrained(place, attn_implementation="eager").eval()
            with torch.no_grad():
                expected, got = other(tokens).logits, model(tokens)
            error = float((got - expected).abs().max() / expected.abs().max())
            assert error < 1e-5, f"{base}+{change} as {one.family.architecture}: {error:.1e}"
            found += 1
    assert found >= 3


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in NO_CLASS])
def test_each_preset_is_exported_as_its_family(name: str) -> None:
    opened = family_of(PRESETS[name]())
    assert opened is not None
    if name in CONFIGS:
        kind = CONFIGS[name]["model_type"]
        assert opened.family.model_type == {"phi3": "mistral"}.get(kind, kind)  # one and the same, in two layouts
        return
    known = {"gpt": "gpt_neox", "pythia": "gpt_neox", "smollm2": "llama"}
    stem = name.split("-")[0]
    assert opened.family.model_type == known.get(stem, stem)


@pytest.mark.parametrize(
    "name",
    [name for name in CONFIGS if name.startswith(("mamba2", "jamba", "qwen3-next", "t5", "flan", "bart", "opus"))],
)
def test_preset_equals_the_config_its_family_reads(name: str) -> None:
    said = FAMILIES[CONFIGS[name]["model_type"]].config(Fields(CONFIGS[name]))
    assert not said.resolved().diff(PRESETS[name]().resolved())


@pytest.mark.parametrize(
    ("expression", "family", "blockers"),
    [
        ("llama@1m+alibi", "llama", {"mixer.position": ("alibi", "rotary")}),
        ("gpt2@1m+rmsnorm", "gpt2", {"norm": ("rmsnorm", "layernorm"), "final_norm": ("rmsnorm", "layernorm")}),
        ("llama@1m+window:64", "llama", {"mixer.visibility": ("sliding_window", "causal")}),
        ("llama@1m+softcap:30", "llama", {"mixer.softcap": (30.0, None)}),
        ("bloom@1m+noembednorm", "bloom", {"embedding.norm": (None, "layernorm")}),
        ("bloom@1m+ffn.hidden=344", "bloom", {"ffn.hidden": (344, 512)}),
    ],
)
def test_blockers_name_the_changed_part(
    expression: str, family: str, blockers: dict[str, tuple[object, object]]
) -> None:
    assert export_target(gf.preset(expression), FAMILIES[family]).blockers == blockers


@pytest.mark.slow
def test_no_family_refuses_its_own_words() -> None:
    """A family leaves out fields that it cannot express, so that the blocking part has a name."""
    found = 0
    for base in BASES[1::4]:
        for change in (*CHANGES, "softcap:5+rmsnorm", "gqa:2+parallel", "head_dim=12+qknorm", "swiglu+mqa", "moe:4:2"):
            if (config := config_of(f"{base}+{change}" if change else base)) is None:
                continue
            found += 1
            caught = [one.blocked_by for one in export_targets(config) if "config" in one.blocked_by]
            assert not caught, f"{base}+{change}"
    assert found > 90


def test_exports_of_llama_with_alibi_are_ordered_by_blockers() -> None:
    seen = export_targets(gf.preset("llama@1m+alibi+vocab_size=77"))  # whose targets are not kept yet
    blockers = {one.family.model_type: one.blockers for one in seen}
    assert blockers["bloom"].keys() > {"norm", "ffn", "embedding.norm"}
    assert list(blockers).index("bloom") > 10
    assert [one.whole for one in seen] == sorted((one.whole for one in seen), reverse=True)


@pytest.mark.parametrize(
    ("change", "family", "path", "both"),
    [
        ("softcap:5", "gemma3_text", "mixer.softcap", (5.0, None)),
        ("gqa:2", "falcon", "mixer.n_kv_heads", (2, 4)),
        ("head_dim=12", "stablelm", "mixer.head_dim", (12, 8)),
    ],
)
def test_a_part_among_many_is_named(change: str, family: str, path: str, both: tuple[object, object]) -> None:
    assert export_target(gf.preset(f"gpt2@1m+{TINY}+{change}"), FAMILIES[family]).blockers[path] == both


def test_a_refusal_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(fields: Fields) -> ModelConfig:
        raise fields.refuse("n", 3, "expected 2")

    monkeypatch.setitem(FAMILIES, "llama", replace(FAMILIES["llama"], read=read))
    seen = export_targets(gf.preset("llama@1m+alibi"))
    index = next(i for i, one in enumerate(seen) if one.family.model_type == "llama")
    assert seen[index].blockers == {"config": ("config.json: n='3': expected 2", None)}
    assert index > max(i for i, one in enumerate(seen) if one.whole)


def test_saving_to_a_blocked_family_is_refused(tmp_path: Path) -> None:
    model = gf.preset("llama@1m+alibi+vocab_size=64").build()
    with refused(code="unsupported", field="mixer.position"):
        gf.save(model, None, tmp_path, family="llama")
    with refused(code="unknown", field="kind"):
        gf.save(model, None, tmp_path, family="lama")
