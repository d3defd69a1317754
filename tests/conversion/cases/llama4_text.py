from __future__ import annotations

from hypothesis import strategies as st

from tests.conversion.cases.base import Case, llama_like

CASE = Case(
    "Llama4ForCausalLM",
    llama_like(
        head_dim=st.sampled_from([6, 8]),
        hidden_size=st.sampled_from([32, 36]),
        num_hidden_layers=st.sampled_from([2, 4]),
        intermediate_size_mlp=st.sampled_from([20, 24]),
        rms_norm_eps=st.sampled_from([1e-6, 1e-3]),
        hidden_act=st.sampled_from(["silu", "gelu"]),
        attention_bias=st.booleans(),
        num_local_experts=st.sampled_from([2, 3]),
        num_experts_per_tok=st.sampled_from([1, 2]),
        interleave_moe_layer_step=st.sampled_from([1, 2]),
        no_rope_layer_interval=st.sampled_from([2, 4]),
        use_qk_norm=st.booleans(),
        attention_chunk_size=st.sampled_from([5, 8, 100]),
        attn_temperature_tuning=st.booleans(),
        floor_scale=st.sampled_from([3, 8]),
        attn_scale=st.sampled_from([0.1, 0.5]),
    ),
)
