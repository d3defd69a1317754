"""EXPR -> ModelConfig: a change touches its own axis, and what is typed is taken or refused in a sentence."""

from __future__ import annotations

import ast
import math
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from glassformer.architectures import PRESETS, presets
from glassformer.config import ModelConfig, flatten
from glassformer.errors import RequestError
from glassformer.names.known import FAMILIES
from glassformer.naming import SIZES, parse, preset, words
from glassformer.naming.changes import Undone
from glassformer.naming.loading import load
from glassformer.parts.core import base as part_base
from glassformer.parts.core.base import _CLASSES
from glassformer.parts.core.base import WORDS as DECLARED
from glassformer.parts.core.outside import is_outside
from glassformer.parts.core.words import Word
from glassformer.parts.ffn import ExpertsConfig, MlpConfig
from glassformer.parts.mixer.attention import AttentionConfig
from glassformer.parts.norm import NormConfig, RMSNormConfig
from glassformer.training import NoamConfig, Recipe, WsdConfig
from glassformer.training.overrides import with_recipe
from tests.refused import refused

BLOCK = "stack.0.blocks.0."
EMBEDDED = ("embedding.position",)
ATTENTION = f"{BLOCK}mixer."

TOUCHES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("rope", "alibi", "relbias", "learned", "nope"), ("embedding.position", f"{ATTENTION}position")),
    **dict.fromkeys(("interpolate:4", "ntk:4", "dynamic_ntk:4", "yarn:4"), (f"{ATTENTION}position.scaling", "context")),
    "sinusoidal": ("embedding.position", f"{ATTENTION}position", "embedding.scale"),
    "vectors:5": ("embedding.vectors", "head"),
    **dict.fromkeys(("rmsnorm", "layernorm", "batchnorm", "nonorm"), (f"{BLOCK}norm", "final_norm", "embedding.norm")),
    **dict.fromkeys(
        ("pre", "post", "sandwich", "respost", "parallel", "parallel2", "noresidual"),
        (f"{BLOCK}residual", "final_norm"),
    ),
    "deepnorm": (f"{BLOCK}residual", "final_norm", "init"),
    "branch_scale": (f"{BLOCK}residual.depth_scaled",),
    "gain": (f"{ATTENTION}gain_control",),
    "linear_attention": (f"{BLOCK}mixer",),
    "xl_memory:8": (f"{BLOCK}mixer", "embedding.position"),
    "linformer:16": (f"{BLOCK}mixer",),
    "performer:32": (f"{BLOCK}mixer",),
    **dict.fromkeys(("retention", "lightning"), (f"{BLOCK}mixer", "embedding.position")),
    **dict.fromkeys(("mamba", "mamba2", "gated_deltanet", "s4", "rglru"), (f"{BLOCK}mixer", "embedding.position")),
    **dict.fromkeys(("lstm", "gru", "conv", "conv:3"), (f"{BLOCK}mixer", "embedding.position")),
    **dict.fromkeys(("beside:mamba2", "beside:s4"), (f"{BLOCK}mixer",)),
    "share:2": ("stack",),
    **dict.fromkeys(("stack:mamba*2,attention", "stack:window:8*2,causal", "stack:swiglu:64,moe:4:2*"), ("stack",)),
    **dict.fromkeys(("sigmareparam", "sigmareparam:1"), ("reparam",)),
    **dict.fromkeys(("mup", "mup:64"), ("mup",)),
    **dict.fromkeys(("z_loss=1e-4", "head.z_loss=1e-4"), ("head.z_loss",)),
    **dict.fromkeys(("mha", "mqa", "gqa:2"), (f"{ATTENTION}n_kv_heads",)),
    **dict.fromkeys(("causal", "bidirectional", "window:16"), (f"{ATTENTION}visibility",)),
    **dict.fromkeys(("longformer:16:2", "bigbird:8", "bigbird:8:2", "chunked:16"), (f"{ATTENTION}visibility",)),
    **dict.fromkeys(("dilated:16:2", "prefix", "prefix:4"), (f"{ATTENTION}visibility",)),
    "sinks": (f"{ATTENTION}sinks",),
    **dict.fromkeys(
        (
            "relu",
            "gelu",
            "gelu_tanh",
            "silu",
            "relu2",
            "glu",
            "reglu",
            "geglu",
            "swiglu",
            "swiglu:1024",
            "relu:64",
        ),
        (f"{BLOCK}ffn",),
    ),
    **dict.fromkeys(("moe:4:2", "moe:8:1:96", "expert_choice:4:2"), (f"{BLOCK}ffn",)),
    **dict.fromkeys(("mla", "mla:16"), (f"{BLOCK}mixer",)),
    **dict.fromkeys(("bias", "nobias"), (f"{ATTENTION}bias", f"{ATTENTION}out_bias", f"{BLOCK}ffn.bias")),
    **dict.fromkeys(("tied", "untied"), ("head.tied",)),
    **dict.fromkeys(("pooled:mean", "pooled:cls", "classes:3", "spans"), ("head",)),
    **dict.fromkeys(("embednorm", "noembednorm"), ("embedding.norm",)),
    **dict.fromkeys(("qknorm", "qknorm:head", "qknorm:full"), (f"{ATTENTION}qk_norm",)),
    **dict.fromkeys(("softcap:50", "mixer.softcap=50"), (f"{ATTENTION}softcap",)),
    "dropout:0.1": (f"{ATTENTION}dropout", f"{BLOCK}residual.dropout", "embedding.dropout"),
    "layers=8": ("stack.0.repeat",),
    "heads=8": (f"{ATTENTION}n_heads",),
    "kv_heads=2": (f"{ATTENTION}n_kv_heads",),
    "hidden=96": (f"{BLOCK}ffn.hidden",),
    "norm.eps=1e-3": (f"{BLOCK}norm.eps", "final_norm.eps", "embedding.norm.eps"),
    "vocab_size=65": ("vocab_size",),
    "kernel=naive": (f"{ATTENTION}kernel",),
    "residual.dropout=0.2": (f"{BLOCK}residual.dropout",),
    "stack.0.blocks.0.ffn.hidden=1024": (f"{BLOCK}ffn.hidden",),
    "head.softcap=30": ("head.softcap",),
}
"""Change -> the paths it may touch; each must do something to gpt2@1m or to llama@1m."""

REPEATS = {
    "gpt2@1m": {"learned", "layernorm", "pre", "mha", "causal", "gelu_tanh", "bias", "tied", "noembednorm"},
    "llama@1m": {"rope", "rmsnorm", "pre", "mha", "causal", "swiglu", "nobias", "untied", "noembednorm"},
}
"""Model -> changes that it already has, and which therefore change nothing."""

REFUSES = {"gpt2@1m": {"interpolate:4", "ntk:4", "dynamic_ntk:4", "yarn:4"}, "llama@1m": set[str]()}
"""Changes of parts that the model does not have."""


def touched(before: str, change: str) -> set[str]:
    return set(preset(before).diff(preset(f"{before}+{change}")))


def own_words() -> dict[str, Word]:
    """Returns the short names of this package; other tests import parts from outside it."""
    every = (word for some in words().values() for word in some)
    outside = {name for name, (_, part) in DECLARED.items() if not part.__module__.startswith("glassformer.")}
    return {word.name: word for word in every if word.name not in outside}


def test_every_short_name_is_tried():
    assert {name.partition(":")[0] for name in TOUCHES if "=" not in name} == set(own_words())


def test_page_of_expressions_lists_declared_short_names():
    page = (Path(__file__).parents[1] / "docs" / "reference" / "expressions.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `\+(.*?)` \|", page, re.MULTILINE)
    assert sorted(listed) == sorted(str(word) for word in own_words().values())


def test_every_example_value_is_taken():
    for word in own_words().values():
        if word.read is not None:
            preset(f"llama@1m+{word.name}:{word.example}")


def test_naming_a_preset_imports_no_trainer_and_no_converter():
    code = """
import sys
import glassformer as gf
gf.preset("llama@10m+gqa:2+rmsnorm+mixer.bias=true")
print(sorted({name.split(".")[1] for name in sys.modules if name.startswith("glassformer.")}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    rooms = set(ast.literal_eval(done.stdout))
    assert "naming" in rooms
    heavy = "training conversion generation dynamics lens report text comparison cli"
    assert not rooms & set(heavy.split())


def test_a_short_name_belongs_to_one_part():
    with pytest.raises(ValueError, match="'rope' of TwiceConfig is RotaryConfig's"):

        class TwiceConfig(RMSNormConfig, kind="twice", words="rope"):
            pass

    assert "twice" not in NormConfig.choices()


def kinds(expression: str) -> list[str]:
    return [block.mixer.kind for block in preset(expression).layers()]


def test_a_pattern_names_the_layers_in_turn():
    """Repeated until they are used up; a star without a number takes what is left; what is named stays as it is."""
    assert kinds("llama@1m+stack:mamba2*3,attention") == ["mamba2"] * 3 + ["attention"]
    assert kinds("llama@10m+stack:mamba,attention*2") == ["mamba", "attention", "attention"] * 2
    assert kinds("llama@1m+layers=5+stack:mamba,attention") == ["mamba", "attention", "mamba", "attention", "mamba"]
    llama, mixed = preset("llama@10m"), preset("llama@10m+stack:attention,s4*")
    assert [block.mixer.kind for block in mixed.layers()] == ["attention"] + ["s4"] * 5
    assert next(mixed.layers()) == next(llama.layers()) and mixed.embedding == llama.embedding
    assert preset("llama@10m+stack:rope") == llama
    local = preset("llama@1m+stack:window:16*3,causal")
    assert [block.mixer.reach(local.ctx) for block in local.layers()] == [16, 16, 16, None]
    dense = preset("llama@10m+stack:attention*2,moe:4:2*")
    assert [block.ffn.kind for block in dense.layers()] == ["glu"] * 2 + ["experts"] * 4  # type: ignore[union-attr]
    assert preset("llama@1m+stack:rope,nope").stack[0].blocks[1].mixer.position is None  # type: ignore[attr-defined]


def test_positions_at_the_embedding_stay_while_a_layer_goes_by_them():
    assert preset("gpt2@1m+stack:mamba2,attention").embedding.position is not None
    assert preset("gpt2@1m+stack:mamba2,s4").embedding.position is None
    assert preset("gpt2@1m+stack:rope,alibi").embedding.position is None


@pytest.mark.parametrize(
    ("pattern", "code", "field"),
    [
        ("stack", "missing", "stack"), ("stack:", "missing", "stack"), ("stack:mamba2**2,attention", "range", "stack"),
        ("stack:mamba2*0", "range", "stack"), ("stack:mamba2*,attention", "range", "stack"),
        ("stack:,mamba", "range", "stack"), ("stack:mamba2*9,attention", "range", "stack"),
        ("stack:rmsnormm*2", "unknown", "change"), ("stack:layernorm,attention", "conflict", "stack"),
        ("stack:post*2,pre", "conflict", "stack"), ("stack:layers=2,attention", "unknown", "stack:layers"),
        ("stack:tied,attention", "conflict", "stack"),
    ],
)  # fmt: skip
def test_invalid_patterns_are_refused(pattern: str, code: str, field: str):
    with refused(code=code, field=field):
        preset(f"llama@1m+{pattern}")


def test_change_of_a_property_the_mixer_lacks_is_refused():
    """If no mixer of the model has the property, the change is refused; otherwise only those that have it change."""
    with pytest.raises(RequestError) as refused:
        preset("llama@1m+mamba+window:16")
    assert (refused.value.code, refused.value.field) == ("unsupported", "mixer.visibility")


@pytest.mark.parametrize(
    ("change", "mixer"),
    [("gqa:2", "mla"), ("kv_heads=2", "mla"), ("qknorm", "mla"), ("window:64", "mamba"), ("softcap:50", "mamba2"),
     ("alibi", "retention"), ("gqa:2", "stack:mamba*"), ("visibility.kind=bidirectional", "mixer.kind=mamba")],
)  # fmt: skip
def test_mixer_change_refuses_properties_it_lacks_in_both_orders(change: str, mixer: str):
    """A property that a mixer lacks is refused in both orders; one that it has is kept."""
    for changes in (f"{change}+{mixer}", f"{mixer}+{change}"):
        with pytest.raises(RequestError):
            preset(f"llama@1m+{changes}")
    assert preset("llama@1m+window:64+mla").stack[0].blocks[0].mixer.visibility.window == 64  # type: ignore[attr-defined]
    assert preset("llama@1m+gqa:2+stack:mamba,attention").stack[0].blocks[1].mixer.n_kv_heads == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("model", "change"), [(model, one) for model, some in REFUSES.items() for one in TOUCHES if one not in some]
)
def test_change_touches_only_its_axis(model: str, change: str):
    paths = touched(model, change)
    allowed = TOUCHES[change]
    outside = {path for path in paths if not any(path == one or path.startswith(one + ".") for one in allowed)}
    assert not outside
    assert bool(paths) == (change not in REPEATS[model]), paths
    assert preset(f"{model}+{change}+{change}") == preset(f"{model}+{change}")


OWN_NUMBERS = {
    "llama-3-8b": ("rope", "rmsnorm", "swiglu"),
    "gpt-neox@1m": ("rope", "layernorm", "parallel2", "gelu"),
    "llama@1m+position.pairing=interleaved+position.base=5e5": ("rope",),
    "mpt@1m+position.max_bias=4": ("alibi",),
    "gpt2@1m+embedding.position.length=2048+embedding.position.offset=2": ("learned",),
    "gpt2@1m+sinusoidal+embedding.position.base=100": ("sinusoidal",),
    "mamba@1m+mixer.d_state=32+mixer.expand=1": ("mamba",),
    "mpt@1m+norm.bias=false": ("layernorm",),
    "llama@1m+norm.unit_offset=true": ("rmsnorm",),
    "bloom@1m+embedding.norm.eps=1e-3": ("embednorm", "layernorm"),
    "bloom@1m+embedding.norm=rmsnorm": ("embednorm",),
    "qwen3@1m+qk_norm.norm=layernorm+qk_norm.after_position=true": ("qknorm", "qknorm:head"),
    "llama@1m+qknorm:full": ("qknorm", "qknorm:full"),
    "llama@1m+ffn.multiple_of=64": ("swiglu", "geglu", "glu"),
    "llama@1m+hidden=300": ("swiglu", "reglu"),
    "gpt2@1m+hidden=300": ("gelu", "relu2"),
    "llama@1m+deepnorm+residual.alpha=3+init.beta=0.5": ("deepnorm",),
    "falcon@1m+residual.scale=0.5": ("parallel", "branch_scale"),
    "llama@1m+window:16": ("window:16",),
    "llama@1m+moe:4:2+ffn.n_shared=1+ffn.score=sigmoid": ("swiglu", "geglu", "moe:4:2"),
    "llama@1m+mup:64+mup.base_head_dim=8": ("mup:64", "mup:32"),
}
"""Models whose numbers are not the defaults, and changes that name a part which is there already."""

NAMED = {
    **dict.fromkeys(("geglu", "glu", "reglu", "gelu", "relu2"), f"{BLOCK}ffn.activation"),
    "branch_scale": f"{BLOCK}residual.depth_scaled",
    "mup:32": "mup.base_width",
}
"""The one number that such a change may set; the others set none."""


@pytest.mark.parametrize(("model", "change"), [(model, one) for model, some in OWN_NUMBERS.items() for one in some])
def test_existing_part_keeps_its_numbers(model: str, change: str):
    assert touched(model, change) <= {NAMED.get(change)}


def test_arguments_of_a_change_reach_an_existing_part():
    full = preset("llama@1m+qknorm+qk_norm.norm=layernorm+qknorm:full").stack[0].blocks[0].mixer.qk_norm
    assert (full.over, full.norm.kind) == ("full", "layernorm")
    assert touched("qwen3@1m", "qknorm:full") == {f"{ATTENTION}qk_norm.over"}
    assert touched("llama-3-8b", "swiglu:4096") == {f"{BLOCK}ffn.hidden"}
    assert touched("falcon@1m", "parallel2") == {f"{BLOCK}residual.shared_norm"}


def test_changes_are_the_last_word():
    for pair in (
        ("rope", "alibi"),
        ("pre", "sandwich"),
        ("mqa", "gqa:2"),
        ("swiglu", "relu"),
        ("bias", "nobias"),
        ("deepnorm", "pre"),
        ("post", "deepnorm"),
        ("sigmareparam:1", "sigmareparam"),
        ("mup:64", "mup"),
    ):
        for model in ("gpt2@1m", "bloom@1m"):
            first, last = pair
            assert preset(f"{model}+{first}+{last}") == preset(f"{model}+{last}"), pair


def test_post_norm_and_back():
    """Post-norm needs no final norm; whatever comes after needs one again."""
    assert preset("llama@1m+post").final_norm is None
    assert preset("llama@1m+post+pre") == preset("llama@1m")
    assert preset("llama@1m+deepnorm").final_norm is None
    assert preset("llama@1m+deepnorm+pre") == preset("llama@1m")


def test_a_wiring_keeps_the_scale_of_its_branches():
    for change in ("branch_scale", "residual.scale=0.5"):
        for wiring in ("sandwich", "deepnorm"):
            assert preset(f"llama@1m+{change}+{wiring}") == preset(f"llama@1m+{wiring}+{change}")


def test_the_ladder_from_gpt2_to_llama():
    climbed, llama = preset("gpt2@10m+rope+rmsnorm+swiglu+nobias+untied"), preset("llama@10m")
    assert set(climbed.diff(llama)) == {f"{BLOCK}norm.eps", "final_norm.eps", "context", "vocab_size"}
    same = preset("gpt2@10m+rope+rmsnorm+swiglu+nobias+untied+norm.eps=1e-6+context=2048+vocab_size=32000")
    assert same == llama


@pytest.mark.parametrize("size", ["1m", "10m", "124m", "1.5b"])
@pytest.mark.parametrize("gated", ["swiglu", "geglu", "reglu", "glu"])
def test_gating_keeps_the_number_of_weights(size: str, gated: str):
    for model in ("gpt2", "falcon", "mpt"):
        before, after = preset(f"{model}@{size}"), preset(f"{model}@{size}+{gated}")
        inner = before.num_params(embeddings=False)
        assert abs(after.num_params(embeddings=False) - inner) < 0.01 * inner
    llama, plain = preset(f"llama@{size}"), preset(f"llama@{size}+relu")
    inner = llama.num_params(embeddings=False)
    assert abs(plain.num_params(embeddings=False) - inner) < 0.01 * inner


def test_gating_keeps_a_width_that_was_given():
    assert preset("gpt2@1m+swiglu:96").stack[0].blocks[0].ffn.hidden == 96  # type: ignore[union-attr]
    before, after = preset("gpt2@1m+hidden=1000"), preset("gpt2@1m+hidden=1000+swiglu")
    inner = before.num_params(embeddings=False)
    assert abs(after.num_params(embeddings=False) - inner) < 0.01 * inner


def meant(size: str) -> float:
    return float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_sizes_are_met_within_a_quarter(model: str, size: str):
    """Sizes count only layers; but 124m is GPT-2's own name, which includes its tables."""
    config = preset(f"{model}@{size}")
    count = preset("gpt2@124m").num_params() if size == "124m" else config.num_params(embeddings=False)
    assert abs(count - meant(size)) < 0.25 * meant(size)
    layers, d_model, heads = SIZES[size]
    assert (config.n_layers, config.d_model, config.stack[0].blocks[0].mixer.n_heads) == (
        layers,
        d_model,
        heads,
    )  # type: ignore[attr-defined]


PUBLISHED_SHAPES = {
    "124m": (12, 768, 12),  # GPT-2, table 2, with the heads of its checkpoints: 64 wide
    "350m": (24, 1024, 16),
    "774m": (36, 1280, 20),
    "1.5b": (48, 1600, 25),
    "7b": (32, 4096, 32),  # LLaMA, table 2
    "13b": (40, 5120, 40),
    "30b": (60, 6656, 52),
    "70b": (80, 8192, 64),  # Llama 2
}


def test_sizes_are_those_of_published_models_and_heads_are_as_wide_as_theirs():
    assert {size: SIZES[size] for size in PUBLISHED_SHAPES} == PUBLISHED_SHAPES
    widths = {size: d_model / n_heads for size, (_, d_model, n_heads) in SIZES.items()}
    large = dict.fromkeys(("3b", "7b", "13b", "30b", "70b"), 128)
    assert widths == {**dict.fromkeys(SIZES, 64), "1m": 32, **large}


@pytest.mark.parametrize(
    ("model", "groups"),
    [
        ("llama-3-8b@10m", 2),  # 32 heads in 8 groups, so 6 in 1.5: 1 and 2 are as near
        ("llama-2-70b@124m", 2),  # 64 in 8: 12 in 1.5
        ("llama-3-8b@60m", 2),  # 10 in 2.5: 2, and 5 is farther
        ("llama-3-8b@124m", 3),
        ("llama-3-8b@1.5b", 5),  # 25 in 6.25
        ("llama@1m+mqa", 1),
    ],
)
def test_a_size_keeps_the_share_of_groups_and_of_two_as_near_the_more(model: str, groups: int):
    assert preset(model).stack[0].blocks[0].mixer.n_kv_heads == groups  # type: ignore[attr-defined]


@pytest.mark.parametrize("hidden", [96, 100, 300, 1000, 1001, 3072])
def test_a_width_that_was_given_is_rounded_by_the_least(hidden: int):
    """Two thirds up to a multiple of 8 with a gate, the nearest whole number to three halves without."""
    gated = preset(f"gpt2@1m+hidden={hidden}+swiglu").stack[0].blocks[0].ffn.hidden  # type: ignore[union-attr]
    assert gated % 8 == 0 and 0 <= gated - hidden * 2 / 3 < 8  # type: ignore[operator]
    plain = preset(f"llama@1m+hidden={hidden}+relu").stack[0].blocks[0].ffn.hidden  # type: ignore[union-attr]
    assert plain == {96: 144, 100: 150, 300: 450, 1000: 1500, 1001: 1502, 3072: 4608}[hidden]


@pytest.mark.parametrize("name", [*PRESETS, *FAMILIES])
@pytest.mark.parametrize("size", ["10m", "1m", "3b"])
def test_every_name_takes_every_size_and_keeps_its_parts(name: str, size: str):
    whole, sized = preset(name), preset(f"{name}@{size}")
    diff = {re.sub(r"\d+", "0", path).removeprefix("encoder.") for path in whole.diff(sized)}  # its towers alike
    own = ("n_heads", "n_kv_heads", "head_dim", "kv_rank", "q_rank", "rope_dim", "value_dim", "n_v_heads", "v_head_dim")
    scales = {f"{part}.scale" for part in ("embedding", "head") if getattr(sized, part).scale is not None}
    sizes = {"d_model", "stack.0.repeat", f"{BLOCK}ffn.hidden", *(f"{ATTENTION}{size}" for size in own)}
    assert diff <= sizes | scales
    assert preset(f"{name}@{size.upper()}") == sized
    mixer, before = sized.stack[0].blocks[0].mixer, whole.stack[0].blocks[0].mixer
    assert getattr(mixer, "n_kv_heads", None) is None or before.n_kv_heads is not None  # type: ignore[attr-defined]
    assert getattr(before, "n_kv_heads", None) is None or mixer.n_kv_heads is not None  # type: ignore[attr-defined]


def test_published_counts():
    counts = {
        "gpt2": 124439808,
        "gpt2-xl": 1557611200,
        "llama-7b": 6738415616,
        "llama-2-70b": 68976648192,
        "llama-3-8b": 8030261248,
        "smollm2-135m": 134515008,
        "mistral-7b": 7241732096,
        "qwen3-0.6b": 596049920,
        "qwen3-8b": 8190735360,
        "bloom-560m": 559214592,
        "bloom-7b1": 7069016064,
        "gpt-neox-20b": 20554567680,
        "pythia-160m": 162322944,
        "mpt-7b": 6649286656,
        "falcon-7b": 6921720704,
    }
    assert {name: preset(name).num_params() for name in counts} == counts
    assert presets() == list(PRESETS)


# path=value


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("norm.eps=1e-6", f"{BLOCK}norm.eps", 1e-6),
        ("norm.eps=1e-6", "final_norm.eps", 1e-6),
        ("layers=8", "stack.0.repeat", 8),
        ("stack.0.blocks.0.ffn.hidden=1024", f"{BLOCK}ffn.hidden", 1024),
        ("ffn.hidden=none", f"{BLOCK}ffn.hidden", None),
        ("rope+position.base=1e+5", f"{ATTENTION}position.base", 1e5),
        ("rope+position.base=1e+5+qknorm", f"{ATTENTION}position.base", 1e5),
        ("norm.eps = 1e-3", "final_norm.eps", 1e-3),
        ("head.tied=False", "head.tied", False),
        ("final_norm=none", "final_norm", None),
        ("norm=rmsnorm", "final_norm.kind", "rmsnorm"),
        ("head_dim=64", f"{ATTENTION}head_dim", 64),
        ("mixer.out_bias=true", f"{ATTENTION}out_bias", True),
        ("visibility=bidirectional", f"{ATTENTION}visibility.kind", "bidirectional"),
        ("context=64", "context", 64),
        ("init=xavier+init.gain=2", "init.gain", 2.0),
        ("norm.eps=1e-3+norm.kind=rmsnorm", "final_norm.eps", 1e-3),
        ("norm.kind=layernorm+norm.kind=rmsnorm", f"{BLOCK}norm.unit_offset", False),
        ("hidden=96+ffn.kind=glu", f"{BLOCK}ffn.hidden", 96),
        ("ffn.kind=glu", f"{BLOCK}ffn.activation", "gelu_tanh"),
        ("init.kind=xavier", "init.gain", 1.0),
        ("rope+mixer.position.kind=alibi", f"{ATTENTION}position.kind", "alibi"),
        ("retention+mixer.decays=[0.9, .99,0.95,0.5]", f"{ATTENTION}decays.1", 0.99),
    ],
)
def test_paths_set_values(text: str, path: str, value: object):
    from glassformer.config import flatten

    tree = flatten(preset(f"gpt2@1m+{text}").to_dict())
    assert tree.get(path) == value if value is not None else path not in tree or tree[path] is None


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("", "empty"),
        ("   ", "empty"),
        ("gtp2", "'gpt2'"),
        ("lama@1m", "'llama'"),
        ("zzzz", "known:"),
        ("@1m", "'@1m' names no model; start with one, such as llama@10m"),
        ("+rope", "'+rope' names no model"),
        ("llama@1m+é", "'+é' is not a change"),
        ("llama@1m+ rope", "'+ rope' is not a change"),
        ("llama+é", "'+é' is not a change"),
        ("llama@1m+layers=true", "stack.0.repeat=True: must be a number"),
        ("llama@1m+norm.eps=false", "norm.eps=False: must be a number"),
        ("llama@1m+head_dim=true", "head_dim=True: must be a number"),
        ("llama@1m+norm.kind=groupnorm", "unknown norm kind groupnorm"),
        ("gpt2@", "size"),
        ("gpt2@2x", "sizes are 1m"),
        ("gpt2@2000000", "no size is named"),
        ("gpt2@1k", "from 10k to 100b parameters"),
        ("gpt2@1m+", "plus"),
        ("gpt2@1m+rop", "'rope'"),
        ("gpt2@1m+qqqq", "path=value"),
        ("gpt2@1m+rope:3", "takes no value"),
        ("gpt2@1m+gqa", "gqa:2"),
        ("gpt2@1m+gqa:", "gqa:2"),
        ("gpt2@1m+qknorm:", "+qknorm: has a colon without a value"),
        ("gpt2@1m+swiglu:", "+swiglu: has a colon without a value"),
        ("gpt2@1m+layers.foo=3", "layers.foo=3: layers is a number"),
        ("gpt2@1m+layers.=3", "layers.=3: layers is a number"),
        ("gpt2@1m+position.=none", "position."),
        ("gpt2@1m+gqa:0", "from 1 up"),
        ("gpt2@1m+gqa:3", "n_kv_heads=3 does not divide n_heads=4; use 1, 2 or 4"),
        ("gpt2@1m+gqa:x", "gqa:x"),
        ("gpt2@1m+window:-1", "window:-1"),
        ("gpt2@1m+softcap:0", "above 0"),
        ("gpt2@1m+sigmareparam:0", "above 0"),
        ("gpt2@1m+branch_scale:2", "takes no value"),
        ("gpt2@1m+mup:0", "from 1 up"),
        ("gpt2@1m+mup:wide", "mup:wide"),
        ("gpt2@1m+mup.base_width=64", "no mup"),
        ("gpt2@1m+softcap:nan", "above 0"),
        ("gpt2@1m+softcap:many", "not a number"),
        ("gpt2@1m+dropout:1", "dropout:1"),
        ("gpt2@1m+qknorm:half", "qknorm:full"),
        ("gpt2@1m+swiglu:big", "swiglu:big"),
        ("gpt2@1m+norm.epss=1", "'eps'"),
        ("gpt2@1m+nrom.eps=1", "'norm'"),
        ("gpt2@1m+norm.eps=-1", "greater than 0"),
        ("gpt2@1m+layers=0", "stack.0.repeat=0"),
        ("gpt2@1m+layers=1e9", "stack.0.repeat"),
        ("gpt2@1m+layers=2.5", "stack.0.repeat=2.5"),
        ("gpt2@1m+vocab_size=1e13", "vocab_size"),
        ("gpt2@1m+stack.7.repeat=2", "index below 1"),
        ("gpt2@1m+stack.x.repeat=2", "index below 1"),
        ("gpt2@1m+d_model.x=2", "plain value"),
        ("gpt2@1m+position.base=2", "no position"),
        ("gpt2@1m+norm.x.y=3", "no field"),
        ("gpt2@1m+norm.=3", "norm"),
        ("gpt2@1m+norm=", "norm"),
        ("gpt2@1m+layers=[2,3]", "stack.0.repeat"),
        ("gpt2@1m+retention+mixer.decays=0.9", "decays=0.9: give a list, such as [1, 2]"),
        ("gpt2@1m+retention+mixer.decays=[0.9]", "1 numbers for 4 heads"),
        ("gpt2@1m+retention+mixer.decays=[0.9,1,0.5,0.5]", "decays.1=1: input should be less than 1"),
        ("gpt2@1m+retention+mixer.decays=[]", "0 numbers for 4 heads"),
        ("no/such/file.yaml", "no file"),
        ("no/such/file.yaml+rope", "no file"),
        ("hf:nothing", "write hf:owner/name"),
    ],
)
def test_invalid_expression_is_refused_in_a_sentence(expression: str, words: str):
    with pytest.raises(RequestError) as refused:
        preset(expression)
    message = str(refused.value)
    assert words in message and "\n" not in message and len(message) < 700


# Files and folders as names


def test_a_file_is_a_name(tmp_path: Path):
    config = preset("gpt2@1m+rope")
    for name in ("plain.yaml", "with+plus.json", "with@at.yml", "a+rope.yaml"):
        config.save(tmp_path / name)
        assert preset(str(tmp_path / name)) == config
        assert preset(f"{tmp_path / name}+qknorm") == preset("gpt2@1m+rope+qknorm")
        assert preset(f"{tmp_path / name}@3m+swiglu") == preset("gpt2@3m+rope+swiglu")


def test_a_path_is_a_name_and_nothing_else_is(tmp_path: Path):
    preset("gpt2@1m").save(tmp_path / "with+plus.json")
    assert preset(tmp_path / "with+plus.json") == preset("gpt2@1m")
    for wrong in (None, 5, b"gpt2", preset("gpt2@1m"), ["gpt2"]):
        for read in (preset, load):
            with refused(code="type", field="expression"):
                read(wrong)  # type: ignore[arg-type]


def test_a_run_folder_is_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = preset("llama@1m")
    folder = tmp_path / "run+1@x"
    folder.mkdir()
    with refused(code="missing", field="name"):
        preset(str(folder))
    config.save(folder / "config.yaml")
    assert preset(str(folder)) == config and preset(f"{folder}@3m") == preset("llama@3m")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()  # a folder does not hide a preset
    assert preset("gpt2@1m") == PRESETS_GPT2
    assert preset("run+1@x+mqa") == preset("llama@1m+mqa")


def test_folder_does_not_hide_a_model_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("gpt2@1m", "gpt2@1m+rope", "gpt2@1m-seed0", "gpt2@1m+run2"):
        (tmp_path / name).mkdir()
        preset("llama@1m").save(tmp_path / name / "config.yaml")
    for name in ("gpt2@1m", "gpt2@1m+rope"):
        assert preset(name).vocab_size == 50257 and preset(f"./{name}") == preset("llama@1m")
    for name in ("gpt2@1m-seed0", "gpt2@1m+run2"):  # that name nothing else
        assert preset(name) == preset("llama@1m") and preset(f"{name}+mqa") == preset("llama@1m+mqa")
    with pytest.raises(RequestError, match=r"the folder here is \./gpt2@1m$"):
        load("gpt2@1m")


@pytest.mark.parametrize("name", ["@1m", "+rope", "@1m+rope"])
def test_an_empty_name_is_not_the_current_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    preset("llama@1m").save(tmp_path / "config.yaml")
    with refused(code="missing", field="name"):
        preset(name)
    assert preset(".") == preset("llama@1m")


def test_other_kind_of_a_part_keeps_common_fields():
    llama = preset("llama@1m+norm.eps=1e-3+norm.kind=layernorm")
    assert llama == preset("llama@1m+norm.eps=1e-3+layernorm")
    assert preset("llama@1m+ffn.kind=mlp").stack[0].blocks[0].ffn == MlpConfig(activation="silu", bias=False)
    assert preset("llama@1m+norm.kind=rmsnorm+ffn.kind=glu+init.kind=gpt2") == preset("llama@1m")
    assert preset("llama@1m+init.kind=xavier") == preset("llama@1m+init=xavier")


def test_kinds_are_distinguished_by_their_fields():
    """`of_kind` finds the axis of a plain part by its kind and fields."""
    seen = [(known.kind, frozenset(known.model_fields)) for known in _CLASSES]
    axes = {}
    for known, key in zip(_CLASSES, seen, strict=True):
        assert axes.setdefault(key, known.axis) == known.axis


# What an EXPR says of the training


def test_a_schedule_comes_with_its_own_fields():
    plain = Recipe.of(tokens=1)
    noam = with_recipe(plain, {"schedule": "noam", "warmup": "100"})
    assert noam.schedule == NoamConfig(warmup=100) and noam.replace(schedule=plain.schedule) == plain
    assert with_recipe(plain, {"warmup": "100", "schedule.kind": "noam"}) == noam
    assert with_recipe(plain, {"schedule": "wsd", "schedule.decay": "0.3"}).schedule == WsdConfig(decay=0.3)
    assert with_recipe(plain, {"tokens": "none", "minutes": "2"}).minutes == 2
    with refused(code="unknown", field="schedule"):
        with_recipe(plain, {"schedule": "cosin", "schedule.floor": "0"})


@pytest.mark.parametrize("wish", [{"betas.0": "2"}, {"betas.0": "-1"}, {"betas.1": "1"}, {"betas.1": "true"}])
def test_betas_are_bounded(wish: dict[str, str]):
    (path,) = wish
    with refused(code="range", field=f"optimizer.{path}"):
        with_recipe(Recipe.of(tokens=1), wish)
    assert with_recipe(Recipe.of(tokens=1), {"betas.0": "0", "betas.1": "0.999"}).optimizer.betas == (0, 0.999)


PRESETS_GPT2 = preset("gpt2@1m")


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("gpt2", ("gpt2", None, [])),
        (" gpt2@10m+rope+gqa:2 ", ("gpt2", "10m", ["rope", "gqa:2"])),
        ("llama+position.base=1e+6+mqa", ("llama", None, ["position.base=1e+6", "mqa"])),
        ("llama-3-8b@1m", ("llama-3-8b", "1m", [])),
    ],
)
def test_parsing(expression: str, expected: tuple):
    assert parse(expression) == expected


# Anything at all

WORDS = st.sampled_from(
    [
        *FAMILIES,
        "gpt2",
        "@1m",
        "@10m",
        "@",
        "+",
        ":",
        "=",
        ".",
        *(f"+{name}" for name in TOUCHES),
        "layers",
        "1e400",
        "-1",
        "nan",
        "inf",
        "none",
        "true",
        "0",
        "2",
        "9" * 30,
        "stack",
        "norm",
        "eps",
        "mixer",
        "position",
        "/",
        "~",
        "..",
        "\\",
        " ",
        "hf:",
        ".yaml",
        ".gguf",
        "kind",
        "qk_norm",
        "ffn",
        "=none",
        "=rotary",
        "\n",
        "\x00",
        "é",
        "٣",
        "[",
        "*",
    ]
)


def taken_or_refused(expression: str) -> None:
    try:
        preset(expression)
    except RequestError as refused:
        assert str(refused)


LONG = {
    "name": "a" * 5000,
    "file": "a" * 300 + ".yaml",
    "path": "x/" * 3000,
    "expression": "gpt2@1m" + "+rope" * 1000,
    "whole number": "gpt2@1m+gqa:" + "9" * 5000,
    "number": "gpt2@1m+dropout:" + "9" * 5000,
    "index": "gpt2@1m+stack." + "9" * 5000 + ".repeat=1",
    "value": "gpt2@1m+d_model=" + "9" * 5000,
    "width": "gpt2@1m+swiglu:" + "9" * 30,
    "window": "gpt2@1m+window:" + "9" * 30,
    "heads": "gpt2@1m+gqa:" + "9" * 30,
    "cap": "gpt2@1m+softcap:" + "9" * 300,
    "size": "gpt2@" + "9" * 5000,
}


@pytest.mark.parametrize("what", LONG)
def test_long_text_is_taken_or_refused(what: str):
    taken_or_refused(LONG[what])


def test_a_thousand_changes_are_one_change():
    assert preset("gpt2@1m" + "+rope" * 40) == preset("gpt2@1m+rope")


@settings(max_examples=150)
@given(st.text(max_size=40))
@example("\ud800")
@example("/\x00")
def test_any_text_is_taken_or_refused(expression: str):
    taken_or_refused(expression)


@settings(max_examples=150)
@given(st.lists(WORDS, max_size=8).map("".join))
def test_any_words_are_taken_or_refused(expression: str):
    taken_or_refused(expression)


@settings(max_examples=150)
@given(
    st.sampled_from(["gpt2@1m", "llama@1m", "falcon@1m", "qwen3@1m"]),
    st.lists(
        st.sampled_from(
            [
                *TOUCHES,
                "init.std=-1",
                "norm.eps=0.5",
                "ffn=none",
                "final_norm=none",
                "mixer=none",
                "norm=none",
                "residual=post",
                "embedding=none",
                "stack=none",
                "stack.0=none",
                "kernel=flex",
                "mixer.qk_norm=none",
                "position.base=100",
                "qk_norm.over=full",
                "ffn.bias.x=1",
                "position=none",
                "head=none",
                "init=none",
            ]
        ),
        max_size=5,
    ),
)
def test_any_changes_are_taken_or_refused(model: str, some: list[str]):
    taken_or_refused("+".join([model, *some]))


# Experts


@pytest.mark.parametrize("family", ["llama@1m", "gpt2@1m", "gpt2@1m+geglu", "llama@1m+swiglu:512"])
@pytest.mark.parametrize(("n_experts", "top_k"), [(4, 1), (8, 2), (16, 4)])
def test_experts_keep_the_ffns_kind_and_active_width(family: str, n_experts: int, top_k: int) -> None:
    dense, config = preset(family), preset(f"{family}+moe:{n_experts}:{top_k}")
    old, ffn = dense.stack[0].blocks[0].ffn, config.stack[0].blocks[0].ffn
    assert isinstance(ffn, ExpertsConfig) and (ffn.n_experts, ffn.top_k) == (n_experts, top_k)
    assert (ffn.activation, ffn.bias) == (old.activation, old.bias)  # type: ignore[union-attr]
    assert ffn.gated == (old.kind == "glu")  # type: ignore[union-attr]
    whole, part = old.width(dense.ctx), ffn.width(config.ctx)  # type: ignore[union-attr]
    assert part == whole if top_k == 1 else whole <= top_k * part < whole + 8 * top_k
    rest = {name: value for name, value in dense.diff(config).items() if ".ffn" not in name}
    assert not rest


def test_the_width_of_experts_can_be_given_and_follows_the_size() -> None:
    mixtral = preset("llama@1m+moe:8:2:352")
    assert mixtral.stack[0].blocks[0].ffn.hidden == 352  # type: ignore[union-attr]
    again = preset("llama@1m+moe:8:2:352+moe:4:1")
    assert again == preset("llama@1m+moe:4:1")
    sized, dense = preset("llama@10m+moe:8:2"), preset("llama@10m")
    assert abs(sized.active_params(embeddings=False) / dense.num_params(embeddings=False) - 1) < 0.02
    assert preset("llama@1m+moe:8:2+ffn.n_shared=2").stack[0].blocks[0].ffn.width(sized.ctx) == 256  # type: ignore[union-attr]


def test_later_changes_reach_experts_and_leave_them_experts() -> None:
    config = preset("llama@1m+moe:4:2:352+gelu+bias+ffn.score=sigmoid+ffn.z_loss=0.001")
    ffn = config.stack[0].blocks[0].ffn
    assert isinstance(ffn, ExpertsConfig)
    assert (ffn.gated, ffn.activation, ffn.bias, ffn.score, ffn.z_loss) == (False, "gelu", True, "sigmoid", 0.001)
    assert ffn.hidden == 528 and ffn.n_experts == 4  # two matrices of 3/2 the width for three
    assert preset("llama@1m+moe:4:2+swiglu:64").stack[0].blocks[0].ffn.hidden == 64  # type: ignore[union-attr]
    for word in ("moe:8:2", "expert_choice:8:2"):
        assert preset(f"gpt2@1m+{word}+swiglu") == preset(f"gpt2@1m+swiglu+{word}")


def test_layers_share_keys_and_values():
    """In each group of layers the first is the KV source; the reusers have neither state nor projections."""
    owner, taker = ["attention", "shared_attention"]
    assert kinds("llama@1m+share:2") == [owner, taker] * 2
    assert kinds("llama@10m+share:3") == [owner, taker, taker] * 2
    assert kinds("llama@1m+layers=5+share:4") == [owner, taker, taker, taker, owner]
    plain, shared = preset("llama@10m+gqa:2"), preset("llama@10m+gqa:2+share:2")
    assert shared.state_bytes(100) * 2 == plain.state_bytes(100)
    width = plain.d_model
    maps = next(plain.layers()).mixer.heads(plain.ctx)
    assert maps is not None and plain.num_params() - shared.num_params() == 3 * 2 * width * 2 * maps.head_dim
    assert preset("llama@10m+share:2+gqa:2") == shared
    assert preset("qwen3@1m+share:2").stack[0].blocks[1].mixer.q_norm is not None  # type: ignore[attr-defined]
    for change in ("sinks", "qknorm", "mqa", "alibi", "window:8", "dropout:0.2", "bias"):  # of all layers, either way
        changed = preset(f"llama@1m+{change}+share:2")
        assert preset(f"llama@1m+share:2+{change}") == changed != preset("llama@1m+share:2")
    assert all(block.mixer.sinks for block in preset("llama@1m+share:2+sinks").layers())  # type: ignore[attr-defined]
    translator = preset("transformer@1m+share:2")
    assert {block.mixer.kind for block in translator.layers()} == {owner, taker, "cross_attention"}
    assert translator.encoder == preset("transformer@1m").encoder


@pytest.mark.parametrize(
    ("changes", "code", "field"),
    [
        ("share:1", "range", "share"),
        ("share", "missing", "share"),
        ("layers=1+share:2", "range", "share"),
        ("mla+share:2", "unsupported", "layers.0.mixer"),
        ("share:2+mla", "unsupported", "layers.0.mixer"),
        ("gain+share:2", "conflict", "mixer.gain_control"),
        ("softcap:50+share:2", "conflict", "mixer.softcap"),
        ("share:2+gain", "conflict", "mixer.gain_control"),
        ("share:2+softcap:50", "conflict", "mixer.softcap"),
        ("share:2+qknorm:full", "conflict", "mixer.qk_norm"),
        ("qknorm:full+share:2", "conflict", "mixer.qk_norm"),
        ("share:2+share:3", "unsupported", "layers.3.mixer"),
        ("stack:window:8,causal+share:2", "conflict", "mixer.visibility"),
        ("stack:share:2", "range", "share"),
        ("mamba+share:2", "unsupported", "layers.0.mixer"),
        (
            "longformer:16:2+visibility.causal=false+mixer.kind=global_attention+share:2",
            "unsupported",
            "layers.0.mixer",
        ),
    ],
)
def test_keys_that_cannot_be_shared_are_refused(changes: str, code: str, field: str):
    with refused(code=code, field=field) as caught:
        preset(f"llama@1m+{changes}")
    assert "\n" not in str(caught.value)


def test_scales_that_follow_the_width_do_so_at_every_size() -> None:
    """sqrt(d) of embeddings (1706.03762, 3.4; Gemma), 1 / sqrt(d) of a tied T5's logits; other scales stay."""
    for name, of in (("transformer", "embedding"), ("opus-mt", "embedding"), ("gemma-2-2b", "embedding")):
        assert getattr(preset(f"{name}@3m"), of).scale == pytest.approx(math.sqrt(256)), name
    assert preset("transformer@3m").encoder.embedding.scale == pytest.approx(math.sqrt(256))
    assert preset("t5-small@3m").head.scale == pytest.approx(1 / math.sqrt(256))
    assert preset("llama@3m").embedding.scale is None


# Two changes, one after the other


def set_by(base: str, change: str) -> dict[str, object]:
    """Returns {path: value} of the fields that a change sets in a model."""
    return {path: new for path, (_, new) in preset(base).diff(preset(f"{base}+{change}")).items() if new is not None}


def both(base: str, first: str, second: str) -> tuple[dict[str, object], list[str]] | None:
    """Returns (the flattened config after both changes, the warnings); None if the second is refused."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            config = preset(f"{base}+{first}+{second}")
        except RequestError:
            return None
    return flatten(config.to_dict()), [str(one.message) for one in caught if one.category is Undone]


BASES = ("gpt2@1m", "llama@1m")
PAIRED = {name: "" if word.read is None or word.optional else f":{word.example}" for name, word in own_words().items()}
SIZES_OF = ("hidden", "multiple_of", "n_heads", "scale")
"""Fields that follow from others: a matched width, heads of a kind, the scale of tokens with sinusoids."""
ALSO_SETS: dict[str, dict[str, object]] = {"spans": {"head.pool": None}}
"""Values that a word sets and that the bases have without it."""
APART = {"stack", "beside", "share"}
"""Words that make other blocks or mixers of those there: what an earlier or a later word sets is in each of them."""


def is_kept(config: dict[str, object], path: str, chosen: object) -> bool:
    """Returns True if a model has a value, or one that follows from others. Experts have the gate of a GLU as a field,
    which a later FFN sets by its kind. Some norms follow the blocks': a wiring whose blocks end in a norm has no final
    one, and a norm of the embedding has the same kind."""
    gated = {"glu": True, "mlp": False}.get(str(chosen)) if path.endswith("ffn.kind") else None
    if gated is not None and config.get(path.replace("ffn.kind", "ffn.gated")) is gated:
        return True
    if path.startswith("embedding.norm"):
        return config.get("embedding.norm.kind") is not None
    follows = path.rpartition(".")[2] in SIZES_OF or path.startswith("final_norm") or path.endswith("ffn.gated")
    return follows or config.get(path) == chosen


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("first", [name for name in PAIRED if name not in APART])
def test_values_set_by_a_change_stay_or_warn(base: str, first: str) -> None:
    """Each value that the first change sets is there after the second; or the second sets it too, or has refused, or
    warns. The values come from models of one change."""
    first += PAIRED[first]
    bases = [other for other in BASES if first not in REFUSES[other]]
    if base not in bases:
        pytest.skip("the model has no such part")
    mine = set_by(base, first) | ALSO_SETS.get(first, {})
    elsewhere = {path: new for other in bases for path, new in set_by(other, first).items()}
    for name, value in PAIRED.items():
        second = name + value
        if name in APART or (found := both(base, first, second)) is None:
            continue
        config, warned = found
        gone = {path for path, chosen in mine.items() if not is_kept(config, path, chosen)}
        assert not gone or warned, (first, second, gone)
        norm = config.get("embedding.norm.kind")
        assert norm in (None, config["stack.0.blocks.0.norm.kind"]), (first, second)
        if mine and not gone and all(is_kept(config, path, chosen) for path, chosen in elsewhere.items()):
            assert f"+{second} undoes +{first}" not in warned, (first, second)


@pytest.mark.parametrize("base", ["gpt2@1m", "llama@1m", "qwen3@1m", "mistral@1m", "bert@1m"])
@pytest.mark.parametrize(
    "word",
    [name for name, (w, part) in DECLARED.items() if part.axis == "mixer" and not w.change and not is_outside(part)],
)
def test_new_mixer_keeps_common_fields_and_names_lost_ones(base: str, word: str) -> None:
    """Fields of both kinds are as they were; fields of the old one only are named."""
    change = word + PAIRED.get(word, "")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            new = next(preset(f"{base}+{change}").layers()).mixer
        except RequestError as refusal:
            assert refusal.code in ("conflict", "causal")
            return
    old = next(preset(base).layers()).mixer
    warned = " ".join(str(one.message) for one in caught)
    for name, field in type(old).model_fields.items():
        value = getattr(old, name)
        if word == "beside" or name in ("n_heads", "head_dim", "kernel", "projection") or value == field.default:
            continue
        if name in type(new).model_fields:
            assert getattr(new, name) == value, name
        else:
            assert f"{name}=" in warned, name


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ("layers=2+layers=1", ["+layers=1 undoes +layers=2"]),
        ("rope+position.kind=alibi", ["+position.kind=alibi undoes +rope"]),
        ("rmsnorm+norm.eps=1e-3", []),
        ("init=gpt2+init.std=0.3", []),
        ("norm.eps=1e-3+norm.eps=1e-4", ["+norm.eps=1e-4 undoes +norm.eps=1e-3"]),
        ("moe:4:2+swiglu:64", []),
        ("expert_choice:4:2+swiglu:64", []),
        ("moe:4:2+moe:8:2", ["+moe:8:2 undoes +moe:4:2"]),
    ],
)  # fmt: skip
def test_a_field_of_a_part_undoes_no_choice_of_the_part(changes: str, said: list[str]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        preset(f"gpt2@1m+{changes}")
    assert [str(one.message) for one in caught if one.category is Undone] == said


def test_short_name_of_a_user_kind_selects_that_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A subclass of attention with one other default is attention in all else."""
    monkeypatch.setattr(part_base, "_CLASSES", list(_CLASSES))

    class SoftConfig(AttentionConfig, kind="soft_attention", words="softly"):
        softcap: float | None = 30.0

    try:
        for model in ("llama@1m", "gpt2@1m", "llama@1m+gqa:2+window:64+qknorm", "qwen3@1m", "mistral@1m"):
            given, made = (next(preset(name).layers()).mixer for name in (model, f"{model}+softly"))
            assert type(made) is SoftConfig and dict(made) == {**dict(given), "softcap": 30.0}
        assert preset("llama@1m+softly+gqa:2") == preset("llama@1m+gqa:2+softly")
    finally:
        DECLARED.pop("softly")


# Context extension


STRETCHED = {
    "interpolate": lambda theta, i, s: theta / s,
    "ntk": lambda theta, i, s: (10000.0 * s ** (32 / 30)) ** (-2 * i / 32),
}
"""theta_i of 2306.15595 and of bloc97's post, for heads of 32 values and base 10,000."""


@pytest.mark.parametrize("word", STRETCHED)
def test_extension_stretches_frequencies_as_published(word: str) -> None:
    config = preset(f"llama@1m+context=64+{word}:8")
    assert config.context == 512
    rotary = next(config.layers()).mixer.position.build(config.ctx.within(n_heads=4, head_dim=32))  # type: ignore[attr-defined]
    wanted = [STRETCHED[word](10000.0 ** (-2 * i / 32), i, 8) for i in range(16)]
    assert rotary.frequencies(512).tolist() == pytest.approx(wanted, rel=1e-5)


def test_extension_counts_from_the_trained_context() -> None:
    """Also if it is set before the word, or another extension comes first."""
    for changes in ("context=64+yarn:4", "context=64+yarn:2+yarn:4", "context=64+ntk:8+yarn:4"):
        config = preset(f"llama@1m+{changes}")
        scaling = next(config.layers()).mixer.position.scaling  # type: ignore[attr-defined]
        assert (config.context, scaling.kind, scaling.factor, scaling.original_context) == (256, "yarn", 4.0, 64)


def test_extension_leaves_layers_with_a_near_window() -> None:
    """Gemma 3's local layers meet no distance that they have not met; its global ones do (2503.19786, section 2)."""
    config = preset("gemma-3-1b+interpolate:4")
    for block in config.layers():
        far = block.mixer.reach(config.ctx) is None
        assert (block.mixer.position.scaling is not None) == far  # type: ignore[attr-defined]
    every = preset("llama@1m+context=64+window:16+interpolate:4")
    assert all(block.mixer.position.scaling for block in every.layers())  # type: ignore[attr-defined]


@pytest.mark.parametrize("change", ["interpolate:2", "ntk:2", "dynamic_ntk:2", "yarn:2"])
@pytest.mark.parametrize("model", ["gpt2@1m", "mpt@1m", "t5@1m", "llama@1m+nope"])
def test_extension_is_of_rotary_positions(model: str, change: str) -> None:
    with refused(code="unsupported", field="position"):
        preset(f"{model}+{change}")


@pytest.mark.parametrize(
    ("change", "code"), [("yarn", "missing"), ("yarn:0.5", "range"), ("yarn:x", "type"), ("yarn:inf", "range")]
)
def test_extension_takes_a_factor_of_one_or_more(change: str, code: str) -> None:
    with refused(code=code, field="yarn"):
        preset(f"llama@1m+{change}")


def test_missing_scaling_names_its_words() -> None:
    with refused(code="missing", field="position.scaling.kind") as caught:
        preset("llama@1m+position.scaling.kind=linear")
    assert all(f"+{word}:4" in str(caught.value) for word in ("interpolate", "ntk", "dynamic_ntk", "yarn"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [("context=64+yarn:4", 0), ("yarn:4+context=64", 1), ("yarn:4+ntk:4", 1), ("yarn:4+alibi", 1), ("yarn:4", 0)],
)
def test_extension_warns_of_undone_changes(changes: str, said: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        preset(f"llama@1m+{changes}")
    assert len([one for one in caught if one.category is Undone]) == said


def test_shorter_context_of_a_scaled_model_warns() -> None:
    with pytest.warns(Undone) as said:
        config = preset("llama-3.2-1b+yarn:4")
    assert config.context == 32768 and "32,768" in str(said[0].message)


# Another width


def warned(expression: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        preset(expression)
    return [str(one.message) for one in caught if one.category is Undone]


@pytest.mark.parametrize("name", [*PRESETS, *FAMILIES])
def test_sizes_of_every_family_follow_a_width_as_at_a_size(name: str) -> None:
    """Six heads of 64, set by fields, are the parts of @10m; and a size that was written for the old width is named."""
    sized = preset(f"{name}@10m")
    heads = [f"{field}={value}" for field, value in heads_of(sized).items()]
    expression = "+".join([name, "d_model=384", *heads])
    wide = preset(expression)
    assert [stage.blocks for stage in wide.stack] == [stage.blocks for stage in sized.stack]
    assert (wide.embedding, wide.head) == (sized.embedding, sized.head)
    if wide.encoder is not None and sized.encoder is not None:
        assert [stage.blocks for stage in wide.encoder.stack] == [stage.blocks for stage in sized.encoder.stack]
    written = [block.ffn.hidden for block in preset(name).layers() if block.ffn is not None]
    assert bool([one for one in warned(expression) if "ffn.hidden" in one]) == any(written)


def heads_of(config: ModelConfig) -> dict[str, int]:
    """Numbers of heads that fields set, of the first mixer that has each."""
    found: dict[str, int] = {}
    for block in config.layers():
        for field in ("n_kv_heads", "n_v_heads", "n_heads"):
            if (value := getattr(block.mixer, field, None)) is not None:
                found.setdefault(f"mixer.{field}", value)
    return found


def test_the_guides_config_by_its_fields_has_its_size() -> None:
    """6 layers of 12 d^2 + 2 d, d = 384, f = 8/3 d; one table of 50,257 rows; a norm: by hand."""
    config = preset("llama+layers=6+heads=6+d_model=384+vocab_size=50257+tied")
    assert config.num_params() == 6 * (12 * 384**2 + 2 * 384) + 50257 * 384 + 384 == 29_920_512


def test_a_size_that_is_set_stays_at_another_width() -> None:
    for changes in ("hidden=1000+d_model=384+heads=6", "d_model=384+heads=6+hidden=1000"):
        config = preset(f"llama+{changes}")
        assert next(config.layers()).ffn.hidden == 1000  # type: ignore[union-attr]
        assert not warned(f"llama+{changes}")
    assert preset("llama+d_model=4096") == preset("llama") and not warned("gpt2+d_model=384+heads=6")
