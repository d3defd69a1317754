"""config.json as it is found in the wild: older words and their meaning, absent fields, unsupported fields."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError

import glassformer as gf
from glassformer.conversion.exports import export_target
from glassformer.conversion.families import FAMILIES
from glassformer.conversion.fields import Fields
from glassformer.errors import Code, RequestError
from tests.refused import refused

from .cases import CASES
from .test_parity import close

torch.set_num_threads(1)

SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 24,
}
SHORT, LONG = [1.0, 1.1, 1.2, 1.5, 2.0, 3.0], [1.0, 1.5, 2.0, 4.0, 8.0, 16.0]
OLD: list[tuple[str, dict[str, Any]]] = [
    ("gemma", {"head_dim": 8, "hidden_act": "gelu", "rope_theta": 500.0, "rope_scaling": None}),
    ("gemma", {"head_dim": 8, "hidden_act": "gelu", "hidden_activation": None}),
    ("gemma", {"head_dim": 8, "hidden_activation": "gelu_pytorch_tanh"}),
    ("gemma2", {"head_dim": 8, "hidden_act": "relu", "cache_implementation": "hybrid", "sliding_window": 5}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("gemma3_text", {"rope_local_base_freq": 50.0, "rope_theta": 900.0, "sliding_window": 5}),
    ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window_pattern": 2}),
    ("gemma3_text", {"sliding_window_pattern": 3, "_sliding_window_pattern": 6, "sliding_window": 2}),
    ("phi", {"rope_scaling": {"type": "linear", "factor": 3.0}, "hidden_act": "gelu_new"}),
    ("phi", {"partial_rotary_factor": 1.0, "rope_theta": 100.0, "resid_pdrop": 0.1}),
    ("phi3", {"sliding_window": 5, "rope_scaling": None, "original_max_position_embeddings": 24}),
    *[
        ("phi3", {"original_max_position_embeddings": trained, "rope_scaling":
            {"type": kind, "short_factor": SHORT, "long_factor": LONG}})
        for trained, kind in ((12, "longrope"), (40, "longrope"), (12, "yarn"))
    ],
    ("phi3", {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "partial_rotary_factor": 0.5}),
    ("stablelm", {"hidden_size": 48, "rope_theta": 100.0}),
    ("stablelm", {"hidden_size": 48, "num_key_value_heads": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    ("starcoder2", {"sliding_window": 4, "activation_function": "relu", "layer_norm_epsilon": 0.1,
        "mlp_type": "default", "norm_type": "layer_norm", "rope_theta": 999.5}),
    ("olmo2", {"rope_scaling": None, "rope_theta": 500000, "head_dim": 4}),
    ("cohere", {"model_max_length": 999, "rope_theta": 8000000}),
    ("cohere", {}),
    ("granite", {"rope_scaling": None, "logits_scaling": 8, "residual_multiplier": 1, "attention_multiplier": 0.1}),
    ("granite", {}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "said"), OLD, ids=lambda value: value if isinstance(value, str) else "")
def test_older_words(family: str, said: dict[str, Any], tmp_path: Path) -> None:
    """The class of `transformers` says what they mean."""
    fields = {**SIZES, **said}
    other = CASES[family].model(json.loads(json.dumps(fields)), 0)
    other.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **fields}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine = gf.load(tmp_path, dtype=torch.float32).model
    tokens = torch.randint(61, (2, 29))
    close(mine(tokens), other(tokens).logits, "logits", 2e-5)


YARN = {"rope_type": "yarn", "factor": 2.0, "truncate": False}
REFUSED: list[tuple[str, dict[str, Any], Code, str]] = [
    *[
        (name, {"use_bidirectional_attention": True}, "unsupported", "use_bidirectional_attention")
        for name in ("gemma", "gemma2", "gemma3_text")
    ],
    *[
        (name, {"partial_rotary_factor": 0.5}, "unsupported", "partial_rotary_factor")
        for name in ("llama", "gemma", "gemma2", "starcoder2", "olmo2", "cohere", "granite")
    ],
    ("gemma", {"hidden_activation": "relu"}, "unsupported", "hidden_activation"),
    ("gemma2", {"layer_types": ["chunked_attention"] * 3}, "unknown", "layer_types"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "unsupported", "attn_logit_softcapping"),
    ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 8.0}}, "unsupported", "rope_scaling.type"),
    ("gemma3_text", {"rope_parameters": {"rope_type": "linear", "factor": 8.0}}, "unsupported",
     "rope_parameters.factor"),
    ("gemma3_text", {"rope_parameters": {"full_attention": YARN}}, "unsupported",
     "rope_parameters.full_attention.truncate"),
    ("phi3", {"attention_bias": True}, "unsupported", "attention_bias"),
    ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "unsupported", "rope_scaling.type"),
    ("stablelm", {"head_dim": 10}, "unsupported", "head_dim"),
    ("granite", {"logits_scaling": 0}, "unsupported", "logits_scaling"),
    ("granite", {"attention_multiplier": -1.0}, "range", "scale"),
    ("cohere", {"logit_scale": "big"}, "type", "logit_scale"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "said", "code", "field"), REFUSED)
def test_settings_without_an_exact_equal_are_refused(family: str, said: dict[str, Any], code: Code, field: str) -> None:
    assert FAMILIES[family].config(Fields({**SIZES}))
    with refused(code=code, field=field):
        FAMILIES[family].config(Fields({**SIZES, **said}))


def test_longrope_under_its_first_name() -> None:
    """`transformers` 5 reads it no more."""
    scaling = {"short_factor": SHORT, "long_factor": LONG}
    first, now = (
        FAMILIES["phi3"].config(Fields({**SIZES, "rope_scaling": {"type": kind, **scaling}}))
        for kind in ("su", "longrope")
    )
    assert first == now


def test_factors_of_another_number_are_refused() -> None:
    scaling = {"type": "longrope", "short_factor": SHORT, "long_factor": LONG[:-1]}
    config = FAMILIES["phi3"].config(Fields({**SIZES, "rope_scaling": scaling}))
    with refused(code="range", field="position.scaling.long"):
        config.build()


UNEVEN = {**SIZES, "hidden_size": 22, "num_attention_heads": 3, "head_dim": 8}
UNFIT = "not a multiple of the number of attention|must be divisible by num_heads|normalized_shape|must have length 3"
"""Pattern of the errors of published classes for UNEVEN, raised by their constructor or by a later part."""
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT[:4], "long_factor": LONG[:4], "factor": 2.0}


@pytest.mark.parametrize(
    ("family", "said"),
    [
        *[(name, {}) for name in ("llama", "phi", "phi3", "starcoder2", "stablelm", "olmo2", "cohere", "granite")],
        *[(name, {}) for name in ("gemma", "gemma2", "gemma3_text")],
        ("phi", {"qk_layernorm": True}),
        ("phi3", {"rope_scaling": LONGROPE, "original_max_position_embeddings": 12}),
    ],
)
def test_a_width_that_heads_do_not_divide(family: str, said: dict[str, Any]) -> None:
    """The export is supported if their class takes such a model, and blocked if it refuses."""
    fields = {**UNEVEN, **said}
    try:
        CASES[family].model(json.loads(json.dumps(fields)), 0)(torch.zeros(1, 3, dtype=torch.long))
        takes = True
    except (StrictDataclassClassValidationError, ValueError, RuntimeError) as refusal:
        assert re.search(UNFIT, str(refusal)), refusal
        takes = False
    try:
        mine = export_target(FAMILIES[family].config(Fields(fields)), FAMILIES[family]).supported
    except RequestError:
        mine = False
    assert mine == takes
