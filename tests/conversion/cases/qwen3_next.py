from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.conversion.cases.base import CONTEXT, VOCAB, Case, merged


@st.composite
def fields(draw: st.DrawFn) -> dict[str, Any]:
    layers, kv, keys = draw(st.integers(2, 4)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    kinds = st.sampled_from(["linear_attention", "full_attention"])
    types = draw(st.lists(kinds, min_size=layers, max_size=layers))
    return {
        "vocab_size": VOCAB,
        "hidden_size": draw(st.sampled_from([24, 36])),
        "intermediate_size": 20,
        "num_hidden_layers": layers,
        "num_attention_heads": kv * draw(st.integers(1, 2)),
        "num_key_value_heads": kv,
        "head_dim": 8,
        "max_position_embeddings": CONTEXT,
        "layer_types": ["linear_attention", *types[1:-1], "full_attention"],  # their cache wants one
        "attention_bias": draw(st.booleans()),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * draw(st.integers(1, 3)),
        "linear_key_head_dim": draw(st.sampled_from([4, 6])),
        "linear_value_head_dim": draw(st.sampled_from([5, 6])),
        "linear_conv_kernel_dim": draw(st.integers(2, 4)),
        "rms_norm_eps": draw(st.sampled_from([1e-4, 1e-2])),  # the norm of a z near zero makes much of fp32's noise
        "rope_parameters": {
            "rope_type": "default", "rope_theta": draw(st.sampled_from([50.0, 1e4])),
            "partial_rotary_factor": draw(st.sampled_from([0.25, 0.5])),
        },
        "num_experts": draw(st.sampled_from([2, 3, 5])),
        "num_experts_per_tok": draw(st.integers(1, 2)),
        "moe_intermediate_size": draw(st.sampled_from([8, 12])),
        "shared_expert_intermediate_size": draw(st.sampled_from([8, 20])),
        "norm_topk_prob": draw(st.booleans()),
        "decoder_sparse_step": draw(st.integers(1, 2)),
        "mlp_only_layers": draw(st.lists(st.integers(0, layers - 1), unique=True, max_size=1)),
        "tie_word_embeddings": draw(st.booleans()),
    }  # fmt: skip


CASE = Case(
    "Qwen3NextForCausalLM", fields(), quiet=("out_proj", "o_proj", "down_proj"), loud=1.0,
    gather=lambda named: merged(named, "mlp.", "gate_proj", "up_proj", "down_proj"),
)  # fmt: skip
