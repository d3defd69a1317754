from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.conversion.cases.base import CONTEXT, VOCAB, Case, merged

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12}
ROPES = st.sampled_from(
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        YARN,
        {**YARN, "mscale": 0.707, "mscale_all_dim": 0.9},
        {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    ]
)
"""With the scale of scores that follows from them."""


@st.composite
def deepseek(draw: st.DrawFn, **more: st.SearchStrategy[Any]) -> dict[str, Any]:
    """Returns the fields that all versions share."""
    n = draw(st.sampled_from([1, 2, 3]))
    layers = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 2, 3]))
    return {
        "vocab_size": VOCAB,
        "hidden_size": n * draw(st.sampled_from([12, 16])),
        "intermediate_size": draw(st.sampled_from([16, 28])),
        "moe_intermediate_size": draw(st.sampled_from([8, 12])),
        "num_hidden_layers": layers,
        "first_k_dense_replace": draw(st.integers(0, layers - 1)),
        "num_attention_heads": n,
        "num_key_value_heads": n,
        "q_lora_rank": draw(st.sampled_from([None, 10])),
        "kv_lora_rank": draw(st.sampled_from([6, 12, 20])),
        "qk_nope_head_dim": draw(st.sampled_from([4, 6])),
        "qk_rope_head_dim": draw(st.sampled_from([4, 8])),
        "v_head_dim": draw(st.sampled_from([5, 6])),
        "n_routed_experts": groups * draw(st.sampled_from([2, 3])),
        "n_group": groups,
        "topk_group": draw(st.integers(1, groups)),
        "num_experts_per_tok": draw(st.sampled_from([1, 2])),
        "n_shared_experts": draw(st.sampled_from([1, 2])),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        "attention_bias": draw(st.booleans()),
        "hidden_act": draw(st.sampled_from(["silu", "gelu"])),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-3])),
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": draw(st.booleans()),
        "rope_parameters": {"rope_theta": draw(st.sampled_from([1e4, 5e5])), **draw(ROPES)},
        **{name: draw(strategy) for name, strategy in more.items()},
    }


CASE = Case(
    "DeepseekV2ForCausalLM",
    deepseek(topk_method=st.sampled_from(["greedy", "group_limited_greedy"])),
    loud=1.0,
    gather=lambda named: merged(named, "mlp.", "gate_proj", "up_proj", "down_proj"),
)
