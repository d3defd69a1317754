from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.conversion.cases.base import CONTEXT, VOCAB, Case, merged


@st.composite
def fields(draw: st.DrawFn) -> dict[str, Any]:
    groups = draw(st.integers(1, 2))
    n = groups * draw(st.integers(1, 2))
    attends, routed = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    offset = draw(st.integers(0, attends))
    layers = draw(st.integers(max(2, offset + 1), 4))  # their cache wants a layer that attends
    said = {
        "vocab_size": VOCAB,
        "hidden_size": n * draw(st.sampled_from([8, 12])),
        "intermediate_size": draw(st.sampled_from([16, 28])),
        "num_hidden_layers": layers,
        "num_attention_heads": n,
        "num_key_value_heads": groups,
        "max_position_embeddings": CONTEXT,
        "mamba_d_state": draw(st.sampled_from([5, 8])),
        "mamba_d_conv": draw(st.integers(2, 4)),
        "mamba_expand": draw(st.integers(1, 2)),
        "mamba_dt_rank": draw(st.sampled_from([5, 8])),
        "mamba_proj_bias": draw(st.booleans()),
        "mamba_conv_bias": draw(st.booleans()),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-2])),
        "hidden_act": "silu",
        "num_experts": draw(st.sampled_from([1, 2, 3])),
        "num_experts_per_tok": draw(st.integers(1, 2)),
        "attn_layer_period": attends + 1,
        "attn_layer_offset": offset,
        "expert_layer_period": routed,
        "expert_layer_offset": draw(st.integers(0, routed - 1)),
        "tie_word_embeddings": draw(st.booleans()),
    }
    return said | ({"num_experts_per_tok": 1} if said["num_experts"] == 1 else {})


CASE = Case(
    "JambaForCausalLM", fields(), quiet=("out_proj", "o_proj", "down_proj"), loud=1.0,
    gather=lambda named: _router(merged(named, "feed_forward.", "gate_proj", "up_proj", "down_proj")),
)  # fmt: skip


def _router(named: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("mlp.experts.", "feed_forward.experts."): value for name, value in named.items()}
