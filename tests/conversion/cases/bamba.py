from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.conversion.cases.base import CONTEXT, VOCAB, Case


@st.composite
def fields(draw: st.DrawFn) -> dict[str, Any]:
    groups, layers = draw(st.integers(1, 2)), draw(st.integers(2, 4))
    expand = draw(st.integers(1, 2))
    kv = draw(st.integers(1, 2))
    return {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": draw(st.sampled_from([16, 28])),
        "num_hidden_layers": layers,
        "num_attention_heads": kv * draw(st.integers(1, 2)),
        "num_key_value_heads": kv,
        "max_position_embeddings": CONTEXT,
        "attn_layer_indices": sorted(draw(st.sets(st.integers(0, layers - 1), min_size=1, max_size=layers - 1))),
        "mamba_n_heads": groups * draw(st.sampled_from([2, 4])),
        "mamba_d_head": "auto",
        "mamba_n_groups": groups,
        "mamba_d_state": draw(st.sampled_from([3, 8])),
        "mamba_d_conv": draw(st.integers(2, 4)),
        "mamba_expand": expand,
        "mamba_proj_bias": draw(st.booleans()),
        "mamba_conv_bias": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-2])),
        "hidden_act": "silu",
        "time_step_limit": draw(st.sampled_from([(0.0, 3.0), (0.3, 0.9)])),
        "rope_parameters": {"rope_type": "default", "rope_theta": draw(st.sampled_from([50.0, 1e4]))},
        "tie_word_embeddings": draw(st.booleans()),
    }  # fmt: skip


CASE = Case("BambaForCausalLM", fields(), quiet=("out_proj", "o_proj", "down_proj"), loud=1.0)
